"""Composed minimax polynomials for inverse p-th roots. They need products only, and the fewest: no state, no host read."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from .. import linalg
from ..linalg import SMALLEST_RIDGE, eye_like, normalize, per_slot, power
from .base import FINEST, Relative, Ridge, Root, RootSolver
from .coupled import fraction, series
from .products import PROBES, begin, decode, encode, is_in_halves, product, residual

MARGIN = 1.02  # keeps rounding from lowering the bound ||A^2||_F^(1/2) >= lambda_max, above which the polynomials grow
DESIGN = 0.1  # the part of the tolerance that the polynomials may use; the rest is for rounding
NOISE = 900.0  # largest ratio of eigenvalues that a step can bring together in 16 bits

Times = Callable[[Tensor], Tensor]


class Step(NamedTuple):
    a: float
    b: float
    c: float
    error: float  # max |1 - h| on the interval that the step is made for


@final
@dataclass(frozen=True)
class Minimax(RootSolver):
    """`X = (A + ridge I)^(-s/p)` by `q = a I + b M + c M^2`, `X <- X q`, `M <- q^p M` from `M = (A + ridge I) / z`.

    With `t = m^(1/p)` for an eigenvalue `m` of `M`, a step maps `t` to `h(t) = a t + b t^(p+1) + c t^(2p+1)`. Its
    coefficients minimise `E = max |1 - h|` over the interval that holds all `t`. The next interval is `[1 - E, 1 + E]`. No
    other step of this form leaves a smaller ratio of the largest to the smallest eigenvalue, and the next step depends on
    this ratio only. The first interval is `[kappa^(-1/p), 1]` with `kappa = 1 + 1/relative_eps`. It determines all
    coefficients and the number of steps, the smallest that ends with `E <= tolerance / 10`: four for p = 2 and p = 4.

    `q` is never formed. With `R = b M + c M^2` a product with it is `q Y = a Y + R Y`, so what rounding would hurt most stays out
    of the product. On GPUs this makes 16 bits enough for all steps if `d >= 494`, and for all but the first if `d` is smaller.
    With a smaller `relative_eps` more of the first steps are in float32 (`exact_steps`), which is several times slower.

    `relative_eps`: `ridge = max(eps, relative_eps * z)`, `z = 1.02 ||A^2||_F^(1/2) >= lambda_max`. Where `eps` is the smaller
    one, this damps more than was asked for. Rounding is amplified by up to `1 / relative_eps`. In 16 bits the error of `X` on a
    gradient is 0.01 to 0.05 with the default.
    `tolerance`: the largest residual that is ok. The residual estimates the root mean square, over eigenvectors, of the
    relative error of `X`, including rounding. On 16 fixed sign vectors `V` it is `(s/p) ||(X^p M - I) V||_F / ||V||_F`, at most 1.

    >>> Minimax().products(p=2), Minimax().products(p=4)
    (13, 19)
    """

    name: ClassVar[str] = "minimax"
    relative_eps: float = 1e-4
    tolerance: float = 0.2

    def __post_init__(self) -> None:
        if not FINEST <= self.relative_eps < 1:
            raise ValueError(
                f"relative_eps={self.relative_eps!r} must be at least {FINEST} and less than 1: it sets the number of products"
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance!r} must be in (0, 1): the error starts at 1")

    def is_capturable(self, device: torch.device) -> bool:
        return True

    def check(self, e: float) -> None:
        super().check(e)
        fraction(e)

    def steps(self, p: int) -> tuple[Step, ...]:
        """The steps for the exponent 1/p."""
        return schedule(p, 1 + 1 / self.relative_eps, DESIGN * self.tolerance)

    def products(self, p: int) -> int:
        """Products of `d x d` matrices per call for the exponent 1/p."""
        return 1 + (len(self.steps(p)) - 1) * (p + 2)

    def flops(self, d: int) -> float:
        return 2.0 * d**3 * self.products(p=2)

    def exact_steps(self, p: int, d: int) -> int:
        """How many of the first steps are too much for 16 bits.

        In those, rounding leaves noise of about `2^-11` in the eigenvalues of `M`, while the smallest is one over their ratio. At
        first most eigenvalues are small, and the noise is less by `2 / sqrt(d)`.
        """
        ratio, steps = (1 + 1 / self.relative_eps) * 2 / math.sqrt(d), self.steps(p)
        for i, step in enumerate(steps):
            if ratio <= NOISE:
                return i
            ratio = ((1 + step.error) / (1 - step.error)) ** p
        return len(steps)

    def sees_what_is_not_finite(self, a: Tensor, e: float) -> bool:
        """True where all steps are in halves."""
        ratio = fraction(e)
        return is_in_halves(a) and ratio.numerator == 1 and not self.exact_steps(ratio.denominator, a.shape[-1])

    def _root(self, a: Tensor, e: float, eps: Ridge, state: dict[str, Tensor]) -> Root:
        ratio = fraction(e)
        halves = self.sees_what_is_not_finite(a, e)
        value, error = self._in_halves(a, ratio.denominator, eps) if halves else self._plain(a, ratio, eps)
        error = ratio.numerator * error
        residual = torch.where(error < 1, error, 1.0)
        if halves:  # the call has not replaced factors that are not finite
            residual = residual.masked_fill(error.isnan(), torch.inf)
        return Root(value, error <= self.tolerance, residual)

    def _plain(self, a: Tensor, ratio: Fraction, eps: Ridge) -> tuple[Tensor, Tensor]:
        """Roots and residuals. At least the first step is in the dtype of `a`."""
        assert not isinstance(eps, Relative)
        eps, p = per_slot(eps, a), ratio.denominator
        exact = max(1, self.exact_steps(p, a.shape[-1])) if is_in_halves(a) else len(self.steps(p))
        a, scale = normalize(a, floor=eps)
        eye, square = eye_like(a), product(a, a)
        z = MARGIN * torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True).sqrt()
        ridge = torch.maximum(eps / scale, self.relative_eps * z)
        z = z + ridge
        m, square = (a + ridge * eye) / z, (square + ridge * (2 * a + ridge * eye)) / z.square()
        step = self.steps(p)[0]
        r = step.b * m + step.c * square
        x = self._compose(p, m, r, step.a * eye + r, exact)
        x = decode(x, torch.ones_like(z.flatten()), a.shape[-1]) if x.dtype == torch.float16 else x
        error = _residual(partial(linalg.product, x), partial(linalg.product, m), _signs(m), p)
        back = power(z.squeeze(-1).double() * scale.squeeze(-1), -float(ratio)).to(a.dtype)
        return linalg.matrix_power(x, ratio.numerator, product) * back[:, :, None], error

    def _in_halves(self, a: Tensor, p: int, eps: Ridge) -> tuple[Tensor, Tensor]:
        """The same in halves, with fewer passes over memory and fewer launches."""
        a, part = a.contiguous(), self.relative_eps
        if isinstance(eps, Relative):
            part, eps = max(part, eps.eps / MARGIN), SMALLEST_RIDGE
        floor = eps.to(a.dtype).contiguous() if isinstance(eps, Tensor) else torch.full_like(a[:, 0, 0], eps)
        m, r, x, starts, back = begin(a, floor, part, MARGIN, self.steps(p)[0], p)
        x = self._compose(p, m, r, x, exact=0)
        return decode(x, back.contiguous(), a.shape[-1]), residual(x, a, starts, p) / p

    def _compose(self, p: int, m: Tensor, r: Tensor, x: Tensor, exact: int) -> Tensor:
        """`m^(-1/p)`, given `m` and the first `r` and `x`; in halves after ``exact`` steps."""
        for done, (before, step) in enumerate(pairwise(self.steps(p)), start=1):
            for _ in range(p):
                m = product(r, m, add=m, beta=before.a)
            if done == exact:
                m, x = (encode(each, torch.ones_like(each[:, 0, 0])) for each in (m, x))
            r = product(m, m, step.c, add=m, beta=step.b)
            x = product(r, x, add=x, beta=step.a)
        return x


def _residual(times_x: Times, times_m: Times, v: Tensor, p: int) -> Tensor:
    """`||(X^p M - I) V||_F / (p ||V||_F)` [n]. The products with a few vectors cost almost nothing."""
    y = v
    for k in range(p + 1):
        y = times_m(y) if k == p // 2 else times_x(y)  # M in the middle: otherwise y would span the whole range of X^p
    norm: Tensor = torch.linalg.vector_norm(y - v, dim=(1, 2))
    return norm / (p * math.sqrt(v.shape[1] * PROBES))


def _signs(like: Tensor) -> Tensor:
    """[n, d, PROBES] of +-1: chirps, the top bit of `k i^2` modulo 2^16. They are the same everywhere and resemble no factor."""
    i = torch.arange(1, like.shape[-1] + 1, device=like.device)[:, None]
    k = 2 * torch.arange(PROBES, device=like.device) + 40503
    signs = 1 - 2 * ((k * i * i >> 15) & 1)
    return signs.to(like.dtype).expand(like.shape[0], -1, -1)


@lru_cache(maxsize=256)
def schedule(p: int, kappa: float, tolerance: float) -> tuple[Step, ...]:
    """The fewest steps that take every eigenvalue in [1/kappa, 1] to within `tolerance` of 1. Each is the best after the last.

    >>> [round(x, 4) for x in schedule(4, 1e4, 1e-3)[0][:3]]
    [3.85, -10.8539, 8.6189]
    """
    steps = [best_step(p, kappa ** (-1 / p), 1.0)]
    while steps[-1].error > tolerance:
        steps.append(best_step(p, 1 - steps[-1].error, 1 + steps[-1].error))
    return tuple(steps)


def best_step(p: int, low: float, high: float) -> Step:
    """The `h(t) = a t + b t^(p+1) + c t^(2p+1)` with the smallest `max |1 - h|` on [low, high].

    The three powers are a Chebyshev system, so the best `1 - h` takes its maximum `E` with alternating sign at four points:
    the two ends and the two zeros of `h'`. Remez' algorithm solves for `a, b, c, E` at four points and moves the inner two to
    the zeros. If the interval is so narrow that the four equations are nearly dependent, the series at 1 is as good.
    """
    if high - low < 2e-3:  # three terms of (1 - r)^(-1/p), in powers of m = 1 - r
        c0, c1, c2, c3 = series(p, 4)
        return Step(c0 + c1 + c2, -c1 - 2 * c2, c2, c3 * (p * max(high - 1, 1 - low)) ** 3)
    inner = [low + f * (high - low) for f in (0.25, 0.75)]
    for _ in range(100):
        points = [low, *inner, high]
        a, b, c, error = _solve([[t, t ** (p + 1), t ** (2 * p + 1), (-1.0) ** i, 1.0] for i, t in enumerate(points)])
        half, lead = -(p + 1) * b / 2, (2 * p + 1) * c  # h'(t) = a - 2 half t^p + lead t^(2p)
        spread = math.sqrt(half * half - lead * a)
        before, inner = inner, [((half - spread) / lead) ** (1 / p), ((half + spread) / lead) ** (1 / p)]
        if max(abs(t - s) for t, s in zip(inner, before, strict=True)) < 1e-9 * (high - low):
            break
    return Step(a, b, c, error)


def _solve(rows: list[list[float]]) -> list[float]:
    """Solve a small linear system by elimination with row exchanges. The right-hand side is the last column."""
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(n):
            if r != i:
                f = rows[r][i] / rows[i][i]
                rows[r] = [x - f * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] for i in range(n)]
