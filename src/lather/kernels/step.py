"""Triton kernels of a step: gradients, averages, factors, directions, parameters. Importing this needs Triton.

Elementwise kernels work on *tiles*. A tile is a piece of one block. A table on the device lists the tiles of all blocks of
all banks in any order, one :class:`~lather.kernels.schema.Tile` per row, so one launch handles blocks of every shape. Values
of a whole slot, such as norms, are summed over its tiles in a fixed order, so results are the same on every run.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .schema import SMALLEST_NORM, Corrections, FactorJob, Moment, Numbers, RankOne, SlotTable, ThinChunk, ThinFactor, Tile
from .tiles import LOW, ONE_BY_ONE, at_offset, columns, elements, in_state, in_tensor, low_half, moved, width

GRADIENT_SIGN, COUPLED_DECAY = columns(Numbers, "gradient_sign", "coupled_decay")
FILTER_TAKE, DIRECTION_TAKE = columns(Numbers, "filter_take", "direction_take")
MOMENT_KEEP, MOMENT_TAKE, GRAFT_EPS = columns(Numbers, "moment_keep", "moment_take", "graft_eps")
FILTER_CORRECTION, MOMENT_CORRECTION = columns(Numbers, "filter_correction", "moment_correction")
FACTOR_KEEP, FACTOR_TAKE, LR, DECAY = columns(Numbers, "factor_keep", "factor_take", "lr", "decay")
MOMENTUM_KEEP, MOMENTUM_TAKE = columns(Numbers, "momentum_keep", "momentum_take")

FILTER_CORRECTIONS, MOMENT_CORRECTIONS = columns(Corrections, "filter", "moment")
FIRST_TILE, NUM_TILES, NUMEL = columns(SlotTable, "first_tile", "num_tiles", "numel")
ROOT_ADDRESS, BROKEN_ADDRESS = columns(SlotTable, "root_address", "broken_address")

TILE_WIDTH, JOB_WIDTH, CHUNK_WIDTH, THIN_WIDTH = width(Tile), width(FactorJob), width(ThinChunk), width(ThinFactor)
SLOT, FLAT_OFFSET, HALF_ADDRESS = columns(Tile, "slot", "flat_offset", "half_address")
COLUMNS, PADDED_COLUMNS, THIRD_SIZE = columns(Tile, "columns", "padded_columns", "third_size")
FILTER_ADDRESS, MOMENT_ADDRESS, ROW_SIZE = columns(Tile, "filter_address", "moment_address", "row_size")
JOB_SLOT, JOB_HALF_ADDRESS, JOB_ROW_STRIDE, JOB_DEPTH = columns(FactorJob, "slot", "half_address", "row_stride", "depth")
JOB_FACTOR_ADDRESS, JOB_SIDE = columns(FactorJob, "factor_address", "side")
JOB_TILE_ROW, JOB_TILE_COLUMN = columns(FactorJob, "tile_row", "tile_column")
CHUNK_HALF_ADDRESS, CHUNK_NUM_ROWS = columns(ThinChunk, "half_address", "num_rows")
CHUNK_THIRD_SIZE, CHUNK_PADDED_COLUMNS = columns(ThinChunk, "third_size", "padded_columns")
THIN_SLOT, THIN_FIRST_CHUNK, THIN_NUM_CHUNKS = columns(ThinFactor, "slot", "first_chunk", "num_chunks")
THIN_FACTOR_ADDRESS, THIN_SIDE = columns(ThinFactor, "factor_address", "side")
RANK_ONE_WIDTH = width(RankOne)
ADDRESS, FIRST_ADDRESS, SECOND_ADDRESS, THIRD_ADDRESS = columns(
    RankOne, "address", "first_address", "second_address", "third_address"
)
FIRST_SIDE, SECOND_SIDE, THIRD_SIDE = columns(RankOne, "first_side", "second_side", "third_side")
FIRST_STRIDE, SECOND_STRIDE, THIRD_STRIDE = columns(RankOne, "first_stride", "second_stride", "third_stride")

STORED, RANK_ONE = tl.constexpr(int(Moment.STORED)), tl.constexpr(int(Moment.RANK_ONE))
TINY = tl.constexpr(2.0**-126)  # the smallest normal number
SMALLEST = tl.constexpr(SMALLEST_NORM)


@triton.jit
def _number(numbers, NAME: tl.constexpr):
    return tl.load(numbers + NAME).to(tl.float32)


@triton.jit
def _gradient(grads, weights, row, index, inside, numbers, COUPLED, ALIGNED, GRAD, PARAM):
    """Gradients with their sign, plus coupled weight decay."""
    g = tl.load(in_tensor(grads, row, index, ALIGNED, GRAD), inside, 0.0).to(tl.float32)
    g = tl.where(_number(numbers, GRADIENT_SIGN) < 0, -g, g)
    if COUPLED:  # one product, because of two the compiler rounds one, and not the same for every dtype
        decay = _number(numbers, COUPLED_DECAY)
        g += decay * tl.load(in_tensor(weights, row, index, ALIGNED, PARAM), inside, 0.0).to(tl.float32)
    return g


@triton.jit(**ONE_BY_ONE)
def size_of_gradients(
    tiles, grads, weights, partial, numbers,
    COUPLED: tl.constexpr, ALIGNED: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``partial[tile] = sum g^2``."""
    row = tiles + tl.program_id(0) * TILE_WIDTH
    index, inside = elements(row, ALIGNED, BLOCK)
    g = _gradient(grads, weights, row, index, inside, numbers, COUPLED, ALIGNED, GRAD, PARAM)
    tl.store(partial + tl.program_id(0), tl.sum(g * g))


