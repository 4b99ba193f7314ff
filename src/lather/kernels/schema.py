"""The names of all columns and numbers that kernels look up. Each name is written here and nowhere else.

Kernels find their data through tables on the device. Each class below describes one table: a field's position in the
class is its position in the table. The host fills tables by field name, and kernels ask :func:`position` for a field's
column, so the order of fields can change without changing anything else.

Addresses are in bytes, and 0 means that there is nothing. All other integers count elements.

*Halves* are matrices in 16-bit numbers that tensor cores can multiply: each float32 number is the sum of a high half and
a scaled low half. A block ``[rows, columns, third]`` is stored in halves as ``[rows, third, columns]``. Matrices have a third
mode of one element. Rows and columns are padded with zeros to whole tiles of a product.

This file imports neither Triton nor torch.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

SMALLEST_NORM = 2.0**-50  # of a preconditioned direction in float32: squares of the elements of smaller ones may vanish


def position(table: type[NamedTuple], name: str) -> int:
    """The column of a table, or the row of a table that has one row per field.

    >>> position(ThinFactor, "num_chunks")
    2
    """
    return table._fields.index(name)


class Alignment(IntEnum):
    """How a block lies in the tensor that holds it. Kernels are compiled for each of these."""

    SCATTERED = 0  # in any way
    ROWS = 1  # in rows that consist of whole vectors of eight elements
    CONTIGUOUS = 2  # in one piece that consists of whole vectors


class Moment(IntEnum):
    """Where the second moment of a block's graft is. Kernels are compiled for each of these."""

    NONE = 0
    STORED = 1  # in the state, with an entry for every element
    RANK_ONE = 2  # in the diagonals of factors, see RankOne


# Tables with one row per item: [items, fields], of int64 unless said otherwise.


class Tile(NamedTuple):
    """A piece of a block. Elementwise kernels run one program per tile.

    The *window* of a block is where it lies in its tensor: a box of three dimensions (outer, middle, inner) with strides.
    """

    slot: int  # of the block, counted over all slices that share the table
    tensor: int  # index of the tensor that holds the block, see TensorAddresses
    start: int  # first element of the tile, counted from the start of its block
    numel: int  # of the whole block
    window_offset: int  # from the start of the tensor to the first element of the block
    middle_size: int
    inner_size: int
    outer_stride: int
    middle_stride: int
    inner_stride: int
    flat_offset: int  # from the start of a flat buffer to the first element of the block
    filter_address: int  # of the block's filtered gradient (float32 or bfloat16)
    moment_address: int  # of the second moment of the block's graft (float32), or of the vectors that it is a product of
    row_size: int  # elements of a row of the block: of all modes but the first
    half_address: int  # of the block's gradient in halves, if kernels update its factors
    columns: int  # of the block in halves, without padding
    padded_columns: int  # of the block in halves, with padding
    third_size: int  # of the block in halves


class CopyBox(NamedTuple):
    """A box that is copied from one tensor into another: ``[first, second, rows, columns]``, with strides in both.

    Its tiles have ``2**tile_shift`` columns, and as many rows as make up a program's number of elements.
    """

    target: int  # index of the tensor's address
    source: int
    first_tile: int  # number of its first tile; the others follow
    tile_shift: int
    second_size: int
    rows: int
    columns: int
    target_offset: int  # from the start of the tensor to the first element
    target_first: int  # strides
    target_second: int
    target_row: int
    target_column: int
    source_offset: int
    source_first: int
    source_second: int
    source_row: int
    source_column: int


class FactorJob(NamedTuple):
    """A tile of the lower triangle of a factor ``L``, which takes in ``G G^T`` or ``G^T G``."""

    slot: int
    half_address: int  # of G
    row_stride: int  # elements between two rows of G
    depth: int  # elements to sum over, a multiple of the kernel's DEPTH
    factor_address: int  # of L (float32)
    side: int  # rows of L
    tile_row: int  # counted in tiles
    tile_column: int


class ThinChunk(NamedTuple):
    """Some rows of a block ``[rows, third, columns]`` in halves, whose products add up to the factor of its third mode."""

    half_address: int  # of the first row
    num_rows: int
    third_size: int
    padded_columns: int  # a multiple of the kernel's DEPTH


class ThinFactor(NamedTuple):
    """The factor of a third mode, which takes in the sums of its chunks."""

    slot: int
    first_chunk: int
    num_chunks: int
    factor_address: int  # of L (float32)
    side: int  # rows of L


class RankOne(NamedTuple):
    """A block's second moment of rank one. Its two vectors are made of the diagonals of the block's factors, and lie one behind the
    other: an entry for each element of a row, then one for each row. A block without a second or third mode has a side of 1 there.
    """

    address: int  # of the vectors
    first_address: int  # of the factor (float32), or 0
    second_address: int
    third_address: int
    first_side: int
    second_side: int
    third_side: int
    first_stride: int  # elements of the factor from one of its diagonal to the next; 0 if it is packed
    second_stride: int
    third_stride: int


class Start(NamedTuple):
    """float32: how a root begins. ``M = m_a A + m_identity I``, ``R = r_a A + r_square S + r_identity I`` for a factor ``A`` and
    its scaled square ``S``. The root is ``back M^(-1/p)``."""

    m_a: float
    m_identity: float
    r_a: float
    r_square: float
    r_identity: float
    back: float


# Tables with one row per field. A field is a row: a list or tensor with one entry per slot, or per tensor.


class SlotTable(NamedTuple):
    """int64 [fields, slots]: the tiles of every slot, its size, its root, and where it is marked as broken."""

    first_tile: Any  # number of its first tile; the others follow
    num_tiles: Any
    numel: Any
    root_address: Any  # of the first element of its first root, which is positive once the root has been computed
    broken_address: Any  # of the slot's element of Bank.broken (int32)


class Corrections(NamedTuple):
    """float32 [fields, slots]: bias corrections of slots that are not all at the same step. Averages are divided by them."""

    filter: Any
    moment: Any
    factor: Any  # read by torch, not by kernels


class TensorAddresses(NamedTuple):
    """int64 [fields, tensors]: where the tensors start that hold the blocks.

    Gradients come first: their addresses may change in every step, and are then copied without the others.
    """

    gradients: Any
    parameters: Any
    momenta: Any


class Numbers(NamedTuple):
    """float64 [fields]: numbers of a step, which may change without a new kernel or CUDA graph."""

    gradient_sign: float  # -1 to maximize, otherwise 1
    coupled_decay: float  # L2: weights times this are added to gradients
    filter_take: float  # m <- m + filter_take (g - m)
    direction_take: float  # the filtered gradient is m + direction_take (g - m), with the old m
    moment_keep: float  # v <- moment_keep v + moment_take g^2
    moment_take: float
    filter_correction: float  # as in Corrections, where all slots are at the same step
    moment_correction: float
    graft_eps: float
    factor_keep: float  # L <- factor_keep L + factor_take G G^T
    factor_take: float
    lr: Any  # a float, or a tensor that is on the device already
    decay: Any  # as lr; weights times this are added to directions
    momentum_keep: float  # b <- momentum_keep b + momentum_take p
    momentum_take: float
    factor_correction: float  # read by torch, not by kernels
