"""Triton kernels for roots: products of symmetric matrices in halves, and small Choleskys. Importing this needs Triton.

Matrices in halves are stacks of 16-bit floats, ``[n, ld, ld]`` for roots and ``[n, rows, columns]`` for polar factors. Sides are
rounded up to whole tiles, and everything outside the ``d`` rows and columns is zero. ``size`` is the distance between two slots.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .schema import Start
from .tiles import ONE_BY_ONE, columns, width

M_A, M_IDENTITY, R_A, R_SQUARE, R_IDENTITY, BACK = columns(Start, "m_a", "m_identity", "r_a", "r_square", "r_identity", "back")
START_WIDTH = width(Start)
SQUARED = tl.constexpr(1024.0)  # what squares are multiplied by: if all eigenvalues are equal, entries are as small as 1 / d^2


@triton.jit
def measure(a, floor, scale, d, BLOCK: tl.constexpr):
    """``scale[n]``: the trace of ``a[n, d, d]``, at least ``floor[n]``. Divided by it, no entry is larger than 1."""
    slot = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, d, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(a + slot * d * d + i * (d + 1), i < d, 0.0)
    tl.store(scale + slot, tl.maximum(tl.maximum(tl.sum(total), tl.load(floor + slot)), 1e-37))


@triton.jit
def encode(x, scale, out, d, ld, size, BLOCK: tl.constexpr):
    """One row of ``scale[n] x[n, d, d]`` in halves."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + slot * d * d + row * d + columns, (columns < d) & (row < d), 0.0) * tl.load(scale + slot)
    tl.store(out + slot * size + row * ld + columns, value.to(tl.float16), columns < ld)


@triton.jit
def decode(x, scale, out, d, ld, size, BLOCK: tl.constexpr):
    """One row of ``scale[n]`` times matrices in halves into ``out[n, d, d]``."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + slot * size + row * ld + columns, columns < d, 0.0).to(tl.float32)
    tl.store(out + slot * d * d + row * d + columns, value * tl.load(scale + slot), columns < d)


@triton.jit
def plan(sums, scale, floor, starts, tiles, part, margin, a, b, c, p, BLOCK: tl.constexpr):
    """One row of :class:`~lather.kernels.schema.Start`, from the squares summed over the tiles of ``SQUARED (A / scale)^2``.

    With ``z = margin ||(A / scale)^2||_F^(1/2)`` and the ridge ``max(floor / scale, part z)``, ``M = (A / scale + ridge I) / (z +
    ridge)`` has no eigenvalue above 1. ``R = b M + c M^2`` and ``X = a I + R``.
    """
    slot = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(sums + slot * tiles + i, i < tiles, 0.0)
    z = margin * tl.sqrt(tl.sqrt(tl.sum(total)) / SQUARED)
    size = tl.load(scale + slot)
    z = tl.where(size < float("inf"), z, float("nan"))  # the trace has overflowed
    ridge = tl.where(z == 0, 1.0, tl.maximum(tl.load(floor + slot) / size, part * z))
    z += ridge
    ratio, unit = ridge / z, 1 / (z * size)
    row = starts + slot * START_WIDTH
    tl.store(row + M_A, unit)
    tl.store(row + M_IDENTITY, ratio)
    tl.store(row + R_A, (b + 2 * c * ratio) * unit)
    tl.store(row + R_SQUARE, c / (z * z * SQUARED))
    tl.store(row + R_IDENTITY, (b + c * ratio) * ratio)
    tl.store(row + BACK, tl.exp2(-(tl.log2(z) + tl.log2(size)) / p))


@triton.jit
def begin(a, square, starts, first, m, r, x, d, ld, size, BLOCK: tl.constexpr):
    """One row of the matrices ``M``, ``R`` and ``X`` that :class:`~lather.kernels.schema.Start` describes, in halves."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside, on = (columns < d) & (row < d), (columns == row) & (row < d)
    at = slot * size + row * ld + columns
    one = tl.load(a + slot * d * d + row * d + columns, inside, 0.0)
    two = tl.load(square + at, inside, 0.0).to(tl.float32)
    starts += slot * START_WIDTH
    value = tl.load(starts + M_A) * one + tl.where(on, tl.load(starts + M_IDENTITY), 0.0)
    tl.store(m + at, value.to(tl.float16), columns < ld)
    value = tl.load(starts + R_A) * one + tl.load(starts + R_SQUARE) * two + tl.where(on, tl.load(starts + R_IDENTITY), 0.0)
    tl.store(r + at, value.to(tl.float16), columns < ld)
    value += tl.where(on, first, 0.0)
    tl.store(x + at, value.to(tl.float16), columns < ld)


