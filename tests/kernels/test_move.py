"""The kernel that moves parameters by what arrives in a buffer, against the same by torch."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
from test_copies import cut, laid_out

import lather
from lather.storage import buffers
from lather.storage.copies import KernelCopies, Moving
from lather.storage.grids import coalesce
from lather.storage.step import Rate
from lather.storage.update import update_

SHAPES = [(140,), (9, 20), (8, 32), (4, 3, 3, 3), (0, 4)]
LR = 0.5


def settings_of(**options):
    opt = lather.Shampoo([torch.nn.Parameter(torch.zeros(2, 2))], **options)
    opt.state_dict()
    return opt._session.run.plan.settings[0]


def spoil(x, *values):
    """Put values into every seventh column."""
    for i, value in enumerate(values):
        x[..., i::7] = value


@mock.patch.object(buffers, "has_kernels", return_value=False)
def by_torch(grids, tensors, momenta, p, settings, decay, _):
    """Copies of parameters and momenta after the step, through flat buffers."""
    tensors, momenta = ({i: x.clone() for i, x in some.items()} for some in (tensors, momenta))
    w, m = (buffers.FlatBuffer(grids, torch.zeros_like(p)) for _ in range(2))
    flat, memory = w.bind(tensors), m.bind(momenta)
    update_(flat, p, memory if settings.momentum else None, settings, Rate(LR, decay))
    w.save()
    m.save()
    return tensors, momenta


MOMENTA = [(0.0, False), (0.9, False), (0.9, True)]
RATES = [(0.0, torch.float32), (0.1, torch.float32), (0.1, torch.bfloat16)]
# Parameters of both dtypes take turns: each with all momenta, and with all rates.
ROWS = [((torch.float32, torch.bfloat16)[i % 2], *m, *r) for i, (m, r) in enumerate(product(MOMENTA, RATES))]


@pytest.mark.parametrize(("dtype", "momentum", "nesterov", "decay", "wire"), ROWS)
def test_it_moves_as_torch_does(dtype, momentum, nesterov, decay, wire):
    """In any layout, by directions as they travel, also where directions, parameters or momenta are not finite."""
    torch.manual_seed(0)
    draw = random.Random(0)
    settings = settings_of(momentum=momentum, nesterov=nesterov, dampening=0.2 if momentum else 0.0)
    tensors = {i: laid_out(shape, dtype, draw).normal_() for i, shape in enumerate(SHAPES)}
    momenta = {i: torch.empty_strided(x.shape, x.stride()).normal_() for i, x in tensors.items()}
    grids, end = [], 0
    for i, shape in enumerate(SHAPES):
        some, end = cut(i, end, shape, draw)
        grids += some
    p = torch.randn(end)
    spoil(p, torch.nan, torch.inf, -3e38)
    for i in (1, 2):
        spoil(momenta[i], torch.nan, torch.inf)
    p = p.to(wire)
    expected = by_torch(grids, tensors, momenta, p.float(), settings, decay)
    mover = KernelCopies(coalesce(grids), p, list(tensors), into_flat=False)
    numbers = Moving(LR, decay, settings.momentum, 1 - settings.dampening, settings.nesterov)
    assert mover.move(tensors, momenta if momentum else None, numbers)
    for i in tensors:
        torch.testing.assert_close(tensors[i], expected[0][i], rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
        if momentum:
            torch.testing.assert_close(momenta[i], expected[1][i], rtol=1e-6, atol=1e-6, equal_nan=True)


def test_one_that_is_missing_is_left_out():
    b, p = torch.zeros(8), torch.cat([torch.full((8,), 2.0), torch.ones(8)])
    grids, _ = cut(0, 0, (8,), random.Random(1))
    mover = KernelCopies([*grids, *(replace(grid, key=1, offset=grid.offset + 8) for grid in grids)], p, [0, 1], into_flat=False)
    assert mover.move({1: b}, None, Moving(1.0, 0.0, 0.0, 1.0, False))
    assert b.eq(-1).any() and not b.eq(-2).any()  # its own directions, not those of the other


def test_what_it_does_not_do_is_left_to_torch():
    w, p, numbers = torch.zeros(8), torch.ones(8), Moving(1.0, 0.0, 0.9, 1.0, False)
    grids, _ = cut(0, 0, (8,), random.Random(1))
    mover = KernelCopies(grids, p, [0], into_flat=False)
    assert not mover.move({0: w.double()}, None, numbers)
    assert not mover.move({0: w}, {0: w.bfloat16()}, numbers)
    assert not mover.move({0: w}, {0: torch.zeros(16)[::2]}, numbers)
    for other in (p.to(torch.int8), p.double()):
        assert not KernelCopies(grids, other, [0], into_flat=False).move({0: w}, None, numbers)
    assert w.eq(0).all()
