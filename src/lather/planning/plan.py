"""The plan: which blocks there are, who owns them, what moves where. Pure, and identical on every rank.

[Note: teams and places] The ranks that store a parameter between them and share its work are its *team*; they are
numbered by *places* 0, 1, ... in the order of their ranks. A parameter that everyone stores has a team of all ranks, one
on a mesh the ranks of that mesh, and with ``num_trainers_per_group`` a team is one of several that repeat the same work. A
process is the team of one place. Everything below speaks of places only, so it needs no process group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

from ..options import compute_dtype, exponent, is_measured, is_spectral, solver, wire_dtype
from ..roots import NO_CHOICES, Choices, chosen, parse_polar
from . import owners as assign
from .blocks import Block, Layout, Region, Shape, cut

GEOMETRY = ("max_preconditioner_dim", "merge_dims", "large_dim", "batch_dims", "precondition_1d", "preconditioner")
NOTHING: Mapping[tuple[int, int], int] = {}
ALONE = Layout.everywhere(1)
WORTHWHILE = 0.5  # milliseconds of measured work
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
class Route:
    """How blocks travel: the dtype on the wire to the owner and back, None where nothing has to travel.

    ``gather``: everyone stores everything, so directions go out by one all-gather. Routes of later stages are computed
    while earlier ones are on the wire.
    """

    team: int
    inbound: str | None = None
    outbound: str | None = None
    gather: bool = False
    device: str = "cpu"
    stage: int = 0

    @property
    def direct(self) -> bool:
        return self.inbound is None and self.outbound is None


@dataclass(frozen=True)
class BankKey:
    """Blocks that agree in this are stacked: same way to travel, same options, same device, same mathematics, same shape."""

    route: Route
    group: int
    device: str
    dtype: str  # of the parameters
    method: str
    shape: Shape
    modes: tuple[str, ...]


def first_come(ranks: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Larger sets of ranks first: an order of collectives in which no ranks wait for each other in a circle."""
    return -len(ranks), ranks


