"""Triton kernels: what a step does elementwise, symmetric products, and small Choleskys. Importing this needs Triton.

Elementwise kernels work on *tiles*: pieces of one block, in any order, of any number of banks, listed in a table of
int64 numbers on the device (columns ``SLOT`` to ``THIN``; addresses are in bytes, everything else counts elements). So one
launch does all blocks of all shapes. What belongs to a whole slot, such as norms, is reduced over its tiles in their order:
results are the same on every run.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

(SLOT, TENSOR, START, NUMEL, BASE, N1, N2, S0, S1, S2, FLAT, M, V, HALF, COLS, LD, THIN) = map(tl.constexpr, range(17))
WIDTH = tl.constexpr(17)
# Numbers of a step: float64, in the order of lather.fleet.NAMES.
(SIGN, L2, TAKE1, KEEP2, TAKE2, FIRST, SECOND_, EPS, KEEP, TAKE, LR, DECAY, MOMENTUM_, DAMP) = map(
    tl.constexpr, range(14)
)
LOW = tl.constexpr(2048.0)  # a number is split into a half and 1/LOW of another: 2 x 11 bits


@triton.jit
def _at(start, offset, ALIGNED: tl.constexpr):
    """Pointers ``start + offset``. Aligned: whole vectors can be loaded, which the compiler cannot see from a table."""
    pointers = start + offset
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def _in_tensor(tensors, row, index, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """Where elements ``index`` of a tile's block lie in the tensor that holds it. ``ALIGNED`` 2: in one piece; 1: in rows
    that whole vectors make up; 0: in any way."""
    start = tl.load(tensors + tl.load(row + TENSOR)).to(tl.pointer_type(DTYPE)) + tl.load(row + BASE)
    if ALIGNED == 2:
        return _at(start, index, ALIGNED)
    n1, n2 = tl.load(row + N1).to(tl.int32), tl.load(row + N2).to(tl.int32)
    i2 = index % n2
    i01 = index // n2
    i1 = i01 % n1
    i0 = (i01 // n1).to(tl.int64)
    outer = i0 * tl.load(row + S0) + i1 * tl.load(row + S1)
    if ALIGNED == 1:
        return tl.max_contiguous(tl.multiple_of(start + (outer + i2), 16), 8)
    return start + outer + i2 * tl.load(row + S2)


@triton.jit
def _in_state(row, COLUMN: tl.constexpr, index, ALIGNED: tl.constexpr):
    return _at(tl.load(row + COLUMN).to(tl.pointer_type(tl.float32)), index, ALIGNED)


@triton.jit
def _index(row, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Elements of a tile, counted from the start of its block, and which of them there are."""
    index = tl.multiple_of(tl.load(row + START).to(tl.int32), 16) + tl.arange(0, BLOCK)
    numel = tl.load(row + NUMEL).to(tl.int32)
    if ALIGNED:
        numel = tl.multiple_of(numel, 8)
    return index, index < numel


@triton.jit
def _number(numbers, NAME: tl.constexpr):
    return tl.load(numbers + NAME).to(tl.float32)


@triton.jit
def _gradient(grads, weights, row, index, inside, numbers, COUPLED, ALIGNED, GRAD, PARAM):
    g = _number(numbers, SIGN) * tl.load(_in_tensor(grads, row, index, ALIGNED, GRAD), inside, 0.0).to(tl.float32)
    if COUPLED:
        g += _number(numbers, L2) * tl.load(_in_tensor(weights, row, index, ALIGNED, PARAM), inside, 0.0).to(tl.float32)
    return g


