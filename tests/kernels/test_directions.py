"""Products of gradients with roots in halves, against float64."""

from __future__ import annotations

import pytest
import torch

from lather import linalg
from lather.linalg import mode_product, pack
from lather.roots import directions

SHAPES = [(16, 24), (64, 8), (40, 40)]
CLOSE = 2e-3  # as products of 11 bits are


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch):
    monkeypatch.setattr(linalg, "packs_by_kernels", lambda d, device: True)
    monkeypatch.setattr(linalg, "TILE", 16)


def matrices(n, d, condition, seed=0):
    """Positive definite, with eigenvalues from 1 down to 1 / condition and any eigenvectors."""
    q = torch.linalg.qr(torch.randn(n, d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + d)))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), d, dtype=torch.float64)
    return ((q * values) @ q.mT).float()


def gradient(n, shape, seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def made(u, roots, packed):
    out, back = torch.full_like(u, 7), u.new_full((len(u),), 7)
    sizes = directions.Sizes(linalg.norms(u.double()).float(), back)
    directions.precondition(u, [pack(x) for x in roots] if packed else roots, out, sizes)
    assert torch.equal(back, torch.exp2(back.log2().round()))  # powers of two
    return out.double() * linalg.per_slot(back.double(), out)


def exact(u, roots):
    found = u.double()
    for i, x in enumerate(roots):
        found = mode_product(found, x.double(), i)
    return found


def errors(u, roots, packed=True):
    expected = exact(u, roots)
    return linalg.norms(made(u, roots, packed) - expected) / linalg.norms(expected)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "full"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(shape, packed):
    roots = [matrices(3, d, 10.0) for d in shape]
    assert directions.fits(gradient(3, shape), roots)
    assert errors(gradient(3, shape), roots, packed).max() < CLOSE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("size", "root"), [(1e-30, 1.0), (1e-30, 1e20), (1e-12, 1e-12), (1e12, 1e12), (1e30, 1.0), (1e30, 1e-20)])
def test_size_does_not_matter(shape, size, root):
    roots = [matrices(2, d, 10.0) * (1 if i else root) for i, d in enumerate(shape)]
    assert errors(gradient(2, shape) * size, roots).max() < CLOSE


def test_packed_roots_are_scaled_as_full_ones():
    """By their traces."""
    u, roots = gradient(3, (16, 24)), [matrices(3, d, 1e4) * 1e3 for d in (16, 24)]
    sizes = directions.Sizes(linalg.norms(u), torch.empty(3))
    assert torch.equal(directions.balance(u, roots, sizes), directions.balance(u, [pack(x) for x in roots], sizes))


def test_a_direction_that_is_no_float32_is_not_finite():
    roots = [matrices(1, d, 10.0) * 1e8 for d in (16, 8)]
    assert not made(gradient(1, (16, 8)) * 1e30, roots, True).float().isfinite().any()
    assert made(gradient(1, (16, 8)) * 1e-38, [x * 1e-13 for x in roots], True).abs().max() < 1e-37


@pytest.mark.parametrize("shape", [(32, 48), (64, 8)], ids=str)
def test_one_large_eigenvalue(shape):
    """A row whose gradient is zero has a large root. Others keep their digits."""
    roots = [matrices(2, d, 10.0) for d in shape]
    u = gradient(2, shape)
    u[:, 3] = 0
    roots[0][:, 3] = roots[0][:, :, 3] = 0
    roots[0][:, 3, 3] = 1e4
    assert errors(u, roots).max() < CLOSE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "of the largest factors"])
def test_ill_conditioned(shape, kind):
    """Errors are those of 11 bits of each matrix: as large as if roots and gradients were rounded to TF32."""
    roots, u = [matrices(2, d, 1e4) for d in shape], gradient(2, shape)
    if kind != "random":
        for i, x in enumerate(roots):
            u = mode_product(u, torch.linalg.inv(x.double()).float(), i)
    rounded = exact(tf32(u), list(map(tf32, roots)))
    expected = exact(u, roots)
    coarse = linalg.norms(rounded - expected) / linalg.norms(expected)
    assert (errors(u, roots) <= CLOSE + 4 * coarse).all()
    if kind == "random":
        assert errors(u, roots).max() < CLOSE


@pytest.mark.parametrize(("eps", "tail"), [(1e-4, 3), (1e-6, 2)])
def test_rows_and_columns_of_very_different_sizes(eps, tail):
    """As in training: roots are large where gradients are small, and some elements are much larger than others. The larger a
    block is, the less room it has in 16 bits."""
    d, generator = 512, torch.Generator().manual_seed(0)
    u = torch.randn(1, d, d, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(0, -3, d, dtype=torch.float64)
    u = u * u.abs() ** (tail - 1) * sizes[:, None] * sizes
    roots = []
    for x in (u, u.mT):
        values, q = torch.linalg.eigh(x @ x.mT)
        roots.append((q * (values.clamp_min(0) + eps * values[:, -1:]).rsqrt()[:, None] @ q.mT).float())
    assert errors(u.float(), roots, packed=False).max() < CLOSE


def tf32(x):
    """Rounded to 11 bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2048).round() / 2048, exponent)


@pytest.mark.parametrize("shape", [(16, 24), (40, 40)], ids=str)
def test_slots_do_not_mix(shape, monkeypatch):
    """Zeros stay zeros, NaN and Inf are not finite, and the others do not notice. A batch of n equals n of 1."""
    roots, u = [matrices(6, d, 100.0) for d in shape], gradient(6, shape)
    usual = made(u, roots, True)
    monkeypatch.setattr(directions, "AT_A_TIME", 1)
    assert torch.equal(made(u, roots, True), usual)
    for i in range(6):
        assert torch.equal(made(u[i : i + 1], [x[i : i + 1] for x in roots], True)[0], usual[i])
    u[1], u[2, 3], u[3, 0, 0], roots[0][4, 3, 5] = 0, torch.nan, torch.inf, torch.nan
    roots[0][4, 5, 3] = torch.nan
    found = made(u, roots, True)
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    assert not any(found[i].isfinite().all() for i in (2, 3, 4))
    assert torch.equal(found[[0, 5]], usual[[0, 5]])


def test_not_everything_fits():
    roots = [matrices(1, d, 10.0) for d in (16, 12, 8)]
    assert not directions.fits(gradient(1, (16, 12)), roots[:2])
    assert not directions.fits(gradient(1, (16, 8)).double(), [roots[0], roots[2]])
    assert not directions.fits(gradient(1, (16, 8)), [roots[0], torch.ones(1, 8)])
    assert not directions.fits(gradient(1, (16,)), roots[:1])
    assert not directions.fits(gradient(1, (8, 8, 8)), [roots[2]] * 3)
