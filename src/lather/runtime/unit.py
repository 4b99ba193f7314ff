"""Units: the banks whose blocks travel together, with their way in and out, built from a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..compute.bank import Bank, initial_state
from ..compute.kernel_executor import Call, Fleet, Graphs
from ..compute.tables import Part, Place, Share, divide, place
from ..compute.tables import scratch as fleet_scratch
from ..options import compute_dtype, products, wire_dtype
from ..planning.plan import BankKey, Plan, Route
from ..roots import products_in
from ..storage import averaging
from ..storage.buffers import Arena, ArenaKey, Chunk, Span, Stored, copy_pairs, spans
from ..storage.grids import Run, coalesce
from ..storage.tensors import is_regular, local
from . import exchange
from .exchange import Comm, Mail, Wire, itemsize

Group = Mapping[str, Any]

FEW = 64  # fleets that are worth CUDA graphs: with more of them launches are not what takes time


@dataclass(frozen=True)
class Step:
    """What units need to know of a step. Tensors are this rank's parts, by number of the parameter."""

    grads: Mapping[int, Tensor]
    stored: Stored
    shares: averaging.Shares  # of parameters that are averaged
    counts: Sequence[int]  # the step of every parameter
    even: int | None  # the step of all of them, if they all have a gradient and are at the same
    offsets: Callable[[BankKey], Mapping[int, int] | None]
    groups: Sequence[Group]

    @property
    def params(self) -> Mapping[int, Tensor]:
        return self.stored.params


Piece = tuple[BankKey, int]  # of a bank, from this slot on; all of it if the bank is computed alone


@dataclass(frozen=True)
class Slots:
    """Where parts of blocks lie in a buffer of messages: their numbers, and their scales."""

    pieces: Sequence[Run]
    scales: Sequence[Run]


