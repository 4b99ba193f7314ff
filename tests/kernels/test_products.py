"""Matrices in halves against torch: each operation, and the solver that is made of them."""

from __future__ import annotations

import pytest
import torch

import lather
from lather import roots
from lather.roots import Relative, minimax, products

ROUNDING = 2**-11  # of a half


def symmetric(n, d):
    x = torch.randn(n, d, d, dtype=torch.float64)
    return (x + x.mT) / 2


def halves(x):
    """As :func:`products.encode` makes them."""
    n, d, _ = x.shape
    ld = -(-d // products._side(d)) * products._side(d)
    out = torch.zeros(n, ld, ld, dtype=torch.float16)
    out[:, :d, :d] = x
    return out


def whole(x, d):
    assert not x[:, d:].any() and not x[:, :, d:].any()
    return x[:, :d, :d].double()


def distance(x, y):
    return (torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(y)).item()


@pytest.mark.parametrize("d", [1, 40, 100])
def test_there_and_back(d):
    x, scale = torch.randn(2, d, d), torch.tensor([2.0, 0.25])
    encoded = products.encode(x, scale)
    assert 0 <= encoded.shape[-1] - d < 64 and torch.equal(encoded, halves(scale[:, None, None] * x))
    assert torch.equal(products.decode(encoded, 1 / scale, d), x.half().float())


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("d", [40, 100])
def test_the_beginning_of_a_root(d, p):
    """By the formulas: once the norm counts, once the floor, and once there is nothing."""
    x = torch.randn(3, d, d, dtype=torch.float64)
    a = x @ x.mT * torch.tensor([1e-9, 1.0, 0.0])[:, None, None]
    floor, (first, b, c) = torch.tensor([1e-12, 1e3, 1e-30]), (2.0, -3.0, 1.5)
    made = products.begin(a.float(), floor, 1e-3, 1.5, (first, b, c, 0.1), p)
    size, eye = 1.5 * torch.linalg.matrix_norm(a @ a).sqrt(), torch.eye(d)
    ridge = torch.maximum(floor.double(), 1e-3 * size)[:, None, None]
    z = size[:, None, None] + ridge
    m = (a + ridge * eye) / z
    r = b * m + c * m @ m
    for slot in range(3):
        for found, want in ((made.m, m), (made.r, r), (made.x, first * eye + r)):
            assert distance(whole(found, d)[slot], want[slot]) < 2 * ROUNDING
    torch.testing.assert_close(made.back[:2].double(), z[:2].flatten() ** (-1 / p), rtol=1e-4, atol=0)
    assert made.back[2].isfinite()


@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_residual_in_halves(p):
    """Is that of float64 with the same numbers, where roots are good and where they are not."""
    a = factors([1.0, 50.0], d=70)
    made = products.begin(a.float(), torch.full((2,), 1e-3), 1e-4, 1.02, (1.0, 0.0, 0.0, 0.0), p)
    scale, ratio = (made.starts[:, i].double()[:, None, None] for i in range(2))
    m = scale * a + ratio * torch.eye(70)
    values, q = torch.linalg.eigh(m)
    x = (q * values[:, None, :] ** (-1 / p)) @ q.mT
    x[1] *= 1.1
    halved = halves(x)
    got = products.residual(halved, a.float(), made.starts, p)
    before, after = (torch.linalg.matrix_power(whole(halved, 70), k) for k in (p // 2, p - p // 2))
    off = after @ m @ before - torch.eye(70)
    v = minimax._signs(a)
    want = torch.linalg.vector_norm(off @ v, dim=(1, 2)) / torch.linalg.vector_norm(v, dim=(1, 2))
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-5)
    assert got[0] < 0.01 * 3**p and 0.05 < got[1] / p < 0.2


@pytest.mark.parametrize(("n", "d"), [(2, 40), (2, 100), (1, 200)], ids=str)
def test_products(n, d):
    """Of matrices that commute. Sums are not rounded to halves before something is added."""
    x = halves(torch.diag_embed(torch.randn(n, d)))
    y = halves(torch.diag_embed(torch.randn(n, d)))
    add = symmetric(n, d)
    a, b, c = whole(x, d), whole(y, d), whole(halves(add), d)
    plain, full = products.product(x, y), products.product(x, y, 0.5, add=halves(add), beta=-2.0)
    assert torch.equal(plain, plain.mT) and torch.equal(full, full.mT)
    assert distance(whole(plain, d), a @ b) < ROUNDING
    assert distance(whole(full, d), 0.5 * a @ b - 2 * c) < ROUNDING
    dense = halves(symmetric(n, d) / d**0.5)
    assert distance(whole(products.product(dense, dense), d), whole(dense, d) @ whole(dense, d)) < ROUNDING


@pytest.fixture
def in_halves(monkeypatch):
    def choose(value):
        monkeypatch.setattr(minimax, "is_in_halves", lambda x: value)

    return choose


def factors(sizes, d=40):
    q = torch.linalg.qr(torch.randn(len(sizes), d, d, dtype=torch.float64))[0]
    values = torch.logspace(0, -6, d, dtype=torch.float64)
    return (q * values) @ q.mT * torch.tensor(sizes, dtype=torch.float64)[:, None, None]


RIDGES = [(0.75, 1e-12), (0.5, Relative(1e-3)), (0.5, Relative(1e-4)), (0.25, (1e-6, 1e-26, 1e-3))]


@pytest.mark.parametrize("solver", [lather.Minimax(), lather.Minimax(relative_eps=1e-2)], ids=roots.spell)
@pytest.mark.parametrize(("e", "eps"), RIDGES, ids=str)
def test_minimax_in_halves(e, eps, solver, in_halves):
    """From the first step on or later, at any scale, with any ridge, and for a factor of zeros, close to what float32 gives."""
    a, eps = factors([1.0, 1e-20, 0.0]).float(), torch.tensor(eps) if type(eps) is tuple else eps
    found = []
    for half in (True, False):
        in_halves(half)
        found.append(solver(a, e, eps, {}))
    ours, plain = found
    assert ours.ok.all() and plain.ok.all() and not torch.equal(ours.value, plain.value)
    for slot in range(2):
        assert distance(ours.value[slot].double(), plain.value[slot].double()) < 0.05
    assert ours.value[2].isfinite().all() and ours.value[2, 0, 0] > 0
    assert (ours.residual <= 2 * plain.residual + 0.05).all()


def test_steps_in_float32():
    """By the ratio of eigenvalues that is left, and at first by the size: small matrices have less room for noise."""
    default, finer = lather.Minimax(), lather.Minimax(relative_eps=3e-5)
    assert [default.exact_steps(2, d) for d in (32, 480, 512, 2048)] == [1, 1, 0, 0]
    assert [finer.exact_steps(2, d) for d in (32, 1024, 8192)] == [2, 2, 0]
    assert lather.Minimax(relative_eps=1e-2).exact_steps(2, 8) == 0
    assert lather.Minimax(relative_eps=1e-12).exact_steps(2, 1024) > 3


def test_minimax_in_halves_sees_what_is_not_finite(in_halves):
    in_halves(True)
    a = factors([1.0, 1.0, 1.0]).float()
    a[0, 3, 4] = a[0, 4, 3] = torch.nan
    a[1, 2, 2] = torch.inf
    root = lather.Minimax(relative_eps=1e-2)(a, 0.25, 1e-12, {})
    assert root.ok.tolist() == [False, False, True]
    assert root.residual[:2].isinf().all() and root.value[2].isfinite().all()


def test_only_float32_on_a_gpu_is_in_halves():
    assert products.has_kernels(torch.device("cuda")) and not products.is_in_halves(torch.zeros(1, 2, 2))


def test_a_trace_that_overflows_is_not_ok(in_halves):
    in_halves(True)
    a = torch.stack([1e38 * torch.eye(8), torch.eye(8)])
    assert lather.Minimax(relative_eps=1e-2)(a, 0.5, Relative(1e-2), {}).ok.tolist() == [False, True]
