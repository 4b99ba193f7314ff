"""Coupled iterations for inverse p-th roots. They need products only, and no host read."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..linalg import eye_like, matrix_power, normalize, per_slot, power, product, symmetrize
from .base import Root, RootSolver, check_count

MAX_P, MAX_S = 32, 8
SLACK = 1.01  # rounding may raise an error that falls slowly; up to this factor it does not count as growth


@dataclass(frozen=True)
class Coupled(RootSolver):
    """`X = (A + ridge I)^(-s/p)` by an iteration on `X` and `M = X^p (A + ridge I) / z`, from `X = I`, `z >= lambda_max + ridge`.

    Each round computes `R = I - M`, `T = sum_{j < order} c_j R^j` (the series of `(I - R)^(-1/p)`), `X <- X T`, `M <- T^p M`.
    The eigenvalues of `M` rise from (0, 1] to 1. Small ones grow by `T(0)^p` per round: for p = 4, by 2.4 with order 2
    and by 3.9 with order 3. So `k` decades of spectrum take about `2.6 k` or `1.7 k` rounds, plus four.

    `relative_eps`: float32 iterations cannot resolve what is below 1e-7 `lambda_max`, so
    `ridge = max(eps, relative_eps * z)`. Where `eps` is the smaller one, this damps more than was asked for.
    `iterations`: the number of rounds. All of them always run. A slot whose error no longer falls is frozen.
    `tolerance`: the largest residual `max|I - M|` that is ok. A relative error `t` of `X` shows as `p t`.
    """

    iterations: int = 25
    tolerance: float = 1e-2
    relative_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance!r} must be in (0, 1): the error starts at 1")
        if not 0 <= self.relative_eps < math.inf:
            raise ValueError(f"relative_eps={self.relative_eps!r} must be at least 0 and finite")

    @property
    @abstractmethod
    def order(self) -> int:
        """The order of convergence, which is the number of terms of the series."""

    def is_capturable(self, device: torch.device) -> bool:
        return True

    def check(self, e: float) -> None:
        super().check(e)
        fraction(e)

    def flops(self, d: int) -> float:
        return 2.0 * d**3 * (self.iterations * (self.order + 2) + 1)  # for p = 4

    def _root(self, a: Tensor, e: float, eps: float | Tensor, state: dict[str, Tensor]) -> Root:
        ratio, eps = fraction(e), per_slot(eps, a)
        a, scale = normalize(a, floor=eps)
        # ||A^2||_F^(1/2) >= lambda_max is a tighter bound than ||A||_F; 1.01 covers its rounding.
        z = 1.01 * torch.linalg.vector_norm(product(a, a), dim=(1, 2), keepdim=True).sqrt()
        ridge = torch.maximum(eps / scale, self.relative_eps * z)
        z = z + ridge
        x, error = self._iterate((a + ridge * eye_like(a)) / z, ratio.denominator)
        back = power(z.squeeze(-1).double() * scale.squeeze(-1), -e).to(a.dtype)
        return Root(symmetrize(matrix_power(x, ratio.numerator)) * back[:, :, None], error <= self.tolerance, error)

    def _iterate(self, m: Tensor, p: int) -> tuple[Tensor, Tensor]:
        """`m^(-1/p)` and its error [n]."""
        eye = eye_like(m)
        x, error, terms = eye.expand_as(m), (eye - m).abs().amax((1, 2)), series(p, self.order)
        active = torch.ones_like(error, dtype=torch.bool)
        for _ in range(self.iterations):
            t = polynomial(terms, eye - m)
            new_m = product(matrix_power(t, p), m)
            new_error = (eye - new_m).abs().amax((1, 2))
            active = active & (new_error < SLACK * error)
            x = torch.where(active[:, None, None], product(x, t), x)
            m = torch.where(active[:, None, None], new_m, m)
            error = torch.where(active, new_error, error)
        return x, error


def supports(e: float) -> bool:
    """Whether coupled iterations and `minimax` can do the exponent: it must be `s/p` with small integers."""
    ratio = Fraction(e).limit_denominator(MAX_P)
    return 1 <= ratio.numerator <= MAX_S and abs(float(ratio) - e) <= 1e-9 * e


def fraction(e: float) -> Fraction:
    """`e` as `s/p`. Raises ValueError if it is not supported."""
    if not supports(e):
        raise ValueError(
            f"exponent={e!r} is not s/p with s <= {MAX_S} and p <= {MAX_P}, which coupled iterations need; "
            'use root="eigh", which takes every exponent'
        )
    return Fraction(e).limit_denominator(MAX_P)


def series(p: int, order: int) -> list[float]:
    """The first `order` coefficients of `(1 - r)^(-1/p)`."""
    terms = [1.0]
    for j in range(1, order):
        terms.append(terms[-1] * (1 / p + j - 1) / j)
    return terms


def polynomial(terms: list[float], r: Tensor) -> Tensor:
    """`sum_j terms[j] r^j` for a stack, by Horner's rule. It takes at least two terms."""
    eye = eye_like(r)
    t = terms[-2] * eye + terms[-1] * r
    for c in reversed(terms[:-2]):
        t = c * eye + product(r, t)
    return t
