"""Messages of a step: where every piece of a gradient or direction lies in the buffer that a collective moves.

All messages are laid out once, the same way at both ends. Their sizes never depend on what happens in a step, so ranks may
disagree about a gradient without hanging.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .plan import Move, Plan, Transport

SCALED = "int8"
SCALE = 4  # bytes of a block's scale in a message of 8-bit numbers
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # bytes of an element


@dataclass(frozen=True)
class Item:
    """A piece's place in a buffer of messages, and that of its block's scale where there is one."""

    move: Move
    offset: int
    scale: int | None


@dataclass(frozen=True)
class Messages:
    """Messages end to end: for, or from, every place in turn."""

    items: tuple[Item, ...]
    splits: tuple[int, ...]  # elements of each message

    @property
    def numel(self) -> int:
        return sum(self.splits)


def itemsize(wire: str) -> int:
    return SIZES[wire]


def message_numel(numel: int, pieces: int, wire: str) -> int:
    """Elements of a message: those of its pieces, then their scales."""
    return numel + (SCALE * pieces if wire == SCALED else 0)


def lay_out(parcels: Iterable[Iterable[Move]], wire: str, *, even: bool = False) -> Messages:
    """Place every piece of every parcel; ``even`` pads all messages to the longest."""
    packed = [list(parcel) for parcel in parcels]
    splits = [message_numel(sum(m.region.numel for m in parcel), len(parcel), wire) for parcel in packed]
    if even:
        splits = [max(splits)] * len(splits)
    items, start = [], 0
    for parcel, split in zip(packed, splits, strict=True):
        offset = start
        scales = start + sum(m.region.numel for m in parcel)
        for i, move in enumerate(parcel):
            items.append(Item(move, offset, scales + SCALE * i if wire == SCALED else None))
            offset += move.region.numel
        start += split
    return Messages(tuple(items), tuple(splits))


def inbound_messages(plan: Plan, transport: Transport, me: int) -> tuple[Messages, Messages]:
    """What a place sends to owners, and what it gets as one."""
    places, wire = range(len(plan.teams[transport.team])), str(transport.inbound)
    sent = lay_out((plan.inbound(transport, me, owner) for owner in places), wire)
    return sent, lay_out((plan.inbound(transport, holder, me) for holder in places), wire)


def outbound_messages(plan: Plan, transport: Transport, me: int) -> tuple[Messages, Messages]:
    """What a place sends as an owner, and what it gets as a holder."""
    places, wire = range(len(plan.teams[transport.team])), str(transport.outbound)
    received = lay_out((plan.outbound(transport, owner, me) for owner in places), wire, even=transport.gather)
    if not transport.gather:
        return lay_out((plan.outbound(transport, me, holder) for holder in places), wire), received
    own = lay_out([plan.outbound(transport, me, me)], wire)
    return Messages(own.items, (received.splits[me],)), received
