"""The plan: which blocks there are, who owns them, what moves where. Pure, and identical on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

from ..settings import Settings, dtype_text
from . import owners
from .blocks import Block, Region, Shape, cut
from .layouts import Layout

NOTHING: Mapping[tuple[int, int], int] = {}
ALONE = Layout.everywhere(1)
TRIES = 8  # holders of a block that are asked whether they are least loaded; with more, each holds next to nothing


@dataclass(frozen=True)
class Spec:
    """What planning needs to know of a parameter. ``device`` counts devices of a kind within a process from 0."""

    name: str
    shape: Shape
    group: int
    device: str = "cpu"
    dtype: str = "float32"
    team: int = 0
    layout: Layout = ALONE
    grad_dtype: str | None = None  # where it is not the parameter's


@dataclass(frozen=True)
class Move:
    """A piece of a block that travels from the place ``src`` to the place ``dst``; they may be the same."""

    src: int
    dst: int
    block: int
    region: Region


@dataclass(frozen=True)
class Transport:
    """How blocks travel: the dtype on the way to the owner and back, None where nothing has to travel.

    ``gather``: everyone stores everything, so directions go out by one all-gather. Later stages are computed while earlier
    ones are on their way.
    """

    team: int
    inbound: str | None = None
    outbound: str | None = None
    gather: bool = False
    device: str = "cpu"
    stage: int = 0

    @property
    def travels(self) -> bool:
        return self.inbound is not None or self.outbound is not None


@dataclass(frozen=True)
class BankKey:
    """Blocks that agree in this are stacked: same transport, options, device, mathematics and shape."""

    transport: Transport
    group: int
    device: str
    dtype: str  # of the parameters
    kind: str
    shape: Shape
    modes: tuple[str, ...]


def largest_first(ranks: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Sort key for sets of ranks: an order of collectives in which no ranks wait for each other in a circle."""
    return -len(ranks), ranks


@dataclass(frozen=True)
class Plan:
    """Blocks in the order of the parameters, each with the place that owns it and the bank that it belongs to."""

    specs: tuple[Spec, ...]
    settings: tuple[Settings, ...]  # of the param groups
    teams: tuple[tuple[int, ...], ...]  # ranks by place
    blocks: tuple[Block, ...]
    owners: tuple[int, ...]
    keys: tuple[BankKey, ...]

    @cached_property
    def _owned(self) -> dict[tuple[int, int], dict[BankKey, list[int]]]:
        order = {key: i for i, key in enumerate(dict.fromkeys(self.keys))}
        owned: dict[tuple[int, int], dict[BankKey, list[int]]] = {}
        for number in sorted(range(len(self.blocks)), key=lambda i: (order[self.keys[i]], i)):
            key = self.keys[number]
            owned.setdefault((key.transport.team, self.owners[number]), {}).setdefault(key, []).append(number)
        return owned

    def banks(self, team: int, place: int) -> dict[BankKey, list[int]]:
        """The blocks that a place owns, by bank, in slot order."""
        return self._owned.get((team, place), {})

    def banks_of(self, places: Sequence[int]) -> dict[BankKey, list[int]]:
        """The banks of the rank that has these places in the teams."""
        return {key: numbers for team, place in enumerate(places) for key, numbers in self.banks(team, place).items()}

    def all_banks(self) -> dict[BankKey, list[int]]:
        """The banks of all places together."""
        found: dict[BankKey, list[int]] = {}
        for number, key in enumerate(self.keys):
            found.setdefault(key, []).append(number)
        return found

    @cached_property
    def transports(self) -> tuple[Transport, ...]:
        """In an order that all ranks share."""

        def order(t: Transport) -> tuple[Any, ...]:
            return largest_first(self.teams[t.team]), (t.stage, t.gather, str(t.inbound), str(t.outbound), t.device)

        return tuple(sorted(dict.fromkeys(key.transport for key in self.keys), key=order))

    def stored(self, param: int, place: int) -> Region:
        spec = self.specs[param]
        return spec.layout.region(spec.shape, place)

    def inbound(self, transport: Transport, src: int, dst: int) -> Iterator[Move]:
        """Gradient pieces that the holder ``src`` sends the owner ``dst``. An owner is served by its own replica."""
        for number in self._sequence(transport, dst):
            block = self.blocks[number]
            layout = self.specs[block.param].layout
            serves = layout.copies == 1 or layout.replica(src) == layout.replica(dst)
            if serves and (piece := block.region.meet(self.stored(block.param, src))):
                yield Move(src, dst, number, piece)

    def outbound(self, transport: Transport, src: int, dst: int) -> Iterator[Move]:
        """Direction pieces that the owner ``src`` sends the holder ``dst``."""
        for number in self._sequence(transport, src):
            block = self.blocks[number]
            piece = block.region if transport.gather else block.region.meet(self.stored(block.param, dst))
            if piece:
                yield Move(src, dst, number, piece)

    def _sequence(self, transport: Transport, owner: int) -> Iterator[int]:
        """The owner's blocks that travel so, bank by bank, slot by slot."""
        for key, numbers in self.banks(transport.team, owner).items():
            if key.transport == transport:
                yield from numbers

    def offsets(self, group: int, settings: Settings) -> dict[int, int]:
        """For ``refresh="staggered"``: each block's step inside the period, so that every step has the same work.

        It depends on all blocks of the group, not on their owners, so it is the same for any number of ranks.
        """
        numbers = [i for i, b in enumerate(self.blocks) if b.modes and self.specs[b.param].group == group]
        blocks = [self.blocks[i] for i in numbers]
        costs = [refresh_flops(block, settings, self.specs[block.param].device) for block in blocks]
        chosen = owners.stagger(costs, settings.frequency, [block.shape for block in blocks])
        return dict(zip(numbers, chosen, strict=True))


