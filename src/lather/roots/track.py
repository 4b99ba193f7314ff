"""Follow an eigenbasis from refresh to refresh, by batched products and Choleskys: no host read, no eigendecomposition."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ..kernels import has_kernels
from ..linalg import eye_like, factorize, normalize, norms, per_slot, probe, product, products_in, symmetrize
from .base import Basis, EigenSolver, Ridge, Root, absolute, check_count
from .firstorder import coupling, diagonal, first_basis, first_order

SHIFT = 0.05  # part of every eigenvalue that is added to it, which keeps the pivots of both Choleskys far from zero
NOISE = 1e-6  # eigenvalues below this part of the factor's norm are not told apart
SKEW = 0.05  # largest loss of orthogonality; sound bases have less than 0.01 in TF32
ROWS, COLUMNS = 8, 256  # of a matrix whose columns are moved, for one program
TILE, BLOCK, WARPS = 64, 16, 4  # rows that one program decomposes, those that it eliminates at a time, and its warps


@final
@dataclass(frozen=True)
class Track(EigenSolver):
    """From the last basis `Q`: `iterations` of `Q <- orth((A + mu I) Q)`, and the root to first order.

    1. Orthogonal iteration with columns by descending `Q^T A Q`. It follows large moves, because real spectra decay fast.
       `orth` is two Choleskys. The first is of the factor in the old basis, `Q^T A Q + shift = L L^T`: `Q L` has the same
       leading spans as `A Q`, and the square root of its condition. The second is of the Gram matrix of the unit columns
       of `Q L`. Both are well conditioned whatever the factor is, so on CUDA their products are in TF32; only `A Q` is
       more exact. `mu = max(eps, 1e-6 ||A||)`. Each column comes back to its place: column `i` follows column `i`.
    2. `X = Z Z^T` with the first-order function of `S = Q^T A Q` (`firstorder.first_order`). It is never indefinite.

    Every call does the same for every slot and reads nothing back. A slot that moved far continues at its next refresh. The
    residual of a root is the largest row norm of `S_ij / sqrt((S_ii + eps)(S_jj + eps))`, `i != j`. The relative error of the
    root is up to 0.15 times its square for e = 1/4, and 0.3 times for e = 1/2 (measured). A slot with a residual above
    `tolerance`, or with a basis that is not orthogonal, is not ok; `roots.solve` then computes its root and basis by eigh. The
    residual of a basis is its loss of orthogonality.

    >>> list(Track().init(n=4, d=8, dtype=torch.float32, device="cpu"))  # what it keeps
    ['Q']
    """

    name: ClassVar[str] = "track"
    in_parts: ClassVar[bool] = True
    keeps_columns: ClassVar[bool] = True
    iterations: int = 2
    tolerance: float = 2.5

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)
        if not self.tolerance > 0:
            raise ValueError(f"tolerance={self.tolerance!r} must be positive; inf accepts any residual")

    def init(self, n: int, d: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        return first_basis(n, d, dtype, device)

    def is_capturable(self, device: torch.device) -> bool:
        return has_kernels(device)

    def flops(self, d: int) -> float:
        return d**3 * (44 / 3 * self.iterations + 10)  # a product 2, a Cholesky by halves 4/3

    def sees_what_is_not_finite(self, a: Tensor, e: float) -> bool:
        return True  # it spreads to the whole basis, and shows in the loss of orthogonality

    def _root(self, a: Tensor, e: float, eps: Ridge, state: dict[str, Tensor]) -> Root:
        eps = absolute(a, eps)
        eps = eps.to(a.dtype) if isinstance(eps, Tensor) else eps
        ridge = per_slot(eps, a)
        a, scale = normalize(a, floor=ridge)
        with coarse(a.device):
            q, _, skew = self._follow(a, ridge / scale, state)
            s = symmetrize(product(q.mT, exact_product(a, q)))
            # A tiny ridge turns rounding into couplings. Those between eigenvalues below d roundings carry no information.
            k = coupling(s, ridge / scale, floor=a.shape[-1])
            residual = torch.linalg.vector_norm(k, dim=2).amax(1)
            value = first_order(q, s, scale, e, eps)
        residual = torch.where((skew <= SKEW) & (norms(value) < torch.inf), residual, torch.inf)
        return Root(value, residual <= self.tolerance, residual)

    def _basis(self, a: Tensor, state: dict[str, Tensor]) -> Basis:
        a, scale = normalize(a)
        with coarse(a.device):
            _, values, skew = self._follow(a, torch.zeros_like(scale), state)
        return Basis(state["Q"], values * scale.squeeze(-1), skew <= SKEW, skew)

    def _follow(self, a: Tensor, ridge: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The new basis, which is also the next warm start; eigenvalues as the one before saw them; its loss of orthogonality."""
        q = state["Q"]
        mu = torch.maximum(ridge, NOISE * per_slot(norms(a), a)).clamp(min=torch.finfo(a.dtype).eps)
        for _ in range(self.iterations):
            q, values = iterate(a, q, mu)
        x = probe(q)
        skew = norms(product(q.mT, product(q, x)) - x) / norms(x)
        skew = skew.nan_to_num(nan=torch.inf)
        state["Q"] = torch.where(per_slot(skew <= SKEW, q), q, eye_like(q))
        return q, values, skew


