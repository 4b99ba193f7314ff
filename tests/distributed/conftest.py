"""The pools of processes, shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools[n]`` runs cases in a world of n ranks; it is started with its first case."""
    pools = Pools()
    yield pools
    pools.close()
