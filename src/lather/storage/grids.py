"""Strided views that join many pieces of a tensor, so that one copy moves all of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

from torch import Tensor

from ..planning.blocks import Shape


@dataclass(frozen=True)
class Grid:
    """Equal boxes of one tensor on a regular grid. In a flat buffer they lie end to end.

    A grid is one strided view of the tensor and one contiguous view of the buffer, so one copy moves a parameter that is cut
    into a hundred blocks. ``key`` says which tensor it is: a parameter, or a bank's stack.
    """

    key: Any
    offset: int
    start: Shape
    shape: Shape
    counts: Shape = ()  # size of the grid, outermost first
    steps: tuple[Shape, ...] = ()  # distance between neighbours along each axis of the grid

    @property
    def numel(self) -> int:
        return math.prod(self.counts) * math.prod(self.shape)

    def in_strides(self, strides: Shape) -> tuple[int, Shape]:
        """Where the grid begins in a tensor with these strides, and the strides of its view."""
        outer = tuple(sum(map(mul, step, strides)) for step in self.steps)
        return sum(map(mul, self.start, strides)), outer + strides

    def of_tensor(self, tensor: Tensor) -> Tensor:
        offset, strides = self.in_strides(tensor.stride())
        return tensor.as_strided(self.counts + self.shape, strides, tensor.storage_offset() + offset)

    def of_flat(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.numel].view(self.counts + self.shape)


def join_dims(dims: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same elements in as few dims as possible, at least one. A dim is a size and a stride, or strides in several tensors.

    >>> join_dims([(4, 32), (2, 8), (8, 1)])
    [(4, 32), (16, 1)]
    """
    joined: list[tuple[int, ...]] = []
    for size, *strides in dims:
        if size != 1:
            follows = joined and list(joined[-1][1:]) == [size * stride for stride in strides]
            joined.append(((joined.pop()[0] if follows else 1) * size, *strides))
    return joined


def coalesce(grids: Iterable[Grid]) -> list[Grid]:
    """Join neighbouring boxes and grids that make up a larger grid, one axis at a time."""
    grids = list(grids)
    while len(joined := _join(grids)) < len(grids):
        grids = joined
    return joined


def _join(grids: Sequence[Grid]) -> list[Grid]:
    out: list[Grid] = []
    first: Grid | None = None  # the grid that the grid at the end of `out` started from
    for grid in grids:
        if first is not None and _continues(out[-1], first, grid):
            head = out[-1]
            count = head.counts[0] if head is not first else 1
            step = tuple(b - a for a, b in zip(first.start, grid.start, strict=True)) if count == 1 else head.steps[0]
            out[-1] = replace(first, counts=(count + 1, *first.counts), steps=(step, *first.steps))
        else:
            first = grid
            out.append(grid)
    return out


def _continues(head: Grid, first: Grid, grid: Grid) -> bool:
    same = (grid.key, grid.shape, grid.counts, grid.steps) == (first.key, first.shape, first.counts, first.steps)
    if not same or grid.offset != head.offset + head.numel:
        return False
    if head is first:  # forwards in every dimension, because a view cannot go backwards, whatever the strides are
        return all(a <= b for a, b in zip(first.start, grid.start, strict=True))
    count = head.counts[0]
    return all(b - a == count * s for a, b, s in zip(first.start, grid.start, head.steps[0], strict=True))
