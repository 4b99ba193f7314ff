"""Copies between a flat buffer and the tensors whose pieces lie in it, by one kernel.

By torch, every piece that lies apart is a launch. The kernel finds all pieces in a table on the device. The table stays. Only
addresses are copied to the device again, if tensors have moved since the last step.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..kernels.schema import CopyBox
from ..linalg import from_host
from .grids import Grid, join_dims

BLOCK = 4096  # elements of a tile, a power of two
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int8: "int8", torch.uint8: "uint8"}

Strides = tuple[int, ...]


class Side(NamedTuple):
    """Where a box begins in its tensor, which is given by its number."""

    tensor: int
    offset: int
    strides: Strides


@final
class KernelCopies:
    """Copies grids of tensors, by one launch, into a flat buffer or out of it. ``keys`` are those of all tensors."""

    def __init__(self, grids: Sequence[Grid], flat: Tensor, keys: Sequence[Any], *, into_flat: bool) -> None:
        self._grids, self._flat, self._keys, self._into_flat = grids, flat, keys, into_flat
        self._addresses: tuple[list[int], Tensor] = [], flat  # on the host and on the device
        self._layout: tuple[list[Strides], int] = [()] * len(keys), 0  # of the table: strides, and elements of a vector
        self._table: tuple[Tensor, Tensor] | None = None

    def run(self, given: Mapping[Any, Tensor], only: Collection[Any] | None = None) -> bool:
        """Copy all tensors, or some, unless their dtypes differ or are not covered. If one is missing, its part of the buffer
        becomes zero. In a usual step all are there, and loops are short."""
        tensors = list(map(given.get, self._keys)) if only is None else [given[i] if i in only else None for i in self._keys]
        there = [x for x in tensors if x is not None]
        dtypes = {x.dtype for x in there}
        if len(dtypes) != 1 or not {self._flat.dtype, *dtypes} <= DTYPES.keys() or any(map(Tensor.is_neg, there)):
            return False
        strides, addresses = list(map(Tensor.stride, there)), list(map(Tensor.data_ptr, there))
        if len(there) < len(tensors):  # for one that has never been there, any strides will do
            known, found = self._layout[0], zip(strides, addresses, strict=True)
            rows = [(last, 0) if x is None else next(found) for x, last in zip(tensors, known, strict=True)]
            strides, addresses = [stride for stride, _ in rows], [address for _, address in rows]
        to, source = (self._flat.dtype, *dtypes) if self._into_flat else (*dtypes, self._flat.dtype)
        layout = strides, 16 // min(to.itemsize, source.itemsize)  # vectors are 16 bytes or more in both
        if self._table is None or layout != self._layout:
            self._layout = layout
            self._table = self._make_table()
        if addresses != self._addresses[0]:
            self._addresses = addresses, from_host([self._flat.data_ptr(), *addresses], self._flat, torch.int64)
        self._launch(*self._table, DTYPES[to], DTYPES[source])
        if not self._into_flat:  # kernels write behind autograd's back
            torch.autograd.graph.increment_version(there)
        return True

    def _launch(self, tiles: Tensor, boxes: Tensor, to: str, source: str) -> None:
        import triton.language as tl

        from ..kernels import copies as kernels

        fixed = {"TO": getattr(tl, to), "FROM": getattr(tl, source), "VECTOR": self._layout[1], "BLOCK": BLOCK, "num_warps": 8}
        if len(tiles):
            with torch.cuda.device_of(tiles):  # type: ignore[no-untyped-call]
                kernels.copy[len(tiles),](tiles, boxes, self._addresses[1], **fixed)

    def _make_table(self) -> tuple[Tensor, Tensor]:
        """The box of every tile, and all boxes."""
        found = [box for grid in self._grids for box in self._boxes(grid)]
        firsts = accumulate((count for _, count in found), initial=0)
        boxes = [box._replace(first_tile=first) for (box, _), first in zip(found, firsts, strict=False)]
        counts = torch.tensor([count for _, count in found], dtype=torch.int64, device="cpu")
        tiles = torch.arange(len(boxes), dtype=torch.int32, device="cpu").repeat_interleave(counts)
        device = self._flat.device
        return tiles.to(device), torch.tensor(boxes, dtype=torch.int64, device="cpu").to(device)

    def _boxes(self, grid: Grid) -> Iterator[tuple[CopyBox, int]]:
        """The boxes of a grid, each with its number of tiles. There are several if it takes more than four dims."""
        number = self._keys.index(grid.key)
        offset, strides = grid.in_strides(self._layout[0][number] or (0,) * len(grid.shape))
        shape = grid.counts + grid.shape
        other, own = (
            Side(1 + number, offset, strides),
            Side(0, grid.offset, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))),
        )
        target, source = (own, other) if self._into_flat else (other, own)
        dims = join_dims(sorted(zip(shape, target.strides, source.strides, strict=True), key=lambda dim: -dim[1]))
        outer, inner = dims[:-4], dims[-4:]
        for index in product(*(range(size) for size, *_ in outer)) if grid.numel else ():
            by = [sum(i * dim[side] for i, dim in zip(index, outer, strict=True)) for side in (1, 2)]
            yield self._box(inner, target._replace(offset=target.offset + by[0]), source._replace(offset=source.offset + by[1]))

    def _box(self, dims: Sequence[tuple[int, ...]], target: Side, source: Side) -> tuple[CopyBox, int]:
        """A box of at most four dims, given by their sizes and both strides, and its number of tiles."""
        sizes, to, at = zip(*[(1, 0, 0)] * (4 - len(dims)), *dims, strict=True)
        numbers = target.offset, source.offset, sizes[3], *to[:3], *at[:3]
        shift = min((sizes[3] - 1).bit_length(), BLOCK.bit_length() - 1)
        box = CopyBox(
            target=target.tensor,
            source=source.tensor,
            first_tile=0,
            tile_shift=shift,
            aligned=to[3] == at[3] == 1 and not any(x % self._layout[1] for x in numbers),
            second_size=sizes[1],
            rows=sizes[2],
            columns=sizes[3],
            target_offset=target.offset,
            target_first=to[0],
            target_second=to[1],
            target_row=to[2],
            target_column=to[3],
            source_offset=source.offset,
            source_first=at[0],
            source_second=at[1],
            source_row=at[2],
            source_column=at[3],
        )
        return box, sizes[0] * sizes[1] * -(-sizes[2] // (BLOCK >> shift)) * -(-sizes[3] // (1 << shift))
