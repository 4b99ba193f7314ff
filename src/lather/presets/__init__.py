"""Recipes of other optimizers, carried over to :class:`Shampoo`.

A preset takes the arguments of torch's class (of its authors' for SOAP), with its defaults, and then any options of ``Shampoo``,
which win over what the preset chose. That holds for param groups too. Names that torch has are torch's: ``eps`` is
``graft_eps`` in ``Shampoo``, and the damping of the factors, which ``Shampoo`` calls ``eps``, is ``factor_eps``; in :func:`muon`
and :func:`soap` ``eps`` is something else again, and there is no ``factor_eps``.
"""

from .from_torch import from_adagrad, from_adam, from_adamw, from_sgd, low_memory
from .muon import muon
from .soap import soap

__all__ = ["from_adagrad", "from_adam", "from_adamw", "from_sgd", "low_memory", "muon", "soap"]
