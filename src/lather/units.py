"""Units: the banks whose blocks travel together, with their way in and out, built from a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import exchange
from .bank import Bank, initial_state
from .exchange import Comm, Item, Wire
from .options import compute_dtype, wire_dtype
from .plan import BankKey, Plan, Route
from .runs import Run, coalesce
from .store import Arena, ArenaKey, Chunk, Span, copy_pairs, spans

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """What units need to know of a step. Tensors are this rank's parts, by number of the parameter."""

    grads: Mapping[int, Tensor]
    params: Mapping[int, Tensor]
    momenta: Mapping[int, Tensor]
    counts: Sequence[int]  # the step of every parameter
    offsets: Callable[[BankKey], Mapping[int, int] | None]
    groups: Sequence[Group]


@dataclass(frozen=True)
class Slots:
    """Where pieces of a bank's blocks lie in a buffer of messages: their numbers, and their scales."""

    pieces: Sequence[Run]
    scales: Sequence[Run]


@dataclass(frozen=True)
class Unit:
    """Banks that share a route: three phases, which a step runs for all units one after the other."""

    banks: tuple[Bank, ...]
    reads: tuple[Chunk, ...]  # gradients: of each bank, or of what is sent to owners
    writes: tuple[Chunk, ...]  # parameters: of each bank, or of what owners send
    stacks: tuple[Tensor, ...]  # where each bank's gradients come together
    arrivals: tuple[Slots, ...]  # of each bank, in the messages from holders
    departures: tuple[Slots, ...]  # of each bank, in the messages to holders
    inbound: Wire | None
    outbound: Wire | None

    def send(self, step: Step) -> None:
        """Phase 1, storage to compute: gradients leave for the owners of their blocks."""
        if self.inbound:
            for chunk in self.reads:
                chunk.post(chunk.read(step.grads, step.params, step.groups[chunk.group]))
            self.inbound.start()

    def compute(self, step: Step) -> None:
        """Phase 2: batched mathematics. Directions of blocks that do not travel are applied at once."""
        received = self.inbound.finish() if self.inbound else None
        for i, bank in enumerate(self.banks):
            active = [block.param in step.grads for block in bank.blocks]
            if any(active):
                grads = self._gradients(i, received, step)
                directions = _update(bank, grads, active, step)
            elif self.outbound:
                directions = torch.full_like(self.stacks[i], torch.nan)
            else:
                continue
            if self.outbound:
                self._post(i, directions, step.groups[bank.key.group])
            else:
                self._write_own(i, directions, step)
        if self.outbound:
            self.outbound.start()

    def apply(self, step: Step) -> None:
        """Phase 3, compute to storage: directions that have arrived move the parameters, whatever their gradients here."""
        if self.outbound:
            self.outbound.finish()
            for chunk in self.writes:
                params = {i: step.params[i] for i in chunk.members}
                chunk.write(chunk.directions(), params, step.momenta, step.groups[chunk.group])

    def _gradients(self, i: int, received: Tensor | None, step: Step) -> Tensor:
        stack = self.stacks[i]
        if received is None:
            self.reads[i].read(step.grads, step.params, step.groups[self.reads[i].group])  # which fills the stack
        else:
            pieces = self.arrivals[i].pieces
            copy_pairs([(run.of_tensor(_boxes(stack, run)), run.of_flat(received)) for run in pieces])
        return stack

    def _post(self, i: int, directions: Tensor, group: Group) -> None:
        assert self.outbound
        values, scale = exchange.encode(directions, wire_dtype(group))
        slots, sent = self.departures[i], self.outbound.sent
        copy_pairs([(run.of_flat(sent), run.of_tensor(_boxes(values, run))) for run in slots.pieces])
        if scale is not None:
            raw = scale.view(torch.int8).view(-1, exchange.SCALE)
            copy_pairs([(run.of_flat(sent), run.of_tensor(raw)) for run in slots.scales])

    def _write_own(self, i: int, directions: Tensor, step: Step) -> None:
        chunk = self.writes[i]
        group = step.groups[chunk.group]
        p = exchange.rounded(directions, wire_dtype(group)).flatten()
        active = [j for j in chunk.members if j in step.grads]
        momenta = {j: step.momenta[j] for j in active if j in step.momenta}
        chunk.write(p, {j: step.params[j] for j in active}, momenta, group)


def _update(bank: Bank, grads: Tensor, active: Sequence[bool], step: Step) -> Tensor:
    steps = [step.counts[block.param] for block in bank.blocks]
    with torch.autocast(bank.stack.device.type, enabled=False):
        return bank.update(grads, steps, active, step.offsets(bank.key), step.groups[bank.key.group])


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
    return key.group, key.method, key.shape, key.modes, bank.stack.dtype, bank.stack.device, blocks


def _allocate(bank: Bank, group: Group) -> None:
    shapes = initial_state(bank.key, replace(bank.stack, device=torch.device("meta")), group)
    if shapes.keys() != bank.state.keys():
        bank.state = initial_state(bank.key, bank.stack, group) | {k: v for k, v in bank.state.items() if k in shapes}


# Units.


