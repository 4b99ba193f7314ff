"""The plan of a unit: its messages, buffers and executors, before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from ..compute.bank import Bank, initial_state
from ..compute.executor import Executor
from ..compute.graphs import Graphs
from ..compute.kernel_executor import KernelExecutor
from ..compute.slices import BankSlice, BoundSlice, SliceId, Window, divide_banks, find_window, moves_in_place, scratch_sizes
from ..compute.torch_executor import TorchExecutor
from ..planning.messages import SCALE, SCALED, Item, Traffic, Trip
from ..planning.plan import SIZES, BankKey, Plan, Transport
from ..storage import averaging
from ..storage.buffers import FlatBuffer, Pieces, Scratch, ScratchKey, Span, SpanKey, spans
from ..storage.grids import Grid, coalesce
from ..storage.tensors import is_regular, local
from .exchange import Collective
from .ranks import Comm
from .unit import Departures, Look, Round, Unit

Comms = Callable[[Transport], tuple[Comm, Comm]]  # of a transport's team, and of the places that store the same as this one

FEW = 64  # the most kernel executors that use CUDA graphs; with more of them launches are not what takes time


def make_banks(plan: Plan, places: Sequence[int], params: Sequence[Tensor], old: Mapping[Any, Bank]) -> list[Bank]:
    """This rank's banks, with state for the current options. An old bank of the same blocks keeps its memory."""
    banks = []
    for key, numbers in plan.banks_of(places).items():
        blocks, settings = [plan.blocks[i] for i in numbers], plan.settings[key.group]
        bank = Bank(key, numbers, blocks, settings, params[blocks[0].param].device)
        if same := old.get(identity(bank, params)):
            bank = same.moved_to(bank)
        needed = initial_state(key, len(blocks), settings, torch.device("meta"))
        fits = {role: (like.shape, like.dtype) for role, like in needed.items()}
        kept = {role: x for role, x in bank.state.items() if fits.get(role) == (x.shape, x.dtype)}
        if not needed.keys() == kept.keys() == bank.state.keys():
            bank.state = initial_state(key, len(blocks), settings, bank.stack.device) | kept
        banks.append(bank)
    return banks


