"""Polar factors by products of 16-bit numbers: each operation against torch, and the whole against float32."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import lather
from lather.roots import polar, products

HALF = 2.0**-11  # a rounding


@pytest.fixture(autouse=True)
def _in_halves(monkeypatch):
    """As on a GPU. A matrix of 64 rows counts as a large one, because the interpreter is slow."""
    monkeypatch.setattr(polar, "fits_halves", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(polar, "LARGE", 64)


def distance(x, y):
    return (torch.linalg.vector_norm(x.double() - y) / torch.linalg.vector_norm(y)).item()


def matrices(n, rows, columns, condition=1e2):
    """Singular values from 1 down to 1 / condition, evenly on a logarithmic scale."""
    d = min(rows, columns)
    u, v = (torch.linalg.qr(torch.randn(n, side, d, dtype=torch.float64))[0] for side in (rows, columns))
    return ((u * torch.logspace(0, -math.log10(condition), d, dtype=torch.float64)) @ v.mT).float()


# Operations.


@pytest.mark.parametrize("shape", [(64, 64), (64, 192), (192, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("tall", [False, True])
def test_gram_matrices(shape, tall):
    """They are products of the rounded numbers in float32, rounded once. On a GPU they are symmetric to the bit; the interpreter's
    products are so on some CPUs only (tests/gpu)."""
    x = torch.randn(2, *reversed(shape) if tall else shape).half()
    view = x.mT if tall else x
    exact = view.double() @ view.double().mT
    found = products.symmetric(view)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, found.mT, rtol=2 * HALF, atol=1e-4)
    torch.testing.assert_close(found.double(), exact, rtol=HALF, atol=1e-4)


@pytest.mark.parametrize("d", [64, 192, 256])
def test_products_that_commute(d):
    x = torch.randn(2, d, d, dtype=torch.float64) / math.sqrt(d)
    x = x @ x.mT
    x, y, add = x.half(), (x @ x - 0.3 * x).half(), torch.randn(2, d, d).half()
    add = add + add.mT
    plain, full = products.symmetric(x, y), products.symmetric(x, y, 0.5, add, -2.0, 0.7)
    exact = (x.double() @ y.double().mT).tril()
    exact = exact + exact.tril(-1).mT  # as the kernel mirrors it: what is rounded does not quite commute
    for found in (plain, full):
        assert torch.equal(found, found.mT)
    assert distance(plain, exact) < HALF
    assert distance(full, 0.5 * exact - 2 * add.double() + 0.7 * torch.eye(d)) < HALF


@pytest.mark.parametrize("shape", [(1, 1), (5, 70), (70, 5), (100, 130), (200, 210)], ids=str)
def test_unit_halves(shape):
    """Every slot is divided by its norm, at any scale, and padded with zeros."""
    x = torch.randn(4, *shape) * torch.tensor([1.0, 1e-38, 1e36, 0.0])[:, None, None]
    found = products.unit_halves(x, 0.0)
    rows, columns = shape
    assert found.dtype == torch.float16
    assert all(0 <= big - small < 128 for big, small in zip(found.shape[1:], shape, strict=True))
    assert found.shape[1 if rows <= columns else 2] % 64 == found.shape[2 if rows <= columns else 1] % 64 == 0
    assert not found[:, rows:].any() and not found[:, :, columns:].any() and not found[3].any()
    exact = x.double() / torch.linalg.vector_norm(x.double(), dim=(1, 2), keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(found[:3, :rows, :columns].double(), exact[:3], rtol=HALF, atol=2.0**-24)
    least = products.unit_halves(x, 1e-3)[:, :rows, :columns]
    assert torch.equal(least[0], found[0, :rows, :columns]) and not least[1].any() and not least[3].any()
    short = products.unit_halves(x[:1], 1e3)[:, :rows, :columns].double()
    torch.testing.assert_close(short, x[:1].double() / max(1e3, x[0].norm().item()), rtol=HALF, atol=2.0**-24)


def test_sums_over_many_tiles(monkeypatch):
    """A slot that has more tiles than parts."""
    monkeypatch.setattr(products, "PARTS", 2)
    x = torch.randn(2, 100, 150)
    found = products.unit_halves(x, 0.0)[:, :100, :150].double()
    torch.testing.assert_close(torch.linalg.vector_norm(found, dim=(1, 2)), torch.ones(2).double(), rtol=1e-4, atol=0)


# The whole.

SHAPES = [(5, 9), (9, 5), (7, 7), (64, 200), (130, 70), (1, 33)]
WAYS = [lather.NewtonSchulz(), lather.PolarExpress(), lather.NewtonSchulz(eps=1e-7, steps=2)]


# Small matrices, wide ones and tall ones, each with two ways.
@pytest.mark.parametrize(
    ("way", "shape"), [(WAYS[(i + j) % 3], shape) for i, shape in enumerate(SHAPES) for j in range(2)], ids=str
)
def test_agrees_with_float32(way, shape, monkeypatch):
    g = matrices(2, *shape)
    found = way(g, 0.5)
    monkeypatch.setattr(polar, "fits_halves", lambda x: False)
    plain = way(g, 0.5)
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert 0 < distance(found, plain) < 0.02


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e6])
@pytest.mark.parametrize(("way", "low", "high"), [(WAYS[0], 0.68, 1.21), (WAYS[1], 0.87, 1.13)], ids=["muon", "express"])
@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)], ids=str)
def test_singular_values_end_in_their_interval(shape, way, low, high, condition):
    """Those of at least 0.002 of the Frobenius norm, in one step at a time or in runs of steps."""
    g = matrices(1, *shape, condition)
    before = torch.linalg.svdvals(g.double())
    after = torch.linalg.svdvals(way(g).double())
    count = int((before >= 2e-3 * before.norm()).sum())
    assert low <= after[0, :count].min() and after.max() <= high


@pytest.mark.parametrize("shape", [(9, 5), (64, 100)], ids=str)
def test_a_stack_is_its_slots(shape):
    way, g = lather.NewtonSchulz(), torch.randn(3, *shape)
    together = way(g)
    assert all(torch.equal(way(g[i : i + 1])[0], together[i]) for i in range(3))
    out = torch.empty(3, *shape)
    assert way(g, out=out) is out and torch.equal(out, together)
    strided = torch.randn(3, shape[0], 2 * shape[1])[:, :, : shape[1]].copy_(g)
    assert torch.equal(way(strided), together)


@pytest.mark.parametrize(("shape", "bad"), [((9, 5), math.nan), ((9, 5), 0.0), ((64, 100), math.inf), ((64, 100), 0.0)], ids=str)
def test_slots_that_are_zero_or_not_finite_stay_alone(bad, shape):
    way, g = lather.NewtonSchulz(), torch.randn(3, *shape)
    clean = way(g)
    if bad == 0:
        g[1] = 0
    else:
        g[1, 2, 3] = bad
    found = way(g)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert found[1].isnan().all() if bad else not found[1].any()


def test_scale_does_not_matter():
    way, g = lather.NewtonSchulz(), torch.randn(1, 9, 5)
    assert torch.equal(way(g * 2.0**-100), way(g)) and torch.equal(way(-g), -way(g))


@pytest.mark.parametrize(
    "way",
    [lather.PolarExpress(lower=1e-4), lather.NewtonSchulz(coefficients=(9.0, 0.0, 0.0)), lather.NewtonSchulz(20, (2.0, 0.0, 0.0))],
    ids=str,
)
def test_what_halves_cannot_hold_is_computed_in_float32(way, monkeypatch):
    g = matrices(1, 9, 5)
    found = way(g)
    monkeypatch.setattr(polar, "fits_halves", lambda x: False)
    assert torch.equal(found, way(g))


@pytest.mark.parametrize(
    ("n", "shape", "count"), [(1, (40, 40), 16), (5, (40, 40), 16), (2, (50, 60), 16), (1, (64, 200), 19), (3, (64, 200), 19)]
)
def test_launches_do_not_grow_with_the_number_of_matrices(n, shape, count, monkeypatch):
    """Nor with their size. Wide matrices take 14 products in two runs, and small ones 2 in each step, beside those with `X`."""
    calls = []

    def counted(f, *args, **given):
        calls.append(f)
        return f(*args, **given)

    for name in ("symmetric", "product", "unit_halves"):
        monkeypatch.setattr(polar, name, functools.partial(counted, getattr(polar, name)))
    lather.NewtonSchulz()(torch.randn(n, *shape))
    assert len(calls) == count
