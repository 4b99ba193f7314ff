"""Follow an eigenbasis from refresh to refresh, by batched products and Choleskys: no host read, no eigendecomposition."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from ..linalg import factorize, normalize, per_slot, product
from .base import Basis, Root, settle
from .firstorder import Follower, Frame, coupling, diagonal, first_order, project
from .products import has_kernels

SECOND = 16.0  # most roundings of the second shift
NOISE = 8.0  # roundings in a product A Q
TILE = 32  # columns that kernels eliminate at once
ROWS = 64  # rows per program; with more it runs out of registers
PANEL = 256  # columns of a Gram matrix per product
PIVOT = 1e-3  # least pivot of the last Cholesky. Less costs over three digits of orthogonality; sound ones are >= 1.


@final
@dataclass(frozen=True)
class Track(Follower):
    """From the last basis `Q`: `iterations` of `Q <- orth((A + mu I) Q)`, one rotation, and the root to first order.

    1. Orthogonal iteration with columns by descending eigenvalue. It follows large moves, because real spectra decay fast.
       With `mu = max(eps, 8 roundings of ||A||)` it separates the eigenvalues that the root separates, and its columns
       are independent whatever the rank of `A`. `orth` is CholeskyQR in two shifted passes, each on unit columns.
    2. `S = Q^T A Q`, `Q <- orth(Q (I + K))` with `K_ij = S_ij D_ij / (D_ij^2 + 4 S_ij^2 + mu^2)`, `D_ij = S_jj - S_ii`: all
       Jacobi rotations at once, damped. `K` is skew, so `I + K` is well conditioned, and one Cholesky of the Gram matrix
       without a shift is enough. It also removes the loss of orthogonality that step 1 leaves.
    3. `X = Z Z^T` with the first-order function of `S` (`firstorder.first_order`). It is never indefinite.

    Every call does the same for every slot and reads nothing back. A slot that moved far continues at its next refresh. The
    residual is the largest row norm of `S_ij / sqrt((S_ii + eps)(S_jj + eps))`, `i != j`. The relative error of the root is
    0.03 to 0.1 times its square for e = 1/4 (measured). A slot with a residual above `tolerance` is not ok; `roots.solve` then
    computes its root and basis by eigh. A second iteration takes 50% more time. If refreshes are far apart, it makes the error
    three times smaller.

    >>> list(Track().init(n=4, d=8, dtype=torch.float32, device="cpu"))  # what it keeps
    ['Q']
    """

    name: ClassVar[str] = "track"
    tolerance: float = 2.5

    def is_capturable(self, device: torch.device) -> bool:
        return has_kernels(device)

    def flops(self, d: int) -> float:
        return d**3 * (26 / 3 * self.iterations + 52 / 3)  # a product 2, a triangular solve 1, a Cholesky 1/3

    def _root(self, a: Tensor, e: float, eps: float | Tensor, state: dict[str, Tensor]) -> Root:
        ridge = per_slot(eps, a)
        a, scale = normalize(a, floor=ridge)
        q, s, residual = self._frame(a, ridge / scale, state)
        return Root(first_order(q, s, scale, e, eps), residual <= self.tolerance, residual)

    def _basis(self, a: Tensor, state: dict[str, Tensor]) -> Basis:
        a, scale = normalize(a)
        q, s, residual = self._frame(a, torch.zeros_like(scale), state)
        values, order = diagonal(s).sort(dim=1, descending=True, stable=True)
        vectors = q.take_along_dim(order[:, None, :], 2)
        return Basis(vectors, values * scale.squeeze(-1), torch.isfinite(residual), residual)

    def _frame(self, a: Tensor, ridge: Tensor, state: dict[str, Tensor]) -> Frame:
        """The new basis, which also becomes the warm start."""
        q = state["Q"]
        for _ in range(self.iterations):
            q, mu = iterate(a, q, ridge)
        q = rotate(a, q, mu)
        s = project(a, q)
        # A tiny ridge turns rounding into couplings. Those between eigenvalues below d roundings carry no information.
        k = coupling(s, ridge, floor=a.shape[-1])
        residual = torch.linalg.vector_norm(k, dim=2).amax(1).nan_to_num(nan=torch.inf)
        state["Q"] = settle(q, torch.isfinite(residual))[0]
        return Frame(q, s, residual)


def iterate(a: Tensor, q: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """One orthogonal iteration with `a + mu I`: the result, nearly orthonormal, and `mu` [n, 1, 1].

    Columns are sorted by descending Rayleigh quotient. Orthonormalising keeps the spans of the leading columns, so in this
    order a round continues the last one. In another order it would undo it.
    """
    b = product(a, q)
    order = (q * b).sum(1).argsort(dim=1, descending=True, stable=True)
    rounding = torch.finfo(a.dtype).eps
    size = torch.linalg.vector_norm(b, dim=1, keepdim=True).amax(2, keepdim=True)
    mu = torch.maximum(ridge, NOISE * rounding * size).clamp(min=rounding)  # for a zero factor any basis will do
    b = (b + mu * q).take_along_dim(order[:, None, :], 2)
    for shift in shifts(a.shape[-1]):  # a shift makes columns short that depend on those before them
        b, _ = cholesky_qr(b / torch.linalg.vector_norm(b, dim=1, keepdim=True), shift)
    return b, mu


def shifts(d: int) -> tuple[float, float]:
    """Those of the two passes, in units of `d` roundings. Near one, no Cholesky of unit columns breaks down.

    After the first pass columns are nearly orthogonal, except short ones. Their Gram matrix has a few roundings for any `d`.
    A second shift that grows like `d` would leave the last Cholesky a pivot of `640 / d^2` for factors of low rank.
    """
    return 1.0, min(0.1, SECOND / d)


def rotate(a: Tensor, q: Tensor, delta: Tensor) -> Tensor:
    """`orth(q (I + K))` for nearly orthonormal `q`; NaN where `q` is not nearly orthonormal."""
    new, pivot = cholesky_qr(q + product(q, jacobi(project(a, q), delta)), 0.0)
    return new.masked_fill(~(pivot >= PIVOT)[:, None, None], torch.nan)


def jacobi(s: Tensor, delta: Tensor) -> Tensor:
    """The skew `K` of all Jacobi rotations at once, damped by `delta` [n, 1, 1].

    An entry is about `S_ij / D_ij` where that is small, and at most 1/4 where eigenvalues are close. Eigenvalues that agree to
    within `delta` need no rotation and get almost none.
    """
    values = diagonal(s)
    gap = values[:, None, :] - values[:, :, None]
    k: Tensor = s * gap / (gap.square() + 4 * s.square() + delta.square())
    return k


def cholesky_qr(b: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """`B R^{-1}`, `R^T R = B^T B + shift d roundings I`, and the smallest pivot `R_ii^2` [n]. The condition falls by up to 100."""
    ridge = shift * b.shape[-1] * torch.finfo(b.dtype).eps
    if b.dtype == torch.float32 and has_kernels(b.device):
        return _by_tiles(b, ridge)
    g = product(b.mT, b)
    diagonal(g).add_(ridge)
    lower = factorize(torch.linalg.cholesky_ex, g)[0]
    pivot = diagonal(lower).amin(1)
    return factorize(_solve, lower, b)[0], pivot * pivot.abs()


def _solve(lower: Tensor, b: Tensor) -> tuple[Tensor]:
    return (torch.linalg.solve_triangular(lower.mT, b, upper=True, left=False),)


def _by_tiles(b: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The same in few launches and large products. cuSOLVER and cuBLAS take a thousand launches, one after the other.

    Multiplying by `R^{-1}` from the right turns the Gram matrix into `L = R^T` and `B` into `Q`. So both are one matrix of `2d`
    rows, and its columns are eliminated tile by tile. Let `k` be the largest power of two that divides m. After the m-th tile,
    the last `k` tiles are subtracted from the next `k`. So when a tile's turn comes, all tiles before it have been subtracted.
    If a slot breaks down, its later tiles are NaN.
    """
    from ..kernels import dense

    n, d, _ = b.shape
    left, done = b.new_empty(n, 2 * d, d), b.new_empty(n, 2 * d, d)  # what is still to be eliminated; L over Q
    factors, pivots = b.new_empty(n, 2, TILE, TILE), b.new_empty(n, d)
    for start in range(0, d, PANEL):  # entries above the diagonal are never used
        torch.bmm(b[:, :, start:].mT, b[:, :, start : start + PANEL], out=left[:, start:d, start : start + PANEL])
    diagonal(left[:, :d]).add_(ridge)
    left[:, d:] = b
    for m, start in enumerate(range(0, d, TILE), 1):
        stop = min(start + TILE, d)
        sizes, width, rows = (left.stride(0), d), stop - start, 2 * d - stop
        old, new = left[:, stop:, start:stop], done[:, stop:, start:stop]
        dense.cholesky[n,](left[:, start:, start:], factors, pivots[:, start:], *sizes, width, TILE=TILE, num_warps=1)
        dense.substitute[n, -(-rows // ROWS)](old, factors, new, *sizes, rows, width, TILE=TILE, ROWS=ROWS)
        if stop < d:
            reach = TILE * (m & -m)
            below = done[:, stop:, stop - reach : stop]
            left[:, stop:, stop : stop + reach].baddbmm_(below, below[:, : min(reach, d - stop)].mT, alpha=-1)
    return done[:, d:], pivots.amin(1)
