"""Ranks that disagree get an error on every rank that names the difference, never a hang."""

from __future__ import annotations

from typing import Any

import pytest

from . import cases
from .harness import Outcome, Pool, Pools


def refused(outcomes: list[Outcome], *words: str) -> None:
    for outcome in outcomes:
        assert outcome.error in ("ValueError", "RuntimeError"), outcome
        assert all(word in outcome.message for word in words), outcome.message


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
@pytest.mark.parametrize(
    ("name", "values"),
    [("max_preconditioner_dim", (8, 5)), ("graft", ("adam", "sgd")), ("stages", (1, 2)), ("betas", ((0.9, 0.9), (0.0, 0.9)))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_structure(layout: str, name: str, values: Any, pools: Pools) -> None:
    """What decides which messages there are is compared without being asked."""
    refused(pools[2].attempt(cases.step_with, layout, [{name: value} for value in values], timeout=10), name)


def test_devices(pools: Pools) -> None:
    """Ranks exchange blocks of state when it is gathered, so these must have the same form everywhere."""
    refused(pools[2].attempt(cases.step_with_kernels_on_one_rank, "ddp2", timeout=10), "packed factors of param group 0")


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
@pytest.mark.parametrize(("name", "values"), [("lr", (0.1, 0.2)), ("eps", (1e-3, 1e-4))])
def test_options(layout: str, name: str, values: Any, pools: Pools) -> None:
    options = [{name: value, "check_ranks": True} for value in values]
    refused(pools[2].attempt(cases.step_with, layout, options, timeout=10), name)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_gradients(layout: str, pools: Pools) -> None:
    refused(pools[2].attempt(cases.step_without_a_gradient, layout, "up.weight", timeout=10), "up.weight")


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_a_monitor_on_one_rank(layout: str, pools: Pools) -> None:
    """Metrics are gathered from all ranks, so this would wait forever."""
    refused(pools[2].attempt(cases.step_with_a_monitor_on_one_rank, layout, timeout=10), "lather.Monitor", "every rank")


def test_a_step_that_one_rank_records_for_itself(pools: Pools) -> None:
    assert pools[2].run(cases.monitored_steps, "ddp2", timeout=20) == [[1, 4, 9], []]


GPA: cases.Options = {"averaging": "gpa", "momentum": 0.0}


@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"momentum": 0.9}, GPA], ids=str)
def test_replicas_stay_equal_if_a_gradient_is_missing(options: cases.Options, pools: Pools) -> None:
    cases.assert_same(*pools[2].run(cases.gradients_on_one_rank, "ddp2", options, timeout=20))


@pytest.mark.parametrize(("options", "step"), [(GPA | {"averaging": "schedule_free"}, 2), (GPA, 1)], ids=str)
def test_averages_do_not_go_on_if_a_gradient_is_missing(options: cases.Options, step: int, pools: Pools) -> None:
    """They begin, or weigh a step, by a rank's own gradient, so replicas would drift apart."""
    found = pools[2].attempt(cases.gradients_on_one_rank, "ddp2", options, [step], timeout=20)
    refused(found, "whether scalar has a gradient")


@pytest.mark.parametrize("probed", [False, True])
def test_weights_that_differ_in_the_first_step(probed: bool, pools: Pools) -> None:
    """Not before it: torch's checkpoint code makes state by a step that is none, and then loads the weights."""
    refused(pools[2].attempt(cases.weights_of_their_own, probed, timeout=10), "bits of parameter weight")


def test_a_sparse_gradient_on_one_rank(pools: Pools) -> None:
    refused(pools[2].attempt(cases.a_sparse_gradient, timeout=10), "rank 1 cannot go on", "table has a sparse gradient")


def test_eval_mode_on_one_rank_before_the_first_step(pools: Pools) -> None:
    refused(pools[2].attempt(cases.eval_before_the_first_step, timeout=10), "train mode of param group 0")


def test_parameters(pools: Pools) -> None:
    refused(pools[2].attempt(cases.step_of_another_shape, timeout=10), "weight")


WORDS = {"add": "extra", "load": "load_state_dict", **dict.fromkeys(("empty", "forget", "zero", "set"), "were changed by hand")}
PLACES: list[tuple[str, cases.Options]] = [
    ("ddp2", {}),
    ("fsdp2", {}),
    ("ddp4", {"num_trainers_per_group": 2}),
    ("ddp2", {"num_trainers_per_group": 1}),  # no rank sends anything to another
    ("fsdp_sub22", {}),  # rank 1 has parameters that ranks 0 and 2 do not
]
places = pytest.mark.parametrize(("layout", "options"), PLACES, ids=["ddp", "fsdp", "groups", "alone", "meshes"])


APART = ["lr", "eps", "momentum", "communication_dtype", "graft", "add", "load", "empty", "forget", "zero", "set"]
# Each in three places, with either answer in turns.
TURNS = [(what, i % 2 == j % 2, *PLACES[(i + j) % 5]) for i, what in enumerate(APART) for j in range(3)]


@pytest.mark.parametrize(("what", "late", "layout", "options"), TURNS)
def test_one_rank_apart(what: str, late: bool, layout: str, options: cases.Options, pools: Pools) -> None:
    """All ranks stop, before the step or, if the answer is on a device, before the next one."""
    pool = pools[cases.LAYOUTS[layout].world]
    outcomes = pool.attempt(cases.one_rank_apart, layout, what, options | {"check_ranks": False}, late, timeout=20)
    refused(outcomes, WORDS.get(what, what), f"in step {4 if late else 3}")


def test_the_largest_learning_rate_so_far(pools: Pools) -> None:
    refused(pools[2].attempt(cases.rates_that_were_different, timeout=10), "peak_lr of param group 0")


