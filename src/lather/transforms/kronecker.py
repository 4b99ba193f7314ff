"""Shampoo: one factor and one root per mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from .. import options, roots
from ..linalg import ema_, from_host, gram, gram_diagonal, mode_product, per_slot, symmetrize
from .base import Context, Preconditioner, Stack, State

FULL = "full"


@final
@dataclass(frozen=True)
class Kronecker(Preconditioner):
    """``L_i <- beta2 L_i + (1 - beta2) G_i G_i^T``, ``X_i = (L_i / bc2 + eps I)^(-e)``, ``P = u x_1 X_1 ... x_k X_k``.

    Under ``damping="relative"``, ``eps`` is times ``||(L_i / bc2)^2||_F^(1/2)``.
    A ``"diagonal"`` mode keeps the diagonal of its factor only. State: factors ``L0, L1, ...``, roots ``X0, X1, ...`` (zero
    until the first refresh), and what the solver keeps for a warm start, such as a basis ``Q0``.
    """

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        state: State = {}
        for i, (d, mode) in enumerate(zip(stack.shape, stack.modes, strict=True)):
            if mode == FULL:
                state[f"L{i}"] = stack.zeros(d, d)
                state[f"X{i}"] = stack.zeros(d, d)
                solver = roots.resolve(group["root"], d, stack.device, options.exponent(group, len(stack.shape)))
                warm = solver.init(stack.n, d, stack.dtype, stack.device)
                state |= {f"{role}{i}": value for role, value in warm.items()}
            else:
                state[f"L{i}"] = stack.zeros(d)
                state[f"X{i}"] = stack.zeros(d)
        return state

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        beta2 = ctx.group["betas"][1]
        for i in range(grad.dim() - 1):
            factor = state[f"L{i}"]
            new = gram(grad, i) if factor.dim() == 3 else gram_diagonal(grad, i)
            if beta2 == 1:
                factor.add_(new)
            else:
                ema_(factor, new, ctx.weight(beta2))

    def refresh(self, state: State, slots: Sequence[int], ctx: Context, exact: bool = False) -> Tensor:
        order = sum(role.startswith("L") for role in state)
        e = ctx.exponent(order)
        index = None if len(slots) == len(ctx.alive) else from_host(slots, ctx.alive)
        correction = ctx.factor_correction()
        bc2 = _take(correction, index) if isinstance(correction, Tensor) else correction
        fresh: State = {}
        ok = torch.ones(len(slots), dtype=torch.bool, device=ctx.alive.device)
        for i in range(order):
            a = _take(state[f"L{i}"], index).to(ctx.alive.dtype)
            a = a / per_slot(bc2, a)
            if e == 0:
                fresh[f"X{i}"] = _identity_like(a)
            elif a.dim() == 2:
                ok &= _diagonal_root(i, a, e, ctx, fresh)
            else:
                ok &= _root(i, a, e, index, ctx, state, fresh, exact)
            if fresh[f"X{i}"].dtype != state[f"X{i}"].dtype:  # it must also be finite in what it is kept in
                ok &= fresh[f"X{i}"].to(state[f"X{i}"].dtype).isfinite().flatten(1).all(1)
        alive = _take(ctx.alive, index) > 0
        for role, value in fresh.items():  # a block takes all its new roots or none
            _put(state[role], index, value, ok & alive)
        return ok | ~alive

    def ready(self, state: State) -> Tensor:
        """A root is positive definite, so its first diagonal element tells it from the zero it starts as."""
        first = state["X0"]
        return (first[:, 0, 0] if first.dim() == 3 else first[:, 0]) != 0

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        order = u.dim() - 1
        if ctx.exponent(order) == 0:
            return u if out is None else out.copy_(u)
        for i in range(order):
            u = mode_product(u, state[f"X{i}"].to(u.dtype), i, out if i == order - 1 else None)
        return u


def _root(
    i: int, a: Tensor, e: float, index: Tensor | None, ctx: Context, state: State, fresh: State, exact: bool
) -> Tensor:
    """Solve for a mode's roots, from the warm start in ``state`` if the solver has one, into ``fresh``."""
    d = a.shape[-1]
    solver = roots.resolve(ctx.group["root"], d, a.device, e)
    roles = solver.init(0, d, a.dtype, a.device)
    warm = {role: _take(state[f"{role}{i}"], index).to(a.dtype) for role in roles}
    a = symmetrize(a)
    ridge = _ridge(a, ctx)
    root = roots.rescue(a, e, ridge, warm) if exact else roots.solve(solver, a, e, ridge, warm)
    fresh |= {f"{role}{i}": value for role, value in warm.items()}
    fresh[f"X{i}"] = root.value
    return root.ok


def _ridge(a: Tensor, ctx: Context) -> float | Tensor:
    """``eps``, or under ``damping="relative"`` that times each factor's size: ``[n]``."""
    eps: float = ctx.group["eps"]
    return roots.relative_ridge(a, eps) if ctx.group["damping"] == "relative" else eps


def _identity_like(a: Tensor) -> Tensor:
    return torch.ones_like(a) if a.dim() == 2 else torch.diag_embed(torch.ones_like(a[..., 0]))


def _diagonal_root(i: int, a: Tensor, e: float, ctx: Context, fresh: State) -> Tensor:
    fresh[f"X{i}"] = roots.power(a.double() + per_slot(_ridge(a, ctx), a), -e).to(a.dtype)
    return fresh[f"X{i}"].isfinite().all(1)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]


def _put(target: Tensor, index: Tensor | None, value: Tensor, ok: Tensor) -> None:
    """Write the slots that are ok; the others keep what they have."""
    kept = torch.where(per_slot(ok, value), value.to(target.dtype), _take(target, index))
    if index is None:
        target.copy_(kept)
    else:
        target[index] = kept