@triton.jit
def _total(partial, slots, slot, n, BLOCK: tl.constexpr):
    """The sum over the tiles of a slot."""
    first, count = tl.load(slots + FIRST_TILE * n + slot), tl.load(slots + NUM_TILES * n + slot)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.load(partial + first + at, at < count, 0.0)
    return tl.sum(total)


@triton.jit(**ONE_BY_ONE)
def look_at_gradients(slots, partial, active, counts, alive, scale, n, numbers, BLOCK: tl.constexpr):
    """``alive[slot]`` is 1 if the slot has a gradient, both the gradient and its square are finite, and the learning rate is valid.

    ``scale[slot]`` is the power of two that brings the gradient's norm into [2^14, 2^15): halves do not overflow, and few
    vanish. ``counts`` are addresses of counters of steps that were skipped.
    """
    slot = tl.program_id(0)
    total = _total(partial, slots, slot, n, BLOCK)
    lr = _number(numbers, LR)  # the host has checked it, unless it is a tensor on the device
    fine = (total < float("inf")) & (lr >= 0) & (lr < float("inf"))  # false for NaN as well
    on = tl.load(active + slot) != 0
    skipped = tl.load(counts + slot).to(tl.pointer_type(tl.int32))
    tl.store(skipped, tl.load(skipped) + (on & (fine == 0)).to(tl.int32))
    tl.store(alive + slot, (on & fine).to(tl.float32))
    norm = tl.where(fine & (total > 0), tl.sqrt(total), 1.0)
    exponent = tl.minimum(tl.maximum(14.0 - tl.floor(tl.log2(norm)), -100.0), 100.0)
    tl.store(scale + slot, tl.exp2(exponent))


@triton.jit
def _norm(x):
    """Of a vector. No square overflows or vanishes."""
    largest = tl.max(tl.abs(x), 0)
    x = x / tl.where(largest > 0, largest, 1.0)
    return largest * tl.sqrt(tl.sum(x * x, 0))


@triton.jit(**ONE_BY_ONE)
def norms_of_slots(slots, partial, norms, n, BLOCK: tl.constexpr):
    """``norms[slot]``, from the norms of its tiles."""
    slot = tl.program_id(0)
    first, count = tl.load(slots + FIRST_TILE * n + slot), tl.load(slots + NUM_TILES * n + slot)
    norm = 0.0
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        some = _norm(tl.load(partial + first + at, at < count, 0.0))
        large, small = tl.maximum(norm, some), tl.minimum(norm, some)
        ratio = small / tl.where(large > 0, large, 1.0)
        norm = large * tl.sqrt(1.0 + ratio * ratio)
    tl.store(norms + slot, norm)


