"""Distributed Shampoo for PyTorch."""

from ._version import __version__
from .monitor import Monitor
from .optimizer import Shampoo
from .presets import distributed_shampoo, from_adagrad, from_adam, from_adamw, from_sgd, low_memory, muon, soap
from .report.plan import PlanReport, plan
from .report.tune import TuneReport, tune
from .roots import Eigh, HigherOrder, Minimax, Newton, NewtonSchulz, PolarExpress, Svd, Track
from .routing import route
from .runtime.health import NumericalWarning

__all__ = [
    "Eigh", "HigherOrder", "Minimax", "Monitor", "Newton", "NewtonSchulz", "NumericalWarning", "PlanReport", "PolarExpress",
    "Shampoo", "Svd", "Track", "TuneReport", "__version__", "distributed_shampoo", "from_adagrad", "from_adam", "from_adamw",
    "from_sgd", "low_memory", "muon", "plan", "route", "soap", "tune",
]  # fmt: skip
