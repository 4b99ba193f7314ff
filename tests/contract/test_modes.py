"""``opt.train()`` and ``opt.eval()``: what parameters hold, bit for bit, across checkpoints, copies and param groups."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference import Reference
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as api

import lather
import lather.options
from lather.settings import Averaging, resolve
from lather.storage import averaging

Options = dict[str, Any]

SHAPES = {"weight": (6, 4), "twin": (6, 4), "conv": (4, 3, 2, 2), "bias": (6,), "scale": (), "none": (0, 2)}
FAST: Options = {"precondition_frequency": 3, "weight_decay": 0.1, "max_preconditioner_dim": 4}
KINDS: dict[str, Options] = {
    "schedule_free": {"averaging": "schedule_free"},
    "gpa": {"averaging": "gpa", "averaging_decay": 0.9},
    "x kept": {"averaging": "schedule_free", "averaging_beta": 0.2},
    "y = z": {"averaging": "gpa", "averaging_beta": 0.0},
    "y = x": {"averaging": "schedule_free", "averaging_beta": 1.0},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def make(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Model, lather.Shampoo]:
    model = Model(dtype)
    return model, lather.Shampoo(model.named_parameters(), **{"lr": 0.01} | FAST | KINDS[kind] | options)


def train(model: nn.Module, opt: lather.Shampoo, steps: int, start: int = 0) -> None:
    """`twin` has no gradient on some steps; the learning rate rises and falls."""
    for t in range(start, start + steps):
        for group in opt.param_groups:
            group["lr"] = 0.05 / (1 + abs(t - 3))
        for i, p in enumerate(model.parameters()):
            w = p.detach().float()
            p.grad = ((w + 0.1 * t).sin() + 0.3 * w).to(p.dtype) if i != 1 or t % 4 != 1 else None
        opt.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def assert_same_state(ours: Any, theirs: Any) -> None:
    assert_same(ours["state"], theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]


def differ(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if a.numel())


def through_file(saved: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# What parameters hold.


@every_dtype
@every_kind
def test_there_and_back(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, however often; and training goes on as if nothing had been."""
    (model, opt), (plain, other) = make(kind, dtype), make(kind, dtype)
    for t in range(0, 6, 2):
        train(model, opt, 2, t)
        train(plain, other, 2, t)
        points = weights(model)
        opt.train()
        assert_same(weights(model), points)
        for _ in range(2):
            opt.eval()
            average = weights(model)
            opt.eval()
            assert_same(weights(model), average)
            assert kind == "y = x" or differ(average, points) or t == 0
            opt.train()
            opt.train()
            assert_same(weights(model), points)
        assert_same(dict(opt.state), {p: other.state[q] for p, q in zip(model.parameters(), plain.parameters(), strict=True)})
    assert_same(weights(model), weights(plain))


@every_kind
def test_memory(kind: str) -> None:
    """One tensor more than without averaging, in eval mode two; for parameters of fewer bits always two."""
    for dtype, most in ((torch.float32, (1, 2)), (torch.bfloat16, (2, 2)), (torch.float64, (1, 2))):
        model, opt = make(kind, dtype)
        train(model, opt, 2)
        for switch, count in zip((opt.train, opt.eval), most, strict=True):
            switch()
            state = {key: x for key, x in opt.state[model.weight].items() if x is not model.weight}
            held = [state[key] for key in ("x", "y", "z") if key in state]
            assert [x.shape for x in held] == [model.weight.shape] * count
            assert {x.dtype for x in held} == {torch.promote_types(dtype, torch.float32)}
        opt.train()
        kinds = opt.plan().memory
        numel = sum(p.numel() for p in model.parameters())
        assert kinds["averaging"] == most[0] * numel * max(4, dtype.itemsize)
        assert "momentum" not in kinds
        numbers = ("step", "weight_sum")
        counted = sum(x.nbytes for p, s in opt.state.items() for k, x in s.items() if x is not p and k not in numbers)
        assert counted == kinds["total"] == opt.plan().state_bytes


def test_without_averaging_modes_do_nothing() -> None:
    model = Model()
    opt = lather.Shampoo(model.named_parameters(), momentum=0.9, **FAST)
    opt.eval()
    assert not opt.state
    train(model, opt, 3)
    before = weights(model), copy.deepcopy(opt.state_dict())
    opt.eval()
    assert_same(weights(model), before[0])
    assert_same_state(opt.state_dict(), before[1])
    train(model, opt, 1, 3)
    opt.train()
    assert "train_mode" not in opt.param_groups[0]


