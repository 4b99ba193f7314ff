"""Averaging instead of momentum: what it equals, what its average is, and what it does to rounding.

In float64, so that an equality between two ways to write a method holds to some 1e-12 and nothing else does.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import Reference
from torch import Tensor

import lather
from lather.options import OPTIONS
from lather.settings import Settings, resolve
from lather.storage import averaging
from lather.storage.step import Rate

Options = dict[str, Any]

SHAPES = [(8, 3), (5, 4), (3, 2, 3), (5,), ()]
PLAIN: Options = {"preconditioner": None, "graft": "sgd", "betas": (0.0, 0.9), "state_dtype": "float64"}  # P is g
METHODS: dict[str, Options] = {
    "plain": PLAIN,
    "adam": {"preconditioner": None, "state_dtype": "float64"},
    "shampoo": {"eps": 1e-2, "precondition_frequency": 3, "state_dtype": "float64", "max_preconditioner_dim": 4},
    "ungrafted": {"eps": 1e-1, "precondition_frequency": 2, "state_dtype": "float64", "graft": None},
    "kl": {"preconditioner": "kl", "eps": 1e-2, "precondition_frequency": 3, "state_dtype": "float64"},
    "spectral": {"preconditioner": "spectral", "polar": "svd", "state_dtype": "float64"},
}
RATE = Rate(lr=1.0, decay=0.0)
DECAYS: dict[str, Options] = {
    "": {},
    **{mode: {"weight_decay": 0.1, "weight_decay_mode": mode} for mode in ("decoupled", "l2", "corrected", "independent")},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}
KINDS: dict[str, Options] = {
    "schedule_free": {"averaging": "schedule_free"},
    "gpa": {"averaging": "gpa", "averaging_decay": 0.8},
    "y = z": {"averaging": "schedule_free", "averaging_beta": 0.0},
    "y = x": {"averaging": "gpa", "averaging_beta": 1.0, "averaging_decay": 0.8},
    "x kept": {"averaging": "gpa", "averaging_beta": 0.3, "averaging_decay": 0.7},
    "powers": {"averaging": "schedule_free", "averaging_beta": 0.6, "averaging_powers": (1.0, 2.0)},
}


def parameters(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def pull(p: Tensor, t: int) -> Tensor:
    """The gradient of a bowl, with noise: it depends on where it is taken."""
    generator = torch.Generator().manual_seed(100 * t + p.numel())
    return p.detach() + 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def walk(opt: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int = 15) -> list[list[Tensor]]:
    """Where the parameters are after every step."""
    seen = []
    for t in range(steps):
        for p in params:
            p.grad = pull(p, t)
        opt.step()
        seen.append([p.detach().clone() for p in params])
    return seen


def path(steps: int = 15, **options: Any) -> list[list[Tensor]]:
    params = parameters()
    return walk(lather.Shampoo(params, **options), params, steps)


def assert_equal(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# Equivalences, each for a constant learning rate.


@pytest.mark.parametrize("mu", [0.5, 0.9])
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
def test_gpa_is_torchs_momentum(nesterov: bool, mu: float) -> None:
    """mu_x = mu with mu_y = 1 is heavy ball, with mu_y = mu Nesterov's form, at the learning rate (1 - mu) lr."""
    params = parameters()
    theirs = walk(torch.optim.SGD(params, lr=(1 - mu) * 0.2, momentum=mu, nesterov=nesterov), params)
    beta = mu if nesterov else 1.0
    assert_equal(path(lr=0.2, averaging="gpa", averaging_decay=mu, averaging_beta=beta, **PLAIN), theirs)


@pytest.mark.parametrize(("method", "decay"), [(m, "decoupled") for m in METHODS] + [("shampoo", d) for d in DECAYS])
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
def test_gpa_is_dampened_momentum(nesterov: bool, method: str, decay: str) -> None:
    """The same with any directions: dampening=mu makes up for the learning rate."""
    common = {"lr": 0.1} | METHODS[method] | DECAYS[decay]
    theirs = path(7, momentum=0.8, dampening=0.8, nesterov=nesterov, **common)
    beta = 0.8 if nesterov else 1.0
    assert_equal(path(7, averaging="gpa", averaging_decay=0.8, averaging_beta=beta, **common), theirs, 1e-10)


@pytest.mark.parametrize("b", [0.0, 0.3, 0.5, 0.7, 1.0])
def test_gpa_is_quasi_hyperbolic_momentum(b: float) -> None:
    """For any mu_y: y moves by lr ((1 - b) g + b M), with M an average of gradients."""
    mu, lr = 0.8, 0.2
    params, memory, seen = parameters(), [torch.zeros(s, dtype=torch.float64) for s in SHAPES], []
    with torch.no_grad():
        for t in range(15):
            for p, m in zip(params, memory, strict=True):
                g = pull(p, t)
                m.mul_(mu).add_(g, alpha=1 - mu)
                p -= lr * ((1 - b) * g + b * m)
            seen.append([p.detach().clone() for p in params])
    assert_equal(path(lr=lr, averaging="gpa", averaging_decay=mu, averaging_beta=b, **PLAIN), seen)


