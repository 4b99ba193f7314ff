"""KL-Shampoo: every factor sees the gradient preconditioned by the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from ..linalg import mode_product
from .base import Stack, State
from .shampoo import Kronecker, diagonal_of


@final
@dataclass(frozen=True)
class KL(Kronecker):
    """``L_i <- beta2 L_i + (1 - beta2) W_i W_i^T / d``, ``W = g x_j X_j`` over the other modes ``j``, ``d`` the product of their
    sizes, and ``X_j`` the roots of exponent 1/2 as they were last refreshed, so ``W_i W_i^T`` is ``G R^-1 G^T`` for a matrix.

    Before the first refresh they are minus the identity: the products are those of ``g``, and it is plain that they are no roots.
    """

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        state = super().init(stack, group)
        for i in range(len(stack.shape)):
            diagonal_of(state[f"X{i}"]).fill_(-1.0)
        return state

    def seen_by(self, state: State, grad: Tensor, mode: int) -> tuple[Tensor, float]:
        others = [i for i in range(grad.dim() - 1) if i != mode]
        seen = grad
        for i in others:
            seen = mode_product(seen, state[f"X{i}"].to(grad.dtype), i)
        return seen, 1 / math.prod(grad.shape[1 + i] for i in others)
