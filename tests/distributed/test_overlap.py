"""While a stage is computed, the gradients of the next one and the directions of the last one are on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from lather.compute.executor import Executor
from lather.runtime.exchange import Collective

from .cases import Case, Run
from .harness import Pools

WORK = 0.02  # seconds that each bank is computed, at least


@dataclass(frozen=True)
class Travel:
    """When a collective was started and asked for, and whether it was done by then."""

    started: float
    asked: float
    done: bool


@dataclass(frozen=True)
class Stage:
    begin: float  # when it was computed
    end: float
    gradients: Travel | None
    directions: Travel


def steps_watched(layout: str) -> list[list[Stage | None]]:
    """For each of three steps, its stages. None if a rank has nothing to compute."""
    run = Run(layout, Case({"stages": 3})).advance(1, 1)
    return [stages_watched(run, step) for step in range(2, 5)]


def stages_watched(run: Run, step: int) -> list[Stage | None]:
    starts: dict[Any, float] = {}
    travels: dict[Any, Travel] = {}
    spans: dict[Any, tuple[float, float]] = {}
    start, finish, update = Collective.start, Collective.finish, Executor.update

    def started(self: Any) -> None:
        start(self)
        starts[self] = time.monotonic()

    def finished(self: Any) -> None:
        travels[self] = Travel(starts[self], time.monotonic(), self._work.is_completed())
        finish(self)

    def computed(self: Any, job: Any, stacks: Any) -> Any:
        begin = time.monotonic()
        time.sleep(WORK)
        found = update(self, job, stacks)
        spans[self] = begin, time.monotonic()
        return found

    with (
        mock.patch.object(Collective, "start", started),
        mock.patch.object(Collective, "finish", finished),
        mock.patch.object(Executor, "update", computed),
    ):
        run.advance(step, step)
    found: list[Stage | None] = []
    for unit in run.opt._session.run.units:
        times, last = [spans[executor] for executor in unit.executors], unit.outbound[-1]
        ways = unit.inbound and travels[unit.inbound], travels[last.gather or last.swap]
        found.append(Stage(min(times)[0], max(times)[1], *ways) if times else None)
    return found


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_stages_are_computed_while_others_travel(layout: str, pools: Pools) -> None:
    ranks = pools[2].run(steps_watched, layout)
    pairs = [(a, b) for steps in ranks for step in steps for a, b in pairwise(step) if a and b]
    assert len(pairs) >= 6
    for stage, after in pairs:
        assert stage.end <= stage.directions.started <= after.begin < after.end <= stage.directions.asked
        if after.gradients:
            assert after.gradients.started <= stage.begin < stage.end <= after.gradients.asked
    assert any(stage.directions.done for stage, _ in pairs)  # they had arrived while the next stage was computed
