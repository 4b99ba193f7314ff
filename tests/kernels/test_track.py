"""CholeskyQR by tiles against torch's, and the solver that is made of it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lather.kernels import dense
from lather.roots import Track, track


@pytest.fixture(autouse=True)
def by_tiles(monkeypatch):
    def choose(value):
        monkeypatch.setattr(track, "has_kernels", lambda device: value)

    choose(True)
    return choose


def columns(n, d, decades=4.0):
    """Of length 1, with as many decades of singular values."""
    x = torch.linalg.svd(torch.randn(n, d, d, dtype=torch.float64))
    b = x.U * torch.logspace(0, -decades, d, dtype=torch.float64) @ x.Vh
    return (b / torch.linalg.vector_norm(b, dim=1, keepdim=True)).float()


def skew(q):
    q = q.double()
    return torch.linalg.matrix_norm(q.mT @ q - torch.eye(q.shape[-1])).max().item()


@pytest.mark.parametrize("d", [1, 31, 32, 33, 100, 128])
def test_one_pass_is_that_of_torch(d, by_tiles):
    b = columns(2, d, decades=1)
    q, pivot = track.cholesky_qr(b, 1.0)
    by_tiles(False)
    want, least = track.cholesky_qr(b, 1.0)
    assert q.shape == want.shape and torch.linalg.vector_norm(q - want) < 1e-5 * torch.linalg.vector_norm(want)
    torch.testing.assert_close(pivot, least, rtol=1e-4, atol=0)


@pytest.mark.parametrize("decades", [1, 5])
def test_three_passes_are_as_orthogonal(decades, by_tiles):
    b, found = columns(2, 100, decades), []
    for value in (True, False):
        by_tiles(value)
        q = b
        for shift in (*track.SHIFTS, 0.0):
            q, pivot = track.cholesky_qr(q, shift)
        assert (pivot > 0.5).all()
        found.append(skew(q))
    assert found[0] < 1.5 * found[1] < 1e-5


def test_several_panels(monkeypatch):
    b = columns(1, 150)
    whole = track.cholesky_qr(b, 1.0)
    monkeypatch.setattr(track, "PANEL", 64)
    for x, y in zip(track.cholesky_qr(b, 1.0), whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def test_what_breaks_down_stays_alone():
    """One matrix is NaN, some have low rank, and one fails at its last pivot only. The others keep their bits."""
    b = torch.cat([columns(5, 70), torch.full((1, 70, 70), torch.nan)])
    b[1], b[2, :, 69], b[3, :, 0] = 0.1, 0, 0
    together, pivot = track.cholesky_qr(b, 0.0)
    assert (pivot >= track.PIVOT * pivot[0]).tolist() == [True, False, False, False, True, False]
    for i in (0, 4):
        alone, own = track.cholesky_qr(b[i : i + 1], 0.0)
        assert torch.equal(alone[0], together[i]) and torch.equal(own[0], pivot[i]) and alone.isfinite().all()


def test_a_basis_is_followed(by_tiles):
    x = torch.randn(3, 40, 60) * torch.logspace(0, -3, 40)[:, None]
    a, states = x @ x.mT, [Track().init(3, 40, torch.float32, "cpu") for _ in range(2)]
    a[1] = 0
    for _ in range(3):
        for value, state in zip((True, False), states, strict=True):
            by_tiles(value)
            basis = Track().basis(a, state)
            assert basis.ok.all() and skew(basis.vectors) < 1e-5
    q = states[0]["Q"][[0, 2]]
    again = q.mT @ a[[0, 2]] @ q
    assert torch.linalg.vector_norm(again - torch.diag_embed(again.diagonal(dim1=1, dim2=2))) < 1e-3 * again.max()
    torch.testing.assert_close(*(state["Q"].abs() for state in states), rtol=0, atol=1e-3)


def test_a_tile_of_nearly_dependent_columns_does_no_harm():
    """With an inverse alone what is left of the Gram matrix below such a tile would not be positive."""
    g = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(3, 48, 48, generator=g, dtype=torch.float64))[0]
    x = q * torch.logspace(0, -6, 48, dtype=torch.float64) @ torch.randn(3, 48, 24, generator=g, dtype=torch.float64)
    basis = Track().basis((x @ x.mT / 24).float(), Track().init(3, 48, torch.float32, "cpu"))
    assert basis.ok.all() and skew(basis.vectors) < 1e-5


@pytest.mark.parametrize(("d", "rank", "iterations"), [(48, 3, 1)])
def test_factors_of_low_rank_are_followed(d, rank, iterations):
    """Pivots are then as small as the shift. An elimination that is not stable breaks down in some of the eight slots."""
    g, solver, a = torch.Generator().manual_seed(d), Track(iterations=iterations), torch.zeros(8, d, d)
    state = solver.init(8, d, torch.float32, "cpu")
    for _ in range(3):
        x = torch.randn(8, d, rank, generator=g)
        a = 0.95 * a + 0.05 * (x @ x.mT)
        assert solver.basis(a, state).ok.all()


def test_a_basis_that_is_none_is_reported():
    a, state = torch.eye(40).expand(2, -1, -1), {"Q": torch.zeros(2, 40, 40)}
    state["Q"][1] = torch.eye(40)
    assert Track().basis(a, state).ok.tolist() == [False, True]
    assert torch.equal(state["Q"][0], torch.eye(40))


def test_only_float32_goes_by_tiles(monkeypatch):
    monkeypatch.setattr(track, "_by_tiles", None)
    assert skew(track.cholesky_qr(torch.eye(3, dtype=torch.float64)[None], 0.0)[0]) == 0


def test_graphs_hold_it_where_kernels_run(by_tiles):
    assert Track().is_capturable(torch.device("cuda"))
    by_tiles(False)
    assert not Track().is_capturable(torch.device("cuda"))


class Launches(TorchDispatchMode):
    """Names of the operations, without those that only name memory."""

    FREE = ("new_empty", "unbind", "slice", "transpose", "diagonal", "alias")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.found += [name] * (not name.startswith(self.FREE))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("d", "total"), [(256, 27), (768, 77), (1024, 102)])
def test_launches(d, total, monkeypatch):
    kernel = mock.MagicMock()
    for name in ("cholesky", "substitute"):
        monkeypatch.setattr(dense, name, kernel)
    b = torch.zeros(1, d, d)
    with Launches() as launches:
        track.cholesky_qr(b, 1.0)
    assert len(launches.found) + kernel.__getitem__.return_value.call_count == total
    assert set(launches.found) == {"bmm", "baddbmm_", "add_", "copy_", "amin"}  # nothing is read back
