"""The plan of a unit: its messages, buffers and executors, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from ..compute.bank import Bank, initial_state
from ..compute.executor import Executor
from ..compute.graphs import Graphs
from ..compute.kernel_executor import KernelExecutor
from ..compute.slices import BankSlice, BoundSlice, SliceId, Window, divide_banks, find_window, scratch_sizes
from ..compute.torch_executor import TorchExecutor
from ..planning.messages import SCALE, SIZES, Messages, inbound_messages, message_numel, outbound_messages
from ..planning.plan import BankKey, Plan, Transport
from ..storage import averaging
from ..storage.buffers import Pieces, Scratch, ScratchKey, Span, spans
from ..storage.grids import Grid, coalesce
from ..storage.tensors import is_regular, local
from .exchange import Collective
from .ranks import Comm
from .unit import Look, MessageGrids, Unit

FEW = 64  # the most kernel executors that use CUDA graphs; with more of them launches are not what takes time


def make_banks(plan: Plan, places: Sequence[int], params: Sequence[Tensor], old: Mapping[Any, Bank]) -> list[Bank]:
    """This rank's banks, with state for the current options. An old bank of the same blocks keeps its memory."""
    banks = []
    for key, numbers in plan.banks_of(places).items():
        blocks, settings = [plan.blocks[i] for i in numbers], plan.settings[key.group]
        bank = Bank(key, numbers, blocks, settings, params[blocks[0].param].device)
        if same := old.get(identity(bank, params)):
            bank = same.moved_to(bank)
        needed = initial_state(key, replace(bank.stack, device=torch.device("meta")), settings)
        fits = {role: (like.shape, like.dtype) for role, like in needed.items()}
        kept = {role: x for role, x in bank.state.items() if fits.get(role) == (x.shape, x.dtype)}
        if not needed.keys() == kept.keys() == bank.state.keys():
            bank.state = initial_state(key, bank.stack, settings) | kept
        banks.append(bank)
    return banks


