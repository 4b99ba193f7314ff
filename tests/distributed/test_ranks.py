"""Ranks that disagree get an error on every rank that names the difference, never a hang."""

from __future__ import annotations

from typing import Any

import pytest

from . import cases
from .conftest import in_world
from .harness import Outcome, Pools

pytestmark = in_world(2)


def refused(outcomes: list[Outcome], *words: str) -> None:
    for outcome in outcomes:
        assert outcome.error in ("ValueError", "RuntimeError"), outcome
        assert all(word in outcome.message for word in words), outcome.message


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_preconditioner_dim", (8, 5)),
        ("graft", ("adam", "sgd")),
        ("stages", (1, 2)),
        ("betas", ((0.9, 0.9), (0.0, 0.9))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_structure(layout: str, name: str, values: Any, pools: Pools) -> None:
    """What decides which messages there are is compared without being asked."""
    refused(pools[2].attempt(cases.step_with, layout, [{name: value} for value in values], timeout=10), name)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
@pytest.mark.parametrize(("name", "values"), [("lr", (0.1, 0.2)), ("eps", (1e-3, 1e-4))])
def test_options(layout: str, name: str, values: Any, pools: Pools) -> None:
    options = [{name: value, "check_ranks": True} for value in values]
    refused(pools[2].attempt(cases.step_with, layout, options, timeout=10), name)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_gradients(layout: str, pools: Pools) -> None:
    refused(pools[2].attempt(cases.step_without_a_gradient, layout, "up.weight", timeout=10), "up.weight")


def test_parameters(pools: Pools) -> None:
    refused(pools[2].attempt(cases.step_of_another_shape, timeout=10), "weight")