@dataclass(frozen=True)
class Plan:
    """Blocks in the order of the parameters, each with the place that owns it and the bank that it belongs to."""

    specs: tuple[Spec, ...]
    groups: tuple[Mapping[str, Any], ...]
    teams: tuple[tuple[int, ...], ...]  # ranks by place
    blocks: tuple[Block, ...]
    owners: tuple[int, ...]
    keys: tuple[BankKey, ...]
    _offsets: dict[tuple[Any, ...], dict[int, int]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _owned(self) -> dict[tuple[int, int], dict[BankKey, list[int]]]:
        order = {key: i for i, key in enumerate(dict.fromkeys(self.keys))}
        owned: dict[tuple[int, int], dict[BankKey, list[int]]] = {}
        for number in sorted(range(len(self.blocks)), key=lambda i: (order[self.keys[i]], i)):
            key = self.keys[number]
            owned.setdefault((key.route.team, self.owners[number]), {}).setdefault(key, []).append(number)
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
    def routes(self) -> tuple[Route, ...]:
        """In an order that all ranks share."""

        def order(route: Route) -> tuple[Any, ...]:
            how = route.stage, route.gather, str(route.inbound), str(route.outbound), route.device
            return first_come(self.teams[route.team]), how

        return tuple(sorted(dict.fromkeys(key.route for key in self.keys), key=order))

    def stored(self, param: int, place: int) -> Region:
        spec = self.specs[param]
        return spec.layout.region(spec.shape, place)

    def inbound(self, route: Route, src: int, dst: int) -> Iterator[Move]:
        """Gradient pieces that the holder ``src`` sends the owner ``dst``. An owner is served by its own replica."""
        for number in self._sequence(route, dst):
            block = self.blocks[number]
            layout = self.specs[block.param].layout
            serves = layout.copies == 1 or layout.replica(src) == layout.replica(dst)
            if serves and (piece := block.region.meet(self.stored(block.param, src))):
                yield Move(src, dst, number, piece)

    def outbound(self, route: Route, src: int, dst: int) -> Iterator[Move]:
        """Direction pieces that the owner ``src`` sends the holder ``dst``."""
        for number in self._sequence(route, src):
            block = self.blocks[number]
            piece = block.region if route.gather else block.region.meet(self.stored(block.param, dst))
            if piece:
                yield Move(src, dst, number, piece)

    def _sequence(self, route: Route, owner: int) -> Iterator[int]:
        """The owner's blocks that take a route, bank by bank, slot by slot."""
        for key, numbers in self.banks(route.team, owner).items():
            if key.route == route:
                yield from numbers

    def auto_stacks(self) -> dict[tuple[str, int, float], int]:
        """For ``root="auto"``: the most roots that any owner computes at once, by device, size and exponent."""
        most: Counter[tuple[str, int, float]] = Counter()
        for number, options in enumerate(self.groups):
            for banks in self._owned.values() if is_measured(options) else ():
                most |= _roots_at_once({key: len(ns) for key, ns in banks.items() if key.group == number}, options)
        return dict(most)

    def offsets(self, group: int, choices: Choices = NO_CHOICES) -> dict[int, int]:
        """For ``refresh="staggered"``: each block's step inside the period, so that every step has the same work.

        Depends on all blocks of the group, not on who owns them, so it is the same for any number of ranks. Work is
        what was measured if all of it was, else operations. Measured work that is little is done in fewer steps: each has
        something to do for ``WORTHWHILE``, for roots take about as long however few they are.
        """
        options = self.groups[group]
        frequency = options["precondition_frequency"]
        roots = options["root"], options["exponent"], options["exponent_multiplier"]
        key = (group, frequency, *roots, bool(choices))
        if key not in self._offsets:
            numbers = [i for i, b in enumerate(self.blocks) if b.modes and self.specs[b.param].group == group]
            costs, measured = self._refresh_costs(numbers, options, choices)
            shapes = [self.blocks[i].shape for i in numbers]  # alike, they are refreshed by the same operations
            bins = min(frequency, max(1, round(sum(costs) / WORTHWHILE))) if measured else frequency
            chosen = assign.stagger(costs, bins, shapes)
            self._offsets[key] = {i: index * frequency // bins for i, index in zip(numbers, chosen, strict=True)}
        return self._offsets[key]

    def _refresh_costs(
        self, numbers: Sequence[int], options: Mapping[str, Any], choices: Choices
    ) -> tuple[list[float], bool]:
        """Of every block, and whether that is milliseconds."""
        parts = [(self.blocks[i], options, self.specs[self.blocks[i].param].device) for i in numbers]
        if is_measured(options):
            measured = [measured_cost(*part, choices) for part in parts]
            if math.inf not in measured:
                return measured, True
        return [refresh_cost(*part) for part in parts], False


def make_plan(
    specs: Sequence[Spec],
    groups: Sequence[Mapping[str, Any]],
    teams: Sequence[Sequence[int]] = ((0,),),
    stages: int = 1,
    settled: Mapping[tuple[int, int], int] = NOTHING,
) -> Plan:
    """Cut every parameter, choose owners, and decide how blocks travel.

    ``settled`` are owners from before, by parameter and block: state that is there stays where it is.
    """
    cuts = [cut for index, spec in enumerate(specs) for cut in _cut(index, spec, groups[spec.group])]
    if settled:
        homes = [settled.get((block.param, block.index)) for block, _ in cuts]
        cuts = [(cut[0], cut[1] if home is None else (home,)) for cut, home in zip(cuts, homes, strict=True)]
    blocks = [block for block, _ in cuts]
    owners = _owners(specs, groups, teams, cuts)
    routes = [_route(spec, groups[spec.group]) for spec in specs]
    keys = [_key(block, specs[block.param], routes[block.param]) for block in blocks]
    if stages > 1:
        numbers = _stages(blocks, owners, keys, stages)
        keys = [replace(key, route=replace(key.route, stage=stage)) for key, stage in zip(keys, numbers, strict=True)]
    ranks = tuple(tuple(team) for team in teams)
    return Plan(tuple(specs), tuple(groups), ranks, tuple(blocks), tuple(owners), tuple(keys))


def refresh_cost(block: Block, options: Mapping[str, Any], device: str) -> float:
    """Operations; never a measurement, or plans would differ between ranks, and between before and after."""
    if is_spectral(options):
        return 0.0
    device = options["root_device"] or device
    return assign.refresh_flops(block, lambda d: solver(options, d, device, len(block.shape)))


def step_cost(block: Block, options: Mapping[str, Any]) -> float:
    """Operations of the matrix products of one step."""
    if is_spectral(options):
        used = block.modes and options["start_preconditioning_step"] != math.inf
        return parse_polar(options["polar"]).flops(block.shape[0], math.prod(block.shape[1:])) if used else 0.0
    # KL multiplies the gradient for every factor, by the roots of the others; SOAP rotates it, and what is applied there and back.
    products = {"kl": len(block.modes), "soap": 3}.get(options["preconditioner"], 1)
    return assign.step_flops(block, products)


def _roots_at_once(banks: Mapping[BankKey, int], options: Mapping[str, Any]) -> Counter[tuple[str, int, float]]:
    """Roots of a refresh by device, size and exponent; those of one param group are computed together."""
    counts: Counter[tuple[str, int, float]] = Counter()
    for key, slots in banks.items():
        e = exponent(options, len(key.shape))
        for d, mode in zip(key.shape, key.modes, strict=False):
            counts[key.device, d, e] += slots if mode == "full" and e > 0 else 0
    period = options["precondition_frequency"] if options["refresh"] == "staggered" else 1
    return Counter({at: -(-count // period) for at, count in counts.items()})


def measured_cost(block: Block, options: Mapping[str, Any], device: str, choices: Choices) -> float:
    """Milliseconds of a refresh; infinity if not all of it was measured."""
    e, total = exponent(options, len(block.shape)), 0.0
    for d, mode in zip(block.shape, block.modes, strict=False):
        choice = chosen(choices, d, device, e)
        total += 1e-6 * d if mode != "full" or e == 0 else choice.cost if choice else math.inf
    return total


def _cut(index: int, spec: Spec, options: Mapping[str, Any]) -> list[tuple[Block, tuple[int, ...]]]:
    """The blocks of a parameter; with ``blocks="local"``, those of every stored piece, with the places that may own them."""
    if options["batch_dims"] > len(spec.shape):
        raise ValueError(
            f"batch_dims={options['batch_dims']} but parameter {spec.name} has shape {spec.shape}; put it in a param group of "
            "its own"
        )
    geometry = {name: options[name] for name in GEOMETRY}
    whole = options["blocks"] == "global" or spec.layout.replicated
    parts = _parts(spec, options)
    if whole and len(parts) == 1:
        return [(block, ()) for block in cut(index, spec.shape, **geometry)]
    homes: dict[Region, tuple[int, ...]] = dict.fromkeys(parts, ()) if whole else {}
    for place in () if whole else range(spec.layout.places):
        for part in parts:
            if region := part.meet(spec.layout.region(spec.shape, place)):
                homes[region] = (*homes.get(region, ()), place)
    found = [
        (replace(block, region=block.region.moved(region.start)), places)
        for region, places in homes.items()
        for block in cut(index, region.shape, **geometry)
    ]
    return [(replace(block, index=i), places) for i, (block, places) in enumerate(found)]


def _parts(spec: Spec, options: Mapping[str, Any]) -> list[Region]:
    """What ``split`` makes of a parameter."""
    split, dim, shape = options["split"], options["split_dim"], spec.shape
    if split is None:
        return [Region.whole(shape)]
    if not options["batch_dims"] <= dim < len(shape):
        raise ValueError(
            f"split_dim={dim} but parameter {spec.name} has shape {shape} and batch_dims={options['batch_dims']}; give a "
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
    return [
        slab.moved(start * (d == dim) for d in range(len(shape))) for slab, start in zip(slabs, starts, strict=False)
    ]


def _owners(
    specs: Sequence[Spec],
    groups: Sequence[Mapping[str, Any]],
    teams: Sequence[Sequence[int]],
    cuts: Sequence[tuple[Block, tuple[int, ...]]],
) -> list[int]:
    """The place that owns each block, balanced within every team."""
    known: dict[Any, int] = {}

    def load(block: Block) -> int:
        spec = specs[block.param]
        alike = (spec.group, spec.device, block.shape, block.modes)
        if alike not in known:
            options = groups[spec.group]
            refresh = refresh_cost(block, options, spec.device)
            known[alike] = assign.load(block, refresh / options["precondition_frequency"] + step_cost(block, options))
        return known[alike]

    def storing(block: Block) -> Iterable[int]:
        spec = specs[block.param]
        return () if spec.layout.replicated else islice(spec.layout.holders(spec.shape, block.region), TRIES)

    owners = [0] * len(cuts)
    for team, ranks in enumerate(teams):
        mine = [i for i, (block, _) in enumerate(cuts) if specs[block.param].team == team]
        places = assign.greedy(
            [load(cuts[i][0]) for i in mine],
            len(ranks),
            prefer=lambda j, mine=mine: storing(cuts[mine[j]][0]),  # type: ignore[misc]
            only=lambda j, mine=mine: cuts[mine[j]][1],  # type: ignore[misc]
        )
        for i, place in zip(mine, places, strict=True):
            owners[i] = place
    return owners


def _key(block: Block, spec: Spec, route: Route) -> BankKey:
    return BankKey(route, spec.group, spec.device, spec.dtype, block.method, block.shape, block.modes)


def _route(spec: Spec, options: Mapping[str, Any]) -> Route:
    plain, out = Route(spec.team, device=spec.device), wire_dtype(options)
    if spec.layout.places == 1:
        return plain
    if spec.layout.replicated:
        return replace(plain, outbound=out, gather=True)
    if options["blocks"] == "local":
        return replace(plain, outbound=out if spec.layout.copies > 1 else None)
    # A gradient of 16 bits travels as it is; one that decay was added to is what arithmetic made of it.
    own, computed = spec.grad_dtype or spec.dtype, str(compute_dtype(options)).removeprefix("torch.")
    short = own in ("bfloat16", "float16") and options["weight_decay_mode"] != "l2"
    return replace(plain, inbound=own if short else computed, outbound=out)


def _stages(blocks: Sequence[Block], owners: Sequence[int], keys: Sequence[BankKey], stages: int) -> list[int]:
    """Cut what every owner sends into so many parts of about the same size, bank after bank."""
    order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    travelling = [i for i, key in enumerate(keys) if not key.route.direct]
    totals: dict[tuple[int, int], int] = {}
    for i in travelling:
        at = keys[i].route.team, owners[i]
        totals[at] = totals.get(at, 0) + blocks[i].region.numel
    chosen, seen = [0] * len(blocks), dict.fromkeys(totals, 0)
    for i in sorted(travelling, key=lambda i: (order[keys[i]], i)):
        at, numel = (keys[i].route.team, owners[i]), blocks[i].region.numel
        chosen[i] = int(stages * (seen[at] + numel / 2) / totals[at])
        seen[at] += numel
    return chosen
