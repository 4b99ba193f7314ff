"""Elementwise methods: the grafts, and what parameters follow that are not preconditioned."""

import math
from abc import abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor

from ..linalg import at_least, bias_correction, diagonal_of, ema_, norms, per_slot
from .base import Context, Hyper, Method, Stack, State, Transform


class Graft(Transform):
    """An elementwise method. Its direction is ``u / (sqrt(V) + graft_eps)`` if it has a second moment ``V``, else ``u``."""

    reads: ClassVar[frozenset[str]] = frozenset()  # options that mean something to some grafts only, this one among them
    rms: ClassVar[float] = 0.0  # the root mean square of the direction, if it is always the same
    elementwise: ClassVar[str | None] = None  # what parameters without factors follow, if not this
    of_factors: ClassVar[bool] = False  # whether it reads the diagonals of factors

    def check(self, method: Method | None) -> None:
        """Raise ValueError for a method that it does not go with."""

    @abstractmethod
    def rates(self, hyper: Hyper) -> tuple[float, float] | None:
        """``(a, b)`` of ``V <- a V + b g^2``; None if no ``V`` is kept."""

    @abstractmethod
    def correction(self, ctx: Context) -> float | Tensor:
        """What ``V`` is divided by."""


class Stateless(Graft):
    """Keeps nothing of its own."""

    def rates(self, hyper: Hyper) -> None:
        return None

    def correction(self, ctx: Context) -> float | Tensor:
        return 1.0

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Nothing to keep."""


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


@final
class Adafactor(Stateless):
    """Adam with a second moment of rank one, as Adafactor has, which Shampoo keeps already.

    The diagonals of factors are averages ``r`` and ``c`` of the squares of rows and columns. ``V = r c^T / sum(c)``, and for more
    modes likewise. The direction ``u / (sqrt(V) + graft_eps)`` is clipped to [-1, 1]: ``V`` may be far too small where large
    gradients are not in rows or columns, and Adam's own direction has seldom larger elements.
    """

    elementwise = "adam"
    of_factors = True
    reads = frozenset({"graft_eps"})

    def check(self, method: Method | None) -> None:
        if method and not method.squares:
            raise ValueError(
                f"graft='adafactor' does not go with preconditioner={method.name!r}, because it reads second moments off Shampoo's "
                "factors; build the optimizer with graft='adam' for these parameters"
            )

    def correction(self, ctx: Context) -> float | Tensor:
        beta2 = ctx.hyper.beta2
        return 1.0 if beta2 == 1 else bias_correction(ctx.steps, beta2, ctx.alive)

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        v, *others = (diagonal_of(state[f"L{mode}"]).to(u.dtype).contiguous() for mode in range(u.dim() - 1))
        v = v / per_slot(self.correction(ctx), v)
        for x in others:
            share = x / at_least(x.sum(1, keepdim=True), torch.finfo(x.dtype).tiny)
            v = v[..., None] * share.view(len(x), *[1] * (v.dim() - 1), -1)
        return quotient(u, v.sqrt().add_(ctx.hyper.graft_eps)).clamp_(-1, 1)


class _SecondMoment(Graft):
    """``u / (sqrt(V) + graft_eps)`` with some second moment ``V``."""

    roles = {"v": "graft moment"}  # noqa: RUF012
    sums = "v"
    reads = frozenset({"graft_eps"})

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {"v": stack.zeros(*stack.shape)}

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        v = state["v"].to(u.dtype)
        return quotient(u, (v / per_slot(self.correction(ctx), v)).sqrt_().add_(ctx.hyper.graft_eps))


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


def quotient(u: Tensor, root: Tensor) -> Tensor:
    """``u / root``. NaN where ``root`` is infinite: the quotient is 0 there, and nobody would see it. Overwrites ``root``."""
    return (u / root).add_(root.sub_(root))


SGD = Sgd()
GRAFTS: dict[str | None, Graft] = {
    "adam": Adam(),
    "adafactor": Adafactor(),
    "rmsprop": RmsProp(),
    "adagrad": Adagrad(),
    "sgd": SGD,
    "constant": Constant(),
    None: SGD,  # without a graft, elementwise parameters follow the filtered gradient
}