def identity(bank: Bank, params: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a bank's memory depends on. It does not depend on the rest of the plan, or on how its blocks travel."""
    key, blocks = bank.key, tuple((id(params[block.param]), block.index) for block in bank.blocks)
    return key.group, key.dtype, key.kind, key.shape, key.modes, bank.stack.dtype, bank.stack.device, blocks


def make_units(
    plan: Plan, places: Sequence[int], banks: Sequence[Bank], comms: Sequence[Comm], params: Sequence[Tensor]
) -> list[Unit]:
    """All units, also those in which this rank owns nothing, in an order that all ranks share."""
    scratch = Scratch({spec.device: p.device for spec, p in zip(plan.specs, params, strict=True)})
    plans = plan_units(plan, places, [local(p) for p in params])
    for key, numel in (need for each in plans for need in each.scratch()):
        scratch.reserve(key, numel)
    return [each.unit(scratch, banks, comms[each.transport.team]) for each in plans]


def plan_units(plan: Plan, places: Sequence[int], stored: Sequence[Tensor] = ()) -> list[UnitPlan]:
    return [UnitPlan(plan, transport, places[transport.team], stored) for transport in plan.transports]


@final
class UnitPlan:
    """A unit of one place, from the plan alone. ``stored`` only tells how parameters lie in memory, by default contiguous."""

    def __init__(self, plan: Plan, transport: Transport, me: int, stored: Sequence[Tensor] = ()) -> None:
        self.plan, self.transport, self.me, self.stored = plan, transport, me, stored
        banks = plan.banks(transport.team, me).items()
        self.banks = {key: numbers for key, numbers in banks if key.transport == transport}
        self.inbound = inbound_messages(plan, transport, me) if transport.inbound else None
        self.outbound = outbound_messages(plan, transport, me) if transport.outbound else None
        self.by_kernels = self._by_kernels()  # slices that go through kernels together
        together = {part.key for parts in self.by_kernels for part in parts}
        self.by_torch = [BankSlice(key, 0, len(numbers)) for key, numbers in self.banks.items() if key not in together]
        self.sends = spans(plan, me, self.inbound[0].items) if self.inbound else []
        self.receives = spans(plan, me, self.outbound[1].items) if self.outbound else []
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
        return self.outbound is None and self.plan.settings[key.group].averaging is None

    def _window(self, number: int) -> Window | None:
        """Where a block lies in the tensor that is stored. None if kernels cannot read it there."""
        block = self.plan.blocks[number]
        tensor, region = self.stored[block.param], self.plan.local(block.param, block.region, self.me)
        return find_window(region.start, region.shape, tensor.stride()) if is_regular(tensor) else None

    def _span(self, part: BankSlice) -> Span:
        """What is stored of a slice of a bank."""
        span = Span(part.key.group, part.key.device, part.key.dtype)
        for number in self._numbers(part):
            block = self.plan.blocks[number]
            span.add(block.param, self.plan.local(block.param, block.region, self.me))
        return span

    def _look(self, part: BankSlice) -> Look:
        span = self._span(part)
        return Look(span, self._reading(span))

    def _slices(self) -> list[BankSlice]:
        return [part for parts in (self.by_torch, *self.by_kernels) for part in parts]

    def _numbers(self, part: BankSlice) -> Sequence[int]:
        return self.banks[part.key][part.start : part.stop]

    def _slots(self, messages: Messages | None) -> dict[SliceId, MessageGrids]:
        """What each slice has in a buffer of messages, as grids over its stack."""
        slices = self._slices()
        slot_of = {number: (part.id, slot) for part in slices for slot, number in enumerate(self._numbers(part))}
        found: dict[SliceId, tuple[list[Grid], list[Grid]]] = {part.id: ([], []) for part in slices}
        for item in messages.items if messages else ():
            block, (part, slot) = self.plan.blocks[item.move.block], slot_of[item.move.block]
            box = item.move.region.moved(-a for a in block.region.start)
            found[part][0].append(Grid(block.region.shape, item.offset, (slot, *box.start), (1, *box.shape)))
            if item.scale is not None:
                found[part][1].append(Grid("scale", item.scale, (slot, 0), (1, SCALE)))
        return {part: MessageGrids(coalesce(pieces), coalesce(scales)) for part, (pieces, scales) in found.items()}

    # Bytes.

    def received_bytes(self) -> dict[str, int]:
        """Bytes from other places in a step: gradients and directions."""
        ways = {"inbound": self.inbound, "outbound": self.outbound}
        received = {way: messages[1] for way, messages in ways.items() if messages}
        return {way: each.nbytes - each.splits[self.me] * SIZES[each.wire] for way, each in received.items()}

    def padding_bytes(self) -> int:
        """Bytes received in an all-gather only because its messages are equally long."""
        if not self.outbound or not self.transport.gather:
            return 0
        wire, moves = self.outbound[1].wire, [item.move for item in self.outbound[1].items if item.move.src != self.me]
        needed = message_numel(sum(move.region.numel for move in moves), len(moves), wire)
        return self.received_bytes()["outbound"] - needed * SIZES[wire]

    def buffer_bytes(self) -> int:
        """Persistent buffers of messages."""
        return sum(self._buffers())

    def _buffers(self) -> tuple[int, int, int]:
        """Bytes of three buffers: gradients sent or directions received, gradients received, and directions sent."""
        there = [each.nbytes for each in self.inbound or ()] or [0, 0]
        back = [each.nbytes for each in self.outbound or ()] or [0, 0]
        return max(there[0], back[1]), there[1], back[0]

    # Scratch memory.

    def scratch(self) -> Iterator[tuple[ScratchKey, int]]:
        """What the unit needs of the memory that all units share."""
        for span in (*self.sends, *self.reads.values()):
            yield from ((key, span.numel) for key in self._reading(span).values())
        for span in (*self.receives, *self.writes.values()):
            yield from ((key, span.numel) for key in self._writing(span).values())
        for part in self.by_torch:
            yield self._stack_key(part.key), part.n * part.numel
        for parts in self.by_kernels:
            key = parts[0].key
            for role, (dtype, numel) in scratch_sizes(parts, self.plan.settings[key.group]).items():
                yield (role, key.device, dtype), numel
            if self.inbound:
                yield self._stack_key(key), sum(part.flat_numel for part in parts)

    def _reading(self, span: Span) -> dict[str, ScratchKey]:
        """The buffers that gradients are read into. Coupled decay needs the parameters too."""
        settings = self.plan.settings[span.group]
        roles = {"grads": settings.hyper.compute_dtype} | ({"params": self._own(span)} if settings.decay_mode == "l2" else {})
        return {role: (role, span.device, dtype) for role, dtype in roles.items()}

    def _writing(self, span: Span) -> dict[str, ScratchKey]:
        """The buffers that parameters are moved in."""
        settings, own = self.plan.settings[span.group], self._own(span)
        roles = {"params": own}
        roles |= {"kept": settings.hyper.compute_dtype} if settings.momentum > 0 else {}
        roles |= {"kept": own} if settings.averaging else {}
        roles |= {"exact": own} if averaging.is_rounded(getattr(torch, span.dtype), settings) else {}
        roles |= {"directions": settings.hyper.compute_dtype} if self.outbound else {}
        return {role: (role, span.device, dtype) for role, dtype in roles.items()}

    def _own(self, span: Span) -> torch.dtype:
        """The dtype of arithmetic on parameters: the compute dtype, or their own if it has more bits."""
        return torch.promote_types(self.plan.settings[span.group].hyper.compute_dtype, getattr(torch, span.dtype))

    def _stack_key(self, key: BankKey) -> ScratchKey:
        return "grads", key.device, self.plan.settings[key.group].hyper.compute_dtype

    # Building.

    def unit(self, scratch: Scratch, banks: Sequence[Bank], comm: Comm) -> Unit:
        device = scratch.devices[self.transport.device]
        stored, arriving, leaving = (torch.zeros(n, dtype=torch.uint8, device=device) for n in self._buffers())
        inbound = Collective(self.inbound, stored, arriving, comm) if self.inbound else None
        outbound = Collective(self.outbound, leaving, stored, comm, self.transport.gather) if self.outbound else None
        sent, received = inbound.sent if inbound else None, outbound.received if outbound else None
        mine = {bank.key: bank for bank in banks}
        return Unit(
            executors=tuple(self._executors(mine, scratch)),
            sends=tuple(Pieces(span, self._reading(span), scratch, sent) for span in self.sends),
            reads={part: Pieces(span, self._reading(span), scratch, None) for part, span in self.reads.items()},
            looks={} if self.inbound else {part.id: self._look(part) for part in self._slices()},
            stacks=self._stacks(scratch),
            arrivals=self._slots(self.inbound[1] if self.inbound else None),
            departures=self._slots(self.outbound[0] if self.outbound else None),
            writes={part: Pieces(span, self._writing(span), scratch, None) for part, span in self.writes.items()},
            receives=tuple(Pieces(span, self._writing(span), scratch, received) for span in self.receives),
            inbound=inbound,
            outbound=outbound,
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
