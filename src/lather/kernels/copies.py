"""Triton kernels that copy boxes from tensors into others, or move parameters by them. Importing this needs Triton.

A table on the device lists boxes of all shapes, one :class:`~lather.kernels.schema.CopyBox` per row, so one launch does all.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .schema import CopyBox
from .tiles import columns, moved, width

WIDTH = width(CopyBox)
TARGET, SOURCE, FIRST_TILE, TILE_SHIFT = columns(CopyBox, "target", "source", "first_tile", "tile_shift")
SECOND_SIZE, ROWS, COLUMNS = columns(CopyBox, "second_size", "rows", "columns")
TARGET_OFFSET, TARGET_FIRST, TARGET_SECOND = columns(CopyBox, "target_offset", "target_first", "target_second")
TARGET_ROW, TARGET_COLUMN = columns(CopyBox, "target_row", "target_column")
SOURCE_OFFSET, SOURCE_FIRST, SOURCE_SECOND = columns(CopyBox, "source_offset", "source_first", "source_second")
SOURCE_ROW, SOURCE_COLUMN = columns(CopyBox, "source_row", "source_column")


@triton.jit
def _box_of(tiles, boxes):
    """The box of this program's tile."""
    return boxes + tl.load(tiles + tl.program_id(0)).to(tl.int64) * WIDTH


@triton.jit
def _place(box, OFFSET: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
           first, second, row, column, VECTOR: tl.constexpr):  # fmt: skip
    """Offsets of the elements of a tile in one of its box's tensors."""
    start = tl.load(box + OFFSET) + first * tl.load(box + FIRST) + second * tl.load(box + SECOND)
    if VECTOR > 1:
        return start + (row * tl.load(box + ROW) + column)
    return start + (row * tl.load(box + ROW) + column * tl.load(box + COLUMN))


@triton.jit
def _tile_of(box, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of the elements of this program's tile in the target and in the source, and which of them there are.

    Divisions are of scalars, once for a tile. Inside, rows and columns are bits of an index.
    """
    tile = tl.program_id(0) - tl.load(box + FIRST_TILE).to(tl.int32)
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
    there = _place(
        box, TARGET_OFFSET, TARGET_FIRST, TARGET_SECOND, TARGET_ROW, TARGET_COLUMN, first, second, row + r, column + c, VECTOR
    )
    here = _place(
        box, SOURCE_OFFSET, SOURCE_FIRST, SOURCE_SECOND, SOURCE_ROW, SOURCE_COLUMN, first, second, row + r, column + c, VECTOR
    )
    return there, here, (c < columns_left) & (r < rows_left)


@triton.jit
def _pointers(address, DTYPE: tl.constexpr, offsets, VECTOR: tl.constexpr):
    at = address.to(tl.pointer_type(DTYPE)) + offsets
    if VECTOR > 1:
        at = tl.max_contiguous(tl.multiple_of(at, 16), VECTOR)
    return at


@triton.jit
def copy(tiles, boxes, addresses, TO: tl.constexpr, FROM: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """One tile of a box. ``tiles`` has the box of every tile, ``addresses`` where tensors start.

    Zeros are written if the source's address is 0, and nothing if the target's is. All rows consist of whole vectors of
    ``VECTOR`` elements. If these are more than one, they are next to each other and aligned.
    """
    box = _box_of(tiles, boxes)
    target, source = tl.load(addresses + tl.load(box + TARGET)), tl.load(addresses + tl.load(box + SOURCE))
    there, here, inside = _tile_of(box, VECTOR, BLOCK)
    inside = inside & (target != 0)
    value = tl.load(_pointers(source, FROM, here, VECTOR), inside & (source != 0), 0)
    if FROM != TO:
        value = value.to(tl.float32).to(TO)
    tl.store(_pointers(target, TO, there, VECTOR), value, inside)


@triton.jit
def move(
    tiles, boxes, addresses, momenta, lr, decay, keep, take,
    TO: tl.constexpr, FROM: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As :func:`copy`, of directions that move the parameters, which are the targets, and their ``momenta``."""
    box = _box_of(tiles, boxes)
    number = tl.load(box + TARGET)
    target, source = tl.load(addresses + number), tl.load(addresses + tl.load(box + SOURCE))
    there, here, inside = _tile_of(box, VECTOR, BLOCK)
    inside = inside & (target != 0)
    to = _pointers(target, TO, there, VECTOR)
    p = tl.load(_pointers(source, FROM, here, VECTOR), inside, 0.0).to(tl.float32)
    w = tl.load(to, inside, 0.0).to(tl.float32)
    old = w
    if MOMENTUM:
        memory = _pointers(tl.load(momenta + number), tl.float32, there, VECTOR)
        old = tl.load(memory, inside, 0.0)
    w, m = moved(w, p, old, lr, decay, keep, take, MOMENTUM, NESTEROV)
    tl.store(to, w.to(TO), inside)
    if MOMENTUM:
        tl.store(memory, m, inside)
