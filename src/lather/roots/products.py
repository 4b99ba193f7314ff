"""The product that polynomial iterations use: float32 on most devices, halves on GPUs that run our kernels.

On a GPU float32 products are slow, and TF32 loses what is below a thousandth of the largest entry. So a matrix is split into
two halves of 16 bits, which hold 22 bits together. Tensor cores multiply them with float32 sums, in three products of halves.
Only one triangle of the result is computed. On an H200 and for d = 1024 that takes a sixth of the time of float32. Entries
must be within the range of a half, 6e-8 to 65504.

Polar factors are used with few digits. Their products take one half for each number (:func:`unit_halves`, :func:`gram16`).
"""

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

from .. import linalg
from ..kernels.schema import CombineTerms
from ..linalg import symmetrize

ENOUGH = 160 << 10  # bytes of shared memory for three stages, which take 128 KiB on an A100 and 192 KiB on an H200
DEPTH = 64  # elements of a sum that products load at a time
PARTS = 256  # of a slot, whose squares are summed one by one
TINY = 1e-46  # less than any float32 but zero, and the root of its inverse is one


def product(
    x: Tensor, y: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """`alpha x y + beta add + diagonal I` [n, d, d] for symmetric `x`, `y`, `add`, where `x` and `y` commute."""
    if x.dtype == torch.float16:
        return _product_of_halves(x, y, alpha, add, beta, diagonal)
    z = symmetrize(linalg.product(x, y, None, add, alpha, beta))  # to the bit: an iteration may amplify a skew part
    if diagonal:
        z.diagonal(dim1=1, dim2=2).add_(diagonal)
    return z


def matrix_power(x: Tensor, p: int) -> Tensor:
    """`x^p` for p >= 1."""
    return linalg.matrix_power(x, p, product)


def times_power(x: Tensor, p: int, y: Tensor) -> Tensor:
    """`x^p y` for p >= 1 and `x`, `y` that commute, as `x^(p/2) (x^(p/2) y)`: each factor spans half the decades of `x^p`."""
    if p % 2:
        return product(x, times_power(x, p - 1, y) if p > 1 else y)
    half = matrix_power(x, p // 2)
    return product(half, product(half, y))


def product_count(p: int) -> int:
    """Products in `times_power(x, p, y)`, which are as few as by repeated squaring."""
    return p.bit_length() + p.bit_count() - 1


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run: they need Triton and an NVIDIA GPU, Ampere or later. A GPU that is not in use counts as one."""
    if device.type != "cuda" or torch.version.hip or not _has_triton():
        return False
    used = torch.cuda.is_initialized() and (device.index or 0) < torch.cuda.device_count()  # type: ignore[no-untyped-call]
    return not used or torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def stages(device: torch.device) -> int:
    """How far ahead a kernel with products loads its tiles: two stages, or three where there is enough shared memory."""
    if device.type != "cuda":
        return 2
    memory = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return 3 if memory >= ENOUGH else 2


def is_split(x: Tensor) -> bool:
    """Whether to compute products with this stack in halves."""
    fits = len(x) < 1 << 16 and x.shape[-1] < 1 << 15  # limits of the kernels' grid and of their 32-bit counts
    return x.dtype == torch.float32 and fits and has_kernels(x.device)


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """Halves [n, 2, D, D] of `scale[n] x`, zero beyond `d`."""
    from ..kernels import dense

    n, d, _ = x.shape
    ld = -(-d // _side(d)) * _side(d)
    block, halves = _block(ld), x.new_empty((n, 2, ld, ld), dtype=torch.float16)
    dense.split[ld, n, -(-ld // block)](x.contiguous(), scale.contiguous(), halves, d, ld, ld * ld, BLOCK=block)
    return halves


def decode(x: Tensor, scale: Tensor, d: int) -> Tensor:
    """The matrices [n, d, d] that were encoded, times `scale[n]`."""
    from ..kernels import dense

    n, _, ld, _ = x.shape
    block, out = _block(ld), x.new_empty((n, d, d), dtype=torch.float32)
    dense.join[d, n, -(-ld // block)](x, scale.contiguous(), out, d, ld, ld * ld, BLOCK=block)
    return out


def frobenius(x: Tensor) -> Tensor:
    """The norms [n] of encoded matrices."""
    from ..kernels import dense

    n, size, block = x.shape[0], x.shape[2] * x.shape[3], 4096
    parts = -(-size // block)
    sums = x.new_empty((n, parts), dtype=torch.float32)
    dense.squares[parts, n](x, sums, size, parts, BLOCK=block)
    return sums.sum(1).sqrt()


def combine(x: Tensor, y: Tensor, terms: CombineTerms) -> tuple[Tensor, Tensor]:
    """The matrices `first` and `second` that `CombineTerms` describes, for encoded matrices. Each of the terms is [n]."""
    from ..kernels import dense

    n, _, ld, _ = x.shape
    block, first, second = _block(ld), torch.empty_like(x), torch.empty_like(x)
    dense.combine[ld, n, -(-ld // block)](x, y, torch.stack(terms), first, second, ld, ld * ld, n, BLOCK=block)
    return first, second


# One half for each number.


def fits_halves(x: Tensor) -> bool:
    """Whether products of one half each can be computed for this stack of matrices."""
    n, rows, columns = x.shape
    small = n < 1 << 16 and min(rows, columns) < (1 << 15) - 128 and rows * columns < 1 << 30  # kernels count in 32 bits
    return x.dtype == torch.float32 and small and has_kernels(x.device)


def unit_halves(x: Tensor, least: float) -> Tensor:
    """Matrices [n, rows, columns] over their Frobenius norms, in halves, padded with zeros to whole tiles of :func:`gram16`
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


def gram16(
    x: Tensor, y: Tensor | None = None, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """`alpha x y^T + beta add + diagonal I` [n, d, d] in halves, for `x` and `y` [n, d, k] with a symmetric product.

    Sums are in float32. `y` is `x` by default. Both may be transposed views of the same kind. `d` and `k` are multiples of
    tiles, as those of :func:`unit_halves`.
    """
    from ..kernels import dense

    n, d, depth = x.shape
    side, out = _side(d), x.new_empty((n, d, d))
    tiles = d // side * (d // side + 1) // 2
    size, row, step = x.stride()
    dense.gram16[n * tiles,](
        x, x if y is None else y, x if add is None else add, out, d, depth, row, step, size, tiles, alpha, beta, diagonal,
        SAME=y is None, ADD=add is not None, SIDE=side, DEPTH=DEPTH, num_warps=8 if side == 128 else 4, num_stages=stages(x.device),
    )  # fmt: skip
    return out


def _block(ld: int) -> int:
    return min(1024, 1 << (ld - 1).bit_length())


def _side(d: int) -> int:
    return 64 if d <= 192 else 128


def _product_of_halves(x: Tensor, y: Tensor, alpha: float, add: Tensor | None, beta: float, diagonal: float) -> Tensor:
    from ..kernels import dense

    (n, _, d, _), out = x.shape, torch.empty_like(x)
    side = _side(d)
    tiles = d // side * (d // side + 1) // 2
    dense.symmetric[n * tiles,](
        x, y, x if add is None else add, out, d, d * d, tiles, alpha, beta, diagonal,
        ADD=add is not None, SIDE=side, DEPTH=DEPTH, num_warps=8 if side == 128 else 4, num_stages=stages(x.device),
    )  # fmt: skip
    return out
