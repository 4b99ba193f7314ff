"""Messages of a step: where every piece of a gradient or direction lies in the buffer that a collective moves.

Messages are laid out once, the same way at both ends. Their sizes never depend on what happens in a step, so nothing hangs if
ranks disagree about a gradient.

[Note: two hops] Owners send directions to the places that store them, in an all-to-all. If several places store the same, each
of them gets an equal part of it, and an all-gather among them completes it. So nobody receives anything twice, and little of it
is padding, whoever owns how much. If all places store everything, and owners have about equally much to send, the all-gather
alone does it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import NamedTuple

from .plan import SIZES, Move, Plan, Transport

SCALED = "int8"
SCALE = 4  # bytes of a block's scale in a message of 8-bit numbers
ALIGNMENT = 16  # bytes
ROUND = 32 << 20  # bytes that a place receives in an all-gather; if all is at most twice as much, it is not cut
ROUNDS = 512  # with more of them than this, rounds are larger: the host has work to do for each
WORTH = 0.9  # two hops are taken instead of an all-gather if they move less than this fraction of its bytes


@dataclass(frozen=True)
class Item:
    """Where a piece lies in a buffer of messages, and where the scale of its block does, if it has one."""

    move: Move
    offset: int
    scale: int | None


@dataclass(frozen=True)
class Messages:
    """Messages end to end, from ``start`` on in a buffer."""

    items: tuple[Item, ...]
    splits: tuple[int, ...]  # elements of each message
    wire: str  # dtype
    start: int = 0

    @property
    def numel(self) -> int:
        return sum(self.splits)

    @property
    def nbytes(self) -> int:
        return self.numel * SIZES[self.wire]

    def at(self, start: int) -> Messages:
        """The same elsewhere in the buffer."""
        by = start - self.start
        moved = [Item(i.move, i.offset + by, None if i.scale is None else i.scale + by) for i in self.items] if by else self.items
        return replace(self, items=tuple(moved), start=start)


class Chunk(NamedTuple):
    """Elements that are sent to a place, from an offset in the messages on."""

    place: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Trip:
    """What one place sends and receives together, in an all-to-all, an all-gather, or one after the other."""

    sent: Messages
    received: Messages
    kept: Messages  # does not travel: it is the place's own, as owner and as holder
    # The all-to-all:
    swap: tuple[tuple[int, ...], tuple[int, ...]] | None  # elements to and from every place, if there is one
    chunks: tuple[Chunk, ...] = ()  # what it sends, in the order of places, if it does not lie in this order
    ordered: int = 0  # where chunks are put in order
    # The all-gather among the places that store the same:
    part: int = 0  # elements from each of them; 0 without an all-gather
    padding: int = 0  # elements received in it that are of no use
    relay: int = 0  # where its own part lies, if an all-to-all brings it

    @property
    def swapped_from(self) -> int:
        """Where the all-to-all sends from."""
        return self.ordered if self.chunks else self.sent.start

    @property
    def swapped_to(self) -> int:
        """Where the all-to-all puts what it brings."""
        return self.relay if self.part else self.received.start

    @property
    def gathered_from(self) -> int:
        """Where the all-gather finds this place's part."""
        return self.relay if self.swap else self.sent.start

    def received_numel(self, me: int, sharers: int) -> int:
        """Elements from other places."""
        swapped = sum(self.swap[1]) - self.swap[1][me] if self.swap else 0
        return swapped + (sharers - 1) * self.part


