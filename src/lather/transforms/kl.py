"""KL-Shampoo: every factor sees the gradient preconditioned by the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ..linalg import mode_product, per_slot
from .base import State
from .kronecker import Kronecker


@final
@dataclass(frozen=True)
class KL(Kronecker):
    """``L_i <- beta2 L_i + (1 - beta2) W_i W_i^T / d``, ``W = g x_j X_j`` over the other modes ``j``, ``d`` the product of their
    sizes, and ``X_j`` the roots of exponent 1/2 as they were last refreshed, so ``W_i W_i^T`` is ``G R^-1 G^T`` for a matrix.
    Before the first refresh they are identities."""

    def seen_by(self, state: State, grad: Tensor, mode: int) -> Tensor:
        others = [i for i in range(grad.dim() - 1) if i != mode]
        seen = grad
        for i in others:
            seen = mode_product(seen, state[f"X{i}"].to(grad.dtype), i)
        seen = torch.where(per_slot(self.ready(state), grad), seen, grad)
        return seen / math.sqrt(math.prod(grad.shape[1 + i] for i in others))
