"""Coupled inverse Newton iteration."""

from dataclasses import dataclass
from typing import ClassVar, final

from .coupled import Coupled


@final
@dataclass(frozen=True)
class Newton(Coupled):
    """The coupled iteration of order 2, `T = ((p + 1) I - M) / p`. Its rounds are the cheapest, and it needs the most.

    >>> Newton(iterations=40).check(0.455)
    Traceback (most recent call last):
    ValueError: exponent=0.455 is not s/p with s <= 8 and p <= 32, which coupled iterations need; use ...
    """

    name: ClassVar[str] = "newton"

    @property
    def order(self) -> int:
        return 2
