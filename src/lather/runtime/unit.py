"""A unit: banks whose blocks travel together, and how gradients come in and directions go out."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compute.executor import Executor, Job
from ..compute.slices import BoundSlice, SliceId
from ..linalg import products_in
from ..planning.messages import SCALE
from ..storage.buffers import FlatBuffer, Pieces, Scratch, ScratchKey, Span
from ..storage.step import Step
from .exchange import Collective, encode, rounded


class Departures(NamedTuple):
    """Where the directions of an executor, and their scales, lie in a buffer of messages.

    Values are by slice and shape, that of a block before any of its dimensions were merged; scales are by slice.
    """

    values: FlatBuffer
    scales: FlatBuffer


@dataclass(frozen=True)
class Look:
    """How to read the gradients of a slice into memory of their own, in a step that is recorded."""

    span: Span
    keys: Mapping[str, ScratchKey]

    def read(self, step: Step, device: torch.device) -> Tensor:
        scratch = Scratch({self.span.key.device: device})
        for key in self.keys.values():
            scratch.reserve(key, self.span.numel)
        return Pieces(self.span, self.keys, scratch, None).read(step)


@dataclass(frozen=True)
class Round:
    """Directions that go out together. See [Note: two hops] in :mod:`lather.planning.messages`. Only the last hop overlaps."""

    ordered: FlatBuffer  # what has to be put in order before it is sent
    swap: Collective | None
    gather: Collective | None
    receives: tuple[Pieces, ...]  # what is moved by the directions that arrive

    def start(self) -> None:
        self.ordered.load()
        if self.swap:
            self.swap.start()
        if self.gather:
            if self.swap:
                self.swap.finish()
            self.gather.start()

    def finish(self) -> None:
        if last := self.gather or self.swap:
            last.finish()

    def settle(self) -> None:
        for collective in (self.swap, self.gather):
            if collective:
                collective.settle()


@dataclass(frozen=True)
class Unit:
    """Banks that share a transport. A step has three phases. A rank that has to miss the step runs them without one. It then sends
    bytes that are NaN in every dtype, so they move nothing. What belongs to an executor goes by its first slice."""

    team: int
    executors: tuple[Executor[Any], ...]
    messages: Tensor  # bytes, the same for gradients and directions
    # If gradients stay where they are:
    reads: Mapping[SliceId, Pieces]  # those that an executor needs in a stack
    looks: Mapping[SliceId, Look]  # those of every slice, for metrics
    # If gradients travel:
    inbound: Collective | None
    sends: tuple[Pieces, ...]  # those that leave for the owners of their blocks
    arrivals: Mapping[SliceId, FlatBuffer]  # the messages from holders, of every executor
    stacks: Mapping[SliceId, Tensor]  # where those that arrive are put
    # If directions stay:
    writes: Mapping[SliceId, Pieces]  # the parameters that they move
    # If directions travel:
    outbound: tuple[Round, ...]
    moved: tuple[int, ...]  # the parameters that arriving directions move
    departures: Mapping[SliceId, Departures]  # the messages to holders, of every executor

    def send(self, step: Step | None) -> None:
        """Phase 1, storage to compute: gradients leave for the owners of their blocks."""
        assert self.inbound
        if step is None:
            self.messages.fill_(255)
        else:
            for pieces in self.sends:
                pieces.post(step)
        self.inbound.start()

    def compute(self, step: Step | None) -> None:
        """Phase 2: batched mathematics. Directions that stay are applied at once, and others leave."""
        if self.inbound:
            self.inbound.finish()
        if step is None:
            self.messages.fill_(255)
        else:
            for executor in self.executors:
                self._run(executor, step)
        for first in self.outbound[:1]:
            first.start()

    def apply(self, step: Step | None) -> None:
        """Phase 3, compute to storage: directions that arrived move the parameters, even those without a gradient on this rank."""
        for this, after in zip(self.outbound, (*self.outbound[1:], None), strict=True):
            this.finish()
            if after:
                after.start()
            if step is not None:
                for pieces in this.receives:
                    pieces.receive(step)
        if step is not None:  # kernels write behind autograd's back
            torch.autograd.graph.increment_version([step.stored.params[i] for i in self.moved])

    def settle(self) -> None:
        """Finish what a step that raised has left over."""
        for one in (self.inbound, *self.outbound):
            if one:
                one.settle()

    def _run(self, executor: Executor[Any], step: Step) -> None:
        """Give an executor its gradients, and send or apply its directions."""
        settings, job = step.settings[executor.key.group], executor.job(step)
        first = executor.slices[0].id
        directions: Sequence[Tensor] = ()
        if job is not None:
            if self.inbound:
                self.arrivals[first].save()
            stacks = [self._stack(part, step) for part in executor.slices]
            with _scope(executor.device, settings.precision):
                directions = executor.update(job, stacks)
                if step.record is not None:
                    self._record(executor, job, step)
        elif self.outbound:
            directions = executor.nothing()
        if self.outbound:
            self._post(self.departures[first], directions, settings.wire_dtype)
            return
        for part, direction in zip(executor.slices, directions, strict=False):  # none, if parameters have been moved already
            if settings.rounds:  # as if it were sent, so that the number of ranks does not show
                direction = rounded(direction, settings.wire_dtype)
            pieces = self.writes[part.id]  # parameters without a gradient are not touched
            pieces.write(direction.flatten(), step, None if step.common_step else {i for i in pieces.members if i in step.grads})

    def _record(self, executor: Executor[Any], job: Job, step: Step) -> None:
        """Record what an executor did."""
        for part, (first, last) in zip(executor.slices, pairwise(executor.firsts), strict=True):
            look = self.looks.get(part.id)
            grads = look.read(step, executor.device).view(-1, *part.key.shape) if look else self.stacks[part.id]
            step.record.look(part, job, slice(first, last), grads)

    def _stack(self, part: BoundSlice, step: Step) -> Tensor | None:
        """The gradients ``[n, ...]`` of a slice of a bank. None if its executor reads them where they are."""
        if self.inbound:
            return self.stacks[part.id]
        pieces = self.reads.get(part.id)
        return pieces.read(step).view(-1, *part.key.shape) if pieces else None

    def _post(self, to: Departures, directions: Sequence[Tensor], wire: str) -> None:
        """Copy directions into the messages that carry them away."""
        values, scales = zip(*(encode(direction, wire) for direction in directions), strict=True)
        to.values.load({(i, shape): values[i].view(-1, *shape) for i, shape in to.values.keys})
        to.scales.load({i: scales[i].view(torch.int8).view(-1, SCALE) for i in to.scales.keys})


def _scope(device: torch.device, precision: str | None) -> AbstractContextManager[Any]:
    """Makes the device current, because kernels are launched there, turns autocast off, and sets the precision of products."""
    scope = ExitStack()
    if torch.is_autocast_enabled(device.type):
        scope.enter_context(torch.autocast(device.type, enabled=False))
    if device.type == "cuda":
        scope.enter_context(torch.cuda.device(device))
    if precision is not None:
        scope.enter_context(products_in(precision, device))
    return scope