def make_plan(
    specs: Sequence[Spec],
    settings: Sequence[Settings],
    teams: Sequence[Sequence[int]] = ((0,),),
    stages: int = 1,
    settled: Mapping[tuple[int, int], int] = NOTHING,
) -> Plan:
    """Cut every parameter, choose owners, and decide how blocks travel.

    ``settled`` are owners from before, by parameter and block: state that is there stays where it is.
    """
    cuts = [cut for index, spec in enumerate(specs) for cut in _cut(index, spec, settings[spec.group])]
    if settled:
        homes = [settled.get((block.param, block.index)) for block, _ in cuts]
        cuts = [(cut[0], cut[1] if home is None else (home,)) for cut, home in zip(cuts, homes, strict=True)]
    blocks = [block for block, _ in cuts]
    chosen = _owners(specs, settings, teams, cuts)
    transports = [_transport(spec, settings[spec.group]) for spec in specs]
    keys = [_key(block, specs[block.param], transports[block.param]) for block in blocks]
    if stages > 1:
        numbers = _stages(blocks, chosen, keys, stages)
        keys = [replace(key, transport=replace(key.transport, stage=stage)) for key, stage in zip(keys, numbers, strict=True)]
    ranks = tuple(tuple(team) for team in teams)
    return Plan(tuple(specs), tuple(settings), ranks, tuple(blocks), tuple(chosen), tuple(keys))


def refresh_flops(block: Block, settings: Settings, device: str) -> float:
    """Operations of a refresh. Never a measurement: plans must not differ between ranks."""
    if settings.method is None or not block.modes:
        return 0.0
    return settings.method.refresh_flops(block.shape, block.modes, settings.hyper, device)


def step_flops(block: Block, settings: Settings) -> float:
    """Operations of the matrix products of one step."""
    method = settings.method
    if method is None or not block.modes or (settings.start == math.inf and not method.refreshes):
        return 0.0
    return method.step_flops(block.shape, block.modes, settings.hyper)


def mean_flops(block: Block, settings: Settings, device: str) -> float:
    """Operations of a step, with those of refreshes spread over their period."""
    return refresh_flops(block, settings, device) / settings.frequency + step_flops(block, settings)


def _cut(index: int, spec: Spec, settings: Settings) -> list[tuple[Block, tuple[int, ...]]]:
    """The blocks of a parameter; with ``blocks="local"``, those of every stored piece, with the places that may own them."""
    geometry, on = settings.geometry, settings.method is not None
    if geometry.batch_dims > len(spec.shape):
        raise ValueError(
            f"batch_dims={geometry.batch_dims} but parameter {spec.name} has shape {spec.shape}; put it in a param group of its own"
        )
    whole = not geometry.local or spec.layout.replicated
    parts = _parts(spec, settings)
    if whole and len(parts) == 1:
        return [(block, ()) for block in cut(index, spec.shape, geometry, preconditioned=on)]
    homes: dict[Region, tuple[int, ...]] = dict.fromkeys(parts, ()) if whole else {}
    for place in () if whole else range(spec.layout.places):
        for part in parts:
            if region := part.meet(spec.layout.region(spec.shape, place)):
                homes[region] = (*homes.get(region, ()), place)
    found = [
        (replace(block, region=block.region.moved(region.start)), places)
        for region, places in homes.items()
        for block in cut(index, region.shape, geometry, preconditioned=on)
    ]
    return [(replace(block, index=i), places) for i, (block, places) in enumerate(found)]