@triton.jit
def _signs(i, probe):
    """Entries ``i`` of the vectors ``probe``: +-1, chirps, the top bit of ``k i^2`` modulo 2^16. They resemble no factor."""
    i = (i + 1).to(tl.int64)
    return 1.0 - 2.0 * (((40503 + 2 * probe.to(tl.int64))[None, :] * (i * i)[:, None] >> 15) & 1).to(tl.float32)


@triton.jit
def probe(
    x, y, starts, out, d, ld, size,
    FIRST: tl.constexpr, LAST: tl.constexpr, DAMPED: tl.constexpr,
    PROBES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``out = x y`` for matrices with rows of ``ld`` elements and vectors ``[n, d, PROBES]``, which are signs at ``FIRST``.

    ``DAMPED``: ``x`` are factors, and ``M`` of :class:`~lather.kernels.schema.Start` is meant. ``LAST``: instead of vectors, the
    sum of squares of ``x y`` minus the signs, for every program.
    """
    slot = tl.program_id(1).to(tl.int64)
    row, vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PROBES)
    x += slot * size
    y += slot * d * PROBES
    total = tl.zeros([ROWS, PROBES], tl.float32)
    for start in range(0, d, DEPTH):
        k = start + tl.arange(0, DEPTH)
        some = tl.load(x + row[:, None] * ld + k[None, :], (row[:, None] < d) & (k[None, :] < d), 0.0).to(tl.float32)
        if FIRST:
            v = _signs(k, vector)
        else:
            v = tl.load(y + k[:, None] * PROBES + vector[None, :], k[:, None] < d, 0.0)
        total = tl.dot(some, v, total, input_precision="tf32x3")
    inside = row[:, None] < d
    at = row[:, None] * PROBES + vector[None, :]
    if DAMPED:
        starts += slot * START_WIDTH
        if FIRST:
            v = _signs(row, vector)
        else:
            v = tl.load(y + at, inside, 0.0)
        total = tl.load(starts + M_A) * total + tl.load(starts + M_IDENTITY) * v
    if LAST:
        off = tl.where(inside, total - _signs(row, vector), 0.0)
        tl.store(out + slot * tl.num_programs(0) + tl.program_id(0), tl.sum(off * off))
    else:
        tl.store(out + slot * d * PROBES + at, total, inside)


@triton.jit
def _lower(tile):
    """Row and column of a tile of a lower triangle whose tiles are counted row by row."""
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit
def symmetric(
    x, y, add, out, sums, d, depth, row, step, size, tiles, alpha, beta, diagonal,
    SAME: tl.constexpr, ADD: tl.constexpr, SHIFTED: tl.constexpr, SUMS: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``alpha x y^T + beta add + diagonal I`` for stacks in halves whose products are symmetric, with float32 sums.

    ``x`` and ``y`` are ``[n, d, depth]``: rows lie ``row`` elements apart, columns ``step``, and slots ``size``. ``d`` is a
    multiple of SIDE and ``depth`` of DEPTH. ``add`` and ``out`` are ``[n, d, d]``. Only the tiles of the lower triangle are
    computed; the others are mirror images. ``SAME``: ``y`` is ``x``, so that the product is symmetric to the bit. ``SHIFTED``:
    ``diagonal`` is not zero. ``SUMS``: also the sum of squares of the result, for every tile.
    """
    slot = (tl.program_id(0) // tiles).to(tl.int64)
    ti, tj = _lower(tl.program_id(0) % tiles)
    ri, rj = ti * SIDE + tl.arange(0, SIDE), tj * SIDE + tl.arange(0, SIDE)
    k = tl.arange(0, DEPTH)
    at_x = x + slot * size + (ri[:, None] * row + k[None, :] * step)
    at_y = y + slot * size + (rj[:, None] * row + k[None, :] * step)
    value = tl.zeros([SIDE, SIDE], tl.float32)
    for _ in range(0, depth, DEPTH):
        value = tl.dot(tl.load(at_x), tl.load(at_y).T, value)
        at_x += DEPTH * step
        at_y += DEPTH * step
    value *= alpha
    if not SAME:  # noqa: SIM102 (Triton evaluates both sides of `and`)
        if ti == tj:
            value = (value + value.T) / 2
    slot = slot * d * d
    at = ri[:, None] * d + rj[None, :]
    if ADD:
        value += beta * tl.load(add + slot + at).to(tl.float32)
    if SHIFTED:
        value += tl.where(ri[:, None] == rj[None, :], diagonal, 0.0)
    if SUMS:
        tl.store(sums + tl.program_id(0), tl.where(ti == tj, 1.0, 2.0) * tl.sum(value * value))
    half = value.to(out.dtype.element_ty)
    tl.store(out + slot + at, half)
    if ti != tj:
        tl.store(out + slot + (rj[:, None] * d + ri[None, :]), half.T)


@triton.jit
def squares_in_parts(x, out, numel, parts, BLOCK: tl.constexpr):
    """``out[slot, part]``: the sum of squares over every ``parts``-th tile of ``x[n, numel]``, in float64, so none vanishes."""
    part, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(part * BLOCK, numel, parts * BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(x + slot * numel + index, index < numel, 0.0).to(tl.float64)
        total += value * value
    tl.store(out + slot * parts + part, tl.sum(total))


@triton.jit(**ONE_BY_ONE)
def halve(x, scale, out, rows, columns, padded_rows, padded_columns, BLOCK: tl.constexpr):
    """One row of ``scale[n]^2 x[n, rows, columns]`` into 16-bit numbers, with zeros as padding. The square may be no float32."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale + slot).to(tl.float32)
    value = tl.load(x + (slot * rows + row) * columns + index, (index < columns) & (row < rows), 0.0) * factor * factor
    tl.store(out + (slot * padded_rows + row) * padded_columns + index, value.to(out.dtype.element_ty), index < padded_columns)


@triton.jit
def _exponent(x):
    """The whole number ``e`` with ``2^(e - 1) <= |x| < 2^e``. Zero counts as 2^-127."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 126


@triton.jit
def _power_of_two(e):
    """``2^e`` to the bit. Zero or Inf if that is no normal float32."""
    return (tl.minimum(tl.maximum(e + 127, 0), 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_room(x, slot, d, room, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Half the exponent of the power of four that brings the trace of a matrix below ``2^room``."""
    slot, trace = slot.to(tl.int64), tl.zeros([BLOCK], tl.float32)
    for start in range(0, d, BLOCK):
        i = start + tl.arange(0, BLOCK)
        if PACKED:
            at = slot * (d * (d + 1) // 2) + i * (i + 3) // 2
        else:
            at = slot * d * d + i * (d + 1)
        trace += tl.load(x + at, i < d, 0.0).to(tl.float32)
    return (room - _exponent(tl.sum(trace))) >> 1


@triton.jit(**ONE_BY_ONE)
def balance(
    x0, x1, norms, scales, back, n, d0, d1, room0, room1, room, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What to multiply gradients and roots by before they are halved, and products of them afterwards. All are powers of two.

    ``scales[3, n]`` are for gradients, whose ``norms[n]`` then are below ``2^room``, and for roots, whose traces then are below
    ``2^room0`` and ``2^room1``. They are to be applied twice. ``back[n]`` undoes them all.
    """
    slot = tl.program_id(0)
    own = (room - _exponent(tl.load(norms + slot))) >> 1
    first, second = _half_room(x0, slot, d0, room0, PACKED, BLOCK), _half_room(x1, slot, d1, room1, PACKED, BLOCK)
    total = own + first + second
    tl.store(scales + slot, _power_of_two(own))
    tl.store(scales + n + slot, _power_of_two(first))
    tl.store(scales + 2 * n + slot, _power_of_two(second))
    tl.store(back + slot, _power_of_two(-2 * total))


@triton.jit
def _eliminate(x, BLOCK: tl.constexpr):
    """For ``x = U^T D U``: ``D U`` on and above the diagonal, and ``U^{-T}`` below it. Only the upper triangle of ``x`` counts.

    Elimination clears the part below the diagonal, so ``U^{-T}`` has room there: its rows are the same combinations of rows of
    the identity. What is left to eliminate stays symmetric to the bit, so that its columns are its rows. With columns that are
    rounded in another way this would be an elimination without pivoting of an unsymmetric matrix, which is unstable.
    """
    index = tl.arange(0, BLOCK)
    r, c = index[:, None], index[None, :]
    x = tl.where(r <= c, x, x.T)
    for k in range(0, BLOCK):
        row = tl.sum(tl.where(r == k, x, 0.0), 0, keep_dims=True)
        column = tl.sum(tl.where(c == k, x, 0.0), 1, keep_dims=True)
        pivot = 1 / tl.sum(tl.where(c == k, row, 0.0), 1, keep_dims=True)
        x = tl.where(r > k, tl.where(c == k, -column * pivot, x - (column * row) * pivot), x)
    return x


@triton.jit
def cholesky(a, lower, inverse, size, stride, width, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """For ``a = L L^T``: ``L`` and ``L^{-1}`` into ``lower`` and ``inverse``, whose upper triangles stay as they are.

    All three are ``width`` rows and columns of matrices that lie ``size`` elements apart, with rows ``stride`` elements apart.
    Only the upper triangle of ``a`` is read. If a pivot is not positive, the results contain NaN.

    BLOCK rows are eliminated at a time, as one row is in :func:`_eliminate`: ``x`` has what is left of ``a`` on and above the
    blocks of its diagonal, and below them what will become rows of the inverse.
    """
    slot = tl.program_id(0).to(tl.int64)
    a, lower, inverse = a + slot * size, lower + slot * size, inverse + slot * size
    tile, block = tl.arange(0, TILE), tl.arange(0, BLOCK)
    r, c = tile[:, None], tile[None, :]
    one = tl.where(block[:, None] == block[None, :], 1.0, 0.0)
    x = tl.load(a + r * stride + c, (r < width) & (c < width), tl.where(r == c, 1.0, 0.0))
    for first in range(0, width, BLOCK):
        i, j = first + block[:, None], first + block[None, :]
        here = (c >= first) & (c < first + BLOCK)
        rows = tl.sum(tl.where((r >= first) & (r < first + BLOCK), x, 0.0).reshape(TILE // BLOCK, BLOCK, TILE), 0)
        corner = tl.sum(tl.where(here, rows, 0.0).reshape(BLOCK, TILE // BLOCK, BLOCK), 1)
        corner = _eliminate(corner, BLOCK)
        scale = tl.sqrt_rn(tl.sum(tl.where(i == j, corner, 0.0), 1))[:, None]
        tl.store(lower + j * stride + i, corner / scale, (i <= j) & (j < width))
        rows = tl.where(here, tl.where(c == i, 1.0, 0.0), rows)
        rows = tl.dot(tl.where(i > j, corner, one) / scale, rows, input_precision="tf32x3")
        tl.store(lower + c * stride + i, rows, (c >= first + BLOCK) & (c < width))
        tl.store(inverse + i * stride + c, rows, (c <= i) & (i < width))
        factor = tl.where(c >= first + BLOCK, rows, 0.0).T
        x = tl.where(here, 0.0, x) - tl.dot(factor, rows, input_precision="tf32x3")


@triton.jit
def take_columns(x, order, out, d, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``out[i, j] = x[i, order[j]]`` for every slot, ROWS rows in a program. A row of ``x`` is read from the cache but once."""
    slot = tl.program_id(1).to(tl.int64)
    i, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column = tl.load(order + slot * d + j, j < d, 0)
    inside = (i < d) & (j < d)
    tl.store(out + slot * d * d + i * d + j, tl.load(x + slot * d * d + i * d + column, inside, 0.0), inside)
