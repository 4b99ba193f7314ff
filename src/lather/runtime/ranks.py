"""Process groups: of a team, and of all ranks that must stop together. Also compares facts between ranks."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from hashlib import sha256
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

Ranks = tuple[int, ...]
Parts = tuple[tuple[int, ...], ...]  # the places of a team, divided among process groups
Facts = dict[str, str]  # what a rank tells about itself, in words
PLAN, MADE = "the plan", "made"  # a fact of every rank; one that has no plan says why instead
PARAMETER = "parameter number"  # how facts about parameters begin

ABSENT = -(2**62)  # less than any digest, and than any digest's negative


@final
class Comm:
    """The process group of a team. It is found or made on the first use, which is a collective of its ranks."""

    def __init__(
        self, ranks: Sequence[int], device: torch.device, known: Sequence[Any] = (), together: Parts | None = None
    ) -> None:
        """``together``: all ranks of the world make the group together. Teams are then equal parts of the world, of consecutive
        ranks, and ``together`` has the groups that each team makes, as places."""
        self.ranks = tuple(ranks)
        self._device, self._known, self._together = device, list(known), together
        self._group: Any = None

    @property
    def order(self) -> Any:
        """Sort key, in which groups must be made: first those that all ranks make together, in an order that they share."""
        return self._together is None, -len(self.ranks), self._together or self.ranks

    @property
    def group(self) -> Any:
        if self._group is None:
            self._group = _find_group(self.ranks, self._known, self._together)
        return self._group

    @property
    def me(self) -> int:
        """This rank."""
        return dist.get_rank()

    @property
    def host(self) -> torch.device:
        """Where small tensors that this group sends must be: on the host if it can send from there, else with the parameters."""
        return torch.device("cpu") if self._sends("cpu") else self._device

    @property
    def device(self) -> torch.device:
        """Where large tensors that this group sends must be: with the parameters if it can send from there, else on the host."""
        return self._device if self._sends(self._device.type) else torch.device("cpu")

    def _sends(self, kind: str) -> bool:
        return f"{kind}:" in str(dist.get_backend_config(self.group))

    def check_alive(self) -> None:
        group = self.group
        cause: Exception | None = None
        try:
            alive = dist.get_rank(group) >= 0  # looks the group up, and does not list its ranks
        except (RuntimeError, ValueError, KeyError, AttributeError) as error:
            alive, cause = False, error
        if not alive:
            raise RuntimeError(
                f"the process group of ranks {_some(self.ranks)} that the optimizer works with was destroyed; save its state "
                "before that, and load it into an optimizer built under the new process group"
            ) from cause

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of what the ranks give, element by element. The host waits."""
        return cast("list[int]", self.reduce_max(torch.tensor(values, device=self.host)).tolist())

    def reduce_max(self, values: Tensor) -> Tensor:
        """In place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def collect(self, value: Any) -> list[Any]:
        """What every rank gives, in the order of the ranks. For plain data."""
        found: list[Any] = [None] * len(self.ranks)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():  # torch sends from the current one
            dist.all_gather_object(found, value, group=self.group)
        return found

    def exchange(self, received: Tensor, sent: Tensor, into: list[int], out: list[int]) -> Any:
        """An all-to-all, with the numbers of elements from and to every rank."""
        return dist.all_to_all_single(received, sent, into, out, group=self.group, async_op=True)

    def gather(self, received: Tensor, sent: Tensor) -> Any:
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # its older name
        return getattr(dist, name)(received, sent, group=self.group, async_op=True)

    def forward(self, stack: Tensor | None, n: int, like: Tensor, source: int, target: int) -> Tensor | None:
        """Send a stack of ``n`` tensors like one from place to place. The source passes it, and the target gets it."""
        if stack is not None:
            dist.send(stack.contiguous().to(self.device), self.ranks[target], group=self.group)
            return None
        stack = torch.empty(n, *like.shape, dtype=like.dtype, device=self.device)
        dist.recv(stack, self.ranks[source], group=self.group)
        return stack


@final
class Peers:
    """All ranks that are connected by storing parameters together, over any number of meshes.

    An error of one rank must reach all of them before any of them raises, or the others would wait for it. If one mesh is the
    world, that takes one collective. Otherwise the error goes from mesh to mesh, often enough to cross a mesh of meshes.
    """

    SWEEPS = 3

    def __init__(self, comms: Sequence[Comm], world: Ranks) -> None:
        """``comms`` has all meshes of this rank that have other ranks, in an order that ranks share. ``world`` has all ranks."""
        self.comms = list(comms)
        whole = [comm for comm in comms if comm.ranks == world]
        self._in_one = bool(whole)  # whether one mesh reaches all
        self._path = whole or self.comms * self.SWEEPS  # the meshes that a message goes through

    def settle(self) -> None:
        """Once ranks have met: if none of them is in two meshes, nothing has to go from mesh to mesh. The host waits."""
        if not self._in_one and self.comms and not self.any(len(self.comms) > 1):
            self._in_one, self._path = True, self.comms

    def vote(self, digests: Sequence[int], alarm: Tensor | None, strict: bool) -> Tensor:
        """Whether ranks gave different digests of a mesh, or a rank has an ``alarm``, which is a reason to stop; and whether a rank
        is strict.

        The answer ``[4]`` is the same on all ranks. :func:`is_trouble` reads it, and its last number is about strict ranks. The
        host does not wait. One mesh takes one copy to the device and one all-reduce.
        """
        path = list(zip(self.comms, digests, strict=True))[::-1]  # the world, if it is a mesh, comes last and hears of all
        path += [] if self._in_one else [(comm, 0) for comm in self._path]
        answers: list[Tensor] = []
        for comm, digest in path:
            mine = torch.tensor([digest, -digest, 0, int(strict)], device="cpu").to(comm.device, non_blocking=True)
            if alarm is not None:
                mine[2] = alarm
            for high, low, trouble, heard in answers[-1:]:
                told = torch.stack([trouble.maximum((high != -low).long()), heard])
                mine[2:] = mine[2:].maximum(told.to(comm.device))
            answers.append(comm.reduce_max(mine))
        return answers[-1]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. The host waits."""
        for comm in self._path:
            flag = bool(comm.largest([int(flag)])[0])
        return flag

    def collect(self, value: Any) -> list[Any]:
        """What every rank gives. For plain data. The host waits."""
        found = {dist.get_rank() if self._path else 0: value}
        for comm in self._path:
            found = {rank: given for theirs in comm.collect(found) for rank, given in theirs.items()}
        return [found[rank] for rank in sorted(found)]

    def tell(self, message: str | None) -> str | None:
        """The message of a rank that has one, the same on all ranks. The host waits."""
        if not self.any(message is not None):
            return None
        for comm in self._path:
            message = next((told for told in comm.collect(message) if told is not None), None)
        return message


