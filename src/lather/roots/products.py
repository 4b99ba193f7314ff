"""The product that polynomial iterations use: float32 on most devices, halves on GPUs that run our kernels.

On a GPU float32 products are slow, and TF32 loses what is below a thousandth of the largest entry. So a matrix is split into
two halves of 16 bits, which hold 22 bits together. Tensor cores multiply them with float32 sums, in three products of halves.
Only one triangle of the result is computed. On an H200 and for d = 1024 that takes a sixth of the time of float32. Entries
must be within the range of a half, 6e-8 to 65504.
"""

from functools import lru_cache

import torch
from torch import Tensor

from .. import linalg
from ..kernels import has_kernels as has_kernels
from ..kernels.schema import CombineTerms
from ..linalg import symmetrize

ENOUGH = 160 << 10  # bytes of shared memory for three stages, which take 128 KiB on an A100 and 192 KiB on an H200


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
        ADD=add is not None, SIDE=side, DEPTH=64, num_warps=8 if side == 128 else 4, num_stages=stages(x.device),
    )  # fmt: skip
    return out
