"""Pure functions on stacks ``[n, d1, ..., dk]``: one slot per block, modes counted from 0.

On a CPU with one thread every function here gives a slot bitwise the same result whatever stack it is part of; ranks
that hold different stacks rely on it. Torch's reductions and, but for ``pow``, elementwise functions do so by themselves. MKL, its
BLAS and LAPACK, rounds by how far from a multiple of 64 bytes a matrix begins, and the slots of a stack begin differently unless
they are of such a size. So whoever multiplies stacks calls :func:`product`, which fills sides up to multiples of 4, and whoever
decomposes them :func:`factorize`, which takes those of other sides one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import cast, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNED = 64  # bytes
SIDE = 4  # a matrix of float32 or float64 whose sides are multiples of it is a multiple of that


@overload
def per_slot(x: Tensor, like: Tensor) -> Tensor: ...
@overload
def per_slot(x: float | Tensor, like: Tensor) -> float | Tensor: ...
def per_slot(x: float | Tensor, like: Tensor) -> float | Tensor:
    """Shape a vector ``[n]`` so that it broadcasts over the slots of ``like``; numbers pass through."""
    return x.view(-1, *[1] * (like.dim() - 1)) if isinstance(x, Tensor) else x


def from_host(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A vector of host values beside ``like``, without making the host wait; the default device has no say in it."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(like.device, non_blocking=True)


def bias_correction(steps: Sequence[int], beta: float, like: Tensor, first: float | None = None) -> float | Tensor:
    """``1 - beta^t``, or ``1 - first beta^(t-1)``: one number if all slots are at the same step, else ``[n]`` beside ``like``."""

    def of_step(t: int) -> float:
        return 1 - beta**t if first is None else 1 - first * beta ** (t - 1)

    if steps.count(steps[0]) == len(steps):
        return of_step(steps[0])
    return from_host([of_step(t) for t in steps], like, like.dtype)


@cache
def positions(slots: tuple[int, ...], device: torch.device) -> Tensor:
    """An index on the device, for every stream. It stays, because CUDA graphs cannot copy from the host and need it for good."""
    return torch.tensor(slots, device="cpu").to(device)  # waits, so that any stream may read it


def unfold(x: Tensor, mode: int) -> Tensor:
    """The mode's unfolding ``[n, d_mode, rest]``; a view for matrices."""
    return x.movedim(mode + 1, 1).flatten(2) if x.dim() > 2 else x.unsqueeze(2)


def gram(x: Tensor, mode: int, scale: float = 1.0) -> Tensor:
    """``scale G G^T`` of the mode's unfolding: ``[n, d, d]``."""
    if x.is_cuda and x.dim() > 3 and mode == x.dim() - 2:
        found = _gram_of_columns(x.flatten(1, -2))
        return found if scale == 1 else found.mul_(scale)
    u = unfold(x, mode)
    return product(u, u.mT, alpha=scale)


