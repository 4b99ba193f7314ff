"""The solver behind `root="auto"`."""

from __future__ import annotations

import torch

from .base import RootSolver
from .coupled import supports
from .eigh import Eigh
from .newton import Newton


def choose(d: int, device: torch.device | str, e: float) -> RootSolver:
    """The solver for roots of exponent `e` of matrices of size `d` on `device`.

    On CUDA eigh takes its matrices one by one and `newton` does not: it trained a byte-level transformer to within 0.01
    bits per byte of eigh in a third of the time (benchmarks/README.md). Everywhere else eigh. How many matrices there
    are is left out on purpose: it differs between ranks.
    """
    on_cuda = torch.device(device).type == "cuda"
    return Newton() if on_cuda and d >= 32 and supports(e) else Eigh()
