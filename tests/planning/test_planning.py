"""Plans for many ranks, without processes: what is stored, who owns what, which pieces move."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from geometry import count, settings_of
from hypothesis import given
from hypothesis import strategies as st

from lather.planning import messages, owners
from lather.planning.blocks import Region
from lather.planning.layouts import Axis, Layout, team_of
from lather.planning.messages import SCALE, Item, Traffic
from lather.planning.plan import SIZES, Plan, Spec, Transport, make_plan
from lather.runtime.unit_plan import UnitPlan


@st.composite
def layouts(draw, order, places=None):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)) if places is None else places
    axes = tuple(Axis(n, draw(st.sampled_from([None, *range(order)]))) for n in sizes)
    cells = tuple(draw(st.permutations(range(math.prod(sizes)))))
    return Layout(axes, tuple(draw(st.permutations(range(len(axes))))), draw(st.sampled_from([(), cells])))


def test_gradients_that_travel_go_first():
    """Others would take a turn between two stages, and the next stage's gradients would leave late."""
    specs = [Spec(f"{i}", (8, 8), 0, layout=Layout((Axis(2, 0 if i % 2 else None),))) for i in range(8)]
    plan = make_plan(specs, [settings_of()], [range(2)], stages=3)
    travels = [transport.inbound is not None for transport in plan.transports]
    assert travels == sorted(travels, reverse=True) and 0 < sum(travels) < len(travels)


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
    first = list(layout.holders(shape, region))
    assert sorted(place for one in first for place in layout.sharers[one]) == met
    assert len({layout.replica(place) for place in first}) == 1
    assert sum(numel for _, numel in layout.shares(shape, region)) == region.numel
    for place in range(layout.places):
        same = [other for other in range(layout.places) if layout.region((12,) * 9, other) == layout.region((12,) * 9, place)]
        assert layout.sharers[place] == layout.mesh.sharers[place] == tuple(same)


@given(plans())
def test_owners_get_every_gradient_once_and_holders_every_direction(plan: Plan):
    places = range(len(plan.teams[0]))
    for i, spec in enumerate(plan.specs):
        transports = {key.transport for key, block in zip(plan.keys, plan.blocks, strict=True) if block.param == i}
        for me in places:
            owned = [n for transport in transports for owner in places for n in plan.sequence(transport, owner)]
            pieces = [m.region for m in plan.outbound(owned, me) if plan.blocks[m.block].param == i]
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


def written(buffer: list[Any], items: Iterable[Item]) -> None:
    """Put names of elements, and of scales, where the items say."""
    for item in items:
        name = item.move.block, item.move.region
        for k in range(item.move.region.numel):
            assert buffer[item.offset + k] is None
            buffer[item.offset + k] = (*name, k)
        for k in range(0 if item.scale is None else SCALE):
            assert buffer[(item.scale or 0) + k] is None
            buffer[(item.scale or 0) + k] = (*name, "scale", k)


def assert_read(buffer: list[Any], items: Iterable[Item]) -> None:
    found, expected = [*buffer], [None] * len(buffer)
    written(expected, items)
    assert [x for x, y in zip(found, expected, strict=True) if y is not None] == [y for y in expected if y is not None]


def swapped(plan: Plan, buffers: list[list[Any]], trips: list[messages.Trip]) -> None:
    """What the all-to-all of a trip does to the buffers of all places."""
    outgoing: dict[tuple[int, int], list[Any]] = {}
    for me, (trip, buffer) in enumerate(zip(trips, buffers, strict=True)):
        start = trip.ordered
        for chunk in trip.chunks:
            begin = trip.sent.start + chunk.offset
            buffer[start : start + chunk.numel] = buffer[begin : begin + chunk.numel]
            start += chunk.numel
        start = trip.swapped_from
        for place, numel in enumerate(trip.swap[0]):
            outgoing[me, place] = buffer[start : start + numel]
            start += numel
    for me, (trip, buffer) in enumerate(zip(trips, buffers, strict=True)):
        start = trip.swapped_to
        for place, numel in enumerate(trip.swap[1]):
            assert len(outgoing[place, me]) == numel
            buffer[start : start + numel] = outgoing[place, me]
            start += numel


