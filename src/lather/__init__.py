"""Distributed Shampoo for PyTorch."""

from ._version import __version__
from .health import NumericalWarning
from .optimizer import Shampoo
from .plan_report import PlanReport, plan
from .roots import Eigh, HigherOrder, Minimax, Newton, Qr, Track

__all__ = [
    "Eigh",
    "HigherOrder",
    "Minimax",
    "Newton",
    "NumericalWarning",
    "PlanReport",
    "Qr",
    "Shampoo",
    "Track",
    "__version__",
    "plan",
]
