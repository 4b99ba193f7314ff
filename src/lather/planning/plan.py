"""The plan: which blocks there are, who owns them, what moves where. Pure, and identical on every rank."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, islice, pairwise, product
from typing import Any

from ..settings import Geometry, Settings, dtype_text
from . import owners
from .blocks import Block, Region, Shape, count, cut, refuse_many, slabs
from .layouts import Layout

Teams = Sequence[Sequence[int]]  # ranks by place
Settled = Mapping[tuple[int, int], int]  # owners that do not change, by parameter and block: existing state stays where it is
Homes = Mapping[Region, tuple[int, ...]]  # regions that are cut by themselves, each with the places that may own its blocks
Cuts = list[tuple[Block, tuple[int, ...]]]  # blocks, each with the places that may own it; none means all

ALONE = Layout.everywhere(1)
# The cost of moving a byte, in FLOPs of float32: a block's elements are read and written many times in a step, and its
# direction is sent to every holder. The number is the order of magnitude for accelerators and their links.
FLOPS_PER_BYTE = 1024
TRIES = 8  # holders of a block that are tried as its owner, and places that store the same as each of them
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # bytes of an element on the way
# Bytes that an owner sends in a stage; the same where gradients travel too, as more is then on the way; and the most stages.
STAGE, SHORT_STAGE, MOST_STAGES = 64 << 20, 8 << 20, 8


@dataclass(frozen=True)
class Spec:
    """What planning needs to know about a parameter. ``device`` is ``"cuda"`` for a process's first GPU, then ``"cuda:1"``, ..."""

    name: str
    shape: Shape
    group: int
    device: str = "cpu"
    dtype: str = "float32"
    team: int = 0
    layout: Layout = ALONE
    grad_dtype: str | None = None  # if it is not the parameter's


@dataclass(frozen=True)
class Move:
    """A piece of a block that travels, or stays on its place."""

    block: int
    region: Region


@dataclass(frozen=True)
class Transport:
    """How blocks travel: the dtype on the way to the owner and on the way back, None if nothing has to travel.

    ``gather``: several places of the ``mesh`` store the same, so directions go out by all-gathers among them. A stage is computed
    while the one before travels.
    """

    team: int
    inbound: str | None = None
    outbound: str | None = None
    gather: bool = False
    device: str = "cpu"
    stage: int = 0
    mesh: Layout = ALONE

    @property
    def travels(self) -> bool:
        return self.inbound is not None or self.outbound is not None


@dataclass(frozen=True)
class BankKey:
    """Blocks with the same key are stacked: they share transport, options, device, mathematics and shape."""

    transport: Transport
    group: int
    device: str
    dtype: str  # of the parameters
    kind: str
    shape: Shape
    modes: tuple[str, ...]