@every_kind
def test_stepping_in_eval_mode_is_an_error(kind: str) -> None:
    model, opt = make(kind)
    for steps in (0, 3):  # also of a fresh optimizer
        train(model, opt, steps)
        opt.eval()
        before = weights(model)
        with pytest.raises(RuntimeError, match=r"opt\.train\(\)"):
            train(model, opt, 1, 3)
        assert_same(weights(model), before)
        opt.train()
    train(model, opt, 1, 3)
    opt.eval()
    with pytest.raises(RuntimeError, match=r"opt\.train\(\)"):
        opt.step(lambda: pytest.fail("the closure was run"))


def test_before_the_first_step_a_parameter_is_its_own_average() -> None:
    """Weights that are loaded in eval mode are not undone, nor those after the state was made."""
    model, opt = make("gpa", torch.bfloat16)
    opt.eval()
    opt.state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    before = weights(model)
    opt.train()
    assert_same(weights(model), before)
    twin = Reference([p.detach() for p in model.parameters()], lr=0.01, **FAST | KINDS["gpa"])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    twin.step([p.grad for p in model.parameters()])
    torch.testing.assert_close([p.detach().double() for p in model.parameters()], twin.params, rtol=1e-2, atol=1e-6)


def test_groups_of_their_own() -> None:
    """Each as if it were alone; the one without averaging does not change its mode."""
    settings: list[Options] = [*KINDS.values(), {"momentum": 0.9, "nesterov": True}]
    models = [Model() for _ in settings]
    groups = [{"params": list(m.parameters()), **o} for m, o in zip(models, settings, strict=True)]
    opt = lather.Shampoo(groups, lr=0.01, **FAST)
    train(nn.ModuleList(models), opt, 0)
    for t in range(6):
        for group in opt.param_groups:
            group["lr"] = 0.05 / (1 + abs(t - 3))
        for model in models:
            for i, p in enumerate(model.parameters()):
                p.grad = (p.detach() + 0.1 * t).sin() + 0.3 * p.detach() if i != 1 or t % 4 != 1 else None
        opt.step()
    opt.eval()
    for model, options in zip(models, settings, strict=True):
        alone = Model()
        other = lather.Shampoo(alone.parameters(), lr=0.01, **FAST | options)
        train(alone, other, 6)
        other.eval()
        assert_same(weights(model), weights(alone))


def test_parameters_that_join_in_eval_mode() -> None:
    model, opt = make("schedule_free")
    train(model, opt, 3)
    opt.eval()
    late = nn.Parameter(torch.ones(4, 3))
    opt.add_param_group({"params": [("late", late)], "averaging_beta": 0.5})
    assert opt.param_groups[1]["train_mode"] is False
    opt.train()
    assert torch.equal(late, torch.ones(4, 3))
    late.grad = torch.ones_like(late)
    train(model, opt, 2, 3)
    opt.eval()
    opt.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_parameter_that_thaws_has_an_average_of_its_own(dtype: torch.dtype) -> None:
    """It does not remember the steps that it had no part in."""
    model, opt = make("schedule_free", dtype)
    model.bias.requires_grad_(False)
    for _ in range(20):
        model.weight.grad = torch.ones_like(model.weight)
        opt.step()
    model.bias.requires_grad_(True)
    model.bias.grad = torch.ones_like(model.bias)
    opt.step()
    points = weights(model)
    opt.eval()
    assert_same(model.bias.detach(), points[3])  # x = z = y after one step


