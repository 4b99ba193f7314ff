"""How a parameter is cut into blocks."""

import itertools
import math
from typing import Any

import pytest
import torch
from geometry import Options, Shape, count, cuttings, geometry_of, sizes
from hypothesis import given
from hypothesis import strategies as st

from lather.planning.blocks import Region, cut, merge_dims, pieces


@given(cuttings())
def test_blocks_tile_the_parameter(cutting: tuple[Shape, Options]) -> None:
    shape, options = cutting
    blocks, limit = cut(3, shape, geometry_of(**options)), options["max_preconditioner_dim"]
    assert count(shape, [b.region for b in blocks]).eq(1).all()
    assert [(b.param, b.index) for b in blocks] == [(3, i) for i in range(len(blocks))]
    for b in blocks:
        assert math.prod(b.shape) == b.region.numel > 0
        if b.kind == "kronecker":
            assert len(b.shape) == len(b.modes) >= (1 if options["precondition_1d"] else 2)
            assert all(d <= limit or mode == "diagonal" for d, mode in zip(b.shape, b.modes, strict=True))
            assert options["large_dim"] == "diagonal" or set(b.modes) == {"full"}
            assert all(d == 1 for d in b.region.shape[: options["batch_dims"]])
            # What the mathematics sees is the box with size-1 dimensions dropped and neighbours folded.
            assert torch.empty(b.region.shape).view(b.shape).shape == b.shape
        else:
            assert b.modes == ()
            assert b.reason
    kinds = {(b.kind, b.modes) for b in blocks}
    assert len(kinds) == (math.prod(shape) > 0)
    if math.prod(shape) and blocks[0].kind == "adagrad":
        assert options["large_dim"] == "adagrad"
        assert max(shape[options["batch_dims"] :]) > limit


@given(st.lists(sizes.filter(bool), max_size=5), st.integers(1, 100))
def test_merged_dimensions(shape: list[int], limit: int) -> None:
    groups = merge_dims(shape, limit)
    assert [dim for group in groups for dim in group] == [dim for dim, size in enumerate(shape) if size != 1]
    assert len(groups) >= min(2, sum(size != 1 for size in shape))
    folded = [math.prod(shape[dim] for dim in group) for group in groups]
    assert all(len(group) == 1 or size <= limit for group, size in zip(groups, folded, strict=True))
    if len(groups) > 2:
        assert all(a * b > limit for a, b in itertools.pairwise(folded))


@pytest.mark.parametrize(
    ("shape", "limit", "groups"),
    [
        ((512, 512, 3, 3), 1024, [[0], [1], [2, 3]]),
        ((512, 512, 3, 3), 8192, [[0], [1, 2, 3]]),
        ((64, 3, 7, 7), 1024, [[0], [1, 2, 3]]),
        ((2, 3), 1024, [[0], [1]]),
        ((2, 1, 3, 1, 4), 1024, [[0], [2, 4]]),
        ((2, 3, 512, 4), 1024, [[0, 1], [2], [3]]),
        ((1, 5, 1), 1024, [[1]]),
        ((1, 1), 1024, []),
        ((4, 4, 4, 4), math.inf, [[0], [1, 2, 3]]),
    ],
)
def test_merging_examples(shape: Shape, limit: float, groups: list[list[int]]) -> None:
    assert merge_dims(shape, limit) == groups


@given(st.integers(1, 200), st.integers(1, 50) | st.just(math.inf))
def test_pieces_are_near_equal(size: int, limit: float) -> None:
    ends = pieces(size, limit)
    lengths = [b - a for a, b in ends]
    assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])]
    assert ends[-1][1] == size
    assert len(ends) == max(1, math.ceil(size / limit))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(st.integers(1, 3000), st.integers(1, 1100) | st.just(math.inf), st.integers(1, 64))
def test_pieces_in_multiples(size: int, limit: float, multiple: int) -> None:
    ends = pieces(size, limit, multiple)
    lengths = [b - a for a, b in ends]
    assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])] and ends[-1][1] == size
    assert len(ends) == max(1, math.ceil(size / limit)) and min(lengths) > 0 and max(lengths) <= limit
    assert lengths == sorted(lengths, reverse=True)
    shortest = -(-math.ceil(size / len(ends)) // multiple) * multiple
    if size % len(ends) == 0 or multiple == 1 or shortest > limit:
        assert ends == pieces(size, limit)  # equal, or nearly
        assert lengths[0] - lengths[-1] <= 1
    else:
        assert set(lengths[:-1]) == {shortest}


@pytest.mark.parametrize(
    ("size", "limit", "multiple", "lengths"),
    [
        (5632, 1024, 16, [944] * 5 + [912]),
        (5632, 1024, 1, [939] * 4 + [938] * 2),
        (4096, 1024, 16, [1024] * 4),
        (2050, 1024, 16, [688, 688, 674]),
        (1000, 1024, 16, [1000]),
        (1025, 1024, 16, [528, 497]),
        (101, 64, 16, [64, 37]),
        (10, 4, 16, [4, 3, 3]),
        (2047, 1020, 16, [688, 688, 671]),
        (3060, 1020, 16, [1020] * 3),
        (3059, 1020, 16, [1020, 1020, 1019]),
        (33, 32, 16, [32, 1]),
    ],
)
def test_pieces_examples(size: int, limit: int, multiple: int, lengths: list[int]) -> None:
    assert [b - a for a, b in pieces(size, limit, multiple)] == lengths


def test_blocks_in_multiples() -> None:
    """Where a mode is cut; one that keeps its diagonal only, and elementwise parameters, are not."""
    shapes = [b.shape for b in cut(0, (5632, 2048), geometry_of())]
    assert shapes == [(rows, 1024) for rows in [944] * 5 + [912] for _ in range(2)]
    assert [b.shape for b in cut(0, (40, 17), geometry_of(max_preconditioner_dim=32, block_multiple=8))] == [(20, 17)] * 2
    assert [b.shape for b in cut(0, (41, 17), geometry_of(max_preconditioner_dim=32, block_multiple=8))] == [(24, 17), (17, 17)]
    assert [b.shape for b in cut(0, (41, 17), geometry_of(max_preconditioner_dim=32, block_multiple=1))] == [(21, 17), (20, 17)]
    diagonal = geometry_of(max_preconditioner_dim=32, large_dim="diagonal", block_multiple=8)
    assert [b.shape for b in cut(0, (41, 17), diagonal)] == [(41, 17)]
    assert [b.shape for b in cut(0, (41,), geometry_of(max_preconditioner_dim=32, block_multiple=8))] == [(41,)]


@st.composite
def regions(draw: Any, dims: int) -> Region:
    bounds = [sorted(draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))) for _ in range(dims)]
    return Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(*[regions(dims)] * 3)))
def test_regions_meet_as_sets_do(triple: tuple[Region, Region, Region]) -> None:
    def points(region: Region | None) -> set[Shape]:
        return set(itertools.product(*map(range, region.start, region.stop))) if region else set()

    a, b, c = triple
    assert points(a.meet(b)) == points(a) & points(b)
    assert a.meet(b) == b.meet(a)
    assert len(points(a)) == a.numel
    assert a.meet(a) == (a if a.numel else None)
    both, other = a.meet(b), b.meet(c)
    assert (both.meet(c) if both else None) == (a.meet(other) if other else None)