@dataclass(frozen=True)
class Traffic:
    """All that a place sends and receives of a transport. Gradients and directions lie in the same bytes of one buffer.

    Its first half has what is sent, its second what is received. Directions are put into the first half when gradients have left
    it, and arrive in the second when gradients have been taken from there. Two trips that follow each other do not overlap.

    For directions, the first half has what all trips send and keep, one trip after the other; then a room for chunks in order; then
    two rooms for what is passed on. The second half has two rooms for what is received. Trips take turns with the two rooms.
    """

    inbound: Trip | None
    outbound: tuple[Trip, ...]
    nbytes: int

    @staticmethod
    def of(plan: Plan, transport: Transport, me: int) -> Traffic:
        inbound = inbound_trip(plan, transport, me) if transport.inbound else None
        trips = outbound_trips(plan, transport, me) if transport.outbound else []
        size, copies = SIZES[str(transport.outbound)] if trips else 1, len(transport.mesh.sharers[me])
        *starts, ordered = accumulate((trip.sent.numel + trip.kept.numel for trip in trips), initial=0)
        chunks = max((trip.sent.numel for trip in trips if trip.chunks), default=0)
        relays, end = _two_rooms(ordered + chunks, [trip.part if trip.swap else 0 for trip in trips])
        middle = _aligned(max(inbound.sent.nbytes if inbound else 0, size * end))  # bytes
        arrivals, end = _two_rooms(middle // size, [max(trip.received.numel, copies * trip.part) for trip in trips])
        outbound = tuple(
            replace(
                trip,
                sent=trip.sent.at(start),
                kept=trip.kept.at(start + trip.sent.numel),
                received=trip.received.at(arrival),
                ordered=ordered,
                relay=relay,
            )
            for trip, start, relay, arrival in zip(trips, starts, relays, arrivals, strict=True)
        )
        if not inbound:
            return Traffic(None, outbound, _aligned(size * end))
        received = inbound.received.at(middle // SIZES[inbound.received.wire])
        kept = inbound.kept.at(received.start + received.numel)
        needed = max(middle + received.nbytes + kept.nbytes, size * end)
        return Traffic(replace(inbound, received=received, kept=kept), outbound, _aligned(needed))


def _two_rooms(start: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where things begin that take turns with two rooms, or have one if there is only one thing, and where the rooms end."""
    size = max(sizes, default=0)
    return [start + i % 2 * size for i in range(len(sizes))], start + min(2, len(sizes)) * size


def _aligned(nbytes: int) -> int:
    """Rounded up, so that numbers of every dtype can follow."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def message_numel(numel: int, pieces: int, wire: str) -> int:
    """Elements of a message: its pieces, then their scales."""
    return numel + (SCALE * pieces if wire == SCALED else 0)


def lay_out(messages: Iterable[Iterable[Move]], wire: str, *, even: bool = False) -> Messages:
    """Place every piece of every message. ``even`` pads all messages to the longest."""
    packed = [list(moves) for moves in messages]
    numels = [sum(move.region.numel for move in moves) for moves in packed]
    splits = [message_numel(numel, len(moves), wire) for numel, moves in zip(numels, packed, strict=True)]
    if even:
        splits = [max(splits)] * len(splits)
    items, start = [], 0
    for moves, numel, split in zip(packed, numels, splits, strict=True):
        offset = start
        for i, move in enumerate(moves):
            items.append(Item(move, offset, start + numel + SCALE * i if wire == SCALED else None))
            offset += move.region.numel
        start += split
    return Messages(tuple(items), tuple(splits), wire)


def inbound_trip(plan: Plan, transport: Transport, me: int) -> Trip:
    """Gradients: what a place sends as a holder, and what it receives as an owner."""
    places, wire = range(len(plan.teams[transport.team])), str(transport.inbound)
    sent = lay_out((plan.inbound(transport, me, owner) if owner != me else () for owner in places), wire)
    received = lay_out((plan.inbound(transport, holder, me) if holder != me else () for holder in places), wire)
    kept = lay_out([plan.inbound(transport, me, me)], wire)
    return Trip(sent, received, kept, (sent.splits, received.splits))


def outbound_trips(plan: Plan, transport: Transport, me: int) -> list[Trip]:
    """Directions: what a place sends as an owner, and what it receives as a holder. See [Note: two hops]."""
    if not transport.gather:
        return [_swapped(plan, transport, me)]
    return [_gathered(plan, transport, me, numbers) for numbers in rounds(plan, transport)]


def rounds(plan: Plan, transport: Transport) -> list[list[int]]:
    """Blocks whose directions are gathered together, in the order of owners.

    A place receives about ``ROUND`` bytes in a round, or one part in ``ROUNDS`` of what it stores if that is more. Rounds take the
    first blocks of all owners, then the second, and so on, so that owners have equally much to send. If the blocks of a turn do
    not fit, a round takes those of some owners, evenly spread.
    """
    owned = [list(plan.sequence(transport, owner)) for owner in range(len(plan.teams[transport.team]))]
    turns = [[number for number in turn if number is not None] for turn in zip_longest(*owned)]
    specs = (spec for spec in plan.specs if spec.team == transport.team)
    stored = sum(math.prod(spec.shape) * spec.layout.copies // spec.layout.places for spec in specs)
    most = max(ROUND // SIZES[str(transport.outbound)], stored // ROUNDS)
    if _most(plan, [number for turn in turns for number in turn]) <= 2 * most:
        return [[number for numbers in owned for number in numbers]]
    found: list[list[int]] = [[]]
    totals = Counter[int]()
    for turn in turns:
        count = max(1, -(-_most(plan, turn) // max(1, most)))
        portions = [turn[i::count] for i in range(count)]
        fit = all(_most(plan, some) <= most for some in portions)
        for some in portions if fit else [[number] for number in turn]:
            added = _totals(plan, some)
            if found[-1] and any(totals[place] + numel > most for place, numel in added.items()):
                found.append([])
                totals.clear()
            found[-1] += some
            totals.update(added)
    return [sorted(numbers, key=plan.owners.__getitem__) for numbers in found]


def _totals(plan: Plan, numbers: Iterable[int]) -> Counter[int]:
    """Elements of some blocks that each set of places stores. Sets go by their lowest place."""
    totals = Counter[int]()
    for number in numbers:
        for place, numel in _shares(plan, number):
            totals[place] += numel
    return totals


def _most(plan: Plan, numbers: Iterable[int]) -> int:
    return max(_totals(plan, numbers).values(), default=0)


def _shares(plan: Plan, number: int) -> Sequence[tuple[int, int]]:
    block = plan.blocks[number]
    spec = plan.specs[block.param]
    return spec.layout.shares(spec.shape, block.region)


def _swapped(plan: Plan, transport: Transport, me: int) -> Trip:
    """An all-to-all, because each place stores something else."""
    places, wire = range(len(plan.teams[transport.team])), str(transport.outbound)
    mine = list(plan.sequence(transport, me))
    sent = lay_out((plan.outbound(mine, holder) if holder != me else () for holder in places), wire)
    owned = (plan.sequence(transport, owner) if owner != me else () for owner in places)
    received = lay_out((plan.outbound(numbers, me) for numbers in owned), wire)
    return Trip(sent, received, lay_out([plan.outbound(mine, me)], wire), (sent.splits, received.splits))


@dataclass(frozen=True)
class _Spread:
    """Where the messages of owners lie if those to one set of places, which store the same, are laid end to end.

    Sets go by their lowest place.
    """

    totals: Counter[int]  # elements, by set
    mine: dict[int, tuple[int, int]]  # where the messages of this owner begin and end, by set
    owners: dict[int, tuple[int, int]]  # where the messages of each owner to this place begin and end

    @staticmethod
    def of(plan: Plan, wire: str, numbers: Sequence[int], me: int, ours: int) -> _Spread:
        totals, mine, owners = Counter[int](), dict[int, tuple[int, int]](), dict[int, tuple[int, int]]()
        for number in numbers:
            owner = plan.owners[number]
            for place, numel in _shares(plan, number):
                start = totals[place]
                totals[place] += message_numel(numel, 1, wire)
                if owner == me:
                    mine[place] = mine.get(place, (start, 0))[0], totals[place]
                if place == ours:
                    owners[owner] = owners.get(owner, (start, 0))[0], totals[place]
        return _Spread(totals, mine, owners)


def _gathered(plan: Plan, transport: Transport, me: int, numbers: Sequence[int]) -> Trip:
    """An all-gather among the places that store the same, after an all-to-all unless all places store everything."""
    wire, sharers = str(transport.outbound), transport.mesh.sharers
    ours, copies = sharers[me][0], len(sharers[me])
    spread = _Spread.of(plan, wire, numbers, me, ours)
    parts = {place: -(-total // copies) for place, total in spread.totals.items()}
    by_owner = {owner: list(some) for owner, some in groupby(numbers, key=plan.owners.__getitem__)}
    places = range(len(plan.teams[transport.team]))
    if transport.mesh.replicated and not _is_uneven(spread.owners, parts.get(ours, 0), copies):
        received = lay_out((plan.outbound(by_owner.get(owner, ()), me) for owner in places), wire, even=True)
        sent, part = lay_out([plan.outbound(by_owner.get(me, ()), me)], wire), received.splits[me]
        padding = (copies - 1) * part - (spread.totals[ours] - sent.numel)
        return Trip(replace(sent, splits=(part,)), received, lay_out([], wire), None, part=part, padding=padding)
    received = lay_out((plan.outbound(some, me) for some in by_owner.values()), wire)
    sent = lay_out((plan.outbound(by_owner[me], place) for place in spread.mine), wire)
    starts = dict(zip(spread.mine, accumulate(sent.splits, initial=0), strict=False))
    chunks = sorted(
        Chunk(sharers[place][i], starts[place] + start - begin, stop - start)
        for place, (begin, end) in spread.mine.items()
        for i, start, stop in _cut((begin, end), parts[place])
    )
    part, here = parts.get(ours, 0), sharers[me].index(me)
    out, into = [0] * len(places), [0] * len(places)
    for chunk in chunks:
        out[chunk.place] = chunk.numel
    for owner, span in spread.owners.items():
        into[owner] = sum(stop - start for i, start, stop in _cut(span, part) if i == here)
    padding = copies * part - spread.totals[ours]
    ends = accumulate((chunk.numel for chunk in chunks), initial=0)
    in_order = all(chunk.offset == end for chunk, end in zip(chunks, ends, strict=False))
    swap = tuple(out), tuple(into)
    return Trip(sent, received, lay_out([], wire), swap, () if in_order else tuple(chunks), part=part, padding=padding)


def _cut(span: tuple[int, int], part: int) -> Iterator[tuple[int, int, int]]:
    """A span, cut into equal parts that are counted from 0: the number of each part that it meets, and where it does."""
    begin, end = span
    first, last = begin // part, -(-end // part)
    bounds = [begin, *(i * part for i in range(first + 1, last)), end]
    yield from ((first + i, start, stop) for i, (start, stop) in enumerate(pairwise(bounds)))


def _is_uneven(owners: dict[int, tuple[int, int]], part: int, copies: int) -> bool:
    """Whether two hops move less than an all-gather, in which all messages are as long as the longest."""
    longest = max((end - begin for begin, end in owners.values()), default=0)
    moved = sum(stop - start for owner, span in owners.items() for i, start, stop in _cut(span, part) if i != owner)
    return moved + copies * (copies - 1) * part < WORTH * copies * (copies - 1) * longest
