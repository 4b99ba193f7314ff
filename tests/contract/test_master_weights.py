"""Parameters of fewer bits with ``master_weights``: trained as if they were float32, and rounded."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lather

SHAPES = [(12, 8), (5,), (3, 4, 2, 2), ()]
METHODS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"weight_decay": 0.1, "weight_decay_mode": "l2"},
    {"preconditioner": "soap", "graft": None},
    {"preconditioner": "kl", "state_dtype": "bfloat16"},
    {"preconditioner": "spectral"},
    {"preconditioner": None, "weight_decay": 0.1},
    {"averaging": "gpa", "averaging_decay": 0.8, "state_dtype": "bfloat16"},
]


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    """Equal for all dtypes that float16 fits into."""
    generator = torch.Generator().manual_seed(seed)
    rough = [torch.randint(-64, 65, shape, generator=generator) / 64 for shape in SHAPES]
    return [nn.Parameter(x.to(dtype)) for x in rough]


def make(dtype: torch.dtype, **options: Any) -> tuple[lather.Shampoo, list[nn.Parameter]]:
    params = parameters(dtype)
    return lather.Shampoo(params, **{"lr": 1e-4, "precondition_frequency": 2} | options), params


def take(opt: lather.Shampoo, params: list[nn.Parameter], step: int) -> None:
    for p, grad in zip(params, parameters(params[0].dtype, seed=step), strict=True):
        p.grad = grad.detach()
    opt.step()


def masters(opt: lather.Shampoo, params: list[nn.Parameter]) -> list[Tensor]:
    return [opt.state[p]["master" if "master" in opt.state[p] else "y"] for p in params]


@pytest.mark.parametrize(
    ("options", "dtype"), [(options, (torch.bfloat16, torch.float16)[i % 2]) for i, options in enumerate(METHODS)], ids=str
)
def test_they_are_parameters_of_float32_rounded(dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours, params = make(dtype, master_weights=True, **options)
    wide = {"master_weights": True} if "averaging" in options else {}  # averages have as many bits then
    twin, others = make(torch.float32, **options | wide)
    for step in range(1, 12):
        take(ours, params, step)
        take(twin, others, step)
        for p, master, q in zip(params, masters(ours, params), others, strict=True):
            assert torch.equal(master, q) and torch.equal(p, q.to(dtype))


def test_short_steps_are_not_lost() -> None:
    for given, moved in (({}, False), ({"master_weights": True}, True)):
        p = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        opt = lather.Shampoo([p], lr=1e-4, **given)
        for _ in range(100):  # each is a tenth of what bfloat16 can tell apart, and less
            p.grad = torch.ones_like(p)
            opt.step()
        assert bool((p != 1).all()) is moved


def test_what_the_user_does_to_a_parameter_counts() -> None:
    opt, params = make(torch.bfloat16, master_weights=True)
    take(opt, params, 1)
    before = [x.clone() for x in masters(opt, params)]
    params[0].data[0] = 0.0  # autograd does not see it
    with torch.no_grad():
        params[1].fill_(3.0)
    for p in params:
        p.grad = None
    params[3].grad = torch.ones_like(params[3])
    opt.step()
    after = masters(opt, params)
    assert not after[0][0].any() and torch.equal(after[0][1:], before[0][1:])
    assert bool((after[1] == 3).all()) and torch.equal(after[2], before[2])


@pytest.mark.parametrize("options", METHODS[:3], ids=str)
def test_a_resumed_run_continues_bit_for_bit(options: dict[str, Any]) -> None:
    opt, params = make(torch.bfloat16, master_weights=True, **options)
    for step in range(1, 6):
        take(opt, params, step)
    file = io.BytesIO()
    torch.save((opt.state_dict(), params), file)
    file.seek(0)
    saved, others = torch.load(file, weights_only=False)
    resumed = lather.Shampoo(others, lr=1.0, precondition_frequency=2, master_weights=True, **options)
    resumed.load_state_dict(saved)
    twin = copy.deepcopy((opt, params))
    for some, them in ((opt, params), (resumed, others), twin):
        for step in range(6, 12):
            take(some, them, step)
    for i, master in enumerate(masters(opt, params)):
        assert torch.equal(master, masters(resumed, others)[i]) and torch.equal(master, masters(*twin)[i])


def test_files_from_before_the_option_load_without_it() -> None:
    opt, params = make(torch.bfloat16)
    for step in range(1, 4):
        take(opt, params, step)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["master_weights"]  # as in files from before the option
    fresh = make(torch.bfloat16)[0]
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["master_weights"] is False


def test_they_may_begin_in_the_middle_of_a_run() -> None:
    """And in a run that has some, they begin anew with a file that has none."""
    opt, params = make(torch.bfloat16)
    for step in range(1, 4):
        take(opt, params, step)
    saved, found = copy.deepcopy(opt.state_dict()), []
    for steps in (0, 2):
        other, others = make(torch.bfloat16, master_weights=True)
        for step in range(1, 1 + steps):
            take(other, others, step)
        with torch.no_grad():
            for p, q in zip(params, others, strict=True):
                q.copy_(p)
        other.load_state_dict(saved)
        assert other.param_groups[0]["master_weights"] is True
        take(other, others, 4)
        found.append(masters(other, others))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_new_optimizer_takes_them_over() -> None:
    opt, params = make(torch.bfloat16, master_weights=True)
    take(opt, params, 1)
    (fresh, _), (running, others) = make(torch.bfloat16), make(torch.bfloat16)
    fresh.load_state_dict(opt.state_dict())
    assert fresh.param_groups[0]["master_weights"] is True
    take(running, others, 1)
    with pytest.raises(ValueError, match="master_weights=True"):
        running.load_state_dict(opt.state_dict())


@pytest.mark.parametrize(("saved", "loaded"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_run_may_go_on_in_another_dtype(saved: torch.dtype, loaded: torch.dtype) -> None:
    """There are no masters of float32, so they begin as the parameters are, or are left behind."""
    opt, params = make(saved, master_weights=True)
    for step in range(1, 4):
        take(opt, params, step)
    others = [nn.Parameter(p.detach().to(loaded)) for p in params]
    resumed = lather.Shampoo(others, lr=1e-4, precondition_frequency=2, master_weights=True)
    resumed.load_state_dict(opt.state_dict())
    before = [p.detach().clone() for p in others]
    for p in others[1:]:
        p.grad = torch.zeros_like(p)
    resumed.step()
    assert torch.equal(others[0], before[0])
    assert ("master" in resumed.state[others[0]]) is (loaded == torch.bfloat16)
    if loaded == torch.bfloat16:
        assert torch.equal(resumed.state[others[0]]["master"], before[0].float())


def test_float32_needs_none() -> None:
    (ours, params), (twin, others) = make(torch.float32, master_weights=True), make(torch.float32)
    for step in (1, 2, 3):
        take(ours, params, step)
        take(twin, others, step)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert {*ours.state[params[0]]} == {*twin.state[others[0]]}


def test_the_plan_counts_them() -> None:
    (ours, params), (twin, _) = make(torch.bfloat16, master_weights=True), make(torch.bfloat16)
    take(ours, params, 1)
    size = sum(p.numel() for p in params)
    assert ours.plan().state_bytes - twin.plan().state_bytes == ours.plan().memory["master weights"] == 4 * size
    state = sum(x.nbytes for p in params for name, x in ours.state[p].items() if name != "step")
    assert ours.plan().state_bytes == state
