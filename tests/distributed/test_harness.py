"""The harness itself: failures are shown, hangs end, and torch's AdamW agrees in every layout."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from . import cases, harness
from .cases import LAYOUTS, MANY, Case
from .harness import Failed, Hang, Pool, Pools


def rank_plus(number: int) -> int:
    return dist.get_rank() + number


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the reason")


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def wait_for_the_failed() -> None:
    fail_on(0)
    dist.barrier()


def test_failures_and_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool, in the order of the damage done."""
    monkeypatch.setattr(harness, "GRACE", 1.0)
    pool = Pool(2)
    try:
        assert pool.run(rank_plus, 5) == [5, 6]
        outcomes = pool.attempt(fail_on, 1)
        assert [o.error for o in outcomes] == [None, "KeyError"]
        assert "the reason" in outcomes[1].message
        assert pool.run(rank_plus, 0) == [0, 1]
        with pytest.raises(Hang, match=r"(?s)hang in hang_on.*rank 1 of 2.*line \d+ in hang_on"):
            pool.run(hang_on, 1, timeout=1.0)
        with pytest.raises(Failed, match=r"(?s)rank 0 of 2: KeyError.*the reason.*rank 1 of 2: hang") as caught:
            pool.run(wait_for_the_failed)
        assert not isinstance(caught.value, Hang)
    finally:
        pool.close()


@pytest.mark.parametrize("layout", MANY)
def test_the_cases_with_an_elementwise_optimizer(layout: str, pools: Pools) -> None:
    case = Case(optimizer="adamw", gaps=True, steps=3)
    stored = pools[LAYOUTS[layout].world].run(cases.train, layout, case)
    cases.assert_same(cases.assemble(stored, cases.shapes_of("toy")), cases.alone(case))
