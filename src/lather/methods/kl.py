"""KL-Shampoo: each factor sees the gradient preconditioned by the other factors."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..linalg import fill_diagonal_, first_of, mode_product, norms, per_slot, power, unpack
from .base import Context, Hyper, Stack, State
from .shampoo import ROOT_OPTIONS, Kronecker


@final
class KL(Kronecker):
    """``L_i <- beta2 L_i + (1 - beta2) W_i W_i^T / d``. ``W = g x_j X_j`` over the other modes ``j``, and ``d`` is the product of
    their sizes.

    The roots ``X_j`` have exponent 1/2 and are as they were last refreshed, so ``W_i W_i^T`` is ``G R^-1 G^T`` for a matrix.
    Before the first refresh they are minus the identity: the products are then those of ``g``, and a root of that sign
    counts as not computed yet.

    With ``k`` modes factors grow as ``c^(2 / k)`` if gradients are ``c`` times as large, where Shampoo's grow as ``c^2``. So before
    the first refresh gradients are divided by ``c^(1 - 1 / k)``, with ``c`` their root mean square. Otherwise the first roots would
    be far too large or too small for the gradients that follow, and the first few of those would drown all others for hundreds
    of steps.
    """

    name = "kl"
    text = "KL-Shampoo, whose factors see the gradient preconditioned by each other"
    default_eps = {"relative": 1e-4, "absolute": 1e-6}  # noqa: RUF012
    reads = ROOT_OPTIONS - {"exponent", "exponent_multiplier"}
    judges = True  # products with roots may overflow where those of the gradient alone do not
    kernels = "graft"

    def init(self, stack: Stack, hyper: Hyper) -> State:
        state = super().init(stack, hyper)
        for i in range(len(stack.shape)):
            fill_diagonal_(state[f"X{i}"], -1.0)
        return state

    def exponent(self, hyper: Hyper, order: int) -> float:
        return 0.5

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> Tensor | None:
        rms = norms(grad) / math.sqrt(grad[0].numel())
        begins = (first_of(state["X0"]) < 0) & (rms > 0)
        size = power(torch.where(begins, rms, 1.0)[:, None], 1 - 1 / (grad.dim() - 1))[:, 0]
        return super().accumulate(state, grad / per_slot(size.to(grad.dtype), grad), ctx)

    def factor_input(self, state: State, grad: Tensor, mode: int) -> tuple[Tensor, float]:
        others = [i for i in range(grad.dim() - 1) if i != mode]
        seen = grad
        for i in others:
            seen = mode_product(seen, unpack(state[f"X{i}"], grad.dtype), i)
        return seen, 1 / math.prod(grad.shape[1 + i] for i in others)

    def products(self, modes: Sequence[str]) -> int:
        return len(modes)  # each factor multiplies the gradient by the roots of the others
