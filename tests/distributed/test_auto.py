"""``root="auto"``: ranks whose clocks differ make the same choices, and measure under the same conditions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lather import roots
from lather.roots import RootSolver, auto

from . import cases, edges
from .harness import Pools

BY_RANK = ({"minimax": 1.0, "eigh": 3.0}, {"minimax": 9.0, "eigh": 4.0})  # rank 0 alone would take minimax
NO_COMPILER = ({"minimax": 1.0, "eigh": 9.0}, {"minimax": math.inf, "newton": 5.0, "eigh": 9.0})


@contextmanager
def _clock(times: Mapping[str, float]) -> Iterator[None]:
    """As if the CPU were an accelerator with this clock."""

    def time(solver: RootSolver, task: auto.Task, device: torch.device) -> float:
        return times.get(solver.name, 100.0) * task.d

    auto._measured.clear()
    with mock.patch.multiple(auto, _time=time, _is_measurable=lambda device: True, SMALLEST=1):
        yield
    auto._measured.clear()


def _choose(layout: str, clocks: Any, options: Any) -> Any:
    """Train by this rank's clock: the choices, the schedules and the parameters."""
    with _clock(clocks[dist.get_rank() % 2]):
        run = cases.Run(layout, cases.Case(options)).advance(1, 6)
    choices = {key: (choice.solver.name, dict(choice.milliseconds)) for key, choice in run.opt._choices.items()}
    return choices, {bank.key.shape: run.opt._offsets(bank.key) for bank in run.opt._banks}, run.stored()


def _choose_on_meshes(ranks: dict[str, list[int]], clocks: Any) -> Any:
    """The choices where each parameter is on some ranks only."""
    with _clock(clocks[dist.get_rank() % 2]), mock.patch.object(roots, "decide", side_effect=roots.decide) as decide:
        edges.separate_meshes(ranks)
        (call,) = decide.call_args_list
        return {key: choice.solver.name for key, choice in roots.decide(*call.args).items()}


CLOCKS = (BY_RANK, "eigh", {"minimax": 9.0, "eigh": 4.0})
COMPILERS = (NO_COMPILER, "newton", {"minimax": math.inf, "newton": 5.0})


@pytest.mark.parametrize(
    ("layout", "options", "clocks", "solver", "times"),
    [
        ("ddp2", {}, *CLOCKS),
        ("ddp2", {"num_trainers_per_group": 1, "refresh": "staggered"}, *COMPILERS),
        ("fsdp2", {"refresh": "staggered"}, *CLOCKS),
    ],
    ids=["ddp", "repeated", "fsdp"],
)
def test_ranks_choose_alike(layout: str, options: Any, clocks: Any, solver: str, times: Any, pools: Pools) -> None:
    (first, schedule, ours), (second, other, theirs) = pools[2].run(_choose, layout, clocks, options)
    assert first == second and first
    for (d, _), (name, ms) in first.items():
        assert name == solver and ms.items() >= {k: v * d for k, v in times.items()}.items()
    for shape in schedule.keys() & other.keys():
        assert schedule[shape] == other[shape]
    if layout == "ddp2":
        assert all(torch.equal(p, theirs[name][1]) for name, (_, p) in ours.items())


@pytest.mark.parametrize("layout", ["mixed4", "fsdp_sub22"])
def test_meshes_that_are_connected_choose_alike(layout: str, pools: Pools) -> None:
    choices = [told[0] for told in pools[4].run(_choose, layout, BY_RANK, {})]
    assert choices[0] and all(other == choices[0] for other in choices)


def test_ranks_with_different_parameters_choose_alike(pools: Pools) -> None:
    """What there is to measure differs between ranks, and word goes from mesh to mesh."""
    meshes = {"a": [0, 1], "b": [1, 2], "c": [2, 3], "d": [0, 3]}
    choices = pools[4].run(_choose_on_meshes, meshes, BY_RANK)
    assert {d for d, _ in choices[0]} == {4, 5, 6, 7} and set(choices[0].values()) == {"eigh"}
    assert all(other == choices[0] for other in choices)
