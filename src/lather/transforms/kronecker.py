"""Shampoo: one factor and one root per mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from .. import options, roots
from ..linalg import ema_, gram, gram_diagonal, mode_product, per_slot, positions, symmetrize
from .base import Context, Due, Preconditioner, Stack, State

FULL = "full"
LARGEST = 1 << 25  # elements of factors that are refreshed at a time: what bounds the memory for it


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

    def refresh(self, due: Sequence[Due], exact: bool = False) -> list[Tensor]:
        """Factors of one size are solved together, whatever block they belong to, in batches of bounded size."""
        done = [
            (number, ok)
            for batch in _batches(due)
            for number, ok in zip(batch, _refresh(batch.values(), exact), strict=True)
        ]
        return [torch.cat([ok for i, ok in done if i == number]) for number in range(len(due))]

    def is_capturable(self, due: Sequence[Due]) -> bool:
        for state, _, ctx in due:
            e, group = ctx.exponent(_order(state)), ctx.group
            factors = (state[f"L{i}"] for i in range(_order(state)))
            sizes = {a.shape[-1] for a in factors if a.dim() == 3}
            if e and not all(roots.resolve(group["root"], d, ctx.alive.device, e).is_capturable for d in sizes):
                return False
        return True

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


class _Side:
    """The factors of one mode of some slots, and what comes of them."""

    def __init__(self, mode: int, job: Due, index: Index) -> None:
        self.mode, self.job, self.index = mode, job, index
        self.e = job.ctx.exponent(_order(job.state))
        correction = job.ctx.factor_correction()
        a = job.state[f"L{mode}"][index].to(job.ctx.alive.dtype)
        if isinstance(correction, Tensor):
            correction = (correction[index] if correction.dim() else correction).to(a.dtype)
        self.a = a / per_slot(correction, a)
        self.fresh: State = {}
        self.ok = torch.ones(len(a), dtype=torch.bool, device=a.device)

    @property
    def solver(self) -> roots.RootSolver:
        return roots.resolve(self.job.ctx.group["root"], self.a.shape[-1], self.a.device, self.e)

    @property
    def alike(self) -> Any:
        """What sides that are solved together have in common."""
        return self.a.shape[1:], self.e, id(self.job.ctx.group)

    def warm(self, role: str) -> Tensor:
        return self.job.state[f"{role}{self.mode}"][self.index].to(self.a.dtype)


Index = slice | Tensor


def _order(state: State) -> int:
    return sum(role.startswith("L") for role in state)


def _batches(due: Sequence[Due]) -> Iterator[dict[int, Due]]:
    """What is due, by its number, in pieces that have at most ``LARGEST`` elements of factors in all; a slot stays whole."""
    batch: dict[int, Due] = {}
    room = LARGEST
    for number, job in enumerate(due):
        size = sum(job.state[f"L{i}"][0].numel() for i in range(_order(job.state)))
        slots = list(job.slots)
        while slots:
            fit = max(room // size, 0 if batch else 1)
            if fit:
                batch[number] = job._replace(slots=slots[:fit])
                room -= size * len(slots[:fit])
            slots = slots[fit:]
            if slots:
                yield batch
                batch, room = {}, LARGEST
    if batch:
        yield batch


def _refresh(batch: Iterable[Due], exact: bool) -> list[Tensor]:
    jobs = list(batch)
    indices = [_index(job) for job in jobs]
    sides = [[_Side(i, job, index) for i in range(_order(job.state))] for job, index in zip(jobs, indices, strict=True)]
    together: dict[Any, list[_Side]] = {}
    for side in (side for each in sides for side in each):
        if side.e == 0:
            side.fresh["X"] = _identity_like(side.a)
        elif side.a.dim() == 2:
            _diagonal_root(side)
        else:
            together.setdefault(side.alike, []).append(side)
    for alike in together.values():
        _solve(alike, exact)
    return [_publish(job, index, each) for job, index, each in zip(jobs, indices, sides, strict=True)]


def _index(job: Due) -> Index:
    """The slots: as a slice if they follow each other, which copies nothing."""
    first, last = job.slots[0], job.slots[-1]
    if last - first + 1 == len(job.slots):
        return slice(first, last + 1)
    return positions(tuple(job.slots), job.ctx.alive.device)


def _solve(sides: Sequence[_Side], exact: bool) -> None:
    """Roots of factors of one size, from the warm start if the solver has one."""
    group, e, solver = sides[0].job.ctx.group, sides[0].e, sides[0].solver
    a = _joined([side.a for side in sides])
    a = a if solver.sees_what_is_not_finite(a) and not exact else symmetrize(a)
    roles = solver.init(0, a.shape[-1], a.dtype, a.device)
    warm = {role: _joined([side.warm(role) for side in sides]) for role in roles}
    ridge = _ridge(a, group)
    root = roots.rescue(a, e, ridge, warm) if exact else roots.solve(solver, a, e, ridge, warm)
    sizes = [len(side.a) for side in sides]
    for role, value in {"X": root.value, **warm}.items():
        for side, part in zip(sides, torch.split(value, sizes), strict=True):
            side.fresh[role] = part
    for side, ok in zip(sides, torch.split(root.ok, sizes), strict=True):
        side.ok = ok


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _publish(job: Due, index: Index, sides: Sequence[_Side]) -> Tensor:
    """Write the new roots of the slots that are ok and alive; a block takes all its new roots or none."""
    ok = sides[0].ok
    for side in sides:
        kept = job.state[f"X{side.mode}"].dtype
        ok = ok & side.ok
        if side.fresh["X"].dtype != kept:  # it must also be finite in what it is kept in
            ok = ok & side.fresh["X"].to(kept).isfinite().flatten(1).all(1)
    alive = job.ctx.alive[index] > 0
    for side in sides:
        for role, value in side.fresh.items():
            _put(job.state[f"{role}{side.mode}"], index, value, ok & alive)
    return ok | ~alive


def _ridge(a: Tensor, group: Mapping[str, Any]) -> float | Tensor:
    """``eps``, or under ``damping="relative"`` that times each factor's size: ``[n]``."""
    eps: float = group["eps"]
    return roots.relative_ridge(a, eps) if group["damping"] == "relative" else eps


def _identity_like(a: Tensor) -> Tensor:
    return torch.ones_like(a) if a.dim() == 2 else torch.diag_embed(torch.ones_like(a[..., 0]))


def _diagonal_root(side: _Side) -> None:
    ridge = per_slot(_ridge(side.a, side.job.ctx.group), side.a)
    side.fresh["X"] = roots.power(side.a.double() + ridge, -side.e).to(side.a.dtype)
    side.ok = side.fresh["X"].isfinite().all(1)


def _put(target: Tensor, index: Index, value: Tensor, ok: Tensor) -> None:
    """Write the slots that are ok; the others keep what they have."""
    target[index] = torch.where(per_slot(ok, value), value.to(target.dtype), target[index])