def largest_first(ranks: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Sort key for sets of ranks. In this order of collectives no ranks wait for each other in a circle."""
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
        owned: dict[tuple[int, int], dict[BankKey, list[int]]] = {}
        for key, numbers in self.all_banks().items():
            for number in numbers:
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
        return _by_key(self.keys)

    @cached_property
    def transports(self) -> tuple[Transport, ...]:
        """In an order that all ranks share."""

        def order(t: Transport) -> tuple[Any, ...]:
            kind = t.inbound is None, t.stage, t.gather, str(t.mesh), str(t.inbound), str(t.outbound), t.device
            return largest_first(self.teams[t.team]), kind

        return tuple(sorted(dict.fromkeys(key.transport for key in self.keys), key=order))

    def stored(self, param: int, place: int) -> Region:
        spec = self.specs[param]
        return spec.layout.region(spec.shape, place)

    def local(self, param: int, region: Region, place: int) -> Region:
        """A region of a parameter, counted from the start of what a place stores."""
        return region.moved(-a for a in self.stored(param, place).start)

    def inbound(self, transport: Transport, src: int, dst: int) -> Iterator[Move]:
        """Gradient pieces that the holder ``src`` sends to the owner ``dst``. They come from the owner's own replica."""
        for number in self.sequence(transport, dst):
            block = self.blocks[number]
            layout = self.specs[block.param].layout
            serves = layout.copies == 1 or layout.replica(src) == layout.replica(dst)
            if serves and (piece := block.region.meet(self.stored(block.param, src))):
                yield Move(number, piece)

    def outbound(self, numbers: Iterable[int], dst: int) -> Iterator[Move]:
        """Direction pieces of blocks that the holder ``dst`` stores. They come from the owners of the blocks."""
        for number in numbers:
            block = self.blocks[number]
            if piece := block.region.meet(self.stored(block.param, dst)):
                yield Move(number, piece)

    def sequence(self, transport: Transport, owner: int) -> Iterator[int]:
        """The owner's blocks with this transport, bank by bank, slot by slot."""
        for key, numbers in self.banks(transport.team, owner).items():
            if key.transport == transport:
                yield from numbers

    def offsets(self, group: int, settings: Settings) -> dict[int, int]:
        """For ``refresh="staggered"``: each block's step within the period. Every step has the same work, whoever owns blocks."""
        blocks = {i: b for i, b in enumerate(self.blocks) if b.modes and self.specs[b.param].group == group}
        costs = [refresh_flops(block, settings, self.specs[block.param].device) for block in blocks.values()]
        chosen = owners.stagger(costs, settings.frequency, [block.shape for block in blocks.values()])
        return dict(zip(blocks, chosen, strict=True))


def _by_key(keys: Sequence[BankKey]) -> dict[BankKey, list[int]]:
    """The numbers of blocks, by bank."""
    found: dict[BankKey, list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    return found


def make_plan(
    specs: Sequence[Spec],
    settings: Sequence[Settings],
    teams: Teams = ((0,),),
    stages: int | None = None,
    settled: Settled | None = None,
) -> Plan:
    """Cut every parameter, choose owners, and decide how blocks travel. The plan chooses the number of stages if none is given."""
    regions = [_regions(spec, settings[spec.group].geometry) for spec in specs]
    _refuse_many_blocks(specs, settings, regions)
    cuts = [cut for index, spec in enumerate(specs) for cut in _cut(index, regions[index], settings[spec.group])]
    if settled:
        homes = [settled.get((block.param, block.index)) for block, _ in cuts]
        cuts = [(block, places if home is None else (home,)) for (block, places), home in zip(cuts, homes, strict=True)]
    chosen = _owners(specs, settings, teams, cuts)
    transports = [_transport(spec, settings[spec.group]) for spec in specs]
    blocks, keys = tuple(block for block, _ in cuts), []
    for block in blocks:
        spec, transport = specs[block.param], transports[block.param]
        keys.append(BankKey(transport, spec.group, spec.device, spec.dtype, block.kind, block.shape, block.modes))
    numbers = _stages(blocks, chosen, keys, stages)
    keys = [replace(key, transport=replace(key.transport, stage=n)) if n else key for key, n in zip(keys, numbers, strict=True)]
    ranks = tuple(tuple(team) for team in teams)
    return Plan(tuple(specs), tuple(settings), ranks, blocks, tuple(chosen), tuple(keys))


def refresh_flops(block: Block, settings: Settings, device: str) -> float:
    """Operations of a refresh. This is a formula and not a measurement, because all ranks must make the same plan."""
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
    """Operations of a step, with refreshes spread over their period."""
    return refresh_flops(block, settings, device) / settings.frequency + step_flops(block, settings)


def _refuse_many_blocks(specs: Sequence[Spec], settings: Sequence[Settings], regions: Sequence[Homes]) -> None:
    total = 0
    for spec, homes in zip(specs, regions, strict=True):
        geometry, on = settings[spec.group].geometry, settings[spec.group].method is not None
        total += sum(count(region.shape, geometry, preconditioned=on) for region in homes)
        refuse_many(total, f"parameter {spec.name} of shape {spec.shape}, with those before it,")


def _cut(index: int, homes: Homes, settings: Settings) -> Cuts:
    """The blocks of a parameter."""
    found: Cuts = []
    for region, places in homes.items():
        for block in cut(index, region.shape, settings.geometry, preconditioned=settings.method is not None):
            moved = replace(block, index=len(found), region=block.region.moved(region.start)) if len(homes) > 1 else block
            found.append((moved, places))
    return found


def _regions(spec: Spec, geometry: Geometry) -> Homes:
    """What is cut by itself, with the places that may own its blocks. It is the parameter or, with ``split``, each of its parts.
    With ``blocks="local"`` it is each stored piece of these, which belongs to its holders."""
    if geometry.batch_dims > len(spec.shape):
        raise ValueError(
            f"batch_dims={geometry.batch_dims} but parameter {spec.name} has shape {spec.shape}; give it its own group"
        )
    parts, whole = _parts(spec, geometry), Region((0,) * len(spec.shape), spec.shape)
    if not geometry.local or spec.layout.replicated:
        return dict.fromkeys(parts, ())
    first = spec.layout.holders(spec.shape, whole) if whole.numel else ()
    holders = sorted(place for one in first for place in spec.layout.sharers[one])
    refuse_many(len(holders) * len(parts), f"parameter {spec.name} of shape {spec.shape}")
    homes: dict[Region, tuple[int, ...]] = {}
    for place, part in product(holders, parts):
        if region := part.meet(spec.layout.region(spec.shape, place)):
            homes[region] = (*homes.get(region, ()), place)
    return homes


def _parts(spec: Spec, geometry: Geometry) -> list[Region]:
    """The parts that ``split`` makes of a parameter."""
    shape, split, dim = spec.shape, geometry.split, geometry.split_dim
    if split is None:
        return [Region((0,) * len(shape), shape)]
    if not geometry.batch_dims <= dim < len(shape):
        raise ValueError(
            f"split_dim={dim} but parameter {spec.name} has shape {shape} and batch_dims={geometry.batch_dims}; give a "
            "dimension after the batch dimensions, or put the parameter in a param group without split"
        )
    fits = shape[dim] % split == 0 if isinstance(split, int) else sum(split) == shape[dim]
    if not fits:
        raise ValueError(
            f"split={split} does not fit dimension {dim} of parameter {spec.name}, of shape {shape}; give sizes with the sum "
            f"{shape[dim]}, or put the parameter in a param group without split"
        )
    refuse_many(split if isinstance(split, int) else len(split), f"parameter {spec.name} of shape {shape}")
    sizes = (shape[dim] // split,) * split if isinstance(split, int) else split
    return slabs(shape, dim, pairwise(accumulate(sizes, initial=0)))


def _owners(specs: Sequence[Spec], settings: Sequence[Settings], teams: Teams, cuts: Cuts) -> list[int]:
    """The place that owns each block, balanced within every team."""
    known: dict[Any, int] = {}
    loads = []
    for block, _ in cuts:
        spec = specs[block.param]
        kind = spec.group, spec.device, block.shape, block.modes
        if kind not in known:  # in whole numbers, so that sums do not depend on their order and ties are exact
            flops = int(mean_flops(block, settings[spec.group], spec.device))
            known[kind] = flops + 4 * math.prod(block.shape) * FLOPS_PER_BYTE
        loads.append(known[kind])
    chosen = [0] * len(cuts)
    for team, ranks in enumerate(teams):
        mine = [i for i, (block, _) in enumerate(cuts) if specs[block.param].team == team]
        holders = partial(_holders, specs, [cuts[i][0] for i in mine])
        places = owners.greedy([loads[i] for i in mine], len(ranks), holders, [cuts[i][1] for i in mine])
        for i, place in zip(mine, places, strict=True):
            chosen[i] = place
    return chosen


def _holders(specs: Sequence[Spec], blocks: Sequence[Block], number: int) -> Iterator[int]:
    """Some places that store a part of a block; none if all places store all of it. Blocks begin with different replicas."""
    block = blocks[number]
    spec = specs[block.param]
    if spec.layout.replicated:
        return
    for holder in islice(spec.layout.holders(spec.shape, block.region), TRIES):
        same = spec.layout.sharers[holder]
        yield from (same[(number + i) % len(same)] for i in range(min(TRIES, len(same))))


def _transport(spec: Spec, settings: Settings) -> Transport:
    plain, out = Transport(spec.team, device=spec.device), settings.wire_dtype
    if spec.layout.places == 1:
        return plain
    plain = replace(plain, gather=spec.layout.copies > 1, mesh=spec.layout.mesh)
    if spec.layout.replicated or settings.geometry.local:
        return replace(plain, outbound=out if plain.gather else None)
    # A gradient of 16 bits travels as it is, unless it has coupled decay, which makes it as wide as the arithmetic.
    own, computed = spec.grad_dtype or spec.dtype, dtype_text(settings.hyper.compute_dtype)
    short = own in ("bfloat16", "float16") and settings.decay_mode != "l2"
    return replace(plain, inbound=own if short else computed, outbound=out)


def _stages(blocks: Sequence[Block], chosen: Sequence[int], keys: Sequence[BankKey], stages: int | None) -> list[int]:
    """The stage of every block: what an owner sends, bank after bank, is cut into stages of about the same size."""
    banks = [(key.transport, numbers) for key, numbers in _by_key(keys).items() if key.transport.travels]
    sent: list[tuple[int, tuple[int, int], int]] = []
    for transport, numbers in banks:
        size = SIZES[transport.outbound or str(transport.inbound)]
        sent += [(i, (transport.team, chosen[i]), size * blocks[i].region.numel) for i in numbers]
    found, seen, totals = [0] * len(blocks), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for _, owner, nbytes in sent:
        totals[owner] += nbytes
    counts = {team: stages or _stage_count(team, banks, totals) for team in {transport.team for transport, _ in banks}}
    for i, owner, nbytes in sent:
        found[i] = int(counts[owner[0]] * (seen[owner] + nbytes / 2) / totals[owner])
        seen[owner] += nbytes
    return found


def _stage_count(team: int, banks: Iterable[tuple[Transport, Any]], totals: Mapping[tuple[int, int], int]) -> int:
    """The number of stages of a team, by the most that one of its owners sends."""
    both = any(transport.team == team and transport.inbound for transport, _ in banks)
    most = max(nbytes for owner, nbytes in totals.items() if owner[0] == team)
    return min(MOST_STAGES, -(-most // (SHORT_STAGE if both else STAGE)))
