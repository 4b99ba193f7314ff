"""Warm-started orthogonal iteration, and the root to first order in the entries that it leaves off the diagonal."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from ..linalg import eye_like, factorize, normalize, per_slot, power, product, symmetrize
from .base import Basis, Root, lift, settle
from .eigh import decompose
from .firstorder import Follower, Frame, correction, coupling, diagonal, project


@final
@dataclass(frozen=True)
class Qr(Follower):
    """`iterations` rounds of `Q <- qr(A Q)` from the last basis, then `X = Q F Q^T` with `S = Q^T A Q` and

    `F_ij = sqrt(f_i f_j) (delta_ij + phi_ij K_ij)`, `f_i = (lambda_i + eps)^(-e)`, `lambda = diag S`,
    `K_ij = S_ij / sqrt((lambda_i + eps)(lambda_j + eps))` off the diagonal,
    `phi_ij = -sinh(e r / 2) / sinh(r / 2)`, `r = log((lambda_j + eps) / (lambda_i + eps))`, `|phi K| <= 1/2`.
    This is the Daleckii-Krein formula `F_ij = f[lambda_i, lambda_j] S_ij` without units and without cancellation.

    The residual is the largest row norm of `K`. Eigenvalues below the rounding of `S` count as noise. The relative
    error of the root is up to half the square of the residual for e = 1/2, and a quarter for e = 1/4 (measured).
    Slots with a residual above `tolerance` (a cold start, a factor that moved far) get their basis from eigh. Finding
    them takes one host read per call, plus those of eigh if there are any; `tolerance=inf` skips this. A slot whose `F`
    is not positive definite is not ok.

    >>> list(Qr(iterations=1).init(n=4, d=8, dtype=torch.float32, device="cpu"))  # what it keeps
    ['Q']
    """

    name: ClassVar[str] = "qr"
    tolerance: float = 0.2

    def flops(self, d: int) -> float:
        return d**3 * (14 / 3 * self.iterations + 8.3)

    def _root(self, a: Tensor, e: float, eps: float | Tensor, state: dict[str, Tensor]) -> Root:
        a, scale = normalize(a)
        ridge = per_slot(eps, a) / scale
        q, s, residual = self._frame(a, ridge, state)
        values = lift(diagonal(s), scale, eps)
        h = eye_like(a) + correction(values, coupling(s, ridge, floor=a.shape[-1]), e)
        y = q * power(values, -e / 2).to(a.dtype)[:, None, :]
        positive = factorize(torch.linalg.cholesky_ex, h)[1] == 0
        return Root(symmetrize(product(product(y, h), y.mT)), positive, residual)

    def _basis(self, a: Tensor, state: dict[str, Tensor]) -> Basis:
        a, scale = normalize(a)
        q, s, residual = self._frame(a, torch.zeros_like(scale), state)
        return Basis(q, diagonal(s) * scale.squeeze(-1), torch.isfinite(residual), residual)

    def _frame(self, a: Tensor, ridge: Tensor, state: dict[str, Tensor]) -> Frame:
        """The new basis, which also becomes the warm start. The diagonal of `s` is in descending order."""
        q = state["Q"]
        for _ in range(self.iterations):
            b = product(a, q)
            order = (q * b).sum(1).argsort(dim=1, descending=True, stable=True)  # track.iterate says why
            q = factorize(torch.linalg.qr, b.take_along_dim(order[:, None, :], 2))[0]
        s = project(a, q)
        order = diagonal(s).argsort(dim=1, descending=True, stable=True)
        s = s.take_along_dim(order[:, :, None], 1).take_along_dim(order[:, None, :], 2)
        residual = torch.linalg.vector_norm(coupling(s, ridge, floor=a.shape[-1]), dim=2).amax(1)
        frame = self._rescued(a, Frame(q.take_along_dim(order[:, None, :], 2), s, residual))
        state["Q"] = settle(frame.q, torch.isfinite(frame.residual))[0]
        return frame

    def _rescued(self, a: Tensor, frame: Frame) -> Frame:
        if math.isinf(self.tolerance):
            return frame
        bad = (~(frame.residual <= self.tolerance)).nonzero().squeeze(1)  # the host read
        if bad.numel() == 0:
            return frame
        exact = decompose(a[bad])
        fixed = Frame(exact.vectors, torch.diag_embed(exact.values), exact.residual)
        return Frame(*(old.index_copy(0, bad, new) for old, new in zip(frame, fixed, strict=True)))
