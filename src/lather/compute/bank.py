"""A bank: every block of one shape that this rank owns, stacked on dim 0. Runs the pipeline, yields views."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .. import options
from ..linalg import from_host, norms, per_slot, positions, rescale
from ..methods import (
    GRAFTS,
    PRECONDITIONERS,
    Batch,
    Context,
    Due,
    Graft,
    Preconditioner,
    Stack,
    State,
    Transform,
    filter_gradient,
    init_filter,
)
from ..planning.blocks import Block
from ..planning.plan import BankKey
from ..planning.schedule import is_due
from .background import Aside

RESCUES = 4  # slots of a bank that may be sent to eigh in one step: on an accelerator each makes the host wait


class Bank:
    """State ``role -> [n, ...]`` of ``n`` blocks, and the step that turns their gradients into directions.

    ``counts[0]`` counts each slot's gradients that were not finite, ``counts[1]`` its refreshes that failed in a row.
    """

    def __init__(
        self,
        key: BankKey,
        numbers: Sequence[int],
        blocks: Sequence[Block],
        group: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.key = key
        self.numbers = tuple(numbers)  # positions in the plan
        self.blocks = tuple(blocks)
        self.stack = make_stack(key, len(blocks), group, device)
        self.state: State = {}
        self.begun = False  # whether a slot may have been refreshed, as far as the host knows
        self.failing: frozenset[int] = frozenset()  # slots whose last refresh failed, as far as the host knows
        self.counts = torch.zeros(2, len(blocks), dtype=torch.int32, device=self.stack.device)

    def views(self) -> Iterator[tuple[Block, str, Tensor]]:
        """Every block's share of the state: what is checkpointed."""
        for role, tensor in self.state.items():
            for block, view in zip(self.blocks, tensor.unbind(), strict=True):
                yield block, role, view

    def state_changed(self, group: Mapping[str, Any]) -> None:
        """To be called when the state was written from outside, by a checkpoint: forget failures, look for roots."""
        self.counts.zero_()
        self.failing = frozenset()
        method = amortised_of(self.key, group)
        self.begun = method is not None and bool(method.ready(self.state).any())

    @cached_property
    def aside(self) -> Aside:
        """Where refreshes go that are not needed at once."""
        return Aside(self.stack.device)

    def update(
        self,
        grads: Tensor,
        steps: Sequence[int],
        active: Sequence[bool],
        offsets: Mapping[int, int] | None,
        group: Mapping[str, Any],
    ) -> Tensor:
        """Directions ``[n, ...]`` for gradients ``[n, ...]``; NaN marks a slot that sits this step out.

        A slot sits out if its parameter has no gradient, or if its gradient, or the gradient's square, is not finite. It
        keeps its state bit for bit.
        """
        alive = norms(grads).isfinite()
        if all(active):
            self.counts[0] += alive.logical_not()
        else:
            on = from_host(active, alive)
            self.counts[0] += on & alive.logical_not()
            alive &= on
        grads = torch.where(per_slot(alive, grads), grads, 0)
        ctx = Context(group, [max(t, 1) for t in steps], alive.to(grads.dtype))
        direction = self._direction(grads, ctx, active, offsets)
        return torch.where(per_slot(alive, direction), direction, torch.nan)

    def _direction(
        self, grads: Tensor, ctx: Context, active: Sequence[bool], offsets: Mapping[int, int] | None
    ) -> Tensor:
        graft, method = graft_of(self.key, ctx.group), preconditioner_of(self.key, ctx.group)
        graft.accumulate(self.state, grads, ctx)
        u = filter_gradient(self.state, grads, ctx)
        if method is None:
            return graft.apply(self.state, u, ctx)
        amortised = amortised_of(self.key, ctx.group)
        if amortised:
            self._publish(amortised, ctx, active, offsets)
        method.accumulate(self.state, grads, ctx)
        if amortised:
            self._refresh(amortised, ctx, active, offsets)
            amortised.follow(self.state, grads, ctx)
        own = graft.apply(self.state, u, ctx)
        waits = amortised if amortised and not amortised.begins_at_once else None
        started = [True] * len(ctx.steps) if is_alone(amortised, ctx.group) else started_slots(ctx)
        if not any(started) or (waits and not self.begun):
            return own
        direction = method.apply(self.state, u, ctx)
        if ctx.group["graft"] is not None:
            direction = rescale(direction, norms(own))
        ready = waits.ready(self.state) if waits else None
        if not all(started):
            on = from_host(started, own)
            ready = on if ready is None else ready & on
        return direction if ready is None else torch.where(per_slot(ready, own), direction, own)

    def _publish(
        self, method: Preconditioner, ctx: Context, active: Sequence[bool], offsets: Mapping[int, int] | None
    ) -> None:
        """Put roots to use whose delay is over."""
        if late := late_slots(self.numbers, ctx, active, offsets):
            self.aside.finish()
            method.publish(self.state, late)
            self.begun = True

    def _refresh(
        self, method: Preconditioner, ctx: Context, active: Sequence[bool], offsets: Mapping[int, int] | None
    ) -> None:
        if due := due_slots(self.numbers, ctx, active, offsets):
            job = Refresh(self.state, due, ctx, self.counts[1], self.failing)
            refresh(method, [job], self.aside if ctx.group["refresh_delay"] else None)
            self.begun = True


def is_alone(method: Preconditioner | None, group: Mapping[str, Any]) -> bool:
    """Whether there is no graft to follow before ``start_preconditioning_step``, and no need for one."""
    return method is not None and method.begins_at_once and group["graft"] is None


