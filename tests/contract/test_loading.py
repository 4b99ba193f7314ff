"""A checkpoint is loaded completely, or refused and nothing changes: not a bit of parameters, state and options."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lather

NAN, INF = math.nan, math.inf
FAST: dict[str, Any] = {"lr": 0.02, "precondition_frequency": 3, "max_preconditioner_dim": 4, "refresh_warmup": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "root": "newton(iterations=9)"},
    "averaged": {"averaging": "schedule_free", "betas": (0.0, 0.9)},
}


def optimizer(steps: int, seed: int = 0, **options: Any) -> lather.Shampoo:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (6, 5), "bias": (6,), "scale": ()}
    params = [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]
    opt = lather.Shampoo(params, **FAST | options)
    train(opt, steps)
    return opt


def params_of(opt: lather.Shampoo) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def train(opt: lather.Shampoo, steps: int) -> None:
    for t in range(steps):
        for p in params_of(opt):
            p.grad = (p.detach() + 0.1 * t).sin()
        opt.step()


def picture(opt: lather.Shampoo) -> Any:
    """All that a load may change: values, the tensors that hold them, and options."""
    tensors = [(p.detach().clone(), {k: (id(v), v.clone()) for k, v in opt.state.get(p, {}).items()}) for p in params_of(opt)]
    return tensors, copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups])


def assert_unchanged(opt: lather.Shampoo, before: Any) -> None:
    tensors, options = picture(opt)
    assert_same(tensors, before[0])
    assert options == before[1]


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be replaced: every part of a checkpoint, by its keys."""
    if path:
        yield path
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*path, key))


def replaced(saved: Any, path: tuple[Any, ...], value: Any) -> Any:
    saved = copy.deepcopy(saved)
    where = saved
    for key in path[:-1]:
        where = where[key]
    if value is DELETED:
        del where[path[-1]]
    else:
        where[path[-1]] = value(where[path[-1]]) if callable(value) else value
    return saved


DELETED = object()


def of_tensor(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda old: change(old.detach()) if isinstance(old, Tensor) else change(torch.ones(2, 2))


def quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


@cache
def checkpoint_of(case: str) -> Any:
    return copy.deepcopy(optimizer(4, **CASES[case]).state_dict())


BAD: list[Any] = [
    *(None, True, 0, -1, 3, 10**400, 1.5, -0.5, NAN, INF, 1j, "", "newton", "staggered", "é", "(" * 3000, b"x", (), (1, 2)),
    *([], [1], {}, {"step": 1}, {1: 2}, DELETED, "newton(iterations=99999999999)", "minimax(relative_eps=1e-300)"),
    *map(
        of_tensor, (lambda x: x.to("meta"), torch.Tensor.to_sparse, quantised, lambda x: x.to(torch.complex64), torch.Tensor.bool)
    ),
    *map(
        of_tensor,
        (torch.Tensor.double, torch.Tensor.half, torch.Tensor.int, lambda x: x * NAN, lambda x: -x - 1, lambda x: x[None]),
    ),
    of_tensor(lambda x: torch.nested.nested_tensor([x.reshape(-1)])),
]


@pytest.mark.filterwarnings("ignore")  # torch's own, about quantised and nested tensors
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_a_checkpoint_with_one_wrong_place_is_loaded_or_refused(case: str, steps: int, data: st.DataObject) -> None:
    saved = checkpoint_of(case)
    opt, twin = optimizer(steps, seed=1, **CASES[case]), optimizer(steps, seed=1, **CASES[case])
    wrong = replaced(saved, data.draw(st.sampled_from(list(places(saved)))), data.draw(st.sampled_from(BAD)))
    before = picture(opt)
    try:
        opt.load_state_dict(wrong)
    except (ValueError, TypeError, RuntimeError):
        assert_unchanged(opt, before)
        train(opt, 3)
        train(twin, 3)
        assert_same([p.detach() for p in params_of(opt)], [p.detach() for p in params_of(twin)])
        return
    for i, p in enumerate(params_of(opt)):
        if all(value.isfinite().all() for value in wrong["state"][i].values()):  # or it starts anew
            for key, value in opt.state[p].items():
                assert_same(value.detach().double(), wrong["state"][i][key].double())
    train(opt, 2)


WRONG: list[tuple[Any, str]] = [
    *((torch.tensor(bad), rf"step for parameter weight is {bad}") for bad in (NAN, INF, -1.0, 1.5, 1e9)),
    (torch.tensor(True), "step for parameter weight is True"),
    (torch.tensor(2.0, device="meta"), "step for parameter weight is no ordinary tensor"),
    (torch.tensor(2j), "step for parameter weight is no ordinary tensor"),
    ("2", "step for parameter weight is no ordinary tensor .* str"),
]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("step", "words"), WRONG, ids=str)
def test_a_step_that_is_no_count_is_refused(step: Any, words: str, steps: int) -> None:
    saved, opt = optimizer(4).state_dict(), optimizer(steps, seed=1)
    saved["state"][0]["step"] = step
    before = picture(opt)
    with pytest.raises(ValueError, match=words):
        opt.load_state_dict(saved)
    assert_unchanged(opt, before)


