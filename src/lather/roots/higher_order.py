"""Coupled inverse iterations of higher order."""

from dataclasses import dataclass
from typing import ClassVar, final

from .base import check_count
from .coupled import Coupled


@final
@dataclass(frozen=True)
class HigherOrder(Coupled):
    """The coupled iteration with `order` terms. Each term costs one product per round and saves rounds. Order 2 is Newton.

    >>> HigherOrder(order=4).check(0.5)  # an inverse square root is fine
    """

    name: ClassVar[str] = "higher_order"
    order: int = 3
    iterations: int = 18

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("order", self.order, low=2, most=16)
