"""The tuner: times options of the optimizer on this device, and recommends some that keep budgets."""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..linalg import are_products_exact
from ..planning.layouts import layout_named
from ..runtime.session import all_ranks
from .choice import Budgets, Row, mark_frontier
from .plan import bytes_text, table
from .timing import time_closure
from .trials import LATE, Model, Trials, show_progress


@dataclass(init=False, repr=False, eq=False)
class TuneReport:
    """Print it, or read its attributes; ``to_dict()`` gives plain data. ``line`` makes the recommended optimizer."""

    title: str
    rows: list[Row]
    budgets: Budgets
    recommended: Row
    fits: bool  # whether the recommendation keeps all budgets
    line: str
    run_ms: tuple[float, float] | None  # mean and largest step in a run of the recommendation
    ranks: list[dict[str, Any]]  # estimates

    def __init__(self, title: str, trials: Trials, ranks: Sequence[int], shard: str) -> None:
        best, self.run_ms = trials.settle()
        number = trials.rows.index(best)
        self.title, self.budgets, self.rows = title, trials.budgets, mark_frontier(trials.rows)
        self.recommended, self.line = self.rows[number], trials.line(best)
        self.fits = self.budgets.excess(best) <= 1
        self.ranks = [trials.on_ranks(n, shard) for n in ranks]

    @property
    def frontier(self) -> list[Row]:
        return [row for row in self.rows if row.on_frontier]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        row = self.recommended
        lines = [self.title, "", *_grid(self.rows, row), ""]
        lines += ["Milliseconds of an optimizer step: mean/largest. * on the frontier, [ ] recommended."]
        late = any(each.note == LATE for each in self.rows)
        lines += [*(["Some options were not timed. Give the search more seconds."] if late else []), ""]
        lines += self._missed()
        lines += ["Recommended:" if self.fits else "Nearest:", f"    {self.line}", ""]
        times = "" if row.mean_ms is None else f", predicted {_times(row.mean_ms, row.largest_ms)}"
        times += "" if self.run_ms is None else f", in a run {_times(*self.run_ms)}"
        lines += [f"memory {bytes_text(row.memory_bytes)}{times}"]
        if used := self.budgets.used(row):
            lines += ["budgets: " + ", ".join(f"{name} {self._text(name, x)} of {self._text(name)}" for name, x in used.items())]
        return "\n".join([*lines, *(["", *_ranks_table(self.ranks)] if self.ranks else [])])

    def _missed(self) -> list[str]:
        """Which budgets cannot be kept."""
        if self.fits:
            return []
        least = {name: min(self.budgets.used(row)[name] for row in self.rows) for name in self.budgets.used(self.recommended)}
        lines = [
            f"No options keep {name} {self._text(name)}: the least is {self._text(name, x)}." for name, x in least.items() if x > 1
        ]
        return [*(lines or ["Each budget can be kept, but not all of them at once."]), ""]

    def _text(self, name: str, used: float = 1.0) -> str:
        """A budget, or how much of it is used."""
        if used == math.inf:
            return "not known"
        if name == "memory":
            return bytes_text(used * (self.budgets.memory or 0))
        if name == "step_ms":
            return f"{_short(used * (self.budgets.step_ms or 0))} ms"
        return f"{used * (self.budgets.overhead or 0):.1%}"


def tune(
    model: Model,
    *,
    memory: int | str | None = None,
    step_ms: float | None = None,
    overhead: float | str | None = None,
    forward_backward: float | Callable[[], Any] | None = None,
    ranks: Sequence[int] = (),
    shard: str = "ddp",
    device: str | torch.device | None = None,
    preset: str = "Shampoo",
    seconds: float = 120.0,
    progress: bool | None = None,
    **given: Any,
) -> TuneReport:
    """Time options of the optimizer on this device, and recommend those nearest to the usual ones that keep all budgets.

    Steps are real, on parameters like the model's, with random gradients. The model is not changed, and may be on the meta device.
    ``given`` are arguments of ``preset``; what they set is not searched. Budgets:

    - ``memory``: bytes, or ``"40GB"``, of the optimizer, above parameters and gradients
    - ``step_ms``: milliseconds of the largest training step: forward, backward and optimizer
    - ``overhead``: what the optimizer adds to forward and backward on average: 0.1, or ``"10%"``

    ``forward_backward`` is the time of forward and backward in milliseconds, or a function that runs them once. Without it, it is
    ``step_ms / (1 + overhead)`` if both are given; ``step_ms`` alone is then a budget for the optimizer's step alone. ``ranks``
    are numbers of ranks to estimate for, and ``shard`` how they store the parameters. The search ends after ``seconds``.

    >>> import torch, lather
    >>> report = lather.tune(torch.nn.Linear(8, 4), memory="1MB", precondition_frequency=10)
    >>> report.fits, report.line
    (True, 'lather.Shampoo(model, precondition_frequency=10)')
    """
    if len(all_ranks(None)) > 1:
        raise ValueError("tune runs in one process; ranks=(8, 64) estimates for several")
    for n in ranks:
        layout_named(shard, n, order=2)  # a mistake is better found before the search
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"seconds={seconds!r} is not a number of seconds, at least 0 and finite")
    where = find_device(model, device)
    if callable(forward_backward):
        forward_backward = time_closure(forward_backward, model, where)
    budgets = make_budgets(memory, step_ms, overhead, forward_backward)
    trials = Trials(model, preset, given, where, budgets, shared=bool(ranks))
    show = sys.stderr.isatty() if progress is None else progress
    trials.search(seconds, show_progress if show else lambda *_: None)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)
    count = sum(math.prod(row.shape) for row in trials.base.params)
    title = f"{count:,} parameters on {name}, float32 matmul precision {torch.get_float32_matmul_precision()!r}"
    title += f", forward and backward {_short(budgets.pass_ms)} ms" if budgets.pass_ms else ""
    if where.type == "cuda" and "precision" not in given and are_products_exact():
        title += '\nProducts are in float32 here. Those of TF32 are faster: precision="fast"'
    return TuneReport(title, trials, ranks, shard)


