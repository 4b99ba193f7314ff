"""Costs in balanced bins: blocks on ranks, and refreshes in the steps of a period."""

import itertools
from collections.abc import Sequence

from geometry import Shape, settings_of
from hypothesis import given
from hypothesis import strategies as st

from lather.planning.layouts import Axis, Layout
from lather.planning.owners import greedy
from lather.planning.plan import Spec, make_plan


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_greedy_is_near_the_optimum(costs: list[int], bins: int) -> None:
    def longest(chosen: Sequence[int]) -> int:
        return max(sum(c for c, b in zip(costs, chosen, strict=True) if b == index) for index in range(bins))

    chosen = greedy(costs, bins)
    assert chosen == greedy(list(costs), bins)
    best = min(map(longest, itertools.product(range(bins), repeat=len(costs))))
    assert 3 * bins * longest(chosen) <= (4 * bins - 1) * best  # Graham's bound for longest processing time first


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 9))
def test_greedy_leaves_no_bin_idle(costs: list[float], bins: int) -> None:
    chosen = greedy(costs, bins)
    assert len(chosen) == len(costs)
    assert set(chosen) <= set(range(bins))
    loads = [sum(c for c, b in zip(costs, chosen, strict=True) if b == index) for index in range(bins)]
    assert max(loads) <= (sum(costs) / bins + (1 - 1 / bins) * max(costs, default=0.0)) * (1 + 1e-9)


def test_owners_are_balanced_and_offsets_flat() -> None:
    shapes: list[Shape] = [(64, 64)] * 3 + [(32, 48), (16, 64), (100,), (8, 8)]
    settings = settings_of(max_preconditioner_dim=16, precondition_frequency=7, refresh="staggered")
    specs = [Spec(str(i), s, 0, layout=Layout.everywhere(4)) for i, s in enumerate(shapes)]
    plan = make_plan(specs, [settings], [range(4)])
    offsets = plan.offsets(0, settings)
    full = [i for i, b in enumerate(plan.blocks) if b.shape == (16, 16)]
    for choice, bins in ((dict(enumerate(plan.owners)), 4), (offsets, 7)):
        per_bin = [sum(choice[i] == index for i in full) for index in range(bins)]
        assert max(per_bin) - min(per_bin) <= 1
    assert offsets.keys() == {i for i, b in enumerate(plan.blocks) if b.modes}
    assert set(offsets.values()) == set(range(7))
    single = make_plan([Spec(str(i), s, 0) for i, s in enumerate(shapes)], [settings])
    assert single.offsets(0, settings) == offsets  # when a block is refreshed does not depend on who owns it


def test_experts_are_owned_where_they_are_stored() -> None:
    """Next to dense blocks of the same cost, which any of their holders may own, and which come first."""
    layout, settings = Layout((Axis(4, dim=0),)), [settings_of(max_preconditioner_dim=64, batch_dims=n) for n in (0, 1)]
    specs = [Spec(f"dense {i}", (128, 32), 0, layout=layout) for i in range(4)]  # blocks of two ranks
    specs += [Spec(f"experts {i}", (8, 64, 32), 1, layout=layout) for i in range(2)]
    plan = make_plan(specs, settings, [range(4)])
    for block, owner in zip(plan.blocks, plan.owners, strict=True):
        assert block.region.meet(plan.stored(block.param, owner)), (specs[block.param].name, block.region)
    assert [plan.owners.count(place) for place in range(4)] == [6] * 4