def coarse(device: torch.device) -> Any:
    """Products in TF32, on CUDA."""
    return products_in("tf32" if device.type == "cuda" else None, device)


def exact_product(a: Tensor, q: Tensor) -> Tensor:
    """`a q` where products are in TF32: eleven bits of `a` at a time. Those of `q` do not matter: it is any basis nearby.

    In `a q` large terms cancel where an eigenvalue is small, so rounding `a` would change the small eigenvalues.
    """
    if not (a.is_cuda and a.dtype == torch.float32):
        return product(a, q)
    high = (a.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return product(high, q).baddbmm_(a - high, q)


def iterate(a: Tensor, q: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    """One orthogonal iteration with `a + mu I`, and the eigenvalues [n, d] as `q` sees them.

    Columns go by descending eigenvalue in between. Orthonormalising keeps the spans of the leading columns, so in this order a
    round continues the last one. In another order it would undo it.
    """
    b = exact_product(a, q)
    values = (q * b).sum(1)
    ordered, order = values.sort(dim=1, descending=True, stable=True)
    q, b = take_columns(q, order), take_columns(b, order)
    s = product(q.mT, b)
    diagonal(s).copy_((1 + SHIFT) * (ordered.clamp(min=0) + mu.squeeze(-1)))
    lower = cholesky(s)
    lower = lower / torch.linalg.vector_norm(lower, dim=1, keepdim=True)
    diagonal(lower).sub_(1)
    q = orthonormal(product(q, lower, add=q))
    return take_columns(q, order.argsort(dim=1)), values


def take_columns(x: Tensor, order: Tensor) -> Tensor:
    """Columns of `x` [n, d, d] in the order [n, d]."""
    if not _by_kernels(x):
        return x.take_along_dim(order[:, None, :], 2)
    from ..kernels import dense

    (n, d, _), x = x.shape, x.contiguous()
    out = torch.empty_like(x)
    dense.take_columns[-(-d // ROWS), n, -(-d // COLUMNS)](x, order, out, d, ROWS=ROWS, BLOCK=COLUMNS, num_warps=4)
    return out


def cholesky(a: Tensor) -> Tensor:
    """The lower factor of `a` [n, d, d], whose memory it may use. NaN where it has no such factor."""
    if _by_kernels(a):
        return _halves(a, inverted=False)[0]
    return factorize(torch.linalg.cholesky_ex, a)[0]


def orthonormal(f: Tensor) -> Tensor:
    """`f R^{-1}`, `R^T R = f^T f`, for nearly orthonormal columns."""
    gram = product(f.mT, f)
    if _by_kernels(f):
        upper = _halves(gram)[1].mT
        diagonal(upper).sub_(1)
        return product(f, upper, add=f)  # what is rounded is the change alone
    return factorize(_solve, factorize(torch.linalg.cholesky_ex, gram)[0], f)[0]


def _solve(lower: Tensor, b: Tensor) -> tuple[Tensor]:
    return (torch.linalg.solve_triangular(lower.mT, b, upper=True, left=False),)


def _by_kernels(a: Tensor) -> bool:
    return a.dtype == torch.float32 and len(a) < 1 << 16 and has_kernels(a.device)


def _halves(a: Tensor, inverted: bool = True) -> tuple[Tensor, Tensor]:
    """The lower factor of `a`, which is overwritten, and its inverse. cuSOLVER takes a thousand launches, one after the other.

    Only parts of the inverse are computed if it is not to be `inverted`.
    """
    lower, inverse = torch.zeros_like(a), torch.zeros_like(a)
    _halve(a, lower, inverse, inverted)
    return lower, inverse


def _halve(a: Tensor, lower: Tensor, inverse: Tensor, inverted: bool) -> None:
    """With `a = [[a11, .], [a21, a22]]`: `l11` of `a11`, `l21 = a21 l11^{-T}`, and `l22` of `a22 - l21 l21^T`."""
    d = a.shape[-1]
    if d <= TILE:
        from ..kernels import dense

        dense.cholesky[len(a),](a, lower, inverse, *a.stride()[:2], d, TILE=TILE, BLOCK=BLOCK, num_warps=WARPS)
        return
    half = -(-d // (2 * TILE)) * TILE
    one, two = slice(half), slice(half, d)
    _halve(a[:, one, one], lower[:, one, one], inverse[:, one, one], True)
    below, first = lower[:, two, one], inverse[:, one, one]
    torch.bmm(a[:, two, one], first.mT, out=below)
    a[:, two, two].baddbmm_(below, below.mT, alpha=-1)
    _halve(a[:, two, two], lower[:, two, two], inverse[:, two, two], inverted)
    if inverted:
        inverse[:, two, one].baddbmm_(inverse[:, two, two], torch.bmm(below, first), beta=0, alpha=-1)
