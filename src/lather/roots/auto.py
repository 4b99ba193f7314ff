"""The solver behind `root="auto"`."""

from __future__ import annotations

import torch

from .base import RootSolver
from .coupled import supports
from .eigh import Eigh
from .minimax import Minimax
from .newton import Newton
from .products import splits


def choose(d: int, device: torch.device | str, e: float) -> RootSolver:
    """The solver for roots of exponent `e` of matrices of size `d` on `device`.

    On CUDA eigh takes its matrices one by one; solvers made of products do not: `minimax`, whose products need a compiler
    for its kernels, or `newton`. Everywhere else eigh. How many matrices there are is left out on purpose: it differs
    between ranks.
    """
    if torch.device(device).type != "cuda" or d < 32 or not supports(e):
        return Eigh()
    return Minimax() if splits() else Newton()
