"""Methods on stacks of blocks. To add one: a file, and its class in ``METHODS``."""

from .base import FULL, Context, Hyper, Method, Stack, State, Transform
from .filter import FILTER_ROLES, FILTER_SUMS, filter_correction, filter_gradient, init_filter
from .grafts import GRAFTS, Graft
from .kl import KL
from .shampoo import Kronecker, Shampoo
from .soap import Soap
from .spectral import Spectral

METHODS: dict[str, Method] = {method.name: method for method in (Shampoo(), Soap(), KL(), Spectral())}

__all__ = [
    "FILTER_ROLES",
    "FILTER_SUMS",
    "FULL",
    "GRAFTS",
    "METHODS",
    "Context",
    "Graft",
    "Hyper",
    "Kronecker",
    "Method",
    "Stack",
    "State",
    "Transform",
    "filter_correction",
    "filter_gradient",
    "init_filter",
]
