"""Directions as they travel: rounded, or with a scale per block."""

import pytest
import torch

from lather.runtime.exchange import decode, encode, rounded


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_directions_survive_the_wire(wire):
    p = torch.randn(5, 6, 3) * torch.logspace(-6, 3, 5).view(5, 1, 1)
    p[1], p[2] = 0, torch.nan
    back = rounded(p, wire)
    assert back.dtype == p.dtype and back[2].isnan().all() and (back[1] == 0).all()
    tolerance = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 254}[wire]
    largest = p.flatten(1).abs().amax(1).view(5, 1, 1)
    error = (back - p).abs() / (largest if wire == "int8" else p.abs().clamp(min=2**-14))
    assert error[[0, 3, 4]].max() <= tolerance * (1 + 1e-5)
    slots = [decode(*encode(p[i : i + 1], wire), p.dtype) for i in range(5)]
    assert torch.equal(torch.cat(slots).nan_to_num(7), back.nan_to_num(7))


def test_what_float16_cannot_hold_is_clipped():
    assert rounded(torch.full((1, 1), 1e6), "float16").item() == 65504
