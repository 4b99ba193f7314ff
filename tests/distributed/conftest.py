"""The pools of processes, shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cases import LAYOUTS
from .harness import Pools


def in_world(size: int | str) -> pytest.MarkDecorator:
    """Tests of one world size, or of a layout's, share a worker of pytest-xdist, so that its processes are started once."""
    return pytest.mark.xdist_group(f"world {LAYOUTS[size].world if isinstance(size, str) else size}")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools[n]`` runs cases in a world of n ranks; it is started with its first case."""
    pools = Pools()
    yield pools
    pools.close()
