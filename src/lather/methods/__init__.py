"""Methods on stacks of blocks. To add one: a file, and its class in ``METHODS``; outside of the package, :func:`register`."""

from .base import FULL, Context, Hyper, Method, Stack, State, Transform
from .filter import FILTER_ROLES, FILTER_SUMS, filter_correction, filter_gradient, init_filter, refiltered
from .grafts import GRAFTS, Graft
from .kl import KL
from .shampoo import Kronecker, Shampoo
from .soap import Soap
from .spectral import Spectral

METHODS: dict[str, Method] = {method.name: method for method in (Shampoo(), Soap(), KL(), Spectral())}


def register(method: Method) -> None:
    """Make a method a value of ``preconditioner``. Plans, reports, checkpoints and error messages then know it too."""
    known = METHODS.get(method.name, method)
    if type(known) is not type(method):
        raise ValueError(
            f"the method {type(method).__name__} has the name {method.name!r}, which is that of {type(known).__name__}; give it "
            "another name"
        )
    METHODS[method.name] = method


__all__ = [
    "FILTER_ROLES", "FILTER_SUMS", "FULL", "GRAFTS", "METHODS", "Context", "Graft", "Hyper", "Kronecker", "Method", "Stack",
    "State", "Transform", "filter_correction", "filter_gradient", "init_filter", "refiltered", "register",
]  # fmt: skip
