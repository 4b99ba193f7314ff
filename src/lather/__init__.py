"""Distributed Shampoo for PyTorch."""

from ._version import __version__
from .health import NumericalWarning
from .optimizer import Shampoo
from .plan_report import PlanReport, plan
from .roots import Eigh, HigherOrder, Newton, Qr

__all__ = [
    "Eigh",
    "HigherOrder",
    "Newton",
    "NumericalWarning",
    "PlanReport",
    "Qr",
    "Shampoo",
    "__version__",
    "plan",
]
