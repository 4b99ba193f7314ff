"""Carries pieces of gradients to the owners of their blocks, and pieces of directions back: the collectives.

All messages of a step are laid out once. A collective moves one persistent buffer of bytes, so every dtype travels over
every backend, and its size never depends on what happens in a step: ranks can disagree about a gradient, but not hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..linalg import per_slot
from ..planning.plan import Move, Plan, Route

SCALED = "int8"
SCALE = 4  # bytes of a block's scale in a message of 8-bit numbers


# What directions become on their way.


def encode(p: Tensor, wire: str) -> tuple[Tensor, Tensor | None]:
    """Directions ``[n, ...]`` as they travel, and for 8 bits the scale of every slot ``[n]``. NaN stays NaN."""
    if wire == SCALED:
        scale = p.flatten(1).abs().amax(1).float() / 127
        steps = p / per_slot(torch.where(scale > 0, scale, 1.0).to(p.dtype), p)
        return steps.round_().nan_to_num_(0.0).to(torch.int8), scale
    dtype = cast(torch.dtype, getattr(torch, wire))
    if dtype == torch.float16:
        p = p.clamp(-65504, 65504)
    return p.to(dtype), None


def decode(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    p = values.to(dtype)
    return p if scale is None else p * per_slot(scale.to(dtype), p)


def rounded(p: Tensor, wire: str) -> Tensor:
    """What a direction is after its way, for one that stays: so results do not depend on the number of ranks."""
    if getattr(torch, wire) == p.dtype:
        return p
    return decode(*encode(p, wire), p.dtype)


# Messages.


@dataclass(frozen=True)
class Item:
    """A piece's place in a buffer of messages, and that of its block's scale where there is one."""

    move: Move
    offset: int
    scale: int | None


@dataclass(frozen=True)
class Mail:
    """Messages end to end: for, or from, every place in turn."""

    items: tuple[Item, ...]
    splits: tuple[int, ...]  # elements of each message

    @property
    def numel(self) -> int:
        return sum(self.splits)


def itemsize(wire: str) -> int:
    return cast(torch.dtype, getattr(torch, wire)).itemsize


def message_numel(numel: int, pieces: int, wire: str) -> int:
    """Elements of a message: those of its pieces, then their scales."""
    return numel + (SCALE * pieces if wire == SCALED else 0)


def lay_out(parcels: Iterable[Iterable[Move]], wire: str, *, even: bool = False) -> Mail:
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
    return Mail(tuple(items), tuple(splits))


def inbound_mail(plan: Plan, route: Route, me: int) -> tuple[Mail, Mail]:
    """What a place sends to owners, and what it gets as one."""
    places, wire = range(len(plan.teams[route.team])), str(route.inbound)
    sent = lay_out((plan.inbound(route, me, owner) for owner in places), wire)
    return sent, lay_out((plan.inbound(route, holder, me) for holder in places), wire)


def outbound_mail(plan: Plan, route: Route, me: int) -> tuple[Mail, Mail]:
    """What a place sends as an owner, and what it gets as a holder."""
    places, wire = range(len(plan.teams[route.team])), str(route.outbound)
    received = lay_out((plan.outbound(route, owner, me) for owner in places), wire, even=route.gather)
    if not route.gather:
        return lay_out((plan.outbound(route, me, holder) for holder in places), wire), received
    own = lay_out([plan.outbound(route, me, me)], wire)
    return Mail(own.items, (received.splits[me],)), received


# Collectives.


class Comm:
    """The process group of a team. It is found or made on the first use, which all its ranks come to together."""

    def __init__(
        self, ranks: Sequence[int], device: torch.device, known: Sequence[Any] = (), together: bool = False
    ) -> None:
        """``together``: all ranks of the world come to the first use, each for its own equal share of consecutive ranks."""
        self.ranks = tuple(ranks)
        self.together = together
        self._device, self._known = device, list(known)
        self._group: Any = None

    @property
    def group(self) -> Any:
        if self._group is None:
            self._group = _find_group(self.ranks, self._known, self.together)
        return self._group

    @property
    def host(self) -> torch.device:
        """Where a tensor must be for this group to send it: on the host if it can, else beside the parameters."""
        return torch.device("cpu") if self._sends("cpu") else self._device

    @property
    def device(self) -> torch.device:
        """The same for what is beside the parameters and should stay there."""
        return self._device if self._sends(self._device.type) else torch.device("cpu")

    def _sends(self, kind: str) -> bool:
        return f"{kind}:" in str(dist.get_backend_config(self.group))

    def check_alive(self) -> None:
        group = self.group
        try:
            if tuple(dist.get_process_group_ranks(group)) == self.ranks:
                return
        except (RuntimeError, ValueError, KeyError, AttributeError) as error:
            raise RuntimeError(self._lost()) from error
        raise RuntimeError(self._lost())

    def _lost(self) -> str:
        return (
            f"the process group of ranks {_some(self.ranks)} that the optimizer works with was destroyed; save its state "
            "before that, and load it into an optimizer built under the new process group"
        )

    def largest(self, values: Sequence[int]) -> list[int]:
        """Element by element the largest of what the ranks give. The host waits."""
        return cast("list[int]", self.reduce_max(torch.tensor(values, device=self.host)).tolist())

    def reduce_max(self, values: Tensor) -> Tensor:
        """In place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def collect(self, value: Any) -> list[Any]:
        """What every rank gives, in the order of the ranks; plain data."""
        found: list[Any] = [None] * len(self.ranks)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():  # torch goes by it
            dist.all_gather_object(found, value, group=self.group)
        return found

    def exchange(self, received: Tensor, sent: Tensor, into: Sequence[int], out: Sequence[int]) -> Any:
        size = sent.element_size()
        return dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [n * size for n in into],
            [n * size for n in out],
            group=self.group,
            async_op=True,
        )

    def gather(self, received: Tensor, sent: Tensor) -> Any:
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # its older name
        call = getattr(dist, name)
        return call(received.view(torch.uint8), sent.view(torch.uint8), group=self.group, async_op=True)

    def send(self, tensor: Tensor, place: int) -> None:
        dist.send(tensor, self.ranks[place], group=self.group)

    def receive(self, tensor: Tensor, place: int) -> None:
        dist.recv(tensor, self.ranks[place], group=self.group)


