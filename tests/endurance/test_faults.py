"""Some of the faults. ``make endurance`` tries all of them."""

import pytest
from distributed.harness import Pools

from .faults import THEN, Fault, try_fault

SOME = [
    ("ddp2", Fault("killed", "begin")),
    ("fsdp3", Fault("killed", "apply")),
    ("ddp3", Fault("error", "compute")),
    ("ddp2", Fault("full disk", "write", rank=0)),
    ("fsdp2", Fault("cut short", "begin")),
]


@pytest.mark.parametrize(("layout", "fault"), SOME, ids=[f"{fault.kind}, {fault.phase}, {layout}" for layout, fault in SOME])
def test_all_ranks_end_and_the_job_resumes(pools: Pools, layout: str, fault: Fault) -> None:
    row = try_fault(pools, layout, fault, THEN[layout])
    assert row.outcome == f"error on all ranks, resumed on {THEN[layout]}"


def test_a_slow_rank_is_waited_for(pools: Pools) -> None:
    assert try_fault(pools, "ddp2", Fault("slow", "compute"), THEN["ddp2"]).outcome == "goes on"
