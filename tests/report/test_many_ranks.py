"""Plans for many ranks on paper: memory, bytes and balance."""

from __future__ import annotations

import math
from unittest import mock

import pytest

import lather
from lather.planning import messages
from lather.planning.blocks import Region
from lather.planning.plan import mean_flops
from lather.report import models
from lather.report.plan import on_paper


def gpt2(ranks=8, **options):
    return lather.plan(models.shapes_of(models.load("gpt2")), ranks=ranks, **options)


def test_gpt2_over_eight_ranks():
    """State is within 10% of an eighth. One all-gather of directions has less than 5% of padding."""
    report = gpt2()
    team, numel = report.teams[0], models.num_params(models.shapes_of(models.load("gpt2")))
    assert team.state_bytes_max <= 1.1 * report.state_bytes / 8
    assert team.padding < 0.05
    assert team.inbound_bytes == 0 and team.outbound_bytes <= 4 * numel * 7 / 8 * 1.05
    assert 1 <= team.imbalance < 1.05
    assert team.stages == 1  # small enough


def test_fewer_blocks_than_ranks():
    """Two hops instead of an all-gather, of which three quarters were padding."""
    team, numel = gpt2(512).teams[0], models.num_params(models.shapes_of(models.load("gpt2")))
    assert team.padding < 0.01 and team.outbound_bytes < 4 * numel * 1.01
    assert team.buffer_bytes < 80 << 20


@pytest.mark.parametrize(("shard", "shards"), [("fsdp", 1.25), ("hsdp=64", math.inf)])
def test_memory_of_many_ranks(shard, shards):
    """Buffers have at most 1.25 times what a rank stores, and do not grow with what it receives."""
    llama = models.load("llama-8b")
    team, mine = lather.plan(llama, ranks=512, shard=shard).teams[0], 4 * models.num_params(models.shapes_of(llama)) / 512
    assert team.stages == 8
    assert team.buffer_bytes <= shards * mine
    assert team.buffer_bytes + team.scratch_bytes < 480 << 20


@pytest.mark.parametrize("shard", ["fsdp", "hsdp=4", "tp=2"])
def test_sharded_gpt2_receives_at_most_gradients_in_and_directions_out(shard):
    """Gradients of what it owns, and directions of what it stores. The owner's own part does not travel."""
    team, numel = gpt2(shard=shard).teams[0], models.num_params(models.shapes_of(models.load("gpt2")))
    stored = numel / 8 * (2 if shard == "hsdp=4" else 1)
    assert team.inbound_bytes <= 4 * numel / 8 * 1.1
    assert team.outbound_bytes <= 4 * stored * 1.1


@pytest.mark.parametrize(
    ("model", "shard", "ranks"),
    [("llama-8b", "fsdp", 8), ("llama-8b", "hsdp=8", 64), ("llama-8b", "tp=8", 512), ("llama-8b", "ddp", 64)],
)
def test_work_of_a_rank_is_a_share_of_the_whole(model, shard, ranks):
    """Within 10% of 1/N for the rank with the most, as long as there are ten blocks for each rank."""
    plan, _ = on_paper(models.load(model), "cuda", ranks=ranks, shard=shard, stages=1, precondition_frequency=10)
    work = [0.0] * ranks
    for key, numbers in plan.all_banks().items():
        flops = mean_flops(plan.blocks[numbers[0]], plan.settings[key.group], key.device)
        for number in numbers:
            work[plan.owners[number]] += flops
    assert sum(1 for block in plan.blocks if block.modes) > 10 * ranks
    assert 0 < max(work) < 1.1 * sum(work) / ranks


@pytest.mark.parametrize(("shard", "most"), [("ddp", 4 * 8.03e9 / messages.ROUNDS), ("hsdp=8", messages.ROUND)])
def test_rounds_are_few_and_of_bounded_size(shard, most):
    """The host has work to do for each of them, and buffers are as large as the largest."""
    plan, _ = on_paper(models.load("llama-8b"), "cuda", ranks=64, shard=shard)
    trips = [trip for transport in plan.transports for trip in messages.outbound_trips(plan, transport, 0)]
    sizes = [trip.received.nbytes for trip in trips]
    assert len(sizes) <= 1.5 * messages.ROUNDS
    assert 0.6 * most < max(sizes) <= 1.01 * most


def test_local_blocks_bring_no_gradients():
    team = gpt2(shard="fsdp", blocks="local").teams[0]
    assert (team.inbound_bytes, team.outbound_bytes) == (0, 0)


def test_wire_dtype_sets_the_bytes():
    whole, half, quarter = (gpt2(communication_dtype=wire).teams[0].outbound_bytes for wire in (None, "bfloat16", "int8"))
    assert whole == pytest.approx(2 * half, rel=0.02) and half == pytest.approx(2 * quarter, rel=0.02)


def test_planning_is_not_quadratic():
    """The work of planning grows with blocks plus ranks, not with their product."""
    calls = {}
    for ranks in (64, 512):
        with mock.patch.object(Region, "meet", autospec=True, side_effect=Region.meet) as meet:
            report = lather.plan(models.shapes_of(models.load("llama-1b")), ranks=ranks, shard="fsdp")
        calls[ranks] = meet.call_count
    blocks = sum(row.blocks for row in report.params)
    assert calls[512] <= 2 * blocks + 2 * 512 * (2 + blocks // 512) < calls[64] * 4


@pytest.mark.parametrize("root_device", [None, "cpu"])
def test_solvers_are_those_of_where_roots_are_computed(root_device):
    report = lather.plan({"w": (64, 32)}, device="cuda", root_device=root_device)
    assert set(report.banks[0].solvers) == {"eigh" if root_device else "minimax"}