class Wire:
    """One collective of every step: what is sent, what is received, and the work under way."""

    def __init__(self, mails: tuple[Mail, Mail], wire: str, sent: Tensor, received: Tensor, comm: Comm, gather: bool):
        """``sent`` and ``received`` are bytes, at least as many as the messages have."""
        self.outgoing, self.incoming = mails
        self._comm, self._gather = comm, gather
        self.sent, self.received = (
            memory[: mail.numel * itemsize(wire)].view(getattr(torch, wire))
            for memory, mail in ((sent, mails[0]), (received, mails[1]))
        )
        self._work: Any = None

    def start(self) -> None:
        self._comm.check_alive()
        if self._gather:
            self._work = self._comm.gather(self.received, self.sent)
        else:
            self._work = self._comm.exchange(self.received, self.sent, self.incoming.splits, self.outgoing.splits)

    def finish(self) -> Tensor:
        self._work.wait()
        self._work = None
        return self.received


class Circle:
    """All ranks that are connected by storing parameters together, however many meshes that takes.

    What one rank knows must reach all of them before any of them raises, or the others would wait for it. If one mesh is
    the world that takes one collective; else word goes from mesh to mesh, so often that it crosses a mesh of meshes.
    """

    SWEEPS = 3

    def __init__(self, comms: Sequence[Comm]) -> None:
        """``comms``: of all meshes of this rank, in an order that ranks share."""
        everyone = [comm for comm in comms if comm.ranks == world(None)]
        self.comms = list(comms)
        self._path = everyone or self.comms * self.SWEEPS

    def __bool__(self) -> bool:
        """Whether there is anybody else."""
        return bool(self.comms)

    @property
    def device(self) -> torch.device:
        return self.comms[0].device

    def reduce_max(self, values: Tensor) -> Tensor:
        for comm in self._path:
            values = comm.reduce_max(values.to(comm.device))
        return values

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. The host waits."""
        for comm in self._path:
            flag = bool(comm.largest([int(flag)])[0])
        return flag

    def merge(self, found: Mapping[Any, float]) -> dict[Any, float]:
        """What any rank has found, and of what several have the largest. The host waits."""
        if not self.any(bool(found)):
            return {}
        for comm in self._path:
            told = comm.collect(dict(found))
            found = {
                key: max(theirs.get(key, value) for theirs in told) for mine in told for key, value in mine.items()
            }
        return dict(found)

    def tell(self, message: str | None) -> str | None:
        """The message of some rank that has one. The host waits."""
        if not self.any(message is not None):
            return None
        for comm in self._path:
            message = next((told for told in comm.collect(message) if told is not None), None)
        return message


# Process groups.


def world(group: Any) -> tuple[int, ...]:
    """The ranks of a process group, by default of all processes; one process alone is rank 0."""
    if not dist.is_available() or not dist.is_initialized():
        return (0,)
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def my_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


_made: dict[tuple[int, ...], tuple[Any, Any]] = {}  # groups that had to be made, each with the world it belongs to


def _find_group(ranks: tuple[int, ...], known: Sequence[Any], together: bool) -> Any:
    """A group that is there already, if one has these ranks; else a new one."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"the parameters are spread over ranks {_some(ranks)} but there is no process group any more"
        )
    everyone = dist.group.WORLD
    for group in (*known, everyone):  # a group that was given has its reasons
        if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    if _made.get(ranks, (None, None))[0] is not everyone:
        if together:
            for start in range(0, dist.get_world_size(), len(ranks)):
                part = tuple(range(start, start + len(ranks)))
                _made[part] = everyone, dist.new_group(list(part))
        else:
            _check_counts(ranks)
            _made[ranks] = everyone, dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[ranks][1]


