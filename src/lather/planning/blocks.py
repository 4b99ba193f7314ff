"""Pure geometry: how a parameter's index space is merged and cut into blocks.

It depends on global shapes and options only, so all ranks cut the same blocks, and checkpoints have the same keys everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from operator import lt
from typing import NamedTuple

from ..settings import Geometry

Shape = tuple[int, ...]

MOST_BLOCKS = 1 << 20  # of a plan. The largest models have fewer; with more, planning and checkpoints would take minutes
DIAGONAL_PIECE = 1 << 20  # elements of an elementwise block: few enough to balance ranks, many enough for short checkpoints


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
        start, stop = tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop))
        return Region(start, stop) if all(map(lt, start, stop)) else None

    def moved(self, by: Iterable[int]) -> Region:
        """The same box, moved by a distance along each dimension."""
        start = tuple(a + d for a, d in zip(self.start, by, strict=True))
        return Region(start, tuple(a + n for a, n in zip(start, self.shape, strict=True)))


@dataclass(frozen=True)
class Block:
    """The unit of preconditioning, ownership and checkpointing.

    ``region`` is a box in the parameter's own index space. ``shape`` is its shape with dimensions merged, as the mathematics sees
    it. ``modes`` says for each dimension of ``shape`` whether its factor is ``"full"`` or ``"diagonal"``. ``kind`` is
    ``"kronecker"`` if the block is preconditioned. Otherwise it names the elementwise method, ``"graft"`` (the group's graft) or
    ``"adagrad"``, and ``reason`` says why.
    """

    param: int
    index: int
    region: Region
    shape: Shape
    modes: tuple[str, ...]
    kind: str
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


def pieces(size: int, limit: float, multiple: int = 1) -> list[tuple[int, int]]:
    """Cut ``range(size)`` into ``ceil(size / limit)`` intervals, which are equal if the size can be divided so.

    Otherwise all but the last have the same size, a multiple of ``multiple``. If that would exceed the limit, or ``multiple`` is 1,
    they are nearly equal, the longer ones first.

    >>> pieces(10, 4), pieces(101, 64, multiple=16)
    ([(0, 4), (4, 7), (7, 10)], [(0, 64), (64, 101)])
    """
    count = max(1, math.ceil(size / limit))
    refuse_many(count, f"a dimension of size {size}")
    short, longer = divmod(size, count)
    each = -(-(short + 1) // multiple) * multiple
    if longer and multiple > 1 and each <= limit:
        return [(i * each, min((i + 1) * each, size)) for i in range(count)]
    return list(pairwise(i * short + min(i, longer) for i in range(count + 1)))


def refuse_many(count: int, what: str) -> None:
    """Refuse more blocks than a plan may have."""
    if count > MOST_BLOCKS:
        raise ValueError(
            f"{what} would be cut into {count:,} blocks, and a plan has at most {MOST_BLOCKS:,}; raise max_preconditioner_dim, or "
            "use fewer parts (split, batch_dims) or smaller parameters"
        )


def slabs(shape: Shape, dim: int, cuts: Iterable[tuple[int, int]]) -> list[Region]:
    """An index space, cut along one dimension into these intervals."""
    zeros = (0,) * len(shape)
    return [Region((*zeros[:dim], a, *zeros[dim + 1 :]), (*shape[:dim], b, *shape[dim + 1 :])) for a, b in cuts]


def cut(param: int, shape: Sequence[int], geometry: Geometry, *, preconditioned: bool = True) -> list[Block]:
    """All blocks of a parameter of this global shape. An empty parameter has none."""
    shape = tuple(shape)
    if math.prod(shape) == 0:
        return []
    grid = _grid(shape, geometry, preconditioned)
    if grid.kind != "kronecker":
        regions = slabs(shape, grid.dim, grid.cuts[0]) if shape else [Region((), ())]
        return [Block(param, index, region, (region.numel,), (), grid.kind, grid.reason) for index, region in enumerate(regions)]
    batch, rest = shape[: geometry.batch_dims], shape[geometry.batch_dims :]
    return [
        Block(
            param, index, _unmerge(box, batch, rest, grid.groups), tuple(b - a for a, b in box[len(batch) :]), grid.modes, grid.kind
        )
        for index, box in enumerate(product(*grid.cuts))
    ]


def count(shape: Sequence[int], geometry: Geometry, *, preconditioned: bool = True) -> int:
    """The number of blocks of :func:`cut`, without making them."""
    return math.prod(map(len, _grid(tuple(shape), geometry, preconditioned).cuts)) if math.prod(shape) else 0


class _Grid(NamedTuple):
    """How a parameter is cut: along one dimension ``dim`` if it is elementwise, else along every group of dimensions."""

    cuts: list[list[tuple[int, int]]]
    kind: str
    reason: str = ""
    dim: int = 0
    groups: Sequence[list[int]] = ()
    modes: tuple[str, ...] = ()


def _grid(shape: Shape, geometry: Geometry, preconditioned: bool) -> _Grid:
    limit = geometry.max_preconditioner_dim
    if not preconditioned:
        return _elementwise(shape, "graft", "preconditioner=None")
    batch, rest = shape[: geometry.batch_dims], shape[geometry.batch_dims :]
    groups = merge_dims(rest, limit if geometry.merge_dims else 0)
    sizes = [math.prod(rest[dim] for dim in group) for group in groups]
    if len(sizes) == 0 or (len(sizes) == 1 and not geometry.precondition_1d):
        return _elementwise(shape, "graft", "1-D" if sizes else "scalar")
    if geometry.large_dim == "adagrad" and max(sizes) > limit:
        return _elementwise(shape, "adagrad", f"{max(sizes)} > {limit}, large_dim='adagrad'")
    modes = tuple("diagonal" if geometry.large_dim == "diagonal" and size > limit else "full" for size in sizes)
    multiple = geometry.block_multiple
    cuts = [pieces(size, limit if mode == "full" else size, multiple) for size, mode in zip(sizes, modes, strict=True)]
    return _Grid([*(pieces(n, 1) for n in batch), *cuts], "kronecker", groups=groups, modes=modes)


def _elementwise(shape: Shape, kind: str, reason: str) -> _Grid:
    """Cut along the first dimension that is larger than 1, into blocks of about ``DIAGONAL_PIECE`` elements."""
    dim = next((d for d, n in enumerate(shape) if n != 1), 0)
    limit = max(1, DIAGONAL_PIECE // math.prod(shape[dim + 1 :]))
    return _Grid([pieces(shape[dim], limit)] if shape else [], kind, reason, dim)


def _unmerge(box: Sequence[tuple[int, int]], batch: Shape, rest: Shape, groups: Sequence[list[int]]) -> Region:
    """The box in the parameter's own dimensions. A folded group is never cut, so it spans its dimensions whole."""
    bounds = [*box[: len(batch)], *((0, size) for size in rest)]
    for (start, stop), group in zip(box[len(batch) :], groups, strict=True):
        if len(group) == 1:
            bounds[len(batch) + group[0]] = (start, stop)
    return Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