@dataclass(frozen=True)
class Unit:
    """Banks that share a route: three phases, which a step runs for all units one after the other."""

    banks: tuple[Bank, ...]
    reads: tuple[Chunk, ...]  # gradients: of each bank, or of what is sent to owners
    writes: tuple[Chunk, ...]  # parameters: of each bank, or of what owners send
    stacks: Mapping[Piece, Tensor]  # where gradients come together that are not read where they are
    arrivals: Mapping[Piece, Slots]  # in the messages from holders
    departures: Mapping[Piece, Slots]  # in the messages to holders
    inbound: Wire | None
    outbound: Wire | None
    fleets: tuple[Fleet, ...]  # banks that are computed together
    landings: Mapping[Piece, Chunk]  # their parameters, where directions neither travel nor are applied by kernels
    alone: tuple[int, ...]  # and those that are not
    arena: Arena

    def send(self, step: Step) -> None:
        """Phase 1, storage to compute: gradients leave for the owners of their blocks."""
        if self.inbound:
            for chunk in self.reads:
                chunk.post(chunk.read(step.grads, step.params, step.groups[chunk.group]))
            self.inbound.start()

    def compute(self, step: Step) -> None:
        """Phase 2: batched mathematics. Directions of blocks that do not travel are applied at once."""
        received = self.inbound.finish() if self.inbound else None
        for fleet in self.fleets:
            self._compute_together(fleet, received, step)
        for i in self.alone:
            self._compute_alone(i, received, step)
        if self.outbound:
            self.outbound.start()

    def apply(self, step: Step) -> None:
        """Phase 3, compute to storage: directions that have arrived move the parameters, whatever their gradients here."""
        if self.outbound:
            self.outbound.finish()
            for chunk in self.writes:
                stored = step.stored.of(chunk.members)
                chunk.write(chunk.directions(), stored, step.shares, step.groups[chunk.group])

    def _compute_alone(self, i: int, received: Tensor | None, step: Step) -> None:
        bank = self.banks[i]
        active, piece = [block.param in step.grads for block in bank.blocks], (bank.key, 0)
        if any(active):
            grads = self._own(i, step) if received is None else self._arrived(piece, received)
            directions = _update(bank, grads, active, step)
        elif self.outbound:
            directions = _nothing(bank, len(bank.blocks))
        else:
            return
        if self.outbound:
            self._post(piece, directions, step.groups[bank.key.group])
        else:
            _write(self.writes[i], directions, step)

    def _compute_together(self, fleet: Fleet, received: Tensor | None, step: Step) -> None:
        active = [True] * fleet.n if step.even else [i in step.grads for i in fleet.params]
        directions = None
        if any(active):
            call = self._call(fleet, active, received, step)
            with (
                _on(fleet.device),
                torch.autocast(fleet.device.type, enabled=False),
                products_in(products(call.group), fleet.device),
            ):
                directions = fleet.update(call)
            if fleet.lands:  # kernels write behind autograd's back
                moved = [step.params[i] for i in fleet.members if i in step.grads]
                torch.autograd.graph.increment_version(moved)
        for i, part in enumerate(() if directions is None else fleet.parts):
            if chunk := self.landings.get((part.key, part.start)):
                assert directions is not None
                _write(chunk, fleet.stack(directions, i), step)
        for i, part in enumerate(fleet.parts if self.outbound else ()):
            stack = _nothing(part.bank, part.n) if directions is None else fleet.stack(directions, i)
            self._post((part.key, part.start), stack, step.groups[fleet.key.group])

    def _call(self, fleet: Fleet, active: Sequence[bool], received: Tensor | None, step: Step) -> Call:
        group = step.groups[fleet.key.group]
        steps = [step.even] * fleet.n if step.even else [max(step.counts[i], 1) for i in fleet.params]
        scratch, soiled = fleet.scratch(self.arena, group), self.arena.passes_to(fleet)
        offsets = next((step.offsets(part.key) for part in fleet.parts if part.key.modes), None)
        if not fleet.raw:
            assert received is not None
            stacks = [self._arrived((part.key, part.start), received) for part in fleet.parts]
            addresses = [stack.data_ptr() for stack in stacks]
            return Call(group, steps, active, offsets, scratch, stacks, addresses, stacks[0].dtype, soiled=soiled)
        bound = fleet.bind(step.grads, step.params, step.stored.kept)
        return Call(group, steps, active, offsets, scratch, soiled=soiled, **bound)

    def _own(self, i: int, step: Step) -> Tensor:
        """The gradients of a bank that did not travel."""
        self.reads[i].read(step.grads, step.params, step.groups[self.reads[i].group])  # which fills the stack
        return self.stacks[self.banks[i].key, 0]

    def _arrived(self, piece: Piece, received: Tensor) -> Tensor:
        stack = self.stacks[piece]
        runs = self.arrivals[piece].pieces
        copy_pairs([(run.of_tensor(_boxes(stack, run)), run.of_flat(received)) for run in runs])
        return stack

    def _post(self, piece: Piece, directions: Tensor, group: Group) -> None:
        assert self.outbound
        values, scale = exchange.encode(directions, wire_dtype(group))
        slots, sent = self.departures[piece], self.outbound.sent
        copy_pairs([(run.of_flat(sent), run.of_tensor(_boxes(values, run))) for run in slots.pieces])
        if scale is not None:
            raw = scale.view(torch.int8).view(-1, exchange.SCALE)
            copy_pairs([(run.of_flat(sent), run.of_tensor(raw)) for run in slots.scales])


def _write(chunk: Chunk, directions: Tensor, step: Step) -> None:
    """Apply directions that do not travel."""
    group = step.groups[chunk.group]
    p = exchange.rounded(directions, wire_dtype(group)).flatten()
    active = [j for j in chunk.members if j in step.grads]
    chunk.write(p, step.stored.of(active), step.shares, group)


def _update(bank: Bank, grads: Tensor, active: Sequence[bool], step: Step) -> Tensor:
    steps = [step.counts[block.param] for block in bank.blocks]
    group = step.groups[bank.key.group]
    device = bank.stack.device
    with _on(device), torch.autocast(device.type, enabled=False), products_in(products(group), device):
        return bank.update(grads, steps, active, step.offsets(bank.key), group)


def _nothing(bank: Bank, n: int) -> Tensor:
    """Directions of slots without gradients."""
    stack = bank.stack
    return torch.full((n, *stack.shape), torch.nan, dtype=stack.compute, device=stack.device)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _boxes(stack: Tensor, run: Run) -> Tensor:
    """A stack with its blocks in the dimensions of their parameter, which are the key of a run."""
    return stack.view(stack.shape[0], *run.key)


# Banks.


