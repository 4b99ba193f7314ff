"""Elementwise methods: the grafts, and what parameters follow that are not preconditioned."""

from abc import abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor

from ..linalg import bias_correction, ema_, per_slot
from .base import Context, Hyper, Stack, State, Transform


class Graft(Transform):
    """An elementwise method. Its direction is ``u / (sqrt(V) + graft_eps)`` if it has a second moment ``V``, else ``u``."""

    reads: ClassVar[frozenset[str]] = frozenset()  # options that mean something to some grafts only, this one among them

    @abstractmethod
    def rates(self, hyper: Hyper) -> tuple[float, float] | None:
        """``(a, b)`` of ``V <- a V + b g^2``; None if there is no ``V``."""

    @abstractmethod
    def correction(self, ctx: Context) -> float | Tensor:
        """What ``V`` is divided by."""


@final
class Sgd(Graft):
    """The filtered gradient itself."""

    def rates(self, hyper: Hyper) -> None:
        return None

    def correction(self, ctx: Context) -> float:
        return 1.0

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Nothing to remember."""

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        return u


class _SecondMoment(Graft):
    """``u / (sqrt(V) + graft_eps)`` with some second moment ``V``."""

    roles = {"v": "graft moment"}  # noqa: RUF012
    sums = "v"
    reads = frozenset({"graft_eps"})

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {"v": stack.zeros(*stack.shape)}

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        v = state["v"].to(u.dtype)
        found = u / (v / per_slot(self.correction(ctx), v)).sqrt_().add_(ctx.hyper.graft_eps)
        return torch.where(v < torch.inf, found, torch.nan)  # not 0, or nobody would see that the moment is not finite


@final
class Adagrad(_SecondMoment):
    """``V <- V + g^2``"""

    def rates(self, hyper: Hyper) -> tuple[float, float]:
        return 1.0, 1.0

    def correction(self, ctx: Context) -> float:
        return 1.0

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        state["v"].add_(grad.square())


class _Average(_SecondMoment):
    """``V <- b V + (1 - b) g^2``"""

    reads = frozenset({"graft_beta2", "graft_eps"})

    def rates(self, hyper: Hyper) -> tuple[float, float]:
        return hyper.graft_beta2, 1 - hyper.graft_beta2

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        ema_(state["v"], grad.square(), ctx.alive * (1 - ctx.hyper.graft_beta2))


@final
class RmsProp(_Average):
    """The average as it is."""

    def correction(self, ctx: Context) -> float:
        return 1.0


@final
class Adam(_Average):
    """The average, corrected for its start at zero: ``V / (1 - b^t)``."""

    def correction(self, ctx: Context) -> float | Tensor:
        return bias_correction(ctx.steps, ctx.hyper.graft_beta2, ctx.alive)


SGD = Sgd()
GRAFTS: dict[str | None, Graft] = {
    "adam": Adam(),
    "rmsprop": RmsProp(),
    "adagrad": Adagrad(),
    "sgd": SGD,
    None: SGD,  # without a graft, elementwise parameters follow the filtered gradient
}