def test_one_rank_fails_beside_partial_gradients(pools: Pools) -> None:
    refused(pools[2].attempt(cases.one_rank_fails_beside_partial_gradients, timeout=10), "eps=-1.0")


@pytest.mark.parametrize("what", ["empty", "zero"])
def test_state_that_one_rank_changes_before_a_step_without_a_rate(what: str, pools: Pools) -> None:
    """Such a step looks like one by which torch allocates state, to one rank only."""
    refused(pools[2].attempt(cases.one_rank_apart, "ddp2", what, {"lr": 0.0}, False, timeout=10), "were changed by hand")


@pytest.mark.parametrize(
    ("what", "options", "step"),
    [
        ("eval", {"averaging": "schedule_free", "momentum": 0.0}, 4),
        ("add", {"on_nonfinite": "raise"}, 3),  # all ranks wait in every step
        ("add under a monitor", {}, 4),
    ],
)
def test_one_rank_apart_where_steps_have_more_collectives(what: str, options: cases.Options, step: int, pools: Pools) -> None:
    outcomes = pools[2].attempt(cases.one_rank_apart, "ddp2", what, options, True, timeout=20)
    refused(outcomes, "eval mode" if what == "eval" else "extra", f"in step {step}")


def test_a_rank_that_misses_a_step_moves_nothing(pools: Pools) -> None:
    moved, _ = pools[2].run(cases.miss_a_step, "ddp2", timeout=20)
    assert moved == {0: {True}, 1: {False}}
    moved, *_ = pools[4].run(cases.miss_a_step_in_small_parts, "ddp4", timeout=20)  # it passes on what the others send
    assert moved == {0: {True}, 1: {False}, 2: {True}, 3: {True}}


def test_one_mesh_takes_one_vote(pools: Pools) -> None:
    assert pools[3].run(cases.steps_in_part_of_the_world, timeout=20) == [1, 1, 0]


@places
@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
def test_a_rank_that_plans_anew_for_itself(late: bool, layout: str, options: cases.Options, pools: Pools) -> None:
    """It comes to the same plan, and nobody has to know."""
    pool = pools[cases.LAYOUTS[layout].world]
    assert set(pool.run(cases.one_rank_apart, layout, "move", options, late, timeout=20)) == {5}


CHECKS = [(4, 5), (True, 3), (1, 3)]
REPLICAS = [*PLACES[:4], ("tp0x2", {}), ("hsdp22", {}), ("hsdp22", {"num_trainers_per_group": 2}), ("fsdp_tp22", {})]
DRIFTS = [(*REPLICAS[0], *check) for check in CHECKS]
DRIFTS += [(*replica, *CHECKS[i % 2]) for i, replica in enumerate(REPLICAS[1:])]


@pytest.mark.parametrize(("layout", "options", "check", "step"), DRIFTS)
def test_drift(layout: str, options: cases.Options, check: int, step: int, pools: Pools) -> None:
    """One bit of a parameter changes on one rank."""
    pool = pools[cases.LAYOUTS[layout].world]
    outcomes = pool.attempt(cases.one_rank_apart, layout, "drift", options | {"check_ranks": check}, False, timeout=20)
    refused(outcomes, "bits of parameter scalar", f"in step {step}")


def test_unnamed_parameters_in_another_order(pools: Pools) -> None:
    refused(pools[2].attempt(cases.another_order, timeout=10), "param_groups[0]['params'][0]")


def test_a_plan_that_fails_on_one_rank(pools: Pools) -> None:
    refused(pools[2].attempt(cases.fail_on_one_rank, timeout=10), "batch_dims")


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_a_process_group_that_was_destroyed(layout: str) -> None:
    pool = Pool(2)
    try:
        refused(pool.attempt(cases.step_after_the_end, layout, timeout=10), "process group", "destroyed")
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("layout", "trainers", "message"),
    [("ddp2", 3, "num_trainers_per_group=3 does not divide the 2 ranks"), ("fsdp2", 1, "do not store the whole of parameter")],
)
def test_trainers_that_do_not_fit(layout: str, trainers: int, message: str, pools: Pools) -> None:
    options = [{"num_trainers_per_group": trainers}] * 2
    refused(pools[2].attempt(cases.step_with, layout, options, timeout=10), message)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters(use_orig_params: bool, pools: Pools) -> None:
    refused(pools[2].attempt(cases.flat_parameter, use_orig_params, timeout=10), "FSDP1", "fully_shard")


@pytest.mark.parametrize(("layout", "method"), [("ddp2", "shampoo"), ("fsdp2", "shampoo"), ("ddp2", "kl"), ("ddp2", "soap")])
def test_a_state_without_this_ranks_blocks(layout: str, method: str, pools: Pools) -> None:
    """Torch fills what is missing with a new state before it loads, so it cannot be refused; but it is not silent."""
    first, second = pools[2].run(cases.from_a_gathered_state, layout, method)
    assert not first and second


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_a_full_state_that_was_consolidated(layout: str, pools: Pools) -> None:
    case = cases.Case({"momentum": 0.9})
    stored = pools[2].run(cases.through_torchs_full_state, layout, case, timeout=30)
    cases.assert_same(cases.assemble(stored, cases.shapes_of(case.model)), cases.alone(case))


def test_uneven_inputs(pools: Pools) -> None:
    """A rank without data has no gradients for the blocks that it owns."""
    refused(pools[2].attempt(cases.uneven_inputs, "both", timeout=10), "Join", "throw_on_early_termination")
    assert pools[2].run(cases.uneven_inputs, "stop all", timeout=20) == [2, 2]
