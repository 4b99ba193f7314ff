"""Inverse roots `(A + eps I)^(-e)` and eigenbases of stacks of symmetric positive semi-definite matrices.

A new solver is one file and one entry in `SOLVERS`; the conformance tests run over that table.
"""

from __future__ import annotations

from torch import Tensor

from .auto import choose
from .base import Basis, EigenSolver, Root, RootSolver, settle
from .eigh import Eigh
from .higher_order import HigherOrder
from .newton import Newton
from .numerics import power
from .qr import Qr
from .spec import SOLVERS, parse, resolve, spell

__all__ = [
    "SOLVERS",
    "Basis",
    "EigenSolver",
    "Eigh",
    "HigherOrder",
    "Newton",
    "Qr",
    "Root",
    "RootSolver",
    "choose",
    "parse",
    "power",
    "resolve",
    "solve",
    "spell",
]


def solve(solver: RootSolver, a: Tensor, e: float, eps: float, state: dict[str, Tensor]) -> Root:
    """The solver's roots, with the slots that it gives up on done once more by eigh in float64.

    One host read, to see whether there are such slots; none for Eigh, which does this itself.
    """
    root = solver(a, e, eps, state)
    if isinstance(solver, Eigh):
        return root
    bad = (~root.ok).nonzero().squeeze(1)
    if bad.numel() == 0:
        return root
    exact = Eigh()(a[bad].double(), e, eps, {})
    value, ok = settle(exact.value.to(a.dtype), exact.ok)
    rescued = Root(value, ok, exact.residual.to(a.dtype))
    return Root(*(old.index_copy(0, bad, new) for old, new in zip(root, rescued, strict=True)))
