"""The contract of a root solver: `X = (A + eps I)^(-e)` for a stack of symmetric positive semi-definite matrices."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..linalg import all_finite, eye_like, full_precision, per_slot, relative_ridge

MOST = 1000  # rounds of any iteration. All of them always run, so a larger number is a mistake that looks like a hang.
FINEST = 1e-16  # the least part of the largest eigenvalue that options may ask for; float64 resolves no less


class Root(NamedTuple):
    value: Tensor  # [n, d, d], symmetric
    ok: Tensor  # [n] bool
    residual: Tensor  # [n], the solver's estimate of its error; inf where the input was not finite


class Basis(NamedTuple):
    vectors: Tensor  # [n, d, d], one eigenvector per column
    values: Tensor  # [n, d], descending; of a solver that keeps columns, in their order and as its last basis sees them
    ok: Tensor  # [n] bool
    residual: Tensor  # [n]


class Relative(NamedTuple):
    """A ridge of `eps ||A^2||_F^(1/2)`, see `linalg.relative_ridge`."""

    eps: float


Ridge = float | Tensor | Relative  # one for all slots, or one per slot [n]


class RootSolver(ABC):
    """A frozen dataclass whose fields are its options. Calling it computes roots.

    The call takes a stack `a` [n, d, d] in float32 or float64 and returns roots in that dtype. A slot that is not finite or does
    not converge raises nothing: its `ok` is False and its value is of no use. It does not affect the other slots. On one CPU
    thread a slot gets the same bits in every stack. `eps` is the ridge. A solver with a warm start replaces entries of `state` by
    others that will do, whether a slot is ok or not.
    """

    name: ClassVar[str]
    knows_size: ClassVar[bool] = False  # whether `_root` finds the norm that a relative ridge is a part of, and takes such ridges
    in_parts: ClassVar[bool] = False  # whether it is a chain of small launches, so parts of a stack should overlap

    def init(self, n: int, d: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """The first warm start, for `n` slots."""
        return {}

    def is_capturable(self, device: torch.device) -> bool:
        """Whether a CUDA graph can hold a float32 call on `device`: it must not use a library that allocates memory."""
        return False

    def check(self, e: float) -> None:
        """Raise ValueError if this solver cannot do the exponent `e`."""
        if not e > 0:
            raise ValueError(f"exponent={e!r} must be positive; an exponent of 0 needs no root")

    @abstractmethod
    def flops(self, d: int) -> float:
        """Estimated operations per matrix and call."""

    def __call__(self, a: Tensor, e: float, eps: Ridge, state: dict[str, Tensor]) -> Root:
        with full_precision(a.device):
            if self.sees_what_is_not_finite(a, e):
                return self._root(a, e, eps, state)
            finite = all_finite(a)
            eps = eps if self.knows_size else absolute(a, eps)
            if isinstance(eps, Tensor):
                finite = finite & torch.isfinite(eps)
                eps = torch.where(finite, eps, 1.0).to(a.dtype)
            root = self._root(torch.where(finite[:, None, None], a, 0), e, eps, state)
            value, ok = settle(root.value, root.ok & finite)
            return Root(value, ok, root.residual.masked_fill(~finite, torch.inf))

    def sees_what_is_not_finite(self, a: Tensor, e: float) -> bool:
        """Whether NaN and Inf in the factor or the root always show in the residual. The call then does not look for them.

        Otherwise a value that is not ok is the identity.
        """
        return False

    @abstractmethod
    def _root(self, a: Tensor, e: float, eps: Any, state: dict[str, Tensor]) -> Root:
        """The call for finite `a` and a ridge in numbers; for any `a` and ridge, if `sees_what_is_not_finite`.

        A root that is not finite counts as not ok.
        """


class EigenSolver(RootSolver):
    """A solver that computes an eigenbasis, and can return it."""

    keeps_columns: ClassVar[bool] = False  # whether a column follows the column in the same place, whatever its eigenvalue

    def basis(self, a: Tensor, state: dict[str, Tensor]) -> Basis:
        """`a = Q diag(values) Q^T` with descending values; the identity where not ok. The contract of the call applies."""
        with full_precision(a.device):
            if self.sees_what_is_not_finite(a, 0.0):
                vectors, values, ok, residual = self._basis(a, state)
                return Basis(vectors, torch.where(ok[:, None], values, 1.0), ok, residual)
            finite = all_finite(a)
            vectors, values, ok, residual = self._basis(torch.where(finite[:, None, None], a, 0), state)
            vectors, ok = settle(vectors, ok & finite & all_finite(values))
            return Basis(vectors, torch.where(ok[:, None], values, 1.0), ok, residual.masked_fill(~finite, torch.inf))

    @abstractmethod
    def _basis(self, a: Tensor, state: dict[str, Tensor]) -> Basis:
        """`basis` for finite `a`; for any `a`, and with the identity where not ok, if `sees_what_is_not_finite`."""


def absolute(a: Tensor, eps: Ridge) -> float | Tensor:
    """The ridge of factors in numbers."""
    return relative_ridge(a, eps.eps) if isinstance(eps, Relative) else eps


def check_count(name: str, value: object, low: int = 1, most: int = MOST) -> None:
    """Refuse an option of a solver that is not a count within limits."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {low} and at most {most}")


def settle(value: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """Mark values [n, d, d] that are not finite as not ok, and set values that are not ok to the identity."""
    ok = ok & all_finite(value)
    return torch.where(ok[:, None, None], value, eye_like(value)), ok


def lift(values: Tensor, scale: Tensor, eps: float | Tensor) -> Tensor:
    """`x - min(x_min, 0) + eps` in float64, `x = values [n, d] * scale [n, 1, 1]`. A factor's negative eigenvalues are rounding."""
    x = values.double() * scale.squeeze(-1).double()
    return x - x.amin(1, keepdim=True).clamp(max=0.0) + per_slot(eps, x)
