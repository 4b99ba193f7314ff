"""Checksums of parameters: exact, and the same for the same bits."""

import pytest
import torch

from lather.storage import tensors
from lather.storage.tensors import checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bit_shows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 10).to(dtype)
    y = x.clone()
    bits = y.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    bits[3, 4] ^= 1
    (one,), (other,) = checksums([x]), checksums([y])
    assert one != other


def test_where_the_numbers_lie_does_not_matter() -> None:
    x = torch.randn(4, 6, 3, 5)
    assert checksums([x, x.to(memory_format=torch.channels_last), x.transpose(0, 1)]) == checksums([x]) * 3


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors_of = [
        torch.randn(7, 9),
        torch.randn(2, 3, 4).transpose(0, 2),
        torch.randn(5).double(),
        torch.tensor(2.0),
        torch.zeros(0, 3),
    ]
    whole = checksums(tensors_of)
    monkeypatch.setattr(tensors, "_CHUNK", 4)
    assert checksums(tensors_of) == whole
    assert whole[3] == 0x40000000 and whole[4] == 0 and checksums([]) == []