def _parts(spec: Spec, settings: Settings) -> list[Region]:
    """What ``split`` makes of a parameter."""
    geometry, shape = settings.geometry, spec.shape
    split, dim = geometry.split, geometry.split_dim
    if split is None:
        return [Region.whole(shape)]
    if not geometry.batch_dims <= dim < len(shape):
        raise ValueError(
            f"split_dim={dim} but parameter {spec.name} has shape {shape} and batch_dims={geometry.batch_dims}; give a "
            "dimension after those, or put the parameter in a param group without split"
        )
    sizes = (shape[dim] // split,) * split if isinstance(split, int) else split
    if sum(sizes) != shape[dim]:
        raise ValueError(
            f"split={split} does not fit dimension {dim} of parameter {spec.name}, of shape {shape}; give sizes with the sum "
            f"{shape[dim]}, or put the parameter in a param group without split"
        )
    starts = accumulate(sizes, initial=0)
    slabs = [Region.whole((*shape[:dim], size, *shape[dim + 1 :])) for size in sizes]
    return [slab.moved(start * (d == dim) for d in range(len(shape))) for slab, start in zip(slabs, starts, strict=False)]


def _owners(
    specs: Sequence[Spec],
    settings: Sequence[Settings],
    teams: Sequence[Sequence[int]],
    cuts: Sequence[tuple[Block, tuple[int, ...]]],
) -> list[int]:
    """The place that owns each block, balanced within every team."""
    known: dict[Any, int] = {}

    def load(block: Block) -> int:
        spec = specs[block.param]
        alike = (spec.group, spec.device, block.shape, block.modes)
        if alike not in known:
            flops = mean_flops(block, settings[spec.group], spec.device)
            known[alike] = owners.load(math.prod(block.shape), flops)
        return known[alike]

    def storing(block: Block) -> Iterable[int]:
        spec = specs[block.param]
        return () if spec.layout.replicated else islice(spec.layout.holders(spec.shape, block.region), TRIES)

    chosen = [0] * len(cuts)
    for team, ranks in enumerate(teams):
        mine = [i for i, (block, _) in enumerate(cuts) if specs[block.param].team == team]
        places = owners.greedy(
            [load(cuts[i][0]) for i in mine],
            len(ranks),
            prefer=lambda j, mine=mine: storing(cuts[mine[j]][0]),  # type: ignore[misc]
            only=lambda j, mine=mine: cuts[mine[j]][1],  # type: ignore[misc]
        )
        for i, place in zip(mine, places, strict=True):
            chosen[i] = place
    return chosen


def _key(block: Block, spec: Spec, transport: Transport) -> BankKey:
    return BankKey(transport, spec.group, spec.device, spec.dtype, block.kind, block.shape, block.modes)


def _transport(spec: Spec, settings: Settings) -> Transport:
    plain, out = Transport(spec.team, device=spec.device), settings.wire_dtype
    if spec.layout.places == 1:
        return plain
    if spec.layout.replicated:
        return replace(plain, outbound=out, gather=True)
    if settings.geometry.local:
        return replace(plain, outbound=out if spec.layout.copies > 1 else None)
    # A gradient of 16 bits travels as it is. One with coupled decay has the dtype of the arithmetic.
    own, computed = spec.grad_dtype or spec.dtype, dtype_text(settings.hyper.compute_dtype)
    short = own in ("bfloat16", "float16") and settings.decay_mode != "l2"
    return replace(plain, inbound=own if short else computed, outbound=out)


def _stages(blocks: Sequence[Block], chosen: Sequence[int], keys: Sequence[BankKey], stages: int) -> list[int]:
    """Cut what every owner sends into this many parts of about the same size, bank after bank."""
    order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    travelling = [i for i, key in enumerate(keys) if key.transport.travels]
    totals: dict[tuple[int, int], int] = {}
    for i in travelling:
        at = keys[i].transport.team, chosen[i]
        totals[at] = totals.get(at, 0) + blocks[i].region.numel
    found, seen = [0] * len(blocks), dict.fromkeys(totals, 0)
    for i in sorted(travelling, key=lambda i: (order[keys[i]], i)):
        at, numel = (keys[i].transport.team, chosen[i]), blocks[i].region.numel
        found[i] = int(stages * (seen[at] + numel / 2) / totals[at])
        seen[at] += numel
    return found
