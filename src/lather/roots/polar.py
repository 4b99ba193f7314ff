"""Polar factors `U V^T` of matrices `G = U S V^T`, for stacks of any rectangular shape."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, final

import torch
from torch import Tensor

from ..linalg import aligned, all_finite, is_complete, normalize, norms, per_slot, product
from .base import FINEST, check_count
from .minimax import best_step
from .products import fits_halves, symmetric, unit_halves

Quintic = tuple[float, float, float]

MUON: Quintic = (3.4445, -4.7750, 2.0315)  # Keller Jordan's
MARGIN = 1.01  # products in 11 bits may raise a singular value by this; above its interval a polynomial grows fast
COARSEST = 1e-3  # the smallest singular value that halves resolve to a part in a hundred
GROWTH = 150.0  # how much a run of steps may amplify what is rounded in a Gram matrix
WIDE, LARGE = 1.25, 128  # least columns to rows, and least rows, for which Gram matrices save time


class Polar(ABC):
    """A frozen dataclass whose fields are its options. Calling it computes polar factors.

    The call takes a stack `g` [n, rows, columns] in float32 or float64 and returns one in that dtype, times `scale`, in `out` if
    that is given. A Frobenius norm below `eps` counts as `eps`; above it, the scale of a slot does not matter. A singular value
    of zero stays zero. A slot that is not finite gives a result that is not finite, and does not affect the others. On one CPU
    thread a slot gets the same bits in every stack.
    """

    name: ClassVar[str]
    is_capturable: ClassVar[bool] = True  # whether a CUDA graph can hold a call
    eps: float = 0.0

    @abstractmethod
    def flops(self, rows: int, columns: int) -> float:
        """Operations per matrix and call."""

    def __call__(self, g: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        return torch.mul(self._whole(g), scale, out=out)

    def _whole(self, g: Tensor) -> Tensor:
        """The call in the dtype of `g`."""
        tall = g.shape[1] > g.shape[2]
        x, c = normalize((g.mT if tall else g).contiguous())  # otherwise squares of a small gradient would vanish
        size = norms(x)
        size = torch.where(size > 0, size, 1.0)
        if self.eps:
            size = size.maximum(self.eps / c.flatten())
        _, rows, columns = x.shape
        x = self._polar(aligned(x / per_slot(size, x)))[:, :rows, :columns]  # the padding stays zero
        return (x.mT if tall else x).contiguous()

    @abstractmethod
    def _polar(self, x: Tensor) -> Tensor:
        """For wide matrices of Frobenius norm at most 1. On a CPU `linalg.aligned` has padded them."""


class _Products(Polar):
    """`X <- a X + b (X X^T) X + c (X X^T)^2 X`: every singular value goes through `h(t) = a t + b t^3 + c t^5`."""

    steps: int

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def flops(self, rows: int, columns: int) -> float:
        d, rest = sorted((rows, columns))
        return self.steps * (4.0 * d * d * rest + 2.0 * d**3)

    @abstractmethod
    def quintics(self) -> Iterable[Quintic]:
        """The coefficients of each step."""

    def _polar(self, x: Tensor) -> Tensor:
        for a, b, c in self.quintics():
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def __call__(self, g: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        if not (fits_halves(g) and self.bears_halves()):
            return super().__call__(g, scale, out)
        x = self._in_halves(g, scale)[:, : g.shape[1], : g.shape[2]]
        return x.to(g.dtype, memory_format=torch.contiguous_format) if out is None else out.copy_(x)

    def bears_halves(self) -> bool:
        """Whether halves can hold all that is computed, and resolve what is promised."""
        return _stays_small(tuple(self.quintics()))

    def _in_halves(self, g: Tensor, scale: float) -> Tensor:
        """The call, padded, by products of halves with float32 sums. Those that are symmetric are computed by half.

        A wide matrix takes several steps at once, on `G = X X^T` alone. That rounds the small eigenvalues of `G`, and every step
        amplifies the error by up to `a^2`. So a run of steps ends before that is more than `GROWTH`.
        """
        tall, (small, large) = g.shape[1] > g.shape[2], sorted(g.shape[1:])
        runs = list(_runs(self.quintics(), GROWTH if small >= LARGE and large >= WIDE * small else 0.0))
        x = unit_halves(g, self.eps)
        for run in runs:
            q, alpha = _factor(symmetric(x.mT if tall else x), run), scale if run is runs[-1] else 1.0
            x = product(x, q, alpha=alpha) if tall else product(q, x, alpha=alpha)
        return x


def _factor(gram: Tensor, run: Sequence[Quintic]) -> Tensor:
    """What some steps multiply `X` by, for `G = X X^T`: the product of their `p = a I + b G + c G^2`. The next `G` is `p G p`."""
    (a, b, c), *others = run
    q = p = symmetric(gram, gram, c, gram, b, a)
    for a, b, c in others:
        gram = symmetric(p, symmetric(p, gram))
        p = symmetric(gram, gram, c, gram, b, a)
        q = symmetric(p, q)
    return q


def _runs(quintics: Iterable[Quintic], most: float) -> Iterator[list[Quintic]]:
    """Cut steps into runs, which amplify errors in the first Gram matrix by at most `most`.

    >>> [len(run) for run in _runs([MUON] * 5, 150.0)], [len(run) for run in _runs(PolarExpress().quintics(), 150.0)]
    ([3, 2], [2, 2, 1])
    """
    run: list[Quintic] = []
    for quintic in quintics:
        if run and math.prod(a * a for a, _, _ in run) > most:
            yield run
            run = []
        run.append(quintic)
    yield run


@lru_cache(maxsize=256)
def _stays_small(quintics: tuple[Quintic, ...]) -> bool:
    """Whether singular values that begin in [0, 1] stay within [-4, 4]."""
    values = [i / 64 for i in range(65)]
    for a, b, c in quintics:
        values = [t * (a + t * t * (b + t * t * c)) for t in values]
        if not all(abs(t) <= 4 for t in values):
            return False
    return True


@final
@dataclass(frozen=True)
class NewtonSchulz(_Products):
    """Muon's iteration: the same quintic in every step.

    Five steps take all singular values above 0.002 of the Frobenius norm to between 0.68 and 1.21. More steps do not bring
    them much closer to 1.

    >>> NewtonSchulz()(torch.diag(torch.tensor([3.0, 1.0]))[None]).squeeze().diagonal() > 0.68
    tensor([True, True])
    """

    name: ClassVar[str] = "newton_schulz"
    steps: int = 5
    coefficients: Quintic = MUON
    eps: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.coefficients
        if not isinstance(given, (tuple, list)) or len(given) != 3 or not all(map(_is_finite, given)):
            raise ValueError(f"coefficients={given!r} must be three numbers, those of t, t^3 and t^5")
        if not _is_finite(self.eps) or self.eps < 0:
            raise ValueError(f"eps={self.eps!r} must be a number of at least 0")
        object.__setattr__(self, "coefficients", tuple(map(float, given)))

    def quintics(self) -> Iterable[Quintic]:
        return [self.coefficients] * self.steps


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@final
@dataclass(frozen=True)
class PolarExpress(_Products):
    """Polar Express (arXiv 2505.16932): each step uses the quintic that brings all singular values closest to 1.

    The first quintic is the best for `[lower, 1]`, because the Frobenius norm is 1. Every other one is the best for the
    interval that the step before it leaves. The upper ends are raised by 1% to allow for rounding. With `lower = 1e-3`, singular
    values of at least 1e-3 end within 0.125 of 1 after five steps and within 0.0014 after six. Smaller ones end further away.

    >>> [round(x, 4) for x in PolarExpress().quintics()[0]]
    [8.3869, -24.3713, 17.7264]
    """

    name: ClassVar[str] = "polar_express"
    steps: int = 5
    lower: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lower, float) or not FINEST <= self.lower < 1:
            raise ValueError(f"lower={self.lower!r} must be at least {FINEST} and less than 1")

    def quintics(self) -> tuple[Quintic, ...]:
        return _best_quintics(self.steps, self.lower)

    def bears_halves(self) -> bool:
        return self.lower >= COARSEST


@lru_cache(maxsize=256)
def _best_quintics(steps: int, lower: float) -> tuple[Quintic, ...]:
    found: list[Quintic] = []
    low, high = lower, 1.0
    for _ in range(steps):
        a, b, c, error = best_step(2, low, MARGIN * high)
        found.append((a, b, c))
        low, high = 1 - error, 1 + error
    return tuple(found)


@final
@dataclass(frozen=True)
class Svd(Polar):
    """By the singular value decomposition. It is exact and slow, and on CUDA the host waits for it.

    Singular values below `max(rows, columns)` roundings of the largest count as zero.
    """

    name: ClassVar[str] = "svd"
    is_capturable: ClassVar[bool] = False

    def flops(self, rows: int, columns: int) -> float:
        d, rest = sorted((rows, columns))
        return 16.0 * d * d * rest + 8.0 * d**3

    def _polar(self, x: Tensor) -> Tensor:
        if not is_complete(x.device):
            return self._polar(x.cpu()).to(x.device)
        finite = per_slot(all_finite(x), x)  # torch raises if one slot is not
        u, s, vh = torch.linalg.svd(torch.where(finite, x, 0.0), full_matrices=False)
        kept = s > max(x.shape[1:]) * torch.finfo(x.dtype).eps * s[:, :1]
        return torch.where(finite, torch.bmm(u * kept[:, None, :], vh), torch.nan)
