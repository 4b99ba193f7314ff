"""What kernels share: columns as constants, numbers in halves, and where the elements of a tile are. Importing this needs Triton.

``row`` points to a row of :class:`~lather.kernels.schema.Tile`. ``ALIGNED`` is one of :class:`~lather.kernels.schema.Alignment`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .schema import Alignment, Tile, position

LOW = tl.constexpr(2048.0)  # a number is a half plus 1/LOW of another half: 2 x 11 bits

# Arguments of kernels that are read one number at a time. By default Triton compiles a kernel again for each of their alignments.
ONE_BY_ONE = {
    "do_not_specialize": ["n"],
    "do_not_specialize_on_alignment": [
        "alive", "back", "correction", "corrections", "gain", "grads", "means", "momenta", "norms", "own", "partial",
        "scale", "scales", "weights",
    ],
}  # fmt: skip


def columns(table, *names):
    """The positions of fields in their table, for use in kernels."""
    return [tl.constexpr(position(table, name)) for name in names]


def width(table):
    """The number of columns of a table, for use in kernels."""
    return tl.constexpr(len(table._fields))


CONTIGUOUS, ROWS = tl.constexpr(int(Alignment.CONTIGUOUS)), tl.constexpr(int(Alignment.ROWS))
TENSOR, WINDOW_OFFSET, START, NUMEL = columns(Tile, "tensor", "window_offset", "start", "numel")
MIDDLE_SIZE, INNER_SIZE = columns(Tile, "middle_size", "inner_size")
OUTER_STRIDE, MIDDLE_STRIDE, INNER_STRIDE = columns(Tile, "outer_stride", "middle_stride", "inner_stride")


@triton.jit
def low_half(value, high):
    """LOW times the difference between a number and its high half ``value.to(tl.float16)``."""
    return ((value - high.to(tl.float32)) * LOW).to(tl.float16)


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
def in_state(row, COLUMN: tl.constexpr, index, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to elements ``index`` of a block's state, whose address is in a column of the table."""
    return at_offset(tl.load(row + COLUMN).to(tl.pointer_type(DTYPE)), index, ALIGNED)


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
def moved(w, p, old, lr, decay, keep, take, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr):
    """Parameters and momentum after the step ``p``, as in :func:`lather.storage.update.update_`."""
    p += decay * w
    m = old
    if MOMENTUM:
        old = tl.where(old - old == 0, old, 0.0)
        damped = take * p
        m = keep * old + damped
        p = damped + keep * m if NESTEROV else m
    moved = w - lr * p
    go = moved - moved == 0  # finite
    return tl.where(go, moved, w), tl.where(go, m, old)
