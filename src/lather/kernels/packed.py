"""Triton kernels for symmetric matrices that are kept as their lower triangles. Importing this needs Triton.

A triangle has its rows one after the other: row ``i`` begins at ``i (i + 1) / 2``. Kernels run one program for each slot and
tile of a matrix; tiles above the diagonal have nothing to do. ``EVEN``: ``d`` is a multiple of 16.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .tiles import ONE_BY_ONE


@triton.jit
def _tile(d, EVEN: tl.constexpr, SIDE: tl.constexpr):
    """Slot, rows and columns of a tile, and the side of the matrix."""
    if EVEN:
        d = tl.multiple_of(d, 16)
    rows, columns = tl.program_id(1) * SIDE + tl.arange(0, SIDE), tl.program_id(2) * SIDE + tl.arange(0, SIDE)
    return tl.program_id(0).to(tl.int64), rows, columns, d


@triton.jit
def _in_triangle(triangles, slot, rows, columns, d):
    """Pointers to the elements of a tile, and a mask of those that a triangle has."""
    at = triangles + slot * (d * (d + 1) // 2) + (rows * (rows + 1) // 2)[:, None] + columns[None, :]
    return at, (columns[None, :] <= rows[:, None]) & (rows[:, None] < d)


@triton.jit
def _in_matrix(matrices, slot, rows, columns, d, EVEN: tl.constexpr):
    """Pointers to the elements of a tile, and a mask of those that a matrix has."""
    at = matrices + slot * d * d + (rows[:, None] * d + columns[None, :])
    if EVEN:
        at = tl.multiple_of(at, (16, 16))
    return at, (rows[:, None] < d) & (columns[None, :] < d)


@triton.jit(**ONE_BY_ONE)
def unpack(triangles, matrices, scale, d, EVEN: tl.constexpr, SIDE: tl.constexpr):
    """The symmetric ``matrices [n, d, d]`` with these lower triangles, in their own dtype. Every triangle is read once.

    If there is a ``scale[n]``, they are multiplied by its square.
    """
    if tl.program_id(2) <= tl.program_id(1):
        slot, rows, columns, d = _tile(d, EVEN, SIDE)
        source, lower = _in_triangle(triangles, slot, rows, columns, d)
        value = tl.load(source, lower, 0.0)
        if scale is not None:
            factor = tl.load(scale + slot)
            value = value.to(tl.float32) * factor * factor
        value = value.to(matrices.dtype.element_ty)
        mirror = value.T
        if tl.program_id(1) == tl.program_id(2):
            value = tl.where(columns[None, :] <= rows[:, None], value, mirror)
        else:
            across, inside = _in_matrix(matrices, slot, columns, rows, d, EVEN)
            tl.store(across, mirror, inside)
        at, inside = _in_matrix(matrices, slot, rows, columns, d, EVEN)
        tl.store(at, value, inside)


@triton.jit
def pack(matrices, triangles, d, EVEN: tl.constexpr, SIDE: tl.constexpr):
    """The lower ``triangles`` of ``matrices [n, d, d]``, in their own dtype."""
    if tl.program_id(2) <= tl.program_id(1):
        slot, rows, columns, d = _tile(d, EVEN, SIDE)
        source, inside = _in_matrix(matrices, slot, rows, columns, d, EVEN)
        value = tl.load(source, inside, 0.0)
        at, lower = _in_triangle(triangles, slot, rows, columns, d)
        tl.store(at, value.to(triangles.dtype.element_ty), lower)
