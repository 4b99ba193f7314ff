"""Methods on stacks of blocks. To add one: a file, and a line in this table."""

from .base import Batch, Context, Due, Preconditioner, Stack, State, Transform
from .filter import filter_correction, filter_gradient, init_filter
from .grafts import GRAFTS, Graft
from .kl import KL
from .shampoo import Kronecker, factors_of, modes_of
from .soap import Soap
from .spectral import Spectral

PRECONDITIONERS: dict[str, Transform] = {"shampoo": Kronecker(), "soap": Soap(), "kl": KL(), "spectral": Spectral()}

__all__ = [
    "GRAFTS",
    "PRECONDITIONERS",
    "Batch",
    "Context",
    "Due",
    "Graft",
    "Preconditioner",
    "Stack",
    "State",
    "Transform",
    "factors_of",
    "filter_correction",
    "filter_gradient",
    "init_filter",
    "modes_of",
]
