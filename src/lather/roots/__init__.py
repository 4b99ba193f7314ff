"""Inverse roots `(A + eps I)^(-e)` and eigenbases of stacks of symmetric positive semi-definite matrices, and polar factors.

A new solver is one file and one entry in `SOLVERS` (or `POLARS`). The conformance tests run over these tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import product, symmetrize
from .base import Basis, EigenSolver, Root, RootSolver, lift, settle
from .eigh import Eigh
from .firstorder import first_basis
from .higher_order import HigherOrder
from .minimax import Minimax
from .newton import Newton
from .numerics import are_products_exact, power, products_in, relative_ridge
from .polar import NewtonSchulz, Polar, PolarExpress, Svd
from .products import has_kernels, stages
from .qr import Qr
from .spec import POLARS, SOLVERS, choose, parse, parse_polar, resolve, resolve_basis, spell
from .track import Track

__all__ = [
    "POLARS",
    "SOLVERS",
    "Basis",
    "EigenSolver",
    "Eigh",
    "HigherOrder",
    "Minimax",
    "Newton",
    "NewtonSchulz",
    "Polar",
    "PolarExpress",
    "Qr",
    "Root",
    "RootSolver",
    "Svd",
    "Track",
    "are_products_exact",
    "choose",
    "first_basis",
    "has_kernels",
    "parse",
    "parse_polar",
    "power",
    "products_in",
    "relative_ridge",
    "rescue",
    "rescue_basis",
    "resolve",
    "resolve_basis",
    "solve",
    "solve_basis",
    "spell",
    "stages",
]


def solve(solver: RootSolver, a: Tensor, e: float, eps: float | Tensor, state: dict[str, Tensor]) -> Root:
    """The solver's roots. On a CPU, slots that the solver gives up on are solved again by eigh in float64.

    On an accelerator that check would make the host wait. There such slots come back as not ok. The caller learns of it
    later and passes them to :func:`rescue`.
    """
    root = solver(a, e, eps, state)
    if isinstance(solver, Eigh) or not a.is_cpu:
        return root
    bad = (~root.ok).nonzero().squeeze(1)
    if bad.numel() == 0:
        return root
    warm = {role: value[bad] for role, value in state.items()}
    rescued = rescue(a[bad], e, eps[bad] if isinstance(eps, Tensor) else eps, warm)
    state |= {role: old.index_copy(0, bad, warm[role]) for role, old in state.items()}
    return Root(*(old.index_copy(0, bad, new) for old, new in zip(root, rescued, strict=True)))


def rescue(a: Tensor, e: float, eps: float | Tensor, state: dict[str, Tensor]) -> Root:
    """Roots by eigh in float64. A basis `"Q"` in `state`, the warm start of the solver that gave up, is replaced too."""
    basis = Eigh().basis(a.double(), {})
    values = lift(basis.values, torch.ones_like(basis.values[:, :1, None]), eps)
    value = symmetrize(product(basis.vectors * power(values, -e)[:, None, :], basis.vectors.mT))
    value, ok = settle(value.to(a.dtype), basis.ok)
    if "Q" in state:
        state["Q"] = torch.where(ok[:, None, None], basis.vectors.to(a.dtype), state["Q"])
    return Root(value, ok, basis.residual.to(a.dtype))


def solve_basis(solver: RootSolver, a: Tensor, state: dict[str, Tensor]) -> Basis:
    """The solver's eigenbases. Slots that it gives up on are treated as in :func:`solve`."""
    assert isinstance(solver, EigenSolver)
    basis = solver.basis(a, state)
    if isinstance(solver, Eigh) or not a.is_cpu:
        return basis
    bad = (~basis.ok).nonzero().squeeze(1)
    if bad.numel() == 0:
        return basis
    return Basis(*(old.index_copy(0, bad, new) for old, new in zip(basis, rescue_basis(a[bad]), strict=True)))


def rescue_basis(a: Tensor) -> Basis:
    """Eigenbases by eigh in float64."""
    vectors, values, ok, residual = Eigh().basis(a.double(), {})
    return Basis(vectors.to(a.dtype), values.to(a.dtype), ok, residual.to(a.dtype))