def _find_group(ranks: Ranks, known: Sequence[Any], together: Parts | None) -> Any:
    """An existing group of these ranks, or a new one."""
    if not dist.is_initialized():
        raise RuntimeError(f"the process group of ranks {_some(ranks)} was destroyed; save the optimizer's state before that")
    everyone = dist.group.WORLD
    for group in (*known, everyone):  # first those that the user made
        if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    return _split_world(everyone, together)[ranks] if together else _new_group(everyone, ranks)


# Groups are kept as long as their world exists, so that a second optimizer finds them.


@cache
def _split_world(everyone: Any, parts: Parts) -> dict[Ranks, Any]:
    """The same groups of all teams of consecutive ranks. A collective of all ranks."""
    starts = range(0, dist.get_world_size(), sum(map(len, parts)))
    groups = [tuple(start + place for place in part) for start in starts for part in parts]
    return {ranks: dist.new_group(list(ranks)) for ranks in groups}


@cache
def _new_group(everyone: Any, ranks: Ranks) -> Any:
    """A group that only its own ranks make.

    torch names it after the number of groups that a rank is in. If these numbers differ it would hang, so they are compared.
    """
    store, count = dist.distributed_c10d._get_default_store(), len(dist.distributed_c10d._world.pg_names)
    key = f"lather/{'_'.join(map(str, ranks))}"
    store.set(f"{key}/{dist.get_rank()}", str(count))
    counts = {rank: int(store.get(f"{key}/{rank}")) for rank in ranks}
    if len(set(counts.values())) > 1:
        raise RuntimeError(
            f"ranks {_some(ranks)} need a process group of their own, which torch cannot make because they are in different "
            f"numbers of groups ({counts}); call torch.distributed.new_group({list(ranks)}) on all ranks of the world, and pass "
            "it as process_group"
        )
    return dist.new_group(list(ranks), use_local_synchronization=True)


def digest(facts: Facts) -> int:
    """A hash that is the same in all processes."""
    text = "\n".join(f"{label}={value}" for label, value in facts.items())
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")


def is_trouble(answer: Sequence[int]) -> bool:
    """Whether ranks must stop, by the answer to a vote: the largest digest, minus the smallest, and whether others must."""
    high, low, trouble, _ = answer
    return high != -low or trouble > 0


def difference(comm: Comm, facts: Mapping[Ranks, Facts]) -> str | None:
    """Compare facts. If they differ, every rank gets the same sentence, which names the first difference.

    ``facts`` has what each set of ranks must agree on. All ranks pass the same sets, and count in those that they are in.
    """
    mine = {ranks: digest(told) for ranks, told in facts.items() if comm.me in ranks}
    largest = comm.largest([sign * mine[ranks] if ranks in mine else ABSENT for sign in (1, -1) for ranks in facts])
    if all(high == -low for high, low in zip(largest[: len(facts)], largest[len(facts) :], strict=True)):
        return None
    told = dict(zip(comm.ranks, comm.collect({ranks: dict(facts[ranks]) for ranks in mine}), strict=True))
    for ranks in facts:
        longest_first = sorted((told[rank][ranks] for rank in ranks), key=len, reverse=True)  # so nothing is named too late
        for label in dict.fromkeys(label for theirs in longest_first for label in theirs):
            values = {rank: told[rank][ranks].get(label, "missing") for rank in ranks}
            other = next((rank for rank in ranks if values[rank] != values[ranks[0]]), None)
            if other is not None and label == PLAN:
                failed = next(rank for rank in ranks if values[rank] != MADE)
                return f"rank {failed} cannot go on: {values[failed]}"
            if other is not None:
                return (
                    f"ranks disagree about {label}: {values[ranks[0]]} on rank {ranks[0]} but {values[other]} on rank {other}; "
                    f"build the same model and the same optimizer on every rank of {_some(ranks)}, and change and load them on all"
                    + (". Pipeline stages need a process_group each" if label.startswith(PARAMETER) else "")
                )
    return None


def _some(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