def averages(opt: lather.Shampoo, params: list[torch.nn.Parameter]) -> list[Tensor]:
    opt.eval()
    found = [p.detach().clone() for p in params]
    opt.train()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_without_interpolation_it_is_polyak_averaging(method: str) -> None:
    """b = 0: steps are those without averaging, and x is their plain mean."""
    theirs, params = path(lr=0.1, **METHODS[method]), parameters()
    opt = lather.Shampoo(params, lr=0.1, averaging="schedule_free", averaging_beta=0.0, **METHODS[method])
    assert_equal(walk(opt, params), theirs)
    assert_equal(averages(opt, params), [torch.stack(points).mean(0) for points in zip(*theirs, strict=True)])


def test_with_full_interpolation_it_is_primal_averaging() -> None:
    """b = 1: gradients are taken at the average itself."""
    x = [p.detach().clone() for p in parameters()]
    z = [p.clone() for p in x]
    seen = []
    for t in range(15):
        z = [b - 0.1 * pull(a, t) for a, b in zip(x, z, strict=True)]
        x = [a + (b - a) / (t + 1) for a, b in zip(x, z, strict=True)]
        seen.append(x)
    params = parameters()
    opt = lather.Shampoo(params, lr=0.1, averaging="schedule_free", averaging_beta=1.0, **PLAIN)
    assert_equal(walk(opt, params), seen)
    assert_equal(averages(opt, params), seen[-1])


@pytest.mark.parametrize(("b", "method"), [((0.0, 0.3, 0.9, 1.0)[(i + j) % 4], m) for i, m in enumerate(METHODS) for j in (0, 2)])
def test_the_average_is_the_weighted_mean_of_all_base_points(b: float, method: str) -> None:
    """With a rate that rises and falls, and with missing gradients. z follows from y and x: (1 - b) z = y - b x."""
    params, power = parameters(), (2.0, 1.0)
    opt = lather.Shampoo(params, averaging="schedule_free", averaging_beta=b, averaging_powers=power, lr=7.0, **METHODS[method])
    points: list[list[Tensor]] = [[] for _ in params]
    weights: list[list[float]] = [[] for _ in params]
    top = 0.0
    for t in range(12):
        opt.param_groups[0]["lr"] = lr = 0.05 / (1 + abs(t - 6))
        top = max(top, lr)
        for i, p in enumerate(params):
            p.grad = pull(p, t) if (t + i) % 4 else None
        opt.step()
        for i, p in enumerate(params):
            if p.grad is not None:
                points[i].append(base_point(opt, p))
                weights[i].append(top ** power[0] * len(points[i]) ** power[1])
    expected = [
        sum((w * z for w, z in zip(ws, zs, strict=True)), torch.zeros(())) / sum(ws) for ws, zs in zip(weights, points, strict=True)
    ]
    assert_equal(averages(opt, params), [x.double() for x in expected])


def base_point(opt: lather.Shampoo, p: Tensor) -> Tensor:
    state, b = opt.state[p], opt.param_groups[0]["averaging_beta"]
    return state["z"].clone() if "z" in state else state["x"] + (p.detach() - state["x"]) / (1 - b)


def test_a_learning_rate_of_zero_moves_nothing() -> None:
    """In a warm-up from zero there is no weight and no move. The first real step has all the weight."""
    params = parameters()
    opt = lather.Shampoo(params, lr=0.5, averaging="schedule_free", **PLAIN)
    opt.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    assert_equal(walk(opt, params, 2)[-1], before)
    assert_equal(averages(opt, params), before)
    opt.param_groups[0]["lr"] = 0.5
    assert_equal(walk(opt, params, 1)[-1], [p - 0.5 * pull(p, 0) for p in before])
    assert_equal(averages(opt, params), [p.detach() for p in params])


# The twin.


@pytest.mark.filterwarnings("ignore::lather.NumericalWarning")
@pytest.mark.parametrize(
    ("kind", "decay"), [(k, "decoupled") for k in KINDS] + [(k, d) for k in ("schedule_free", "x kept") for d in DECAYS]
)
def test_agrees_with_the_twin(kind: str, decay: str) -> None:
    """Blocks, live rates, missing gradients, and gradients that are not finite."""
    options = {"lr": 0.05, "precondition_frequency": 3, "eps": 1e-2, "max_preconditioner_dim": 4}
    options |= KINDS[kind] | DECAYS[decay]
    params = parameters()
    twin, opt = Reference(params, **options), lather.Shampoo(params, state_dtype="float64", **options)
    for t in range(14):
        opt.param_groups[0]["lr"] = twin.options["lr"] = 0.05 / (1 + abs(t - 5))
        for i, p in enumerate(params):
            p.grad = pull(p, t) if (t + i) % 4 else None
            if p.grad is not None and t in (2, 6):
                p.grad.view(-1)[0] = math.nan
        twin.step([p.grad for p in params])
        opt.step()
    assert_equal([p.detach() for p in params], twin.params, 1e-9)
    assert_equal(averages(opt, params), twin.averages(), 1e-9)


