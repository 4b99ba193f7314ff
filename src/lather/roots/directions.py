"""Products of gradients with roots, in halves.

Where products need not be exact, tensor cores multiply in TF32, which has the 11 bits of a half. Halves take half the memory and
half the time. What they lack is range, so everything is multiplied by powers of two before.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..linalg import is_packed, rotate, unpack_by_kernels

AT_A_TIME = 1 << 25  # elements of roots, or of gradients, that are halved at a time: 64 MiB
BLOCK = 4096  # elements that a program halves
EVEN = 8  # sides that are multiples of it suit tensor cores
MOST = (1 << 16) - 1  # programs along the second and third axis of a launch
LARGEST = 15  # exponent of the largest norm that a result may have


class Sizes(NamedTuple):
    """float32 ``[n]``: the norm of every gradient, and what its direction then has to be multiplied by."""

    norms: Tensor
    back: Tensor


def fits(u: Tensor, roots: Sequence[Tensor]) -> bool:
    """Whether :func:`precondition` takes these: matrices with whole roots, and sides that suit tensor cores.

    With a third mode, as short as that of a convolution, halves took 10 to 30% longer than float32.
    """
    n, *shape = u.shape
    whole = len(shape) == 2 and all(x.dim() == 3 for x in roots)
    small = n < MOST and max(math.prod(shape), *(d * d for d in shape)) < MOST * BLOCK
    return whole and small and u.dtype == torch.float32 and shape[0] % EVEN == shape[1] % EVEN == 0


def precondition(u: Tensor, roots: Sequence[Tensor], out: Tensor, sizes: Sizes) -> Tensor:
    """``out`` times ``sizes.back``, a power of two, is ``u [n, a, b]`` times the roots of both modes. Both are written.

    Sums and ``out`` are in float32, the result in between in halves. None of them overflows: a root is positive definite, so its
    trace bounds what it makes of a norm. Zeros stay zeros, and what is not finite makes its slot not finite.
    """
    n, *shape = u.shape
    scales = balance(u, roots, sizes)
    most = max(1, AT_A_TIME // max(math.prod(shape), *(d * d for d in shape)))
    most = -(-n // -(-n // most))  # in chunks of about the same size
    for some in (slice(first, first + most) for first in range(0, n, most)):
        x = halve(u[some], scales[0, some])
        for i in (1, 0):  # each brings its mode to the front, so nothing has to be transposed
            x = rotate(x, halve_roots(roots[i][some], scales[1 + i, some]), None if i else out[some])
    return out


def balance(u: Tensor, roots: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """``[3, n]``: what to multiply ``u`` and each root by, twice, before they are halved. ``sizes.back`` undoes all that.

    A trace comes below about ``4 sqrt(d)``: then neither one large eigenvalue overflows nor do the elements of a matrix vanish
    that has many. The norm of ``u`` gets what the first root to be applied leaves of ``2^LARGEST``.
    """
    from ..kernels import dense

    n, *shape = u.shape
    rooms = [2 + _half_bits(d) for d in shape]
    room = LARGEST - rooms[1]
    scales = u.new_empty(3, n)
    dense.balance[n,](
        *roots, sizes.norms, scales, sizes.back, n, *shape, *rooms, room,
        PACKED=any(map(is_packed, roots)), BLOCK=min(1024, 1 << (max(shape) - 1).bit_length()),
    )  # fmt: skip
    return scales


def halve(x: Tensor, scale: Tensor) -> Tensor:
    """``scale[n]^2 x`` in halves."""
    from ..kernels import dense

    out, numel = torch.empty_like(x, dtype=torch.float16), x[0].numel()
    dense.halve[1, len(x), -(-numel // BLOCK)](x, scale, out, 1, numel, 1, numel, BLOCK=BLOCK, num_warps=8)
    return out


def halve_roots(x: Tensor, scale: Tensor) -> Tensor:
    """``scale[n]^2 x`` in halves ``[n, d, d]``, for roots that are packed or not."""
    return unpack_by_kernels(x, torch.float16, scale) if is_packed(x) else halve(x, scale)


def _half_bits(count: int) -> int:
    """The least ``k`` with ``sqrt(count) <= 2^k``."""
    return ((count - 1).bit_length() + 1) // 2
