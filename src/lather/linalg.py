"""Pure functions on stacks ``[n, d1, ..., dk]``: one slot per block, modes counted from 0.

On a CPU with one thread, every function here gives a slot the same bits in every stack. Ranks that hold different stacks rely
on it. Torch's reductions and its elementwise functions other than ``pow`` do so by themselves. MKL does not: how it rounds depends
on whether a matrix begins at a multiple of 64 bytes. So multiply stacks by :func:`product`, which pads sides to multiples of 4,
and decompose them by :func:`factorize`, which takes matrices with other sides one by one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .kernels import has_kernels
from .kernels.schema import SMALLEST_NORM

ALIGNED = 64  # bytes
TILE = 64  # side of the tiles that a kernel packs and unpacks
SIDE = 4  # a matrix of float32 or float64 whose sides are multiples of it takes a multiple of ALIGNED bytes
SMALLEST_RIDGE = 1e-30  # far below any ridge that matters; its inverse and products of roots are still finite in float32

X = TypeVar("X", bound="float | Tensor")


def per_slot(x: X, like: Tensor) -> X:
    """Shape a vector ``[n]`` so that it broadcasts over the slots of ``like``. Numbers pass through."""
    return cast(X, x.view(-1, *[1] * (like.dim() - 1))) if isinstance(x, Tensor) else x


def from_host(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A vector of host values on the device of ``like``. The host does not wait for CUDA. Torch's default device is ignored."""
    # On a Mac a copy that is not waited for reads memory that is already free (pytorch/pytorch#139550).
    return torch.tensor(values, dtype=dtype, device="cpu").to(like.device, non_blocking=like.is_cuda)


def bias_correction(steps: Sequence[int], beta: float, like: Tensor, first: float | None = None) -> float | Tensor:
    """``1 - beta^t``, or ``1 - first beta^(t-1)``: a number if all slots are at the same step ``t``, else ``[n]`` as ``like``."""
    if steps.count(steps[0]) == len(steps):
        steps = steps[:1]
    found = [1 - beta**t if first is None else 1 - first * beta ** (t - 1) for t in steps]
    return from_host(found, like, like.dtype) if len(found) > 1 else found[0]


def positions(slots: tuple[int, ...], device: torch.device) -> Tensor:
    """An index on the device. Graphs cannot copy it from the host, and need it for good: those are kept for ever."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return _kept_positions(slots, device) if capturing else _positions(slots, device)


@lru_cache(maxsize=4096)
def _positions(slots: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(slots, device="cpu").to(device)  # waits, so that any stream may read it


_kept_positions = cache(_positions)  # what is captured was launched once before, so it is there to be kept


def unfold(x: Tensor, mode: int) -> Tensor:
    """The mode's unfolding ``[n, d_mode, rest]``; a view for matrices."""
    if x.dim() == 2:
        return x.unsqueeze(2)
    return (x.movedim(mode + 1, 1) if mode else x).flatten(2)


def gram(x: Tensor, mode: int, scale: float = 1.0) -> Tensor:
    """``scale G G^T`` of the mode's unfolding: ``[n, d, d]``."""
    if x.is_cuda and x.dim() > 3 and mode == x.dim() - 2:
        found = _gram_of_columns(x.flatten(1, -2))
        return found if scale == 1 else found.mul_(scale)
    u = unfold(x, mode)
    return product(u, u.mT, alpha=scale)