@triton.jit
def _corrections(numbers, corrections, slot, n, UNIFORM: tl.constexpr):
    """The bias corrections of the filter and the graft's second moment. ``UNIFORM``: they are the same for all slots."""
    if UNIFORM:
        return _number(numbers, FILTER_CORRECTION), _number(numbers, MOMENT_CORRECTION)
    at_filter, at_moment = corrections + FILTER_CORRECTIONS * n, corrections + MOMENT_CORRECTIONS * n
    return tl.load(at_filter + slot), tl.load(at_moment + slot)


@triton.jit
def _own(u, v, correction, eps, MOMENT: tl.constexpr):
    """The graft's own direction for the filtered gradient. NaN where the moment is not finite."""
    if MOMENT:
        u = u / (tl.sqrt(v * (1 / correction)) + eps)
        fine = (v < float("inf")) & (u == u)
        if MOMENT == RANK_ONE:
            u = tl.minimum(tl.maximum(u, -1.0), 1.0)  # on a GPU of NaN too, which would be 1 or -1
        u = tl.where(fine, u, float("nan"))
    return u


@triton.jit
def _own_of_tile(row, filtered, flat_index, index, inside, corrections, slot, n, numbers, MOMENT, IN_STATE, UNIFORM, ALIGNED):
    """The graft's own direction for a tile. Filtered gradients are ``IN_STATE``, or in ``filtered``."""
    if IN_STATE:
        u = tl.load(in_state(row, FILTER_ADDRESS, index, ALIGNED, tl.float32), inside, 0.0).to(tl.float32)
    else:
        u = tl.load(at_offset(filtered, flat_index, ALIGNED), inside, 0.0)
    first, second = _corrections(numbers, corrections, slot, n, UNIFORM)
    u *= 1 / first
    v = u
    if MOMENT == STORED:
        v = tl.load(in_state(row, MOMENT_ADDRESS, index, ALIGNED, tl.float32), inside, 0.0).to(tl.float32)
    if MOMENT == RANK_ONE:
        shares, row_size = tl.load(row + MOMENT_ADDRESS).to(tl.pointer_type(tl.float32)), tl.load(row + ROW_SIZE).to(tl.uint32)
        number = index.to(tl.uint32) // row_size
        at_share = shares + (index.to(tl.uint32) - number * row_size)
        if ALIGNED:
            at_share = tl.max_contiguous(tl.multiple_of(at_share, 16), 8)
        v = tl.load(shares + (row_size + number), inside, 0.0) * tl.load(at_share, inside, 0.0)
    return _own(u, v, second, _number(numbers, GRAFT_EPS), MOMENT)


