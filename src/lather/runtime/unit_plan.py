"""The plan of a unit: its messages, buffers and executors, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

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
from ..settings import Settings
from ..storage import averaging
from ..storage.buffers import Pieces, Scratch, ScratchKey, Span, spans
from ..storage.grids import Grid, coalesce
from ..storage.tensors import is_regular, local
from .exchange import Collective
from .ranks import Comm
from .unit import Slots, Unit

FEW = 64  # kernel executors that are worth CUDA graphs: with more of them launches are not what takes time


def make_banks(plan: Plan, places: Sequence[int], params: Sequence[Tensor], old: Mapping[Any, Bank]) -> list[Bank]:
    """This rank's banks, with state for the options as they are. A bank of the very same blocks keeps its memory."""
    banks = []
    for key, numbers in plan.banks_of(places).items():
        blocks = [plan.blocks[i] for i in numbers]
        bank = Bank(key, numbers, blocks, plan.settings[key.group], params[blocks[0].param].device)
        if same := old.get(identity(bank, params)):
            bank = same.moved_to(bank)
        _allocate(bank, plan.settings[key.group])
        banks.append(bank)
    return banks


def identity(bank: Bank, params: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a bank's memory belongs to, whatever its place in a plan and however its blocks travel."""
    key, blocks = bank.key, tuple((id(params[block.param]), block.index) for block in bank.blocks)
    return key.group, key.dtype, key.kind, key.shape, key.modes, bank.stack.dtype, bank.stack.device, blocks


def _allocate(bank: Bank, settings: Settings) -> None:
    needed = initial_state(bank.key, replace(bank.stack, device=torch.device("meta")), settings)
    kept = {
        role: x
        for role, x in bank.state.items()
        if role in needed and (x.shape, x.dtype) == (needed[role].shape, needed[role].dtype)
    }
    if not needed.keys() == kept.keys() == bank.state.keys():
        bank.state = initial_state(bank.key, bank.stack, settings) | kept


def make_units(
    plan: Plan, places: Sequence[int], banks: Sequence[Bank], comms: Sequence[Comm], params: Sequence[Tensor]
) -> list[Unit]:
    """All units, also those in which this rank owns nothing, in an order that all ranks share."""
    scratch = Scratch({spec.device: p.device for spec, p in zip(plan.specs, params, strict=True)})
    drafts = plan_units(plan, places, [local(p) for p in params])
    for draft in drafts:
        for key, numel in draft.scratch():
            scratch.reserve(key, numel)
    return [draft.unit(scratch, banks, comms[draft.transport.team]) for draft in drafts]


def plan_units(plan: Plan, places: Sequence[int], stored: Sequence[Tensor] = ()) -> list[UnitPlan]:
    return [UnitPlan(plan, transport, places[transport.team], stored) for transport in plan.transports]


class UnitPlan:
    """A unit of one place, from the plan alone.

    Tensors that are ``stored`` only tell how they lie in memory. Without them they count as contiguous.
    """

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
        """Banks that go through kernels together, unless directions must be rounded or a block is scattered in memory."""
        settings = self.plan.settings
        banks = [
            (key, len(numbers))
            for key, numbers in self.banks.items()
            if (self.outbound or settings[key.group].wire_dtype == "float32")
            and (self.inbound or not self.stored or all(self._window(i) for i in numbers))
        ]
        return divide_banks(banks, settings)

    def _moves_parameters(self, key: BankKey) -> bool:
        """Whether kernels move the parameters. They do not know averaging: their directions are applied by torch then."""
        return self.outbound is None and self.plan.settings[key.group].averaging is None

    def _window(self, number: int) -> Window | None:
        """Where a block lies in the tensor that is stored; None if kernels cannot read it there."""
        block = self.plan.blocks[number]
        if not is_regular(self.stored[block.param]):
            return None
        region = block.region.moved(-a for a in self.plan.stored(block.param, self.me).start)
        return find_window(region.start, region.shape, self.stored[block.param].stride())

    def _span(self, part: BankSlice) -> Span:
        """What is stored of a slice of a bank."""
        span = Span(part.key.group, part.key.device, part.key.dtype)
        for number in self._numbers(part):
            block = self.plan.blocks[number]
            origin = self.plan.stored(block.param, self.me).start
            span.add(block.param, block.region.moved(-a for a in origin).start, block.region.shape)
        return span

    def _numbers(self, part: BankSlice) -> Sequence[int]:
        return self.banks[part.key][part.start : part.stop]

    def _slots(self, messages: Messages | None) -> dict[SliceId, Slots]:
        """What belongs to each slice in a buffer of messages, as grids over its stack."""
        slices = [part for parts in (self.by_torch, *self.by_kernels) for part in parts]
        slot_of = {number: (part.id, slot) for part in slices for slot, number in enumerate(self._numbers(part))}
        pieces: dict[SliceId, list[Grid]] = {part.id: [] for part in slices}
        scales: dict[SliceId, list[Grid]] = {part.id: [] for part in slices}
        for item in messages.items if messages else ():
            block, (part, slot) = self.plan.blocks[item.move.block], slot_of[item.move.block]
            box = item.move.region.moved(-a for a in block.region.start)
            pieces[part].append(Grid(block.region.shape, item.offset, (slot, *box.start), (1, *box.shape)))
            if item.scale is not None:
                scales[part].append(Grid("scale", item.scale, (slot, 0), (1, SCALE)))
        return {part: Slots(coalesce(found), coalesce(scales[part])) for part, found in pieces.items()}

    # Bytes.

    def received_bytes(self) -> dict[str, int]:
        """What comes from other places in a step: gradients and directions."""
        ways = {"inbound": (self.inbound, self.transport.inbound), "outbound": (self.outbound, self.transport.outbound)}
        return {
            way: (messages[1].numel - messages[1].splits[self.me]) * SIZES[wire]
            for way, (messages, wire) in ways.items()
            if messages and wire
        }

    def padding_bytes(self) -> int:
        """What comes in an all-gather only to make messages equally long."""
        if not self.outbound or not self.transport.gather:
            return 0
        wire = str(self.transport.outbound)
        items = [item for item in self.outbound[1].items if item.move.src != self.me]
        numel = sum(item.move.region.numel for item in items)
        return self.received_bytes()["outbound"] - message_numel(numel, len(items), wire) * SIZES[wire]

    def buffer_bytes(self) -> int:
        """Persistent buffers of messages."""
        return sum(self._buffers())

    def _buffers(self) -> tuple[int, int, int]:
        """Bytes of gradients that leave and, in the same memory, directions that arrive; of gradients that arrive; and of
        directions that leave."""
        there = [each.numel * SIZES[str(self.transport.inbound)] for each in self.inbound or ()] or [0, 0]
        back = [each.numel * SIZES[str(self.transport.outbound)] for each in self.outbound or ()] or [0, 0]
        return max(there[0], back[1]), there[1], back[0]

    # Scratch memory.

    def scratch(self) -> Iterator[tuple[ScratchKey, int]]:
        """What it needs of the memory that all units share."""
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
        settings = self.plan.settings[span.group]
        coupled = {"params": ("params", span.device, self._own(span))} if settings.decay_mode == "l2" else {}
        return {"grads": ("grads", span.device, settings.hyper.compute_dtype)} | coupled

    def _writing(self, span: Span) -> dict[str, ScratchKey]:
        settings = self.plan.settings[span.group]
        compute = settings.hyper.compute_dtype
        roles = {"params": self._own(span)}
        roles |= {"kept": compute} if settings.momentum > 0 else {}
        roles |= {"kept": self._own(span)} if settings.averaging else {}
        roles |= {"exact": self._own(span)} if averaging.is_rounded(getattr(torch, span.dtype), settings) else {}
        roles |= {"directions": compute} if self.outbound else {}
        return {role: (role, span.device, dtype) for role, dtype in roles.items()}

    def _own(self, span: Span) -> torch.dtype:
        """Arithmetic on parameters is in the compute dtype, or in their own where that is better."""
        return torch.promote_types(self.plan.settings[span.group].hyper.compute_dtype, getattr(torch, span.dtype))

    def _stack_key(self, key: BankKey) -> ScratchKey:
        return "grads", key.device, self.plan.settings[key.group].hyper.compute_dtype

    # Building.

    def unit(self, scratch: Scratch, banks: Sequence[Bank], comm: Comm) -> Unit:
        device = scratch.devices[self.transport.device]
        stored, arriving, leaving = (torch.zeros(n, dtype=torch.uint8, device=device) for n in self._buffers())
        inbound = outbound = None
        if self.inbound:
            inbound = Collective(self.inbound, str(self.transport.inbound), stored, arriving, comm, gather=False)
        if self.outbound:
            wire, gather = str(self.transport.outbound), self.transport.gather
            outbound = Collective(self.outbound, wire, leaving, stored, comm, gather=gather)
        sent, received = inbound.sent if inbound else None, outbound.received if outbound else None
        mine = {bank.key: bank for bank in banks}
        return Unit(
            banks=tuple(mine[key] for key in self.banks),
            executors=tuple(self._executors(mine, scratch)),
            sends=tuple(Pieces(span, self._reading(span), scratch, sent) for span in self.sends),
            reads={part: Pieces(span, self._reading(span), scratch, None) for part, span in self.reads.items()},
            stacks=self._stacks(scratch),
            arrivals=self._slots(self.inbound[1] if self.inbound else None),
            departures=self._slots(self.outbound[0] if self.outbound else None),
            writes={part: Pieces(span, self._writing(span), scratch, None) for part, span in self.writes.items()},
            receives=tuple(Pieces(span, self._writing(span), scratch, received) for span in self.receives),
            inbound=inbound,
            outbound=outbound,
        )

    def _stacks(self, scratch: Scratch) -> dict[SliceId, Tensor]:
        """Where gradients that arrive come together: in one place, or side by side if they go through kernels together."""
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
            key = parts[0].key
            yield KernelExecutor(
                self._with_windows(parts, banks),
                self.plan.settings[key.group],
                scratch,
                reads_gradients=self.inbound is None,
                moves_parameters=self._moves_parameters(key),
                graphs=graphs,
            )
        for part in self.by_torch:
            yield TorchExecutor(part.bound(banks[part.key]), self.plan.settings[part.key.group])

    def _with_windows(self, slices: Sequence[BankSlice], banks: Mapping[BankKey, Bank]) -> list[BoundSlice]:
        """The slices with where their blocks lie: in the tensors that are stored, or in the stacks of what has arrived."""
        in_place = self.inbound is None
        numbers = [self._numbers(part) for part in slices]
        members = dict.fromkeys(self.plan.blocks[i].param for some in numbers for i in some)
        position = {param: i for i, param in enumerate(members)}
        parts = []
        for at, (part, some) in enumerate(zip(slices, numbers, strict=True)):
            windows = [
                self._window(i) if in_place else Window(slot * part.numel, (part.numel,), (1,)) for slot, i in enumerate(some)
            ]
            tensors = [position[self.plan.blocks[i].param] if in_place else at for i in some]
            found = [at for at in windows if at is not None]
            parts.append(part.bound(banks[part.key], tensors, found))
        return parts
