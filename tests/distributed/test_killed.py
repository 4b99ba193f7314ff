"""A rank dies in the middle of a run; the job goes on from its last checkpoint on fewer ranks, and nothing shows."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from . import cases, saving
from .cases import LAYOUTS, Case, Run
from .harness import Pool, Pools
from .saving import MIDDLE, STEPS, Way

CASE = Case({"momentum": 0.9, "weight_decay": 0.1, "refresh": "staggered"}, gaps=True, steps=STEPS)


def die_after_saving(layout: str, path: Path) -> None:
    """Save, go on for a while, and lose rank 1 in the middle of a step's work."""
    run = Run(layout, CASE).advance(1, MIDDLE)
    saving.dcp.save(saving.contents(run, Way()), checkpoint_id=path)
    run.advance(MIDDLE + 1, MIDDLE + 2)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.advance(MIDDLE + 3, CASE.steps)


@pytest.mark.parametrize(("before", "after"), [("ddp3", "ddp2"), ("hsdp22", "fsdp3")])
def test_the_job_goes_on_with_fewer_ranks(before: str, after: str, pools: Pools, tmp_path: Path) -> None:
    doomed = Pool(LAYOUTS[before].world)
    outcomes = doomed.attempt(die_after_saving, before, tmp_path / "saved")
    doomed.close(kill=True)
    assert outcomes[1].error == "death"
    assert all(outcome.error for outcome in outcomes), "a rank finished although another was dead"
    stored = pools[LAYOUTS[after].world].run(saving.resume, after, CASE, tmp_path / "saved", Way())
    cases.assert_same(cases.assemble(stored, cases.shapes_of(CASE.model)), cases.alone(CASE))
