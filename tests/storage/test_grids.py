"""Many blocks copied as one: grids of boxes in a tensor, end to end in a buffer."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from geometry import Options, Shape, box, count, cuttings, geometry_of
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from lather.planning.blocks import Block, Region, cut
from lather.storage.grids import Grid, coalesce


def check_grids(blocks: Sequence[Block], tensors: Sequence[Tensor], skipped: Iterable[int] = ()) -> list[Grid]:
    """Coalesced or one by one, the same elements go to the same slots, and back. Some slots may be skipped."""
    slots = [i for i in range(99 + len(blocks)) if i not in set(skipped)][: len(blocks)]
    stack = torch.zeros(max(slots, default=0) + 1, *(blocks[0].shape if blocks else ()), dtype=torch.int64)
    size = blocks[0].region.numel if blocks else 1
    pairs = zip(slots, blocks, strict=True)
    grids = coalesce(Grid(b.param, slot * size, b.region.start, b.region.shape) for slot, b in pairs)
    assert [slot for grid in grids for slot in range(grid.offset // size, (grid.offset + grid.numel) // size)] == slots
    for grid in grids:
        grid.of_flat(stack.view(-1)).copy_(grid.of_tensor(tensors[grid.key]))
    for slot, b in zip(slots, blocks, strict=True):
        assert torch.equal(stack[slot], tensors[b.param][box(b.region)].reshape(b.shape))
    blank = [torch.zeros_like(x) for x in tensors]
    for x, y in zip(tensors, blank, strict=True):
        assert x.stride() == y.stride()
    for grid in grids:
        grid.of_tensor(blank[grid.key]).copy_(grid.of_flat(stack.view(-1)))
    for i, (x, y) in enumerate(zip(tensors, blank, strict=True)):
        held = count(tuple(x.shape), [b.region for b in blocks if b.param == i])
        assert torch.equal(y, x * held)
    return grids


def strided(shape: Shape, order: Sequence[int]) -> Tensor:
    """Distinct numbers in a dense tensor whose dimensions lie in memory in this order."""
    x = torch.arange(1, math.prod(shape) + 1).view([shape[i] for i in order])
    return x.permute(*[order.index(i) for i in range(len(shape))])


def test_a_regular_cut_is_one_grid() -> None:
    blocks = cut(0, (6, 4, 4), geometry_of(max_preconditioner_dim=2, merge_dims=False))
    assert len(check_grids(blocks, [strided((6, 4, 4), (2, 0, 1))])) == 1


@given(cuttings(), st.permutations(range(5)), st.data())
def test_grids_of_blocks(cutting: tuple[Shape, Options], order: list[int], data: Any) -> None:
    """For every bank of a parameter and its copies, in any memory layout."""
    shape, options = cutting
    order = [i for i in order if i < len(shape)]
    assume(math.prod(shape) > 1)
    copies = data.draw(st.integers(1, 3))
    blocks = [b for i in range(copies) for b in cut(i, shape, geometry_of(**options))]
    tensors = [strided(shape, order) + 1000 * i for i in range(copies)]
    for kind in dict.fromkeys(b.shape for b in blocks):
        bank = [b for b in blocks if b.shape == kind]
        check_grids(bank, tensors, data.draw(st.lists(st.integers(0, 20), max_size=2)))


@pytest.mark.parametrize("orders", [st.just([0, 1, 2]), st.permutations(range(3))], ids=["row-major", "any layout"])
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_grids_of_some_blocks(orders: Any, grid: list[int], data: Any) -> None:
    """A rank that owns only some blocks has holes in its grid. The next slot may lie earlier in memory."""
    shape = tuple(2 * n for n in grid)
    boxes = [[(2 * c, 2 * c + 2) for c in corner] for corner in itertools.product(*map(range, grid))]
    regions = [Region(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in boxes]
    blocks = [Block(0, i, region, region.shape, (), "graft") for i, region in enumerate(regions)]
    owned = [b for b in blocks if data.draw(st.booleans())]
    tensor = strided(shape, [i for i in data.draw(orders) if i < len(grid)])
    check_grids(owned, [tensor])
