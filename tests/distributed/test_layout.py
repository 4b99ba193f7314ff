"""What lather thinks a rank stores is what torch lets it store."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lather.storage.tensors import layout_of

from .cases import LAYOUTS, MANY, lay_out, places
from .harness import Pools


def regions_against_torch(layout: str) -> list[str]:
    """Names of parameters of which this rank stores other elements than it should."""
    model, mine = lay_out(layout, "toy", lambda _, shape: torch.zeros(shape)), places(layout, "toy")
    wrong = []
    for name, p in model.named_parameters():
        ranks, layout_ = layout_of(p, range(dist.get_world_size()))
        region = layout_.region(tuple(p.shape), list(ranks).index(dist.get_rank()))
        numbers = torch.arange(p.numel()).view(p.shape)[tuple(map(slice, region.start, region.stop))]
        if not torch.equal(numbers, mine[name]):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("layout", MANY)
def test_regions(layout: str, pools: Pools) -> None:
    assert pools[LAYOUTS[layout].world].run(regions_against_torch, layout) == [[]] * LAYOUTS[layout].world