@triton.jit(**ONE_BY_ONE)
def average(
    tiles, grads, weights, alive, scale, partial, norms, plain, filtered, corrections, n, numbers, plane,
    FILTER: tl.constexpr, LOOKS_AHEAD: tl.constexpr, SECOND: tl.constexpr, PLAIN: tl.constexpr, HALVES: tl.constexpr,
    UNIFORM: tl.constexpr, COUPLED: tl.constexpr, ALIGNED: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take in gradients: ``m <- m + filter_take (g - m)`` and ``v <- moment_keep v + moment_take g^2``.

    ``partial[tile]`` becomes the sum of squares of the graft's direction, ``plain`` the gradient (``PLAIN``). The filtered gradient
    is the new ``m``. If it ``LOOKS_AHEAD`` it is another mixture of ``m`` and ``g``, or ``m`` before it is rounded to the dtype
    that it is ``KEPT`` in, and goes into ``filtered``. ``norms[tile]``, if asked for, becomes its norm within the tile. The scaled
    gradient goes into halves: ``HALVES`` says how many numbers of 16 bits, and low halves lie ``plane`` elements behind high ones.
    A slot that is not alive keeps its state, and its gradient counts as zero.
    """
    row = tiles + tl.program_id(0) * TILE_WIDTH
    slot = tl.load(row + SLOT)
    index, inside = elements(row, ALIGNED, BLOCK)
    g = _gradient(grads, weights, row, index, inside, numbers, COUPLED, ALIGNED, GRAD, PARAM)
    on = tl.load(alive + slot) != 0
    g = tl.where(on, g, 0.0)
    if PLAIN:
        tl.store(at_offset(plain, tl.load(row + FLAT_OFFSET) + index, ALIGNED), g, inside)
    half = tl.load(row + HALF_ADDRESS).to(tl.pointer_type(tl.float16))
    if tl.load(row + HALF_ADDRESS) != 0:
        used, padded = tl.load(row + COLUMNS).to(tl.int32), tl.load(row + PADDED_COLUMNS).to(tl.int32)
        third = tl.load(row + THIRD_SIZE).to(tl.int32)
        x = g * tl.load(scale + slot)
        high = x.to(tl.float16)
        low = low_half(x, high)
        if ALIGNED and (used == padded) & (third == 1):
            at = at_offset(half, index, ALIGNED)
            tl.store(at, high, inside)
            if HALVES == 2:
                tl.store(at + plane, low, inside)
        else:
            across = index // third
            at = half + ((across // used * third + index % third) * padded + across % used)
            tl.store(at, high, inside)
            if HALVES == 2:
                tl.store(at + plane, low, inside)
    first, second = _corrections(numbers, corrections, slot, n, UNIFORM)
    u = g
    if FILTER:
        at = in_state(row, FILTER_ADDRESS, index, ALIGNED, KEPT)
        old = tl.load(at, inside, 0.0).to(tl.float32)
        u = old + _number(numbers, FILTER_TAKE) * (g - old)
        tl.store(at, tl.where(on, u, old).to(KEPT), inside)
        if LOOKS_AHEAD:
            u = old + _number(numbers, DIRECTION_TAKE) * (g - old)
            tl.store(at_offset(filtered, tl.load(row + FLAT_OFFSET) + index, ALIGNED), u, inside)
    if norms is not None:
        tl.store(norms + tl.program_id(0), _norm(tl.where(inside, u, 0.0)))
    if FILTER:
        u = u / first
    v = u
    if SECOND:
        at = in_state(row, MOMENT_ADDRESS, index, ALIGNED, tl.float32)
        old = tl.load(at, inside, 0.0).to(tl.float32)
        v = _number(numbers, MOMENT_KEEP) * old + _number(numbers, MOMENT_TAKE) * (g * g)
        v = tl.where(on, v, old)
        tl.store(at, v, inside)
    own = _own(u, v, second, _number(numbers, GRAFT_EPS), STORED if SECOND else 0)
    tl.store(partial + tl.program_id(0), tl.sum(tl.where(inside, own * own, 0.0)))


@triton.jit
def _on_diagonal(factor, i, side, stride):
    """Elements ``i`` of the diagonal of a factor."""
    at = tl.where(stride == 0, i * (i + 3) // 2, i * stride)
    return tl.load(factor.to(tl.pointer_type(tl.float32)) + at, (factor != 0) & (i < side), 0.0)


@triton.jit
def _trace(factor, side, stride, BLOCK: tl.constexpr):
    """The sum of the diagonal, or a little more if it is zero."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, side, BLOCK):
        total += _on_diagonal(factor, first + tl.arange(0, BLOCK), side, stride)
    whole = tl.sum(total)
    return tl.where(whole < TINY, TINY, whole)  # NaN stays NaN


@triton.jit
def rank_one_moments(jobs, BLOCK: tl.constexpr):
    """The vectors of every :class:`~lather.kernels.schema.RankOne`."""
    job = jobs + tl.program_id(0) * RANK_ONE_WIDTH
    out = tl.load(job + ADDRESS).to(tl.pointer_type(tl.float32))
    rows, second, third = (
        tl.load(job + FIRST_SIDE).to(tl.int32), tl.load(job + SECOND_SIDE).to(tl.int32), tl.load(job + THIRD_SIDE).to(tl.int32),
    )  # fmt: skip
    of_second, second_stride = tl.load(job + SECOND_ADDRESS), tl.load(job + SECOND_STRIDE).to(tl.int32)
    of_third, third_stride = tl.load(job + THIRD_ADDRESS), tl.load(job + THIRD_STRIDE).to(tl.int32)
    second_trace, third_trace = _trace(of_second, second, second_stride, BLOCK), _trace(of_third, third, third_stride, BLOCK)
    for first in range(0, second * third, BLOCK):
        i = first + tl.arange(0, BLOCK)
        share = tl.where(of_second != 0, _on_diagonal(of_second, i // third, second, second_stride) / second_trace, 1.0)
        share *= tl.where(of_third != 0, _on_diagonal(of_third, i % third, third, third_stride) / third_trace, 1.0)
        tl.store(out + i, share, i < second * third)
    for first in range(0, rows, BLOCK):
        i = first + tl.arange(0, BLOCK)
        of_rows = _on_diagonal(tl.load(job + FIRST_ADDRESS), i, rows, tl.load(job + FIRST_STRIDE).to(tl.int32))
        tl.store(out + second * third + i, of_rows, i < rows)


@triton.jit(**ONE_BY_ONE)
def size_of_directions(
    tiles, flat, filtered, partial, own, corrections, n, numbers,
    MOMENT: tl.constexpr, IN_STATE: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``partial[tile] = sum P^2``. ``own[tile]`` becomes that of the graft's direction, if its moment is of rank one."""
    row = tiles + tl.program_id(0) * TILE_WIDTH
    slot = tl.load(row + SLOT)
    index, inside = elements(row, ALIGNED, BLOCK)
    at = tl.load(row + FLAT_OFFSET) + index
    p = tl.load(at_offset(flat, at, ALIGNED), inside, 0.0)
    if MOMENT == RANK_ONE:  # before the sum of p, so that all loads begin before the first sum
        u = _own_of_tile(
            row, filtered, at, index, inside, corrections, slot, n, numbers, MOMENT, IN_STATE, UNIFORM, ALIGNED
        )  # fmt: skip
        tl.store(own + tl.program_id(0), tl.sum(tl.where(inside, u * u, 0.0)))
    tl.store(partial + tl.program_id(0), tl.sum(p * p))


@triton.jit(**ONE_BY_ONE)
def choose(
    slots, own, partial, alive, started, back, gain, corrections, n, numbers,
    GRAFT: tl.constexpr, HALVED: tl.constexpr, RMS: tl.constexpr, LINEAR: tl.constexpr, UNIFORM: tl.constexpr,
    ROOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``gain[slot]`` multiplies the preconditioned direction. Negative: it multiplies the graft's, as it does if the norm of the
    preconditioned one overflows or is less than ``SMALLEST``. NaN: the slot skips the step, or its direction is not finite.

    ``HALVED``: the preconditioned direction has to be multiplied by ``back[slot]``, which a graft does not notice. ``RMS``: the
    root mean square that the graft gives a direction, or 0 if it has a length of its own. ``LINEAR``: the bias of the filtered
    gradient is still in the preconditioned direction.
    """
    slot = tl.program_id(0)
    target = tl.sqrt(_total(own, slots, slot, n, BLOCK))
    instead = -1.0
    if RMS > 0:
        length = RMS * tl.sqrt(tl.load(slots + NUMEL * n + slot).to(tl.float32))
        instead = -tl.where(target > 0, tl.maximum(length / target, 1e-37), 1.0)  # not zero, which is not negative
        target = tl.where((target > 0) & (target < float("inf")), length, 0.0)
    value = 1.0
    if LINEAR:
        first, _ = _corrections(numbers, corrections, slot, n, UNIFORM)
        value = 1.0 / first
    if HALVED:
        value *= tl.load(back + slot)
    if GRAFT:
        size = tl.sqrt(_total(partial, slots, slot, n, BLOCK))
        value = target / size  # NaN stays NaN
        value = tl.where((size < SMALLEST) | (size == float("inf")), instead, value)
    root = tl.load(slots + ROOT_ADDRESS * n + slot)
    first_element = tl.load(root.to(tl.pointer_type(ROOT)), root != 0, 0.0)  # positive once the root has been computed
    value = tl.where((tl.load(started + slot) != 0) & (first_element > 0), value, instead)
    tl.store(gain + slot, tl.where(tl.load(alive + slot) != 0, value, float("nan")))


@triton.jit(**ONE_BY_ONE)
def apply(
    tiles, weights, momenta, flat, filtered, slots, alive, gain, corrections, n, numbers,
    MOMENT: tl.constexpr, IN_STATE: tl.constexpr, UNIFORM: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    OUT: tl.constexpr, ALIGNED: tl.constexpr, PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The direction of every slot. It goes back into ``flat`` (``OUT``), or through decay and momentum into the parameter.

    ``flat`` holds preconditioned directions. A slot that takes part and has a direction that is not finite is marked as broken.
    Elements that would not stay finite do not change, and momentum that is not finite starts anew.
    """
    row = tiles + tl.program_id(0) * TILE_WIDTH
    slot = tl.load(row + SLOT)
    index, inside = elements(row, ALIGNED, BLOCK)
    factor = tl.load(gain + slot)
    at = tl.load(row + FLAT_OFFSET) + index
    if factor >= 0:
        p = factor * tl.load(at_offset(flat, at, ALIGNED), inside, 0.0)
    else:
        u = _own_of_tile(
            row, filtered, at, index, inside, corrections, slot, n, numbers, MOMENT, IN_STATE, UNIFORM, ALIGNED
        )  # fmt: skip
        p = -factor * u
    p = tl.where(factor == factor, p, float("nan"))
    wrong = tl.max((inside & (p - p != 0)).to(tl.int32), 0)
    broken = tl.load(slots + BROKEN_ADDRESS * n + slot).to(tl.pointer_type(tl.int32))
    tl.store(broken, 1, (wrong != 0) & (tl.load(alive + slot) != 0))  # every tile of the slot writes the same
    if OUT:
        tl.store(at_offset(flat, at, ALIGNED), p, inside)
    else:
        where = in_tensor(weights, row, index, ALIGNED, PARAM)
        w = tl.load(where, inside, 0.0).to(tl.float32)
        old = w
        if MOMENTUM:
            memory = in_tensor(momenta, row, index, ALIGNED, tl.float32)
            old = tl.load(memory, inside, 0.0)
        keep, take = _number(numbers, MOMENTUM_KEEP), _number(numbers, MOMENTUM_TAKE)
        w, m = moved(w, p, old, _number(numbers, LR), _number(numbers, DECAY), keep, take, MOMENTUM, NESTEROV)
        if MOMENTUM:
            tl.store(memory, m, inside)
        tl.store(where, w.to(PARAM), inside)


@triton.jit
def _halves(tile):
    """The left and the right columns of a tile."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, [rows, 2, columns]), [0, 2, 1]))


@triton.jit
def _grow(
    factor, total, slot, ri, first_column, side, mirrored, alive, scale, numbers, EVEN: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """A tile of a factor takes in ``total``, a product of scaled gradients. Its mirror image does too if it is ``mirrored``."""
    rj = first_column + tl.arange(0, total.shape[1])
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
    grown = _number(numbers, FACTOR_KEEP) * old + _number(numbers, FACTOR_TAKE) * (total * s * s)
    new = tl.where(tl.load(alive + slot) != 0, grown, old)
    tl.store(at, new, inside)
    if not PACKED:  # noqa: SIM102 (Triton evaluates both sides of `and`)
        if mirrored:
            mirror = factor + (rj[:, None] * side + ri[None, :])
            if EVEN:
                mirror = tl.multiple_of(mirror, (16, 16))
            tl.store(mirror, new.T, (rj[:, None] < side) & (ri[None, :] < side))


@triton.jit(**ONE_BY_ONE)
def gram(
    jobs, alive, scale, plane, numbers,
    HALVES: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``L <- factor_keep L + factor_take G G^T`` (``ROWS``) or ``G^T G``, for every :class:`~lather.kernels.schema.FactorJob`.

    Only the tiles of the lower triangle are computed; the others are mirror images. A ``PACKED`` factor has no others.
    A block ``[rows, third, columns]`` counts as a matrix of its rows, or of its columns. ``EVEN``: the side is a multiple of 16.
    """
    job = jobs + tl.program_id(0) * JOB_WIDTH
    slot = tl.load(job + JOB_SLOT)
    g = tl.load(job + JOB_HALF_ADDRESS).to(tl.pointer_type(tl.float16))
    stride, depth = (tl.multiple_of(tl.load(job + JOB_ROW_STRIDE).to(tl.int32), 64), tl.load(job + JOB_DEPTH).to(tl.int32))
    side = tl.load(job + JOB_SIDE).to(tl.int32)
    if EVEN:
        side = tl.multiple_of(side, 16)
    ri = tl.load(job + JOB_TILE_ROW).to(tl.int32) * SIDE + tl.arange(0, SIDE)
    rj = tl.load(job + JOB_TILE_COLUMN).to(tl.int32) * SIDE + tl.arange(0, SIDE)
    k = tl.arange(0, DEPTH)
    if ROWS:
        at_i, at_j, step = ri[:, None] * stride + k[None, :], rj[:, None] * stride + k[None, :], DEPTH
    else:
        at_i, at_j, step = k[:, None] * stride + ri[None, :], k[:, None] * stride + rj[None, :], DEPTH * stride
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
        g += step
    if HALVES == 2:
        total += low / LOW
        if tl.load(job + JOB_TILE_ROW) == tl.load(job + JOB_TILE_COLUMN):
            total = (total + total.T) / 2
    factor = tl.load(job + JOB_FACTOR_ADDRESS).to(tl.pointer_type(tl.float32))
    tile_row, tile_column = tl.load(job + JOB_TILE_ROW).to(tl.int32), tl.load(job + JOB_TILE_COLUMN).to(tl.int32)
    column, mirrored = tile_column * SIDE, tile_row != tile_column
    if SIDE < 128:
        _grow(factor, total, slot, ri, column, side, mirrored, alive, scale, numbers, EVEN, PACKED)
    else:  # columns a quarter at a time: with fewer registers, two programs run side by side
        quarter: tl.constexpr = SIDE // 4
        left, right = _halves(total)
        first, second = _halves(left)
        third, fourth = _halves(right)
        _grow(factor, first, slot, ri, column, side, mirrored, alive, scale, numbers, EVEN, PACKED)
        _grow(factor, second, slot, ri, column + quarter, side, mirrored, alive, scale, numbers, EVEN, PACKED)
        _grow(factor, third, slot, ri, column + 2 * quarter, side, mirrored, alive, scale, numbers, EVEN, PACKED)
        _grow(factor, fourth, slot, ri, column + 3 * quarter, side, mirrored, alive, scale, numbers, EVEN, PACKED)


@triton.jit
def thin_products(chunks, sums, plane, HALVES: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """``sums[chunk]``: ``G_r G_r^T`` added up over the rows ``r`` of a :class:`~lather.kernels.schema.ThinChunk`."""
    chunk = chunks + tl.program_id(0) * CHUNK_WIDTH
    g = tl.load(chunk + CHUNK_HALF_ADDRESS).to(tl.pointer_type(tl.float16))
    third = tl.load(chunk + CHUNK_THIRD_SIZE).to(tl.int32)
    padded = tl.multiple_of(tl.load(chunk + CHUNK_PADDED_COLUMNS).to(tl.int32), DEPTH)
    k = tl.arange(0, SIDE)
    at, inside = g + (k[:, None] * padded + tl.arange(0, DEPTH)[None, :]), k[:, None] < third
    total = tl.zeros([SIDE, SIDE], tl.float32)
    low = tl.zeros([SIDE, SIDE], tl.float32)
    per = padded // DEPTH
    for step in range(0, tl.load(chunk + CHUNK_NUM_ROWS).to(tl.int32) * per):
        here = tl.multiple_of(at + (step // per * third * padded + step % per * DEPTH), (16, 16))
        x = tl.load(here, inside, 0.0)
        total = tl.dot(x, x.T, total)
        if HALVES == 2:
            low = tl.dot(x, tl.load(here + plane, inside, 0.0).T, low)
    if HALVES == 2:
        total += (low + low.T) / LOW
    tl.store(sums + tl.program_id(0) * SIDE * SIDE + k[:, None] * SIDE + k[None, :], total)


@triton.jit(**ONE_BY_ONE)
def thin_factors(factors, sums, alive, scale, numbers, PACKED: tl.constexpr, SIDE: tl.constexpr):
    """As :func:`gram`, for third modes: every :class:`~lather.kernels.schema.ThinFactor` takes in the sums of its chunks."""
    row = factors + tl.program_id(0) * THIN_WIDTH
    slot, first, side = tl.load(row + THIN_SLOT), tl.load(row + THIN_FIRST_CHUNK), tl.load(row + THIN_SIDE).to(tl.int32)
    k = tl.arange(0, SIDE)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for i in range(0, tl.load(row + THIN_NUM_CHUNKS)):
        total += tl.load(sums + (first + i) * SIDE * SIDE + k[:, None] * SIDE + k[None, :])
    factor = tl.load(row + THIN_FACTOR_ADDRESS).to(tl.pointer_type(tl.float32))
    _grow(factor, total, slot, k, 0, side, False, alive, scale, numbers, False, PACKED)
