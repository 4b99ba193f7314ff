"""Experts on a mesh of their own and pipeline stages with ranks of their own compute what one process does, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from . import cases, saving
from .cases import LAYOUTS, Case
from .harness import Pools
from .saving import STEPS, Way

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")

CASE = Case({"momentum": 0.9, "weight_decay": 0.1, "max_preconditioner_dim": 6}, gaps=True, model="mixture", steps=STEPS)
EXPERTS = ["experts", "experts_tp", "experts_strided", "experts_twice"]
PIPELINES = ["pipeline", "pipeline_fsdp"]
FLAT = Way(flat=True)


def assembled(stored: list[cases.Stored]) -> dict[str, Tensor]:
    return cases.assemble(stored, cases.shapes_of("mixture"))


@pytest.mark.parametrize("layout", [*EXPERTS, *PIPELINES])
def test_equals_one_process(layout: str, pools: Pools) -> None:
    cases.assert_same(assembled(pools[4].run(cases.train, layout, CASE)), cases.alone(CASE))


@pytest.mark.parametrize(
    ("source", "target", "way"),
    [
        ("experts_tp", "experts", Way()),
        ("experts_twice", "experts_strided", Way()),
        ("pipeline_fsdp", "experts_tp", FLAT),
        ("experts", "pipeline", FLAT),
        ("pipeline", "one", FLAT),
    ],
)
def test_resumes_in_another_layout(source: str, target: str, way: Way, tmp_path: Path, pools: Pools) -> None:
    pools[4].run(saving.save, source, CASE, tmp_path / "saved", way)
    if target == "one":
        stored = [saving.resume(target, CASE, tmp_path / "saved", way)]
    else:
        stored = pools[LAYOUTS[target].world].run(saving.resume, target, CASE, tmp_path / "saved", way)
    cases.assert_same(assembled(stored), cases.alone(CASE))


def test_stages_that_are_saved_as_one_are_refused(tmp_path: Path, pools: Pools) -> None:
    """Torch keeps the param groups of one stage, unless they are flattened."""
    pools[4].run(saving.save, "pipeline", CASE, tmp_path / "saved", Way())
    outcomes = pools[4].attempt(saving.resume, "pipeline", CASE, tmp_path / "saved", Way(), timeout=20)
    messages = [outcome.message for outcome in outcomes if outcome.error == "ValueError"]
    assert len(messages) == 2 and all("flatten_optimizer_state_dict=True" in message for message in messages), outcomes


def test_stages_without_a_process_group_are_refused(pools: Pools) -> None:
    for outcome in pools[4].attempt(cases.step_with, "pipeline", [{"process_group": None}] * 4, "mixture", timeout=20):
        assert outcome.error == "ValueError" and "Pipeline stages need a process_group each" in outcome.message, outcome


# Each in both layouts, with either answer.
APART = [(what, layout, (i + j) % 2 == 1) for i, what in enumerate(("lr", "graft", "load")) for j, layout in enumerate(PIPELINES)]


@pytest.mark.parametrize(("what", "layout", "late"), APART)
def test_one_rank_apart(what: str, layout: str, late: bool, pools: Pools) -> None:
    """All ranks of its stage stop. The other stage goes on."""
    outcomes = pools[4].attempt(cases.one_rank_apart, layout, what, {}, late, "mixture", timeout=20)
    for outcome in outcomes[:2]:
        assert outcome.error == "ValueError" and ("load_state_dict" if what == "load" else what) in outcome.message, outcome
        assert f"(in step {4 if late else 3})" in outcome.message
    assert [outcome.value for outcome in outcomes[2:]] == [5, 5], outcomes


@pytest.mark.parametrize("layout", EXPERTS[:2] + EXPERTS[-1:])
def test_one_rank_apart_stops_all_meshes(layout: str, pools: Pools) -> None:
    for outcome in pools[4].attempt(cases.one_rank_apart, layout, "lr", {}, False, "mixture", timeout=20):
        assert outcome.error == "ValueError" and "lr of param group 0" in outcome.message, outcome
