"""The search of the tuner: which options are tried, and what they take."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, final

import torch
from torch import nn

from ..runtime.session import device_memory
from ..settings import resolve
from .choice import DISTANCE, Budgets, Row, recommend
from .plan import PlanReport, bytes_text, make_optimizer, plan
from .timing import SPREAD, WARMING, Bench, Times

Model = nn.Module | Mapping[str, Sequence[int]]
Changes = dict[str, Any]  # options that are not the usual ones

BLOCKS = (512, 1024, 2048, 4096)
FREQUENCIES = (1, 2, 5, 10, 20, 50, 100)
SOLVERS = {"cuda": ("minimax", "newton"), "cpu": ("eigh", "newton")}
GAIN = 0.95  # a solver that takes less than this fraction of the time replaces the usual one
TRIES = 3  # recommendations that are run before one is settled on
LONGEST = 30e3  # milliseconds of such a run
LATE = "not timed: no time left"


class Trial(NamedTuple):
    changes: Changes
    plan: PlanReport
    times: Times | None
    note: str  # why it was not timed

    def memory_bytes(self, refresh: str) -> int:
        """By plan, or the peak if that was measured and is higher."""
        planned = self.plan.state_bytes + self.plan.scratch_bytes
        return max(planned, self.times.peaks.get(refresh, 0) if self.times else 0)


@final
class Trials:
    """``usual`` has the options that are searched, as they are without a tuner. ``given`` are options that are not searched."""

    def __init__(
        self, model: Model, preset: str, given: Mapping[str, Any], device: torch.device, budgets: Budgets, shared: bool
    ) -> None:
        """``shared``: the budget of memory is for a rank of several, so more than that may be tried here."""
        self._model, self._preset, self._given, self._device = model, preset, dict(given), device
        memory = device_memory(device)
        limits = [memory, None if shared else budgets.memory]
        self._limit = min((limit for limit in limits if limit is not None), default=math.inf)
        self._done: list[Trial] = []
        self.budgets, self.rows = budgets, list[Row]()
        self.base, opt = self._plan({}), make_optimizer(model, preset, given)
        if not self.base.refresh_flops:
            raise ValueError("there is nothing to tune: no parameter has roots that are refreshed")
        group = next(group for group in opt.param_groups if group["preconditioner"] is not None)
        self.usual = {name: group[name] for name in DISTANCE} | {"root_dtype": group["root_dtype"] or group["state_dtype"]}
        self._delay, self._packs = group["refresh_delay"], resolve(group).packs(str(device))
        params = [p for group in opt.param_groups for p in group["params"]]
        needed = 3 * sum(p.numel() * p.itemsize for p in params)
        try:
            if memory is not None and needed > memory:
                raise torch.OutOfMemoryError(f"{bytes_text(needed)} of {bytes_text(memory)}")
            self._bench = Bench(opt, device)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"the parameters and two sets of gradients do not fit on {device}; tune a smaller model") from error

    # The search.

    def search(self, seconds: float, show: Callable[[int, int, str], None]) -> None:
        """Time sizes of blocks, then solvers, each with all else as usual. Then sizes of blocks with the fastest solver and with
        what saves memory."""
        end = time.monotonic() + seconds
        auto = {solver for bank in self.base.banks for solver in bank.solvers}
        solvers = [{"root": name} for name in self._others("root", SOLVERS.get(self._device.type, ())) if name not in auto]
        blocks, less = list(self._blocks()), list(self._savings())
        total = len(solvers) + len(blocks) * len(less)
        for changes in self._in_order(solvers, blocks, less):
            show(len(self._done), max(total, len(self._done) + 1), _words(changes))  # more, if another solver is faster
            self._try(changes, time.monotonic() > end)
        show(total, total, "")
        self.rows = [row for trial in self._done for row in self._rows_of(trial)]

    def _in_order(self, solvers: list[Changes], blocks: list[Changes], less: list[Changes]) -> Iterator[Changes]:
        yield from blocks
        yield from solvers
        known, fastest = [*blocks, *solvers], self._fastest()
        for saving, block in product(less, blocks):
            if (changes := block | saving | fastest) not in known:
                yield changes

    def _others(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Values of an option to try besides the usual one; none if the user has set it."""
        return [value for value in values if value != self.usual[name]] if name not in self._given else []

    def _blocks(self) -> Iterator[Changes]:
        """Sizes that cut the parameters in different ways, the usual one first."""
        seen = list[Any]()
        near = sorted(self._others("max_preconditioner_dim", BLOCKS), key=lambda size: abs(math.log2(size / 1024)))
        for changes in ({}, *({"max_preconditioner_dim": size} for size in near)):
            blocks = [row.block_shapes for row in self._plan(changes).params]
            if blocks not in seen:
                seen.append(blocks)
                yield changes

    def _savings(self) -> Iterator[Changes]:
        choices = {"root_dtype": ("float32", "bfloat16"), "factors": ("full",) if self._packs else ("packed",)}
        for values in product(*([None, *self._others(name, some)] for name, some in choices.items())):
            yield {name: value for name, value in zip(choices, values, strict=True) if value}

    def _fastest(self) -> Changes:
        """The fastest solver of those that were timed, if it is faster than the usual one by some margin."""
        frequency, timed = self.usual["precondition_frequency"], [t for t in self._done if t.changes.keys() <= {"root"}]
        times = [(t.times.mean("together", frequency), t.changes) for t in timed if t.times]
        usual = next((ms for ms, changes in times if not changes), math.inf)
        ms, changes = min(times, key=lambda each: each[0], default=(math.inf, {}))
        return changes if ms < GAIN * usual else {}

    def _try(self, changes: Changes, late: bool) -> None:
        try:
            report = self._plan(changes)
            opt = make_optimizer(self._model, self._preset, self._given | changes)
        except ValueError:
            if not changes:
                raise
            return  # the method has no such option, or it contradicts others that are given
        planned, times, note = report.state_bytes + report.scratch_bytes, None, ""
        if planned > self._limit:
            note = f"not timed: needs {bytes_text(planned)}"
        elif late and self._done:
            note = LATE
        else:
            try:
                times = self._bench.measure(opt)
                note = "roots failed" if opt.health() else ""
            except RuntimeError as error:
                is_full = isinstance(error, torch.OutOfMemoryError)
                note = "out of memory" if is_full else f"failed: {str(error).partition(chr(10))[0]}"
        self._done.append(Trial(changes, report, None if note else times, note))

    def _plan(self, changes: Changes, **paper: Any) -> PlanReport:
        return plan(self._model, device=self._device.type, preset=self._preset, **paper, **(self._given | changes))

    def _rows_of(self, trial: Trial) -> Iterator[Row]:
        frequencies = {self.usual["precondition_frequency"], *self._others("precondition_frequency", FREQUENCIES)}
        refreshes = (self.usual["refresh"], *self._others("refresh", ("together", "staggered")))
        for refresh, frequency in product(refreshes, sorted(n for n in frequencies if n > self._delay)):
            if frequency < SPREAD[0] and refresh == "staggered" and len(frequencies) > 1:
                continue  # hardly spread, and not timed
            times, chosen = trial.times, {"refresh": refresh, "precondition_frequency": frequency}
            mean, largest = (times.mean(refresh, frequency), times.largest(refresh, frequency)) if times else (None, None)
            yield Row(self.usual | trial.changes | chosen, trial.memory_bytes(refresh), mean, largest, trial.note)

    # What comes of it.

    def settle(self) -> tuple[Row, tuple[float, float] | None]:
        """The recommendation, and its mean and largest step in a run. If the run exceeds a budget it replaces the prediction, and
        another row may be better."""
        for _ in range(TRIES):
            row = recommend(self.rows, self.budgets, self.usual)
            refresh, frequency = row.options["refresh"], row.options["precondition_frequency"]
            if row.mean_ms is None or row.mean_ms * (WARMING * frequency + max(30, frequency)) > LONGEST:
                return row, None
            opt = make_optimizer(self._model, self._preset, self._given | self.changes(row))
            ran = self._bench.run(opt, refresh, frequency)
            corrected = replace(row, mean_ms=ran[0], largest_ms=ran[1])
            if self.budgets.excess(row) > 1 or self.budgets.excess(corrected) <= 1:
                return row, ran
            self.rows[self.rows.index(row)] = corrected
        return recommend(self.rows, self.budgets, self.usual), None

    def changes(self, row: Row) -> Changes:
        return {name: value for name, value in row.options.items() if value != self.usual[name]}

    def line(self, row: Row) -> str:
        """The call that makes the optimizer."""
        options = {**self._given, **self.changes(row)}
        words = (f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}" for name, value in options.items())
        return f"lather.{self._preset}({', '.join(['model', *words])})"

    def on_ranks(self, ranks: int, shard: str) -> dict[str, Any]:
        """An estimate: memory by plan, and times by the largest share of the work."""
        rows: list[Row] = []
        for trial in self._done:
            team = self._plan(trial.changes, ranks=ranks, shard=shard).teams[0]
            share = team.work_max / trial.plan.teams[0].work_max
            memory = team.state_bytes_max + team.buffer_bytes + team.scratch_bytes
            for row in self._rows_of(trial):
                mean, largest = (None if ms is None else share * ms for ms in (row.mean_ms, row.largest_ms))
                rows.append(Row(row.options, memory, mean, largest, row.note))
        best = recommend(rows, self.budgets, self.usual)
        numbers = {"memory_bytes": best.memory_bytes, "mean_ms": best.mean_ms, "largest_ms": best.largest_ms}
        return {"ranks": ranks, **numbers, "fits": self.budgets.excess(best) <= 1, "line": self.line(best)}


def _words(changes: Changes) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "usual options"


def show_progress(done: int, total: int, text: str) -> None:
    """A bar on standard error, on one line that is written over, and wiped at the end."""
    filled = 30 * done // max(1, total)
    bar = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {text}"
    print("\r\033[K" + (bar if done < total else ""), end="", file=sys.stderr, flush=True)