# Elements.


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_element_is_shown_as_it_is(kind: str) -> None:
    p = torch.nn.Parameter(torch.tensor([[0.0, -math.inf], [1.0, 2.0]]))
    opt = lather.Shampoo([p], lr=0.1, **KINDS[kind])
    p.grad = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    opt.step()
    opt.eval()
    assert p[0, 1] == -math.inf and p.flatten()[[0, 2, 3]].isfinite().all()


def settings_of(kind: str) -> Settings:
    return resolve({name: option.default for name, option in OPTIONS.items()} | KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_elements_without_a_finite_direction_stay(kind: str) -> None:
    y, other, d = torch.randn(3, 6)
    d[::2] = torch.tensor([math.nan, math.inf, -math.inf])
    before = y.clone(), other.clone()
    averaging.average_(y, other, d, settings_of(kind), RATE, 0.1)
    assert torch.equal(y[::2], before[0][::2]) and torch.equal(other[::2], before[1][::2])
    assert y.isfinite().all() and not (y[1::2] == before[0][1::2]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_for_all_and_one_for_each_element_give_the_same_bits(kind: str) -> None:
    """The storage decides which of them is used, and results must not depend on the number of ranks."""
    y, other, d = torch.randn(3, 1000)
    settings = settings_of(kind)
    for share in (1.0, 1 / 3, 1e-5, 0.9):
        ours, theirs = (y.clone(), other.clone()), (y.clone(), other.clone())
        averaging.average_(*ours, d, settings, RATE, share)
        averaging.average_(*theirs, d, settings, RATE, torch.full_like(y, share, dtype=torch.float64))
        assert all(map(torch.equal, ours, theirs))


def errors(dtype: torch.dtype, kind: str, steps: int) -> Iterator[float]:
    """The distance of the average from that in float64, relative to its way. Gradients do not depend on the parameters."""
    params = parameters(dtype)[:1]
    start, wide = [p.detach().double() for p in params], [torch.nn.Parameter(p.detach().double()) for p in params]
    common = {"lr": 1e-3, "preconditioner": None, "graft": "sgd", "betas": (0.0, 0.9)} | KINDS[kind]
    opt, other = lather.Shampoo(params, **common), lather.Shampoo(wide, **common, state_dtype="float64")
    for t in range(steps):
        for p, q in zip(params, wide, strict=True):
            generator = torch.Generator().manual_seed(100 * t + p.numel())
            p.grad = (1 + torch.randn(p.shape, generator=generator)).to(p.dtype)
            q.grad = p.grad.double()
        opt.step()
        other.step()
    opt.eval()
    other.eval()
    for p, q, w in zip(params, wide, start, strict=True):
        rounding = torch.finfo(dtype).eps * q.detach().norm()  # of the average itself, when it is written
        yield max(0.0, ((p.detach().double() - q.detach()).norm() - rounding).item()) / (q.detach() - w).norm().item()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)], ids=str)
@pytest.mark.parametrize("kind", ["schedule_free", "gpa", "x kept"])
def test_averages_survive_rounding(kind: str, dtype: torch.dtype, most: float) -> None:
    """Steps are 1e-3, and the average takes in a hundredth. That is far below the resolution of bfloat16."""
    assert max(errors(dtype, kind, 150)) <= most


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "clipped": lambda p: p.clamp_(-0.5, 0.5),
    "replaced": lambda p: p.copy_(torch.full_like(p, 0.25)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_parameters_between_steps_counts(change: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    opt = lather.Shampoo(params, lr=1e-6, averaging="gpa", **PLAIN | {"state_dtype": "float32"})
    walk(opt, params, 3)
    with torch.no_grad():
        for p in params:
            CHANGES[change](p)
    changed = [p.detach().clone() for p in params]
    opt.eval()
    opt.train()
    opt.state_dict()
    assert_equal([p.detach() for p in params], changed, 0.0)
    walk(opt, params, 1)
    torch.testing.assert_close([p.detach() for p in params], changed, rtol=1e-2, atol=1e-2)


def test_it_converges_without_a_schedule() -> None:
    """With noisy gradients the average ends closer to the minimum than the points it averages."""
    params = parameters(torch.float32)
    opt = lather.Shampoo(params, lr=0.3, averaging="schedule_free", betas=(0.0, 0.99), precondition_frequency=5)
    walk(opt, params, 150)
    base = sum(opt.state[p]["z"].square().sum() for p in params)
    opt.eval()
    assert sum(p.detach().square().sum() for p in params) < 0.1 * base