def identity(bank: Bank, params: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a bank's memory depends on. It does not depend on the rest of the plan, or on how its blocks travel."""
    key, blocks = bank.key, tuple((id(params[block.param]), block.index) for block in bank.blocks)
    return key.group, key.dtype, key.kind, key.shape, key.modes, bank.stack.dtype, bank.stack.device, blocks


def make_units(plan: Plan, places: Sequence[int], banks: Sequence[Bank], comms: Comms, params: Sequence[Tensor]) -> list[Unit]:
    """All units, also those in which this rank owns nothing, in an order that all ranks share."""
    scratch = Scratch({spec.device: p.device for spec, p in zip(plan.specs, params, strict=True)})
    plans = plan_units(plan, places, [local(p) for p in params])
    for key, numel in (need for each in plans for need in (*each.scratch(), *each.spare())):
        scratch.reserve(key, numel)
    return [each.unit(scratch, banks, *comms(each.transport)) for each in plans]


def plan_units(plan: Plan, places: Sequence[int], stored: Sequence[Tensor] = ()) -> list[UnitPlan]:
    """All units. Those of a team take turns with two buffers of messages, because the directions of one are on the way while the
    next is computed. If gradients travel too, there are three, because those of another unit are on the way."""
    both_ways = {transport.team for transport in plan.transports if transport.inbound}
    turns, units = Counter[int](), []
    for transport in plan.transports:
        team = transport.team
        units.append(UnitPlan(plan, transport, places[team], stored, turns[team] % (3 if team in both_ways else 2)))
        turns[team] += 1
    return units


@final
class UnitPlan:
    """A unit of one place, from the plan alone. ``stored`` only tells how parameters lie in memory, by default contiguous.

    ``buffer`` is the number of the buffer of messages that it uses.
    """

    def __init__(self, plan: Plan, transport: Transport, me: int, stored: Sequence[Tensor] = (), buffer: int = 0) -> None:
        self.plan, self.transport, self.me, self.stored = plan, transport, me, stored
        banks = plan.banks(transport.team, me).items()
        self.banks = {key: numbers for key, numbers in banks if key.transport == transport}
        traffic = Traffic.of(plan, transport, me)
        self.inbound, self.outbound, self.message_bytes = traffic.inbound, traffic.outbound, traffic.nbytes
        self.message_key: ScratchKey = f"messages {transport.team}.{buffer}", transport.device, torch.uint8
        self.by_kernels = self._by_kernels()  # slices that go through kernels together
        together = {part.key for parts in self.by_kernels for part in parts}
        self.by_torch = [BankSlice(key, 0, len(numbers)) for key, numbers in self.banks.items() if key not in together]
        sent = (*self.inbound.sent.items, *self.inbound.kept.items) if self.inbound else ()
        self.sends = spans(plan, me, sent, self._sending)
        self.receives = [spans(plan, me, (*trip.received.items, *trip.kept.items), self._receiving) for trip in self.outbound]
        self.reads = {} if self.inbound else {part.id: self._span(part) for part in self.by_torch}
        apart = [part for parts in self.by_kernels for part in parts if not self._moves_parameters(part.key)]
        self.writes = {} if self.outbound else {part.id: self._span(part) for part in (*self.by_torch, *apart)}

    # What goes where.

    def _by_kernels(self) -> list[list[BankSlice]]:
        """Banks that go through kernels together. Torch takes those with rounded directions or blocks scattered in memory."""
        settings = self.plan.settings
        banks = [
            (key, len(numbers))
            for key, numbers in self.banks.items()
            if (self.outbound or settings[key.group].wire_dtype == "float32")
            and (self.inbound or not self.stored or all(self._window(i) for i in numbers))
        ]
        return divide_banks(banks, settings)

    def _moves_parameters(self, key: BankKey) -> bool:
        """Whether kernels move the parameters. With averaging, torch applies their directions."""
        return not self.outbound and self.plan.settings[key.group].averaging is None

    def _window(self, number: int) -> Window | None:
        """Where a block lies in the tensor that is stored. None if kernels cannot read it there."""
        block = self.plan.blocks[number]
        tensor, region = self.stored[block.param], self.plan.local(block.param, block.region, self.me)
        return find_window(region.start, region.shape, tensor.stride()) if is_regular(tensor) else None

    def _span(self, part: BankSlice) -> Span:
        """What is stored of a slice of a bank."""
        span = Span(SpanKey(part.key.group, part.key.device, part.key.dtype))
        for number in self._numbers(part):
            block = self.plan.blocks[number]
            span.add(block.param, self.plan.local(block.param, block.region, self.me))
        return span

    def _look(self, part: BankSlice) -> Look:
        span = self._span(part)
        return Look(span, self._reading(span.key))

    def _numbers(self, part: BankSlice) -> Sequence[int]:
        return self.banks[part.key][part.start : part.stop]

    def _together(self) -> list[list[BankSlice]]:
        """The slices of every executor."""
        return [*self.by_kernels, *([part] for part in self.by_torch)]

    def _grids(self, items: Iterable[Item]) -> dict[SliceId, tuple[list[Grid], list[Grid]]]:
        """What each executor has in a buffer of messages, as grids over its stacks: values, and scales."""
        groups = self._together()
        slot_of = {
            number: (parts[0].id, i, slot)
            for parts in groups
            for i, part in enumerate(parts)
            for slot, number in enumerate(self._numbers(part))
        }
        found: dict[SliceId, tuple[list[Grid], list[Grid]]] = {parts[0].id: ([], []) for parts in groups}
        for item in items:
            block, (executor, i, slot) = self.plan.blocks[item.move.block], slot_of[item.move.block]
            box, (values, scales) = item.move.region.moved(-a for a in block.region.start), found[executor]
            values.append(Grid((i, block.region.shape), item.offset, (slot, *box.start), (1, *box.shape)))
            if item.scale is not None:
                scales.append(Grid(i, item.scale, (slot, 0), (1, SCALE)))
        return {executor: (coalesce(values), coalesce(scales)) for executor, (values, scales) in found.items()}

    # Bytes.

    def received_bytes(self) -> dict[str, int]:
        """Bytes from other places in a step: gradients and directions."""
        ways: dict[str, Sequence[Trip]] = {"inbound": [self.inbound] if self.inbound else [], "outbound": self.outbound}
        sharers = len(self.transport.mesh.sharers[self.me])
        return {
            way: sum(trip.received_numel(self.me, sharers) * SIZES[trip.received.wire] for trip in trips)
            for way, trips in ways.items()
        }

    def padding_bytes(self) -> int:
        """Bytes received in an all-gather only because its messages are equally long."""
        return sum(trip.padding * SIZES[trip.received.wire] for trip in self.outbound)

    # Scratch memory.

    def scratch(self) -> Iterator[tuple[ScratchKey, int]]:
        """What the unit usually needs of the memory that all units share."""
        yield self.message_key, self.message_bytes
        needs = [(span, self._sending) for span in self.sends] + [(span, self._reading) for span in self.reads.values()]
        needs += [(span, self._receiving) for some in self.receives for span in some]
        needs += [(span, self._writing) for span in self.writes.values()]
        yield from ((key, span.numel) for span, buffers in needs for key in buffers(span.key).values())
        for part in self.by_torch:
            yield self._stack_key(part.key), part.n * part.numel
        for parts in self.by_kernels:
            key = parts[0].key
            for role, (dtype, numel) in scratch_sizes(parts, self.plan.settings[key.group]).items():
                yield (role, key.device, dtype), numel
            if self.inbound:
                yield self._stack_key(key), sum(part.flat_numel for part in parts)

    def spare(self) -> Iterator[tuple[ScratchKey, int]]:
        """What it also needs if kernels turn out not to cover the parameters. It is allocated only then."""
        for some in self.receives:
            for span in some:
                yield from ((key, span.numel) for key in self._sparing(span.key).values())

    def _sending(self, span: SpanKey) -> dict[str, ScratchKey]:
        """The buffers through which gradients go into messages: none, if they travel as they are."""
        settings = self.plan.settings[span.group]
        return self._reading(span) if settings.maximize or settings.decay_mode == "l2" else {}

    def _reading(self, span: SpanKey) -> dict[str, ScratchKey]:
        """The buffers that gradients are read into. Coupled decay needs the parameters too."""
        settings = self.plan.settings[span.group]
        roles = {"grads": settings.hyper.compute_dtype} | ({"params": self._own(span)} if settings.decay_mode == "l2" else {})
        return {role: (role, span.device, dtype) for role, dtype in roles.items()}

    def _receiving(self, span: SpanKey) -> dict[str, ScratchKey]:
        """The buffers for directions that arrive. If kernels move the parameters, there is only one, where scales are applied."""
        found = self._writing(span)
        if not moves_in_place(span.device, span.dtype, self.plan.settings[span.group]):
            return found
        return {"directions": found["directions"]} if self.transport.outbound == SCALED else {}

    def _sparing(self, span: SpanKey) -> dict[str, ScratchKey]:
        """The same, and what torch needs where kernels do not cover the parameters. That has other names, so it takes no memory
        until it is needed."""
        apart = {role: (f"spare {role}", device, dtype) for role, (_, device, dtype) in self._writing(span).items()}
        return apart | self._receiving(span)

    def _writing(self, span: SpanKey) -> dict[str, ScratchKey]:
        """The buffers that parameters are moved in."""
        settings, own = self.plan.settings[span.group], self._own(span)
        roles = {"params": own}
        roles |= {"kept": settings.hyper.compute_dtype} if settings.momentum > 0 else {}
        roles |= {"kept": own} if settings.averaging else {}
        roles |= {"exact": own} if averaging.is_rounded(getattr(torch, span.dtype), settings) else {}
        roles |= {"directions": settings.hyper.compute_dtype} if self.outbound else {}
        return {role: (role, span.device, dtype) for role, dtype in roles.items()}

    def _own(self, span: SpanKey) -> torch.dtype:
        """The dtype of arithmetic on parameters: the compute dtype, or their own if it has more bits."""
        return torch.promote_types(self.plan.settings[span.group].hyper.compute_dtype, getattr(torch, span.dtype))

    def _stack_key(self, key: BankKey) -> ScratchKey:
        return "grads", key.device, self.plan.settings[key.group].hyper.compute_dtype

    # Building.

    def unit(self, scratch: Scratch, banks: Sequence[Bank], comm: Comm, sharers: Comm) -> Unit:
        messages = scratch.take(self.message_key, self.message_bytes)
        there = messages.view(getattr(torch, self.transport.inbound or "uint8"))
        back = messages.view(getattr(torch, self.transport.outbound or "uint8"))
        mine, stacks = {bank.key: bank for bank in banks}, self._stacks(scratch)
        return Unit(
            team=self.transport.team,
            executors=tuple(self._executors(mine, scratch)),
            messages=messages,
            sends=tuple(Pieces(span, self._sending(span.key), scratch, there) for span in self.sends),
            reads={part: Pieces(span, self._reading(span.key), scratch, None) for part, span in self.reads.items()},
            looks={} if self.inbound else {part.id: self._look(part) for parts in self._together() for part in parts},
            stacks=stacks,
            arrivals=dict(self._arrivals(there, stacks)),
            departures=dict(self._departures(back)),
            writes={part: Pieces(span, self._writing(span.key), scratch, None) for part, span in self.writes.items()},
            inbound=_swap(self.inbound, there, comm) if self.inbound else None,
            outbound=tuple(self._rounds(scratch, back, comm, sharers)),
            moved=tuple({grid.key for some in self.receives for span in some for grid in span.grids}),
        )

    def _arrivals(self, messages: Tensor, stacks: Mapping[SliceId, Tensor]) -> Iterator[tuple[SliceId, FlatBuffer]]:
        grids = self._grids((*self.inbound.received.items, *self.inbound.kept.items)) if self.inbound else {}
        for parts in self._together() if self.inbound else ():
            values, _ = grids[parts[0].id]
            tensors = {(i, shape): stacks[parts[i].id].view(-1, *shape) for i, shape in (grid.key for grid in values)}
            yield parts[0].id, FlatBuffer(values, messages, tensors)

    def _departures(self, messages: Tensor) -> Iterator[tuple[SliceId, Departures]]:
        items = [item for trip in self.outbound for item in (*trip.sent.items, *trip.kept.items)]
        for executor, (values, scales) in self._grids(items).items():
            yield executor, Departures(FlatBuffer(values, messages), FlatBuffer(scales, messages))

    def _rounds(self, scratch: Scratch, messages: Tensor, comm: Comm, sharers: Comm) -> Iterator[Round]:
        for trip, some in zip(self.outbound, self.receives, strict=True):
            starts = accumulate((chunk.numel for chunk in trip.chunks), initial=trip.ordered)
            chunks = [
                Grid("messages", start, (trip.sent.start + offset,), (n,))
                for start, (_, offset, n) in zip(starts, trip.chunks, strict=False)
            ]
            yield Round(
                ordered=FlatBuffer(chunks, messages, {"messages": messages}),
                swap=_swap(trip, messages, comm) if trip.swap else None,
                gather=_gather(trip, messages, sharers) if trip.part else None,
                receives=tuple(Pieces(span, self._sparing(span.key), scratch, messages) for span in some),
            )

    def _stacks(self, scratch: Scratch) -> dict[SliceId, Tensor]:
        """Where gradients that arrive are put: side by side in one buffer if they go through kernels together."""
        if not self.inbound:
            return {}
        starts = [(part, 0) for part in self.by_torch]
        for parts in self.by_kernels:
            starts += zip(parts, accumulate((part.flat_numel for part in parts), initial=0), strict=False)
        return {part.id: scratch.take(self._stack_key(part.key), part.n, *part.shape, start=start) for part, start in starts}

    def _executors(self, banks: Mapping[BankKey, Bank], scratch: Scratch) -> Iterator[Executor[Any]]:
        cuda = scratch.devices[self.transport.device].type == "cuda"
        graphs = Graphs() if cuda and len(self.by_kernels) <= FEW else None
        for parts in self.by_kernels:
            slices, settings = self._with_windows(parts, banks), self.plan.settings[parts[0].key.group]
            reads, moves = self.inbound is None, self._moves_parameters(parts[0].key)
            yield KernelExecutor(slices, settings, scratch, reads_gradients=reads, moves_parameters=moves, graphs=graphs)
        for part in self.by_torch:
            yield TorchExecutor(part.bound(banks[part.key]), self.plan.settings[part.key.group])

    def _with_windows(self, slices: Sequence[BankSlice], banks: Mapping[BankKey, Bank]) -> list[BoundSlice]:
        """The slices with where their blocks lie: in the stacks of what has arrived, or in the tensors that are stored."""
        parts = []
        tensors: dict[int, int] = {}  # the parameters, numbered
        for number, part in enumerate(slices):
            if self.inbound:
                indices = [number] * part.n
                windows = [Window(slot * part.numel, (part.numel,), (1,)) for slot in range(part.n)]
            else:
                blocks = self._numbers(part)
                indices = [tensors.setdefault(self.plan.blocks[i].param, len(tensors)) for i in blocks]
                windows = [window for window in map(self._window, blocks) if window]
            parts.append(part.bound(banks[part.key], indices, windows))
        return parts


def _swap(trip: Trip, messages: Tensor, comm: Comm) -> Collective:
    """The all-to-all of a trip, to where it is needed or to where it is gathered from."""
    assert trip.swap
    size = messages.element_size()
    out, into = ([n * size for n in splits] for splits in trip.swap)  # in bytes
    sent = _bytes(messages, trip.swapped_from, sum(trip.swap[0]))
    received = _bytes(messages, trip.swapped_to, sum(trip.swap[1]))
    return Collective(partial(comm.exchange, received, sent, into, out))


def _gather(trip: Trip, messages: Tensor, sharers: Comm) -> Collective:
    sent = _bytes(messages, trip.gathered_from, trip.part)
    received = _bytes(messages, trip.received.start, len(sharers.ranks) * trip.part)
    return Collective(partial(sharers.gather, received, sent))


def _bytes(messages: Tensor, start: int, numel: int) -> Tensor:
    return messages[start : start + numel].view(torch.uint8)
