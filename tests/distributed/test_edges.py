"""Odd meshes and gradients, calls on some ranks only, and failures that one rank alone would see."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import lather

from . import cases, edges
from .cases import Case
from .harness import Pool, Pools

BOTH = ["ddp2", "fsdp2"]


def check_few(ranks: list[cases.Stored]) -> None:
    shapes = {name: torch.Size(shape) for name, shape in edges.SHAPES.items()}
    cases.assert_same(cases.assemble(ranks, shapes), cases.assemble([edges.plain_few()], shapes))


def toy(stored: list[Any]) -> dict[str, torch.Tensor]:
    return cases.assemble(stored, cases.shapes_of("toy"))


@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(1), Replicate())],
    ids=["2d", "twice along a dimension", "replicas", "replicas inside"],
)
def test_a_mesh_whose_ranks_are_not_in_order(placements: Any, pools: Pools) -> None:
    """Ascending along every axis: where they descend, torch itself does not agree on who stores what."""
    check_few(pools[4].run(edges.train_on_mesh, [[0, 2], [1, 3]], placements))


@pytest.mark.parametrize(
    "ranks",
    [{"a": [0, 1], "b": [2, 3]}, {"a": [0, 1], "b": [1, 2], "c": [0, 2, 3]}, {"a": [3], "d": [1, 2]}],
    ids=["disjoint", "in a circle", "alone"],
)
def test_parameters_on_some_ranks(ranks: dict[str, list[int]], pools: Pools) -> None:
    check_few(pools[4].run(edges.separate_meshes, ranks))


def test_ranks_with_different_numbers_of_process_groups() -> None:
    pool = Pool(4)  # a fresh one, in which no team has been made
    try:
        cases.assert_same(toy(pool.run(edges.teams_beside_other_groups, timeout=20)), cases.alone(Case()))
    finally:
        pool.close()


@pytest.mark.parametrize("kind", ["replicated", "partial"])
def test_gradients_that_lie_otherwise(kind: str, pools: Pools) -> None:
    check_few(pools[2].run(edges.other_gradients, kind))


@pytest.mark.parametrize("moves", [False, True])
def test_shards_that_move_are_noticed_and_others_are_not_looked_up_again(moves: bool, pools: Pools) -> None:
    stored, looked = zip(*pools[2].run(edges.moving_shards, moves), strict=True)
    check_few(list(stored))
    assert all((count > 2) == moves for count in looked)  # when the run is built, and after its first step


@pytest.mark.parametrize("reshards", [False, True])
def test_fsdp2_has_to_reshard_after_a_validation_with_averages(reshards: bool, pools: Pools) -> None:
    """As docs/fsdp2.md says. If this fails without, torch has changed, and the page need not say it any more."""
    assert pools[2].run(edges.validate_under_fsdp2, reshards) == [reshards] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_odd_strides(sharded: bool, pools: Pools) -> None:
    check_few(pools[2].run(edges.odd_strides, sharded))


@pytest.mark.parametrize("sharded", [False, True])
def test_an_empty_parameter(sharded: bool, pools: Pools) -> None:
    shapes = {"empty": torch.Size((0, 3)), "full": torch.Size((6, 3))}
    found = cases.assemble(pools[2].run(edges.empty_parameter, sharded), shapes)
    cases.assert_same(found, cases.assemble([edges.empty_parameter(False)], shapes))


@pytest.mark.parametrize("layout", BOTH)
def test_groups_added_and_parameters_frozen(layout: str, pools: Pools) -> None:
    cases.assert_same(toy(pools[2].run(edges.late_group, layout)), toy([edges.late_group("one")]))


@pytest.mark.parametrize("layout", BOTH)
def test_groups_taken_out(layout: str, pools: Pools) -> None:
    cases.assert_same(toy(pools[2].run(edges.removed_group, layout)), toy([edges.removed_group("one")]))


@pytest.mark.parametrize("layout", BOTH)
def test_replaced_parameters(layout: str, pools: Pools) -> None:
    cases.assert_same(toy(pools[2].run(edges.replaced_parameters, layout)), toy([edges.replaced_parameters("one")]))


@pytest.mark.parametrize(("layout", "how"), [("ddp2", "deepcopy"), ("ddp2", "pickle"), ("tp0x2", "deepcopy")])
def test_copies(layout: str, how: str, pools: Pools) -> None:
    cases.assert_same(toy(pools[2].run(edges.through_a_copy, layout, how)), toy([edges.through_a_copy("one", how)]))


def test_swapped_parameters(pools: Pools) -> None:
    options = {"momentum": 0.9, "weight_decay": 0.1}
    expected = toy([cases.train("one", Case(options))])
    cases.assert_same(toy(pools[2].run(edges.wrapped_then_swapped, options)), expected)


@pytest.mark.parametrize("layout", BOTH)
def test_calls_on_one_rank(layout: str, pools: Pools) -> None:
    ours = toy(pools[2].run(edges.only_first_rank_looks, layout))
    cases.assert_same(ours, toy([cases.train("one", Case({"momentum": 0.9}, steps=9))]))


@pytest.mark.parametrize("layout", BOTH)
def test_disagreement_on_gradients_does_not_hang(layout: str, pools: Pools) -> None:
    """Replicas stay equal, which `toy` checks. Parameters that all ranks agree about train as if nothing had happened."""
    ours, usual = (
        toy(ranks) for ranks in (pools[2].run(edges.gradient_on_one_rank_only, layout), [cases.train("one", Case(steps=9))])
    )
    assert all(bool(x.isfinite().all()) for x in ours.values())
    torn = {"up.weight", "table.weight"}
    cases.assert_same(*({name: x for name, x in some.items() if name not in torn} for some in (ours, usual)))


def test_a_holder_without_a_gradient_sends_zeros(pools: Pools) -> None:
    lacking, zeros = (pools[2].run(edges.a_holder_without_a_gradient, missing) for missing in (True, False))
    assert all(torch.equal(x, zeros[0]) for x in (*lacking, *zeros))


def test_what_a_step_left_over_is_finished_first(pools: Pools) -> None:
    """Stages share buffers, so what still arrives would be taken for what the next step sends."""
    for under_way, seen in pools[2].run(edges.a_step_that_raises_in_the_middle, timeout=20):
        assert under_way > 0 and seen == [False]


FAILURES = [
    (edges.strict_about_nan, "FloatingPointError", "low.weight"),
    (edges.failing_refreshes, "RuntimeError", "low.weight"),
    (edges.errors_beside_the_training, "RuntimeError", "no room for roots"),
    (edges.bad_option_on_one_rank, "ValueError", "max_preconditioner_dim"),
    (edges.load_refused_on_one_rank, "ValueError", "the step of parameter"),
]
FAILING = [(*row, layout) for i, row in enumerate(FAILURES) for layout in (("ddp2", "fsdp2")[i % 2], "fsdp_sub22")]


@pytest.mark.parametrize(("function", "error", "name", "layout"), FAILING)
def test_failures_reach_every_rank(function: Any, error: str, name: str, layout: str, pools: Pools) -> None:
    """In the last layout also those that do not store the parameter: two of four ranks do."""
    for outcome in pools[cases.LAYOUTS[layout].world].attempt(function, layout, timeout=15):
        assert outcome.error == error, outcome
        assert name in outcome.message


def test_a_step_counts_if_any_rank_has_a_gradient(pools: Pools) -> None:
    assert pools[4].run(edges.warm_up_from_zero, "fsdp_sub22", timeout=15) == [1] * 4


def test_a_strict_group_that_others_do_not_know(pools: Pools) -> None:
    for outcome in pools[4].attempt(edges.strict_here_only, timeout=15):
        assert outcome.error == "FloatingPointError", outcome


def test_nothing_to_train(pools: Pools) -> None:
    """What is frozen stays. What one rank has to itself trains as it would in one process."""
    (frozen, idle), (frozen_too, mine) = pools[2].run(edges.nothing_to_train_here, timeout=15)
    alone = torch.nn.Parameter(torch.ones(4, 4))
    opt = lather.Shampoo([alone], **cases.BASE)
    for _ in range(3):
        alone.grad = torch.ones(4, 4)
        opt.step()
    assert all(torch.equal(x, torch.ones(4, 4)) for x in (frozen, frozen_too, idle))
    assert torch.equal(mine, alone) and not torch.equal(mine, frozen)


@pytest.mark.parametrize("layout", ["ddp2", "tp0x2"])
def test_dtypes_side_by_side(layout: str, pools: Pools) -> None:
    expected = toy([edges.mixed_precision("one")])
    cases.assert_same(toy(pools[2].run(edges.mixed_precision, layout)), expected)


def test_a_pickle_of_another_world(pools: Pools) -> None:
    saved = pools[2].run(edges.pickled)
    opt = pickle.loads(saved[0])
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"began on ranks \[0, 1\]"):
        opt.step()


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("precondition_frequency", 50, {}),
        ("root", "minimax", {}),
        ("precondition_frequency", 50, {"averaging": "gpa"}),
        ("precondition_frequency", 50, {"averaging": "schedule_free", "betas": (0.0, 0.95)}),
    ],
    ids=str,
)
def test_options_that_decide_about_owners_come_from_the_checkpoint(
    name: str, value: Any, options: cases.Options, pools: Pools, tmp_path: Path
) -> None:
    arguments = str(tmp_path), name, value, options
    for whole, resumed in pools[2].run(edges.resume_after_options_changed, *arguments, timeout=30):
        assert all(map(torch.equal, whole, resumed))


def test_state_is_made_on_one_rank_before_torch_makes_it_on_all(pools: Pools) -> None:
    pools[2].run(edges.save_on_one_rank_first, timeout=15)


@pytest.mark.parametrize(
    ("gather", "words"),
    [(edges.gather_to_themselves, "consolidate_state_dict(to=0) on rank 0"), (edges.gather_other_models, "parameter number 0")],
)
def test_ranks_that_gather_different_things(gather: Any, words: str, pools: Pools) -> None:
    for outcome in pools[2].attempt(gather, timeout=15):
        assert outcome.error == "ValueError" and words in outcome.message


@pytest.mark.parametrize("late", [False, True])
def test_gathering_on_one_rank_alone(late: bool, pools: Pools) -> None:
    for outcome in pools[2].attempt(edges.gather_while_others_step, late, timeout=15):
        assert outcome.error == "ValueError" and "what is called: step() on rank 0 but consolidate" in outcome.message


def test_gathering_does_not_ask_for_gradients(pools: Pools) -> None:
    pools[2].run(edges.gather_with_a_gradient_on_one_rank, timeout=15)


@pytest.mark.parametrize(
    ("play", "words"),
    [
        (edges.drift_between_gatherings, "bits of parameter one.weight"),
        (edges.monitor_on_one_rank_after_gathering, "lather.Monitor"),
    ],
)
def test_gathering_takes_no_turn_of_steps(play: Any, words: str, pools: Pools) -> None:
    for outcome in pools[2].attempt(play, timeout=15):
        assert outcome.error == "ValueError" and words in outcome.message


def test_a_step_without_gradients_on_one_rank_is_counted_on_all(pools: Pools) -> None:
    found = pools[2].run(edges.monitor_without_gradients_on_one_rank, timeout=20)
    assert found == [[1, 3, 5, 7], []]


def test_a_plain_gradient_on_one_rank(pools: Pools) -> None:
    for outcome in pools[2].attempt(edges.plain_gradient_on_one_rank, timeout=15):
        assert "weight is a DTensor but its gradient is a plain tensor" in outcome.message


def test_a_step_without_gradients_settles_nothing(pools: Pools) -> None:
    assert {graft for grafts in pools[2].run(edges.step_without_gradients, timeout=15) for graft in grafts} == {"auto"}


def test_gathering_to_nobody(pools: Pools) -> None:
    for outcome in pools[2].attempt(edges.gather_to, 7, timeout=15):
        assert outcome.error == "ValueError" and "to=7" in outcome.message


def test_gathering_to_a_rank_without_some_parameters(pools: Pools) -> None:
    for outcome in pools[4].attempt(edges.gather_from_other_ranks, 0, timeout=15):
        assert outcome.error == "ValueError" and "does not store parameter few" in outcome.message
    assert not any(outcome.error for outcome in pools[4].attempt(edges.gather_from_other_ranks, 2, timeout=15))
