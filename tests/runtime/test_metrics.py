"""Metrics: what they are, and that recording them changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lather
from lather.linalg import largest_eigenvalue
from lather.methods import Context, filter_gradient, refiltered
from lather.planning.schedule import age, is_due
from lather.runtime.metrics import METRICS
from lather.settings import resolve

OPTIONS = [
    {},
    {"beta3": None},
    {"betas": (0.0, 0.95)},
    {"weight_decay": 0.1, "weight_decay_mode": "l2"},
    {"exponent": 0.25, "damping": "absolute", "graft": "rmsprop"},
    {"exponent": 0.3},
    {"preconditioner": "kl"},
    {"preconditioner": "soap", "graft": None},
    {"preconditioner": "soap", "large_dim": "diagonal", "max_preconditioner_dim": 20},
    {"preconditioner": "spectral", "graft": None},
    {"large_dim": "diagonal", "max_preconditioner_dim": 20},
    {"factors": "packed", "root_dtype": "bfloat16"},
    {"refresh_delay": 2, "refresh": "staggered"},
    {"averaging": "schedule_free"},
    {"start_preconditioning_step": 1000},
    {"max_preconditioner_dim": 12, "momentum": 0.9},
]
SHAPES = {"a": (24, 16), "b": (24, 16), "c": (8, 6, 4), "d": (30,)}


def make(seed=0, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(seed)
    params = {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in SHAPES.items()}
    opt = lather.Shampoo(list(params.items()), **{"lr": 0.1, "precondition_frequency": 4, "refresh_warmup": 0.0} | options)
    return params, opt


def feed(params, step, scale=1.0):
    for i, (name, p) in enumerate(params.items()):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i), dtype=p.dtype)
        p.grad = scale * noise * torch.linspace(0.1, 3, p.shape[0], dtype=p.dtype).view(-1, *[1] * (p.dim() - 1))
        assert name in SHAPES


def run(steps=9, armed=(9,), scale=1.0, **options):
    params, opt = make(**options)
    for step in range(1, steps + 1):
        feed(params, step, scale)
        if step in armed:
            opt.arm()
        opt.step()
    return params, opt


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_armed_step_computes_the_same(options):
    plain, watched = run(armed=(), **options), run(armed=range(1, 10), **options)
    assert all(torch.equal(p, q) for p, q in zip(plain[0].values(), watched[0].values(), strict=True))
    states = [opt.state_dict()["state"] for _, opt in (plain, watched)]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_metrics_do_not_depend_on_the_size_of_gradients(options):
    if options.get("damping") == "absolute" or options.get("weight_decay_mode") == "l2":
        pytest.skip("these options do")
    kept = {"graft_eps": 1e-30, "state_dtype": "float64"} | ({} if "root_dtype" in options else {"root_dtype": "float64"})
    idle = {"root_dtype"} if options.get("preconditioner") in ("soap", "spectral") else set()
    idle |= {"graft_eps"} if options.get("preconditioner") == "spectral" else set()
    kept = {name: value for name, value in kept.items() if name not in idle}
    one, other = (run(scale=scale, dtype=torch.float64, **options | kept)[1].metrics() for scale in (1.0, 1024.0))
    for name, metrics in one.items():
        if name == "d" and options.get("graft", "adam") is None:
            continue  # it follows the gradient itself
        for metric in metrics.keys() - {"graft_ratio"}:
            torch.testing.assert_close(other[name][metric], metrics[metric], rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_update_and_cosine_are_those_of_the_step_that_was_taken(options):
    if options.get("averaging") or options.get("momentum") or "weight_decay" in options:
        pytest.skip("the parameter moves by more than the direction")
    params, opt = run(steps=8, **options)
    before = {name: p.detach().clone() for name, p in params.items()}
    feed(params, 9)
    opt.arm()
    opt.step()
    for name, metrics in opt.metrics().items():
        moved, grad = before[name] - params[name].detach(), params[name].grad
        expected = {"update": moved.norm() / before[name].norm(), "cosine": (moved * grad).sum() / moved.norm() / grad.norm()}
        for metric, value in expected.items():
            torch.testing.assert_close(metrics[metric].float(), value, rtol=2e-4, atol=0)


def test_factors_and_roots_by_the_textbook():
    params, opt = run(steps=10, armed=(10,), dtype=torch.float64, state_dtype="float64", betas=(0.9, 0.95))
    state = opt.state[params["a"]]
    conditions, ranks, residuals = [], [], []
    for mode in (0, 1):
        factor, root = state[f"L{mode}.0"] / (1 - 0.95**10), state[f"X{mode}.0"].double()
        ridge = 1e-4 * (factor @ factor).norm().sqrt()
        values = torch.linalg.eigvalsh(factor)
        conditions.append((values.max() + ridge) / (values.min() + ridge))
        ranks.append(values.sum() ** 2 / values.square().sum() / len(values))
        residuals.append(
            (root @ (factor + ridge * torch.eye(len(values))) @ root - torch.eye(len(values))).norm() / len(values) ** 0.5
        )
    found = opt.metrics()["a"]
    torch.testing.assert_close(found["rank"], sum(ranks) / 2, rtol=1e-6, atol=0)
    # These two are estimates. The smallest eigenvalue is that of the factor two steps ago.
    assert 0.3 < float(found["condition"] / max(conditions)) < 3
    assert 0.3 < float(found["residual"] / max(residuals)) < 3
    assert float(found["residual"]) > 0.01  # roots are two steps old


def test_graft_ratio_by_hand():
    params, opt = run(steps=8, betas=(0.0, 0.95), dtype=torch.float64, state_dtype="float64", graft="sgd", armed=(8,))
    state, grad = opt.state[params["a"]], params["a"].grad
    made = state["X0.0"].double() @ grad @ state["X1.0"].double()
    torch.testing.assert_close(opt.metrics()["a"]["graft_ratio"], made.norm() / grad.norm(), rtol=1e-6, atol=0)


def test_the_largest_eigenvalue_is_found_from_below():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 40, 8, generator=generator)
    a = x @ x.mT
    exact = torch.linalg.eigvalsh(a).amax(1)
    found = largest_eigenvalue(a, iterations=8)
    assert (found <= exact * 1.0001).all() and (found > 0.85 * exact).all()
    torch.testing.assert_close(largest_eigenvalue(a, iterations=200), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("beta3", [None, 0.5, "nesterov", 0.0])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.95)])
def test_the_filtered_gradient_is_found_again(betas, beta3):
    if betas[0] == 0 and beta3 not in (None, "nesterov"):
        pytest.skip("refused")
    group = lather.Shampoo([nn.Parameter(torch.zeros(3, 2))], betas=betas, beta3=beta3).param_groups[0]
    hyper, state = resolve(group).hyper, {"m": torch.randn(4, 3, 2, dtype=torch.float64)}
    ctx = Context(hyper, [3, 3, 4, 5], torch.ones(4, dtype=torch.float64))
    grad = torch.randn(4, 3, 2, dtype=torch.float64)
    expected = filter_gradient(state, grad, ctx)
    torch.testing.assert_close(refiltered(state, grad, ctx), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"refresh_warmup": 0.0}, {"refresh_warmup": 0.0, "refresh_delay": 3}, {"precondition_frequency": 1}]
)
@pytest.mark.parametrize("offset", [None, 0, 3])
def test_the_age_of_a_root_by_counting(options, offset):
    settings = resolve(lather.Shampoo([nn.Parameter(torch.zeros(3, 2))], **options).param_groups[0])
    last, delay = -math.inf, settings.hyper.refresh_delay
    for t in range(1, 120):
        if t > delay and is_due(t - delay, settings, offset):
            last = t - delay
        assert age(t, settings, offset) == (t - last if last > 0 else -math.inf)


def test_which_metrics_there_are():
    _, opt = run()
    found = opt.metrics()
    assert list(found) == ["a", "b", "c", "d"]
    assert list(found["a"]) == list(METRICS) and list(found["d"]) == ["cosine", "update", "skipped"]
    assert all(value.shape == () for metrics in found.values() for value in metrics.values())
    numbers = opt.metrics(gather=True)
    assert {type(x) for metrics in numbers.values() for x in metrics.values()} == {float}
    assert numbers == {name: {key: float(x) for key, x in metrics.items()} for name, metrics in found.items()}
    _, opt = run(preconditioner="spectral", graft=None)
    assert list(opt.metrics()["a"]) == ["graft_ratio", "cosine", "update", "skipped"]


def test_by_kind():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    opt = lather.Shampoo(model, lr=0.1)
    model(torch.arange(20)).square().sum().backward()
    opt.arm()
    opt.step()
    assert list(opt.metrics(by="kind")) == ["weights", "embedding", "norm", "bias"]
    _, opt = run()
    (found,) = opt.metrics(by="kind").items()
    assert found[0] == "param group 0" and found[1]["condition"] == max(opt.metrics()[name]["condition"] for name in "abc")
    with pytest.raises(ValueError, match="by is 'layer'; it must be 'parameter' or 'kind'"):
        opt.metrics(by="layer")


def test_kinds_of_the_groups_that_are_left():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    opt = lather.Shampoo(model, lr=0.1)
    late = nn.Parameter(torch.ones(3, 3))
    del opt.param_groups[1]  # the embedding
    opt.add_param_group({"params": [("late", late)], "rule": "kind: late"})
    for p in (late, *model.parameters()):
        p.grad = torch.ones_like(p)
    opt.arm()
    opt.step()
    assert list(opt.metrics(by="kind")) == ["weights", "norm", "bias", "late"]
    assert "embedding" not in str(opt.plan())


def test_there_must_be_a_record():
    _, opt = run(armed=())
    with pytest.raises(RuntimeError, match="no step was recorded"):
        opt.metrics()


def test_the_record_stays_until_the_next_one():
    _, opt = run(armed=(5,))
    _, other = run(steps=5, armed=(5,))
    assert opt.metrics(gather=True) == other.metrics(gather=True)


@pytest.mark.filterwarnings("ignore::lather.NumericalWarning")
def test_what_skips_the_step_is_left_out():
    params, opt = run(steps=8)
    feed(params, 9)
    params["a"].grad[0, 0] = torch.nan
    params["b"].grad = None
    opt.arm()
    opt.step()
    found = opt.metrics(gather=True)
    assert found["a"]["skipped"] == 1 and math.isnan(found["a"]["update"]) and math.isnan(found["a"]["cosine"])
    assert math.isnan(found["b"]["update"]) and found["c"]["update"] > 0
    assert math.isfinite(opt.metrics(by="kind", gather=True)["param group 0"]["update"])


def test_before_the_first_refresh_there_is_nothing_to_tell_about_roots():
    _, opt = run(steps=3, armed=(3,), start_preconditioning_step=5)
    found = opt.metrics(gather=True)["a"]
    assert all(math.isnan(found[name]) for name in ("condition", "rank", "residual", "age", "graft_ratio"))
    assert found["update"] > 0


def test_a_group_added_after_arming():
    w, late = (torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    opt = lather.Shampoo([w])
    opt.arm()
    opt.add_param_group({"params": [late]})
    for p in (w, late):
        p.grad = torch.randn(4, 3)
    opt.step()
    assert list(opt.metrics(by="kind")) == ["param group 0", "param group 1"]