def make_banks(
    plan: Plan,
    places: Sequence[int],
    params: Sequence[Tensor],
    groups: Sequence[Group],
    old: Mapping[Any, Bank],
) -> list[Bank]:
    """This rank's banks with state for the options as they are; a bank of the very same blocks keeps its memory."""
    banks = []
    for key, numbers in plan.banks_of(places).items():
        blocks = [plan.blocks[i] for i in numbers]
        bank = Bank(key, numbers, blocks, groups[key.group], params[blocks[0].param].device)
        if same := old.get(identity(bank, params)):
            same.key, same.numbers, same.blocks = bank.key, bank.numbers, bank.blocks
            bank = same
        _allocate(bank, groups[key.group])
        banks.append(bank)
    return banks


def identity(bank: Bank, params: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a bank's memory belongs to, independent of positions in a plan and of how blocks travel."""
    key, blocks = bank.key, tuple((id(params[block.param]), block.index) for block in bank.blocks)
    return key.group, key.dtype, key.method, key.shape, key.modes, bank.stack.dtype, bank.stack.device, blocks


def _allocate(bank: Bank, group: Group) -> None:
    needed = initial_state(bank.key, replace(bank.stack, device=torch.device("meta")), group)
    kept = {role: x for role, x in bank.state.items() if role in needed and _is_like(x, needed[role])}
    if not needed.keys() == kept.keys() == bank.state.keys():
        bank.state = initial_state(bank.key, bank.stack, group) | kept


def _is_like(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype


# Units.


def make_units(
    plan: Plan, places: Sequence[int], banks: Sequence[Bank], comms: Sequence[Comm], params: Sequence[Tensor]
) -> list[Unit]:
    """All units of all routes, also of those for which this rank owns nothing, in an order that all ranks share."""
    arena = Arena({spec.device: p.device for spec, p in zip(plan.specs, params, strict=True)})
    stored = [local(p) for p in params]
    drafts = make_drafts(plan, places, stored)
    for draft in drafts:
        for key, numel in draft.scratch():
            arena.reserve(key, numel)
    return [draft.unit(arena, banks, comms[draft.route.team], stored) for draft in drafts]


def make_drafts(plan: Plan, places: Sequence[int], stored: Sequence[Tensor] = ()) -> list[Draft]:
    return [Draft(plan, route, places[route.team], stored) for route in plan.routes]


class Draft:
    """A unit of one place before anything is allocated: its messages and buffers, from the plan alone.

    Tensors that are ``stored`` only tell how they lie in memory; without them they are taken to be contiguous.
    """

    def __init__(self, plan: Plan, route: Route, me: int, stored: Sequence[Tensor] = ()) -> None:
        self.plan, self.route, self.me, self.stored = plan, route, me, stored
        self.banks = {key: numbers for key, numbers in plan.banks(route.team, me).items() if key.route == route}
        self.inbound = exchange.inbound_mail(plan, route, me) if route.inbound else None
        self.outbound = exchange.outbound_mail(plan, route, me) if route.outbound else None
        self.reads = self._spans(self.inbound[0] if self.inbound else None)
        self.writes = self._spans(self.outbound[1] if self.outbound else None)
        self.fleets = self._fleets()
        together = {share.key for fleet in self.fleets for share in fleet}
        self.alone = [i for i, key in enumerate(self.banks) if key not in together]
        keys = list(self.banks)
        self.wholes = [Share(keys[i], 0, len(self.banks[keys[i]])) for i in self.alone]
        self.landings = {
            (share.key, share.start): self._span(share.key, self.banks[share.key][share.start : share.stop])
            for shares in self.fleets
            for share in shares
            if not self.outbound and not self._lands(share.key)
        }

    def _fleets(self) -> list[list[Share]]:
        """Banks that go through kernels together, unless directions must be rounded or a block is scattered in memory."""
        groups = self.plan.groups
        banks = [
            (key, len(numbers))
            for key, numbers in self.banks.items()
            if (self.outbound or wire_dtype(groups[key.group]) == "float32")
            and (self.inbound or not self.stored or all(self._place(i) for i in numbers))
        ]
        return divide(banks, groups)

    def _lands(self, key: BankKey) -> bool:
        """Whether kernels move the parameters. They do not know averaging: their directions go through the rules then."""
        return self.outbound is None and not averaging.is_on(self.plan.groups[key.group])

    def _place(self, number: int) -> Place | None:
        """Where a block lies in the tensor that is stored; None if kernels cannot go there."""
        block = self.plan.blocks[number]
        if not is_regular(self.stored[block.param]):
            return None
        region = block.region.moved(-a for a in self.plan.stored(block.param, self.me).start)
        return place(region.start, region.shape, self.stored[block.param].stride())

    def _spans(self, mail: Mail | None) -> list[Span]:
        """What is stored of a buffer of messages or, if nothing travels, of each bank."""
        if mail is not None:
            return spans(self.plan, self.me, mail.items)
        return [self._span(key, numbers) for key, numbers in self.banks.items()]

    def _span(self, key: BankKey, numbers: Sequence[int]) -> Span:
        """What is stored of blocks of a bank."""
        span = Span(key.group, key.device, key.dtype)
        for block in (self.plan.blocks[i] for i in numbers):
            origin = self.plan.stored(block.param, self.me).start
            span.add(block.param, block.region.moved(-a for a in origin).start, block.region.shape)
        return span

    def received_bytes(self) -> dict[str, int]:
        """What comes from other places in a step: gradients and directions."""
        mails = {"inbound": (self.inbound, self.route.inbound), "outbound": (self.outbound, self.route.outbound)}
        return {
            way: (mail[1].numel - mail[1].splits[self.me]) * itemsize(wire)
            for way, (mail, wire) in mails.items()
            if mail and wire
        }

    def padding_bytes(self) -> int:
        """What comes in an all-gather only to make messages equally long."""
        if not self.outbound or not self.route.gather:
            return 0
        wire, items = str(self.route.outbound), [item for item in self.outbound[1].items if item.move.src != self.me]
        numel = sum(item.move.region.numel for item in items)
        return self.received_bytes()["outbound"] - exchange.message_numel(numel, len(items), wire) * itemsize(wire)

    def buffer_bytes(self) -> int:
        """Persistent buffers of messages."""
        return sum(self._buffers())

    def _buffers(self) -> tuple[int, int, int]:
        """Bytes of gradients that leave and, when those have left, directions that arrive; gradients that arrive;
        directions that leave."""
        there = [mail.numel * itemsize(str(self.route.inbound)) for mail in self.inbound or ()] or [0, 0]
        back = [mail.numel * itemsize(str(self.route.outbound)) for mail in self.outbound or ()] or [0, 0]
        return max(there[0], back[1]), there[1], back[0]

    def scratch(self) -> Iterator[tuple[ArenaKey, int]]:
        """Needs of the arena that all units share."""
        reads = self.reads if self.inbound else [self.reads[i] for i in self.alone]
        writes = self.writes if self.outbound else [self.writes[i] for i in self.alone]
        for span in reads:
            yield from ((key, span.numel) for key in self._reading(span).values())
        for span in (*writes, *self.landings.values()):
            yield from ((key, span.numel) for key in self._writing(span).values())
        for share in self.wholes:
            yield self._stack(share.key), share.n * share.numel
        for shares in self.fleets:
            key = shares[0].key
            for role, (dtype, numel) in fleet_scratch(shares, self.plan.groups[key.group]).items():
                yield (role, key.device, dtype), numel
            if self.inbound:
                yield self._stack(key), sum(share.padded for share in shares)

    def _reading(self, span: Span) -> dict[str, ArenaKey]:
        group = self.plan.groups[span.group]
        coupled = {"params": ("params", span.device, self._own(span))} if group["weight_decay_mode"] == "l2" else {}
        return {"grads": ("grads", span.device, compute_dtype(group))} | coupled

    def _writing(self, span: Span) -> dict[str, ArenaKey]:
        group = self.plan.groups[span.group]
        roles = {"params": self._own(span)}
        roles |= {"kept": compute_dtype(group)} if group["momentum"] > 0 else {}
        roles |= {"kept": self._own(span)} if averaging.is_on(group) else {}
        roles |= {"exact": self._own(span)} if averaging.is_apart(getattr(torch, span.dtype), group) else {}
        roles |= {"directions": compute_dtype(group)} if self.outbound else {}
        return {role: (role, span.device, dtype) for role, dtype in roles.items()}

    def _own(self, span: Span) -> torch.dtype:
        """Arithmetic on parameters is in the compute dtype, or in their own where that is better."""
        return torch.promote_types(compute_dtype(self.plan.groups[span.group]), getattr(torch, span.dtype))

    def _stack(self, key: BankKey) -> ArenaKey:
        return "grads", key.device, compute_dtype(self.plan.groups[key.group])

    def unit(self, arena: Arena, banks: Sequence[Bank], comm: Comm, params: Sequence[Tensor]) -> Unit:
        device = arena.devices[self.route.device]
        stored, arriving, leaving = (torch.zeros(n, dtype=torch.uint8, device=device) for n in self._buffers())
        inbound = outbound = None
        if self.inbound:
            inbound = Wire(self.inbound, str(self.route.inbound), stored, arriving, comm, gather=False)
        if self.outbound:
            outbound = Wire(self.outbound, str(self.route.outbound), leaving, stored, comm, gather=self.route.gather)
        sent = inbound.sent if inbound else None
        received = outbound.received if outbound else None
        mine = {bank.key: bank for bank in banks}
        graphs = Graphs() if device.type == "cuda" and len(self.fleets) <= FEW else None
        return Unit(
            tuple(mine[key] for key in self.banks),
            tuple(Chunk(span, self._reading(span), arena, sent) for span in self.reads),
            tuple(Chunk(span, self._writing(span), arena, received) for span in self.writes),
            self._stacks(arena),
            self._slots(self.inbound[1] if self.inbound else None),
            self._slots(self.outbound[0] if self.outbound else None),
            inbound,
            outbound,
            tuple(self._fleet(shares, mine, graphs) for shares in self.fleets),
            {piece: Chunk(span, self._writing(span), arena, None) for piece, span in self.landings.items()},
            tuple(self.alone),
            arena,
        )

    def _stacks(self, arena: Arena) -> dict[Piece, Tensor]:
        """Where gradients come together: those of a fleet side by side, of others in the same place."""
        places = [(share, 0) for share in self.wholes]
        for shares in self.fleets if self.inbound else ():
            places += zip(shares, accumulate((share.padded for share in shares), initial=0), strict=False)
        return {
            (share.key, share.start): arena.take(self._stack(share.key), share.n, *share.shape, start=start)
            for share, start in places
        }

    def _fleet(self, shares: Sequence[Share], banks: Mapping[BankKey, Bank], graphs: Graphs | None) -> Fleet:
        raw = self.inbound is None
        numbers = [self.banks[share.key][share.start : share.stop] for share in shares]
        members = dict.fromkeys(self.plan.blocks[i].param for part in numbers for i in part)
        position = {param: i for i, param in enumerate(members)}
        parts = []
        for number, (share, part) in enumerate(zip(shares, numbers, strict=True)):
            places = [
                self._place(i) if raw else Place(slot * share.numel, (share.numel,), (1,))
                for slot, i in enumerate(part)
            ]
            tensors = [position[self.plan.blocks[i].param] if raw else number for i in part]
            found = [at for at in places if at is not None]
            parts.append(Part(**vars(share), bank=banks[share.key], tensors=tensors, places=found))
        return Fleet(parts, raw, self._lands(shares[0].key), graphs)

    def _slots(self, mail: Mail | None) -> dict[Piece, Slots]:
        """What of messages belongs to each piece of a bank, as runs over its stack."""
        slot_of = {
            number: ((share.key, share.start), slot)
            for shares in (self.wholes, *self.fleets)
            for share in shares
            for slot, number in enumerate(self.banks[share.key][share.start : share.stop])
        }
        pieces: dict[Piece, list[Run]] = {piece: [] for piece, _ in slot_of.values()}
        scales: dict[Piece, list[Run]] = {piece: [] for piece in pieces}
        for item in mail.items if mail else ():
            block, (piece, slot) = self.plan.blocks[item.move.block], slot_of[item.move.block]
            box = item.move.region.moved(-a for a in block.region.start)
            pieces[piece].append(Run(block.region.shape, item.offset, (slot, *box.start), (1, *box.shape)))
            if item.scale is not None:
                scales[piece].append(Run("scale", item.scale, (slot, 0), (1, exchange.SCALE)))
        return {piece: Slots(coalesce(found), coalesce(scales[piece])) for piece, found in pieces.items()}