def _gram_of_columns(x: Tensor) -> Tensor:
    """``G^T G`` of ``[n, k, d]`` with many more rows than columns: a sum of products, or one core would do it all."""
    n, k, d = x.shape
    parts = max((p for p in (512, 256, 128, 64, 32, 16, 8, 4, 2) if k % p == 0 and k // p >= 256), default=1)
    x = x.reshape(n * parts, k // parts, d)
    return torch.bmm(x.mT, x).view(n, parts, d, d).sum(1)


def gram_diagonal(x: Tensor, mode: int, scale: float = 1.0) -> Tensor:
    """The diagonal of :func:`gram`: ``[n, d]``."""
    found = unfold(x, mode).square().sum(2)
    return found if scale == 1 else found.mul_(scale)


def pack(a: Tensor) -> Tensor:
    """Lower triangles of ``[n, d, d]``, row by row: ``[n, d (d + 1) / 2]``."""
    return a.flatten(1).index_select(1, _lower(a.shape[-1], a.device))


def unpack(packed: Tensor, d: int) -> Tensor:
    """The symmetric matrices ``[n, d, d]`` with these lower triangles."""
    return packed.index_select(1, _mirrored(d, packed.device)).view(-1, d, d)


# Both are there from the second time on, as CUDA graphs need it, and stay: there are few sizes.


@cache
def _lower(d: int, device: torch.device) -> Tensor:
    """Where in a matrix the elements of its packed triangle are."""
    row, column = torch.tril_indices(d, d, device="cpu").unbind()
    return (row * d + column).to(_index_dtype(d)).to(device)


@cache
def _mirrored(d: int, device: torch.device) -> Tensor:
    """Where in its packed triangle the elements of a symmetric matrix are."""
    i = torch.arange(d, dtype=_index_dtype(d), device="cpu")
    high, low = torch.maximum(i[:, None], i), torch.minimum(i[:, None], i)
    return (high * (high + 1) // 2 + low).flatten().to(device)


def _index_dtype(d: int) -> torch.dtype:
    return torch.int32 if d * d < 1 << 31 else torch.int64


def mode_product(x: Tensor, factor: Tensor, mode: int, out: Tensor | None = None) -> Tensor:
    """Multiply a mode by a symmetric matrix ``[n, d, d]`` or, given ``[n, d]``, by a diagonal one; into ``out`` if given."""
    if factor.dim() == 2:
        shape = [x.shape[0]] + [1] * (x.dim() - 1)
        shape[mode + 1] = x.shape[mode + 1]
        return torch.mul(x, factor.view(shape), out=out)
    if mode == x.dim() - 2 and mode > 0:  # symmetric, so the last mode multiplies from the right without a transpose
        rows = x.flatten(1, -2)
        return product(rows, factor, None if out is None else out.view(rows.shape)).view(x.shape)
    moved = x.movedim(mode + 1, 1)
    found = product(factor, unfold(x, mode)).view(moved.shape).movedim(1, mode + 1)
    return found if out is None else out.copy_(found)


def rotate(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply the last mode by a symmetric matrix ``[n, d, d]`` and bring it to the front, ``[n, ..., d]`` to
    ``[n, d, ...]``: after as many of these as there are modes all are in their places, and nothing was copied."""
    n, *others, d = x.shape
    into = None if out is None else out.view(n, d, -1)
    return product(factor, x.reshape(n, -1, d).mT, into).view(n, d, *others)


def product(
    a: Tensor, b: Tensor, out: Tensor | None = None, add: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """``alpha a b`` for ``a [n, i, k]`` and ``b [n, k, j]``; with ``add [n, i, j]``, and ``beta add``."""
    if not a.is_cpu:
        return _product(a, b, out, add, alpha, beta)
    x, y = aligned(a), aligned(b)
    found = _product(x, y, None, None if add is None else aligned(add), alpha, beta)
    if x is not a or y is not b:
        found = found[:, : a.shape[1], : b.shape[2]].contiguous()
    return found if out is None else out.copy_(found)


def _product(a: Tensor, b: Tensor, out: Tensor | None, add: Tensor | None, alpha: float, beta: float) -> Tensor:
    if add is not None:
        return torch.baddbmm(add, a, b, beta=beta, alpha=alpha, out=out)
    if alpha == 1:
        return torch.bmm(a, b, out=out)
    if not a.is_cuda:  # a CPU would multiply one operand by alpha, and a Gram matrix not be symmetric
        return torch.bmm(a, b, out=out).mul_(alpha)
    to = a.new_empty(len(a), a.shape[1], b.shape[2]) if out is None else out
    return to.baddbmm_(a, b, beta=0, alpha=alpha)  # with no pass of its own for alpha


def aligned(x: Tensor) -> Tensor:
    """On a CPU, ``[n, i, j]`` with zeros until both sides are multiples of 4, every slot at a multiple of 64 bytes; elsewhere
    as it is. Zeros, which may change how a product is rounded, follow from the shape alone; a copy to another place does not."""
    if not x.is_cpu:
        return x
    _, rows, columns = x.shape
    if rows % SIDE or columns % SIDE:
        return pad(x, (0, -columns % SIDE, 0, -rows % SIDE))
    return x if x.stride(0) == rows * columns and x.data_ptr() % ALIGNED == 0 else x.clone()


def matrix_power(x: Tensor, p: int, times: Callable[[Tensor, Tensor], Tensor] = product) -> Tensor:
    """``x^p`` of ``[n, d, d]`` for ``p >= 1``, by repeated squaring; not torch's, whose products are its own."""
    if p == 1:
        return x
    half = matrix_power(x, p // 2, times)
    square = times(half, half)
    return times(x, square) if p % 2 else square


def factorize(f: Callable[..., Sequence[Tensor]], *stacks: Tensor) -> Sequence[Tensor]:
    """The tensors that a function of LAPACK's makes of stacks ``[n, i, j]``; a CPU works slot by slot in any case."""
    if not (stacks[0].is_cpu and len(stacks[0]) and any(side % SIDE for x in stacks for side in x.shape[1:])):
        return f(*stacks)
    parts = [f(*(x[i : i + 1].clone() for x in stacks)) for i in range(len(stacks[0]))]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def symmetrize(a: Tensor) -> Tensor:
    return (a + a.mT) / 2


def norms(x: Tensor) -> Tensor:
    """Frobenius norm of every slot: ``[n]``."""
    return cast(Tensor, torch.linalg.vector_norm(x.flatten(1), dim=1))


def rescale(x: Tensor, target: Tensor) -> Tensor:
    """Give every slot of ``x`` the norm ``target [n]``; a zero slot stays zero."""
    size = norms(x)
    scale = torch.where(size > 0, target / size, torch.zeros_like(size))
    return x * per_slot(scale, x)


def ema_(state: Tensor, value: Tensor, weight: float | Tensor) -> Tensor:
    """``state <- (1 - weight) state + weight value`` in place; a slot of weight 0 keeps its bits.

    The arithmetic is done in the dtype of ``value``; returns the new average in that dtype.
    """
    w = per_slot(weight, value)
    if state.dtype == value.dtype:
        return state.lerp_(value, w)
    new = state.to(value.dtype).lerp_(value, w)
    state.copy_(new)
    return new