@triton.jit
def size_of_gradients(
    tiles, grads, weights, partial, numbers,
    COUPLED: tl.constexpr, ALIGNED: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``partial[tile] = sum g^2``."""
    row = tiles + tl.program_id(0) * WIDTH
    index, inside = _index(row, ALIGNED, BLOCK)
    g = _gradient(grads, weights, row, index, inside, numbers, COUPLED, ALIGNED, GRAD, PARAM)
    tl.store(partial + tl.program_id(0), tl.sum(g * g))


@triton.jit
def _total(partial, slots, slot, n, BLOCK: tl.constexpr):
    """The sum of a slot's tiles. ``slots`` is [3, n]: the first tile, how many, and the address of a root."""
    first, count = tl.load(slots + slot), tl.load(slots + n + slot)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.load(partial + first + at, at < count, 0.0)
    return tl.sum(total)


@triton.jit
def look_at_gradients(slots, partial, active, counts, alive, scale, n, BLOCK: tl.constexpr):
    """``alive[slot]``: 1 if the slot has a gradient and that and its square are finite. ``scale``: the power of two that
    brings the norm of its gradient into [2^14, 2^15), so that halves neither overflow nor, nearly all, vanish."""
    slot = tl.program_id(0)
    total = _total(partial, slots, slot, n, BLOCK)
    fine = total < float("inf")  # false for NaN as well
    on = tl.load(active + slot) != 0
    skipped = tl.load(counts + slot).to(tl.pointer_type(tl.int32))
    tl.store(skipped, tl.load(skipped) + (on & (fine == 0)).to(tl.int32))
    tl.store(alive + slot, (on & fine).to(tl.float32))
    norm = tl.where(fine & (total > 0), tl.sqrt(total), 1.0)
    exponent = tl.minimum(tl.maximum(14.0 - tl.floor(tl.log2(norm)), -100.0), 100.0)
    tl.store(scale + slot, tl.exp2(exponent))


@triton.jit
def _three(row):
    """Of a block in halves: columns, elements between the starts of rows, and elements of the thin mode between them."""
    return tl.load(row + COLS).to(tl.int32), tl.load(row + LD).to(tl.int32), tl.load(row + THIN).to(tl.int32)


@triton.jit
def _corrections(numbers, corrections, slot, n, UNIFORM: tl.constexpr):
    """What the filter and the graft's second moment are divided by: for all slots, or for each."""
    if UNIFORM:
        return _number(numbers, FIRST), _number(numbers, SECOND_)
    return tl.load(corrections + slot), tl.load(corrections + n + slot)


@triton.jit
def _own(u, v, correction, eps, SECOND: tl.constexpr):
    """The graft's direction for the filtered gradient."""
    if SECOND:
        return u / (tl.sqrt(v / correction) + eps)
    return u


@triton.jit
def average(
    tiles, grads, weights, alive, scale, partial, flat, corrections, n, numbers, plane,
    FILTER: tl.constexpr, SECOND: tl.constexpr, FLAT_G: tl.constexpr, HALVES: tl.constexpr, UNIFORM: tl.constexpr,
    COUPLED: tl.constexpr, ALIGNED: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take in gradients: ``m <- m + take1 (g - m)``, ``v <- keep2 v + take2 g^2``.

    Also: ``partial[tile]`` is the sum of squares of the graft's direction, ``half`` the scaled gradient in ``HALVES``
    numbers of 16 bits, ``flat`` the gradient itself. A slot that is not alive keeps its state and counts as zero.
    """
    row = tiles + tl.program_id(0) * WIDTH
    slot = tl.load(row + SLOT)
    index, inside = _index(row, ALIGNED, BLOCK)
    g = _gradient(grads, weights, row, index, inside, numbers, COUPLED, ALIGNED, GRAD, PARAM)
    on = tl.load(alive + slot) != 0
    g = tl.where(on, g, 0.0)
    if FLAT_G:
        tl.store(_at(flat, tl.load(row + FLAT) + index, ALIGNED), g, inside)
    if HALVES > 0:
        half = tl.load(row + HALF).to(tl.pointer_type(tl.float16))
        if tl.load(row + HALF) != 0:
            cols, ld, thin = _three(row)
            x = g * tl.load(scale + slot)
            high = x.to(tl.float16)
            low = ((x - high.to(tl.float32)) * LOW).to(tl.float16)
            if ALIGNED and (cols == ld) & (thin == 1):
                at = _at(half, index, ALIGNED)
                tl.store(at, high, inside)
                if HALVES == 2:
                    tl.store(at + plane, low, inside)
            else:
                across = index // thin
                at = half + ((across // cols * thin + index % thin) * ld + across % cols)
                tl.store(at, high, inside)
                if HALVES == 2:
                    tl.store(at + plane, low, inside)
    first, second = _corrections(numbers, corrections, slot, n, UNIFORM)
    u = g
    if FILTER:
        at = _in_state(row, M, index, ALIGNED)
        old = tl.load(at, inside, 0.0)
        u = old + _number(numbers, TAKE1) * (g - old)
        tl.store(at, tl.where(on, u, old), inside)
        u = u / first
    v = u
    if SECOND:
        at = _in_state(row, V, index, ALIGNED)
        old = tl.load(at, inside, 0.0).to(tl.float32)
        v = _number(numbers, KEEP2) * old + _number(numbers, TAKE2) * (g * g)
        v = tl.where(on, v, old)
        tl.store(at, v, inside)
    own = _own(u, v, second, _number(numbers, EPS), SECOND)
    tl.store(partial + tl.program_id(0), tl.sum(tl.where(inside, own * own, 0.0)))


@triton.jit
def size_of_directions(tiles, flat, partial, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """``partial[tile] = sum P^2``."""
    row = tiles + tl.program_id(0) * WIDTH
    index, inside = _index(row, ALIGNED, BLOCK)
    p = tl.load(_at(flat, tl.load(row + FLAT) + index, ALIGNED), inside, 0.0)
    tl.store(partial + tl.program_id(0), tl.sum(p * p))


@triton.jit
def choose(
    slots, own, partial, alive, started, gain, corrections, n, numbers,
    GRAFT: tl.constexpr, UNIFORM: tl.constexpr, ROOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``gain[slot]``: what the preconditioned direction is multiplied by; negative: take the graft's; NaN: sit out.

    A root tells by its first element, which is positive, that it has been computed.
    """
    slot = tl.program_id(0)
    target = tl.sqrt(_total(own, slots, slot, n, BLOCK))
    size = tl.sqrt(_total(partial, slots, slot, n, BLOCK))
    first, _ = _corrections(numbers, corrections, slot, n, UNIFORM)
    value = tl.where(size > 0, target / size, 0.0) if GRAFT else 1.0 / first
    root = tl.load(slots + 2 * n + slot)
    first_element = tl.load(root.to(tl.pointer_type(ROOT)), root != 0, 0.0)
    value = tl.where((tl.load(started + slot) != 0) & (first_element > 0), value, -1.0)
    tl.store(gain + slot, tl.where(tl.load(alive + slot) != 0, value, float("nan")))


@triton.jit
def apply(
    tiles, weights, momenta, flat, plain, gain, corrections, n, numbers,
    FILTER: tl.constexpr, SECOND: tl.constexpr, UNIFORM: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    OUT: tl.constexpr, ALIGNED: tl.constexpr, PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The direction of every slot, back into ``flat`` (``OUT``) or through decay and momentum into the parameter.

    ``flat`` holds preconditioned directions, ``plain`` the gradients where there is no filter to remember them.
    """
    row = tiles + tl.program_id(0) * WIDTH
    slot = tl.load(row + SLOT)
    index, inside = _index(row, ALIGNED, BLOCK)
    factor = tl.load(gain + slot)
    at = tl.load(row + FLAT) + index
    first, second = _corrections(numbers, corrections, slot, n, UNIFORM)
    if factor >= 0:
        p = factor * tl.load(_at(flat, at, ALIGNED), inside, 0.0)
    else:
        if FILTER:
            u = tl.load(_in_state(row, M, index, ALIGNED), inside, 0.0).to(tl.float32) / first
        else:
            u = tl.load(_at(plain, at, ALIGNED), inside, 0.0)
        v = u
        if SECOND:
            v = tl.load(_in_state(row, V, index, ALIGNED), inside, 0.0).to(tl.float32)
        p = _own(u, v, second, _number(numbers, EPS), SECOND)
    on = factor == factor  # false for NaN
    if OUT:
        tl.store(_at(flat, at, ALIGNED), tl.where(on, p, float("nan")), inside)
    else:
        where = _in_tensor(weights, row, index, ALIGNED, PARAM)
        w = tl.load(where, inside, 0.0).to(tl.float32)
        go = tl.where(on, p - p, 1.0) == 0  # finite
        p += _number(numbers, DECAY) * w
        if MOMENTUM:
            memory = _in_tensor(momenta, row, index, ALIGNED, tl.float32)
            momentum = _number(numbers, MOMENTUM_)
            damped = _number(numbers, DAMP) * p
            old = tl.load(memory, inside, 0.0)
            m = momentum * old + damped
            tl.store(memory, tl.where(go, m, old), inside)
            p = damped + momentum * m if NESTEROV else m
        tl.store(where, tl.where(go, w - _number(numbers, LR) * p, w).to(PARAM), inside)


@triton.jit
def _lower(tile):
    """Row and column of a tile of a lower triangle, counted row by row."""
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit
def _grow(factor, total, slot, ri, rj, side, alive, scale, numbers, EVEN: tl.constexpr, PACKED: tl.constexpr):
    """A tile of a factor takes in a product of scaled gradients."""
    inside = (ri[:, None] < side) & (rj[None, :] < side)
    if PACKED:
        at = factor + ((ri * (ri + 1) // 2)[:, None] + rj[None, :])
        inside = inside & (rj[None, :] <= ri[:, None])
    else:
        at = factor + (ri[:, None] * side + rj[None, :])
        if EVEN:
            at = tl.multiple_of(at, (16, 16))
    s = 1 / tl.load(scale + slot)
    old = tl.load(at, inside, 0.0)
    grown = _number(numbers, KEEP) * old + _number(numbers, TAKE) * (total * s * s)
    new = tl.where(tl.load(alive + slot) != 0, grown, old)
    tl.store(at, new, inside)
    return new


@triton.jit
def gram(
    jobs, alive, scale, plane, numbers,
    HALVES: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``L <- keep L + take G G^T`` (``ROWS``) or ``G^T G`` for the jobs of a table: one triangle of tiles, mirrored, or of a
    ``PACKED`` factor the elements of the lower triangle, which is all there is. A thin box ``[rows, thin, columns]`` is a matrix
    of its rows, or of its columns.

    A job: slot, address of G in halves, elements between its rows, elements to sum over (a multiple of DEPTH), address
    of L, its side, row and column of the tile.
    """
    job = jobs + tl.program_id(0) * 8
    slot = tl.load(job)
    g = tl.load(job + 1).to(tl.pointer_type(tl.float16))
    ld, depth = tl.multiple_of(tl.load(job + 2).to(tl.int32), 64), tl.load(job + 3).to(tl.int32)
    side = tl.load(job + 5).to(tl.int32)
    if EVEN:
        side = tl.multiple_of(side, 16)
    ri = tl.load(job + 6).to(tl.int32) * SIDE + tl.arange(0, SIDE)
    rj = tl.load(job + 7).to(tl.int32) * SIDE + tl.arange(0, SIDE)
    k = tl.arange(0, DEPTH)
    if ROWS:
        at_i, at_j, stride = ri[:, None] * ld + k[None, :], rj[:, None] * ld + k[None, :], DEPTH
    else:
        at_i, at_j, stride = k[:, None] * ld + ri[None, :], k[:, None] * ld + rj[None, :], DEPTH * ld
    total = tl.zeros([SIDE, SIDE], tl.float32)
    low = tl.zeros([SIDE, SIDE], tl.float32)
    for _ in range(0, depth, DEPTH):
        x, y = tl.load(tl.multiple_of(g + at_i, (16, 16))), tl.load(tl.multiple_of(g + at_j, (16, 16)))
        total = tl.dot(x, y.T, total) if ROWS else tl.dot(x.T, y, total)
        if HALVES == 2:
            xl = tl.load(tl.multiple_of(g + plane + at_i, (16, 16)))
            yl = tl.load(tl.multiple_of(g + plane + at_j, (16, 16)))
            low = tl.dot(x, yl.T, low) if ROWS else tl.dot(x.T, yl, low)
            low = tl.dot(xl, y.T, low) if ROWS else tl.dot(xl.T, y, low)
        g += stride
    if HALVES == 2:
        total += low / LOW
        if tl.load(job + 6) == tl.load(job + 7):
            total = (total + total.T) / 2
    factor = tl.load(job + 4).to(tl.pointer_type(tl.float32))
    new = _grow(factor, total, slot, ri, rj, side, alive, scale, numbers, EVEN, PACKED)
    if not PACKED:  # noqa: SIM102 (Triton evaluates both sides of `and`)
        if tl.load(job + 6) != tl.load(job + 7):
            mirror = factor + (rj[:, None] * side + ri[None, :])
            if EVEN:
                mirror = tl.multiple_of(mirror, (16, 16))
            tl.store(mirror, new.T, (rj[:, None] < side) & (ri[None, :] < side))


@triton.jit
def thin_products(jobs, sums, plane, HALVES: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """``sums[job]``: ``G_r G_r^T`` added up over some rows of a box ``[rows, thin, columns]`` in halves.

    A job: address of the first row, rows, elements of the thin mode, elements between them (a multiple of DEPTH).
    """
    job = jobs + tl.program_id(0) * 4
    g = tl.load(job).to(tl.pointer_type(tl.float16))
    thin = tl.load(job + 2).to(tl.int32)
    ld = tl.multiple_of(tl.load(job + 3).to(tl.int32), DEPTH)
    k = tl.arange(0, SIDE)
    at, inside = g + (k[:, None] * ld + tl.arange(0, DEPTH)[None, :]), k[:, None] < thin
    total = tl.zeros([SIDE, SIDE], tl.float32)
    low = tl.zeros([SIDE, SIDE], tl.float32)
    per = ld // DEPTH
    for step in range(0, tl.load(job + 1).to(tl.int32) * per):
        here = tl.multiple_of(at + (step // per * thin * ld + step % per * DEPTH), (16, 16))
        x = tl.load(here, inside, 0.0)
        total = tl.dot(x, x.T, total)
        if HALVES == 2:
            low = tl.dot(x, tl.load(here + plane, inside, 0.0).T, low)
    if HALVES == 2:
        total += (low + low.T) / LOW
    tl.store(sums + tl.program_id(0) * SIDE * SIDE + k[:, None] * SIDE + k[None, :], total)


@triton.jit
def thin_factors(slots, sums, alive, scale, numbers, PACKED: tl.constexpr, SIDE: tl.constexpr):
    """As :func:`gram`, for thin modes, from sums over chunks. A row: slot, its first chunk, how many, address of L, its side."""
    row = slots + tl.program_id(0) * 5
    slot, first, side = tl.load(row), tl.load(row + 1), tl.load(row + 4).to(tl.int32)
    k = tl.arange(0, SIDE)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for i in range(0, tl.load(row + 2)):
        total += tl.load(sums + (first + i) * SIDE * SIDE + k[:, None] * SIDE + k[None, :])
    factor = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    _grow(factor, total, slot, k, k, side, alive, scale, numbers, False, PACKED)


@triton.jit
def _split(at, value, size, mask):
    high = value.to(tl.float16)
    tl.store(at, high, mask)
    tl.store(at + size, ((value - high.to(tl.float32)) * LOW).to(tl.float16), mask)


@triton.jit
def _joined(at, size, mask):
    return tl.load(at, mask, 0.0).to(tl.float32) + tl.load(at + size, mask, 0.0).to(tl.float32) / LOW


@triton.jit
def split(x, scale, out, d, ld, size, BLOCK: tl.constexpr):
    """A row of ``scale[n] x[n, d, d]`` into halves ``[n, 2, ld, ld]``, which hold zero beyond it; ``size`` is ``ld ld``."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + slot * d * d + row * d + column, (column < d) & (row < d), 0.0) * tl.load(scale + slot)
    _split(out + slot * 2 * size + row * ld + column, value, size, column < ld)


@triton.jit
def join(x, scale, out, d, ld, size, BLOCK: tl.constexpr):
    """A row of ``scale[n]`` times halves ``[n, 2, ld, ld]`` into ``out[n, d, d]``."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = _joined(x + slot * 2 * size + row * ld + column, size, column < d)
    tl.store(out + slot * d * d + row * d + column, value * tl.load(scale + slot), column < d)


@triton.jit
def squares(x, out, size, parts, BLOCK: tl.constexpr):
    """``out[slot, part]``: the sum of squares over a part of halves ``[n, 2, size]``."""
    part, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = part * BLOCK + tl.arange(0, BLOCK)
    value = _joined(x + slot * 2 * size + index, size, index < size)
    tl.store(out + slot * parts + part, tl.sum(value * value))


@triton.jit
def combine(x, y, terms, first, second, ld, size, n, BLOCK: tl.constexpr):
    """``first = t0 x + t1 I`` and ``second = t2 x + t3 y + t4 I`` for halves ``[n, 2, ld, ld]`` and ``terms [5, n]``."""
    row, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at, inside, on = slot * 2 * size + row * ld + column, column < ld, column == row
    a, b = _joined(x + at, size, inside), _joined(y + at, size, inside)
    terms += slot
    _split(first + at, tl.load(terms) * a + tl.where(on, tl.load(terms + n), 0.0), size, inside)
    value = tl.load(terms + 2 * n) * a + tl.load(terms + 3 * n) * b + tl.where(on, tl.load(terms + 4 * n), 0.0)
    _split(second + at, value, size, inside)


@triton.jit
def symmetric(
    x, y, add, out, d, size, tiles, alpha, beta, diagonal, ADD: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr
):
    """``alpha x y + beta add + diagonal I`` for commuting symmetric stacks in halves ``[n, 2, d, d]``, ``d`` a multiple of
    SIDE: one triangle of tiles, mirrored. Three products of halves: the fourth is below the rounding of the others."""
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
        old = tl.load(add + slot + at).to(tl.float32) + tl.load(add + slot + size + at).to(tl.float32) / LOW
        value += beta * old
    value += tl.where(ri[:, None] == rj[None, :], diagonal, 0.0)
    high = value.to(tl.float16)
    rest = ((value - high.to(tl.float32)) * LOW).to(tl.float16)
    tl.store(out + slot + at, high)
    tl.store(out + slot + size + at, rest)
    if ti != tj:
        mirror = rj[:, None] * d + ri[None, :]
        tl.store(out + slot + mirror, high.T)
        tl.store(out + slot + size + mirror, rest.T)


@triton.jit
def cholesky(a, factors, pivots, size, d, width, TILE: tl.constexpr):
    """Of the first ``width`` rows and columns of matrices ``a``, ``size`` elements apart in rows of ``d``: ``L^T`` and ``L^{-1}``
    for ``a = L L^T`` into ``factors [n, 2, TILE, TILE]``, and the squares of the diagonal of ``L``. Where these are not positive
    there are NaN in the factors.

    Elimination with ``a = U^T D U``: on the diagonal and above it ``x`` becomes ``D U``, and what that clears below has room for
    ``U^{-T}``, whose rows are the same combinations of those of the identity. Of ``a`` only that triangle is used, for to take
    factors from below would be an elimination without pivots of a matrix that rounding has made unsymmetric, which is unstable."""
    slot = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, TILE)
    r, c = index[:, None], index[None, :]
    one = tl.where(r == c, 1.0, 0.0)
    x = tl.load(a + slot * size + r * d + c, (r < width) & (c < width), one)
    for k in range(0, width):
        row = tl.sum(tl.where(r == k, x, 0.0), 0)
        factor = row[:, None] * (1 / tl.sum(tl.where(index == k, row, 0.0)))
        x = tl.where(r > k, tl.where(c == k, -factor, x - factor * row[None, :]), x)
    found = tl.sum(tl.where(r == c, x, 0.0), 1)
    tl.store(pivots + slot * d + index, found, index < width)
    scale, at = tl.sqrt_rn(found)[:, None], factors + (slot * 2 * TILE + r) * TILE + c
    tl.store(at, tl.where(r <= c, x, 0.0) / scale)
    tl.store(at + TILE * TILE, tl.where(r > c, x, one) / scale)


@triton.jit
def substitute(y, factors, out, size, d, rows, width, TILE: tl.constexpr, ROWS: tl.constexpr):
    """``out = y L^{-T}`` for matrices ``[n, rows, width]``, ``size`` elements apart in rows of ``d``; the factors are those of
    :func:`cholesky`.

    A product with an inverse leaves a residual in proportion to the condition of ``L``, which may be more than a Schur complement
    survives; a second one, with the residual, takes it down to rounding."""
    slot = tl.program_id(0).to(tl.int64)
    r, c = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    upper = tl.load(factors + (slot * 2 * TILE + r) * TILE + c)
    inverse = tl.load(factors + ((slot * 2 + 1) * TILE + c) * TILE + r)  # transposed
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    at, inside = slot * size + row.to(tl.int64) * d + c, (row < rows) & (c < width)
    value = tl.load(y + at, inside, 0.0)
    q = tl.dot(value, inverse, input_precision="ieee")
    q = tl.dot(value - tl.dot(q, upper, input_precision="ieee"), inverse, q, input_precision="ieee")
    tl.store(out + at, q, inside)
