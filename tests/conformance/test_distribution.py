"""Properties of plans for many ranks, without processes: what is stored, who owns what, which pieces move."""

from __future__ import annotations

import json
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lather
from lather import cli
from lather.options import OPTIONS
from lather.planning import owners as assign
from lather.planning.blocks import Axis, Layout, Region
from lather.planning.plan import Plan, Spec, make_plan
from lather.report import models as shapes
from lather.runtime.exchange import decode, encode, inbound_mail, outbound_mail, rounded
from lather.runtime.unit import Draft
from lather.storage.tensors import team_of

GROUP = {name: option.default for name, option in OPTIONS.items()} | {"max_preconditioner_dim": 4}


@st.composite
def layouts(draw, order, places=None):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)) if places is None else places
    axes = tuple(Axis(n, draw(st.sampled_from([None, *range(order)]))) for n in sizes)
    cells = tuple(draw(st.permutations(range(math.prod(sizes)))))
    return Layout(axes, tuple(draw(st.permutations(range(len(axes))))), draw(st.sampled_from([(), cells])))


@st.composite
def plans(draw):
    """Parameters that lie over one team, each in its own way."""
    places = draw(st.sampled_from([[1], [2], [3], [4], [2, 2], [2, 1, 2], [3, 2]]))
    wire = draw(st.sampled_from([None, "bfloat16", "int8"]))
    group = GROUP | {"communication_dtype": wire, "blocks": draw(st.sampled_from(["global", "local"]))}
    specs = []
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        layout = draw(layouts(len(shape), places))
        specs.append(Spec(f"p{i}", shape, 0, "cpu", draw(st.sampled_from(["float32", "bfloat16"])), 0, layout))
    return make_plan(specs, [group], [range(math.prod(places))], draw(st.integers(1, 3)))


def count(shape, regions):
    """How often each element is in one of the regions."""
    times = torch.zeros(shape, dtype=torch.int64)
    for region in regions:
        times[tuple(map(slice, region.start, region.stop))] += 1
    return times


