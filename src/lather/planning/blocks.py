"""Pure geometry: how a parameter's index space is merged and cut into blocks.

Everything here depends on global shapes and options only, never on a rank or a device, so every process cuts the
same blocks and a checkpoint names them the same way anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

Shape = tuple[int, ...]

# Parameters that follow a diagonal method are elementwise, so a cut changes nothing but who computes them. Pieces of a
# few MiB are small enough to balance over ranks and large enough to keep checkpoints short.
DIAGONAL_PIECE = 1 << 20


@dataclass(frozen=True)
class Region:
    """A half-open box ``start <= i < stop`` in a parameter's global index space.

    >>> Region((0, 2), (4, 6)).meet(Region((3, 0), (9, 4)))
    Region(start=(3, 2), stop=(4, 4))
    """

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def meet(self, other: Region) -> Region | None:
        """The intersection, or None if it is empty."""
        start, stop = [], []
        for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True):
            low, high = a if a > c else c, b if b < d else d
            if low >= high:
                return None
            start.append(low)
            stop.append(high)
        return Region(tuple(start), tuple(stop))

    def moved(self, by: Iterable[int]) -> Region:
        """The same box, moved by a distance along each dimension."""
        by = tuple(by)
        start, stop = (tuple(a + d for a, d in zip(end, by, strict=True)) for end in (self.start, self.stop))
        return Region(start, stop)

    @staticmethod
    def whole(shape: Sequence[int]) -> Region:
        return Region((0,) * len(shape), tuple(shape))


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


def _meeting(
    layout: Layout, order: Sequence[int], bounds: list[tuple[int, int]], region: Region, cell: int
) -> Iterator[int]:
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


@dataclass(frozen=True)
class Block:
    """The unit of preconditioning, ownership and checkpointing.

    ``region`` is a box in the parameter's own index space, ``shape`` the same numbers with dimensions merged: what the
    mathematics sees. ``modes`` says for each dimension of ``shape`` whether its factor is ``"full"`` or ``"diagonal"``.
    ``method`` is ``"kronecker"``, or elementwise: ``"graft"`` (the group's graft) or ``"adagrad"``; ``reason`` then says
    why the block is not Kronecker-preconditioned.
    """

    param: int
    index: int
    region: Region
    shape: Shape
    modes: tuple[str, ...]
    method: str
    reason: str = ""


def merge_dims(shape: Sequence[int], limit: float) -> list[list[int]]:
    """Group the dimensions of ``shape``: fold from last to first while a product stays within ``limit``.

    Dimensions of size 1 belong to no group. The number of groups never falls below two.

    >>> merge_dims((512, 512, 3, 3), 1024), merge_dims((64, 3, 7, 7), 1024)
    ([[0], [1], [2, 3]], [[0], [1, 2, 3]])
    """
    groups = [[dim] for dim, size in enumerate(shape) if size != 1]
    last = len(groups) - 1
    while last > 0 and len(groups) > 2:
        folded = groups[last - 1] + groups[last]
        if math.prod(shape[dim] for dim in folded) <= limit:
            groups[last - 1 : last + 1] = [folded]
        last -= 1
    return groups


def pieces(size: int, limit: float) -> list[tuple[int, int]]:
    """Cut ``range(size)`` into ``ceil(size / limit)`` near-equal intervals, the longer ones first.

    >>> pieces(10, 4)
    [(0, 4), (4, 7), (7, 10)]
    """
    count = max(1, math.ceil(size / limit))
    short, longer = divmod(size, count)
    ends = [i * short + min(i, longer) for i in range(count + 1)]
    return list(pairwise(ends))


def cut(
    param: int,
    shape: Sequence[int],
    *,
    max_preconditioner_dim: float,
    merge_dims: bool,
    large_dim: str,
    batch_dims: int,
    precondition_1d: bool,
    preconditioner: str | None = "",
) -> list[Block]:
    """All blocks of a parameter of this global shape. An empty parameter has none."""
    shape = tuple(shape)
    if math.prod(shape) == 0:
        return []
    batch, rest = shape[:batch_dims], shape[batch_dims:]
    groups = _merge(rest, max_preconditioner_dim) if merge_dims else [[d] for d, n in enumerate(rest) if n != 1]
    sizes = [math.prod(rest[dim] for dim in group) for group in groups]
    if preconditioner is None:
        return _elementwise(param, shape, "graft", "preconditioner=None")
    if len(sizes) == 0 or (len(sizes) == 1 and not precondition_1d):
        return _elementwise(param, shape, "graft", "1-D" if sizes else "scalar")
    if large_dim == "adagrad" and max(sizes) > max_preconditioner_dim:
        return _elementwise(param, shape, "adagrad", f"{max(sizes)} > {max_preconditioner_dim}, large_dim='adagrad'")
    diagonal = [large_dim == "diagonal" and size > max_preconditioner_dim for size in sizes]
    modes = tuple("diagonal" if flag else "full" for flag in diagonal)
    cuts = [
        [(0, size)] if flag else pieces(size, max_preconditioner_dim)
        for size, flag in zip(sizes, diagonal, strict=True)
    ]
    boxes = product(*([(i, i + 1) for i in range(n)] for n in batch), *cuts)
    return [
        Block(
            param,
            index,
            _unmerge(box, batch, rest, groups),
            tuple(b - a for a, b in box[batch_dims:]),
            modes,
            "kronecker",
        )
        for index, box in enumerate(boxes)
    ]


_merge = merge_dims  # `cut` has an option of the same name


def _unmerge(box: Sequence[tuple[int, int]], batch: Shape, rest: Shape, groups: list[list[int]]) -> Region:
    """The box in the parameter's own dimensions. A folded group is never cut, so it spans its dimensions whole."""
    bounds = [*box[: len(batch)], *((0, size) for size in rest)]
    for (start, stop), group in zip(box[len(batch) :], groups, strict=True):
        if len(group) == 1:
            bounds[len(batch) + group[0]] = (start, stop)
    return Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def _elementwise(param: int, shape: Shape, method: str, reason: str) -> list[Block]:
    regions = enumerate(_slabs(shape))
    return [Block(param, index, region, (region.numel,), (), method, reason) for index, region in regions]


def _slabs(shape: Shape) -> Iterator[Region]:
    """Cut along the first dimension that is larger than one, so that slabs hold about ``DIAGONAL_PIECE`` elements."""
    dim = next((d for d, n in enumerate(shape) if n != 1), None)
    if dim is None:
        yield Region.whole(shape)
        return
    for start, stop in pieces(shape[dim], max(1, DIAGONAL_PIECE // math.prod(shape[dim + 1 :]))):
        bounds = [(start, stop) if d == dim else (0, n) for d, n in enumerate(shape)]
        yield Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
