"""What `Track` promises beyond the contract of every solver: it follows, it stays orthogonal, it reads nothing back."""

from __future__ import annotations

import math
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lather.roots import Eigh, Track, rescue, solve, spell, track
from lather.roots.firstorder import correction, first_order
from lather.roots.track import cholesky, iterate, orthonormal

TRACKS = pytest.mark.parametrize("solver", [Track(), Track(iterations=1)], ids=spell)


class Moving:
    """A moving average of Gram matrices of few samples, whose covariance turns too: real factors move like this."""

    def __init__(self, d: int, decades: float, n: int = 3, samples: int = 24, keep: float = 0.6, seed: int = 0):
        self.g = torch.Generator().manual_seed(seed)
        self.samples, self.keep = samples, keep
        q = torch.linalg.qr(self.normal(n, d, d))[0]
        self.root = q * 10 ** -(torch.linspace(0, decades / 2, d, dtype=torch.float64))
        k = self.normal(n, d, d)
        self.turn = torch.linalg.matrix_exp(0.02 * (k - k.mT) / d**0.5)
        self.a = self.sample()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def sample(self) -> torch.Tensor:
        x = self.root @ self.normal(len(self.root), self.root.shape[-1], self.samples)
        return x @ x.mT / self.samples

    def step(self) -> torch.Tensor:
        self.root = self.turn @ self.root
        self.a = self.keep * self.a + (1 - self.keep) * self.sample()
        return self.a.float()


