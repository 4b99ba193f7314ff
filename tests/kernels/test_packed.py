"""Triangles of symmetric matrices, packed and unpacked by kernels and by torch."""

from __future__ import annotations

import pytest
import torch

from lather import linalg
from lather.linalg import pack, unpack


@pytest.fixture(params=[(1, 5), (2, 16), (3, 31), (2, 48), (0, 7)], ids=str)
def matrices(request):
    n, d = request.param
    x = torch.randn(n, d, d, generator=torch.Generator().manual_seed(d))
    return x + x.mT


@pytest.fixture
def _by_kernels(monkeypatch):
    monkeypatch.setattr(linalg, "packs_by_kernels", lambda d, device: True)
    monkeypatch.setattr(linalg, "TILE", 16)
    for table in ("_lower", "_mirrored"):
        monkeypatch.setattr(linalg, table, None)  # or torch might do it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_by_torch(matrices, dtype, request):
    """To the bit, and in the dtype that is asked for. Nothing is written beyond the matrices."""
    x = matrices.to(dtype)
    packed, whole, single = pack(x), unpack(pack(x)), unpack(pack(x), torch.float32)
    request.getfixturevalue("_by_kernels")
    assert torch.equal(pack(x), packed)
    assert torch.equal(unpack(packed), whole) and torch.equal(whole, x)
    found = unpack(packed, torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, single)


@pytest.mark.usefixtures("_by_kernels")
def test_only_the_lower_triangle_is_read():
    x = torch.randn(2, 33, 33)
    assert torch.equal(unpack(pack(x)), x.tril() + x.tril(-1).mT)


@pytest.mark.usefixtures("_by_kernels")
def test_slots_of_a_larger_stack():
    """Some slots of a state, which begin in the middle of it."""
    x = pack(torch.randn(4, 20, 20))
    assert torch.equal(unpack(x[1:3]), unpack(x)[1:3])
