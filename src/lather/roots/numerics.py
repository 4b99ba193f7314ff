"""Small tools that the root solvers share: exact scaling, reproducible powers, float32 products at full precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..linalg import product

# Far below any ridge that matters. In float32 its inverse and products of its roots are still finite.
SMALLEST_RIDGE = 1e-30


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32, whatever autocast, TF32 and bfloat16 settings the user has.

    A root spans the decades of its factor's spectrum. The ten bits of TF32 keep three of them.
    """
    with torch.autocast(device.type, enabled=False), products_in("ieee", device):
        yield


@contextmanager
def products_in(precision: str | None, device: torch.device) -> Iterator[None]:
    """Compute float32 products on `device` in "ieee" float32 or, on CUDA, in "tf32". None keeps the user's setting.

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


def eye_like(a: Tensor) -> Tensor:
    """The identity [d, d] in the dtype and on the device of `a` [n, d, d]."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def all_finite(x: Tensor) -> Tensor:
    """[n] bool: whether every entry of the slot is finite."""
    return torch.isfinite(x).flatten(1).all(1)


def normalize(a: Tensor, floor: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
    """`a / c` and `c` [n, 1, 1], the power of two with `c <= max(|a|, floor) < 2c`, or 1 if that maximum is 0.

    Division by `c` is exact. Afterwards squares neither overflow nor vanish.
    """
    size = a.abs().amax((1, 2), keepdim=True).clamp(min=floor)
    # Dividing by the mantissa is exact down to denormals. ldexp, a float pow, is not.
    c = torch.where(size > 0, size / (2 * torch.frexp(size).mantissa), 1.0)
    return a / c, c


def relative_ridge(a: Tensor, eps: float) -> Tensor:
    """`max(eps s, 1e-30)` [n], `s = ||A^2||_F^(1/2)`, for matrices [n, d, d] or diagonals [n, d].

    `s` is the Schatten 4-norm. It is between `lambda_max` and `d^(1/4) lambda_max`, and close to `lambda_max` if the spectrum
    decays. The floor is the ridge of a factor that is zero or nearly zero.
    """
    if a.dim() == 2:
        ridge = eps * _fourth_norm(a.double().square())
    else:
        with full_precision(a.device):
            x, scale = normalize(a)
            ridge = eps * _fourth_norm(product(x, x)) * scale.flatten()  # in this order the norm itself cannot overflow
    return ridge.clamp(min=SMALLEST_RIDGE)


def _fourth_norm(squares: Tensor) -> Tensor:
    """`||A^2||_F^(1/2)` [n] from `A^2`."""
    norm: Tensor = torch.linalg.vector_norm(squares, dim=tuple(range(1, squares.dim())))
    return norm.sqrt()


def power(x: Tensor, exponent: float) -> Tensor:
    """`x^exponent` elementwise for [n, d], in float64. A slot gets the same bits in every stack.

    `pow` runs different code in the vector body and in the tail of an array. Rows padded to whole vectors have no tail.
    """
    d = x.shape[-1]
    rows = torch.nn.functional.pad(x.double(), (0, -d % 64), value=1.0)
    return (rows**exponent)[:, :d]


def column(x: float | Tensor, like: Tensor) -> Tensor:
    """A number, or one per slot [n], as [n, 1, 1] in the dtype and on the device of `like` [n, d, d]."""
    if isinstance(x, Tensor):
        return x.to(like.dtype).view(-1, 1, 1)
    return torch.full((like.shape[0], 1, 1), x, dtype=like.dtype, device=like.device)
