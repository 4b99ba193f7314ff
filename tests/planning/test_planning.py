"""Plans for many ranks, without processes: what is stored, who owns what, which pieces move."""

from __future__ import annotations

import math

import pytest
from geometry import count, settings_of
from hypothesis import given
from hypothesis import strategies as st

from lather.planning import owners
from lather.planning.blocks import Region
from lather.planning.layouts import Axis, Layout, team_of
from lather.planning.messages import inbound_messages, outbound_messages
from lather.planning.plan import Plan, Spec, make_plan
from lather.runtime.unit_plan import UnitPlan


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
    blocks = draw(st.sampled_from(["global", "local"]))
    settings = settings_of(max_preconditioner_dim=4, communication_dtype=wire, blocks=blocks)
    specs = []
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        layout = draw(layouts(len(shape), places))
        specs.append(Spec(f"p{i}", shape, 0, "cpu", draw(st.sampled_from(["float32", "bfloat16"])), 0, layout))
    return make_plan(specs, [settings], [range(math.prod(places))], draw(st.integers(1, 3)))


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
        transports = {key.transport for key, block in zip(plan.keys, plan.blocks, strict=True) if block.param == i}
        for me in places:
            mine = [m for transport in transports for owner in places for m in plan.outbound(transport, owner, me)]
            pieces = [m.region for m in mine if plan.blocks[m.block].param == i]
            stored = spec.layout.region(spec.shape, me)
            assert (count(spec.shape, pieces) == count(spec.shape, [stored])).all()
        owned = [m for transport in transports for o in places for h in places for m in plan.inbound(transport, h, o)]
        pieces = [m.region for m in owned if plan.blocks[m.block].param == i]
        assert (count(spec.shape, pieces) == 1).all()


@given(plans())
def test_a_plan_is_a_function_of_its_input(plan: Plan):
    assert make_plan(list(plan.specs), list(plan.settings), plan.teams).owners == plan.owners  # stages have no say
    banks = [plan.banks(0, place) for place in range(len(plan.teams[0]))]
    assert sorted(n for bank in banks for numbers in bank.values() for n in numbers) == list(range(len(plan.blocks)))
    if not plan.settings[0].geometry.local:
        alone = make_plan([Spec(s.name, s.shape, 0) for s in plan.specs], plan.settings)
        assert alone.blocks == plan.blocks  # blocks know nothing of ranks


@given(plans())
def test_both_ends_of_a_message_agree(plan: Plan):
    places = range(len(plan.teams[0]))
    for transport in plan.transports:
        for messages_of in [inbound_messages] * bool(transport.inbound) + [outbound_messages] * bool(transport.outbound):
            messages = [messages_of(plan, transport, me) for me in places]
            for src in places:
                for dst in places:
                    sent, received = messages[src][0], messages[dst][1]
                    to = 0 if transport.gather and messages_of is outbound_messages else dst
                    assert sent.splits[to] == received.splits[src]
                    got = [item for item in received.items if item.move.src == src]
                    start = sum(received.splits[:src])
                    gone = [item for item in sent.items if to == 0 == len(sent.splits) - 1 or item.move.dst == dst]
                    base = sum(sent.splits[:to])
                    assert [(i.move.block, i.move.region, i.offset - start) for i in got] == [
                        (i.move.block, i.move.region, i.offset - base) for i in gone
                    ]


@given(plans())
def test_what_need_not_travel_does_not(plan: Plan):
    for block, owner, key in zip(plan.blocks, plan.owners, plan.keys, strict=True):
        layout, stored = plan.specs[block.param].layout, plan.stored(block.param, owner)
        if key.transport.inbound is None:
            assert block.region.meet(stored) == block.region
        if layout.replicated or layout.copies == 1:
            assert key.transport.gather == (layout.replicated and layout.places > 1)
        if layout.places == 1 or (plan.settings[0].geometry.local and layout.copies == 1):
            assert not key.transport.travels


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_greedy_owners_are_balanced(costs, bins):
    chosen = owners.greedy(costs, bins)
    loads = [sum(c for c, b in zip(costs, chosen, strict=True) if b == index) for index in range(bins)]
    assert max(loads) <= sum(costs) / bins + max(costs)
    assert owners.greedy(costs, bins) == chosen


def test_ties_go_to_a_holder():
    """Four equal blocks, rows of a matrix, over two and four ranks: nobody has to send a gradient."""
    for places in (2, 4):
        spec = Spec("w", (16, 4), 0, layout=Layout((Axis(places, 0),)))
        plan = make_plan([spec], [settings_of(max_preconditioner_dim=4)], [range(places)])
        assert len(plan.blocks) == 4
        assert all(UnitPlan(plan, plan.transports[0], me).received_bytes()["inbound"] == 0 for me in range(places))


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
    """A mesh may list ranks in any order. Places, and with them process groups, are in ascending order."""
    ranks, layout = team_of((2, 0, 3, 1), Layout((Axis(4, 0),)), None, 0, "w")
    assert ranks == (0, 1, 2, 3)
    assert [layout.region((4,), place).start for place in range(4)] == [(1,), (3,), (0,), (2,)]
