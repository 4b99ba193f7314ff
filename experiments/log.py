"""Raw logs: JSON lines, one for every look at a run and one for its end.

A run is known by its key. One that was cut short has no end; it is begun anew and told from its first attempt by the time at
which that began. Several processes may append to one log: a line is written at once.
"""

from __future__ import annotations

import json
import pathlib
from statistics import mean
from typing import Any, NamedTuple

Row = dict[str, Any]
RESULTS = pathlib.Path(__file__).parent / "results"


class Run(NamedTuple):
    task: str
    optimizer: str
    lr: float
    seed: int
    length: int
    unit: str  # of the length: steps or epochs

    @property
    def key(self) -> str:
        return f"{self.task}/{self.optimizer}/lr={self.lr:g}/seed={self.seed}/{self.unit}={self.length}"


class Finished(NamedTuple):
    run: Run
    looks: list[Row]  # step, seconds, losses
    end: Row  # how it ended, options, memory, versions

    @property
    def diverged(self) -> bool:
        return bool(self.end["end"] == "diverged")


def append(path: pathlib.Path, row: Row) -> None:
    """Add a line; after one that was cut off in the middle, begin another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        whole = file.read(1) in (b"", b"\n")
        file.write(b"\n" * (not whole) + json.dumps(row).encode() + b"\n")


def read(path: pathlib.Path) -> list[Finished]:
    """Every run that came to an end, in order; of one that did so more often, its last attempt."""
    return list({finished.run.key: finished for finished in attempts(path)}.values())


def attempts(path: pathlib.Path) -> list[Finished]:
    """Everything that came to an end, however often a run was tried; a line that was cut off is passed over."""
    looks: dict[tuple[str, str], list[Row]] = {}
    found = []
    for row in _rows(path):
        attempt = row["run"], row["attempt"]
        if "end" not in row:
            looks.setdefault(attempt, []).append(row)
        elif row["end"] != "failed":
            run = Run(**{name: row[name] for name in Run._fields})
            found.append(Finished(run, looks.get(attempt, []), row))
    return found


def failed(path: pathlib.Path) -> list[str]:
    """Keys of runs that ended in an error and never otherwise."""
    ended = {finished.run.key for finished in read(path)}
    return sorted({row["run"] for row in _rows(path) if row.get("end") == "failed"} - ended)


def _rows(path: pathlib.Path) -> list[Row]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def of_length(runs: list[Finished], length: int) -> list[Finished]:
    """Those of a length, or if there are none, of the longest."""
    lengths = {finished.run.length for finished in runs}
    length = length if length in lengths else max(lengths, default=length)
    return [finished for finished in runs if finished.run.length == length]


def first_seed(runs: list[Finished]) -> list[Finished]:
    first = min((finished.run.seed for finished in runs), default=0)
    return [finished for finished in runs if finished.run.seed == first]


def best_rate(runs: list[Finished], score: str) -> float | None:
    """Of the learning rates with the most seeds, the first among them, the one with the lowest mean end; those of which no seed
    diverged come first."""

    def rank(lr: float) -> tuple[bool, int, float]:
        ends = [f.looks[-1][score] for f in runs if f.run.lr == lr and not f.diverged]
        return any(f.diverged for f in runs if f.run.lr == lr), -len(ends), mean(ends)

    return min((f.run.lr for f in first_seed(runs) if not f.diverged), key=rank, default=None)


def beyond(runs: list[Finished], score: str) -> float | None:
    """The learning rate to try next if the best of the first seed is at an edge of those that were tried, so may be beyond."""
    runs = first_seed(runs)
    tried, best = {f.run.lr for f in runs}, best_rate(runs, score)
    if not tried:
        return None
    if best == max(tried):
        return 2 * best
    return min(tried) / 2 if best in (None, min(tried)) else None