def _gram_of_columns(x: Tensor) -> Tensor:
    """``G^T G`` of ``[n, k, d]`` with many more rows than columns: a sum of products that many cores share."""
    n, k, d = x.shape
    parts = max((p for p in (512, 256, 128, 64, 32, 16, 8, 4, 2) if k % p == 0 and k // p >= 256), default=1)
    x = x.reshape(n * parts, k // parts, d)
    return torch.bmm(x.mT, x).view(n, parts, d, d).sum(1)


def gram_diagonal(x: Tensor, mode: int, scale: float = 1.0) -> Tensor:
    """The diagonal of :func:`gram`: ``[n, d]``."""
    found = unfold(x, mode).square().sum(2)
    return found if scale == 1 else found.mul_(scale)


# Symmetric matrices may be packed: kept as lower triangles ``[n, 1, d (d + 1) / 2]``, row by row.


def is_packed(x: Tensor) -> bool:
    """Whether a stack is made of lower triangles, and not of matrices ``[n, d, d]`` or diagonals ``[n, d]``."""
    return x.dim() == 3 and x.shape[1] != x.shape[2]


def side_of(x: Tensor) -> int:
    """``d`` of matrices, packed or not, or of diagonals.

    >>> side_of(pack(torch.eye(7)[None]))
    7
    """
    return (math.isqrt(8 * x.shape[-1] + 1) - 1) // 2 if is_packed(x) else x.shape[-1]


def first_of(x: Tensor) -> Tensor:
    """``[n]``: the first element of matrices, packed or not, or of diagonals."""
    return x.flatten(1)[:, 0]


def fill_diagonal_(x: Tensor, value: float) -> None:
    """Set the diagonal of matrices, packed or not, or all of diagonals."""
    if is_packed(x):
        x.flatten(1)[:, _on_diagonal(side_of(x), x.device)] = value
    else:
        diagonal_of(x).fill_(value)


def diagonal_of(x: Tensor) -> Tensor:
    """``[n, d]``: the diagonal of matrices, packed or not. Diagonals ``[n, d]`` stay as they are."""
    if is_packed(x):
        return x.flatten(1).index_select(1, _on_diagonal(side_of(x), x.device))
    return x.diagonal(dim1=1, dim2=2) if x.dim() == 3 else x


def pack(a: Tensor) -> Tensor:
    """Lower triangles of ``[n, d, d]``: ``[n, 1, d (d + 1) / 2]``."""
    d = a.shape[-1]
    if packs_by_kernels(d, a.device):
        return _moved("pack", a, (1, d * (d + 1) // 2), a.dtype)
    return a.flatten(1).index_select(1, _lower(d, a.device)).unsqueeze(1)


def unpack(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The matrices ``[n, d, d]`` of a stack that is packed or not, in a dtype. Diagonals ``[n, d]`` stay as they are."""
    dtype = dtype or x.dtype
    if not is_packed(x):
        return x.to(dtype)
    d = side_of(x)
    if packs_by_kernels(d, x.device):
        return unpack_by_kernels(x, dtype)
    return x.to(dtype).flatten(1).index_select(1, _mirrored(d, x.device)).view(-1, d, d)  # a CPU is slow at picking 16 bits


def packs_by_kernels(d: int, device: torch.device) -> bool:
    """Whether kernels, which count in 32 bits, pack matrices of this side. They need no tables."""
    return device.type == "cuda" and d < 1 << 15 and has_kernels(device)


def unpack_by_kernels(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """The matrices ``[n, d, d]`` of a packed stack in a dtype, times the squares of ``scale[n]`` if that is given."""
    return _moved("unpack", x, (side_of(x), side_of(x)), dtype, scale)


def _moved(kernel: str, x: Tensor, shape: tuple[int, int], dtype: torch.dtype, *scale: Tensor | None) -> Tensor:
    from .kernels import packed

    found, d = torch.empty(len(x), *shape, dtype=dtype, device=x.device), side_of(x)
    if len(x):
        tiles = -(-d // TILE)
        launch = getattr(packed, kernel)[len(x), tiles, tiles]
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            launch(x.contiguous(), found, *scale, d, EVEN=d % 16 == 0, SIDE=TILE, num_warps=8)
    return found


@cache  # kept on the device, as in positions
def _lower(d: int, device: torch.device) -> Tensor:
    """Where in a matrix the elements of its packed triangle are."""
    row, column = torch.tril_indices(d, d, device="cpu").unbind()
    return (row * d + column).to(_index_dtype(d)).to(device)


@cache
def _on_diagonal(d: int, device: torch.device) -> Tensor:
    """Where in its packed triangle the diagonal of a matrix is."""
    i = torch.arange(d, device="cpu")
    return (i * (i + 3) // 2).to(device)


@cache
def _mirrored(d: int, device: torch.device) -> Tensor:
    """Where in its packed triangle the elements of a symmetric matrix are."""
    i = torch.arange(d, dtype=_index_dtype(d), device="cpu")
    high, low = torch.maximum(i[:, None], i), torch.minimum(i[:, None], i)
    return (high * (high + 1) // 2 + low).flatten().to(device)


def _index_dtype(d: int) -> torch.dtype:
    return torch.int32 if d * d < 1 << 31 else torch.int64


def mode_product(x: Tensor, factor: Tensor, mode: int, out: Tensor | None = None) -> Tensor:
    """Multiply a mode by symmetric matrices ``[n, d, d]``, or by diagonal ones ``[n, d]``. Writes to ``out`` if given."""
    if factor.dim() == 2:
        return torch.mul(x, factor.view(*factor.shape[:1], *[1] * mode, factor.shape[1], *[1] * (x.dim() - mode - 2)), out=out)
    if mode == x.dim() - 2 and mode > 0:  # the matrix is symmetric, so it can be on the right, without a transpose
        rows = x.flatten(1, -2)
        return product(rows, factor, None if out is None else out.view(rows.shape)).view(x.shape)
    found = product(factor, unfold(x, mode)).view(x.movedim(mode + 1, 1).shape).movedim(1, mode + 1)
    return found if out is None else out.copy_(found)


def rotate(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply the last mode by a symmetric matrix ``[n, d, d]`` and move it to the front: ``[n, ..., d]`` to ``[n, d, ...]``.

    Once every mode has had its turn, all are in their places again, and nothing was copied.
    """
    n, *others, d = x.shape
    return product(factor, x.reshape(n, -1, d).mT, None if out is None else out.view(n, d, -1)).view(n, d, *others)


def product(
    a: Tensor, b: Tensor, out: Tensor | None = None, add: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """``alpha a b`` for ``a [n, i, k]`` and ``b [n, k, j]``, plus ``beta add`` if ``add [n, i, j]`` is given.

    Two stacks of float16 have a product in float32 if ``out`` is of that dtype.
    """
    if not a.is_cpu:
        with _sums_in_float32(a):
            return _product(a, b, out, add, alpha, beta)
    if out is not None and out.dtype != a.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
    x, y = aligned(a), aligned(b)
    found = _product(x, y, None, None if add is None else aligned(add), alpha, beta)
    if x is not a or y is not b:
        found = found[:, : a.shape[1], : b.shape[2]].contiguous()
    return found if out is None else out.copy_(found)


def _product(a: Tensor, b: Tensor, out: Tensor | None, add: Tensor | None, alpha: float, beta: float) -> Tensor:
    if add is not None:
        return torch.baddbmm(add, a, b, beta=beta, alpha=alpha, out=out)
    if out is not None and out.dtype != a.dtype:
        return torch.bmm(a, b, out_dtype=out.dtype, out=out)
    if alpha == 1:
        return torch.bmm(a, b, out=out)
    if not a.is_cuda:  # with alpha a CPU multiplies one operand by it, and a Gram matrix is no longer symmetric
        return torch.bmm(a, b, out=out).mul_(alpha)
    to = a.new_empty(len(a), a.shape[1], b.shape[2]) if out is None else out
    return to.baddbmm_(a, b, beta=0, alpha=alpha)  # alpha takes no pass of its own


def aligned(x: Tensor) -> Tensor:
    """On a CPU, ``[n, i, j]`` padded with zeros to sides that are multiples of 4, so every slot begins at a multiple of 64 bytes.

    Padding may change how a product is rounded, but it depends on the shape only. Other devices get ``x`` itself.
    """
    if not x.is_cpu:
        return x
    _, rows, columns = x.shape
    if rows % SIDE or columns % SIDE:
        return torch.constant_pad_nd(x, (0, -columns % SIDE, 0, -rows % SIDE))
    return x if x.stride(0) == rows * columns and x.data_ptr() % ALIGNED == 0 else x.clone()


def matrix_power(x: Tensor, p: int, times: Callable[[Tensor, Tensor], Tensor] = product) -> Tensor:
    """``x^p`` of ``[n, d, d]`` for ``p >= 1``, by repeated squaring. Unlike torch's it uses our products."""
    if p == 1:
        return x
    half = matrix_power(x, p // 2, times)
    square = times(half, half)
    return times(x, square) if p % 2 else square


def factorize(f: Callable[..., Sequence[Tensor]], *stacks: Tensor) -> Sequence[Tensor]:
    """The tensors that a LAPACK function makes of stacks ``[n, i, j]``. A CPU works slot by slot in any case."""
    if not (stacks[0].is_cpu and len(stacks[0]) and any(side % SIDE for x in stacks for side in x.shape[1:])):
        return f(*stacks)
    parts = [f(*(x[i : i + 1].clone() for x in stacks)) for i in range(len(stacks[0]))]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def symmetrize(a: Tensor) -> Tensor:
    return (a + a.mT).div_(2)


def norms(x: Tensor) -> Tensor:
    """Frobenius norm of every slot: ``[n]``."""
    return cast(Tensor, torch.linalg.vector_norm(x.flatten(1), dim=1))


def probe(a: Tensor) -> Tensor:
    """Vectors of signs ``[n, d, 1]`` for matrices ``a [n, d, d]``, as good as random ones and always the same."""
    k = torch.arange(1, a.shape[-1] + 1, dtype=a.dtype, device=a.device)
    return (k * k).sin().sign().view(1, -1, 1).expand(a.shape[0], -1, 1)


def largest_eigenvalue(a: Tensor, iterations: int = 8) -> Tensor:
    """``[n]``: an estimate from below of the largest eigenvalue of positive semidefinite ``a [n, d, d]``.

    It is found by power iteration, from the column with the largest diagonal element.
    """
    column = a.diagonal(dim1=1, dim2=2).argmax(1)
    x = a.gather(2, column.view(-1, 1, 1).expand(-1, a.shape[1], 1))
    for _ in range(iterations):
        x = x / at_least(torch.linalg.vector_norm(x, dim=1, keepdim=True), torch.finfo(a.dtype).tiny)
        x = a @ x
    return norms(x)


def rescale(x: Tensor, like: Tensor, ready: Tensor | None = None) -> Tensor:
    """Give every slot of ``x`` the norm that it has in ``like``. One whose norm overflows or is below ``SMALLEST_NORM``, or that is
    not ``ready [n]``, becomes what it is in ``like``. NaN stays NaN."""
    size = norms(x)
    scaled = x * per_slot(norms(like) / size, x)
    fits = (size >= SMALLEST_NORM) & (size != torch.inf) | size.isnan()
    return torch.where(per_slot(fits if ready is None else fits & ready, x), scaled, like)


def ema_(state: Tensor, value: Tensor, weight: float | Tensor) -> Tensor:
    """``state <- (1 - weight) state + weight value`` in place. A slot of weight 0 keeps its bits.

    Computes in the dtype of ``value`` and returns the new average in that dtype.
    """
    new = state.to(value.dtype).lerp_(value, per_slot(weight, value))
    if new is not state:  # `to` makes a copy only for another dtype
        state.copy_(new)
    return new


def eye_like(a: Tensor) -> Tensor:
    """The identity [d, d] in the dtype and on the device of ``a`` [n, d, d]."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def all_finite(x: Tensor) -> Tensor:
    """[n] bool: whether every entry of the slot is finite. The largest and the least are NaN if one is."""
    x = x.flatten(1)
    return (x.amax(1) < torch.inf) & (x.amin(1) > -torch.inf)  # on a CPU ten times as fast as the norm of largest entries


def normalize(a: Tensor, floor: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
    """``a / c`` and ``c`` [n, 1, 1], the power of two with ``c <= max(|a|, floor) < 2c``, or 1 if that maximum is 0.

    Division by ``c`` is exact. Afterwards squares neither overflow nor vanish. A device without ``frexp`` takes the maximum itself.
    """
    largest = torch.maximum(a.amax((1, 2), keepdim=True), a.amin((1, 2), keepdim=True).neg())  # faster than a norm on a CPU
    size = largest.clamp(min=floor)
    power = size / (2 * torch.frexp(size).mantissa) if is_complete(a.device) else size  # ldexp would be a float pow
    c = torch.where(size > 0, power, 1.0)
    return a / c, c


def relative_ridge(a: Tensor, eps: float) -> Tensor:
    """``max(eps s, 1e-30)`` [n], ``s = ||A^2||_F^(1/2)``, for matrices [n, d, d] or diagonals [n, d]. 1 for zeros.

    ``s`` is the Schatten 4-norm. It is between ``lambda_max`` and ``d^(1/4) lambda_max``, and close to ``lambda_max`` if the
    spectrum decays.
    """
    if a.dim() == 2:
        size = norms(a.to(exact_dtype(a.device)).square()).sqrt()
    else:
        with full_precision(a.device):
            x, scale = normalize(a)
            size = norms(product(x, x)).sqrt() * scale.flatten()  # in this order the norm itself cannot overflow
    return ridge_of_size(size, eps)


def ridge_of_size(size: Tensor, eps: float) -> Tensor:
    """The relative ridge [n] of factors whose Schatten 4-norm is known."""
    return torch.where(size == 0, 1.0, at_least(eps * size, SMALLEST_RIDGE))


def at_least(x: Tensor, minimum: float) -> Tensor:
    """``max(x, minimum)``. NaN stays NaN."""
    if is_complete(x.device):
        return x.clamp(min=minimum)
    # On a Mac, torch before 2.10 takes all minima below 5e-7 for the first of them that it met (pytorch/pytorch#167767).
    return torch.where(x < minimum, minimum, x)


def power(x: Tensor, exponent: float) -> Tensor:
    """``x^exponent`` elementwise for [n, d], in :func:`exact_dtype`. ``pow`` rounds differently in the tail of a row: padded rows
    have none."""
    d = x.shape[-1]
    return (torch.constant_pad_nd(x.to(exact_dtype(x.device)), (0, -d % 64), 1.0) ** exponent)[:, :d]


def is_complete(device: torch.device) -> bool:
    """Whether a device has float64 and all of torch's linear algebra. A Mac's GPU has not, and of others we do not know."""
    return device.type in ("cpu", "cuda")


def place_of_roots(device: torch.device | str, given: str | None) -> torch.device:
    """Where roots of factors on a device are computed: where the user says, or there, or on the host if the device cannot."""
    there = torch.device(given or device)
    return there if is_complete(there) else torch.device("cpu")


def exact_dtype(device: torch.device) -> torch.dtype:
    """The dtype of what should not be rounded to float32: float64, if the device has it."""
    return torch.float64 if is_complete(device) else torch.float32


# How torch multiplies. Since 2.9 it has a precision for each backend, and its old global setting warns.

PER_BACKEND = hasattr(torch.backends.cuda.matmul, "fp32_precision")


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32, whatever autocast, TF32 and bfloat16 settings the user has.

    A root spans the decades of its factor's spectrum. The ten bits of TF32 keep three of them.
    """
    with torch.autocast(device.type, enabled=False), products_in("ieee", device):
        yield


@contextmanager
def _sums_in_float32(x: Tensor) -> Iterator[None]:
    """Add up products of halves in float32, even if the user allows sums in halves. Torch would refuse a result in float32."""
    unit = torch.backends.cuda.matmul
    if not (x.is_cuda and x.dtype == torch.float16 and unit.allow_fp16_accumulation):
        yield
        return
    unit.allow_fp16_accumulation = False
    try:
        yield
    finally:
        unit.allow_fp16_accumulation = True


def are_products_exact() -> bool:
    """Whether the user's setting computes float32 products on CUDA in float32, which is the default."""
    if not PER_BACKEND:
        return torch.get_float32_matmul_precision() == "highest"
    return torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")


@contextmanager
def products_in(precision: str | None, device: torch.device) -> Iterator[None]:
    """Compute float32 products on ``device`` in "ieee" float32 or, on CUDA, in "tf32". None keeps the user's setting.

    Settings of other devices stay as they are, because a thread may compute roots on the host while a step runs on CUDA.
    """
    unit: Any = None
    if precision and device.type == "cuda":
        unit = torch.backends.cuda.matmul
    elif precision == "ieee" and device.type == "cpu":
        unit = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = None if unit is None else unit.fp32_precision
    if before in (None, precision) or (precision, before) == ("ieee", "none"):
        yield
        return
    unit.fp32_precision = precision
    try:
        yield
    finally:  # a unit that inherits its setting reads as its parent; with "none" it follows the parent again
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


if not PER_BACKEND:
    products_in = _products_in_legacy
