"""Pure functions on stacks ``[n, d1, ..., dk]``: one slot per block, modes counted from 0.

On a CPU with one thread every function here gives a slot bitwise the same result whatever stack it is part of; ranks
that hold different stacks rely on it. Torch's reductions and, but for ``pow``, elementwise functions do so by themselves. MKL, its
BLAS and LAPACK, rounds by how far from a multiple of 64 bytes a matrix begins, and the slots of a stack begin differently unless
they are of such a size. So whoever multiplies stacks calls :func:`product`, which fills sides up to multiples of 4, and whoever
decomposes them :func:`factorize`, which takes those of other sides one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNED = 64  # bytes
# Far below any ridge that matters, and still with a finite inverse and products of roots in float32.
SMALLEST_RIDGE = 1e-30
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


def eye_like(a: Tensor) -> Tensor:
    """The identity [d, d] in the dtype and on the device of ``a`` [n, d, d]."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def all_finite(x: Tensor) -> Tensor:
    """[n] bool: whether every entry of the slot is finite."""
    return torch.isfinite(x).flatten(1).all(1)


def normalize(a: Tensor, floor: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
    """``a / c`` and ``c`` [n, 1, 1], the power of two with ``c <= max(|a|, floor) < 2c``, or 1 if that maximum is 0.

    Division by ``c`` is exact. Afterwards squares neither overflow nor vanish.
    """
    size = a.abs().amax((1, 2), keepdim=True).clamp(min=floor)
    # Dividing by the mantissa is exact down to denormals. ldexp, a float pow, is not.
    c = torch.where(size > 0, size / (2 * torch.frexp(size).mantissa), 1.0)
    return a / c, c


def relative_ridge(a: Tensor, eps: float) -> Tensor:
    """``max(eps s, 1e-30)`` [n], ``s = ||A^2||_F^(1/2)``, for matrices [n, d, d] or diagonals [n, d].

    ``s`` is the Schatten 4-norm. It is between ``lambda_max`` and ``d^(1/4) lambda_max``, and close to ``lambda_max`` if the
    spectrum decays. The floor is the ridge of a factor that is zero or nearly zero.
    """
    if a.dim() == 2:
        ridge = eps * _fourth_norm(a.double().square())
    else:
        with full_precision(a.device):
            x, scale = normalize(a)
            ridge = eps * _fourth_norm(product(x, x)) * scale.flatten()  # in this order the norm itself cannot overflow
    return ridge.clamp(min=SMALLEST_RIDGE)


def _fourth_norm(squares: Tensor) -> Tensor:
    """``||A^2||_F^(1/2)`` [n] from ``A^2``."""
    norm: Tensor = torch.linalg.vector_norm(squares, dim=tuple(range(1, squares.dim())))
    return norm.sqrt()


def power(x: Tensor, exponent: float) -> Tensor:
    """``x^exponent`` elementwise for [n, d], in float64. A slot gets the same bits in every stack.

    ``pow`` runs different code in the vector body and in the tail of an array. Rows padded to whole vectors have no tail.
    """
    d = x.shape[-1]
    rows = torch.nn.functional.pad(x.double(), (0, -d % 64), value=1.0)
    return (rows**exponent)[:, :d]


def column(x: float | Tensor, like: Tensor) -> Tensor:
    """A number, or one per slot [n], as [n, 1, 1] in the dtype and on the device of ``like`` [n, d, d]."""
    if isinstance(x, Tensor):
        return x.to(like.dtype).view(-1, 1, 1)
    return torch.full((like.shape[0], 1, 1), x, dtype=like.dtype, device=like.device)


# How torch multiplies.


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Compute float32 products in float32, whatever autocast, TF32 and bfloat16 settings the user has.

    A root spans the decades of its factor's spectrum. The ten bits of TF32 keep three of them.
    """
    scope = ExitStack()
    scope.enter_context(torch.autocast(device.type, enabled=False))
    scope.enter_context(products_in("ieee", device))
    return scope


@contextmanager
def products_in(precision: str | None, device: torch.device) -> Iterator[None]:
    """Compute float32 products on ``device`` in "ieee" float32 or, on CUDA, in "tf32". None keeps the user's setting.

    Settings of other devices stay as they are, because a thread may compute roots on the host while a step runs on CUDA.
    """
    if precision is None:
        yield
        return
    units: dict[str, Any] = {"cuda": torch.backends.cuda.matmul}
    if precision == "ieee":
        units["cpu"] = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    already = {"ieee": ("ieee", "none"), "tf32": ("tf32",)}[precision]
    mine = [units[device.type]] if device.type in units else []
    changed = [(u, u.fp32_precision) for u in mine if u.fp32_precision not in already]
    try:
        for unit, _ in changed:
            unit.fp32_precision = precision
        yield
    finally:
        for unit, before in changed:
            _restore(unit, before)


def are_products_exact() -> bool:
    """Whether the user's setting computes float32 products on CUDA in float32, which is the default."""
    return torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")


def _restore(unit: Any, before: str) -> None:
    # A unit that inherits its setting reads as its parent. Restore "none" there, so that it still follows the parent.
    unit.fp32_precision = "none"
    if unit.fp32_precision != before:
        unit.fp32_precision = before


@contextmanager
def _products_in_legacy(precision: str | None, device: torch.device) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision({"ieee": "highest", "tf32": "high"}.get(precision or "", before))
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _are_products_exact_legacy() -> bool:
    return torch.get_float32_matmul_precision() == "highest"


# torch 2.9 added a precision per backend. From then on, the old global setting warns.
if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    products_in, are_products_exact = _products_in_legacy, _are_products_exact_legacy
