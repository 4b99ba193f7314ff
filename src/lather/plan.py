"""The plan: which blocks there are, who owns them, what moves where. Pure, and identical on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from . import assign
from .blocks import Block, Region, Shape, cut
from .options import exponent
from .roots import resolve

GEOMETRY = ("max_preconditioner_dim", "merge_dims", "large_dim", "batch_dims", "precondition_1d")


@dataclass(frozen=True)
class Spec:
    """What planning needs to know of a parameter."""

    name: str
    shape: Shape
    group: int
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class Move:
    """A piece of a block that travels from the rank ``src`` to the rank ``dst``; they may be the same."""

    src: int
    dst: int
    block: int
    region: Region


@dataclass(frozen=True)
class BankKey:
    """Blocks that agree in this are stacked: same options, same device, same mathematics, same shape."""

    group: int
    device: str
    method: str
    shape: Shape
    modes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Blocks in the order of the parameters, each with its owner; the moves of gradients in and directions out."""

    specs: tuple[Spec, ...]
    groups: tuple[Mapping[str, Any], ...]
    blocks: tuple[Block, ...]
    owners: tuple[int, ...]
    inbound: tuple[Move, ...]  # gradient piece: a holder -> the owner
    outbound: tuple[Move, ...]  # direction piece: the owner -> every holder
    _offsets: dict[tuple[Any, ...], dict[int, int]] = field(default_factory=dict, compare=False, repr=False)

    def banks(self, rank: int) -> dict[BankKey, list[int]]:
        """The blocks that a rank owns, by bank, in slot order."""
        banks: dict[BankKey, list[int]] = {}
        for number, (block, owner) in enumerate(zip(self.blocks, self.owners, strict=True)):
            if owner == rank:
                spec = self.specs[block.param]
                key = BankKey(spec.group, spec.device, block.method, block.shape, block.modes)
                banks.setdefault(key, []).append(number)
        return banks

    def offsets(self, group: int) -> dict[int, int]:
        """For ``refresh="staggered"``: each block's step inside the period, so that every step has the same work.

        Depends on all blocks of the group, not on who owns them, so it is the same for any number of ranks.
        """
        options = self.groups[group]
        frequency = options["precondition_frequency"]
        key = (group, frequency, options["root"], options["exponent"], options["exponent_multiplier"])
        if key not in self._offsets:
            numbers = [i for i, b in enumerate(self.blocks) if b.modes and self.specs[b.param].group == group]
            costs = [refresh_cost(self.blocks[i], options, self.specs[self.blocks[i].param].device) for i in numbers]
            self._offsets[key] = dict(zip(numbers, assign.greedy(costs, frequency), strict=True))
        return self._offsets[key]


def make_plan(
    specs: Sequence[Spec], groups: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[int, Region]]
) -> Plan:
    """Cut every parameter, choose owners among the ranks that store parameters, and lay out the moves."""
    blocks: list[Block] = []
    for index, spec in enumerate(specs):
        options = groups[spec.group]
        if options["batch_dims"] > len(spec.shape):
            raise ValueError(
                f"batch_dims={options['batch_dims']} but parameter {spec.name} has shape {spec.shape}; put it in a "
                "param group of its own"
            )
        blocks += cut(index, spec.shape, **{name: options[name] for name in GEOMETRY})
    ranks = sorted({rank for regions in stored for rank in regions})
    owners = [ranks[i] for i in assign.greedy([_load(b, specs, groups) for b in blocks], len(ranks))]
    inbound, outbound = [], []
    for number, (block, owner) in enumerate(zip(blocks, owners, strict=True)):
        for piece, holders in _holders(block, stored[block.param]).items():
            inbound.append(Move(owner if owner in holders else holders[0], owner, number, piece))
            outbound += [Move(owner, holder, number, piece) for holder in holders]
    return Plan(tuple(specs), tuple(groups), tuple(blocks), tuple(owners), tuple(inbound), tuple(outbound))


def refresh_cost(block: Block, options: Mapping[str, Any], device: str) -> float:
    return assign.refresh_flops(
        block, lambda d: resolve(options["root"], d, device, exponent(options, len(block.shape)))
    )


def _load(block: Block, specs: Sequence[Spec], groups: Sequence[Mapping[str, Any]]) -> float:
    spec = specs[block.param]
    options = groups[spec.group]
    refresh: float = refresh_cost(block, options, spec.device) / options["precondition_frequency"]
    return refresh + assign.step_flops(block) + math.prod(block.shape)


def _holders(block: Block, stored: Mapping[int, Region]) -> dict[Region, list[int]]:
    """The stored pieces of a block, each with the ranks that hold it."""
    holders: dict[Region, list[int]] = {}
    for rank, region in stored.items():
        if piece := block.region.meet(region):
            holders.setdefault(piece, []).append(rank)
    return holders


@dataclass(frozen=True)
class Run:
    """Equal boxes of one parameter on a regular grid, whose blocks lie in consecutive slots of a stack.

    One run is one strided view of the parameter and one contiguous view of the stack, so that a parameter cut into a
    hundred blocks is still copied in one piece.
    """

    param: int
    slot: int
    start: Shape
    shape: Shape
    counts: Shape = ()  # size of the grid, outermost first
    steps: tuple[Shape, ...] = ()  # distance between neighbours along each axis of the grid

    @property
    def size(self) -> int:
        return math.prod(self.counts)

    def of_param(self, tensor: Tensor) -> Tensor:
        if not self.counts and self.shape == tensor.shape:
            return tensor
        strides = tensor.stride()
        offset = tensor.storage_offset() + _dot(self.start, strides)
        outer = tuple(_dot(step, strides) for step in self.steps)
        return tensor.as_strided(self.counts + self.shape, outer + strides, offset)

    def of_stack(self, stack: Tensor) -> Tensor:
        return stack[self.slot : self.slot + self.size].view(self.counts + self.shape)


def coalesce(runs: Iterable[Run]) -> list[Run]:
    """Join neighbouring runs that continue a regular grid, one axis of the grid at a time."""
    runs = list(runs)
    while True:
        joined = _join(runs)
        if len(joined) == len(runs):
            return joined
        runs = joined


def _join(runs: Sequence[Run]) -> list[Run]:
    out: list[Run] = []
    first: Run | None = None  # the run that the grid at the end of `out` started from
    for run in runs:
        if first is not None and _continues(out[-1], first, run):
            head = out[-1]
            count = head.counts[0] if head is not first else 1
            step = tuple(b - a for a, b in zip(first.start, run.start, strict=True)) if count == 1 else head.steps[0]
            out[-1] = replace(first, counts=(count + 1, *first.counts), steps=(step, *first.steps))
        else:
            first = run
            out.append(run)
    return out


def _continues(head: Run, first: Run, run: Run) -> bool:
    alike = (run.param, run.shape, run.counts, run.steps) == (first.param, first.shape, first.counts, first.steps)
    if not alike or run.slot != head.slot + head.size:
        return False
    if head is first:  # forwards in every dimension, for whatever the strides are: a view cannot go backwards
        return all(a <= b for a, b in zip(first.start, run.start, strict=True))
    count = head.counts[0]
    return all(b - a == count * s for a, b, s in zip(first.start, run.start, head.steps[0], strict=True))


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