class NoMemory(TorchDispatchMode):
    """The given allocation fails, counted from 0."""

    ALLOCATES = ("zeros", "zeros_like", "empty", "empty_like", "clone", "full", "new_zeros", "eye")

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.left = fails

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        meta = kwargs.get("device") == torch.device("meta")
        if func.overloadpacket.__name__ in self.ALLOCATES and not meta:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("no memory left")
        return func(*args, **kwargs)


MORE: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (0, {"momentum": 0.9}, {}),
    (2, {"momentum": 0.9}, {}),  # a buffer more than before
    (2, {"refresh_delay": 1}, {}),  # roots that wait
    (2, {"betas": (0.9, 0.95)}, {"betas": (0.0, 0.95)}),  # a filter
    (2, {"momentum": 0.9, "root": "track"}, {"root": "eigh"}),  # bases
]


@pytest.mark.parametrize(("steps", "theirs", "mine"), MORE, ids=str)
def test_without_memory_for_it_nothing_changes(steps: int, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Whichever allocation fails. Then there is memory, and the checkpoint is loaded."""
    saved = optimizer(4, **theirs).state_dict()
    opt = optimizer(steps, seed=1, **mine)
    before, fails = picture(opt), 0
    while True:
        try:
            with NoMemory(fails):
                opt.load_state_dict(saved)
            break
        except torch.OutOfMemoryError:
            assert_unchanged(opt, before)
            fails += 1
    assert fails > 5
    fresh = optimizer(0, **theirs)
    fresh.load_state_dict(saved)
    assert_same([dict(opt.state[p]) for p in params_of(opt)], [dict(fresh.state[p]) for p in params_of(fresh)])


def test_after_a_load_without_memory_training_goes_on() -> None:
    saved, opt, twin = optimizer(4, momentum=0.9).state_dict(), optimizer(2, seed=1), optimizer(2, seed=1)
    for fails in range(6):
        with NoMemory(fails), pytest.raises(torch.OutOfMemoryError):
            opt.load_state_dict(saved)
        train(opt, 2)
        train(twin, 2)
        assert_same(
            [(p.detach(), dict(opt.state[p])) for p in params_of(opt)], [(p.detach(), dict(twin.state[p])) for p in params_of(twin)]
        )


# What is saved does not depend on what is trained, and saving changes nothing.


@pytest.mark.parametrize("refresh", ["together", "staggered"])
@pytest.mark.parametrize(
    "touch", [lather.Shampoo.state_dict, lambda opt: opt.state[params_of(opt)[0]]], ids=["state_dict", "state"]
)
@pytest.mark.parametrize("thawed", [0, 3])
def test_saving_before_a_parameter_is_frozen_changes_nothing(refresh: str, touch: Callable[[Any], Any], thawed: int) -> None:
    """State that is allocated for a checkpoint, or an entry that was looked for, is no reason to plan a parameter."""

    def run(call: Callable[[Any], Any]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 5), (6, 5), (9, 4), (7, 3))]
        params[0].requires_grad_(thawed == 0)
        opt = lather.Shampoo(params, lr=0.05, refresh=refresh, precondition_frequency=4, refresh_warmup=0.0)
        for t in range(16):
            if t == thawed:
                params[0].requires_grad_(True)
                call(opt)
                params[0].requires_grad_(False)
            for p in params[1:]:
                p.grad = (p.detach() + 0.1 * t).sin()
            opt.step()
        return [p.detach() for p in params]

    assert_same(run(touch), run(lambda opt: None))


@pytest.mark.parametrize("warm", [0, 1, 4])
def test_the_state_of_a_frozen_parameter_is_loaded(warm: int) -> None:
    """Also into an optimizer that has found nothing to change for some steps."""
    frozen, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    saved = trained(frozen, 3).state_dict()
    other.weight.requires_grad_(False)
    opt = trained(other, warm)
    opt.load_state_dict(saved)
    assert opt.state[other.weight]["step"] == 3 and other.weight in opt.state
    assert opt.state_dict()["state"].keys() == saved["state"].keys()


def trained(model: torch.nn.Module, steps: int) -> lather.Shampoo:
    opt = lather.Shampoo(model.named_parameters())
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p) if p.requires_grad else None
        opt.step()
    return opt
