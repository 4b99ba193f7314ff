"""Which options to recommend, given what each takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# What an option adds to the distance from the usual ones: for every factor of two if it is a number, once if it is another word.
DISTANCE = {
    "max_preconditioner_dim": 2.0,
    "precondition_frequency": 1.0,
    "root_dtype": 0.5,
    "factors": 0.1,
    "root": 0.05,
    "refresh": 0.05,
}


@dataclass(frozen=True)
class Row:
    """Options, and what they take. Times of a step, mean and largest over a period of refreshes, are None if it was not timed."""

    options: dict[str, Any]
    memory_bytes: int
    mean_ms: float | None = None
    largest_ms: float | None = None
    note: str = ""  # why it was not timed
    on_frontier: bool = False

    def costs(self) -> tuple[float, ...]:
        """What should be small: times and memory; and, for the quality of roots, their age, their rounding and the cutting."""
        mine = self.options
        quality = mine["precondition_frequency"], mine["root_dtype"] != "float32", -mine["max_preconditioner_dim"]
        return (self.mean_ms or 0.0, self.largest_ms or 0.0, self.memory_bytes, *quality)


@dataclass(frozen=True)
class Budgets:
    """What the optimizer may take. None is no limit."""

    memory: int | None = None  # bytes of the optimizer
    step_ms: float | None = None  # of the largest training step: forward, backward and optimizer
    overhead: float | None = None  # what an optimizer step may add on average, as a fraction of forward and backward
    pass_ms: float = 0.0  # what forward and backward take

    def used(self, row: Row) -> dict[str, float]:
        """How much of each budget a row takes; more than 1 is too much."""
        mean, largest = (math.inf if ms is None else ms for ms in (row.mean_ms, row.largest_ms))
        found = {}
        if self.memory is not None:
            found["memory"] = row.memory_bytes / self.memory
        if self.step_ms is not None:
            found["step_ms"] = (self.pass_ms + largest) / self.step_ms
        if self.overhead is not None:
            found["overhead"] = mean / (self.pass_ms * self.overhead)
        return found

    def excess(self, row: Row) -> float:
        """The most that a row takes of a budget; 1 if it keeps all of them."""
        return max([1.0, *self.used(row).values()])


def mark_frontier(rows: Sequence[Row]) -> list[Row]:
    """The rows, with a mark on those that were timed and that no other beats: as good in everything and better in something."""
    costs = {i: row.costs() for i, row in enumerate(rows) if row.mean_ms is not None}

    def is_beaten(mine: tuple[float, ...]) -> bool:
        return any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in costs.values())

    return [replace(row, on_frontier=i in costs and not is_beaten(costs[i])) for i, row in enumerate(rows)]


def distance(options: Mapping[str, Any], usual: Mapping[str, Any]) -> float:
    """How far options are from the usual ones.

    >>> usual = dict.fromkeys(DISTANCE, "a") | {"max_preconditioner_dim": 1024, "precondition_frequency": 10}
    >>> distance(usual | {"precondition_frequency": 40, "factors": "b"}, usual)
    2.1
    """
    total = 0.0
    for name, weight in DISTANCE.items():
        one, other = options[name], usual[name]
        if isinstance(one, str):
            total += weight * (one != other)
        else:
            total += weight * abs(math.log2(min(one, 1 << 20) / min(other, 1 << 20)))  # one may be infinite
    return total


def recommend(rows: Sequence[Row], budgets: Budgets, usual: Mapping[str, Any]) -> Row:
    """The row nearest to the usual options that keeps all budgets. If no row does, the one that exceeds them least."""

    def order(row: Row) -> tuple[float, ...]:
        known = max([1.0, *(used for used in budgets.used(row).values() if used < math.inf)])
        twentieths = math.ceil(20 * (known - 1))  # finer than that, times are noise
        return row.mean_ms is None, twentieths, distance(row.options, usual), row.mean_ms or 0.0

    return min(rows, key=order)