def make_budgets(
    memory: int | str | None = None,
    step_ms: float | None = None,
    overhead: float | str | None = None,
    forward_backward: float | None = None,
) -> Budgets:
    """
    >>> make_budgets(step_ms=75, overhead="25%").pass_ms
    60.0
    """
    size, part = parse_bytes(memory), parse_fraction(overhead)
    most, ms = _milliseconds("step_ms", step_ms), _milliseconds("forward_backward", forward_backward)
    if ms is None and part is not None:
        if most is None:
            raise ValueError(
                "overhead is a fraction of the forward and backward pass; give its milliseconds as forward_backward (on the "
                "command line --forward-backward-ms), or give step_ms"
            )
        ms = most / (1 + part)
    return Budgets(size, most, part, ms or 0.0)


def parse_bytes(size: int | str | None) -> int | None:
    """
    >>> parse_bytes("40GB"), parse_bytes("1.5 GiB"), parse_bytes(2**20)
    (40000000000, 1610612736, 1048576)
    """
    if size is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*)\s*([kmgt]?)(i?)b?", str(size).strip(), re.IGNORECASE)
    count = 0.0
    if found:
        count = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    if not 1 <= count < math.inf:
        raise ValueError(f"memory={size!r} is not a size such as '40GB', '40GiB' or '512MB'")
    return int(count)


def parse_fraction(part: float | str | None) -> float | None:
    """
    >>> parse_fraction("10%"), parse_fraction(0.1)
    (0.1, 0.1)
    """
    if part is None:
        return None
    text = str(part).strip()
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"overhead={part!r} is not a fraction such as '10%' or 0.1")
    return value


def _milliseconds(name: str, ms: Any) -> float | None:
    if ms is not None and not (isinstance(ms, (int, float)) and 0 < ms < math.inf):
        raise ValueError(f"{name}={ms!r} is not a number of milliseconds, more than 0")
    return ms


def find_device(model: Model, device: str | torch.device | None) -> torch.device:
    """Where to time: as given; or where the model is; or, if it is on the meta device, on a GPU if there is one."""
    own = [p.device for p in model.parameters() if not p.is_meta] if isinstance(model, nn.Module) else []
    found = device or next(iter(own), "cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.empty(0, device=found).device  # with its number
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={str(found)!r} cannot be used: {error}") from error
    if where.type == "meta":
        raise ValueError("device='meta' has no numbers, and no times; give a device that computes, such as 'cpu' or 'cuda'")
    return where


def _grid(rows: Sequence[Row], recommended: Row) -> list[str]:
    """A line for all frequencies of the same other options, if there was time for them."""
    names = ("max_preconditioner_dim", "root", "factors", "root_dtype", "refresh")
    frequencies = sorted({row.options["precondition_frequency"] for row in rows})
    found: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in (row for row in rows if row.note != LATE or row is recommended):
        found.setdefault(tuple(str(row.options[name]) for name in names), {})[row.options["precondition_frequency"]] = row
    lines = [("block", "root", "factors", "roots", "refresh", "memory", *(f"every {n}" for n in frequencies))]
    for key, cells in found.items():
        texts = [_cell(cells.get(n), recommended) for n in frequencies]
        note = next(iter(cells.values())).note
        texts = [note, *([""] * (len(texts) - 1))] if note else texts
        lines.append((*key, bytes_text(max(row.memory_bytes for row in cells.values())), *texts))
    return table(lines)


def _cell(row: Row | None, recommended: Row) -> str:
    if row is None or row.mean_ms is None:
        return ""
    text = f"{_short(row.mean_ms)}/{_short(row.largest_ms)}"
    return (f"[{text}]" if row is recommended else text) + "*" * row.on_frontier


def _times(mean: float, largest: float | None) -> str:
    return f"mean {_short(mean)} ms and largest {_short(largest)} ms"


def _short(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _ranks_table(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [("ranks", "memory/rank", "mean ms", "largest ms", "within budgets", "options")]
    for one in ranks:
        times = (_short(one[name]) for name in ("mean_ms", "largest_ms"))
        lines.append((str(one["ranks"]), bytes_text(one["memory_bytes"]), *times, "yes" if one["fits"] else "no", one["line"]))
    about = "Estimates for several ranks: times are scaled by the largest share of the work, and communication is not in them."
    return [about, *table(lines)]
