"""The Triton kernel that copies boxes from tensors into others. Importing this needs Triton.

A table on the device lists boxes of all shapes, one :class:`~lather.kernels.schema.CopyBox` per row, so one launch copies all.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .schema import CopyBox
from .tiles import columns, width

WIDTH = width(CopyBox)
TARGET, SOURCE, FIRST_TILE, TILE_SHIFT = columns(CopyBox, "target", "source", "first_tile", "tile_shift")
SECOND_SIZE, ROWS, COLUMNS = columns(CopyBox, "second_size", "rows", "columns")
TARGET_OFFSET, TARGET_FIRST, TARGET_SECOND = columns(CopyBox, "target_offset", "target_first", "target_second")
TARGET_ROW, TARGET_COLUMN = columns(CopyBox, "target_row", "target_column")
SOURCE_OFFSET, SOURCE_FIRST, SOURCE_SECOND = columns(CopyBox, "source_offset", "source_first", "source_second")
SOURCE_ROW, SOURCE_COLUMN = columns(CopyBox, "source_row", "source_column")


@triton.jit
def copy(tiles, boxes, addresses, TO: tl.constexpr, FROM: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """One tile of a box. ``tiles`` has the box of every tile, ``addresses`` where tensors start.

    Zeros are written if the source's address is 0, and nothing if the target's is. All rows consist of whole vectors of
    ``VECTOR`` elements. If these are more than one, they are next to each other and aligned.

    Divisions are of scalars, once for a tile. Inside, rows and columns are bits of an index.
    """
    number = tl.program_id(0)
    box = boxes + tl.load(tiles + number).to(tl.int64) * WIDTH
    target, source = tl.load(addresses + tl.load(box + TARGET)), tl.load(addresses + tl.load(box + SOURCE))
    tile = number - tl.load(box + FIRST_TILE).to(tl.int32)
    shift, index = tl.load(box + TILE_SHIFT).to(tl.int32), tl.arange(0, BLOCK)
    wide, high = 1 << shift, BLOCK >> shift
    rows, columns, second_size = tl.load(box + ROWS), tl.load(box + COLUMNS), tl.load(box + SECOND_SIZE).to(tl.int32)
    across, down = ((columns + wide - 1) // wide).to(tl.int32), ((rows + high - 1) // high).to(tl.int32)
    column, row = (tile % across).to(tl.int64) * wide, (tile // across % down).to(tl.int64) * high
    outer = tile // across // down
    second, first = outer % second_size, outer // second_size
    c, r = index & (wide - 1), index >> shift
    rows_left, columns_left = tl.minimum(rows - row, high).to(tl.int32), tl.minimum(columns - column, wide).to(tl.int32)
    if VECTOR > 1:  # the compiler cannot see this from a table
        c, r = tl.max_contiguous(tl.multiple_of(c, VECTOR), VECTOR), tl.max_constancy(r, VECTOR)
        columns_left = tl.multiple_of(columns_left, VECTOR)
    inside = (c < columns_left) & (r < rows_left) & (target != 0)
    to = target.to(tl.pointer_type(TO)) + tl.load(box + TARGET_OFFSET)
    to += first * tl.load(box + TARGET_FIRST) + second * tl.load(box + TARGET_SECOND)
    to = _elements(to, row + r, column + c, tl.load(box + TARGET_ROW), tl.load(box + TARGET_COLUMN), VECTOR)
    at = source.to(tl.pointer_type(FROM)) + tl.load(box + SOURCE_OFFSET)
    at += first * tl.load(box + SOURCE_FIRST) + second * tl.load(box + SOURCE_SECOND)
    at = _elements(at, row + r, column + c, tl.load(box + SOURCE_ROW), tl.load(box + SOURCE_COLUMN), VECTOR)
    value = tl.load(at, inside & (source != 0), 0)
    if FROM != TO:
        value = value.to(tl.float32).to(TO)
    tl.store(to, value, inside)


@triton.jit
def _elements(start, row, column, row_stride, column_stride, VECTOR: tl.constexpr):
    if VECTOR > 1:
        return tl.max_contiguous(tl.multiple_of(start + (row * row_stride + column), 16), VECTOR)
    return start + (row * row_stride + column * column_stride)
