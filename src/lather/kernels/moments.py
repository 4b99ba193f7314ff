"""Triton kernels for moments in a basis: one pass where torch takes one per operation. Importing this needs Triton.

Stacks are ``[n, numel]`` in float32. A program takes BLOCK elements of one slot.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .tiles import ONE_BY_ONE


@triton.jit(**ONE_BY_ONE)
def take_in(w, g, alive, keep, take, numel, BLOCK: tl.constexpr):
    """``w <- keep w + take g^2`` for slots that are alive. The others keep their bits."""
    slot = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, at = index < numel, slot * numel + index
    old, new = tl.load(w + at, inside, 0.0), tl.load(g + at, inside, 0.0)
    tl.store(w + at, tl.where(tl.load(alive + slot) != 0, keep * old + take * (new * new), old), inside)


@triton.jit(**ONE_BY_ONE)
def divide(x, w, means, correction, rounding, part, eps, least, numel, PER_SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """``x <- x / max(max(sqrt(w / correction), rounding mean) + part mean + eps, least)``, and NaN where the mean is NaN.

    ``PER_SLOT``: there is a correction for every slot, as there is a mean.
    """
    slot = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    mean, by = tl.load(means + slot), tl.load(correction + slot if PER_SLOT else correction)
    root = tl.sqrt_rn(tl.load(w + slot * numel + index, inside, 0.0) / by)
    low = rounding * mean
    root = tl.where(root > low, root, low) + (part * mean + eps)  # a comparison with NaN is false
    root = tl.where(root < least, least, root)
    at = x + slot * numel + index
    tl.store(at, tl.load(at, inside, 0.0) / root, inside)


@triton.jit
def turn(x, q, out, on, rows, d, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """``out[i, j] = sum_k q[k, i]^2 x[j, k]`` for ``x [n, rows, d]``, ``q [n, d, d]``, ``out [n, d, rows]``, where a slot is on.

    Products are in TF32. The slots that are not on take no time.
    """
    slot = tl.program_id(1).to(tl.int64)
    if tl.load(on + slot) != 0:
        across = tl.cdiv(rows, SIDE)
        i = tl.program_id(0) // across * SIDE + tl.arange(0, SIDE)
        j = tl.program_id(0) % across * SIDE + tl.arange(0, SIDE)
        total = tl.zeros([SIDE, SIDE], tl.float32)
        for start in range(0, d, DEPTH):
            k = start + tl.arange(0, DEPTH)
            vectors = tl.load(q + slot * d * d + k[:, None] * d + i[None, :], (k[:, None] < d) & (i[None, :] < d), 0.0)
            some = tl.load(x + slot * rows * d + j[:, None] * d + k[None, :], (j[:, None] < rows) & (k[None, :] < d), 0.0)
            total = tl.dot((vectors * vectors).T, some.T, total)
        tl.store(out + slot * rows * d + i[:, None] * rows + j[None, :], total, (i[:, None] < d) & (j[None, :] < rows))
