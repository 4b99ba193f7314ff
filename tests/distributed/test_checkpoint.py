"""A checkpoint of any layout resumes in any other as if nothing had happened, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from . import cases, saving
from .cases import LAYOUTS, Case
from .harness import Pools
from .saving import STEPS, Way

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")

CASE = Case(
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "weight_decay_mode": "corrected", "refresh": "staggered"}
    | {"block_multiple": 4},  # 13 is cut into 8 and 5, without it into 7 and 6
    gaps=True,
    groups=True,
    steps=STEPS,
)
SMALL = replace(CASE, model="some")
ORDINARY, FLAT, OFFLOADED, BACKGROUND = Way(), Way(flat=True), Way(offload=True), Way(background=True)
# Every layout is written once and read at least once: from itself, or from another kind. Ranks become more, fewer and stay as many.
PAIRS = [("one", "ddp3"), ("one", "hsdp22"), ("ddp2", "tp0x2"), ("ddp3", "fsdp4"), ("fsdp2", "fsdp2"), ("fsdp2", "fsdp3")]
PAIRS += [("fsdp3", "hsdp22"), ("fsdp4", "fsdp_tp22"), ("hsdp22", "mixed2"), ("hsdp22", "fsdp_sub22"), ("tp0x2", "tp1x2")]
PAIRS += [("tp1x2", "one"), ("fsdp_tp22", "fsdp_tp22"), ("fsdp_tp22", "ddp2"), ("fsdp_sub22", "fsdp2"), ("mixed2", "mixed4")]
PAIRS += [("mixed4", "one")]
FEW = [("ddp2", "fsdp4"), ("fsdp3", "one"), ("one", "ddp3"), ("hsdp22", "tp1x2")]
# These with all shapes: to more ranks, to fewer, with parallel styles, and beside plain parameters.
WHOLE = [("fsdp3", "hsdp22"), ("fsdp4", "fsdp_tp22"), ("fsdp_tp22", "ddp2"), ("fsdp_sub22", "fsdp2"), ("mixed2", "mixed4")]
WHOLE += [("mixed4", "one")]


def pairs(rows: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("source", "target"), rows, ids=["->".join(row) for row in rows])


def run(pools: Pools, function: Callable[..., Any], layout: str, *args: Any) -> list[Any]:
    """On the ranks of the layout, or here."""
    if layout == "one":
        return [function(layout, *args)]
    return pools[LAYOUTS[layout].world].run(function, layout, *args)


def parameters(stored: list[Any], case: Case = CASE) -> dict[str, Tensor]:
    return cases.assemble(stored, cases.shapes_of(case.model))


class Checkpoints:
    """Each is written once and loaded many times."""

    def __init__(self, folder: Path, pools: Pools) -> None:
        self.folder, self.pools = folder, pools
        self._made: dict[str, Path] = {}

    def __call__(self, function: Callable[..., Any], layout: str, case: Case, *args: Any) -> Path:
        key = repr((function.__name__, layout, case, args))
        if key not in self._made:
            path = self.folder / f"{len(self._made)}-{layout}"
            stored = run(self.pools, function, layout, case, path, *args)
            cases.assert_same(parameters(stored, case), cases.alone(case))
            self._made[key] = path
        return self._made[key]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"), pools)


@pairs(PAIRS)
def test_resharding(source: str, target: str, checkpoints: Checkpoints, pools: Pools) -> None:
    case = CASE if (source, target) in WHOLE else SMALL
    path = checkpoints(saving.save, source, case, ORDINARY)
    cases.assert_same(parameters(run(pools, saving.resume, target, case, path, ORDINARY), case), cases.alone(case))


@pytest.mark.parametrize(
    ("source", "target", "way"),
    [
        *((source, target, FLAT) for source, target in FEW),
        *((source, target, OFFLOADED) for source, target in FEW[:2]),
        *((source, target, BACKGROUND) for source, target in FEW[:2]),
    ],
)
def test_other_ways(source: str, target: str, way: Way, checkpoints: Checkpoints, pools: Pools) -> None:
    path = checkpoints(saving.save, source, SMALL, way)
    cases.assert_same(parameters(run(pools, saving.resume, target, SMALL, path, way), SMALL), cases.alone(SMALL))


@pytest.mark.parametrize("name", ["track", "gpa"])
@pytest.mark.parametrize(("source", "target"), [("fsdp2", "fsdp2"), ("ddp2", "fsdp3")])
def test_a_hook_that_gathers_what_torch_gathers_in_parts(
    source: str, target: str, name: str, checkpoints: Checkpoints, pools: Pools
) -> None:
    case, way = OPTIONS[name], saving.Way(gathers=True)
    path = checkpoints(saving.save, source, case, way)
    cases.assert_same(parameters(run(pools, saving.resume, target, case, path, way), case), cases.alone(case))


@pytest.mark.parametrize(
    ("source", "before", "target", "after"),
    [("ddp4", 2, "ddp4", 1), ("ddp4", 1, "ddp3", 3), ("ddp2", 2, "hsdp22", 2), ("hsdp22", 2, "ddp4", 2)],
)
def test_another_number_of_trainers(
    source: str, before: int, target: str, after: int, checkpoints: Checkpoints, pools: Pools
) -> None:
    saved, loaded = (cases.changed(SMALL, num_trainers_per_group=n) for n in (before, after))
    path = checkpoints(saving.save, source, saved, ORDINARY)
    cases.assert_same(parameters(run(pools, saving.resume, target, loaded, path, ORDINARY), SMALL), cases.alone(SMALL))


OPTIONS = {
    "track": Case({"root": "track", "momentum": 0.5, "stages": 2}, dtype=torch.bfloat16, steps=STEPS),
    "int8": Case({"root": "newton", "communication_dtype": "int8", "state_dtype": "bfloat16", "momentum": 0.9}, steps=STEPS),
    "diagonal": Case({"large_dim": "diagonal", "graft": None, "precondition_1d": True, "eps": 1e-2}, steps=STEPS),
    "soap": Case({"preconditioner": "soap", "graft": None, "momentum": 0.9, "root": "track"}, gaps=True, steps=STEPS),
    "spectral": Case({"preconditioner": "spectral", "momentum": 0.9, "stages": 2}, gaps=True, steps=STEPS),
    "spectral, no filter": Case({"preconditioner": "spectral", "graft": None, "betas": (0.0, 0.9)}, steps=STEPS),  # keeps nothing
    "schedule free": Case({"averaging": "schedule_free"}, gaps=True, evaluated=True, steps=STEPS),  # saved in eval mode
    "gpa": Case({"averaging": "gpa", "averaging_beta": 0.2}, gaps=True, dtype=torch.bfloat16, steps=STEPS),
    "master weights": Case({"master_weights": True, "momentum": 0.5}, gaps=True, dtype=torch.bfloat16, steps=STEPS),
}
OPTIONS = {name: replace(case, model="some") for name, case in OPTIONS.items()}
# Each in one way at least; those that keep state of other kinds in two.
TRIED = [(*FEW[i % 3], name) for i, name in enumerate(OPTIONS)]
TRIED += [
    ("fsdp3", "one", "soap"),
    ("fsdp3", "one", "schedule free"),
    ("ddp2", "fsdp4", "gpa"),
    ("ddp2", "fsdp4", "master weights"),
]


@pytest.mark.parametrize(("source", "target", "name"), TRIED, ids=[f"{a}->{b}-{name}" for a, b, name in TRIED])
def test_other_options(source: str, target: str, name: str, checkpoints: Checkpoints, pools: Pools) -> None:
    case = OPTIONS[name]
    path = checkpoints(saving.save, source, case, ORDINARY)
    cases.assert_same(parameters(run(pools, saving.resume, target, case, path, ORDINARY), case), cases.alone(case))


def test_local_blocks_resume_where_they_were(tmp_path: Path, pools: Pools) -> None:
    case = cases.changed(SMALL, blocks="local")
    stored = run(pools, saving.save, "fsdp3", case, tmp_path / "local", ORDINARY)
    again = run(pools, saving.resume, "fsdp3", case, tmp_path / "local", ORDINARY)
    cases.assert_same(parameters(again, case), parameters(stored, case))


# One file.


@pairs([*FEW, ("fsdp_tp22", "mixed2"), ("mixed2", "hsdp22")])
def test_consolidated(source: str, target: str, checkpoints: Checkpoints, pools: Pools) -> None:
    path = checkpoints(saving.consolidate, source, CASE)
    cases.assert_same(parameters(run(pools, saving.resume_file, target, CASE, path)), cases.alone(CASE))


def test_consolidated_on_another_rank(checkpoints: Checkpoints) -> None:
    path = checkpoints(saving.consolidate, "ddp2", CASE, 1)
    cases.assert_same(parameters([saving.resume_file("one", CASE, path)]), cases.alone(CASE))


def test_consolidated_equals_the_state_of_one_process(checkpoints: Checkpoints) -> None:
    """Key for key and bit for bit, options included."""
    one = torch.load(checkpoints(saving.consolidate, "one", CASE), weights_only=True)["opt"]
    for source in ("ddp2", "fsdp3", "hsdp22"):
        other = torch.load(checkpoints(saving.consolidate, source, CASE), weights_only=True)["opt"]
        torch.testing.assert_close(other["state"], one["state"], rtol=0, atol=0)
        assert other["param_groups"] == one["param_groups"]


@pytest.mark.parametrize(
    ("source", "target", "evaluated"),
    [("fsdp3", "one", True), ("ddp2", "fsdp4", True), ("ddp2", "fsdp4", False), ("one", "ddp3", False)],
)
def test_consolidated_averages(source: str, target: str, evaluated: bool, checkpoints: Checkpoints, pools: Pools) -> None:
    case = Case({"averaging": "schedule_free"}, gaps=True, evaluated=evaluated, steps=STEPS)
    path = checkpoints(saving.consolidate, source, case)
    one = torch.load(checkpoints(saving.consolidate, "one", case), weights_only=True)
    other = torch.load(path, weights_only=True)
    torch.testing.assert_close(other["opt"]["state"], one["opt"]["state"], rtol=0, atol=0)
    assert other["opt"]["param_groups"] == one["opt"]["param_groups"]
    cases.assert_same(parameters(run(pools, saving.resume_file, target, case, path)), cases.alone(case))


def test_consolidated_small_state(checkpoints: Checkpoints) -> None:
    """Roots and factors in other forms than the rest of the state."""
    case = Case({"root_dtype": "bfloat16", "factors": "packed"}, steps=STEPS)
    path = checkpoints(saving.consolidate, "ddp2", case)
    one, two = (torch.load(checkpoints(saving.consolidate, way, case), weights_only=True)["opt"] for way in ("one", "ddp2"))
    torch.testing.assert_close(two["state"], one["state"], rtol=0, atol=0)
    cases.assert_same(parameters([saving.resume_file("one", case, path)]), cases.alone(case))
    whole = cases.changed(case, factors="full")
    cases.assert_same(parameters([saving.resume_file("one", whole, path)]), cases.alone(case))
    with pytest.raises(ValueError, match="root_dtype='bfloat16'"):
        saving.try_loading("one", cases.changed(case, root_dtype="float16"), path)


@pytest.mark.parametrize("target", ["one", "ddp2", "fsdp3"])
def test_blocks_of_the_first_version_are_taken_over(target: str, checkpoints: Checkpoints, pools: Pools, tmp_path: Path) -> None:
    """By all ranks alike. Such files do not have the option."""
    old = cases.changed(CASE, block_multiple=1)
    saved = torch.load(checkpoints(saving.consolidate, "ddp2", old), weights_only=True)
    del saved["opt"]["lather_version"]
    for group in saved["opt"]["param_groups"]:
        del group["block_multiple"]
    torch.save(saved, tmp_path / "old")
    found = parameters(run(pools, saving.resume_file, target, CASE, tmp_path / "old"))
    cases.assert_same(found, cases.alone(old))
    assert not torch.equal(found["up.weight"], cases.alone(CASE)["up.weight"])


# Refused.


def test_what_one_rank_has_is_not_enough(tmp_path: Path, pools: Pools) -> None:
    pools[2].run(saving.write_own, "ddp2", CASE, tmp_path)
    for rank in range(2):
        with pytest.raises(ValueError, match=r"(?s)lacks.*rank"):
            saving.try_loading("one", CASE, tmp_path / f"{rank}.pt")
    outcomes = pools[2].attempt(saving.try_loading, "ddp2", CASE, tmp_path / "0.pt")
    assert outcomes[1].error == "ValueError", outcomes
    assert "lacks" in outcomes[1].message


@pytest.mark.parametrize("target", ["one", "ddp2", "fsdp3"])
def test_another_blocking_is_refused(target: str, checkpoints: Checkpoints, pools: Pools) -> None:
    path = checkpoints(saving.consolidate, "ddp2", CASE)
    case = replace(CASE, options=CASE.options | {"max_preconditioner_dim": 5})
    if target == "one":
        with pytest.raises(ValueError, match="max_preconditioner_dim"):
            saving.try_loading(target, case, path)
        return
    for outcome in pools[LAYOUTS[target].world].attempt(saving.try_loading, target, case, path):
        assert outcome.error == "ValueError", outcome
        assert "max_preconditioner_dim" in outcome.message
