"""The order of a step, from gradients to directions, written once.

``TorchExecutor`` does the parts with torch, bank by bank, and shows what each part is. ``KernelExecutor`` does them with kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

from ..planning.schedule import due_slots
from ..settings import Settings
from ..storage.step import Step
from .slices import BoundSlice

Seen = TypeVar("Seen")  # what an executor keeps of the gradients within a step


@dataclass(frozen=True)
class Job:
    """One step of an executor. Lists are by slot, counted over all slices of the executor."""

    step: Step
    settings: Settings
    steps: Sequence[int]
    active: Sequence[bool]  # whether the slot's parameter has a gradient
    due: Sequence[int]  # slots to refresh now
    to_publish: Sequence[int]  # slots whose roots, refreshed ``refresh_delay`` steps ago, are used from now on


class Executor(ABC, Generic[Seen]):
    """Turns the gradients of some slots, of one or several banks, into directions."""

    def __init__(self, slices: Sequence[BoundSlice], settings: Settings) -> None:
        self.slices = tuple(slices)
        self.key = slices[0].key
        self.device = slices[0].bank.stack.device
        self.graft = settings.graft_of(self.key.kind)
        self.method = settings.method if any(part.key.modes for part in slices) else None
        self.param_numbers = [block.param for part in slices for block in part.blocks]  # of every slot
        self.n = len(self.param_numbers)
        self.firsts = list(accumulate((part.n for part in slices), initial=0))  # the first slot of every slice
        self._block_numbers = [number for part in slices for number in part.numbers]
        self._preconditioned = [
            slot
            for part, (start, stop) in zip(slices, pairwise(self.firsts), strict=True)
            for slot in range(start, stop)
            if part.key.modes
        ]

    def job(self, step: Step) -> Job | None:
        """What there is to do in a step; None if no slot has a gradient."""
        settings = step.settings[self.key.group]
        if step.common_step:
            steps, active = [step.common_step] * self.n, [True] * self.n
        else:
            steps = [max(step.counts[i], 1) for i in self.param_numbers]  # a parameter without a gradient may be at step 0
            active = [i in step.grads for i in self.param_numbers]
            if not any(active):
                return None
        due: list[int] = []
        to_publish: list[int] = []
        if self.method and self.method.refreshes:
            offsets = step.offsets.get(self.key.group)
            by_slot = [offsets.get(number, 0) for number in self._block_numbers] if offsets else None
            due = due_slots(self._preconditioned, steps, active, settings, by_slot)
            if delay := settings.hyper.refresh_delay:
                to_publish = due_slots(self._preconditioned, steps, active, settings, by_slot, delay)
        return Job(step, settings, steps, active, due, to_publish)

    @final
    def update(self, job: Job, stacks: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The directions ``[n, ...]`` of every slice; none if the parameters have been moved already.

        ``stacks`` are the gradients ``[n, ...]`` of every slice, or None where the executor reads them from the step.

        A slot skips the step if its parameter has no gradient, or if the gradient, its square, or what factors would take in of it
        is not finite. Its direction is NaN, and its state keeps its bits. All slots skip a step whose learning rate, in a tensor on
        the device, is not valid.
        """
        if job.to_publish:
            self.publish(job)
        seen = self.take_in(job, stacks)
        if job.due:
            self.refresh(job, seen)
        self.follow(job, seen)
        return self.give_out(job, seen)

    @abstractmethod
    def publish(self, job: Job) -> None:
        """Put to use the roots whose delay is over."""

    @abstractmethod
    def take_in(self, job: Job, stacks: Sequence[Tensor | None]) -> Seen:
        """Gradients into the graft's moment, the filter and the factors."""

    @abstractmethod
    def refresh(self, job: Job, seen: Seen) -> None:
        """Recompute the roots that are due."""

    @abstractmethod
    def follow(self, job: Job, seen: Seen) -> None:
        """Gradients into state that lives in the new basis, as SOAP's moment does."""

    @abstractmethod
    def give_out(self, job: Job, seen: Seen) -> Sequence[Tensor]:
        """Roots and graft into directions."""

    def nothing(self) -> list[Tensor]:
        """Directions where no slot has a gradient."""
        stacks = [(part.n, part.bank.stack) for part in self.slices]
        return [torch.full((n, *s.shape), torch.nan, dtype=s.compute, device=s.device) for n, s in stacks]
