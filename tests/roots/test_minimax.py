"""Minimax: its polynomials are the best, its residual is true, and relative damping means the same to every solver."""

from __future__ import annotations

import math

import pytest
import torch

from lather import roots
from lather.linalg import relative_ridge
from lather.roots import Eigh, HigherOrder, Minimax, Newton, Track, minimax, products, solve
from lather.roots.coupled import series

# (a, b, c) of an independent computation, for the exponent 1/4
KNOWN = {
    1e4: [(3.85003, -10.85386, 8.61893), (1.80992, -0.58778, 0.06479), (1.50394, -0.59452, 0.12116), (1.40862, -0.56378, 0.15518)],
    1e6: [
        (4.54747, -14.22093, 11.52966),
        (2.18521, -0.53758, 0.03622),
        (1.90748, -0.57510, 0.05472),
        (1.57613, -0.60180, 0.10280),
        (1.41660, -0.56782, 0.15168),
    ],
}
POWERS = [1, 2, 3, 4, 6, 8, 16, 32]


def factors(d: int, decades: float, n: int = 3, seed: int = 0) -> torch.Tensor:
    """[n, d, d] float64: eigenvalues from 1 down, evenly in the logarithm, eigenvectors at random."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, d, d, generator=g, dtype=torch.float64))[0]
    a = (q * 10.0 ** -torch.linspace(0, decades, d, dtype=torch.float64)) @ q.mT
    return (a + a.mT) / 2


def bound(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(a.double() @ a.double()).sqrt()


def relative_error(x: torch.Tensor, a: torch.Tensor, e: float, ridge: torch.Tensor) -> torch.Tensor:
    """Root mean square over eigenvectors of the relative error of `x`: [n]."""
    values, q = torch.linalg.eigh(a.double())
    inverse = (q * (values.clamp(min=0) + ridge[:, None])[:, None, :] ** e) @ q.mT
    off = x.double() @ inverse - torch.eye(a.shape[-1], dtype=torch.float64)
    return off.norm(dim=(1, 2)) / a.shape[-1] ** 0.5


# --- coefficients


@pytest.mark.parametrize("kappa", KNOWN)
def test_known_coefficients(kappa):
    steps = minimax.schedule(4, kappa, 5e-3)
    assert len(steps) == len(KNOWN[kappa])
    for step, known in zip(steps, KNOWN[kappa], strict=True):
        assert step[:3] == pytest.approx(known, abs=2e-5)


@pytest.mark.parametrize("kappa", [3.0, 1e2, 1e4, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("p", POWERS)
def test_every_step_equioscillates(p, kappa):
    """`1 - h` reaches its largest size at four points with alternating sign, which only the best `h` does."""
    low, high = kappa ** (-1 / p), 1.0
    for step in minimax.schedule(p, kappa, 1e-9):
        t = torch.linspace(low, high, 20001, dtype=torch.float64)
        off = 1 - t * (step.a + step.b * t**p + step.c * t ** (2 * p))
        if high - low < 2e-3:  # there the series, whose error is known up to higher terms
            assert off.abs().max() <= 1.1 * step.error + 1e-15
        else:
            assert off.abs().max().item() == pytest.approx(step.error, rel=1e-5, abs=1e-14)
            ends = off > 0
            peaks = [run.abs().max().item() for run in off.tensor_split((ends.diff().nonzero() + 1).flatten().tolist())]
            assert len(peaks) == 4 and peaks == pytest.approx([step.error] * 4, rel=1e-4, abs=1e-13)
        assert step.error < max(high - 1, 1 - low)
        low, high = 1 - step.error, 1 + step.error
    assert step.error <= 1e-9


def test_the_series_takes_over_where_it_is_as_good():
    narrow, wide = minimax.best_step(4, 1 - 0.99e-3, 1 + 0.99e-3), minimax.best_step(4, 1 - 1.01e-3, 1 + 1.01e-3)
    assert narrow[:3] == pytest.approx(wide[:3], abs=1e-5) and wide.error < narrow.error < 5 * wide.error


def newton_products(p: int, kappa: float, tolerance: float) -> int:
    """Of coupled Newton, for the smallest eigenvalue to arrive, without the first `X` and the last `M`."""
    a, b = series(p, 2)
    m, rounds = 1 / kappa, 0
    while abs(1 - m ** (1 / p)) > tolerance:
        m, rounds = (a + b * (1 - m)) ** p * m, rounds + 1
    return (rounds - 1) * (p.bit_length() + p.bit_count())


@pytest.mark.parametrize(("relative_eps", "count"), [(1e-4, 19), (3e-5, 19), (1e-6, 25)])
def test_fewer_products_than_newton(relative_eps, count, monkeypatch):
    solver, made = Minimax(relative_eps=relative_eps), []
    true = products.product
    counting = lambda *args, **options: made.append(1) or true(*args, **options)  # noqa: E731
    monkeypatch.setattr(products, "product", counting)
    monkeypatch.setattr(minimax, "product", counting)
    solver(factors(8, 2).float(), 1 / 4, 1e-9, {})
    assert len(made) == solver.products(4) == count
    for p in (2, 4):
        steps = solver.steps(p)
        assert solver.products(p) < 0.62 * newton_products(p, 1 / relative_eps, steps[-1].error)


def test_schedules_are_kept():
    assert minimax.schedule(4, 1e4, 5e-3) is minimax.schedule(4, 1e4, 5e-3)


def test_product():
    x, z = factors(5, 1), factors(5, 2, seed=1)
    kept = z.clone()
    got = products.product(x, x, 2.0, add=z, beta=3.0)
    torch.testing.assert_close(got, 2 * x @ x + 3 * z)
    assert torch.equal(got, got.mT) and torch.equal(z, kept)
    torch.testing.assert_close(products.product(x, x, 2.0), 2 * x @ x)


# --- roots


@pytest.mark.parametrize("e", [*(1 / p for p in POWERS), 2 / 3, 3 / 4])
@pytest.mark.parametrize("decades", [0, 3, 9])
def test_converges_for_every_exponent(e, decades):
    solver, a = Minimax(relative_eps=1e-5, tolerance=1e-9), factors(16, decades)
    root = solver(a, e, 1e-4, {})
    assert root.ok.all() and (relative_error(root.value, a, e, torch.full((3,), 1e-4, dtype=torch.float64)) < 3e-10).all()


@pytest.mark.parametrize("e", [1 / 2, 1 / 4])
@pytest.mark.parametrize("decades", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("d", [64, 256])
def test_the_default_is_safe_in_float32(d, decades, e):
    a = factors(d, decades, 2).float()
    root = Minimax()(a, e, 1e-12, {})
    true = relative_error(root.value, a, e, 1e-4 * 1.02 * bound(a))
    assert root.ok.all() and (true < 2e-2).all()
    assert ((root.residual > 0.5 * true) & (root.residual < 3 * true)).all()


@pytest.mark.parametrize("relative_eps", [1e-3, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("e", [1 / 2, 1 / 4, 1 / 8])
def test_the_residual_is_no_less_than_a_third_of_the_error(e, relative_eps):
    """Also where float32 is not enough: what is ok is good, and what is bad is not ok."""
    solver, a = Minimax(relative_eps, tolerance=0.02), factors(64, 8).float()
    root = solver(a, e, 1e-12, {})
    true = relative_error(root.value, a, e, relative_eps * 1.02 * bound(a))
    assert (true[root.ok] < 3 * root.residual[root.ok]).all() and (root.residual[~root.ok] > 0.02).all()
    assert root.ok.all() or relative_eps <= 1e-6


def test_one_direction_that_is_wrong_is_seen():
    a = factors(64, 1, 1)
    values, q = torch.linalg.eigh(a)
    f = values**-0.25
    f[0, 10] *= 1.5
    x = (q * f[:, None, :]) @ q.mT
    got = minimax._residual(lambda y: x @ y, lambda y: a @ y, minimax._signs(a), 4)
    true = ((1.5**4 - 1) / 4) / 64**0.5
    assert 0.5 * true < got.item() < 2 * true


def test_an_eigenvalue_above_the_bound_is_not_ok(monkeypatch):
    monkeypatch.setattr(minimax, "MARGIN", 0.8)
    a = factors(16, 30).float()  # one eigenvalue, so that the bound is sharp
    assert not Minimax()(a, 1 / 4, 1e-12, {}).ok.any()


@pytest.mark.parametrize("d", [5, 64, 160])
@pytest.mark.parametrize("e", [1 / 2, 1 / 4])
def test_a_slot_has_the_same_bits_in_every_stack(d, e):
    a = torch.cat([factors(d, k, 1, k) * 7.3 ** (k - 4) for k in range(7)]).float()
    eps = relative_ridge(a, 1e-4)
    together = Minimax()(a, e, eps, {})
    for part in (slice(0, 1), slice(3, 4), slice(4, 7)):
        assert torch.equal(relative_ridge(a[part], 1e-4), eps[part])
        alone = Minimax()(a[part], e, eps[part], {})
        assert all(torch.equal(x[part], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-38, 1e-30, 1e30])
@pytest.mark.parametrize("e", [1.0, 1 / 2, 1 / 4])
def test_zero_and_vanishing_factors_under_relative_damping(scale, e):
    a = (factors(7, 3) * scale).float()
    ridge = relative_ridge(a, 1e-4)
    assert (ridge >= 0.99e-30).all()
    for solver in (Minimax(tolerance=1e-2), Newton(), Eigh(), HigherOrder(), Track(20)):
        root = solve(solver, a, e, ridge, solver.init(3, 7, a.dtype, "cpu"))
        assert root.ok.all() and torch.isfinite(root.value).all()
        assert (relative_error(root.value, a, e, ridge.double()) < 1e-2).all(), solver


# --- relative damping


@pytest.mark.parametrize("solver", [Minimax(tolerance=1e-4), Newton(), HigherOrder(), Track(40)], ids=roots.spell)
@pytest.mark.parametrize("e", [1 / 2, 1 / 4])
def test_a_ridge_for_each_slot_is_eighs(solver, e):
    a = torch.cat([factors(24, k, 1, k) * 10.0 ** (3 * k - 6) for k in (0, 2, 4, 6)])
    ridge = relative_ridge(a, 1e-3)
    torch.testing.assert_close(ridge, 1e-3 * bound(a), rtol=1e-12, atol=0)
    want = Eigh()(a, e, ridge, {})
    assert (relative_error(want.value, a, e, ridge) < 1e-10).all()
    got = solver(a, e, ridge, solver.init(4, 24, a.dtype, "cpu"))
    assert got.ok.all() and (relative_error(got.value, a, e, ridge) < 1e-4).all()
    one = solver(a[2:3], e, ridge[2].item(), solver.init(1, 24, a.dtype, "cpu"))
    assert torch.equal(one.value[0], got.value[2])


def test_rescued_slots_keep_their_own_ridge():
    a = factors(6, 1, 4)
    a[1], a[2] = -0.2 * a[1], torch.nan
    ridge = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    root = solve(Minimax(tolerance=0.05), a, 1 / 4, ridge, {})
    assert root.ok.tolist() == [True, True, False, True]
    torch.testing.assert_close(root.value[1], Eigh()(a[1:2], 1 / 4, 0.2, {}).value[0], rtol=1e-12, atol=1e-12)
    assert not Minimax()(a, 1 / 4, ridge * torch.tensor([1, 1, 1, math.nan]), {}).ok[3]


def test_relative_ridge_of_a_diagonal_is_that_of_its_matrix():
    diagonal = torch.rand(3, 5, dtype=torch.float64) * torch.tensor([[1.0], [1e-9], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(relative_ridge(diagonal, 0.1), relative_ridge(torch.diag_embed(diagonal), 0.1))
    assert relative_ridge(diagonal, 0.1)[2] == 1


@pytest.mark.parametrize(("options", "words"), [({"relative_eps": 0}, "relative_eps=0"), ({"tolerance": 1.0}, "tolerance=1.0")])
def test_options_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        Minimax(**options)
