"""Metrics of many ranks are those of one, and recording them changes nothing."""

from __future__ import annotations

import functools

import pytest
import torch

from . import cases
from .cases import LAYOUTS, Case
from .harness import Pools
from .test_equal import CASES

ROWS = [("ddp3", "today")]
ROWS += [(layout, "everything") for layout in ("fsdp2", "hsdp22", "mixed4")]
ROWS += [("hsdp22", "nan"), ("mixed4", "schedule free"), ("tp1x2", "delayed"), ("ddp3", "delayed"), ("fsdp2", "soap")]


@pytest.mark.parametrize(("layout", "name"), ROWS)
def test_metrics_are_those_of_one_rank(pools: Pools, layout: str, name: str) -> None:
    ranks = pools[LAYOUTS[layout].world].run(record, layout, CASES[name])
    alone, plain = alone_recorded(name), cases.alone(CASES[name])
    cases.assert_same(cases.assemble([stored for stored, _ in ranks], cases.shapes_of(CASES[name].model)), plain)
    for _, metrics in ranks:
        if metrics.keys() != alone[1].keys():
            assert LAYOUTS[layout].world > 1 and metrics.keys() <= alone[1].keys()
        expected = {key: alone[1][key] for key in metrics}
        torch.testing.assert_close(metrics, expected, rtol=1e-3, atol=1e-6, equal_nan=True)


@functools.cache
def alone_recorded(name: str) -> tuple[cases.Stored, dict[str, dict[str, float]]]:
    return record("one", CASES[name])


def record(layout: str, case: Case) -> tuple[cases.Stored, dict[str, dict[str, float]]]:
    """Train, with the metrics of all ranks in the last step."""
    with cases.expected_warnings(case):
        run = cases.Run(layout, case).advance(1, case.steps - 1)
        run.opt.arm()
        run.advance(case.steps, case.steps)
        return run.stored(), run.opt.metrics(gather=True)
