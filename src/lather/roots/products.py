"""The product that polynomial iterations use: float32 on most devices, halves on GPUs that run our kernels.

On a GPU float32 products are slow. So matrices are kept in halves, which are floats of 16 bits. Tensor cores multiply them with
float32 sums, and only one triangle of a symmetric result is computed. Entries must be within the range of a half, 6e-8 to 65504.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import linalg
from ..kernels import has_kernels, stages
from ..kernels.schema import Start, position
from ..linalg import symmetrize

PROBES = 16  # vectors that residuals are estimated on
DEPTH = 64  # elements of a sum that products load at a time
PARTS = 256  # of a slot, whose squares are summed one by one
TINY = 1e-46  # less than any float32 but zero, and the root of its inverse is one


def product(x: Tensor, y: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """`alpha x y + beta add` [n, d, d] for symmetric `x`, `y`, `add`, where `x` and `y` commute."""
    if x.dtype == torch.float16:
        return symmetric(x, None if x is y else y, alpha, add, beta)
    return symmetrize(linalg.product(x, y, None, add, alpha, beta))  # to the bit: an iteration may amplify a skew part


def is_in_halves(x: Tensor) -> bool:
    """Whether to compute products with this stack in halves."""
    fits = len(x) < 1 << 16 and x.shape[-1] < 1 << 15  # limits of the kernels' grid and of their 32-bit counts
    return x.dtype == torch.float32 and fits and has_kernels(x.device)


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """`scale[n] x` in halves [n, D, D], zero beyond `d`."""
    from ..kernels import dense

    n, d, _ = x.shape
    ld = -(-d // _side(d)) * _side(d)
    block, halves = _block(ld), x.new_empty((n, ld, ld), dtype=torch.float16)
    dense.encode[ld, n, -(-ld // block)](x, scale, halves, d, ld, ld * ld, BLOCK=block)
    return halves


def decode(x: Tensor, scale: Tensor, d: int) -> Tensor:
    """The matrices [n, d, d] that were encoded, times `scale[n]`."""
    from ..kernels import dense

    n, ld, _ = x.shape
    block, out = _block(ld), x.new_empty((n, d, d), dtype=torch.float32)
    dense.decode[d, n, -(-ld // block)](x, scale, out, d, ld, ld * ld, BLOCK=block)
    return out


class Beginning(NamedTuple):
    """`M`, `R` and `X` of a root in halves, and the table of `Start` with its column `back`."""

    m: Tensor
    r: Tensor
    x: Tensor
    starts: Tensor
    back: Tensor


def begin(a: Tensor, floor: Tensor, part: float, margin: float, step: Sequence[float], p: int) -> Beginning:
    """`M = (A + ridge I) / z`, `R = b M + c M^2`, `X = a I + R` for factors [n, d, d] and `a, b, c` of the first step.

    `z = margin ||A^2||_F^(1/2) + ridge`, `ridge = max(floor[n], part margin ||A^2||_F^(1/2))`.
    """
    from ..kernels import dense

    (n, d, _), (first, b, c, *_) = a.shape, step
    scale, starts = torch.empty_like(floor), floor.new_empty(n, len(Start._fields))
    dense.measure[n,](a, floor, scale, d, BLOCK=1024)
    halves = encode(a, scale.reciprocal())
    sums = floor.new_empty(n, num_tiles(halves.shape[-1]))
    square = symmetric(halves, alpha=dense.SQUARED.value, sums=sums)
    dense.plan[n,](sums, scale, floor, starts, sums.shape[1], part, margin, first, b, c, float(p), BLOCK=64)
    ld = square.shape[-1]
    block, m, r, x = _block(ld), *(torch.empty_like(square) for _ in range(3))
    dense.begin[ld, n, -(-ld // block)](a, square, starts, first, m, r, x, d, ld, ld * ld, BLOCK=block)
    return Beginning(m, r, x, starts, starts[:, position(Start, "back")])


def residual(x: Tensor, a: Tensor, starts: Tensor, p: int) -> Tensor:
    """`||(X^p M - I) V||_F / ||V||_F` [n] for roots in halves and the factors that they are of. `V` are signs."""
    from ..kernels import dense

    (n, d, _), ld, rows = a.shape, x.shape[-1], 64
    programs = -(-d // rows)
    y, sums = a.new_empty(2, n, d, PROBES), a.new_empty(n, programs)
    for k in range(p + 1):
        damped = k == p // 2  # M in the middle: otherwise y would span the whole range of X^p
        matrices, sizes = (a, (d, d, d * d)) if damped else (x, (d, ld, ld * ld))
        dense.probe[programs, n](
            matrices, y[(k + 1) % 2], starts, sums if k == p else y[k % 2], *sizes,
            FIRST=k == 0, LAST=k == p, DAMPED=damped, PROBES=PROBES, ROWS=rows, DEPTH=DEPTH, num_warps=4,
        )  # fmt: skip
    return (sums.sum(1) / (d * PROBES)).sqrt()


# Polar factors.


def fits_halves(x: Tensor) -> bool:
    """Whether products can be computed in halves for this stack of matrices."""
    n, rows, columns = (-(-side // 128) * 128 for side in x.shape)
    small = n < 1 << 16 and min(rows, columns) < 1 << 15 and rows * columns < 1 << 30  # kernels count in 32 bits
    return x.dtype == torch.float32 and small and has_kernels(x.device)


def unit_halves(x: Tensor, least: float) -> Tensor:
    """Matrices [n, rows, columns] over their Frobenius norms, in halves, padded with zeros to whole tiles of :func:`symmetric`
    on the smaller side.

    A norm below `least` counts as `least`. Zeros stay zeros, and what is not finite makes its slot not finite.
    """
    from ..kernels import dense

    n, rows, columns = x.shape
    numel, block, side = rows * columns, 4096, _side(min(rows, columns))
    parts = min(PARTS, -(-numel // block))
    squares = x.new_empty((n, parts), dtype=torch.float64)
    dense.squares_in_parts[parts, n](x.contiguous(), squares, numel, parts, BLOCK=block, num_warps=8)
    units = (DEPTH, side) if rows > columns else (side, DEPTH)
    padded = [-(-d // unit) * unit for d, unit in zip((rows, columns), units, strict=True)]
    out, block = x.new_empty((n, *padded), dtype=torch.float16), _block(padded[1])
    scale = squares.sum(1).clamp_(min=max(least, TINY) ** 2).pow_(-0.25)  # the square root of the inverse of the norm
    dense.halve[padded[0], n, -(-padded[1] // block)](x.contiguous(), scale, out, rows, columns, *padded, BLOCK=block)
    return out


def symmetric(
    x: Tensor,
    y: Tensor | None = None,
    alpha: float = 1.0,
    add: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    sums: Tensor | None = None,
) -> Tensor:
    """`alpha x y^T + beta add + diagonal I` [n, d, d] in halves, for `x` and `y` [n, d, k] in halves with a symmetric product.

    `y` is `x` by default. Both may be transposed views of the same kind. `d` and `k` are whole tiles, as those of :func:`encode`
    and :func:`unit_halves`. `sums` [n, :func:`num_tiles`] gets the sum of squares of every tile.
    """
    from ..kernels import dense

    n, d, depth = x.shape
    side, tiles, out = _side(d), num_tiles(d), x.new_empty((n, d, d))
    size, row, step = x.stride()
    dense.symmetric[n * tiles,](
        x, x if y is None else y, x if add is None else add, out, sums, d, depth, row, step, size, tiles, alpha, beta, diagonal,
        SAME=y is None, ADD=add is not None, SHIFTED=diagonal != 0, SUMS=sums is not None, SIDE=side, DEPTH=DEPTH,
        num_warps=8 if side == 128 else 4, num_stages=stages(x.device),
    )  # fmt: skip
    return out


def num_tiles(d: int) -> int:
    """Tiles in the lower triangle of a symmetric product."""
    return d // _side(d) * (d // _side(d) + 1) // 2


def _block(ld: int) -> int:
    return min(1024, 1 << (ld - 1).bit_length())


def _side(d: int) -> int:
    return 64 if d <= 192 else 128
