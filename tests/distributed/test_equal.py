"""N processes compute what one does, bit for bit: every layout, every option."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from paper import PAPER, TODAY

from lather.presets.from_torch import SMALL

from . import cases
from .cases import BASE, LAYOUTS, MANY, Case, Options
from .harness import Pools

MOMENTUM: Options = {"momentum": 0.9, "nesterov": True, "dampening": 0.1}
SPECTRAL: Options = {"preconditioner": "spectral"}
AVERAGED: Options = {"weight_decay": 0.1, "weight_decay_mode": "corrected"}
EVERYTHING = Case(
    MOMENTUM | {"weight_decay": 0.1, "weight_decay_mode": "corrected", "refresh": "staggered"}, gaps=True, groups=True
)
CASES: dict[str, Case] = {
    "base": Case(),
    "today": Case(TODAY | {"weight_decay": 0.1}, gaps=True, steps=26),  # the warm-up ends in every second step
    "paper": Case(PAPER, gaps=True),
    "multiples": Case({"block_multiple": 4, "beta3": None} | MOMENTUM, gaps=True),
    "everything": EVERYTHING,
    "decoupled": Case({"weight_decay": 0.1}),
    "schedule free": Case({"averaging": "schedule_free", "weight_decay": 0.1}, gaps=True, spoilt=True),
    "gpa": Case({"averaging": "gpa", "averaging_decay": 0.8} | AVERAGED, gaps=True),
    "x kept": Case({"averaging": "schedule_free", "averaging_beta": 0.2} | AVERAGED, gaps=True),
    "bfloat16, schedule free": Case({"averaging": "schedule_free"} | AVERAGED, dtype=torch.bfloat16, gaps=True),
    "evaluated": Case({"averaging": "gpa", "communication_dtype": "int8"}, dtype=torch.bfloat16, evaluated=True),
    "nan": Case(MOMENTUM | {"weight_decay": 0.1}, spoilt=True),
    "sgd": Case({"graft": "sgd", "betas": (0.0, 0.95)}),
    "no graft": Case({"graft": None, "start_preconditioning_step": 1, "eps": 1e-2}),
    "sums": Case({"graft": "adagrad", "betas": (0.9, 1.0), "beta3": 0.5}),
    "diagonal": Case({"large_dim": "diagonal", "precondition_1d": True}),
    "newton": Case({"root": "newton"}),
    "float64 state": Case({"state_dtype": "float64"} | MOMENTUM),
    "bfloat16 state": Case({"state_dtype": "bfloat16"} | MOMENTUM),
    "bfloat16 roots": Case({"root_dtype": "bfloat16"}),
    "packed": Case({"factors": "packed", "refresh": "staggered"}, gaps=True),
    "low memory": Case(SMALL, gaps=True),
    "warmed up": Case({"refresh_warmup": 0.3, "refresh": "staggered"}, gaps=True),
    "delayed": Case({"refresh_delay": 2, "refresh": "staggered"}, gaps=True),
    "track": Case({"root": "track"}, gaps=True),
    "minimax": Case({"root": "minimax"}, gaps=True),
    "kl": Case({"preconditioner": "kl", "refresh": "staggered"} | MOMENTUM, gaps=True),
    "soap": Case({"preconditioner": "soap", "graft": None, "refresh": "staggered", "weight_decay": 0.1}, gaps=True),
    "soap, stages": Case({"preconditioner": "soap", "root": "track", "stages": 2, "precondition_1d": True} | MOMENTUM, spoilt=True),
    "soap, track": Case({"preconditioner": "soap", "graft": None, "root": "track", "refresh_delay": 1}, gaps=True),
    "soap, diagonal": Case(
        {"preconditioner": "soap", "graft": None, "large_dim": "diagonal", "betas": (0.0, 1.0)}, dtype=torch.bfloat16
    ),
    "spectral": Case({"preconditioner": "spectral", "weight_decay": 0.1}, gaps=True),
    "spectral, ungrafted": Case({"graft": None, "polar_scale": "original", "stages": 2} | SPECTRAL | MOMENTUM, spoilt=True),
    "spectral, whole": Case({"graft": None, "max_preconditioner_dim": 64, "polar": "polar_express"} | SPECTRAL),
    "spectral, svd": Case({"graft": None, "betas": (0.0, 0.9), "polar": "svd"} | SPECTRAL, dtype=torch.bfloat16),
    "muon": Case(
        {"graft": None, "betas": (0.95, 0.999), "beta3": 0.95**2, "bias_correction": False, "polar_scale": "original"}
        | {"max_preconditioner_dim": math.inf, "polar": "newton_schulz(eps=1e-07)", "weight_decay": 0.1}
        | SPECTRAL,
        gaps=True,
    ),
    "bfloat16": Case(MOMENTUM | {"weight_decay": 0.1}, dtype=torch.bfloat16),
    "master weights": Case(
        MOMENTUM | {"master_weights": True, "weight_decay": 0.1, "weight_decay_mode": "l2"}, dtype=torch.bfloat16, gaps=True
    ),
    "three stages": Case({"stages": 3, "refresh": "staggered"} | MOMENTUM, gaps=True),
    "bfloat16 wire": Case({"communication_dtype": "bfloat16"} | MOMENTUM),
    "float16 wire": Case({"communication_dtype": "float16"}, gaps=True),
    "int8 wire": Case({"communication_dtype": "int8", "weight_decay": 0.1, "weight_decay_mode": "l2"}, spoilt=True),
    "bfloat16, int8 wire": Case({"communication_dtype": "int8", "stages": 2}, dtype=torch.bfloat16),
    "checked": Case({"check_ranks": True}, gaps=True),
    "elementwise": Case({"preconditioner": None}, gaps=True),
    "split": Case({"split": 3} | MOMENTUM, model="fused", gaps=True),
    "tiny": Case({"momentum": 0.9}, model="tiny"),
    "tiny, int8 wire": Case({"communication_dtype": "int8", "stages": 3}, model="tiny"),
}
TRAINERS: list[tuple[str, int, Case]] = [
    ("ddp2", 1, Case()),
    ("ddp4", 1, EVERYTHING),
    ("ddp4", 2, EVERYTHING),
    ("ddp4", 2, Case({"stages": 2}, model="tiny")),
    ("hsdp22", 2, EVERYTHING),
]
ALL_LAYOUTS = ("everything", "tiny")
KINDS = {  # every kind of layout
    "nan": ("ddp2", "fsdp3", "fsdp_sub22", "mixed4"),
    "schedule free": ("ddp3", "hsdp22", "tp1x2", "fsdp_tp22", "mixed2"),
    "evaluated": ("fsdp4", "tp0x2", "mixed4"),
    "bfloat16, int8 wire": ("ddp2", "hsdp22", "fsdp_sub22"),
    "base": ("fsdp2", "tp1x2"),
}
# What is stored, sent or missing, where gradients are whole and where they are in parts. All other options are about a block,
# which is computed alike in both: they take turns. Decay, momentum, groups and gaps are in "everything".
BOTH = (
    "today",
    "gpa",
    "bfloat16, schedule free",
    "bfloat16 state",
    "packed",
    "delayed",
    "soap",
    "muon",
    "three stages",
    "int8 wire",
    "checked",
    "split",
)
TURNS = [name for name in CASES if name not in (*ALL_LAYOUTS, *KINDS, *BOTH)]
PAIRS = [(layout, name) for layout in MANY for name in ALL_LAYOUTS if not (name == "tiny" and layout.startswith("fsdp_"))]
PAIRS += [(layout, name) for name, layouts in KINDS.items() for layout in layouts]
PAIRS += [(layout, name) for layout in ("ddp2", "fsdp3") for name in BOTH]
PAIRS += [(("ddp2", "fsdp3")[i % 2], name) for i, name in enumerate(TURNS)]
SMALL = (*BOTH, *TURNS, "nan", "schedule free", "evaluated")  # "everything" has all shapes in every layout
CASES |= {name: replace(CASES[name], model="some") for name in SMALL if CASES[name].model == "toy"}


def run(pools: Pools, layout: str, case: Case) -> dict[str, torch.Tensor]:
    stored = pools[LAYOUTS[layout].world].run(cases.train, layout, case)
    return cases.assemble(stored, cases.shapes_of(case.model))


@pytest.mark.parametrize(("layout", "name"), PAIRS, ids=[", ".join(pair) for pair in PAIRS])
def test_equals_one_process(layout: str, name: str, pools: Pools) -> None:
    cases.assert_same(run(pools, layout, CASES[name]), cases.alone(CASES[name]))


@pytest.mark.parametrize(
    ("layout", "trainers", "case"), TRAINERS, ids=[f"{layout}, {trainers}" for layout, trainers, _ in TRAINERS]
)
def test_smaller_groups_of_trainers(layout: str, trainers: int, case: Case, pools: Pools) -> None:
    grouped = cases.changed(case, num_trainers_per_group=trainers)
    cases.assert_same(run(pools, layout, grouped), cases.alone(case))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("ddp2", "int8 wire"),
        ("ddp4", "everything"),
        ("fsdp3", "schedule free"),
        ("hsdp22", "bfloat16, int8 wire"),
        ("fsdp_tp22", "int8 wire"),
        ("mixed4", "everything"),
    ],
)
def test_a_plan_of_many_stages_and_rounds(layout: str, name: str, pools: Pools) -> None:
    """The plan chooses them, as it does for large models. Two or three buffers of messages are enough."""
    case = cases.changed(CASES[name], stages=None)
    stored, buffers, rounds = zip(*pools[LAYOUTS[layout].world].run(cases.train_in_small_parts, layout, case), strict=True)
    cases.assert_same(cases.assemble(stored, cases.shapes_of(case.model)), cases.alone(CASES[name]))
    assert set(buffers) == {2 if layout.startswith("ddp") else 3}
    assert max(map(max, rounds)) > 1 or layout == "fsdp3"


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_the_wire_rounds_in_one_process_too(wire: str) -> None:
    """Or the equalities above would compare nothing."""
    plain, rounded = cases.alone(Case()), cases.alone(Case({"communication_dtype": wire}))
    assert any(not torch.equal(plain[name], rounded[name]) for name in plain)
    for name, x in plain.items():
        torch.testing.assert_close(rounded[name], x, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp3", "hsdp22", "tp1x2", "fsdp_tp22", "fsdp_sub22", "mixed4"])
def test_local_blocks(layout: str, pools: Pools) -> None:
    """Blocks of what a rank stores are other blocks, so only replicas can be compared; whole parameters are all the same."""
    case = replace(EVERYTHING, model="some")
    ours = run(pools, layout, cases.changed(case, blocks="local"))
    assert all(x.isfinite().all() for x in ours.values())
    if layout.startswith("ddp"):
        cases.assert_same(ours, cases.alone(case))


# Who has what.


@pytest.mark.parametrize(
    ("layout", "trainers", "copies"),
    [
        ("ddp2", None, 1),
        ("ddp3", None, 1),
        ("ddp4", 2, 2),
        ("ddp4", 1, 4),
        ("fsdp4", None, 1),
        ("hsdp22", 2, 2),
        ("fsdp_tp22", None, 1),
        ("mixed4", None, 1),
    ],
)
def test_each_block_is_owned_once_per_group(layout: str, trainers: int | None, copies: int, pools: Pools) -> None:
    options: Options = {} if trainers is None else {"num_trainers_per_group": trainers}
    ranks = pools[LAYOUTS[layout].world].run(cases.keys_after_a_step, layout, Case(options | {"momentum": 0.9}))
    count = Counter(key for keys in ranks for key in keys)
    expected = cases.keys_after_a_step("one", Case({"momentum": 0.9}))
    assert count.keys() == expected
    everywhere = {key for key in expected if key.endswith(("/step", "/momentum"))}
    assert {count[key] for key in everywhere} == {LAYOUTS[layout].world}
    assert {count[key] for key in expected - everywhere} == {copies}


def test_a_process_group_of_ones_own(pools: Pools) -> None:
    """Two pairs of ranks that train different models side by side."""
    stored = pools[4].run(cases.train_in_pairs, [Case(), EVERYTHING])
    for pair, case in ((stored[:2], Case()), (stored[2:], EVERYTHING)):
        cases.assert_same(cases.assemble(pair, cases.shapes_of("toy")), cases.alone(case))


# Real modules, real gradients.


@pytest.mark.parametrize(("wrapper", "world"), [("fsdp", 3), ("ddp", 2)])
def test_training(wrapper: str, world: int, pools: Pools) -> None:
    ranks = pools[world].run(cases.train_for_real, wrapper, BASE | {"weight_decay": 0.01, "lr": 0.02})
    losses, weights, kinds = zip(*ranks, strict=True)
    mean = [sum(row) / world for row in zip(*losses, strict=True)]
    assert mean[-1] < 0.5 * mean[0]
    for other in weights[1:]:
        cases.assert_same(other, weights[0])
    assert kinds == (["no rule"] * 3 + ["kind: norm"] * 2 + ["kind: bias"] * 2,) * world
