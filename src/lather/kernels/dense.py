"""Triton kernels for roots: products of dense matrices in halves, and small Choleskys. Importing this needs Triton.

Matrices in halves are stacks ``[n, 2, ld, ld]`` of high and low halves. ``ld`` is ``d`` rounded up to whole tiles, and
everything outside the ``d`` rows and columns is zero. ``size`` is ``ld ld``, the distance between the two halves of a number.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .schema import CombineTerms
from .tiles import LOW, columns, low_half

FIRST_X, FIRST_IDENTITY = columns(CombineTerms, "first_x", "first_identity")
SECOND_X, SECOND_Y, SECOND_IDENTITY = columns(CombineTerms, "second_x", "second_y", "second_identity")


@triton.jit
def _store(at, value, size, mask):
    high = value.to(tl.float16)
    tl.store(at, high, mask)
    tl.store(at + size, low_half(value, high), mask)


@triton.jit
def _load(at, size, mask):
    return tl.load(at, mask, 0.0).to(tl.float32) + tl.load(at + size, mask, 0.0).to(tl.float32) / LOW


@triton.jit
def split(x, scale, out, d, ld, size, BLOCK: tl.constexpr):
    """One row of ``scale[n] x[n, d, d]`` into halves ``[n, 2, ld, ld]``, with zeros as padding."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + slot * d * d + row * d + columns, (columns < d) & (row < d), 0.0) * tl.load(scale + slot)
    _store(out + slot * 2 * size + row * ld + columns, value, size, columns < ld)


@triton.jit
def join(x, scale, out, d, ld, size, BLOCK: tl.constexpr):
    """One row of ``scale[n]`` times halves ``[n, 2, ld, ld]`` into ``out[n, d, d]``."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = _load(x + slot * 2 * size + row * ld + columns, size, columns < d)
    tl.store(out + slot * d * d + row * d + columns, value * tl.load(scale + slot), columns < d)


@triton.jit
def squares(x, out, size, parts, BLOCK: tl.constexpr):
    """``out[slot, part]``: the sum of squares over one of the ``parts`` of halves ``[n, 2, size]``."""
    part, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = part * BLOCK + tl.arange(0, BLOCK)
    value = _load(x + slot * 2 * size + index, size, index < size)
    tl.store(out + slot * parts + part, tl.sum(value * value))


@triton.jit
def combine(x, y, terms, first, second, ld, size, n, BLOCK: tl.constexpr):
    """One row of the matrices ``first`` and ``second`` that :class:`~lather.kernels.schema.CombineTerms` describes, in halves."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at, inside, on = slot * 2 * size + row * ld + columns, columns < ld, columns == row
    a, b = _load(x + at, size, inside), _load(y + at, size, inside)
    terms += slot
    first += at
    value = tl.load(terms + FIRST_X * n) * a + tl.where(on, tl.load(terms + FIRST_IDENTITY * n), 0.0)
    _store(first, value, size, inside)
    value = tl.load(terms + SECOND_X * n) * a + tl.load(terms + SECOND_Y * n) * b
    value += tl.where(on, tl.load(terms + SECOND_IDENTITY * n), 0.0)
    _store(second + at, value, size, inside)


@triton.jit
def _lower(tile):
    """Row and column of a tile of a lower triangle whose tiles are counted row by row."""
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit
def symmetric(x, y, add, out, d, size, tiles, alpha, beta, diagonal, ADD: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """``alpha x y + beta add + diagonal I`` for commuting symmetric stacks in halves ``[n, 2, d, d]``. ``d`` is a multiple of SIDE.

    Only the tiles of the lower triangle are computed; the others are mirror images. Each takes three products of halves: the
    product of the two low halves is smaller than the rounding of the others.
    """
    slot = (tl.program_id(0) // tiles).to(tl.int64) * 2 * size
    ti, tj = _lower(tl.program_id(0) % tiles)
    ri, rj = ti * SIDE + tl.arange(0, SIDE), tj * SIDE + tl.arange(0, SIDE)
    k = tl.arange(0, DEPTH)
    at_x = x + slot + ri[:, None] * d + k[None, :]
    at_y = y + slot + rj[:, None] * d + k[None, :]
    total = tl.zeros([SIDE, SIDE], tl.float32)
    low = tl.zeros([SIDE, SIDE], tl.float32)
    for _ in range(0, d, DEPTH):
        xh, yh = tl.load(at_x), tl.load(at_y)
        total = tl.dot(xh, yh.T, total)
        low = tl.dot(xh, tl.load(at_y + size).T, low)
        low = tl.dot(tl.load(at_x + size), yh.T, low)
        at_x += DEPTH
        at_y += DEPTH
    value = alpha * (total + low / LOW)
    if ti == tj:
        value = (value + value.T) / 2
    at = ri[:, None] * d + rj[None, :]
    if ADD:
        value += beta * (tl.load(add + slot + at).to(tl.float32) + tl.load(add + slot + size + at).to(tl.float32) / LOW)
    value += tl.where(ri[:, None] == rj[None, :], diagonal, 0.0)
    high = value.to(tl.float16)
    rest = low_half(value, high)
    tl.store(out + slot + at, high)
    tl.store(out + slot + size + at, rest)
    if ti != tj:
        mirror = rj[:, None] * d + ri[None, :]
        tl.store(out + slot + mirror, high.T)
        tl.store(out + slot + size + mirror, rest.T)


@triton.jit
def cholesky(a, lower, inverse, size, stride, width, TILE: tl.constexpr):
    """For ``a = L L^T``: ``L`` and ``L^{-1}`` into ``lower`` and ``inverse``. If a pivot is not positive, they contain NaN.

    All three are ``width`` rows and columns of matrices that lie ``size`` elements apart, with rows ``stride`` elements apart.

    Elimination gives ``a = U^T D U``. On and above the diagonal, ``x`` becomes ``D U``. Below it, elimination clears ``x``, so
    ``U^{-T}`` is stored there: its rows are the same combinations of rows of the identity. Only the upper triangle of ``a``
    is read. Rounding makes ``x`` unsymmetric, and with factors from below the diagonal this would be an elimination without
    pivoting of an unsymmetric matrix, which is unstable.
    """
    slot = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, TILE)
    r, c = index[:, None], index[None, :]
    one, inside = tl.where(r == c, 1.0, 0.0), (r < width) & (c < width)
    x = tl.load(a + slot * size + r * stride + c, inside, one)
    for k in range(0, width):
        row = tl.sum(tl.where(r == k, x, 0.0), 0)
        factor = row[:, None] * (1 / tl.sum(tl.where(index == k, row, 0.0)))
        x = tl.where(r > k, tl.where(c == k, -factor, x - factor * row[None, :]), x)
    scale = tl.sqrt_rn(tl.sum(tl.where(r == c, x, 0.0), 1))[:, None]
    tl.store(lower + slot * size + c * stride + r, tl.where(r <= c, x, 0.0) / scale, inside)
    tl.store(inverse + slot * size + r * stride + c, tl.where(r > c, x, one) / scale, inside)