@given(st.data(), st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
def test_a_layout_stores_every_element_as_often_as_it_says(data, shape):
    layout = data.draw(layouts(len(shape)))
    stored = [layout.region(shape, place) for place in range(layout.places)]
    assert (count(shape, stored) == layout.copies).all()
    for replica in {layout.replica(place) for place in range(layout.places)}:
        mine = [region for place, region in enumerate(stored) if layout.replica(place) == replica]
        assert (count(shape, mine) == 1).all()


@given(st.data(), st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
def test_holders_are_found(data, shape):
    layout = data.draw(layouts(len(shape)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    region = Region(start, tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)))
    met = [place for place in range(layout.places) if region.meet(layout.region(shape, place))]
    assert sorted(layout.holders(shape, region)) == met


@given(plans())
def test_owners_get_every_gradient_once_and_holders_every_direction(plan: Plan):
    places = range(len(plan.teams[0]))
    for i, spec in enumerate(plan.specs):
        routes = {key.route for key, block in zip(plan.keys, plan.blocks, strict=True) if block.param == i}
        for me in places:
            mine = [m for route in routes for owner in places for m in plan.outbound(route, owner, me)]
            pieces = [m.region for m in mine if plan.blocks[m.block].param == i]
            stored = spec.layout.region(spec.shape, me)
            assert (count(spec.shape, pieces) == count(spec.shape, [stored])).all()
        owned = [m for route in routes for o in places for h in places for m in plan.inbound(route, h, o)]
        pieces = [m.region for m in owned if plan.blocks[m.block].param == i]
        assert (count(spec.shape, pieces) == 1).all()


@given(plans())
def test_a_plan_is_a_function_of_its_input(plan: Plan):
    assert make_plan(list(plan.specs), list(plan.groups), plan.teams).owners == plan.owners  # stages have no say
    banks = [plan.banks(0, place) for place in range(len(plan.teams[0]))]
    assert sorted(n for bank in banks for numbers in bank.values() for n in numbers) == list(range(len(plan.blocks)))
    if plan.groups[0]["blocks"] == "global":
        alone = make_plan([Spec(s.name, s.shape, 0) for s in plan.specs], plan.groups)
        assert alone.blocks == plan.blocks  # blocks know nothing of ranks


@given(plans())
def test_both_ends_of_a_message_agree(plan: Plan):
    places = range(len(plan.teams[0]))
    for route in plan.routes:
        for mail_of in [inbound_mail] * bool(route.inbound) + [outbound_mail] * bool(route.outbound):
            mails = [mail_of(plan, route, me) for me in places]
            for src in places:
                for dst in places:
                    sent, received = mails[src][0], mails[dst][1]
                    to = 0 if route.gather and mail_of is outbound_mail else dst
                    assert sent.splits[to] == received.splits[src]
                    got = [item for item in received.items if item.move.src == src]
                    start = sum(received.splits[:src])
                    gone = [item for item in sent.items if to == 0 == len(sent.splits) - 1 or item.move.dst == dst]
                    base = sum(sent.splits[:to])
                    assert [(i.move.block, i.move.region, i.offset - start) for i in got] == [
                        (i.move.block, i.move.region, i.offset - base) for i in gone
                    ]


@given(plans())
def test_what_needs_not_travel_does_not(plan: Plan):
    for block, owner, key in zip(plan.blocks, plan.owners, plan.keys, strict=True):
        layout, stored = plan.specs[block.param].layout, plan.stored(block.param, owner)
        if key.route.inbound is None:
            assert block.region.meet(stored) == block.region
        if layout.replicated or layout.copies == 1:
            assert key.route.gather == (layout.replicated and layout.places > 1)
        if layout.places == 1 or (plan.groups[0]["blocks"] == "local" and layout.copies == 1):
            assert key.route.direct


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_greedy_owners_are_balanced(costs, bins):
    chosen = assign.greedy(costs, bins)
    loads = [sum(c for c, b in zip(costs, chosen, strict=True) if b == index) for index in range(bins)]
    assert max(loads) <= sum(costs) / bins + max(costs)
    assert assign.greedy(costs, bins) == chosen


def test_ties_go_to_a_holder():
    """Four equal blocks, rows of a matrix, over two and four ranks: nobody has to send a gradient."""
    for places in (2, 4):
        plan = make_plan([Spec("w", (16, 4), 0, layout=Layout((Axis(places, 0),)))], [GROUP], [range(places)])
        assert len(plan.blocks) == 4
        assert all(Draft(plan, plan.routes[0], me).received_bytes()["inbound"] == 0 for me in range(places))


@pytest.mark.parametrize(
    ("layout", "size", "rank", "team"),
    [
        (Layout.everywhere(4), 2, 3, (2, 3)),
        (Layout((Axis(2), Axis(2, 0))), 2, 1, (0, 1)),
        (Layout((Axis(2), Axis(2, 0))), None, 1, (0, 1, 2, 3)),
    ],
)
def test_teams(layout, size, rank, team):
    ranks, inner = team_of(range(4), layout, size, rank, "w")
    assert ranks == team and inner.places == len(team)


@pytest.mark.parametrize(
    ("layout", "size", "message"),
    [
        (Layout.everywhere(4), 3, "num_trainers_per_group=3 does not divide the 4 ranks"),
        (Layout((Axis(4, 0),)), 2, "do not store the whole of parameter w"),
        (Layout((Axis(2, 0), Axis(2))), 2, "do not store the whole of parameter w"),
    ],
)
def test_teams_that_cannot_be(layout, size, message):
    with pytest.raises(ValueError, match=message):
        team_of(range(4), layout, size, 0, "w")


def test_places_follow_ranks_on_a_mesh_that_does_not():
    """A mesh may list ranks in any order; places, and with them process groups, are in ascending order."""
    ranks, layout = team_of((2, 0, 3, 1), Layout((Axis(4, 0),)), None, 0, "w")
    assert ranks == (0, 1, 2, 3)
    assert [layout.region((4,), place).start for place in range(4)] == [(1,), (3,), (0,), (2,)]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_directions_survive_the_wire(wire):
    p = torch.randn(5, 6, 3) * torch.logspace(-6, 3, 5).view(5, 1, 1)
    p[1], p[2] = 0, torch.nan
    back = rounded(p, wire)
    assert back.dtype == p.dtype and back[2].isnan().all() and (back[1] == 0).all()
    tolerance = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 254}[wire]
    largest = p.flatten(1).abs().amax(1).view(5, 1, 1)
    error = (back - p).abs() / (largest if wire == "int8" else p.abs().clamp(min=2**-14))
    assert error[[0, 3, 4]].max() <= tolerance * (1 + 1e-5)
    slots = [decode(*encode(p[i : i + 1], wire), p.dtype) for i in range(5)]
    assert torch.equal(torch.cat(slots).nan_to_num(7), back.nan_to_num(7))


def test_what_float16_cannot_hold_is_clipped():
    assert rounded(torch.full((1, 1), 1e6), "float16").item() == 65504


def gpt2(ranks=8, **options):
    return lather.plan(shapes.MODELS["gpt2"](), ranks=ranks, **options)


def test_gpt2_over_eight_ranks():
    """State within 10% of an eighth; one all-gather of directions with less than 5% of padding."""
    report = gpt2()
    team, numel = report.teams[0], shapes.num_params(shapes.MODELS["gpt2"]())
    assert team.state_bytes_max <= 1.1 * report.state_bytes / 8
    assert team.padding < 0.05
    assert team.inbound_bytes == 0 and team.outbound_bytes <= 4 * numel * 7 / 8 * 1.05
    assert 1 <= team.imbalance < 1.05


@pytest.mark.parametrize("shard", ["fsdp", "hsdp=4", "tp=2"])
def test_sharded_gpt2_receives_at_most_gradients_in_and_directions_out(shard):
    """Of what it owns and of what it stores; the owner's own part does not travel."""
    team, numel = gpt2(shard=shard).teams[0], shapes.num_params(shapes.MODELS["gpt2"]())
    stored = numel / 8 * (2 if shard == "hsdp=4" else 1)
    assert team.inbound_bytes <= 4 * numel / 8 * 1.1
    assert team.outbound_bytes <= 4 * stored * 1.1


def test_local_blocks_bring_no_gradients():
    team = gpt2(shard="fsdp", blocks="local").teams[0]
    assert (team.inbound_bytes, team.outbound_bytes) == (0, 0)


def test_wire_dtype_sets_the_bytes():
    whole, half, quarter = (
        gpt2(communication_dtype=wire).teams[0].outbound_bytes for wire in (None, "bfloat16", "int8")
    )
    assert whole == 2 * half and half / 2 < quarter < half / 2 * 1.001


def test_planning_is_not_quadratic():
    """What is looked at grows with blocks plus ranks, not with their product."""
    calls = {}
    for ranks in (64, 512):
        with mock.patch.object(Region, "meet", autospec=True, side_effect=Region.meet) as meet:
            report = lather.plan(shapes.MODELS["llama-1b"](), ranks=ranks, shard="fsdp")
        calls[ranks] = meet.call_count
    blocks = sum(row.blocks for row in report.params)
    assert calls[512] <= 2 * blocks + 2 * 512 * (2 + blocks // 512) < calls[64] * 4


@pytest.mark.parametrize("shard", ["ddp", "fsdp", "hsdp=2", "tp=2"])
def test_the_command_line_plans_for_many_ranks(shard, capsys):
    arguments = ["plan", "gpt2-tiny", "--ranks", "2,4", "--shard", shard]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in rows] == [2, 4]
    for row in rows:
        law = (4 * shapes.num_params(shapes.MODELS["gpt2-tiny"]()) / row["ranks"]) * 4
        assert row["law_bytes"] > law
        assert f"{row['imbalance']:.3f}" in table
    assert "(4P/N + P) C(N)" in table


def test_waste_is_pointed_out(capsys):
    """Fewer blocks than ranks: an all-gather is mostly padding."""
    hint = "num_trainers_per_group"
    assert cli.main(["plan", "gpt2-tiny", "--ranks", "64"]) == 0
    assert hint in capsys.readouterr().out
    assert cli.main(["plan", "gpt2-tiny", "--ranks", "64", "--group", "2"]) == 0
    assert hint not in capsys.readouterr().out


def test_groups_repeat_the_work(capsys):
    assert cli.main(["plan", "gpt2-tiny", "--ranks", "8", "--group", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["trainers"] == 2


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--root", "track", "--refresh-delay", "2"], {"root": "track", "refresh_delay": 2}),
        (
            ["--root", "newton(iterations=9)", "--root-device=cpu"],
            {"root": "newton(iterations=9)", "root_device": "cpu"},
        ),
        (["--factors", "packed", "--root-dtype", "bfloat16"], {"factors": "packed", "root_dtype": "bfloat16"}),
        (["--max-preconditioner-dim", "inf", "--graft", "none"], {"max_preconditioner_dim": math.inf, "graft": None}),
        (["--betas", "0.0,0.9", "--merge-dims", "false"], {"betas": (0.0, 0.9), "merge_dims": False}),
    ],
)
def test_the_command_line_has_every_option(arguments, options, capsys):
    assert cli.main(["plan", "w=64x32,c=8x4x3x3", *arguments, "--json"]) == 0
    report = lather.plan({"w": (64, 32), "c": (8, 4, 3, 3)}, device="cuda", **options)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.to_dict()))


