"""SOAP: Adam in the eigenbases of Shampoo's factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .. import roots
from ..linalg import ema_, norms, per_slot, product, rotate
from .base import Context, Stack, State
from .shampoo import FULL, Index, Kronecker, first_factor, modes_of

SAME = 0.999  # the square of a product of two eigenvectors from which on they are one
ROUNDINGS = 64.0  # of a rotation, below which nothing is told from zero
COARSE = 2.0  # the same where bases are kept in a coarser dtype, or products are made of coarser numbers:
TF32 = 2.0**-10


@final
@dataclass(frozen=True)
class Soap(Kronecker):
    """``w <- beta2 w + (1 - beta2) (Q^T g)^2``, ``P = Q [(Q^T u) / (sqrt(w / bc2) + eps)]``, where ``Q^T`` is all modes times
    the transposed eigenbases ``Q_i`` of their factors ``L_i``, which are Shampoo's.

    State: factors ``L0, L1, ...`` and bases ``Q0, Q1, ...`` (identities until the first refresh, so until then it is Adam) of the
    full modes, and the second moment ``w``. A mode that is not full has neither: it is not rotated. Columns go by descending
    eigenvalue, whoever solves: an element of ``w`` belongs to ranks of eigenvalues, and stays when a basis is refreshed, except
    that it follows vectors that stay and change places (:func:`places`). When bases are no longer made of axes it is moved,
    ``w <- w x_i (Q_i^T Q_i,old)^2`` with squares of elements: the moment of rotated gradients whose elements are not correlated.

    Where ``w`` should be zero, rotations leave what they round: so ``sqrt(w / bc2)`` counts as at least 64 roundings of its root
    mean square over the block, or 2 of bases or products that are coarser.
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
        axes = roots.first_basis(1, a.shape[-1], a.dtype, a.device)["Q"]
        seen = per_slot(a.flatten(1).any(1), a)  # any basis is one of a zero factor
        return {"Q": torch.where(seen, basis.vectors, axes)}, basis.ok

    def put(self, state: State, index: Index, new: Mapping[int, Tensor], ok: Tensor) -> None:
        w = state["w"][index]
        x = w.to(torch.promote_types(w.dtype, torch.float32))
        axes, placed, squares = ok, x, dict[int, Tensor]()
        for i, q in new.items():
            old = state[f"Q{i}"][index]
            axes = axes & _is_of_axes(old)
            squares[i] = alike(old.to(x.dtype), q.to(x.dtype))
            shape = [len(x), *(1 for _ in w.shape[1:])]
            shape[i + 1] = -1
            placed = placed.gather(i + 1, places(squares[i]).view(shape).expand_as(x))
        moved = rotated(x, [squares.get(i) for i in range(w.dim() - 1)])
        fresh = torch.where(per_slot(axes, w), moved, placed).to(w.dtype)
        state["w"][index] = torch.where(per_slot(ok, w), fresh, w)
        super().put(state, index, new, ok)

    def has_come(self, waiting: Tensor) -> Tensor:
        return waiting[:, :, 0].ne(0).any(1)  # zeros are no basis

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
        direction = rotated(rotated(u, _transposed(q)) / _denominator(state, u.dtype, ctx), q)
        return direction if out is None else out.copy_(direction)


def bases(state: State, like: Tensor) -> list[Tensor | None]:
    """Of every mode of a stack, in its dtype; None for a mode that is not rotated."""
    found = (state.get(f"Q{i}") for i in range(like.dim() - 1))
    return [None if q is None else q.to(like.dtype) for q in found]


def alike(old: Tensor, new: Tensor) -> Tensor:
    """``[n, d, d]``: squares of the products of every column of ``new [n, d, d]`` with all of ``old``, of length 1."""
    new, old = (
        q / torch.linalg.vector_norm(q, dim=1, keepdim=True) for q in (new, old)
    )  # a coarse dtype has rounded them
    return product(new.mT, old).square()


def places(squares: Tensor) -> Tensor:
    """``[n, d]``: the old column that every new one takes over from, given how much they are :func:`alike`.

    That is the one with the same vector, if there is one; the others take what is left, in order.

    >>> places(alike(torch.eye(3)[None], torch.eye(3)[None][:, :, [0, 2, 1]]))
    tensor([[0, 2, 1]])
    """
    most, same = squares.max(-1)
    stays = most > SAME
    taken = torch.zeros_like(same).scatter_add_(1, same, stays.long())
    columns, left = (x.argsort(dim=1, stable=True) for x in (stays.long(), taken))  # new ones, and old ones for them
    return torch.where(stays, same, torch.empty_like(same).scatter_(1, columns, left))


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
        coarse = [torch.finfo(state[f"Q{modes[0]}"].dtype).eps]
        coarse += [TF32] if w.is_cuda and dtype == torch.float32 and not roots.are_products_exact() else []
        rounding = max(ROUNDINGS * torch.finfo(dtype).eps, COARSE * max(coarse))
        least = norms(root) * (rounding / math.sqrt(root[0].numel()))
        root = torch.maximum(root, per_slot(least, root))
    return root.add_(ctx.group["eps"])


def _is_of_axes(q: Tensor) -> Tensor:
    """``[n]`` of ``[n, d, d]``: whether every column has one element, as in identities and permutations."""
    return (q.square().amax(1) == 1).all(1)
