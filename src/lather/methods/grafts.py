"""Elementwise methods: the grafts, and what parameters follow that are not Kronecker-preconditioned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from ..linalg import ema_, per_slot
from ..options import graft_beta2
from .base import Context, Stack, State, Transform


class Graft(Transform):
    """An elementwise method."""

    @abstractmethod
    def rates(self, group: Mapping[str, Any]) -> tuple[float, float] | None:
        """``(a, b)`` of ``V <- a V + b g^2``; None if there is no ``V``."""

    def correction(self, ctx: Context) -> float | Tensor:
        """What ``V`` is divided by."""
        return 1.0


@final
@dataclass(frozen=True)
class Sgd(Graft):
    """The filtered gradient itself."""

    def rates(self, group: Mapping[str, Any]) -> None:
        return None

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        return {}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Nothing to remember."""

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        return u


class _SecondMoment(Graft):
    """``u / (sqrt(V) + graft_eps)`` with some second moment ``V``."""

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        return {"v": stack.zeros(*stack.shape)}

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        v = state["v"].to(u.dtype)
        return u / (v / per_slot(self.correction(ctx), v)).sqrt_().add_(ctx.group["graft_eps"])


@final
@dataclass(frozen=True)
class Adagrad(_SecondMoment):
    """``V <- V + g^2``"""

    def rates(self, group: Mapping[str, Any]) -> tuple[float, float]:
        return 1.0, 1.0

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        state["v"].add_(grad.square())


class _Average(_SecondMoment):
    """``V <- b V + (1 - b) g^2``"""

    def rates(self, group: Mapping[str, Any]) -> tuple[float, float]:
        return graft_beta2(group), 1 - graft_beta2(group)

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        ema_(state["v"], grad.square(), ctx.weight(graft_beta2(ctx.group)))


@final
@dataclass(frozen=True)
class RmsProp(_Average):
    """The average as it is."""


@final
@dataclass(frozen=True)
class Adam(_Average):
    """Used as ``V / (1 - b^t)``."""

    def correction(self, ctx: Context) -> float | Tensor:
        b = graft_beta2(ctx.group)
        return ctx.correction(lambda t: 1 - b**t)


GRAFTS: dict[str | None, Graft] = {
    "sgd": Sgd(),
    "adagrad": Adagrad(),
    "rmsprop": RmsProp(),
    "adam": Adam(),
    None: Sgd(),  # elementwise parameters without a graft follow the filtered gradient
}
