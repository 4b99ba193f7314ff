"""Distributed Shampoo for PyTorch."""

from ._version import __version__
from .health import NumericalWarning
from .optimizer import Shampoo
from .plan_report import PlanReport, plan
from .presets import from_adagrad, from_adam, from_adamw, from_sgd, low_memory, muon, soap
from .roots import Eigh, HigherOrder, Minimax, Newton, NewtonSchulz, PolarExpress, Qr, Svd, Track
from .routing import route

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
    "from_adagrad",
    "from_adam",
    "from_adamw",
    "from_sgd",
    "low_memory",
    "muon",
    "plan",
    "route",
    "soap",
]