@pytest.mark.parametrize("root_device", [None, "cpu"])
def test_solvers_are_those_of_where_roots_are_computed(root_device):
    report = lather.plan({"w": (64, 32)}, device="cuda", root_device=root_device)
    assert set(report.banks[0].solvers) == {"eigh" if root_device else "minimax"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2-tiny", "--ranks", "4", "--shard", "zero"], "shard='zero' is not valid"),
        (["gpt2-tiny", "--ranks", "4", "--shard", "hsdp=3"], "does not divide 4 ranks"),
        (["gpt2-tiny", "--ranks", "4", "--group", "3"], "does not divide the 4 ranks"),
        (["gpt2-tiny", "--ranks", "4", "--shard", "fsdp", "--group", "2"], "do not store the whole"),
        (["gpt2-tiny", "--communication-dtype", "int4"], "communication_dtype='int4'"),
        (["gpt2-tiny", "--root", "nwton"], "did you mean 'newton'?"),
        (["gpt2-tiny", "--refresh-delay", "10"], "must be less than precondition_frequency=10"),
        (["gpt2-tiny", "--precondition-frequency", "0"], "precondition_frequency=0 is not valid"),
        (["gpt2-tiny", "--betas", "0.9"], "a pair (beta1, beta2)"),
        (["gpt2-tiny", "--rooot", "eigh"], "unknown argument '--rooot'; did you mean --root?"),
        (["gpt2-tiny", "--colour", "red"], "unknown argument '--colour'; --help"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message, capsys):
    assert cli.main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--device", "foo"], ["--dtype", "foo"], ["--dtype", "int8"], ["--exponent", "{1: 2, 'a': 3}"]]
)
def test_what_makes_no_sense_is_refused_without_a_traceback(given, capsys):
    assert cli.main(["plan", "w=8x8", *given]) == 2
    assert given[0].strip("-") in capsys.readouterr().err