def _check_counts(ranks: tuple[int, ...]) -> None:
    """torch names a group of some ranks by how many groups each of them is in, and hangs where that differs."""
    store, count = dist.distributed_c10d._get_default_store(), len(dist.distributed_c10d._world.pg_names)
    key = f"lather/{'_'.join(map(str, ranks))}"
    store.set(f"{key}/{dist.get_rank()}", str(count))
    counts = {rank: int(store.get(f"{key}/{rank}")) for rank in ranks}
    if len(set(counts.values())) > 1:
        raise RuntimeError(
            f"ranks {_some(ranks)} need a process group of their own, but are members of different numbers of groups "
            f"({counts}), for which torch cannot make one; make it with torch.distributed.new_group({list(ranks)}) on all "
            "ranks of the world, and pass it as process_group"
        )


def difference(comm: Comm, facts: Mapping[str, str]) -> str | None:
    """Compare facts across ranks: where they differ, every rank gets the same sentence that names the first difference."""
    digest = hash_of(facts)
    high, low = comm.largest([digest, -digest])
    if high == -low:
        return None
    told = comm.collect(dict(facts))
    for label in dict.fromkeys(label for theirs in told for label in theirs):
        values = [theirs.get(label, "missing") for theirs in told]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            return (
                f"ranks disagree about {label}: {values[0]} on rank {comm.ranks[0]} but {values[other]} on rank "
                f"{comm.ranks[other]}; build the same model and the same optimizer on every rank of {_some(comm.ranks)}"
            )
    return None


def hash_of(facts: Mapping[str, str]) -> int:
    text = "\n".join(f"{label}={value}" for label, value in facts.items())
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")


def _some(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
