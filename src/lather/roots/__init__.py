"""Inverse roots `(A + eps I)^(-e)` and eigenbases of stacks of symmetric positive semi-definite matrices, and polar factors.

A new solver is one file and one entry in `SOLVERS` (or `POLARS`). The conformance tests run over these tables.
"""

from .base import Basis, EigenSolver, Relative, Root, RootSolver
from .eigh import Eigh, rescue, rescue_basis, solve, solve_basis
from .firstorder import first_basis
from .higher_order import HigherOrder
from .minimax import Minimax
from .newton import Newton
from .polar import NewtonSchulz, Polar, PolarExpress, Svd
from .spec import POLARS, SOLVERS, choose, parse, parse_polar, replaced, resolve, resolve_basis, spell
from .track import Track

__all__ = [
    "POLARS", "SOLVERS", "Basis", "EigenSolver", "Eigh", "HigherOrder", "Minimax", "Newton", "NewtonSchulz", "Polar",
    "PolarExpress", "Relative", "Root", "RootSolver", "Svd", "Track", "choose", "first_basis", "parse", "parse_polar",
    "replaced", "rescue", "rescue_basis", "resolve", "resolve_basis", "solve", "solve_basis", "spell",
]  # fmt: skip