def test_shares_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a learning rate on a device shares are tensors there: the same bits."""
    ours, theirs = make("schedule_free"), make("schedule_free")
    train(*theirs, 6)
    found = averaging.shares_

    def as_tensors(*args: Any) -> list[Tensor]:
        return [torch.tensor(x, dtype=torch.float64) for x in found(*args)]

    monkeypatch.setattr(averaging, "shares_", as_tensors)
    train(*ours, 6)
    assert_same(weights(ours[0]), weights(theirs[0]))


def test_a_learning_rate_that_is_a_tensor() -> None:
    ours, theirs = make("schedule_free", lr=torch.tensor(0.02)), make("schedule_free", lr=float(torch.tensor(0.02)))
    for model, opt in (ours, theirs):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        opt.step()
        opt.eval()
    assert_same(weights(ours[0]), weights(theirs[0]))
    sums, top = torch.zeros(2, dtype=torch.float64), torch.tensor([0.5])
    options = Averaging("schedule_free", beta=0.9, decay=0.9967, powers=(2.0, 0.0))
    assert averaging.shares_(sums, [1, 2], [True, False], options, top) == [1.0, 1.0]
    assert averaging.shares_(sums, [2, 2], [True, True], options, top) == [0.5, 1.0]
    assert sums.tolist() == [0.5, 0.25]


# Checkpoints.


class Run(NamedTuple):
    """Points and averages after 5 steps and after 8, and the state after 8, of a run that was never saved or copied."""

    points: list[Tensor]
    averages: list[Tensor]
    last_points: list[Tensor]
    last_averages: list[Tensor]
    last_state: dict[str, Any]


@cache
def whole_run(kind: str, dtype: torch.dtype) -> Run:
    model, opt = make(kind, dtype)
    found = []
    for start, steps in ((0, 5), (5, 3)):
        train(model, opt, steps, start)
        state = copy.deepcopy(opt.state_dict())
        found.append(weights(model))
        opt.eval()
        found.append(weights(model))
        opt.train()
    return Run(*found, state)


def check_resumed(kind: str, dtype: torch.dtype, saved: bool, model: Model, opt: lather.Shampoo) -> None:
    """It is in the mode it was saved in, and goes on as one that was never saved."""
    run = whole_run(kind, dtype)
    assert opt.param_groups[0]["train_mode"] is saved
    assert_same(weights(model), run.points if saved else run.averages)
    opt.train()
    assert_same(weights(model), run.points)
    train(model, opt, 3, 5)
    assert_same(weights(model), run.last_points)
    assert_same_state(opt.state_dict(), run.last_state)
    opt.eval()
    assert_same(weights(model), run.last_averages)


@cache
def trained(kind: str, dtype: torch.dtype) -> bytes:
    model, opt = make(kind, dtype)
    train(model, opt, 5)
    return pickle.dumps((model, opt))


def after_five(kind: str, dtype: torch.dtype) -> tuple[Model, lather.Shampoo]:
    """A model and its optimizer after 5 steps."""
    found: tuple[Model, lather.Shampoo] = pickle.loads(trained(kind, dtype))
    return found


MODES = [(True, True), (True, False), (False, True), (False, False)]
every_mode = pytest.mark.parametrize(("saved", "live"), MODES, ids=lambda train: "train" if train else "eval")


def in_mode(opt: lather.Shampoo, train: bool) -> lather.Shampoo:
    (opt.train if train else opt.eval)()
    return opt


def stale(kind: str, dtype: torch.dtype, live: bool, started: bool) -> tuple[Model, lather.Shampoo]:
    """An optimizer to load into: a new one, or one that was somewhere else."""
    model, opt = make(kind, dtype)
    if started:
        train(model, opt, 3, 7)
    return model, in_mode(opt, live)


@every_mode
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@every_kind
def test_resume(kind: str, dtype: torch.dtype, saved: bool, live: bool) -> None:
    """The model first and a new optimizer, or the optimizer first and a used one: in turn, so that each mode has both."""
    model_first = (dtype == torch.float32) == (saved == live)
    model, opt = after_five(kind, dtype)
    in_mode(opt, saved)
    files = through_file(model.state_dict()), through_file(opt.state_dict())
    again, fresh = stale(kind, dtype, live, not model_first)
    for load in (0, 1) if model_first else (1, 0):
        (again, fresh)[load].load_state_dict(files[load])
    check_resumed(kind, dtype, saved, again, fresh)


@every_dtype
@every_kind
def test_the_optimizers_state_tells_what_parameters_are(kind: str, dtype: torch.dtype) -> None:
    """Weights were saved as averages, and the optimizer while it trained: load the model first."""
    model, opt = after_five(kind, dtype)
    opt.eval()
    averages = through_file(model.state_dict())
    opt.train()
    saved = through_file(opt.state_dict())
    again, fresh = stale(kind, dtype, True, False)
    again.load_state_dict(averages)
    fresh.load_state_dict(saved)
    check_resumed(kind, dtype, True, again, fresh)


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("saved", [True, False], ids=["train", "eval"])
@every_kind
def test_copies(kind: str, saved: bool, how: str) -> None:
    dtype = DTYPES[saved == (how == "pickle")]  # in turn
    model, opt = make(kind, dtype)
    train(model, opt, 5)
    again, twin = COPIES[how]((model, in_mode(opt, saved)))
    check_resumed(kind, dtype, saved, again, twin)
    if how == "deepcopy":  # which might share something
        check_resumed(kind, dtype, saved, model, opt)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@every_mode
@pytest.mark.parametrize(("kind", "dtype"), [("schedule_free", torch.float32), ("x kept", torch.bfloat16)])
def test_distributed_checkpoint(kind: str, dtype: torch.dtype, saved: bool, live: bool, tmp_path: Path) -> None:
    """Nested or flat: in turn, so that each mode has both."""
    flat = (dtype == torch.float32) == (saved == live)
    chosen = api.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, opt = after_five(kind, dtype)
    in_mode(opt, saved)

    def contents(m: Model, o: lather.Shampoo) -> dict[str, Any]:
        return {"model": api.get_model_state_dict(m), "opt": api.get_optimizer_state_dict(m, o, options=chosen)}

    dcp.save(contents(model, opt), checkpoint_id=tmp_path, no_dist=True)
    again, fresh = stale(kind, dtype, live, False)
    loaded = contents(again, fresh)
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    api.set_model_state_dict(again, loaded["model"])
    api.set_optimizer_state_dict(again, fresh, loaded["opt"], options=chosen)
    check_resumed(kind, dtype, saved, again, fresh)


def test_probe_in_eval_mode() -> None:
    """torch's checkpoint code makes the state by a step at learning rates of zero."""
    model, opt = make("schedule_free")
    before = weights(model)
    opt.eval()
    opt.state.clear()
    api.get_optimizer_state_dict(model, opt)
    assert_same(weights(model), before)
    assert {state["step"].item() for state in opt.state.values()} == {0.0}