def top(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(a.double())[:, -1]


def exact(a: torch.Tensor, e: float, ridge: torch.Tensor) -> torch.Tensor:
    values, q = torch.linalg.eigh(a.double())
    return (q * (values.clamp(min=0) + ridge[:, None]).pow(-e)[:, None, :]) @ q.mT


def error(x: torch.Tensor, a: torch.Tensor, e: float, ridge: torch.Tensor) -> float:
    """On gradients with the covariance `a`: `||(X - X*) A^(1/2)||_F / ||X* A^(1/2)||_F`, the largest of the stack."""
    want, half = exact(a, e, ridge), exact(a, -0.5, ridge)
    return (((x.double() - want) @ half).norm(dim=(1, 2)) / (want @ half).norm(dim=(1, 2))).max().item()


def cold(solver: Track, a: torch.Tensor) -> dict[str, torch.Tensor]:
    return solver.init(len(a), a.shape[-1], a.dtype, a.device)


def skew(q: torch.Tensor) -> float:
    return (q.mT.double() @ q.double() - torch.eye(q.shape[-1], dtype=torch.float64)).norm(dim=(1, 2)).max().item()


# --- following


@TRACKS
@pytest.mark.parametrize("decades", [4, 8, 12])
@pytest.mark.parametrize("e", [1 / 2, 1 / 4, 1 / 6])
def test_follows_a_moving_factor(solver, decades, e, monkeypatch):
    """From the identity, without eigh, and after a few refreshes far closer than the root of the refresh before."""
    moving = Moving(48, decades)
    stacks = [moving.step() for _ in range(12)]
    ridges = [1e-6 * top(a) for a in stacks]
    state, values = cold(solver, stacks[0]), []
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", None)
        for i, (a, ridge) in enumerate(zip(stacks, ridges, strict=True)):
            root = solver(a, e, ridge, state)
            assert root.ok.all() or i < 2 / solver.iterations
            values.append(root.value)
    errors = [error(x, a, e, r) for x, a, r in zip(values, stacks, ridges, strict=True)]
    stale = [error(exact(stacks[i - 1], e, ridges[i - 1]), stacks[i], e, ridges[i]) for i in range(1, 12)]
    assert max(errors[7 - 2 * solver.iterations :]) < 0.1
    assert all(now < before / 3 for now, before in zip(errors[6:], stale[5:], strict=True))


@TRACKS
def test_settles_on_a_factor_that_stands_still(solver):
    a = Moving(33, 5).a
    ridge, state = 1e-4 * top(a), cold(solver, a)
    errors = [error(solver(a, 1 / 4, ridge, state).value, a, 1 / 4, ridge) for _ in range(30)]
    assert errors[0] > 1e-3 and errors[-1] < 1e-5
    assert all(later < 1.1 * earlier for earlier, later in pairwise(errors))


def test_residual_bounds_the_error():
    """The documented law, from cold: error < 0.15 residual^2."""
    for decades in (2, 5, 9):
        moving = Moving(40, decades, n=6)
        state = cold(Track(), moving.a.float())
        for _ in range(4):
            a = moving.step()
            ridge = 1e-6 * top(a)
            for i, root in enumerate(zip(*Track(tolerance=math.inf)(a, 1 / 4, ridge, state), strict=True)):
                value, _, residual = root
                got = error(value[None], a[i : i + 1], 1 / 4, ridge[i : i + 1])
                assert got < 0.15 * residual**2 + 2e-3, (decades, got, residual)


def test_basis_stays_orthogonal_over_1000_refreshes():
    moving, solver = Moving(12, 6, n=1, samples=8), Track()
    state = cold(solver, moving.a.float())
    for i in range(1000):
        assert solver(moving.step(), 1 / 4, 1e-8, state).ok.all()
        if i % 100 == 99:
            assert skew(state["Q"]) < 3e-6


# --- failing, and being rescued


def test_a_slot_beyond_the_tolerance_is_not_ok_and_gets_root_and_basis_from_eigh():
    moving, solver = Moving(24, 6, n=4), Track(iterations=1, tolerance=0.3)
    state = cold(solver, moving.a.float())
    for _ in range(20):
        solver(moving.a.float(), 1 / 4, 1e-6, state)
    a = moving.a.float()
    a[2] = Moving(24, 6, n=1, seed=5).a[0]
    before = {role: x.clone() for role, x in state.items()}
    assert solver(a, 1 / 4, 1e-6, dict(state)).ok.tolist() == [True, True, False, True]
    root = solve(solver, a, 1 / 4, 1e-6, before)
    assert root.ok.all() and error(root.value[2:3], a[2:3], 1 / 4, torch.full((1,), 1e-6)) < 1e-4
    assert torch.equal(before["Q"][2], Eigh().basis(a[2:3].double(), {}).vectors[0].float())
    assert solver(a, 1 / 4, 1e-6, before).residual[2] < 1e-2  # so the next refresh is warm


def test_rescue_takes_a_ridge_per_slot_and_keeps_a_basis_that_eigh_cannot_better():
    a = Moving(8, 3, n=3).a.float()
    ridge = torch.tensor([1e-3, 1e-5, 1e-4])
    want = Eigh()(a.double(), 1 / 4, ridge.double(), {}).value.float()
    a[1, 0, 0] = math.nan
    state = {"Q": torch.eye(8).repeat(3, 1, 1).flip(1)}
    root = rescue(a, 1 / 4, ridge, state)
    assert root.ok.tolist() == [True, False, True] and torch.equal(root.value[[0, 2]], want[[0, 2]])
    assert torch.equal(state["Q"][1], torch.eye(8).flip(0)) and skew(state["Q"]) < 1e-5


@TRACKS
@pytest.mark.parametrize("junk", [0.0, 1e-30, 1e30, math.nan])
def test_a_basis_that_is_none_is_reported_and_replaced(solver, junk):
    a, state = Moving(12, 4).a.float(), {"Q": torch.full((3, 12, 12), junk)}
    root = solver(a, 1 / 4, 1e-6, state)
    assert not root.ok.any() and (root.residual == math.inf).all()
    assert torch.equal(state["Q"], torch.eye(12).expand(3, 12, 12))
    assert solver(a, 1 / 4, 1e-6, state).ok.all()


@TRACKS
def test_a_basis_kept_in_bfloat16_will_do(solver):
    moving = Moving(24, 6)
    state = cold(solver, moving.a.float())
    for _ in range(6):
        a = moving.step()
        state["Q"] = state["Q"].bfloat16().float()
        ridge = 1e-6 * top(a)
        root = solver(a, 1 / 4, ridge, state)
    assert root.ok.all() and error(root.value, a, 1 / 4, ridge) < 0.1 and skew(state["Q"]) < 1e-5


# --- hard factors


@TRACKS
def test_zero_denormal_and_rank_one_factors_and_those_that_come_and_go(solver):
    """Rows of an embedding that are not seen yet, then seen, and then fade."""
    full = Moving(16, 4, n=1).a[0].float()
    one = torch.outer(full[0], full[0])
    part = full.clone()
    part[5:], part[:, 5:] = 0, 0
    stages = [torch.zeros_like(full), full * 1e-42, one, part, full, full * 1e-30, part * 1e-42, torch.zeros_like(full)]
    for eps in (1e-30, 1e-12, 1e-3, 10.0):
        state = solver.init(1, 16, torch.float32, "cpu")
        for a in stages:
            for _ in range(3 - solver.iterations):  # from the axes, one iteration does not reach a vector of rank one
                root = solver(a[None], 1 / 4, eps, state)
            assert root.ok.all() and torch.isfinite(root.residual).all() and skew(state["Q"]) < 1e-5
            values = torch.linalg.eigvalsh(root.value.double())
            assert values.min() > -torch.finfo(torch.float32).eps * values.max()  # an entry is rounded to that


@TRACKS
def test_basis_of_a_zero_factor(solver):
    basis = solver.basis(torch.zeros(2, 5, 5), solver.init(2, 5, torch.float32, "cpu"))
    assert basis.ok.all() and (basis.values == 0).all() and skew(basis.vectors) < 1e-6


@pytest.mark.parametrize(("d", "rank"), [(896, 24), (896, 700)])
def test_a_large_factor_of_low_rank_has_a_basis_at_once(d, rank):
    """From the identity: without help from eigh, which on a GPU comes a step late and with a warning."""
    x = torch.randn(1, d, rank, generator=torch.Generator().manual_seed(0))
    basis = Track(iterations=1).basis(x @ x.mT, Track().init(1, d, torch.float32, "cpu"))
    assert basis.ok.all() and skew(basis.vectors) < 1e-3


def test_basis_follows():
    moving, solver = Moving(32, 6), Track()
    state = cold(solver, moving.a.float())
    for _ in range(8):
        a = moving.step()
        basis = solver.basis(a, state)
    again = (basis.vectors * basis.values[:, None, :]) @ basis.vectors.mT
    assert basis.ok.all() and skew(basis.vectors) < 1e-5
    assert ((again - a).norm(dim=(1, 2)) / a.norm(dim=(1, 2))).max() < 0.3
    s = basis.vectors.mT @ a @ basis.vectors
    off = s - torch.diag_embed(s.diagonal(dim1=1, dim2=2))
    assert (off.norm(dim=(1, 2)) / a.norm(dim=(1, 2))).max() < 0.1


def test_a_ridge_per_slot_is_the_ridge_of_each():
    a, eps = Moving(9, 4, n=3).a.float(), torch.tensor([1e-6, 1e-3, 1.0])
    together = Track()(a, 1 / 4, eps, cold(Track(), a))
    for i in range(3):
        alone = Track()(a[i : i + 1], 1 / 4, eps[i].item(), cold(Track(), a[:1]))
        assert torch.equal(alone.value[0], together.value[i])


# --- invariances and manners


@TRACKS
@pytest.mark.parametrize("d", [1, 5, 16, 33])
def test_a_slot_does_not_see_its_stack(solver, d):
    """Also where the stack holds zero, indefinite and infinite factors, over several refreshes."""
    moving = Moving(d, 6, n=6)
    stacks = [moving.step() for _ in range(4)]
    for a in stacks:
        a[1], a[2] = 0, a[2] - 0.3 * torch.eye(d)
        a[3, 0, 0] = math.inf
    state = cold(solver, stacks[0])
    together = [(*solver(a, 1 / 4, 1e-9, state), state["Q"]) for a in stacks]
    for i in (0, 1, 2, 4, 5):
        state = cold(solver, stacks[0][:1])
        for a, many in zip(stacks, together, strict=True):
            one = (*solver(a[i : i + 1], 1 / 4, 1e-9, state), state["Q"])
            assert all(torch.equal(x[i].nan_to_num(7.0), y[0].nan_to_num(7.0)) for x, y in zip(many, one, strict=True)), i


@TRACKS
def test_deterministic_and_inputs_untouched(solver):
    a, start = Moving(20, 6).a.float(), cold(solver, Moving(20, 6).a.float())
    q, copy, state = start["Q"].clone(), a.clone(), dict(start)
    first, second = solver(a, 1 / 4, 1e-8, state), solver(a, 1 / 4, 1e-8, dict(start))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert torch.equal(a, copy) and torch.equal(start["Q"], q) and not torch.equal(state["Q"], q)


class Reads(TorchDispatchMode):
    """Names of the operations that make the host wait for a device."""

    WAIT = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_linalg_eigh", "linalg_qr", "_linalg_check_errors")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.found += [name] * (name in self.WAIT)
        return func(*args, **(kwargs or {}))


@TRACKS
def test_nothing_is_read_back(solver):
    """Cold, warm, failing, and for the basis. All devices share this code, except the Choleskys of GPUs (tests/kernels)."""
    a = Moving(9, 4).a.float()
    state = cold(solver, a)
    with Reads() as reads:
        solver(a, 1 / 4, 1e-8, state)
        solver(a, 1 / 4, torch.full((3,), 1e-8), state)
        solver(a, 1 / 4, 1e-8, {"Q": torch.zeros(3, 9, 9)})
        solver.basis(a, state)
    assert reads.found == []


# --- the parts


def test_an_iteration_is_that_of_qr_by_the_order_of_eigenvalues():
    """Without its shift, and up to signs: `Q <- qr((A + mu I) Q)`, with every column back in its place."""
    a = Moving(12, 3).a
    q = torch.linalg.qr(torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    mu = torch.full((3, 1, 1), 1e-3, dtype=torch.float64)
    with mock.patch.object(track, "SHIFT", 0.0):
        found, values = iterate(a, q, mu)
    torch.testing.assert_close(values, (q.mT @ a @ q).diagonal(dim1=1, dim2=2))
    order = values.argsort(dim=1, descending=True)[:, None, :]
    want = torch.linalg.qr((a @ q + mu * q).take_along_dim(order, 2))[0]
    torch.testing.assert_close((found.take_along_dim(order, 2).mT @ want).abs(), torch.eye(12).double().expand(3, 12, 12))


def test_a_column_follows_the_column_in_its_place():
    """Also when eigenvalues change their order, far or little."""
    moving, solver = Moving(24, 4, samples=200, keep=0.9), Track(iterations=1)
    state = cold(solver, moving.a.float())
    for _ in range(20):
        solver.basis(moving.a.float(), state)
    before = state["Q"]
    basis = solver.basis(moving.step(), state)
    stays = (before * basis.vectors).sum(1)
    assert stays.min() > 0.5 and stays.median() > 0.98
    values, q = torch.linalg.eigh(moving.a)
    flipped = (q * (1 / values.clamp(min=1e-4))[:, None, :]) @ q.mT
    basis = solver.basis(flipped.float(), {"Q": q.float()})
    assert (q * basis.vectors).sum(1).min() > 0.99 and (basis.values.diff(dim=1) <= 0).all()


def test_choleskys_by_torch():
    a = Moving(9, 1).a
    lower = cholesky(a.clone())
    torch.testing.assert_close(lower @ lower.mT, a)
    assert skew(orthonormal(a / a.norm(dim=1, keepdim=True))) < 1e-9


@pytest.mark.parametrize("e", [1 / 2, 1 / 4, 1.82 / 4, 1.0])
def test_first_order_is_first_order_and_never_indefinite(e):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(3, 8, 8, generator=g, dtype=torch.float64)
    values, eye = torch.logspace(0, -4, 8, dtype=torch.float64), torch.eye(8, dtype=torch.float64).repeat(3, 1, 1)
    scale, errors = torch.full((3, 1, 1), 4.0, dtype=torch.float64), []
    for size in (1e-2, 1e-3):
        off = size * (x + x.mT) * (values[:, None] * values).sqrt()
        s = torch.diag_embed(values.expand(3, 8)) + off
        got = first_order(eye, s, scale, e, 1e-9)
        want = exact(4 * s, e, torch.full((3,), 1e-9, dtype=torch.float64))
        errors.append(((got - want).norm() / want.norm()).item())
    assert errors[1] < errors[0] / 50  # second order is 100
    wild = first_order(eye, s + 10 * (x + x.mT), scale, e, 1e-9)
    assert torch.linalg.eigvalsh(wild).min() > -1e-9 * wild.abs().max()
    assert correction(values.expand(1, 8), torch.full((1, 8, 8), 1e9), e).abs().max() == 0.5


@pytest.mark.parametrize("options", [{"iterations": 0}, {"iterations": 1.5}, {"tolerance": 0.0}, {"tolerance": math.nan}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Track(**options)
