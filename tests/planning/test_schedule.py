"""When roots are refreshed."""

import itertools
import math
from typing import Any

from geometry import settings_of
from hypothesis import given
from hypothesis import strategies as st

from lather.planning.schedule import is_due


@given(st.integers(1, 12), st.integers(1, 30), st.data())
def test_staggered_blocks_are_due_once_per_period(frequency: int, start: int, data: Any) -> None:
    offset = data.draw(st.integers(0, frequency - 1))
    settings = settings_of(precondition_frequency=frequency, start_preconditioning_step=start)
    due = [t for t in range(1, start + 4 * frequency) if is_due(t, settings, offset)]
    assert start <= due[0] < start + frequency
    assert all(b - a == frequency for a, b in itertools.pairwise(due))


@given(st.integers(1, 12), st.integers(1, 30))
def test_together_blocks_are_due_at_the_start_and_at_multiples(frequency: int, start: int) -> None:
    settings = settings_of(precondition_frequency=frequency, start_preconditioning_step=start)
    due = [t for t in range(1, 60) if is_due(t, settings, None)]
    assert due == sorted({start} | {t for t in range(frequency, 60, frequency) if t > start})
    never = settings_of(precondition_frequency=frequency, start_preconditioning_step=math.inf)
    for offset in (None, 0):
        assert not any(is_due(t, never, offset) for t in range(60))


@given(st.integers(1, 40), st.floats(0.05, 1, exclude_max=True), st.data())
def test_warmed_up_roots_are_young_and_then_as_old_as_ever(frequency: int, warmup: float, data: Any) -> None:
    settings = settings_of(precondition_frequency=frequency, refresh_warmup=warmup)
    offset = data.draw(st.none() | st.integers(0, frequency - 1))
    last, end = 0, math.ceil(2 * frequency / warmup)
    for t in range(1, end + 3 * frequency):
        last = t if is_due(t, settings, offset) else last
        assert t - last < 2 * max(1, min(frequency, warmup * t))
        if t >= end:
            assert is_due(t, settings, offset) == (t % frequency == (offset or 0))
