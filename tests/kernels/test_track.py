"""Choleskys by halves against torch's, and the solver that is made of them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lather.kernels import dense
from lather.methods.soap import turn_, turned
from lather.roots import Track, track


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    def choose(value):
        monkeypatch.setattr(track, "has_kernels", lambda device: value)

    choose(True)
    return choose


def positive(n, d, decades=1.0):
    """Matrices with a diagonal of 1 to 1.1 and about so many decades of eigenvalues, as the solver makes them."""
    x = torch.linalg.svd(torch.randn(n, d, d, dtype=torch.float64))
    b = x.U * torch.logspace(0, -decades / 2, d, dtype=torch.float64) @ x.Vh
    b = b / torch.linalg.vector_norm(b, dim=1, keepdim=True)
    return (b.mT @ b + 0.1 * torch.eye(d)).float()


def skew(q):
    q = q.double()
    return torch.linalg.matrix_norm(q.mT @ q - torch.eye(q.shape[-1])).max().item()


@pytest.mark.parametrize("d", [1, 33, 65, 130])
def test_both_factors_are_those_of_torch(d, by_kernels):
    a = positive(2, d)
    want = torch.linalg.cholesky(a.double())
    lower, inverse = track._halves(a.clone())
    for x, y in ((lower, want), (inverse, torch.linalg.inv(want))):
        assert torch.equal(x, x.tril()) and torch.linalg.vector_norm(x - y) < 1e-5 * torch.linalg.vector_norm(y)
    assert torch.equal(track.cholesky(a.clone()), lower)


def test_only_the_upper_triangle_of_a_tile_matters():
    a = positive(1, 40)
    assert torch.equal(track._halves(a.triu())[0], track._halves(a.clone())[0])


def test_orthonormal_columns_are_those_of_torch(by_kernels):
    f = torch.linalg.qr(torch.randn(3, 100, 100))[0] + 0.02 * torch.randn(3, 100, 100)
    q = track.orthonormal(f)
    by_kernels(False)
    torch.testing.assert_close(q, track.orthonormal(f), rtol=0, atol=1e-5)
    assert skew(q) < 1e-4


def test_what_breaks_down_stays_alone():
    """One matrix is NaN, one is indefinite in its first tile, one in its last pivot. The others keep their bits."""
    a = torch.cat([positive(4, 100), torch.full((1, 100, 100), torch.nan)])
    a[1, 0, 0], a[2, 99, 99] = -1, 0
    lower, inverse = track._halves(a.clone())
    assert lower.isfinite().flatten(1).all(1).tolist() == [True, False, False, True, False]
    for i in (0, 3):
        for x, y in zip(track._halves(a[i : i + 1].clone()), (lower, inverse), strict=True):
            assert torch.equal(x[0], y[i])


def test_a_basis_is_followed(by_kernels):
    x = torch.randn(3, 40, 60) * torch.logspace(0, -3, 40)[:, None]
    a, states = x @ x.mT, [Track().init(3, 40, torch.float32, "cpu") for _ in range(2)]
    a[1] = 0
    for _ in range(3):
        for value, state in zip((True, False), states, strict=True):
            by_kernels(value)
            basis = Track().basis(a, state)
            assert basis.ok.all() and skew(basis.vectors) < 1e-4
    torch.testing.assert_close(*(state["Q"].abs() for state in states), rtol=0, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 3, 12])
def test_factors_of_low_rank_are_followed(rank):
    g, solver, a = torch.Generator().manual_seed(rank), Track(iterations=1), torch.zeros(3, 24, 24)
    state = solver.init(3, 24, torch.float32, "cpu")
    for _ in range(3):
        x = torch.randn(3, 24, rank, generator=g)
        a = 0.95 * a + 0.05 * (x @ x.mT)
        basis = solver.basis(a, state)
        assert basis.ok.all() and skew(basis.vectors) < 1e-4


def test_only_float32_goes_by_kernels(monkeypatch):
    monkeypatch.setattr(track, "_halves", None)
    assert skew(track.orthonormal(torch.eye(3, dtype=torch.float64)[None])) == 0
    assert torch.equal(track.cholesky(torch.eye(3, dtype=torch.float64)[None])[0], torch.eye(3, dtype=torch.float64))


def test_graphs_hold_it_where_kernels_run(by_kernels):
    assert Track().is_capturable(torch.device("cuda"))
    by_kernels(False)
    assert not Track().is_capturable(torch.device("cuda"))


class Launches(TorchDispatchMode):
    """Names of the operations, without those that only name memory."""

    FREE = ("new_empty", "slice", "transpose", "diagonal", "alias")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.found += [name] * (not name.startswith(self.FREE))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("d", "total"), [(64, 3), (256, 18), (768, 58), (1024, 78)])
def test_launches(d, total, monkeypatch):
    kernel = mock.MagicMock()
    monkeypatch.setattr(dense, "cholesky", kernel)
    a = torch.zeros(1, d, d)
    with Launches() as launches:
        track._halves(a)
    assert len(launches.found) + kernel.__getitem__.return_value.call_count == total
    assert set(launches.found) <= {"bmm", "baddbmm_", "zeros_like"}  # nothing is read back


@pytest.mark.parametrize("shape", [(20, 33), (33, 5, 18)])
def test_a_moment_is_turned_where_bases_were_axes(shape):
    w, axes = torch.rand(3, *shape), [torch.eye(d).repeat(3, 1, 1) for d in shape]
    new = {i: torch.linalg.qr(torch.randn(3, d, d))[0] for i, d in enumerate(shape)}
    old = {i: torch.where(torch.tensor([True, False, True])[:, None, None], axes[i], q) for i, q in new.items()}
    want = turned(w, old, new)
    assert torch.equal(want[1], w[1]) and not torch.allclose(want[0], w[0])
    before = w.clone()
    turn_(w, new, torch.tensor([True, False, False]))
    torch.testing.assert_close(w[0], want[0])
    assert torch.equal(w[1:], before[1:])


def test_columns_in_an_order(by_kernels):
    x, order = torch.randn(3, 300, 300), torch.stack([torch.randperm(300) for _ in range(3)])
    moved = track.take_columns(x, order)
    by_kernels(False)
    assert torch.equal(moved, track.take_columns(x, order))
