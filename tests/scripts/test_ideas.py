"""The ideas of experiments.ideas do what they say, on small matrices."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lather
from experiments import ideas, log, methods
from lather.methods import GRAFTS, METHODS
from lather.options import OPTIONS

pytestmark = pytest.mark.scripts

PLAIN: dict[str, Any] = {"lr": 0.01, "betas": (0.0, 0.9), "graft": None, "precondition_frequency": 1}


@pytest.fixture(autouse=True)
def _methods() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    with mock.patch.dict(METHODS), mock.patch.dict(GRAFTS), mock.patch.dict(OPTIONS):
        methods.register_all()
        yield
    torch.set_float32_matmul_precision(precision)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def optimizer(*shapes: Sequence[int], **options: Any) -> tuple[lather.Shampoo, list[nn.Parameter]]:
    params = [nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate(shapes)]
    return lather.Shampoo(params, **PLAIN | options), params


def walk(opt: lather.Shampoo, params: list[nn.Parameter], steps: int, first: int = 0) -> list[Tensor]:
    """How far each parameter went in the last step."""
    for t in range(first, first + steps):
        before = [p.detach().clone() for p in params]
        for i, p in enumerate(params):
            p.grad = random(*p.shape, seed=1000 * t + i + 10)
        opt.step()
    return [b - p.detach() for b, p in zip(before, params, strict=True)]


# Around the optimizer.


def test_cautious_decay_goes_towards_zero_only_where_the_step_does() -> None:
    options = {"preconditioner": None, "graft": "sgd"}
    (plain, (p,)), (opt, (q,)) = (optimizer((6, 4), **options, weight_decay=wd) for wd in (0.0, 0.5))
    ideas.cautious(opt, 1)
    start = p.detach().clone()
    (step,), (ours,) = walk(plain, [p], 1), walk(opt, [q], 1)
    towards = step * start > 0
    assert 0 < towards.sum() < towards.numel()
    torch.testing.assert_close(ours, torch.where(towards, step + 0.01 * 0.5 * start, step))


def test_cautious_decay_leaves_alone_what_was_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    opt = lather.Shampoo(model, weight_decay=0.5)
    ideas.cautious(opt, 1)
    assert all(group["weight_decay"] == 0 for group in opt.param_groups)
    before = model[1].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.dim() > 1 else torch.zeros_like(p)
    opt.step()
    assert torch.equal(model[1].weight, before)


def test_weights_stay_on_their_sphere() -> None:
    for idea in (ideas.sphere, ideas.hyperball):
        opt, params = optimizer((6, 4), (5, 3), weight_decay=0.5)
        radii = [p.detach().norm() for p in params]
        idea(opt, 10)
        walk(opt, params, 5)
        torch.testing.assert_close([p.detach().norm() for p in params], radii)


def test_hyperball_turns_by_the_learning_rate() -> None:
    opt, (p,) = optimizer((6, 4), lr=1e-3)
    ideas.hyperball(opt, 10)
    before = p.detach().clone()
    (step,) = walk(opt, [p], 1)
    inside = (step * before).sum() / before.norm()  # what goes back to the sphere does not count
    assert math.isclose((step.norm().square() - inside.square()).sqrt() / before.norm(), 1e-3, rel_tol=0.1)


def test_the_average_is_that_of_the_last_steps() -> None:
    opt, (p,) = optimizer((6, 4))
    ideas.average(0.25)(opt, 8)
    seen = []
    for t in range(8):
        walk(opt, [p], 1, first=t)
        seen.append(p.detach().clone())
        opt.eval()
        shown = p.detach().clone()
        opt.train()
        assert torch.equal(p, seen[-1])
        torch.testing.assert_close(shown, seen[-1] if t < 7 else (seen[6] + seen[7]) / 2)


def test_momentum_rises_and_falls() -> None:
    opt, (p,) = optimizer((6, 4), betas=(0.95, 0.9), beta3=None)
    ideas.momentum(opt, 100)
    seen = []
    for t in range(100):
        walk(opt, [p], 1, first=t)
        seen.append(opt.param_groups[0]["betas"])
    assert seen[0] == (0.85, 0.9) and seen[15:96] == [(0.95, 0.9)] * 81
    assert sorted(seen[:16]) == seen[:16] and sorted(seen[95:], reverse=True) == seen[95:] and 0.85 < seen[-1][0] < 0.88


def test_beta2_of_what_has_no_matrices() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 24), nn.LayerNorm(24))
    (opt,) = ideas.elementwise(model, 1e-3, beta2=0.99, weight_decay=0.1)
    betas = {name: group["betas"][1] for group in opt.param_groups for name in group["param_names"]}
    assert betas.pop("1.weight") == 0.95 and set(betas.values()) == {0.99}


# Methods.


@pytest.mark.parametrize("method", ["shampoo_polar", "soap_polar"])
def test_directions_are_orthogonal(method: str) -> None:
    opt, params = optimizer((6, 4), (3, 7), preconditioner=method, polar="svd")
    for step in walk(opt, params, 3):
        torch.testing.assert_close(torch.linalg.svdvals(step / 0.01), torch.ones(min(step.shape)), rtol=1e-4, atol=1e-4)


def test_the_polar_factor_is_that_of_shampoo() -> None:
    (ours, p), (theirs, q) = (optimizer((6, 4), preconditioner=m) for m in ("shampoo_polar", "shampoo"))
    (step,), (shampoo,) = walk(ours, p, 1), walk(theirs, q, 1)
    u, _, vh = torch.linalg.svd(shampoo, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(step.flatten(), (u @ vh).flatten(), dim=0) > 0.97


def test_rows_have_one_size_in_the_mean() -> None:
    options = {"graft": "constant", "betas": (0.9, 0.9), "polar": "svd"}
    ours, p = optimizer((6, 4), preconditioner="normalised_rows", **options)
    theirs, q = optimizer((6, 4), preconditioner="spectral", **options)
    (step,), (muon,) = walk(ours, p, 1), walk(theirs, q, 1)
    sizes = step.square().mean(1).sqrt()
    torch.testing.assert_close(sizes, torch.full_like(sizes, 0.2 * 0.01))  # one step: all rows alike
    torch.testing.assert_close(step / step.norm(dim=1, keepdim=True), muon / muon.norm(dim=1, keepdim=True), rtol=1e-3, atol=1e-4)
    walk(ours, p, 4, first=1)
    mean, m = torch.zeros(6), torch.zeros(6, 4)
    for t in range(5):
        g = random(6, 4, seed=1000 * t + 10)
        u, _, vh = torch.linalg.svd(0.81 * m + 0.19 * g, full_matrices=False)
        m, mean = 0.9 * m + 0.1 * g, 0.9 * mean + 0.1 * (u @ vh).square().mean(1)
    torch.testing.assert_close(ours.state[p[0]]["r.0"], mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "square"), [("one_sided", False), ("one_sided_if_wide", True)])
def test_only_the_smaller_side_is_preconditioned(name: str, square: bool) -> None:
    opt, (wide, tall, even) = optimizer((3, 8), (8, 3), (4, 4), preconditioner=name, exponent=0.5, eps=1e-6, damping="absolute")
    steps = walk(opt, [wide, tall, even], 1)
    for p, step, (left, right) in zip((wide, tall, even), steps, ((1, 0), (0, 1), (1, int(square))), strict=True):
        g = p.grad.double()
        values = [torch.linalg.eigh(x + 1e-6 * torch.eye(len(x))) for x in (g @ g.mT, g.mT @ g)]
        roots = [vectors @ torch.diag(v**-0.5) @ vectors.mT for v, vectors in values]
        expected = (roots[0] if left else torch.eye(len(g)).double()) @ g @ (roots[1] if right else torch.eye(g.shape[1]).double())
        torch.testing.assert_close(step.double(), 0.01 * expected, rtol=1e-3, atol=1e-5)
        assert {key[:2] for key in opt.state[p] if key[0] == "L"} == {f"L{i}" for i, on in enumerate((left, right)) if on}


def test_klsoap_without_bases_is_adam() -> None:
    same = {"betas": (0.9, 0.9), "beta3": None}
    once = {"precondition_frequency": 1000, "start_preconditioning_step": 1, "refresh_warmup": 0.0}  # at a step that has no moment
    ours, p = optimizer((6, 4), preconditioner="klsoap", **once, **same)
    adam, q = optimizer((6, 4), preconditioner=None, **same | {"graft": "adam"})
    torch.testing.assert_close(walk(ours, p, 4), walk(adam, q, 4), rtol=1e-3, atol=1e-6)


def test_factors_of_klsoap() -> None:
    opt, params = optimizer((6, 4), preconditioner="klsoap", betas=(0.9, 0.9), refresh_warmup=0.0)
    walk(opt, params, 6)
    factors: list[Tensor] = []
    for t in range(6):
        g = random(6, 4, seed=1000 * t + 10).double()
        if t == 0:
            g = g / g.square().mean().sqrt().sqrt()
            new = [g @ g.mT / 4, g.mT @ g / 6]
        else:
            inverses = []
            for factor in factors:
                q = torch.eye(len(factor)).double() if t == 1 else torch.linalg.eigh(factor)[1]
                values = (q.mT @ factor @ q).diagonal() / (1 - 0.9**t)
                inverses.append(q @ torch.diag(1 / (values + 1e-4 * values.norm(4))) @ q.mT)
            new = [g @ inverses[1] @ g.mT / 4, g.mT @ inverses[0] @ g / 6]
        factors = [0.9 * old + 0.1 * x for x, old in zip(new, factors or [0.0, 0.0], strict=True)]
    for i, factor in enumerate(factors):
        torch.testing.assert_close(opt.state[params[0]][f"L{i}.0"].double(), factor, rtol=1e-3, atol=1e-4)


def test_klsoap_does_not_depend_on_the_size_of_gradients() -> None:
    found = []
    for size in (1.0, 1e-4):
        opt, (p,) = optimizer((6, 4), preconditioner="klsoap", betas=(0.9, 0.9), lr=0.01)
        for t in range(6):
            p.grad = size * random(6, 4, seed=t + 1)
            opt.step()
        found.append((p.detach(), opt.state[p]["L0.0"] / size))
    torch.testing.assert_close(*found, rtol=2e-2, atol=1e-3)


def test_one_second_moment_for_a_block() -> None:
    """Of matrices. Vectors follow Adam."""
    options = {"preconditioner": "shampoo_by_torch", "graft": "block_mean", "betas": (0.0, 0.9), "exponent": 0.5}
    opt, params = optimizer((6, 4), (5,), **options)
    step, vector = walk(opt, params, 3)
    mean, squares = 0.0, torch.zeros(5)
    for t in range(3):
        g, h = random(6, 4, seed=1000 * t + 10), random(5, seed=1000 * t + 11)
        mean, squares = 0.9 * mean + 0.1 * g.square().mean(), 0.9 * squares + 0.1 * h.square()
    torch.testing.assert_close(step.norm(), 0.01 * g.norm() / (mean / (1 - 0.9**3)).sqrt(), rtol=1e-4, atol=0)
    torch.testing.assert_close(vector, 0.01 * h / (squares / (1 - 0.9**3)).sqrt(), rtol=1e-4, atol=1e-6)


# All of them.


@pytest.mark.parametrize("task", ideas.EXPERIMENTS)
def test_every_row_runs(task: str, tmp_path: pathlib.Path) -> None:
    path, length = tmp_path / "log.jsonl", ("--epochs", "1") if task == "vit" else ("--steps", "4")
    assert ideas.main([task, "--tiny", "--lr", "8e-3", *length, "--looks", "1", "--log", str(path)]) == 0
    found = log.read(path)
    assert [f.run.optimizer for f in found] == list(ideas.EXPERIMENTS[task].recipes)
    assert all(f.end["end"] == "complete" and f.run.task == f"ideas-{task}" for f in found)


def test_the_task_comes_first() -> None:
    with pytest.raises(SystemExit, match="one of wikitext, vit, text"):
        ideas.main(["--tiny"])
