"""Elementwise methods: the grafts, and what parameters follow that are not Kronecker-preconditioned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from ..linalg import ema_, per_slot
from ..options import graft_beta2
from .base import Context, Stack, State, Transform


@final
@dataclass(frozen=True)
class Sgd(Transform):
    """The filtered gradient itself."""

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        return {}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Nothing to remember."""

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        return u


class _SecondMoment(Transform):
    """``u / (sqrt(V) + graft_eps)`` with some second moment ``V``."""

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        return {"v": stack.zeros(*stack.shape)}

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        v = state["v"].to(u.dtype)
        return u / (v / per_slot(self.correction(ctx), v)).sqrt_().add_(ctx.group["graft_eps"])

    def correction(self, ctx: Context) -> float | Tensor:
        return 1.0


@final
@dataclass(frozen=True)
class Adagrad(_SecondMoment):
    """``V <- V + g^2``"""

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        state["v"].add_(grad.square())


@final
@dataclass(frozen=True)
class RmsProp(_SecondMoment):
    """``V <- b V + (1 - b) g^2``"""

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        ema_(state["v"], grad.square(), ctx.weight(graft_beta2(ctx.group)))


@final
@dataclass(frozen=True)
class Adam(_SecondMoment):
    """``V <- b V + (1 - b) g^2``, used as ``V / (1 - b^t)``."""

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        ema_(state["v"], grad.square(), ctx.weight(graft_beta2(ctx.group)))

    def correction(self, ctx: Context) -> float | Tensor:
        b = graft_beta2(ctx.group)
        return ctx.correction(lambda t: 1 - b**t)


GRAFTS: dict[str | None, Transform] = {
    "sgd": Sgd(),
    "adagrad": Adagrad(),
    "rmsprop": RmsProp(),
    "adam": Adam(),
    None: Sgd(),  # elementwise parameters without a graft follow the filtered gradient
}
