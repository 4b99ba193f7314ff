"""A default never raises: beside an option that leaves it no room it means nothing. What a user wrote is refused there."""

import itertools
import math
from typing import Any

import pytest
import torch
from geometry import settings_of

import lather
from lather.settings import Settings

Options = dict[str, Any]

SHAPES = [(6, 4), (3, 2, 4), (5,), ()]
METHODS = ("shampoo", "kl", "soap", "spectral", None)
REFRESHED = ("shampoo", "kl", "soap")
NEVER = {"start_preconditioning_step": math.inf}


def train(steps: int = 4, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    """Parameters after some steps, which must have moved all of them. Also plans with these options."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    params = [torch.nn.Parameter(x.clone()) for x in start]
    opt = lather.Shampoo(params, **options, state_dtype=dtype)
    advance(opt, params, steps)
    assert all(p.isfinite().all() and not torch.equal(p, x) for p, x in zip(params, start, strict=True)) and not opt.health()
    lather.plan({str(i): shape for i, shape in enumerate(SHAPES)}, **options)
    return [p.detach() for p in params]


def advance(opt: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int) -> None:
    for t in range(steps):
        for p in params:  # of a loss that depends on p, so that errors feed back
            p.grad = (p.detach() + 0.1 * t).sin() + 0.3 * p.detach()
        opt.step()


# By option that leaves no room: what it leaves of the default, and what a user may not write beside it.
ROOM: dict[str, tuple[Options, Options, Options]] = {
    "refresh_delay": ({"refresh_delay": 2}, {"warmup": 0.0, "first_refresh": 10}, {"refresh_warmup": 0.2}),
    "never, refresh_warmup": (NEVER, {"warmup": 0.0, "first_refresh": math.inf}, {"refresh_warmup": 0.2}),
    "never, refresh_delay": (NEVER, {"warmup": 0.0}, {"refresh_delay": 2}),
    "never, betas": (NEVER, {"beta3": 0.95}, {}),
    "no filter": ({"betas": (0.0, 0.95)}, {"looks_ahead": False}, {"beta3": 0.5}),
    "multiplier": ({"exponent_multiplier": 1.82}, {"exponent": None}, {"exponent": 0.25}),
}
RIGHT = {  # options that say nothing beside any other
    "refresh_warmup": (0.0,), "beta3": (None, "nesterov"), "exponent": (None, "paper"),
}  # fmt: skip


def is_read(method: str | None, pair: str) -> bool:
    """Whether the method reads the option that leaves no room."""
    return method in {"multiplier": ("shampoo", None), "refresh_delay": (*REFRESHED, None)}.get(pair, METHODS)


CASES = [(method, pair) for method in METHODS for pair in ROOM if is_read(method, pair)]
every_case = pytest.mark.parametrize(("method", "pair"), CASES)


def seen(settings: Settings, name: str) -> Any:
    return getattr(settings, name) if hasattr(settings, name) else getattr(settings.hyper, name)


@every_case
def test_a_default_yields_and_what_is_written_does_not(method: str | None, pair: str) -> None:
    given, left, wrong = ROOM[pair]
    given = given | {"preconditioner": method}
    settings = settings_of(**given)
    assert {name: seen(settings, name) for name in left} == left
    train(**given)
    for name, value in wrong.items():
        message = f"{name}={value}|exponent_multiplier=1.82 has no effect with exponent, "
        with pytest.raises(ValueError, match=message):
            train(**given, **{name: value})
        with pytest.raises(ValueError, match=message):
            lather.plan({"w": (6, 4)}, **given, **{name: value})


@every_case
def test_what_switches_a_default_off_says_nothing_and_is_taken(method: str | None, pair: str) -> None:
    given = ROOM[pair][0] | {"preconditioner": method}
    for name, values in RIGHT.items():
        for value in values:
            settings_of(**given, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("exponent", 0.25), ("exponent", {2: 0.3}), ("exponent_multiplier", 1.82)])
@pytest.mark.parametrize("method", ["kl", "soap", "spectral"])
def test_exponents_are_shampoos(method: str, name: str, value: Any) -> None:
    train(preconditioner=method)
    with pytest.raises(ValueError, match=f"{name}=.* has no effect with preconditioner='{method}'"):
        train(preconditioner=method, **{name: value})


def test_options_that_are_not_of_muon() -> None:
    for name, value in {"damping": "absolute", "refresh_warmup": 0.2, "refresh_delay": 2}.items():
        with pytest.raises(ValueError, match=f"{name}=.* has no effect with preconditioner='spectral'"):
            settings_of(preconditioner="spectral", **{name: value})


@pytest.mark.parametrize("shape", [(8, 6), (6, 5, 4), (5, 4, 3, 3)])
def test_tiny_and_huge_gradients_move_parameters(shape: tuple[int, ...]) -> None:
    """Where the norm of a direction overflows or vanishes, the graft's own is taken."""
    for size in (1e-12, 1e-8, 1e-4, 1e5, 1e8, 1e12, 1e16):
        p, noise = torch.nn.Parameter(torch.zeros(shape)), torch.Generator().manual_seed(0)
        opt = lather.Shampoo([p], lr=1.0, graft_eps=1e-30, merge_dims=False)
        for _ in range(4):
            before = p.detach().clone()
            p.grad = size * torch.randn(shape, generator=noise)
            opt.step()
            assert 0.1 < (p - before).square().mean().sqrt() < 10


def test_without_a_graft_steps_do_not_depend_on_the_size_of_gradients() -> None:
    ends = []
    for size in (1.0, 2.0**-20):
        p, noise = torch.nn.Parameter(torch.zeros(8, 6)), torch.Generator().manual_seed(0)
        opt = lather.Shampoo([p], lr=1.0, graft=None)
        for _ in range(5):
            p.grad = size * torch.randn(8, 6, generator=noise)
            opt.step()
        ends.append(p.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)
    assert lather.Shampoo([p], graft=None, exponent=0.5).param_groups[0]["exponent"] == 0.5  # what is written holds


def test_a_group_has_defaults_too() -> None:
    """Options of one group leave no room for defaults of that group only; what is written for all counts for it as well."""
    groups = [{"refresh_delay": 2}, NEVER, {"betas": (0.0, 0.9)}, {"exponent_multiplier": 1.82}, {"preconditioner": "kl"}]
    groups += [{"preconditioner": "soap", "damping": "absolute"}, {"preconditioner": "spectral"}, {}]
    params = [torch.nn.Parameter(torch.ones(4, 3)) for _ in groups]
    opt = lather.Shampoo([{"params": [p], **group} for p, group in zip(params, groups, strict=True)])
    advance(opt, params, 3)
    settings = opt._session.settings
    assert [found.warmup for found in settings] == [0.0, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    assert [found.hyper.looks_ahead for found in settings] == [True, False, False, True, True, True, True, True]
    assert [found.hyper.exponent for found in settings] == [0.5, 0.5, 0.5, None, None, None, None, 0.5]
    assert [found.hyper.eps for found in settings] == [1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-8, 1e-4, 1e-4]
    with pytest.raises(ValueError, match=r"refresh_warmup=0.2 does not go with refresh_delay=2"):
        lather.Shampoo([{"params": [torch.nn.Parameter(torch.ones(4, 3))], "refresh_delay": 2}], refresh_warmup=0.2)
    with pytest.raises(ValueError, match=r"exponent_multiplier=1.82 has no effect with exponent"):
        lather.Shampoo([{"params": [torch.nn.Parameter(torch.ones(4, 3))], "exponent_multiplier": 1.82}], exponent=0.25)


@pytest.mark.parametrize(
    ("method", "relative", "absolute"),
    [("shampoo", 1e-4, 1e-12), ("kl", 1e-4, 1e-6), ("soap", 1e-8, 1e-8), ("spectral", 1e-4, None), (None, 1e-4, 1e-12)],
)
def test_the_default_eps(method: str | None, relative: float, absolute: float | None) -> None:
    assert settings_of(preconditioner=method).hyper.eps == relative
    if absolute is not None:
        assert settings_of(preconditioner=method, damping="absolute").hyper.eps == absolute


def test_the_default_filter() -> None:
    for beta1 in (0.9, 0.95):
        settings = settings_of(betas=(beta1, 0.95))
        assert settings.hyper_of("kronecker").beta3 == beta1**2
        assert settings.hyper_of("graft").beta3 == settings.hyper_of("adagrad").beta3 == beta1
    numbered = settings_of(beta3=0.5)
    assert numbered.hyper_of("kronecker").beta3 == numbered.hyper_of("graft").beta3 == 0.5


@pytest.mark.parametrize("name", ["paper", None])
def test_the_papers_exponent_has_two_names(name: str | None) -> None:
    ours, theirs = train(exponent=name), train(exponent={2: 1 / 4, 3: 1 / 6})
    assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, train(exponent=name, exponent_multiplier=1.82), train(exponent_multiplier=1.82)))
    assert not torch.equal(ours[0], train()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_never_preconditioned_is_torchs_adamw(method: str | None, dtype: torch.dtype) -> None:
    """With all defaults; only the betas are lather's."""
    given = {"lr": 0.02, "weight_decay": 0.1}
    ours = train(20, dtype, preconditioner=method, **NEVER, **given)
    generator = torch.Generator().manual_seed(0)
    theirs = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    advance(torch.optim.AdamW(theirs, betas=(0.95, 0.95), **given), theirs, 20)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(ours, [p.detach() for p in theirs], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_any_two_options_go_with_the_defaults(method: str | None) -> None:
    """All pairs of options that are not of a schedule, and of those that leave a default no room."""
    some: list[Options] = [{"betas": (0.0, 0.95)}, {"betas": (0.9, 1.0)}, {"bias_correction": False}, {"precondition_1d": True}]
    some += [{"graft": graft} for graft in ("sgd", "adagrad", "rmsprop", None)]
    some += [{"max_preconditioner_dim": 2}, {"merge_dims": False}, {"precondition_frequency": 1}, {"momentum": 0.9}, NEVER]
    if method in REFRESHED:
        some += [{"refresh": "staggered"}, {"refresh_delay": 1}, {"damping": "absolute"}, {"large_dim": "diagonal"}]
    contradictions = ({"refresh_delay"}, {"precondition_frequency"}), ({"refresh_delay"}, {"start_preconditioning_step"})
    for one, two in itertools.combinations(some, 2):
        if one.keys() != two.keys() and not any({*one} | {*two} == a | b for a, b in contradictions):
            settings_of(preconditioner=method, **one, **two)
