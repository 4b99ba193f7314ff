"""How elementwise kernels find the elements of a tile, from its row in the table. Importing this needs Triton.

Functions take ``row``, a pointer to a row of :class:`~lather.kernels.schema.Tile`, and ``ALIGNED``, one of
:class:`~lather.kernels.schema.Alignment`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .common import column, width
from .schema import Alignment, Tile

CONTIGUOUS, ROWS = tl.constexpr(int(Alignment.CONTIGUOUS)), tl.constexpr(int(Alignment.ROWS))

TILE_WIDTH = width(Tile)
SLOT = column(Tile, "slot")
TENSOR = column(Tile, "tensor")
START = column(Tile, "start")
NUMEL = column(Tile, "numel")
WINDOW_OFFSET = column(Tile, "window_offset")
MIDDLE_SIZE = column(Tile, "middle_size")
INNER_SIZE = column(Tile, "inner_size")
OUTER_STRIDE = column(Tile, "outer_stride")
MIDDLE_STRIDE = column(Tile, "middle_stride")
INNER_STRIDE = column(Tile, "inner_stride")
FLAT_OFFSET = column(Tile, "flat_offset")
FILTER_ADDRESS = column(Tile, "filter_address")
MOMENT_ADDRESS = column(Tile, "moment_address")
HALF_ADDRESS = column(Tile, "half_address")
COLUMNS = column(Tile, "columns")
PADDED_COLUMNS = column(Tile, "padded_columns")
THIRD_SIZE = column(Tile, "third_size")


@triton.jit
def elements(row, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Elements of a tile, counted from the start of its block, and a mask of those that exist."""
    index = tl.multiple_of(tl.load(row + START).to(tl.int32), 16) + tl.arange(0, BLOCK)
    numel = tl.load(row + NUMEL).to(tl.int32)
    if ALIGNED:
        numel = tl.multiple_of(numel, 8)
    return index, index < numel


@triton.jit
def at_offset(start, offset, ALIGNED: tl.constexpr):
    """Pointers ``start + offset``. If they are aligned, this tells the compiler, which cannot see it from a table."""
    pointers = start + offset
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def in_state(row, COLUMN: tl.constexpr, index, ALIGNED: tl.constexpr):
    """Pointers to elements ``index`` of a block's state, whose address is in a column of the table."""
    return at_offset(tl.load(row + COLUMN).to(tl.pointer_type(tl.float32)), index, ALIGNED)


@triton.jit
def in_tensor(addresses, row, index, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to elements ``index`` of a block in the tensor that holds it. ``addresses`` lists where the tensors start."""
    start = tl.load(addresses + tl.load(row + TENSOR)).to(tl.pointer_type(DTYPE)) + tl.load(row + WINDOW_OFFSET)
    if ALIGNED == CONTIGUOUS:
        return at_offset(start, index, ALIGNED)
    middle_size, inner_size = tl.load(row + MIDDLE_SIZE).to(tl.int32), tl.load(row + INNER_SIZE).to(tl.int32)
    inner = index % inner_size
    rest = index // inner_size
    middle = rest % middle_size
    outer = (rest // middle_size).to(tl.int64)
    offset = outer * tl.load(row + OUTER_STRIDE) + middle * tl.load(row + MIDDLE_STRIDE)
    if ALIGNED == ROWS:
        return tl.max_contiguous(tl.multiple_of(start + (offset + inner), 16), 8)
    return start + offset + inner * tl.load(row + INNER_STRIDE)


@triton.jit
def half_layout(row):
    """Columns of a block in halves, without and with padding, and the size of its third mode."""
    columns, padded = tl.load(row + COLUMNS).to(tl.int32), tl.load(row + PADDED_COLUMNS).to(tl.int32)
    return columns, padded, tl.load(row + THIRD_SIZE).to(tl.int32)