def started_slots(ctx: Context) -> list[bool]:
    """Slots that have reached ``start_preconditioning_step``. Its default, the first period, says when roots are first due and
    no more: a frequency that is raised later does not take roots away."""
    start = ctx.group["start_preconditioning_step"]
    return [start is None or t >= start for t in ctx.steps]


def due_slots(
    numbers: Sequence[int], ctx: Context, active: Sequence[bool], offsets: Mapping[int, int] | None
) -> list[int]:
    """The slots to refresh in this step, of blocks with these numbers."""
    if offsets is None and ctx.uniform and not is_due(ctx.steps[0], ctx.group, None):
        return []
    return [
        slot
        for slot, (number, t) in enumerate(zip(numbers, ctx.steps, strict=True))
        if active[slot] and is_due(t, ctx.group, None if offsets is None else offsets[number])
    ]


def late_slots(
    numbers: Sequence[int], ctx: Context, active: Sequence[bool], offsets: Mapping[int, int] | None
) -> list[int]:
    """The slots whose roots, refreshed ``refresh_delay`` steps ago, are to be used from this step on."""
    delay = ctx.group["refresh_delay"]
    return due_slots(numbers, replace(ctx, steps=[t - delay for t in ctx.steps]), active, offsets) if delay else []


@dataclass(frozen=True)
class Refresh:
    """Slots of a stack to be refreshed; ``failed [n]`` counts failures in a row, ``failing`` are slots known to have some."""

    state: State
    slots: Sequence[int]
    ctx: Context
    failed: Tensor
    failing: Collection[int]

    @property
    def due(self) -> Due:
        return Due(self.state, self.slots, self.ctx)


def refresh(method: Preconditioner, due: Sequence[Refresh], aside: Aside | None = None) -> None:
    """Refresh all that is due, a few of the slots that failed the last time by eigh, and count failures in a row; ``aside``
    of the training, if that is given. What is lost there has failed too."""
    if aside is not None:  # options may change before the work is done
        group = dict(due[0].ctx.group)
        due = [replace(job, ctx=replace(job.ctx, group=group)) for job in due]
    hard = [[slot for slot in job.slots if slot in job.failing][:RESCUES] for job in due]
    easy = [[slot for slot in job.slots if slot not in some] for job, some in zip(due, hard, strict=True)]
    threaded, ends = bool(due[0].ctx.group["root_device"]), list[tuple[Tensor, set[int]]]()
    for parts, exact in ((easy, False), (hard, True)):
        jobs = [(job, Due(job.state, slots, job.ctx)) for job, slots in zip(due, parts, strict=True) if slots]
        counts, left = [job.failed for job, _ in jobs], [set(part.slots) for _, part in jobs]
        batches = method.batches([part for _, part in jobs], exact)
        if aside is None:
            for batch in batches:
                _do(batch, counts, left)
        else:
            aside.attempt(partial(_hand_over, batches, aside, counts, left, threaded))
            ends += zip(counts, left, strict=True)
    if aside is not None:
        aside.start(partial(_conclude, aside, ends), [failed for failed, _ in ends], threaded)


def _do(batch: Batch, counts: Sequence[Tensor], left: Sequence[set[int]]) -> None:
    """Work off a batch; ``left`` are the slots of every stack that are still to be done."""
    for number, slots, ok in batch():
        index, failed = positions(tuple(slots), ok.device), counts[number]
        failed[index] = torch.where(ok, 0, failed[index] + 1)
        left[number].difference_update(slots)


def _hand_over(
    batches: Iterator[Batch], aside: Aside, counts: Sequence[Tensor], left: Sequence[set[int]], threaded: bool
) -> None:
    for batch in batches:
        aside.start(partial(_do, batch, counts, left), [*batch.reads, *counts], threaded)


def _conclude(aside: Aside, ends: Sequence[tuple[Tensor, set[int]]]) -> None:
    """Count the slots that are left, for they were lost; if there are none, errors are a thing of the past."""
    if not any(left for _, left in ends):
        aside.error = None
    for failed, left in ends:
        if left:
            failed[positions(tuple(sorted(left)), failed.device)] += 1


def make_stack(key: BankKey, n: int, group: Mapping[str, Any], device: torch.device) -> Stack:
    return Stack(n, key.shape, key.modes, options.state_dtype(group), options.compute_dtype(group), device)


def preconditioner_of(key: BankKey, group: Mapping[str, Any]) -> Transform | None:
    return PRECONDITIONERS[group["preconditioner"]] if key.method == "kronecker" else None


def amortised_of(key: BankKey, group: Mapping[str, Any]) -> Preconditioner | None:
    """The preconditioner, if it has a part that is refreshed."""
    method = preconditioner_of(key, group)
    return method if isinstance(method, Preconditioner) else None


def graft_of(key: BankKey, group: Mapping[str, Any]) -> Graft:
    if key.method == "kronecker":
        return GRAFTS[group["graft"]]
    return GRAFTS["adagrad" if key.method == "adagrad" else options.elementwise(group)]


def initial_state(key: BankKey, stack: Stack, group: Mapping[str, Any]) -> State:
    """Fresh state for the options as they are now. A stack on the meta device gives the shapes alone."""
    state: State = {}
    if method := preconditioner_of(key, group):
        state |= method.init(stack, group)
    if group["betas"][0] > 0:
        state |= init_filter(stack)
    return state | graft_of(key, group).init(stack, group)