def test_a_frozen_parameter_keeps_its_average() -> None:
    model, opt = make("gpa")
    train(model, opt, 4)
    model.weight.requires_grad_(False)
    model.weight.grad = None
    before = model.weight.detach().clone()
    opt.eval()
    assert not torch.equal(model.weight, before)
    opt.train()
    assert_same(model.weight.detach(), before)


# Refused.


@pytest.mark.parametrize("kind", ["schedule_free", "gpa"])
def test_momentum_with_averaging(kind: str) -> None:
    with pytest.raises(ValueError, match=r"momentum=0\.9 does not go with averaging='\w+'.* set momentum=0"):
        make(kind, momentum=0.9)
    model, opt = make(kind)
    train(model, opt, 1)
    opt.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match=r"momentum=0\.5 does not go with averaging"):
        train(model, opt, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"averaging": "polyak"}, "averaging='polyak'.*'schedule_free', 'gpa'"),
        ({"averaging": "schedulefree"}, "did you mean 'schedule_free'"),
        ({"averaging": "gpa", "averaging_beta": 1.1}, "averaging_beta=1.1.*at most 1"),
        ({"averaging": "gpa", "averaging_decay": 1.0}, "averaging_decay=1.0.*less than 1"),
        ({"averaging": "schedule_free", "averaging_powers": 2.0}, "averaging_powers=2.0.*pair"),
        ({"averaging": "schedule_free", "averaging_powers": (2.0, -1.0)}, r"averaging_powers\[1\]=-1.0"),
        ({"averaging_beta": 0.9}, "averaging_beta=0.9 has no effect without averaging"),
        ({"averaging_decay": 0.9}, "averaging_decay=0.9 has no effect with averaging=None"),
        ({"averaging": "schedule_free", "averaging_decay": 0.9}, "only 'gpa' uses it"),
        ({"averaging": "gpa", "averaging_powers": (1.0, 0.0)}, "only 'schedule_free' uses it"),
    ],
)
def test_refused(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lather.Shampoo(Model().parameters(), **options)


@pytest.mark.parametrize(("name", "value"), [("averaging", None), ("averaging", "gpa"), ("averaging_beta", 0.5)])
def test_what_is_averaged_is_fixed(name: str, value: Any) -> None:
    model, opt = make("schedule_free")
    train(model, opt, 2)
    opt.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"{name} of param group 0 was changed"):
        train(model, opt, 1)


def test_checkpoints_that_do_not_fit() -> None:
    model, opt = make("schedule_free")
    train(model, opt, 2)
    saved = opt.state_dict()
    with pytest.raises(ValueError, match="averaging='schedule_free'"):
        lather.Shampoo(Model().named_parameters(), lr=0.01, **FAST).load_state_dict(saved)
    for key in ("z", "y", "weight_sum"):
        short = copy.deepcopy(saved)
        del short["state"][0][key]
        with pytest.raises(ValueError, match=f"lacks '{key}' for parameter weight"):
            make("schedule_free")[1].load_state_dict(short)


