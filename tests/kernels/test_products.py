"""Matrices in halves against torch: each operation, and the solver that is made of them."""

from __future__ import annotations

import pytest
import torch

import lather
from lather.kernels.schema import CombineTerms
from lather.roots import minimax, products

EXACT = 2**-20  # 22 bits, of the largest entries; as much is lost where a small one has no bits left


def symmetric(n, d, dtype=torch.float64):
    x = torch.randn(n, d, d, dtype=dtype)
    return (x + x.mT) / 2


def halves(x):
    """As :func:`products.encode` makes them."""
    n, d, _ = x.shape
    ld = -(-d // products._side(d)) * products._side(d)
    out = torch.zeros(n, 2, ld, ld, dtype=torch.float16)
    out[:, 0, :d, :d] = x
    out[:, 1, :d, :d] = 2048 * (x - out[:, 0, :d, :d])
    return out


def whole(x, d):
    return (x[:, 0].double() + x[:, 1].double() / 2048)[:, :d, :d]


def distance(x, y):
    return (torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(y)).item()


@pytest.mark.parametrize("d", [1, 40, 100])
def test_split_and_joined(d):
    x, scale = torch.randn(2, d, d), torch.tensor([2.0, 0.25])
    encoded = products.encode(x, scale)
    ld = encoded.shape[-1]
    assert encoded.dtype == torch.float16 and encoded.shape == (2, 2, ld, ld) and 0 <= ld - d < 64
    assert not encoded[:, :, d:].any() and not encoded[:, :, :, d:].any()
    assert distance(whole(encoded, d), scale[:, None, None] * x.double()) < EXACT
    decoded = products.decode(encoded, 1 / scale, d)
    assert decoded.shape == x.shape
    torch.testing.assert_close(decoded, x, rtol=2**-21, atol=1e-10)


@pytest.mark.parametrize(("n", "d"), [(2, 40), (1, 100)], ids=str)
def test_norms_and_combinations(n, d):
    x, y, terms = symmetric(n, d), symmetric(n, d), torch.randn(5, n)
    a, b = halves(x), halves(y)
    torch.testing.assert_close(products.frobenius(a).double(), torch.linalg.vector_norm(x, dim=(1, 2)), rtol=1e-6, atol=0)
    t, eye = terms.double()[:, :, None, None], torch.eye(d)
    first, second = products.combine(a, b, CombineTerms(*terms))
    assert distance(whole(first, d), t[0] * x + t[1] * eye) < EXACT
    assert distance(whole(second, d), t[2] * x + t[3] * y + t[4] * eye) < EXACT


@pytest.mark.parametrize(("n", "d"), [(2, 40), (2, 100), (1, 200)], ids=str)
def test_products(n, d):
    """Of matrices that commute."""
    x = symmetric(n, d) / d**0.5
    y, add = x @ x - 0.3 * x, symmetric(n, d)
    a, b, eye = halves(x), halves(y), torch.eye(d)
    plain, full = products.product(a, b), products.product(a, b, 0.5, add=halves(add), beta=-2.0, diagonal=0.7)
    for result in (whole(plain, d), whole(full, d)):
        assert distance(result, result.mT) < EXACT
    assert distance(whole(plain, d), x @ y) < EXACT
    assert distance(whole(full, d), 0.5 * x @ y - 2 * add + 0.7 * eye) < EXACT


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_powers(p):
    x = symmetric(1, 20) / 20**0.5
    a = halves(x)
    power = torch.linalg.matrix_power(x, p)
    assert distance(whole(products.matrix_power(a, p), 20), power) < 4 * EXACT
    assert distance(whole(products.times_power(a, p, a), 20), power @ x) < 4 * EXACT


@pytest.fixture
def in_halves(monkeypatch):
    def choose(value):
        monkeypatch.setattr(minimax, "is_split", lambda x: value)

    return choose


def factors(sizes, d=40):
    q = torch.linalg.qr(torch.randn(len(sizes), d, d, dtype=torch.float64))[0]
    values = torch.logspace(0, -6, d, dtype=torch.float64)
    return (q * values) @ q.mT * torch.tensor(sizes, dtype=torch.float64)[:, None, None]


@pytest.mark.parametrize(("e", "eps"), [(0.75, 1e-12), (0.25, (1e-6, 1e-26, 1e-3))], ids=str)
def test_minimax_in_halves(e, eps, in_halves):
    """As good as in float32 at any scale, with one ridge for all or one for each, and for a factor of zeros."""
    a, eps = factors([1.0, 1e-20, 0.0]).float(), eps if isinstance(eps, float) else torch.tensor(eps)
    roots = []
    for split in (True, False):
        in_halves(split)
        roots.append(lather.Minimax()(a, e, eps, {}))
    ours, plain = roots
    assert ours.ok.all() and plain.ok.all()
    for slot in range(len(a)):
        assert distance(ours.value[slot].double(), plain.value[slot].double()) < 1e-3
    assert (ours.residual <= 2 * plain.residual + 2e-3).all()


def test_minimax_in_halves_sees_what_is_not_finite(in_halves):
    in_halves(True)
    a = factors([1.0, 1.0, 1.0]).float()
    a[0, 3, 4] = a[0, 4, 3] = torch.nan
    a[1, 2, 2] = torch.inf
    root = lather.Minimax()(a, 0.25, 1e-12, {})
    assert root.ok.tolist() == [False, False, True]
    assert torch.equal(root.value[:2], torch.eye(40).expand(2, -1, -1))
    assert root.value[2].isfinite().all() and not torch.equal(root.value[2], torch.eye(40))


def test_only_float32_on_a_gpu_is_split():
    assert products.has_kernels(torch.device("cuda")) and not products.is_split(torch.zeros(1, 2, 2))
