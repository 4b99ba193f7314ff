"""Distributed Shampoo for PyTorch."""

from ._version import __version__
from .health import NumericalWarning
from .optimizer import Shampoo
from .plan_report import PlanReport, plan
from .roots import Eigh, HigherOrder, Minimax, Newton, NewtonSchulz, PolarExpress, Qr, Svd, Track

__all__ = [
    "Eigh",
    "HigherOrder",
    "Minimax",
    "Newton",
    "NewtonSchulz",
    "NumericalWarning",
    "PlanReport",
    "PolarExpress",
    "Qr",
    "Shampoo",
    "Svd",
    "Track",
    "__version__",
    "plan",
]
