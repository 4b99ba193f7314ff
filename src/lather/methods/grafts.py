"""Elementwise methods: the grafts, and what parameters follow that are not preconditioned."""

import math
from abc import abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor

from ..linalg import bias_correction, ema_, norms, per_slot
from .base import Context, Hyper, Stack, State, Transform


class Graft(Transform):
    """An elementwise method. Its direction is ``u / (sqrt(V) + graft_eps)`` if it has a second moment ``V``, else ``u``."""

    reads: ClassVar[frozenset[str]] = frozenset()  # options that mean something to some grafts only, this one among them
    rms: ClassVar[float] = 0.0  # the root mean square of the direction, if it is always the same
    elementwise: ClassVar[str | None] = None  # what parameters without factors follow, if not this

    @abstractmethod
    def rates(self, hyper: Hyper) -> tuple[float, float] | None:
        """``(a, b)`` of ``V <- a V + b g^2``; None if there is no ``V``."""

    @abstractmethod
    def correction(self, ctx: Context) -> float | Tensor:
        """What ``V`` is divided by."""


class Stateless(Graft):
    """Remembers nothing."""

    def rates(self, hyper: Hyper) -> None:
        return None

    def correction(self, ctx: Context) -> float:
        return 1.0

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Nothing to remember."""


@final
class Sgd(Stateless):
    """The filtered gradient itself."""

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        return u


@final
class Constant(Stateless):
    """The filtered gradient, scaled to a root mean square of 0.2 per element, which is about that of AdamW's steps."""

    rms = 0.2
    elementwise = "adam"

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        size, length = norms(u), self.rms * math.sqrt(u[:1].numel())
        return u * per_slot(torch.where(size > 0, length / size, 0), u)


class _SecondMoment(Graft):
    """``u / (sqrt(V) + graft_eps)`` with some second moment ``V``."""

    roles = {"v": "graft moment"}  # noqa: RUF012
    sums = "v"
    reads = frozenset({"graft_eps"})

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {"v": stack.zeros(*stack.shape)}

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        v = state["v"].to(u.dtype)
        root = (v / per_slot(self.correction(ctx), v)).sqrt_().add_(ctx.hyper.graft_eps)
        return (u / root).add_(root.sub_(root))  # NaN where the moment is infinite: the quotient is 0, and nobody would see it


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
    "constant": Constant(),
    None: SGD,  # without a graft, elementwise parameters follow the filtered gradient
}
