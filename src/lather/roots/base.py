"""What a root solver is: `X = (A + eps I)^(-e)` for a stack of symmetric positive semi-definite matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..linalg import per_slot
from .numerics import all_finite, eye_like, full_precision


class Root(NamedTuple):
    value: Tensor  # [n, d, d], symmetric; the identity where not ok
    ok: Tensor  # [n] bool
    residual: Tensor  # [n], what the solver could measure of its error; inf where the input was not finite


class Basis(NamedTuple):
    vectors: Tensor  # [n, d, d], one eigenvector per column
    values: Tensor  # [n, d], descending
    ok: Tensor  # [n] bool
    residual: Tensor  # [n]


class RootSolver(ABC):
    """A frozen dataclass whose fields are its options; calling it computes roots.

    The call takes a stack `a` [n, d, d] in float32 or float64 and returns roots in that dtype. A slot that is
    not finite or does not converge has `ok` False and the identity for a value; it raises nothing and leaves
    the other slots as they would be alone. On one CPU thread a slot gets the same bits in every stack.
    `eps` is one ridge for all slots, or one for each [n]; `linalg.per_slot` and `numerics.column` shape either.
    A solver with a warm start replaces entries of `state`; the caller keeps them for the slots that are ok.
    """

    name: ClassVar[str]

    def init(self, n: int, d: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """What a warm start keeps between calls, for `n` slots."""
        return {}

    def is_capturable(self, device: torch.device) -> bool:
        """Whether a CUDA graph can hold a call in float32 there: products and kernels only, no library that allocates."""
        return False

    def check(self, e: float) -> None:
        """Raise ValueError if this solver cannot do the exponent `e`."""
        if not e > 0:
            raise ValueError(f"exponent={e!r} must be positive; for 0 there is no root to take")

    @abstractmethod
    def flops(self, d: int) -> float:
        """Estimated operations per matrix and call."""

    def __call__(self, a: Tensor, e: float, eps: float | Tensor, state: dict[str, Tensor]) -> Root:
        with full_precision(a.device):
            eye = eye_like(a)
            if self.sees_what_is_not_finite(a, e):
                root = self._root(a, e, eps, state)
                return Root(torch.where(root.ok[:, None, None], root.value, eye), root.ok, root.residual)
            finite = all_finite(a)
            if isinstance(eps, Tensor):
                finite = finite & torch.isfinite(eps)
                eps = torch.where(finite, eps, 1.0).to(a.dtype)
            root = self._root(torch.where(finite[:, None, None], a, eye), e, eps, state)
            value, ok = settle(root.value, root.ok & finite)
            return Root(value, ok, root.residual.masked_fill(~finite, torch.inf))

    def sees_what_is_not_finite(self, a: Tensor, e: float) -> bool:
        """Whether NaN and Inf, in the factor or in the root, show in the residual, so that nobody else need look for them."""
        return False

    @abstractmethod
    def _root(self, a: Tensor, e: float, eps: float | Tensor, state: dict[str, Tensor]) -> Root:
        """The call for finite `a`; a value that is not finite counts as not ok."""


class EigenSolver(RootSolver):
    """A solver that goes through an eigenbasis, and can give the basis itself."""

    def basis(self, a: Tensor, state: dict[str, Tensor]) -> Basis:
        """`a = Q diag(values) Q^T`, values descending; the identity where not ok. Otherwise as the call."""
        with full_precision(a.device):
            finite, eye = all_finite(a), eye_like(a)
            basis = self._basis(torch.where(finite[:, None, None], a, eye), state)
            vectors, ok = settle(basis.vectors, basis.ok & finite & all_finite(basis.values))
            values = torch.where(ok[:, None], basis.values, 1.0)
            return Basis(vectors, values, ok, basis.residual.masked_fill(~finite, torch.inf))

    @abstractmethod
    def _basis(self, a: Tensor, state: dict[str, Tensor]) -> Basis:
        """`basis` for finite `a`."""


def settle(value: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """A value [n, d, d] that is not finite is not ok; one that is not ok is the identity."""
    ok = ok & all_finite(value)
    return torch.where(ok[:, None, None], value, eye_like(value)), ok


def lift(values: Tensor, scale: Tensor, eps: float | Tensor) -> Tensor:
    """Eigenvalues [n, d] times `scale` [n, 1, 1], moved up by the least that makes them >= eps, as float64.

    `lambda - min(lambda_min, 0) + eps`: a factor is positive semi-definite; what is below zero is rounding.
    """
    x = values.double() * scale.squeeze(-1).double()
    return x - x.amin(1, keepdim=True).clamp(max=0.0) + per_slot(eps, x)