# Param groups.


def test_averaging_may_be_chosen_until_the_first_step() -> None:
    """As every option that decides which state there is."""
    for switch in (False, True):
        model, plain = Model(), make("gpa")
        opt = lather.Shampoo(model.named_parameters(), lr=0.01, **FAST)
        opt.param_groups[0] |= KINDS["gpa"]
        if switch:
            opt.eval()
            opt.train()
        train(model, opt, 3)
        train(*plain, 3)
        assert_same(weights(model), weights(plain[0]))
        opt.eval()
        assert not opt.param_groups[0]["train_mode"]


def test_averaging_may_be_left_until_the_first_step() -> None:
    model, opt = make("gpa")
    opt.eval()
    opt.param_groups[0] |= {"averaging": None, "averaging_decay": None}
    train(model, opt, 2)
    assert not {"train_mode", "top_lr"} & opt.param_groups[0].keys()


def test_param_groups_of_another_optimizer_do_not_bring_its_mode() -> None:
    model, opt = make("gpa")
    train(model, opt, 2)
    opt.eval()
    for options in ({}, {"averaging": None, "averaging_decay": None}):
        fresh = lather.Shampoo([{**group, **options} for group in opt.param_groups])
        before = weights(model)
        train(model, fresh, 1)
        assert fresh.param_groups[0].get("train_mode", True) is True
        assert ("train_mode" in fresh.param_groups[0]) == (not options)
        assert not torch.equal(weights(model)[0], before[0]) and fresh.state[model.weight]["step"] == 1


def test_hooks_see_what_is_saved() -> None:
    """And what they make of it is what is saved."""
    model, opt = make("schedule_free")
    train(model, opt, 2)
    seen = []

    def halve(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        seen.extend(type(x) for entry in saved["state"].values() for x in entry.values())
        return saved | {"state": {i: {k: x / 2 for k, x in entry.items()} for i, entry in saved["state"].items()}}

    before = opt.state_dict()
    opt.register_state_dict_post_hook(halve)
    assert_same(opt.state_dict()["state"], {i: {k: x / 2 for k, x in e.items()} for i, e in before["state"].items()})
    assert set(seen) == {Tensor}
    train(model, opt, 1)


class Elsewhere(torch.Tensor):
    """A tensor that is neither on the host nor on CUDA, as far as it says."""

    is_cpu = property(lambda self: False)


def test_failures_are_read_on_devices_that_are_neither_cpu_nor_cuda() -> None:
    p = torch.nn.Parameter(torch.ones(4, 4))
    opt = lather.Shampoo([p], precondition_frequency=2)
    for step in range(1, 5):
        p.grad = torch.randn(4, 4) if step != 3 else torch.full((4, 4), torch.nan)
        opt.step() if step != 4 else None
        for bank in opt._session.run.banks:
            bank.counts = bank.counts.as_subclass(Elsewhere)
    with pytest.warns(lather.NumericalWarning, match="NaN or Inf"):
        opt.step()
    assert opt.health()


def test_a_root_device_that_changes_gets_its_own_solver() -> None:
    """The solver of a bank is resolved when it is built, so a change must build it again."""
    group = {name: option.default for name, option in lather.options.OPTIONS.items()}
    before = resolve(group)
    group["root_device"] = "cpu"
    assert resolve(group, before).signature != before.signature


@pytest.mark.parametrize("when", ["eval", "state_dict", "load", "eval and load"])
@pytest.mark.parametrize("steps", [0, 3])
def test_inference_mode_leaves_no_trace(when: str, steps: int) -> None:
    """State that was made in it could not be changed afterwards."""
    (model, opt), (other, plain) = make("gpa"), make("gpa")
    train(model, opt, steps)
    train(other, plain, steps)
    saved = copy.deepcopy(plain.state_dict())
    with torch.inference_mode():
        if "eval" in when:
            opt.eval()
        if "load" in when:
            opt.load_state_dict(saved)
        elif when == "state_dict":
            opt.state_dict()
        opt.train()
        opt.consolidate_state_dict()
    plain.eval()
    plain.train()
    train(model, opt, 2)
    train(other, plain, 2)
    assert_same(opt.state_dict()["state"], plain.state_dict()["state"])
