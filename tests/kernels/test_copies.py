"""The kernel that copies boxes, against ``Tensor.copy_``, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest
import torch

from lather.storage import copies
from lather.storage.buffers import FlatBuffer
from lather.storage.grids import Grid, coalesce

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*product(FLOATS, FLOATS), *((own, torch.int8) for own in FLOATS), (torch.int8, torch.int8), (torch.uint8, torch.uint8)]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def filled(shape, dtype):
    """Numbers of all sizes, of both signs, with infinities and zeros."""
    if not dtype.is_floating_point:
        return torch.randint(0, 128, shape, dtype=dtype)
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    return torch.where(torch.rand(shape) < 0.1, torch.tensor([0.0, -0.0, torch.inf])[torch.randint(3, shape)], x).to(dtype)


def laid_out(shape, dtype, draw):
    """A tensor whose dims lie in memory in any order, from any element on, with gaps or without."""
    order = draw.sample(range(len(shape)), len(shape)) if draw.random() < 0.5 else list(range(len(shape)))
    padded = [shape[i] + draw.choice([0, 0, 0, 1, 8]) for i in order]
    start, numel = draw.choice([0, 0, 1, 8, 16]), torch.Size(padded).numel()
    memory = torch.zeros(start + numel, dtype=dtype)
    inner = memory[start:].view(padded)[tuple(slice(shape[i]) for i in order)]
    x = inner.permute([order.index(i) for i in range(len(shape))])
    return x.copy_(filled(shape, dtype))


def cut(key, offset, shape, draw):
    """Boxes of a tensor, one after the other in the buffer; some are empty."""
    sizes = [draw.choice([1, 2, size]) or 1 for size in shape]
    steps = [-(-size // n) for size, n in zip(shape, sizes, strict=True)]
    grids = []
    for corner in product(*map(range, sizes)):
        start = [min(c * step, size) for c, step, size in zip(corner, steps, shape, strict=True)]
        stop = [min(a + step, size) for a, step, size in zip(start, steps, shape, strict=True)]
        if draw.random() < 0.9:
            grids.append(Grid(key, offset, tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True))))
            offset += grids[-1].numel
    return grids, offset + draw.choice([0, 3, 8])


def same(x, y):
    bits = BITS[x.element_size()]
    return torch.equal(x.contiguous().view(bits), y.contiguous().view(bits))


def counted(monkeypatch):
    """How often the kernel was launched."""
    launches, launch = Counter(), copies.KernelCopies._launch

    def see(self, *args, **fixed):
        launches["copy"] += len(self._launches)
        launch(self, *args, **fixed)

    monkeypatch.setattr(copies.KernelCopies, "_launch", see)
    return launches


SHAPES = [(), (1,), (300,), (17, 24), (16, 32), (24, 16, 3), (6, 5, 3, 3), (3, 4, 2, 3, 5), (0, 4), (2, 3, 2, 2, 2, 3)]


@pytest.mark.parametrize("seed", range(2 * len(DTYPES)))
def test_copies_are_exact(seed, monkeypatch):
    """In any layout, of boxes of any shape, also empty ones; with other dtypes on both sides."""
    torch.manual_seed(seed)
    draw, (own, other) = random.Random(seed), DTYPES[seed // 2]
    shapes = draw.sample(SHAPES, 5)
    tensors = {i: laid_out(shape, other, draw) for i, shape in enumerate(shapes)}
    grids, end = [], 0
    for i, shape in enumerate(shapes):
        some, end = cut(i, end, shape, draw)
        grids += some
    flat = filled((end + 1,), own)[draw.choice([0, 1]) :]
    plain = flat.clone()
    for grid in grids:
        grid.of_flat(plain).copy_(grid.of_tensor(tensors[grid.key]))
    launches = counted(monkeypatch)
    buffer = FlatBuffer(coalesce(grids), flat)
    buffer.bind(tensors)
    assert same(flat, plain) and 0 < launches["copy"] <= 2
    if own == other or other.is_floating_point:
        flat.copy_(filled(flat.shape, own))
        expected = {i: x.clone() for i, x in tensors.items()}
        for grid in grids:
            grid.of_tensor(expected[grid.key]).copy_(grid.of_flat(flat))
        versions = {i: x._version for i, x in tensors.items()}
        buffer.save()
        assert 2 <= launches["copy"] <= 4
        assert all(same(tensors[i], expected[i]) for i in tensors)
        assert all(tensors[i]._version > versions[i] for i in {grid.key for grid in grids}), "autograd is not told"


def rows_of(buffer, vector):
    """The boxes that were copied into a buffer in vectors of so many elements."""
    return sum(len(launch.boxes) for launch in buffer._into._launches if launch.vector == vector)


@pytest.mark.parametrize(
    ("shape", "start", "aligned"),
    [
        ((64, 32), 0, True),
        ((64, 32), 4, True),
        ((64, 32), 1, False),
        ((64, 33), 0, False),
        ((3, 30), 0, False),
        ((7, 296), 0, True),
    ],
)
def test_rows_of_whole_vectors_are_moved_in_vectors(shape, start, aligned):
    x = torch.randn(start + 2 * torch.Size(shape).numel())[start:].view(2 * shape[0], shape[1])
    rows, columns = shape[0], shape[1] - shape[1] % 2
    buffer = FlatBuffer([Grid(0, 0, (1, 0), (rows, columns // 2)), Grid(0, rows * columns // 2, (0, 0), (1, 1))], torch.zeros(9999))
    buffer.load({0: x})
    assert torch.equal(buffer.flat[: rows * columns // 2], x[1 : 1 + rows, : columns // 2].flatten())
    assert (rows_of(buffer, 4), rows_of(buffer, 1)) == (int(aligned), 2 - int(aligned))


def test_more_than_four_dims_and_channels_last():
    x = torch.randn(8, 12, 3, 3).to(memory_format=torch.channels_last)
    grids = coalesce(Grid(0, 4 * 6 * 9 * i, (4 * (i // 2), 6 * (i % 2), 0, 0), (4, 6, 3, 3)) for i in range(4))
    assert len(grids) == 1
    buffer = FlatBuffer(grids, torch.zeros(8 * 12 * 9))
    assert torch.equal(buffer.bind({0: x}), grids[0].of_tensor(x).flatten())
    buffer.flat.mul_(2)
    twice = 2 * x
    buffer.save()
    assert torch.equal(x, twice)


def gradients(n, dtype=torch.float32):
    return {i: torch.randn(4, 8).to(dtype) for i in range(n)}


def halved(n):
    """Each of n tensors of 4 x 8 in two pieces."""
    return [Grid(i, 32 * i + 16 * half, (0, 4 * half), (4, 4)) for i in range(n) for half in (0, 1)]


def expected(tensors, n):
    zero = torch.zeros(4, 8)
    return torch.cat([tensors.get(i, zero).float().view(4, 2, 4).transpose(0, 1).flatten() for i in range(n)])


def test_a_table_is_made_once_although_tensors_move_and_come_and_go(monkeypatch):
    made, make = [], copies.KernelCopies._make_launches
    monkeypatch.setattr(copies.KernelCopies, "_make_launches", lambda self: made.append(1) or make(self))
    uploads, upload = [], copies.from_host
    monkeypatch.setattr(copies, "from_host", lambda *args: uploads.append(1) or upload(*args))
    buffer, tensors = FlatBuffer(halved(3), torch.ones(96)), gradients(3)
    for _ in range(2):
        assert torch.equal(buffer.load(tensors), expected(tensors, 3))
    assert (len(made), len(uploads)) == (1, 1)
    tensors = {i: x.clone() for i, x in tensors.items()}
    assert torch.equal(buffer.load(tensors), expected(tensors, 3))
    assert (len(made), len(uploads)) == (1, 2)
    del tensors[1]
    assert torch.equal(buffer.load(tensors), expected(tensors, 3))
    tensors[1] = torch.randn(4, 8)
    assert torch.equal(buffer.load(tensors), expected(tensors, 3))
    assert (len(made), len(uploads)) == (1, 4)
    tensors[1] = torch.randn(8, 4).T
    assert torch.equal(buffer.load(tensors), expected(tensors, 3))
    assert len(made) == 2


def test_a_tensor_that_was_never_there(monkeypatch):
    launches = counted(monkeypatch)
    buffer, tensors = FlatBuffer(halved(3), torch.ones(96)), gradients(3)
    late = tensors.pop(2)
    assert torch.equal(buffer.load(tensors), expected(tensors, 3)) and launches["copy"]
    tensors[2] = late
    assert torch.equal(buffer.load(tensors), expected(tensors, 3))


def test_some_are_saved():
    buffer, tensors = FlatBuffer(halved(3), torch.ones(96)), gradients(3)
    before = {i: x.clone() for i, x in tensors.items()}
    buffer.bind(tensors)
    buffer.flat.add_(1)
    buffer.save({0, 2})
    assert torch.equal(tensors[1], before[1]) and tensors[1]._version == 0
    assert torch.equal(tensors[0], before[0] + 1) and torch.equal(tensors[2], before[2] + 1)


@pytest.mark.parametrize(
    "odd", [torch.zeros(4, 8, dtype=torch.float64), torch.randn(4, 8).bfloat16(), torch._neg_view(torch.ones(4, 8))]
)
def test_what_the_kernel_does_not_cover_is_left_to_torch(odd, monkeypatch):
    launches = counted(monkeypatch)
    buffer, tensors = FlatBuffer(halved(3), torch.ones(96)), gradients(3) | {1: odd}
    assert torch.equal(buffer.bind(tensors), expected(tensors, 3))
    if not odd.is_neg():
        buffer.flat.mul_(2)
        buffer.save()
        assert torch.equal(buffer.load(tensors), expected(tensors, 3))
    assert not launches["copy"]
    assert torch.equal(FlatBuffer(halved(1), torch.ones(32)).load({}), torch.zeros(32))


def test_launches_do_not_grow_with_pieces(monkeypatch):
    launches = counted(monkeypatch)
    for n in (1, 20):
        launches.clear()
        buffer = FlatBuffer(halved(n), torch.zeros(32 * n))
        buffer.bind(gradients(n))
        buffer.save()
        assert launches["copy"] == 2
