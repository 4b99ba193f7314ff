"""Layouts: which rank stores which region of a parameter. Pure; no tensors.

[Note: teams and places] The *team* of a parameter are the ranks that store it together and share the work on it. A rank's
number in its team is its *place*: 0, 1, ... in the order of ranks. For a parameter that every rank stores, the team is all
ranks; for one on a mesh, the ranks of that mesh. With ``num_trainers_per_group`` there are several teams that repeat the same
work. A single process is a team of one. Plans use places only, so they need no process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .blocks import Region, Shape

Shares = tuple[tuple[int, int], ...]  # a place, and how many elements it stores


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh: how many places it has, and the dimension of the tensor that it splits. Without one it copies."""

    size: int
    dim: int | None = None


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over the cells of a mesh, which are numbered with the last axis running fastest.

    An axis splits as ``torch.chunk`` does: into pieces of the rounded-up size, the last ones shorter or empty. ``order``
    lists the axes in the order in which they split, if that is not first to last. ``cells`` gives the cell of each place, if
    places are not numbered like cells.

    >>> fsdp = Layout((Axis(3, dim=0),))
    >>> [fsdp.region((4, 5), place).start for place in range(3)]
    [(0, 0), (2, 0), (4, 0)]
    """

    axes: tuple[Axis, ...]
    order: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()
    _regions: dict[tuple[Shape, int], Region] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shares: dict[tuple[Shape, Region], Shares] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def places(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def copies(self) -> int:
        """How many places store each element."""
        return math.prod(axis.size for axis in self.axes if axis.dim is None)

    @cached_property
    def replicated(self) -> bool:
        """Whether every place stores everything."""
        return self.copies == self.places

    def coordinates(self, place: int) -> Shape:
        cell = self.cells[place] if self.cells else place
        return tuple(cell // stride % axis.size for axis, stride in zip(self.axes, self._strides, strict=True))

    def replica(self, place: int) -> Shape:
        """The replica that a place belongs to. Places of one replica store every element of the tensor exactly once."""
        return tuple(i for i, axis in zip(self.coordinates(place), self.axes, strict=True) if axis.dim is None)

    def region(self, shape: Shape, place: int) -> Region:
        """What a place stores of a tensor of this shape. It may be empty."""
        if (shape, place) not in self._regions:
            where, bounds = self.coordinates(place), [(0, size) for size in shape]
            for i in self._splits:
                size, dim = self.axes[i].size, self.axes[i].dim
                if dim is not None:
                    start, stop = bounds[dim]
                    chunk = -(-(stop - start) // size)
                    bounds[dim] = min(start + where[i] * chunk, stop), min(start + (where[i] + 1) * chunk, stop)
            self._regions[shape, place] = Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
        return self._regions[shape, place]

    @cached_property
    def mesh(self) -> Layout:
        """The same without dimensions: layouts of one mesh copy and split along the same axes, whatever they split."""
        if self.copies == 1:
            return Layout((Axis(self.places, 0),))
        if self.replicated:
            return Layout.everywhere(self.places)
        return Layout(tuple(Axis(axis.size, None if axis.dim is None else 0) for axis in self.axes), cells=self.cells)

    @cached_property
    def sharers(self) -> tuple[tuple[int, ...], ...]:
        """For every place, the places that store the same, ascending."""
        found: dict[Shape, list[int]] = {}
        parts = [self._part(place) for place in range(self.places)]
        for place, part in enumerate(parts):
            found.setdefault(part, []).append(place)
        sets = {part: tuple(places) for part, places in found.items()}
        return tuple(sets[part] for part in parts)

    def _part(self, place: int) -> Shape:
        """Which part of a tensor a place stores. It is equal for places that store the same."""
        return tuple(i for i, axis in zip(self.coordinates(place), self.axes, strict=True) if axis.dim is not None)

    def shares(self, shape: Shape, region: Region) -> Shares:
        """How many elements of a region each set of places that store the same has. A set goes by its lowest place."""
        if (shape, region) not in self._shares:
            met = [(place, region.meet(self.region(shape, place))) for place in self.holders(shape, region)]
            self._shares[shape, region] = tuple((self.sharers[place][0], piece.numel) for place, piece in met if piece)
        return self._shares[shape, region]

    def holders(self, shape: Shape, region: Region) -> Iterator[int]:
        """The places of the first replica that store some of a region, found without looking at the others."""
        for cell in _meeting(self, self._splits, [(0, size) for size in shape], region, 0):
            yield self.cells.index(cell) if self.cells else cell

    @cached_property
    def _splits(self) -> Shape:
        return self.order or tuple(range(len(self.axes)))

    @cached_property
    def _strides(self) -> Shape:
        return tuple(math.prod(axis.size for axis in self.axes[i + 1 :]) for i in range(len(self.axes)))

    def team(self, size: int) -> Layout | None:
        """The layout over ``size`` consecutive cells, if each group of that many cells stores the whole tensor in the same way."""
        axes = []
        for axis, stride in zip(self.axes, self._strides, strict=True):
            keep = min(axis.size, max(1, size // stride))
            if keep < axis.size and (axis.dim is not None or axis.size % keep):
                return None
            axes.append(replace(axis, size=keep))
        inner = Layout(tuple(axes), self.order)
        return inner if inner.places == size else None

    @staticmethod
    def everywhere(places: int) -> Layout:
        return Layout((Axis(places),))


def _meeting(layout: Layout, order: Sequence[int], bounds: list[tuple[int, int]], region: Region, cell: int) -> Iterator[int]:
    """The cells of the first replica that store some of a region, axis by axis. ``cell`` has the coordinates along the axes
    before ``order``."""
    if not order:
        yield cell
        return
    axis, stride = layout.axes[order[0]], layout._strides[order[0]]
    if axis.dim is None:
        yield from _meeting(layout, order[1:], bounds, region, cell)
        return
    start, stop = bounds[axis.dim]
    chunk = -(-(stop - start) // axis.size)
    first = max(0, region.start[axis.dim] - start) // chunk
    last = (min(region.stop[axis.dim], stop) - 1 - start) // chunk
    for i in range(first, last + 1):
        inner = list(bounds)
        inner[axis.dim] = start + i * chunk, min(start + (i + 1) * chunk, stop)
        yield from _meeting(layout, order[1:], inner, region, cell + i * stride)


def replicas(ranks: Sequence[int], layout: Layout) -> list[tuple[int, ...]]:
    """Ranks that store the same part of a parameter, for each part that several ranks store. ``ranks`` are by cell.

    >>> replicas([0, 1, 2, 3], Layout((Axis(2), Axis(2, dim=0))))
    [(0, 2), (1, 3)]
    """
    found: dict[Shape, list[int]] = {}
    for cell, rank in enumerate(ranks):
        found.setdefault(layout._part(cell), []).append(rank)
    return [tuple(sorted(some)) for some in found.values() if len(some) > 1]


def team_of(ranks: Sequence[int], layout: Layout, trainers: int | None, rank: int, name: str) -> tuple[tuple[int, ...], Layout]:
    """The team of ``rank`` for a parameter, ascending, and the layout over it. It has ``trainers`` ranks, by default all."""
    size = trainers or len(ranks)
    inner = layout.team(size)
    if len(ranks) % size:
        raise ValueError(
            f"num_trainers_per_group={size} does not divide the {len(ranks)} ranks that store parameter {name}; use a divisor, "
            "or leave it out to use all of them"
        )
    if inner is None:
        raise ValueError(
            f"num_trainers_per_group={size}, but groups of {size} of the {len(ranks)} ranks do not store the whole of parameter "
            f"{name}; use a multiple of the {layout.places // layout.copies} ranks that it is sharded over, along the last axes "
            "of its mesh"
        )
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in process_group, whose ranks are {list(ranks)}; pass a group that has it")
    first = ranks.index(rank) // size * size
    members = ranks[first : first + size]
    cells = tuple(sorted(range(size), key=members.__getitem__))
    return tuple(sorted(members)), inner if cells == tuple(range(size)) else replace(inner, cells=cells)


def layout_named(name: str, ranks: int, order: int) -> Layout:
    """The layout of a tensor with ``order`` dimensions: ``ddp``, ``fsdp``, ``hsdp=K`` or ``tp=K``.

    ``hsdp=K`` copies what is sharded over K ranks. ``tp=K`` splits the second dimension over K ranks, and the first over the rest.

    >>> layout_named("hsdp=4", 8, order=2)
    Layout(axes=(Axis(size=2, dim=None), Axis(size=4, dim=0)), order=(), cells=())
    """
    kind, _, count = name.partition("=")
    first, second = (0 if order else None), (1 if order > 1 else None)
    if kind in ("ddp", "fsdp") and not count:
        return Layout((Axis(ranks, first if kind == "fsdp" else None),))
    if kind not in ("hsdp", "tp") or not count.isdecimal() or not count.strip("0"):
        raise ValueError(f"shard={name!r} is not valid: it must be ddp, fsdp, hsdp=K or tp=K")
    if len(count) > 18 or ranks % int(count):
        raise ValueError(f"shard={name!r} does not divide {ranks} ranks; use a divisor for K")
    outer, inner = ranks // int(count), int(count)
    return Layout((Axis(outer), Axis(inner, first)) if kind == "hsdp" else (Axis(outer, first), Axis(inner, second)))
