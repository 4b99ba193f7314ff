"""The executor of one bank by torch: a sequence of operations on its stack. It runs everywhere."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from ..linalg import all_finite, from_host, norms, per_slot, rescale
from ..methods import Context, Kronecker, filter_gradient
from ..planning.schedule import started_slots
from ..settings import Settings
from ..storage.update import is_rate
from .executor import Executor, Job
from .refresh import Due, refresh
from .slices import BoundSlice


class Seen(NamedTuple):
    """The gradients of a step, zero where a slot skips; what the filter makes of them; who takes part; and the numbers."""

    grads: Tensor
    filtered: Tensor
    alive: Tensor
    ctx: Context


@final
class TorchExecutor(Executor[Seen]):
    """Works on one whole bank."""

    def __init__(self, part: BoundSlice, settings: Settings) -> None:
        super().__init__([part], settings)
        self._bank = part.bank

    def publish(self, job: Job) -> None:
        assert self.method is not None
        self._bank.background.finish()
        self.method.publish(self._bank.state, job.to_publish, job.settings.hyper)
        self._bank.begun = True

    def take_in(self, job: Job, stacks: Sequence[Tensor | None]) -> Seen:
        bank, (grads,) = self._bank, stacks
        assert grads is not None
        alive, lr = norms(grads) < torch.inf, job.step.rates[self.key.group].lr
        if isinstance(lr, Tensor):
            alive &= is_rate(lr).to(alive.device)
        if all(job.active):
            bank.skipped += alive.logical_not()
        else:
            on = from_host(job.active, alive)
            bank.skipped += on & alive.logical_not()
            alive &= on
        grads = torch.where(per_slot(alive, grads), grads, 0)
        ctx = Context(job.settings.hyper_of(self.key.kind), job.steps, alive.to(grads.dtype))
        takes = self.method.accumulate(bank.state, grads, ctx) if self.method else None
        if takes is not None:
            bank.skipped += alive & takes.logical_not()
            alive = alive & takes
            grads, ctx = torch.where(per_slot(alive, grads), grads, 0), replace(ctx, alive=alive.to(grads.dtype))
        self.graft.accumulate(bank.state, grads, ctx)
        filtered = filter_gradient(bank.state, grads, ctx)
        return Seen(grads, filtered, alive, ctx)

    def refresh(self, job: Job, seen: Seen) -> None:
        bank = self._bank
        assert isinstance(self.method, Kronecker) and bank.solver
        due = Due(bank.state, job.due, seen.ctx, bank.failed, bank.failing, bank.exponent, bank.solver)
        refresh(self.method, [due], bank.background if job.settings.hyper.refresh_delay else None)
        bank.begun = True

    def follow(self, job: Job, seen: Seen) -> None:
        if self.method and self.method.follows:
            self.method.follow(self._bank.state, seen.grads, seen.ctx)

    def give_out(self, job: Job, seen: Seen) -> Sequence[Tensor]:
        bank, method, settings = self._bank, self.method, job.settings
        direction = own = self.graft.apply(bank.state, seen.filtered, seen.ctx)
        started = started_slots(job.steps, settings) if method else []
        if method and any(started) and (bank.begun or not method.waits):
            direction = method.apply(bank.state, seen.filtered, seen.ctx)
            ready = method.ready(bank.state) if method.waits else None
            if not all(started):
                on = from_host(started, own)
                ready = on if ready is None else ready & on
            if settings.grafted:
                direction = rescale(direction, own, ready)
            elif ready is not None:
                direction = torch.where(per_slot(ready, own), direction, own)
        bank.broken.logical_or_(seen.alive & all_finite(direction).logical_not())
        return [torch.where(per_slot(seen.alive, direction), direction, torch.nan)]
