"""When roots are refreshed."""

import itertools
import math
from typing import Any

import pytest
from geometry import settings_of
from hypothesis import given
from hypothesis import strategies as st

from lather.planning.schedule import is_due


@given(st.integers(1, 12), st.integers(1, 30), st.data())
def test_staggered_blocks_are_due_once_per_period(frequency: int, start: int, data: Any) -> None:
    offset = data.draw(st.integers(0, frequency - 1))
    settings = settings_of(precondition_frequency=frequency, start_preconditioning_step=start, refresh_warmup=0.0)
    due = [t for t in range(1, start + 4 * frequency) if is_due(t, settings, offset)]
    assert start <= due[0] < start + frequency
    assert all(b - a == frequency for a, b in itertools.pairwise(due))


@given(st.integers(1, 12), st.integers(1, 30))
def test_together_blocks_are_due_at_the_start_and_at_multiples(frequency: int, start: int) -> None:
    settings = settings_of(precondition_frequency=frequency, start_preconditioning_step=start, refresh_warmup=0.0)
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


def test_the_schedule_of_the_defaults() -> None:
    """Every step at first, and every ten from step 160 on."""
    expected = [*range(1, 20), *range(20, 40, 2), *range(40, 80, 4), *range(80, 160, 8), *range(160, 201, 10)]
    for method in ("shampoo", "kl", "soap"):
        settings = settings_of(preconditioner=method)
        assert [t for t in range(1, 201) if is_due(t, settings)] == expected


@pytest.mark.parametrize("method", ["shampoo", "kl", "soap", "spectral", None])
def test_the_first_refresh(method: str | None) -> None:
    """With the warm-up it is the first step; without, the frequency, from which a user's start is free."""
    assert settings_of(preconditioner=method).first_refresh == 1
    for frequency in (1, 2, 7):
        cold = {"preconditioner": method, "precondition_frequency": frequency, "refresh_warmup": 0.0}
        assert settings_of(**cold).first_refresh == frequency
        assert settings_of(**cold, start_preconditioning_step=1).first_refresh == 1
    if method in ("shampoo", "kl", "soap"):
        assert settings_of(preconditioner=method, refresh_delay=2).first_refresh == 10  # the default warm-up yields
