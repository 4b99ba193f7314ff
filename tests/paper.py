"""The first defaults, for tests of their schedule and of numbers that were worked out by hand; and those of today."""

from typing import Any

from lather.options import OPTIONS

PAPER: dict[str, Any] = {
    "betas": (0.9, 0.95),
    "beta3": None,
    "exponent": None,
    "damping": "absolute",
    "eps": 1e-12,
    "refresh_warmup": 0.0,
    "block_multiple": 1,
    "graft": "adam",
}
TODAY: dict[str, Any] = {name: OPTIONS[name].default for name in PAPER}
