"""Messages of a step: where every piece of a gradient or direction lies in the buffer that a collective moves.

Messages are laid out once, the same way at both ends. Their sizes never depend on what happens in a step, so nothing hangs if
ranks disagree about a gradient.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .plan import Move, Plan, Transport

SCALED = "int8"
SCALE = 4  # bytes of a block's scale in a message of 8-bit numbers
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # bytes of an element


@dataclass(frozen=True)
class Item:
    """Where a piece lies in a buffer of messages, and where the scale of its block does, if it has one."""

    move: Move
    offset: int
    scale: int | None


@dataclass(frozen=True)
class Messages:
    """Messages end to end: to every place in turn, or from every place."""

    items: tuple[Item, ...]
    splits: tuple[int, ...]  # elements of each message
    wire: str  # dtype

    @property
    def nbytes(self) -> int:
        return sum(self.splits) * SIZES[self.wire]


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


def inbound_messages(plan: Plan, transport: Transport, me: int) -> tuple[Messages, Messages]:
    """What a place sends as a holder, and what it receives as an owner."""
    places, wire = range(len(plan.teams[transport.team])), str(transport.inbound)
    sent = lay_out((plan.inbound(transport, me, owner) for owner in places), wire)
    return sent, lay_out((plan.inbound(transport, holder, me) for holder in places), wire)


def outbound_messages(plan: Plan, transport: Transport, me: int) -> tuple[Messages, Messages]:
    """What a place sends as an owner, and what it receives as a holder."""
    places, wire = range(len(plan.teams[transport.team])), str(transport.outbound)
    received = lay_out((plan.outbound(transport, owner, me) for owner in places), wire, even=transport.gather)
    if not transport.gather:
        return lay_out((plan.outbound(transport, me, holder) for holder in places), wire), received
    own = lay_out([plan.outbound(transport, me, me)], wire)
    return Messages(own.items, (received.splits[me],), wire), received
