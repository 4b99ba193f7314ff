"""SOAP: Adam in the eigenbases of Shampoo's factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .. import roots
from ..linalg import ema_, norms, per_slot, rotate
from .base import Context, Stack, State
from .kronecker import FULL, Index, Kronecker, first_factor, modes_of

ROUNDINGS = 64.0  # of a rotation, below which nothing is told from zero
SLACK = 2.0  # over the longest step of Adam


@final
@dataclass(frozen=True)
class Soap(Kronecker):
    """``w <- beta2 w + (1 - beta2) (Q^T g)^2``, ``P = Q [(Q^T u) / (sqrt(w / bc2) + eps)]``, where ``Q^T`` is all modes times
    the transposed eigenbases ``Q_i`` of their factors ``L_i``, which are Shampoo's.

    State: factors ``L0, L1, ...`` and bases ``Q0, Q1, ...`` (identities until the first refresh, so until then it is Adam) of the
    full modes, and the second moment ``w``. A mode that is not full has neither: it is not rotated. Columns go by descending
    eigenvalue, whoever solves: an element of ``w`` belongs to ranks of eigenvalues, and stays when a basis is refreshed. When
    bases are no longer identities it is moved, ``w <- w x_i (Q_i^2)^T`` with squares of elements: the moment of
    rotated gradients whose elements are not correlated.

    Where ``w`` should be zero, rotations leave what they round: so ``sqrt(w / bc2)`` counts as at least 64 roundings of its root
    mean square over the block. Where ``w`` was kept for another basis it may be far too small, so elements in the basis are cut at
    twice the most that Adam's could be (:func:`reach`).
    """

    begins_at_once: ClassVar[bool] = True

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        state: State = {}
        full = [(i, d) for i, (d, mode) in enumerate(zip(stack.shape, stack.modes, strict=True)) if mode == FULL]
        for i, d in full:
            state[f"L{i}"] = first_factor(stack, d, group)
            state[f"Q{i}"] = roots.first_basis(stack.n, d, stack.dtype, stack.device)["Q"]
        if group["refresh_delay"]:
            state |= {f"Y{i}": torch.zeros_like(state[f"Q{i}"]) for i, _ in full}
        return state | {"w": stack.zeros(*stack.shape)}

    def solve(
        self, solver: roots.RootSolver, a: Tensor, e: float, group: Mapping[str, Any], warm: State, exact: bool
    ) -> tuple[State, Tensor]:
        basis = roots.rescue_basis(a) if exact else roots.solve_basis(solver, a, warm)
        return {"Q": basis.vectors}, basis.ok

    def put(self, state: State, index: Index, new: Mapping[int, Tensor], ok: Tensor) -> None:
        w = state["w"][index]
        x = w.to(torch.promote_types(w.dtype, torch.float32))
        for i in new:  # any basis is one of a zero factor, and would end what identities stand for
            ok = ok & state[f"L{i}"][index].flatten(1).any(1)
        first = ok
        for i in new:
            first = first & _is_identity(state[f"Q{i}"][index])
        squares = [new[i].to(x.dtype).mT.square() if i in new else None for i in range(w.dim() - 1)]
        moved = rotated(x, squares)
        state["w"][index] = torch.where(per_slot(first, w), moved.to(w.dtype), w)
        super().put(state, index, new, ok)

    def follow(self, state: State, grad: Tensor, ctx: Context) -> None:
        square, beta2 = rotated(grad, _transposed(bases(state, grad))).square(), ctx.group["betas"][1]
        if beta2 == 1:
            state["w"].add_(square)
        else:
            ema_(state["w"], square, ctx.weight(beta2))

    def ready(self, state: State) -> Tensor:
        return torch.ones(len(state["w"]), dtype=torch.bool, device=state["w"].device)

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        q = bases(state, u)
        within = _cut_(rotated(u, _transposed(q)) / _denominator(state, u.dtype, ctx), ctx)
        direction = rotated(within, q)
        return direction if out is None else out.copy_(direction)


def bases(state: State, like: Tensor) -> list[Tensor | None]:
    """Of every mode of a stack, in its dtype; None for a mode that is not rotated."""
    found = (state.get(f"Q{i}") for i in range(like.dim() - 1))
    return [None if q is None else q.to(like.dtype) for q in found]


def rotated(x: Tensor, factors: Sequence[Tensor | None]) -> Tensor:
    """Every mode of ``x [n, d1, ..., dk]`` times its factor ``[n, d, d]``, if there is one."""
    if all(factor is None for factor in factors):
        return x
    for factor in reversed(factors):
        x = x.movedim(-1, 1) if factor is None else rotate(x, factor)
    return x.contiguous()


def _transposed(factors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if factor is None else factor.mT for factor in factors]


def _denominator(state: State, dtype: torch.dtype, ctx: Context) -> Tensor:
    w = state["w"].to(dtype)
    root = (w / per_slot(ctx.factor_correction(), w)).sqrt_()
    if modes := modes_of(state):
        rounding = max(torch.finfo(x).eps for x in (dtype, state[f"Q{modes[0]}"].dtype))
        least = norms(root) * (ROUNDINGS * rounding / math.sqrt(root[0].numel()))
        root = torch.maximum(root, per_slot(least, root))
    return root.add_(ctx.group["eps"])


def _cut_(x: Tensor, ctx: Context) -> Tensor:
    group = ctx.group
    (beta1, beta2), beta3 = group["betas"], group["beta3"]
    beta3 = beta1 if beta3 is None else beta3
    most = ctx.correction(lambda t: SLACK * reach(t, beta1, beta2, beta3, group["bias_correction"]))
    if not isinstance(most, Tensor):
        return x.clamp_(-most, most) if most < math.inf else x
    most = per_slot(most, x)
    return torch.minimum(torch.maximum(x, -most), most)


@lru_cache(maxsize=1024)
def reach(t: int, beta1: float, beta2: float, beta3: float, bias_correction: bool) -> float:
    """The most that an element of Adam's direction can be at step ``t``, whatever the gradients were.

    With a filtered gradient ``sum_i a_i g_i`` and a moment ``sum_i b_i g_i^2`` it is ``(sum_i a_i^2 / b_i)^(1/2)``, by Cauchy and
    Schwarz. It grows without bound, and is not used, if the filter is the longer memory.

    >>> [round(reach(t, 0.9, 0.999, 0.9, True), 2) for t in (1, 10, 100, 10**6)], reach(9, 0.9, 0.8, 0.9, True)
    ([1.0, 1.04, 2.24, 7.27], inf)
    """
    if beta1 > 0 and beta1 * beta1 >= beta2:
        return math.inf
    new, bc1, bc2 = 1 - beta2, 1.0, 1.0
    if beta2 == 1:
        new = 1.0
    elif bias_correction:
        bc2 = 1 - beta2**t
    if beta1 == 0:
        return math.sqrt(bc2 / new)
    if bias_correction:
        bc1 = 1 - beta3 * beta1 ** (t - 1)
    ratio = beta1 * beta1 / beta2
    past = (1 - ratio ** (t - 1)) / (1 - ratio) / beta2
    return math.sqrt(((1 - beta3) ** 2 + (beta3 * (1 - beta1)) ** 2 * past) * bc2 / new) / bc1


def _is_identity(q: Tensor) -> Tensor:
    """``[n]`` of ``[n, d, d]``."""
    return (q == torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)).flatten(1).all(1)
