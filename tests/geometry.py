"""Shapes, ways to cut them, and settings for tests that need no optimizer."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lather.options import OPTIONS
from lather.planning.blocks import Region
from lather.settings import Geometry, Settings, check_options

Shape = tuple[int, ...]
Options = dict[str, Any]


def settings_of(**options: Any) -> Settings:
    """The defaults with these options."""
    return check_options({name: option.default for name, option in OPTIONS.items()} | options)


def geometry_of(**options: Any) -> Geometry:
    return settings_of(**options).geometry


sizes = st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13])
shapes = st.lists(sizes, max_size=5).map(tuple).filter(lambda s: math.prod(s) <= 600)


@st.composite
def cuttings(draw: Any) -> tuple[Shape, Options]:
    shape = draw(shapes)
    return shape, {
        "max_preconditioner_dim": draw(st.integers(1, 14)),
        "block_multiple": draw(st.sampled_from([1, 2, 3, 16])),
        "merge_dims": draw(st.booleans()),
        "large_dim": draw(st.sampled_from(["block", "diagonal", "adagrad"])),
        "batch_dims": draw(st.integers(0, len(shape))),
        "precondition_1d": draw(st.booleans()),
    }


def box(region: Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))


def count(shape: Shape, regions: Iterable[Region]) -> Tensor:
    """How many regions hold each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for region in regions:
        counts[box(region)] += 1
    return counts
