"""Layouts: which rank stores which region of a parameter. Pure; no tensors.

[Note: teams and places] The ranks that store a parameter between them and share its work are its *team*. A rank's number in
its team is its *place*: 0, 1, ... in the order of ranks. A parameter that everyone stores has a team of all ranks, one on a
mesh the ranks of that mesh. With ``num_trainers_per_group`` there are several teams that repeat the same work. A process
alone is a team of one. Plans speak of places only, so they need no process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .blocks import Region, Shape

SHARDINGS = "ddp, fsdp, hsdp=K or tp=K"


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh: how many places lie along it, and the dimension of the tensor that it splits.

    An axis without a dimension copies instead.
    """

    size: int
    dim: int | None = None


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over numbered places: the cells of a mesh, the last axis running fastest.

    An axis splits as ``torch.chunk`` does, into pieces of the rounded-up size, the last ones shorter or empty. ``order``
    lists the axes in the order in which they split, if that is not from first to last; ``cells`` gives the cell of each
    place, if places are not numbered like cells.

    >>> fsdp = Layout((Axis(3, dim=0),))
    >>> [fsdp.region((4, 5), place).start for place in range(3)]
    [(0, 0), (2, 0), (4, 0)]
    """

    axes: tuple[Axis, ...]
    order: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()

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
        cell, found = self.cells[place] if self.cells else place, []
        for axis in reversed(self.axes):
            cell, i = divmod(cell, axis.size)
            found.append(i)
        return tuple(reversed(found))

    def replica(self, place: int) -> Shape:
        """Places of one replica hold the whole tensor between them, each element once."""
        return tuple(i for i, axis in zip(self.coordinates(place), self.axes, strict=True) if axis.dim is None)

    def region(self, shape: Shape, place: int) -> Region:
        """What a place stores of a tensor of this shape; it may be empty."""
        if (shape, place) not in self._regions:
            self._regions[shape, place] = _stored(self, shape, place)
        return self._regions[shape, place]

    @cached_property
    def _regions(self) -> dict[tuple[Shape, int], Region]:
        return {}

    def holders(self, shape: Shape, region: Region) -> Iterator[int]:
        """The places that store some of a region, found without looking at the others."""
        order = self.order or tuple(range(len(self.axes)))
        for cell in _meeting(self, order, [(0, size) for size in shape], region, 0):
            yield self.cells.index(cell) if self.cells else cell

    @cached_property
    def _strides(self) -> Shape:
        return tuple(math.prod(axis.size for axis in self.axes[i + 1 :]) for i in range(len(self.axes)))

    def team(self, size: int) -> Layout | None:
        """The layout over the first ``size`` cells, if every such run of cells holds the whole tensor alike."""
        axes, order = list(self.axes), self.order or tuple(range(len(self.axes)))
        for i, axis in enumerate(axes):
            inner = math.prod(other.size for other in self.axes[i + 1 :])
            keep = max(1, size // inner)
            if keep < axis.size and (axis.dim is not None or axis.size % keep):
                return None
            axes[i] = replace(axis, size=min(keep, axis.size))
        return Layout(tuple(axes), order if self.order else ()) if size == math.prod(a.size for a in axes) else None

    @staticmethod
    def everywhere(places: int) -> Layout:
        return Layout((Axis(places),))


def _stored(layout: Layout, shape: Shape, place: int) -> Region:
    where, bounds = layout.coordinates(place), [(0, size) for size in shape]
    for i in layout.order or range(len(layout.axes)):
        axis = layout.axes[i]
        if axis.dim is not None:
            start, stop = bounds[axis.dim]
            chunk = -(-(stop - start) // axis.size)
            bounds[axis.dim] = min(start + where[i] * chunk, stop), min(start + (where[i] + 1) * chunk, stop)
    return Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def _meeting(layout: Layout, order: Sequence[int], bounds: list[tuple[int, int]], region: Region, cell: int) -> Iterator[int]:
    """The cells that meet a region, axis by axis; ``cell`` has the coordinates of the axes before."""
    if not order:
        yield cell
        return
    size, dim, stride = layout.axes[order[0]].size, layout.axes[order[0]].dim, layout._strides[order[0]]
    if dim is None:
        for i in range(size):
            yield from _meeting(layout, order[1:], bounds, region, cell + i * stride)
        return
    start, stop = bounds[dim]
    chunk = -(-(stop - start) // size)
    first = max(0, region.start[dim] - start) // chunk
    last = (min(region.stop[dim], stop) - 1 - start) // chunk
    for i in range(first, last + 1):
        inner = list(bounds)
        inner[dim] = start + i * chunk, min(start + (i + 1) * chunk, stop)
        yield from _meeting(layout, order[1:], inner, region, cell + i * stride)


def team_of(ranks: Sequence[int], layout: Layout, trainers: int | None, rank: int, name: str) -> tuple[tuple[int, ...], Layout]:
    """The ranks that share the work on a parameter with ``rank``, ascending, and its layout over them.

    ``trainers`` ranks share it, and every other so many repeat it; by default all that store the parameter.
    """
    size = trainers or len(ranks)
    inner = layout.team(size)
    if len(ranks) % size:
        raise ValueError(
            f"num_trainers_per_group={size} does not divide the {len(ranks)} ranks that store parameter {name}; use a divisor, "
            "or leave it out for all of them"
        )
    if inner is None:
        raise ValueError(
            f"num_trainers_per_group={size}, but groups of {size} of the {len(ranks)} ranks do not store the whole of parameter "
            f"{name}; it must be a multiple of the {layout.places // layout.copies} ranks that it is sharded over, along the "
            "last axes of its mesh"
        )
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not one of the ranks {list(ranks)} of the process group that was given")
    first = ranks.index(rank) // size * size
    members = ranks[first : first + size]
    cells = tuple(sorted(range(size), key=members.__getitem__))
    return tuple(sorted(members)), inner if cells == tuple(range(size)) else replace(inner, cells=cells)


def layout_named(name: str, ranks: int, order: int) -> Layout:
    """The layout of a tensor of this order over so many ranks: ``ddp``, ``fsdp``, ``hsdp=K`` or ``tp=K``.

    ``hsdp=K`` shards over K ranks and repeats that; ``tp=K`` splits the second dimension over K ranks and the first
    over the others.

    >>> layout_named("hsdp=4", 8, order=2)
    Layout(axes=(Axis(size=2, dim=None), Axis(size=4, dim=0)), order=(), cells=())
    """
    kind, _, count = name.partition("=")
    first, second = (0 if order else None), (1 if order > 1 else None)
    if kind in ("ddp", "fsdp") and not count:
        return Layout((Axis(ranks, first if kind == "fsdp" else None),))
    if kind not in ("hsdp", "tp") or not count.isdecimal() or int(count) == 0:
        raise ValueError(f"shard={name!r} is not valid: it must be {SHARDINGS}")
    if ranks % int(count):
        raise ValueError(f"shard={name!r} does not divide {ranks} ranks")
    outer, inner = ranks // int(count), int(count)
    return Layout((Axis(outer), Axis(inner, first)) if kind == "hsdp" else (Axis(outer, first), Axis(inner, second)))
