"""Presets: :class:`Shampoo` with the arguments and defaults of another optimizer.

Any option of ``Shampoo`` may follow, and wins over what the preset chose; the same holds in param groups. ``docs/recipes.md``
and ``docs/paper.md`` say what each argument becomes.
"""

import difflib
from collections.abc import Callable

from ..optimizer import Shampoo
from .distributed_shampoo import distributed_shampoo
from .from_torch import from_adagrad, from_adam, from_adamw, from_sgd, low_memory
from .muon import muon
from .soap import soap

__all__ = ["distributed_shampoo", "from_adagrad", "from_adam", "from_adamw", "from_sgd", "low_memory", "muon", "soap"]

PRESETS: dict[str, Callable[..., Shampoo]] = {"Shampoo": Shampoo} | {name: globals()[name] for name in __all__}


def find(name: str) -> Callable[..., Shampoo]:
    """The preset of this name; ``"Shampoo"`` is the optimizer itself."""
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, PRESETS))}"
        raise ValueError(f"there is no preset {name!r}; {meant}")
    return PRESETS[name]
