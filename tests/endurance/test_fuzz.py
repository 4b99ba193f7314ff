"""A few random lives. ``make endurance`` tries thousands."""

from __future__ import annotations

import pytest
from distributed.harness import Pools

from . import fuzz

STORIES = [(seed, fuzz.story(seed)) for seed in range(16)]
VALID = [pytest.param(story, id=f"seed {seed}") for seed, story in STORIES if fuzz.is_valid(story)]


@pytest.mark.parametrize("story", VALID)
def test_what_does_not_matter_changes_no_bit(story: fuzz.Story) -> None:
    fuzz.alone(story)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
@pytest.mark.parametrize("story", VALID[:3])
def test_on_ranks(story: fuzz.Story, layout: str, pools: Pools) -> None:
    fuzz.together(layout, pools, story)


def test_a_failure_is_cut_down() -> None:
    """Such as a life that fails wherever there are two huge gradients."""

    def play(story: fuzz.Story) -> None:
        assert sum(argument == "huge" for _, argument in story.actions) < 2

    actions = [("step", "ordinary"), ("step", "huge"), ("save", None), ("step", "huge"), ("step", "zero")]
    story = fuzz.Story(fuzz.story(0).case, tuple(actions))
    assert fuzz.failure(play, story)
    assert fuzz.shortest(play, story).actions == (("step", "huge"), ("step", "huge"))
