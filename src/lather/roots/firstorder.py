"""The root in a basis that is followed: exact to first order in the entries that it leaves off the diagonal."""

import torch
from torch import Tensor

from ..linalg import per_slot, power, product, symmetrize
from .base import lift

CAP = 0.5  # largest entry of a correction
FLOOR = 4.0  # an eigenvalue below this many roundings of the largest is not resolved


def first_basis(n: int, d: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """The first warm start of a solver that follows a basis: the identity."""
    q = torch.zeros(n, d, d, dtype=dtype, device=device)
    diagonal(q).fill_(1)
    return {"Q": q}


def diagonal(s: Tensor) -> Tensor:
    """The diagonals [n, d] of [n, d, d], a view."""
    return s.diagonal(dim1=1, dim2=2)


def coupling(s: Tensor, ridge: Tensor, floor: float = FLOOR) -> Tensor:
    """`K_ij = S_ij / sqrt(m_i m_j)` off the diagonal and zero on it, for `s` [n, d, d] and `ridge` [n, 1, 1].

    `m_i = S_ii - min(S_jj, 0) + ridge`, but at least `floor` roundings of the largest `S_jj`: smaller values are noise.
    """
    values = diagonal(s)
    noise = floor * torch.finfo(s.dtype).eps * values.amax(1, keepdim=True)
    values = values - values.amin(1, keepdim=True).clamp(max=0.0) + ridge.squeeze(-1)
    w = torch.maximum(values, noise).clamp(min=torch.finfo(s.dtype).tiny).sqrt().reciprocal()
    k = s * w[:, :, None] * w[:, None, :]
    return k - torch.diag_embed(diagonal(k))


def first_order(q: Tensor, s: Tensor, scale: Tensor, e: float, eps: float | Tensor) -> Tensor:
    """`X = Z Z^T`, `Z = Q diag(f)^(1/2) (I + E / 2)`, for `s = q^T a q / scale` and `f = (lambda + eps)^(-e)`.

    `E_ij = f[lambda_i, lambda_j] S_ij / sqrt(f_i f_j)`, so `Q diag(f)^(1/2) (I + E) diag(f)^(1/2) Q^T` is the formula of
    Daleckii and Krein. `Z Z^T` equals it to first order, and is positive semi-definite for every `E`.
    """
    values = lift(diagonal(s), scale, eps)
    y = q * power(values, -e / 2).to(q.dtype)[:, None, :]
    z = y + product(y, correction(values, coupling(s, per_slot(eps, s) / scale), e) / 2)
    return symmetrize(product(z, z.mT))


def correction(values: Tensor, k: Tensor, e: float) -> Tensor:
    """`E = phi * k`, clamped to `|E| <= 1/2`, for ridged eigenvalues [n, d] in float64.

    `phi_ij = -sinh(e r / 2) / sinh(r / 2)`, `r = log(v_j / v_i)`, equals `f[v_i, v_j] sqrt(v_i v_j / (f_i f_j))`. It is
    computed as `(g_j/g_i - g_i/g_j) / (t_j/t_i - t_i/t_j)`, `g = v^(-e/2)`, `t = v^(1/2)`. It is even in `r`, so below
    `r = eps_machine^(1/3)` its limit `-e` is as accurate as the quotient is above.
    """
    g, t = power(values, -e / 2).to(k.dtype), power(values, 0.5).to(k.dtype)
    top, bottom = (ratio - ratio.mT for ratio in (g[:, None, :] / g[:, :, None], t[:, None, :] / t[:, :, None]))
    near = bottom.abs() < torch.finfo(k.dtype).eps ** (1 / 3)
    return (torch.where(near, -e, top / bottom) * k).clamp(-CAP, CAP)
