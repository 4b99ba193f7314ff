"""Copies between a flat buffer and the tensors whose pieces lie in it, by one kernel. Another moves the tensors by the buffer.

By torch, every piece that lies apart is a launch. The kernel finds all pieces in a table on the device. The table stays. Only
addresses are copied to the device again, if tensors have moved since the last step.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..kernels.schema import CopyBox
from ..linalg import from_host
from .grids import Grid, join_dims

BLOCK = 4096  # elements of a tile, a power of two
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int8: "int8", torch.uint8: "uint8"}

Strides = tuple[int, ...]
Layout = tuple[Strides, int]  # of a tensor: its strides, and its address modulo 16


class Fact(NamedTuple):
    """What a copy needs to know about a tensor."""

    address: int
    strides: Strides
    dtype: torch.dtype
    is_neg: bool


@final
class Located(dict[Any, Tensor]):
    """Tensors that stay where they are as long as this exists. All copies share one look at them, so none is added later."""

    @cached_property
    def facts(self) -> dict[Any, Fact]:
        """What copies need to know of each. It keeps no memory alive."""
        looks = (Tensor.data_ptr, Tensor.stride, attrgetter("dtype"), Tensor.is_neg)
        return dict(zip(self, map(Fact, *(map(look, self.values()) for look in looks)), strict=True))


class Side(NamedTuple):
    """Where a box begins in its tensor."""

    tensor: int  # its number; the buffer is 0
    remainder: int  # of its address
    offset: int
    strides: Strides


class Launch(NamedTuple):
    """Boxes that are copied together, because their rows are made of vectors of the same number of elements."""

    num_tiles: int
    tiles: Tensor  # the box of every tile
    boxes: Tensor  # rows of CopyBox
    vector: int


class Moving(NamedTuple):
    """The numbers of :func:`lather.storage.update.update_`."""

    lr: float
    decay: float
    momentum_keep: float
    momentum_take: float
    nesterov: bool


@final
class KernelCopies:
    """Copies grids of tensors by a launch or two, into a flat buffer or out of it. ``keys`` are those of all tensors."""

    def __init__(self, grids: Sequence[Grid], flat: Tensor, keys: Sequence[Any], *, into_flat: bool) -> None:
        self._grids, self._flat, self._into_flat = grids, flat, into_flat
        self._keys = {key: i for i, key in enumerate(keys)}
        self._seen: tuple[Any, Any] = None, None  # the last facts about all tensors, and about all momenta
        self._facts: tuple[Any, Any] = (), None  # those that matter here, by key
        self._is_covered = False
        self._dtype = flat.dtype  # of the tensors
        self._addresses: tuple[list[int], Tensor] = [], flat  # on the host and on the device
        self._momenta: tuple[list[int], Tensor] = [], flat
        self._layouts: list[Layout] = [((), 0)] * len(keys)
        self._vector = 0  # elements that are 16 bytes or more in both dtypes
        self._launches: list[Launch] = []

    def run(self, given: Mapping[Any, Tensor], only: Collection[Any] | None = None) -> bool:
        """Copy all tensors, or some, unless their dtypes differ or are not covered. If one is missing, its part of the buffer
        becomes zero. In a usual step all are there, nothing but addresses is new, and no loop is over grids. For tensors that
        are located there is no loop at all."""
        if not self._find(given, only):
            return False
        self._launch("copy")
        if not self._into_flat:  # kernels write behind autograd's back
            there = zip(self._keys, self._facts[0], strict=True)
            torch.autograd.graph.increment_version([given[key] for key, fact in there if fact])
        return True

    def move(self, given: Mapping[Any, Tensor], momenta: Mapping[Any, Tensor] | None, numbers: Moving) -> bool:
        """Move parameters by the directions in the buffer, unless their dtypes or layouts are not covered. The caller tells
        autograd."""
        if not (self._flat.is_floating_point() and self._find(given, None, momenta)):
            return False
        self._launch("move", self._momenta[1], *numbers[:4], MOMENTUM=momenta is not None, NESTEROV=numbers.nesterov)
        return True

    def _find(self, given: Mapping[Any, Tensor], only: Collection[Any] | None, momenta: Mapping[Any, Tensor] | None = None) -> bool:
        """Where tensors are, and how they lie there, unless the last look was at the same. Whether they are covered."""
        facts, others = _facts(given), None if momenta is None else _facts(momenta)
        if only is not None:
            facts = {key: fact for key, fact in facts.items() if key in only}
        if self._seen[0] is facts and self._seen[1] is others:
            return self._is_covered
        self._seen = facts, others
        mine, memory = list(map(facts.get, self._keys)), None if others is None else list(map(others.get, self._keys))
        if self._facts != (mine, memory):
            self._facts = mine, memory
            self._is_covered = self._covers(mine) and (memory is None or _are_alike(mine, memory))
            if self._is_covered:
                self._locate(mine, memory or [])
        return self._is_covered

    def _covers(self, facts: Sequence[Fact | None]) -> bool:
        dtypes = {fact.dtype for fact in facts if fact}
        return len(dtypes) == 1 and {self._flat.dtype, *dtypes} <= DTYPES.keys() and not any(fact.is_neg for fact in facts if fact)

    def _locate(self, facts: Sequence[Fact | None], memory: Sequence[Fact | None]) -> None:
        """Tell the device. For a tensor that has never been there, any layout will do."""
        (self._dtype,) = {fact.dtype for fact in facts if fact}
        addresses = [fact.address if fact else 0 for fact in facts]
        layouts = [(fact.strides, fact.address & 15) if fact else last for fact, last in zip(facts, self._layouts, strict=True)]
        vector = 16 // min(self._flat.itemsize, self._dtype.itemsize)
        if (layouts, vector) != (self._layouts, self._vector):
            self._layouts, self._vector = layouts, vector
            self._launches = self._make_launches()
        if addresses != self._addresses[0]:
            self._addresses = addresses, from_host([self._flat.data_ptr(), *addresses], self._flat, torch.int64)
        addresses = [fact.address if fact else 0 for fact in memory]
        if addresses != self._momenta[0]:
            self._momenta = addresses, from_host([0, *addresses], self._flat, torch.int64)

    def _launch(self, kernel: str, *arguments: Any, **fixed: Any) -> None:
        kernels, types = _triton()
        own, other = types[self._flat.dtype], types[self._dtype]
        fixed["TO"], fixed["FROM"] = (own, other) if self._into_flat else (other, own)
        with torch.cuda.device_of(self._flat):  # type: ignore[no-untyped-call]
            for num_tiles, tiles, boxes, vector in self._launches:
                launch = getattr(kernels, kernel)[num_tiles,]
                launch(tiles, boxes, self._addresses[1], *arguments, VECTOR=vector, BLOCK=BLOCK, num_warps=8, **fixed)

    def _make_launches(self) -> list[Launch]:
        found = [box for grid in self._grids for box in self._boxes(grid)]
        launches = []
        for vector in (self._vector, 1):
            some = [(box, count) for box, count, own in found if own == vector]
            counts = torch.tensor([count for _, count in some], dtype=torch.int64, device="cpu")
            firsts = (counts.cumsum(0) - counts).tolist()
            boxes = torch.tensor(
                [box._replace(first_tile=first) for (box, _), first in zip(some, firsts, strict=True)], device="cpu"
            )
            tiles = torch.arange(len(some), dtype=torch.int32, device="cpu").repeat_interleave(counts)
            launches += [Launch(len(tiles), tiles.to(self._flat.device), boxes.to(self._flat.device), vector)] if some else []
        return launches

    def _boxes(self, grid: Grid) -> Iterator[tuple[CopyBox, int, int]]:
        """As :meth:`_box`, for all boxes of a grid. There are several if it takes more than four dims."""
        number, shape = self._keys[grid.key], grid.counts + grid.shape
        strides, remainder = self._layouts[number]
        offset, strides = grid.in_strides(strides or (0,) * len(grid.shape))
        flat_strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        other, own = Side(1 + number, remainder, offset, strides), Side(0, self._flat.data_ptr() & 15, grid.offset, flat_strides)
        target, source = (own, other) if self._into_flat else (other, own)
        dims = join_dims(sorted(zip(shape, target.strides, source.strides, strict=True), key=lambda dim: -dim[1]))
        outer, inner = dims[:-4], dims[-4:]
        for index in product(*(range(size) for size, *_ in outer)) if grid.numel else ():
            by = [sum(i * dim[side] for i, dim in zip(index, outer, strict=True)) for side in (1, 2)]
            yield self._box(inner, target._replace(offset=target.offset + by[0]), source._replace(offset=source.offset + by[1]))

    def _box(self, dims: Sequence[tuple[int, ...]], target: Side, source: Side) -> tuple[CopyBox, int, int]:
        """A box of at most four dims, given by their sizes and both strides; its number of tiles, and the elements of a vector."""
        (first, second, rows, columns), to, at = zip(*[(1, 0, 0)] * (4 - len(dims)), *dims, strict=True)
        numbers = target.offset, source.offset, columns, *to[:3], *at[:3]
        is_aligned = (
            target.remainder == source.remainder == 0 and to[3] == at[3] == 1 and not any(x % self._vector for x in numbers)
        )
        shift = min((columns - 1).bit_length(), BLOCK.bit_length() - 1)
        box = CopyBox(
            target=target.tensor,
            source=source.tensor,
            first_tile=0,
            tile_shift=shift,
            second_size=second,
            rows=rows,
            columns=columns,
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
        tiles = first * second * -(-rows // (BLOCK >> shift)) * -(-columns // (1 << shift))
        return box, tiles, self._vector if is_aligned else 1


@cache
def _triton() -> tuple[Any, Mapping[Any, Any]]:
    """The kernels, and Triton's dtypes."""
    import triton.language as tl

    from ..kernels import copies as kernels

    return kernels, {dtype: getattr(tl, name) for dtype, name in DTYPES.items()}


def _facts(tensors: Mapping[Any, Tensor]) -> dict[Any, Fact]:
    return (tensors if isinstance(tensors, Located) else Located(tensors)).facts


def _are_alike(params: Sequence[Fact | None], momenta: Sequence[Fact | None]) -> bool:
    """Whether momenta are in float32 and lie in memory as the parameters do."""
    pairs = [(p, m) for p, m in zip(params, momenta, strict=True) if p and m]
    return all(m.dtype == torch.float32 and m.strides == p.strides and not m.address & 15 for p, m in pairs)
