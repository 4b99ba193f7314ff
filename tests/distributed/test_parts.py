"""A state that lacks the blocks of other ranks does not pass in silence, unless it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import cases, saving
from .cases import Case
from .harness import Pools

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
CASE = Case({"momentum": 0.9}, steps=12)
LOST = {"after a step", "a step later", "as a whole, by torch"}


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_a_part_of_a_state_warns(layout: str, pools: Pools, tmp_path: Path) -> None:
    for found in pools[2].run(saving.ways_to_take, layout, CASE, tmp_path):
        assert {way for way, warned in found.items() if warned} == LOST


def test_who_has_everything_is_not_warned(pools: Pools, tmp_path: Path) -> None:
    alone = saving.ways_to_take("one", CASE, tmp_path / "one")
    assert not any(alone.values())
    for found in pools[2].run(saving.ways_to_take, "ddp2", cases.changed(CASE, num_trainers_per_group=1), tmp_path / "two"):
        assert not any(found.values())


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_a_hook_that_gathers(layout: str, pools: Pools, tmp_path: Path) -> None:
    """One process takes over from it, and ends where two end."""
    path = tmp_path / "state.pt"
    ended = cases.assemble(pools[2].run(saving.gather_in_a_hook, layout, CASE, path), cases.shapes_of(CASE.model))
    resumed = cases.assemble([saving.resume_file("one", CASE, path)], cases.shapes_of(CASE.model))
    cases.assert_same(ended, resumed)