def make_units(
    plan: Plan,
    places: Sequence[int],
    banks: Sequence[Bank],
    params: Sequence[Tensor],
    groups: Sequence[Group],
    comms: Sequence[Comm],
) -> list[Unit]:
    """All units of all routes, also of those for which this rank owns nothing, in an order that all ranks share."""
    drafts = [_Draft(plan, route, places[route.team], banks, params, groups, comms) for route in plan.routes]
    arena = Arena()
    for draft in drafts:
        draft.reserve(arena)
    return [draft.unit(arena) for draft in drafts]


class _Draft:
    """A unit whose buffers have not been allocated: all units share an arena, so their sizes come first."""

    def __init__(
        self,
        plan: Plan,
        route: Route,
        me: int,
        banks: Sequence[Bank],
        params: Sequence[Tensor],
        groups: Sequence[Group],
        comms: Sequence[Comm],
    ) -> None:
        self.plan, self.me, self.params, self.groups = plan, me, params, groups
        self.banks = [bank for bank in banks if bank.key.route == route]
        comm = comms[route.team]
        device = self._device(route)
        self.inbound = self.outbound = None
        if route.inbound:
            mails = exchange.inbound_mail(plan, route, me)
            self.inbound = Wire(mails, route.inbound, device, comm, gather=False)
        if route.outbound:
            mails = exchange.outbound_mail(plan, route, me)
            self.outbound = Wire(mails, route.outbound, device, comm, gather=route.gather)
        self.reads = self._spans(self.inbound.outgoing.items if self.inbound else None)
        self.writes = self._spans(self.outbound.incoming.items if self.outbound else None)

    def _device(self, route: Route) -> torch.device:
        """Where the parameters of a route are."""
        return next(
            self.params[block.param].device
            for block, key in zip(self.plan.blocks, self.plan.keys, strict=True)
            if key.route == route
        )

    def _spans(self, items: Sequence[Item] | None) -> list[Span]:
        if items is not None:
            return spans(self.plan, self.me, items, {i: p.device for i, p in enumerate(self.params)})
        found = []
        for bank in self.banks:
            span = Span(bank.key.group, bank.stack.device)
            for block in bank.blocks:
                origin = self.plan.stored(block.param, self.me).start
                span.add(block.param, block.region.moved(-a for a in origin).start, block.region.shape)
            found.append(span)
        return found

    def _keys(self, span: Span, *, reading: bool) -> dict[str, ArenaKey]:
        """Gradients, directions and momenta in the compute dtype; parameters in their own where that is better."""
        group, device = self.groups[span.group], span.device
        compute = own = compute_dtype(group)
        for run in span.runs:
            own = torch.promote_types(own, self.params[run.key].dtype)
        roles = {"params": own}
        if reading:
            roles = {"grads": compute} | (roles if group["weight_decay_mode"] == "l2" else {})
        else:
            roles |= {"momenta": compute} if group["momentum"] > 0 else {}
            roles |= {"directions": compute} if self.outbound else {}
        return {role: (role, device, dtype) for role, dtype in roles.items()}

    def reserve(self, arena: Arena) -> None:
        for reading, found in ((True, self.reads), (False, self.writes)):
            for span in found:
                for key in self._keys(span, reading=reading).values():
                    arena.reserve(key, span.numel)
        for bank in self.banks:
            arena.reserve(_stack_key(bank), len(bank.blocks) * bank.blocks[0].region.numel)

    def unit(self, arena: Arena) -> Unit:
        sent = self.inbound.sent if self.inbound else None
        received = self.outbound.received if self.outbound else None
        return Unit(
            tuple(self.banks),
            tuple(Chunk(span, self._keys(span, reading=True), arena, sent) for span in self.reads),
            tuple(Chunk(span, self._keys(span, reading=False), arena, received) for span in self.writes),
            tuple(arena.take(_stack_key(bank), len(bank.blocks), *bank.key.shape) for bank in self.banks),
            self._slots(self.inbound.incoming.items if self.inbound else ()),
            self._slots(self.outbound.outgoing.items if self.outbound else ()),
            self.inbound,
            self.outbound,
        )

    def _slots(self, items: Sequence[Item]) -> tuple[Slots, ...]:
        """Each bank's share of messages, as runs over its stack."""
        slot_of = {n: (i, slot) for i, bank in enumerate(self.banks) for slot, n in enumerate(bank.numbers)}
        pieces: list[list[Run]] = [[] for _ in self.banks]
        scales: list[list[Run]] = [[] for _ in self.banks]
        for item in items:
            block, (i, slot) = self.plan.blocks[item.move.block], slot_of[item.move.block]
            box = item.move.region.moved(-a for a in block.region.start)
            pieces[i].append(Run(block.region.shape, item.offset, (slot, *box.start), (1, *box.shape)))
            if item.scale is not None:
                scales[i].append(Run("scale", item.scale, (slot, 0), (1, exchange.SCALE)))
        return tuple(Slots(coalesce(p), coalesce(s)) for p, s in zip(pieces, scales, strict=True))


def _stack_key(bank: Bank) -> ArenaKey:
    return "grads", bank.stack.device, bank.stack.compute