def gathered(plan: Plan, buffers: list[list[Any]], trips: list[messages.Trip], sharers: tuple[tuple[int, ...], ...]) -> None:
    """What the all-gather of a trip does."""
    starts = [trip.gathered_from for trip in trips]
    parts = [buffer[start : start + trip.part] for buffer, trip, start in zip(buffers, trips, starts, strict=True)]
    for me, (trip, buffer) in enumerate(zip(trips, buffers, strict=True)):
        assert {len(parts[place]) for place in sharers[me]} == {trip.part}
        whole = [x for place in sharers[me] for x in parts[place]]
        buffer[trip.received.start : trip.received.start + len(whole)] = whole


@pytest.mark.parametrize("largest", [1, 40, 1 << 20])
@given(plan=plans())
def test_what_is_sent_arrives(largest: int, plan: Plan):
    """All places on paper: gradients are put into buffers and arrive, then directions in the same buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "ROUND", largest)
        for transport in plan.transports:
            traffic = [Traffic.of(plan, transport, me) for me in range(len(plan.teams[0]))]
            assert len({len(each.outbound) for each in traffic}) == 1  # collectives must match
            if transport.inbound:
                buffers = [[None] * (each.nbytes // SIZES[transport.inbound]) for each in traffic]
                trips = [each.inbound for each in traffic]
                for buffer, trip in zip(buffers, trips, strict=True):
                    written(buffer, (*trip.sent.items, *trip.kept.items))
                swapped(plan, buffers, trips)
                for buffer, trip in zip(buffers, trips, strict=True):
                    assert_read(buffer, (*trip.received.items, *trip.kept.items))
            if transport.outbound:
                directions_arrive(plan, transport, traffic)


def received_range(trip: messages.Trip, copies: int) -> range:
    return range(trip.received.start, trip.received.start + max(trip.received.numel, copies * trip.part))


def directions_arrive(plan: Plan, transport: Transport, traffic: list[Traffic]) -> None:
    buffers = [[None] * (each.nbytes // SIZES[str(transport.outbound)]) for each in traffic]
    for buffer, each in zip(buffers, traffic, strict=True):
        gradients = each.inbound and [*each.inbound.received.items, *each.inbound.kept.items]
        first = min((i.offset for i in gradients or ()), default=len(buffer)) * SIZES[transport.inbound or "int8"]
        for trip in each.outbound:
            written(buffer, (*trip.sent.items, *trip.kept.items))  # while gradients are still there
            assert (trip.kept.start + trip.kept.numel) * SIZES[str(transport.outbound)] <= first or not gradients
        copies = len(transport.mesh.sharers[0])
        for one, other in pairwise(each.outbound):  # the second may begin before the first has been read
            assert not (set(received_range(one, copies)) & set(received_range(other, copies)))
            assert not one.swap or not other.swap or abs(one.relay - other.relay) >= max(one.part, other.part)
    for trips in zip(*(each.outbound for each in traffic), strict=True):
        if any(trip.swap for trip in trips):
            swapped(plan, buffers, list(trips))
        if transport.gather:
            gathered(plan, buffers, list(trips), transport.mesh.sharers)
        for buffer, trip in zip(buffers, trips, strict=True):
            assert_read(buffer, (*trip.received.items, *trip.kept.items))
    for me, each in enumerate(traffic):
        moves = [item.move for trip in each.outbound for item in (*trip.received.items, *trip.kept.items)]
        owned = [n for owner in range(len(traffic)) for n in plan.sequence(transport, owner)]
        assert sorted(m.block for m in moves) == sorted(m.block for m in plan.outbound(owned, me))


@given(plans())
def test_what_need_not_travel_does_not(plan: Plan):
    for block, owner, key in zip(plan.blocks, plan.owners, plan.keys, strict=True):
        layout, stored = plan.specs[block.param].layout, plan.stored(block.param, owner)
        if key.transport.inbound is None:
            assert block.region.meet(stored) == block.region
        assert key.transport.gather == (layout.copies > 1)
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
