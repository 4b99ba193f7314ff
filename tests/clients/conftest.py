"""Processes as torchrun starts them, and single ones, for libraries that make process groups of their own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from distributed.harness import Pool

# Read when the libraries are imported: nothing is fetched, and nothing reported.
os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"})
collect_ignore = ["cases.py"]  # for doctests it would be imported, and all trainers with it
PRELOAD = ["transformers.trainer", "peft", "lightning.pytorch", "accelerate"]


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, Pool]]:
    """``worlds[n]`` runs cases in n processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pools = {world: Pool(world, port=port, preload=PRELOAD) for world in (1, 2)}
    yield pools
    for pool in pools.values():
        pool.close()
