"""Refreshes: factors of one size are solved together, whatever block they belong to, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from .. import roots
from ..linalg import exact_dtype, is_packed, pack, per_slot, place_of_roots, positions, power, symmetrize
from ..methods import Context, Kronecker, State
from ..methods.shampoo import elements_of, factor_correction, factors_of, index_of, is_full, modes_of, refreshed, ridge_of, write
from .background import Background
from .graphs import side_by_side

RESCUES = 4  # slots of a bank that may be sent to eigh in one step: on an accelerator each makes the host wait
# Elements of factors in a batch, which bounds the memory: a quarter of all, within these limits.
SMALLEST, LARGEST = 1 << 23, 1 << 24
PARTS = 2  # batches that a graph has side by side, if the solver asks for it


@dataclass(frozen=True)
class Due:
    """Slots of a stack to be refreshed. ``failed [n]`` counts failures in a row; ``failing`` are slots known to have some."""

    state: State
    slots: Sequence[int]
    ctx: Context
    failed: Tensor
    failing: Collection[int]
    exponent: float
    solver: roots.RootSolver


def refresh(method: Kronecker, due: Sequence[Due], background: Background | None = None) -> None:
    """Refresh everything that is due, in the ``background`` if there is one, and count failures in a row.

    A few of the slots whose last refresh failed are done by eigh. Work that is lost in the background counts as failed.
    """
    hard = [[slot for slot in job.slots if slot in job.failing][:RESCUES] for job in due]
    easy = [[slot for slot in job.slots if slot not in some] for job, some in zip(due, hard, strict=True)]
    threaded, ends = bool(due[0].ctx.hyper.root_device), list[tuple[Tensor, set[int]]]()
    branches = PARTS if all(job.solver.in_parts and slot_size(job) <= LARGEST for job in due) else 1
    for parts, exact in ((easy, False), (hard, True)):
        jobs = [replace(job, slots=slots) for job, slots in zip(due, parts, strict=True) if slots]
        counts, left = [job.failed for job in jobs], [set(job.slots) for job in jobs]
        batches = [partial(Batch, method, batch, exact) for batch in cut_into_batches(jobs)]
        if background is None:
            side_by_side([partial(_make_and_do, batch, counts, left) for batch in batches], branches)
        else:
            background.attempt(partial(_hand_over, batches, background, counts, left, threaded))
            ends += zip(counts, left, strict=True)
    if background is not None:
        background.start(partial(_conclude, background, ends), [failed for failed, _ in ends], threaded)


def _make_and_do(make: Callable[[], Batch], counts: Sequence[Tensor], left: Sequence[set[int]]) -> None:
    """A batch has copies of its factors, so it is not made before its turn."""
    _do(make(), counts, left)


def _do(batch: Batch, counts: Sequence[Tensor], left: Sequence[set[int]]) -> None:
    """Work off a batch. ``left`` are the slots of every job that are still to be done."""
    for number, slots, ok in batch():
        index, failed = index_of(slots, ok.device), counts[number]
        failed[index] = torch.where(ok, 0, failed[index] + 1)
        left[number].difference_update(slots)


def _hand_over(
    batches: Iterable[Callable[[], Batch]],
    background: Background,
    counts: Sequence[Tensor],
    left: Sequence[set[int]],
    threaded: bool,
) -> None:
    for make in batches:
        batch = make()
        background.start(partial(_do, batch, counts, left), [*batch.reads, *counts], threaded)


def _conclude(background: Background, ends: Sequence[tuple[Tensor, set[int]]]) -> None:
    """Count the slots that are left as failed. If there are none, errors are a thing of the past."""
    if not any(left for _, left in ends):
        background.error = None
    for failed, left in ends:
        if left:
            failed[positions(tuple(sorted(left)), failed.device)] += 1


def is_capturable(due: Sequence[Due]) -> bool:
    """Whether that refresh is the same operations every time, and the host never waits for their results."""
    for job in due:
        if job.ctx.hyper.root_device or job.ctx.hyper.refresh_delay:
            return False
        full = any(is_full(job.state, i) for i in modes_of(job.state))
        if full and job.exponent and not job.solver.is_capturable(job.ctx.alive.device):
            return False
    return True


def slot_size(job: Due) -> int:
    """Elements of the factors of a slot, at least 1."""
    return max(1, sum(elements_of(job.state, i) for i in modes_of(job.state)))


def cut_into_batches(due: Sequence[Due]) -> list[dict[int, Due]]:
    """What is due, by its number, in batches of bounded size. A slot stays whole."""
    sizes = [slot_size(job) for job in due]
    everything = sum(size * len(job.ctx.alive) for size, job in zip(sizes, due, strict=True))
    room = most = min(LARGEST, max(SMALLEST, everything // 4))
    batches: list[dict[int, Due]] = [{}]
    for number, (size, job) in enumerate(zip(sizes, due, strict=True)):
        slots = list(job.slots)
        while slots:
            fit = max(room // size, 0 if batches[-1] else 1)
            if fit:
                batches[-1][number] = replace(job, slots=slots[:fit])
                room -= size * len(slots[:fit])
            slots = slots[fit:]
            if slots:
                batches.append({})
                room = most
    return batches if batches[-1] else []


@final
class Batch:
    """Some slots of some jobs. It has its own copy of everything it needs when it is made, so it can be done later, once.

    A slot that is not alive is left out: it keeps what it has, and that is no failure.
    """

    def __init__(self, method: Kronecker, jobs: Mapping[int, Due], exact: bool) -> None:
        self._method, self._jobs, self._exact = method, jobs, exact
        self._indices = [index_of(job.slots, job.ctx.alive.device) for job in jobs.values()]
        self._sides = [
            [_Side(i, job, index) for i in modes_of(job.state)] for job, index in zip(jobs.values(), self._indices, strict=True)
        ]
        self._alive = [job.ctx.alive[index] > 0 for job, index in zip(jobs.values(), self._indices, strict=True)]
        touched = [tensor for job in jobs.values() for tensor in job.state.values()]
        self.reads = [*(side.a for sides in self._sides for side in sides), *self._alive, *touched]

    def __call__(self) -> list[tuple[int, Sequence[int], Tensor]]:
        """The number of each job, its slots, and ``[len(slots)]``, False where that failed."""
        together: dict[Any, list[_Side]] = {}
        for side in (side for sides in self._sides for side in sides):
            if side.e == 0:
                side.fresh["X"] = _identity_like(side.a)
            elif side.a.dim() == 2:
                _diagonal_root(side)
            else:
                together.setdefault((side.a.shape[1:], side.e, side.hyper), []).append(side)
        largest_first = sorted(together.values(), key=lambda sides: -sum(side.a.numel() for side in sides))
        side_by_side([partial(_solve, self._method, sides, self._exact) for sides in largest_first])
        return [
            (number, job.slots, _put(self._method, job, index, alive, sides))
            for (number, job), index, alive, sides in zip(self._jobs.items(), self._indices, self._alive, self._sides, strict=True)
        ]


@final
class _Side:
    """The factors of one mode of some slots, and what comes of them."""

    def __init__(self, mode: int, job: Due, index: slice | Tensor) -> None:
        self.mode, self.job, self.index, self.hyper, self.e = mode, job, index, job.ctx.hyper, job.exponent
        self.target = refreshed(job.state, mode)  # what this is a refresh of
        correction = factor_correction(job.ctx)
        a = factors_of(job.state, mode, index, job.ctx.alive.dtype)
        if isinstance(correction, Tensor):
            correction = (correction[index] if correction.dim() else correction).to(a.dtype)
        self.a = a / per_slot(correction, a)
        self.fresh: State = {}
        self.ok = torch.ones(len(a), dtype=torch.bool, device=a.device)
        self.device = place_of_roots(a.device, self.hyper.root_device)

    def warm(self, role: str) -> Tensor:
        return self.job.state[f"{role}{self.mode}"][self.index].to(self.device, self.a.dtype)


def _solve(method: Kronecker, sides: Sequence[_Side], exact: bool) -> None:
    """What a refresh makes of factors of one size, from the warm start if the solver has one."""
    e, solver = sides[0].e, sides[0].job.solver
    a = _joined([side.a.to(side.device) for side in sides])
    a = a if solver.sees_what_is_not_finite(a, e) else symmetrize(a)
    roles = solver.init(0, a.shape[-1], a.dtype, a.device)
    warm = {role: _joined([side.warm(role) for side in sides]) for role in roles}
    fresh, fine = method.solve(solver, a, e, sides[0].hyper, warm, exact)
    sizes = [len(side.a) for side in sides]
    for role, value in fresh.items():
        for side, part in zip(sides, torch.split(value, sizes), strict=True):
            side.fresh[role] = part.to(side.a.device)
    for side, ok in zip(sides, torch.split(fine, sizes), strict=True):
        side.ok = ok.to(side.a.device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _put(method: Kronecker, job: Due, index: slice | Tensor, alive: Tensor, sides: Sequence[_Side]) -> Tensor:
    """Write the new roots or bases of the slots that are ok and alive. A block takes all of them or none. Those that are used
    later are kept as ``Y``. Returns ``[len(slots)]``, False where a slot that is alive is not ok."""
    state, ok = job.state, torch.ones_like(alive)
    for side in sides:
        ok = ok & _survives(side)
    new: dict[int, Tensor] = {}
    for side in sides:
        for role, value in side.fresh.items():
            old = state[f"{role}{side.mode}"]
            if old is side.target:
                new[side.mode] = pack(value) if is_packed(old) else value
            else:
                write(old, index, value, alive)  # also where the root is not ok: it is better than the last warm start
    if job.ctx.hyper.refresh_delay:
        for side in sides:
            write(state[f"Y{side.mode}"], index, new[side.mode], ok & alive, old=side.target)
    else:
        method.put(state, index, new, ok & alive, job.ctx.hyper)
    return ok | ~alive


def _survives(side: _Side) -> Tensor:
    """Whether a root is ok, and finite and not zero also in the dtype that it is kept in. That of a zero factor is not kept."""
    kept = side.target.dtype
    if "X" not in side.fresh or side.fresh["X"].dtype == kept:
        return side.ok
    rounded = side.fresh["X"].to(kept)
    diagonal = rounded.diagonal(dim1=1, dim2=2) if rounded.dim() == 3 else rounded
    return side.ok & (rounded.isfinite().flatten(1).all(1) & diagonal.ne(0).all(1) | (diagonal[:, 0] < 0))


def _identity_like(a: Tensor) -> Tensor:
    return torch.ones_like(a) if a.dim() == 2 else torch.diag_embed(torch.ones_like(a[..., 0]))


def _diagonal_root(side: _Side) -> None:
    ridge = per_slot(ridge_of(side.a, side.hyper), side.a)
    made = power(side.a.to(exact_dtype(side.a.device)) + ridge, -side.e).to(side.a.dtype)
    side.fresh["X"] = torch.where(side.a.any(1, keepdim=True), made, -1.0)  # a factor that is zero has no root
    side.ok = side.fresh["X"].isfinite().all(1)
