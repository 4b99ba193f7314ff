"""Presets: :class:`Shampoo` with the arguments and defaults of another optimizer.

Any option of ``Shampoo`` may follow, and wins over what the preset chose; the same holds in param groups. ``docs/recipes.md``
and ``docs/paper.md`` say what each argument becomes.
"""

from .distributed_shampoo import distributed_shampoo
from .from_torch import from_adagrad, from_adam, from_adamw, from_sgd, low_memory
from .muon import muon
from .soap import soap

__all__ = ["distributed_shampoo", "from_adagrad", "from_adam", "from_adamw", "from_sgd", "low_memory", "muon", "soap"]
