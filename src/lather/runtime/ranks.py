"""Process groups: of a team, of all ranks that must stop together, and the comparison of what ranks are about to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from hashlib import sha256
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

Ranks = tuple[int, ...]


class Comm:
    """The process group of a team. It is found or made on the first use, which all its ranks come to together."""

    def __init__(self, ranks: Sequence[int], device: torch.device, known: Sequence[Any] = (), together: bool = False) -> None:
        """``together``: all ranks of the world come to the first use, each for its own equal part of consecutive ranks."""
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


class Peers:
    """All ranks that are connected by storing parameters together, over however many meshes.

    What one rank knows must reach all of them before any of them raises, or the others would wait for it. If one mesh is
    the world, that takes one collective. Otherwise word goes from mesh to mesh, often enough to cross a mesh of meshes.
    """

    SWEEPS = 3

    def __init__(self, comms: Sequence[Comm], world: Ranks) -> None:
        """``comms``: of all meshes of this rank, in an order that ranks share; ``world``: all ranks."""
        everyone = [comm for comm in comms if comm.ranks == world]
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

    def tell(self, message: str | None) -> str | None:
        """The message of some rank that has one. The host waits."""
        if not self.any(message is not None):
            return None
        for comm in self._path:
            message = next((told for told in comm.collect(message) if told is not None), None)
        return message


def _find_group(ranks: Ranks, known: Sequence[Any], together: bool) -> Any:
    """A group that is there already, if one has these ranks; else a new one."""
    if not dist.is_initialized():
        raise RuntimeError(f"the parameters are spread over ranks {_some(ranks)} but there is no process group any more")
    everyone = dist.group.WORLD
    for group in (*known, everyone):  # a group that was given has its reasons
        if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    return _split_world(everyone, len(ranks))[ranks] if together else _new_group(everyone, ranks)


# Groups are kept as long as the world that they belong to, so that a second optimizer finds them.


@lru_cache(maxsize=64)
def _split_world(everyone: Any, size: int) -> dict[Ranks, Any]:
    """Groups of so many consecutive ranks each, made by all ranks together."""
    parts = [tuple(range(start, start + size)) for start in range(0, dist.get_world_size(), size)]
    return {part: dist.new_group(list(part)) for part in parts}


@lru_cache(maxsize=64)
def _new_group(everyone: Any, ranks: Ranks) -> Any:
    """A group that only its own ranks make."""
    _check_counts(ranks)
    return dist.new_group(list(ranks), use_local_synchronization=True)


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
