"""Checkpoints: bitwise resume through every door, live memory kept, and loads that are refused."""

import copy
import gc
import io
import math
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.utils._pytree
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as api

import lather
from lather.options import OPTIONS
from lather.runtime import checkpoint

SHAPES = {"weight": (6, 5), "twin": (6, 5), "conv": (4, 3, 2, 2), "bias": (6,), "scale": (), "none": (0, 2)}
FAST: dict[str, Any] = {"precondition_frequency": 3, "weight_decay": 0.1, "max_preconditioner_dim": 4, "refresh_warmup": 0.0}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def set_grads(params: Iterable[Tensor], t: int) -> None:
    """`twin` has no gradient on some steps, so that the parameters' steps differ."""
    for i, p in enumerate(params):
        w = p.detach().float()
        p.grad = ((w + 0.1 * t).sin() + 0.3 * w).to(p.dtype)
        if i == 1 and t % 4 == 1:
            p.grad = None


def all_params(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def train(opt: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    """With a learning rate that rises and falls."""
    for t in range(start, start + steps):
        for group in opt.param_groups:
            group["lr"] = 0.05 / (1 + abs(t - 3))
        set_grads(all_params(opt), t)
        opt.step()


def snapshot(opt: torch.optim.Optimizer) -> list[Any]:
    return [(p.detach().clone(), {k: v.clone() for k, v in opt.state.get(p, {}).items()}) for p in all_params(opt)]


def options_of(opt: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]


def assert_same(ours: Any, theirs: Any) -> None:
    """Bit for bit, dtypes and keys included."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def through_file(saved: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def pair(steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model and optimizer after some steps, and a fresh pair with the same parameters but another lr and eps."""
    model = Model(dtype)
    opt = lather.Shampoo(model.named_parameters(), lr=0.01, **FAST | options)
    train(opt, steps)
    fresh = copy.deepcopy(model)
    return model, opt, fresh, lather.Shampoo(fresh.named_parameters(), lr=3.0, eps=0.5, **FAST | options)


CASES: list[dict[str, Any]] = [
    *({"root": root} for root in ("eigh", "newton", "higher_order", "minimax", "track")),
    *({"graft": graft} for graft in ("adam", "rmsprop", "adagrad", "sgd", None)),
    {"momentum": 0.9, "nesterov": True, "dampening": 0.1, "weight_decay_mode": "corrected"},
    {"refresh": "staggered", "weight_decay_mode": "independent", "momentum": 0.5},
    {"refresh": "staggered", "root": "track", "start_preconditioning_step": 5},
    {"betas": (0.0, 1.0), "precondition_1d": True},
    {"betas": (0.8, 0.9), "beta3": 0.5, "bias_correction": False, "large_dim": "diagonal"},
    {"large_dim": "adagrad", "exponent": {2: 0.5, 3: 0.25}, "maximize": True},
    {"state_dtype": "bfloat16", "momentum": 0.9},
    {"state_dtype": torch.float64, "root": lather.Track(iterations=2), "batch_dims": 0},
    {"factors": "packed", "large_dim": "diagonal", "refresh": "staggered"},
    {"root_dtype": "bfloat16", "momentum": 0.9},
    {"root_dtype": "bfloat16", "filter_dtype": "bfloat16", "factors": "packed", "graft": "constant"},
    {"refresh_delay": 2},
    {"refresh_warmup": 0.1},
    {"refresh_warmup": 0.2, "exponent": None, "damping": "absolute", "beta3": None},
    {"refresh_delay": 1, "refresh": "staggered", "root": "track", "root_device": "cpu"},
    {"root_dtype": torch.float32, "state_dtype": "bfloat16", "factors": "packed", "root": "track"},
    {"preconditioner": "kl", "refresh_delay": 1, "factors": "packed", "large_dim": "diagonal"},
    {"preconditioner": "soap", "graft": None},
    {"preconditioner": "soap", "refresh_delay": 1, "factors": "packed", "root": "track", "large_dim": "diagonal"},
    {
        "preconditioner": "soap",
        "graft": None,
        "refresh": "staggered",
        "refresh_delay": 1,
        "root": "track",
        "state_dtype": "bfloat16",
    },
    {"preconditioner": "spectral", "momentum": 0.9},
    {"preconditioner": "spectral", "graft": None, "polar": "polar_express(steps=6)", "polar_scale": "original"},
    {"preconditioner": "spectral", "graft": None, "betas": (0.0, 0.9), "polar": lather.Svd()},  # keeps nothing at all
]


AVERAGING: list[dict[str, Any]] = [
    {"averaging": "schedule_free", "betas": (0.0, 0.999)},
    {"averaging": "gpa", "averaging_beta": 0.3, "averaging_decay": 0.9, "refresh": "staggered"},
]
STAGGERED: dict[str, Any] = {"refresh": "staggered"}
TIMES = [
    *((case, torch.float32, 4) for case in CASES),
    *((case, torch.bfloat16, 4) for case in (*CASES[6:11], CASES[-2])),  # roots see the state's dtype only
    *((case, dtype, 4) for case in AVERAGING for dtype in (torch.float32, torch.bfloat16, torch.float64)),
    *((case, torch.float32, k) for case in (CASES[0], STAGGERED) for k in (1, 6, 8)),
]


@pytest.mark.parametrize(("options", "dtype", "k"), TIMES, ids=str)
def test_resume(options: dict[str, Any], dtype: torch.dtype, k: int) -> None:
    """Saved before the first refresh (1), at one (6) and between two; everything is bitwise the same 6 steps on."""
    _, opt, _, fresh = pair(k, dtype, **options)
    fresh.load_state_dict(through_file(opt.state_dict()))
    assert_same(snapshot(fresh), snapshot(opt))
    assert options_of(fresh) == options_of(opt)
    group = fresh.param_groups[0]
    kept = group["root_dtype"] or group["state_dtype"]
    for state in fresh.state.values():
        for key, v in state.items():
            own = {"X": kept, "m": group["filter_dtype"] or group["state_dtype"]} if "." in key else {}
            wanted = getattr(torch, own.get(key[0], group["state_dtype"]))
            if key in ("x", "y", "z"):  # never of fewer bits than the parameter
                wanted = torch.promote_types(wanted, dtype)
            assert key in ("step", "weight_sum") or v.dtype == wanted
    train(opt, 6, k)
    train(fresh, 6, k)
    assert_same(snapshot(fresh), snapshot(opt))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_loading_copies_into_the_live_state(momentum: float) -> None:
    _, opt, _, other = pair(5, momentum=momentum, root="track")
    saved = copy.deepcopy(opt.state_dict())
    train(other, 2)
    before = {p: dict(state) for p, state in other.state.items()}
    pointers = [[v.data_ptr() for v in state.values()] for state in before.values()]
    other.load_state_dict(saved)
    for p, state in before.items():
        assert list(other.state[p]) == list(state)
        assert all(other.state[p][key] is value for key, value in state.items())
    assert [[v.data_ptr() for v in other.state[p].values()] for p in before] == pointers
    assert_same([s for _, s in snapshot(other)], [s for _, s in snapshot(opt)])
    loaded = snapshot(other)
    for state in saved["state"].values():
        for value in state.values():
            value.fill_(7)
    assert_same(snapshot(other), loaded)


def test_the_live_state_is_what_the_step_uses() -> None:
    """The tensors in `opt.state` are not copies: what is written there changes the next step."""
    _, opt, _, other = pair(3)
    other.load_state_dict(opt.state_dict())
    first = all_params(other)[0]
    for key, value in other.state[first].items():
        if key.startswith("X0"):
            value.mul_(-1)
    train(opt, 1, 3)
    train(other, 1, 3)
    ours, theirs = snapshot(other), snapshot(opt)
    assert not torch.equal(ours[0][0], theirs[0][0])
    assert_same(ours[2:], theirs[2:])


def test_file_holds_every_number_once() -> None:
    """Blocks are views of larger memory; the file is no larger than the state all the same."""
    model = nn.Linear(64, 256)
    opt = lather.Shampoo(model.parameters(), max_preconditioner_dim=32)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    views = [v for state in opt.state.values() for v in state.values()]
    assert buffer.tell() < 1.2 * sum(v.nbytes for v in views) + 500 * len(views)


def test_lists_for_tuples() -> None:
    """What a format without tuples makes of the groups."""
    _, opt, _, fresh = pair(4, betas=(0.8, 0.9), exponent={2: 0.5})
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group["betas"] = list(group["betas"])
        group["exponent"] = [list(item) for item in group["exponent"]]
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["betas"] == (0.8, 0.9)
    train(opt, 5, 4)
    train(fresh, 5, 4)
    assert_same(snapshot(fresh), snapshot(opt))


@pytest.mark.parametrize("refresh", ["together", "staggered"])
def test_resume_with_a_frozen_parameter(refresh: str) -> None:
    """Frozen at the time of the checkpoint, thawed later: it continues where it was, and so do the others."""
    model, opt, fresh_model, fresh = pair(5, refresh=refresh)
    pairs = ((model, opt), (fresh_model, fresh))
    for m, _ in pairs:
        m.weight.requires_grad_(False)
        m.weight.grad = None
    fresh.load_state_dict(through_file(opt.state_dict()))
    for m, o in pairs:
        for t in range(5, 10):
            set_grads(m.parameters(), t)
            m.weight.grad = None
            o.step()
        m.weight.requires_grad_(True)
        train(o, 5, 10)
    assert opt.state[model.weight]["step"] == 10
    assert_same(snapshot(fresh), snapshot(opt))


def test_several_groups() -> None:
    def make() -> tuple[Model, lather.Shampoo]:
        model = Model()
        first, *rest = model.named_parameters()
        groups = [{"params": [first], "lr": 0.5, "graft": "sgd"}, {"params": rest, "momentum": 0.9}]
        return model, lather.Shampoo(groups, **FAST)

    (model, opt), (fresh_model, fresh) = make(), make()
    train(opt, 4)
    fresh_model.load_state_dict(model.state_dict())
    fresh.load_state_dict(through_file(opt.state_dict()))
    train(opt, 5, 4)
    train(fresh, 5, 4)
    assert_same(snapshot(fresh), snapshot(opt))


def test_saving_before_the_first_step() -> None:
    _, opt, _, fresh = pair(0, momentum=0.9)
    saved = through_file(opt.state_dict())
    assert set(saved["state"]) == set(range(len(SHAPES)))
    fresh.load_state_dict(saved)
    train(opt, 5)
    train(fresh, 5)
    assert_same(snapshot(fresh), snapshot(opt))


# One parameter's state, and whose it is.


def size_of_file(saved: Any) -> int:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    return buffer.tell()


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"averaging": "schedule_free", "betas": (0.0, 0.9)}], ids=str)
def test_the_state_of_one_parameter_is_saved_alone(options: dict[str, Any]) -> None:
    """Not with the bank that it lies in. A checkpoint still shares memory with the optimizer."""
    params = [nn.Parameter(torch.randn(32, 32)) for _ in range(40)]
    opt = lather.Shampoo(params, max_preconditioner_dim=16, **options)
    train(opt, 3)
    saved = opt.state_dict()["state"]
    for entry in (saved[0], saved[17], {0: saved[39]}, [saved[5]["L0.1"]], [saved[5]["step"]]):
        values = list(torch.utils._pytree.tree_leaves(entry))
        assert size_of_file(entry) < sum(v.nbytes for v in values) + 400 * len(values) + 2000
    for p, entry in zip(params, saved.values(), strict=True):
        assert all(entry[k].data_ptr() == v.data_ptr() for k, v in opt.state[p].items() if k != "y")
        assert_same({k: v for k, v in entry.items() if k != "y"}, {k: v for k, v in opt.state[p].items() if k != "y"})
    views = [v for entry in saved.values() for v in entry.values()]
    assert size_of_file(opt.state_dict()) < sum(v.nbytes for v in views) + 500 * len(views) + 10_000


def test_a_saved_state_outlives_the_optimizer() -> None:
    _, opt, _, fresh = pair(4)
    saved, copied = opt.state_dict(), copy.deepcopy(opt.state_dict())
    del opt
    gc.collect()
    assert_same(saved["state"], copied["state"])
    fresh.load_state_dict(saved)


def named(*names: str, values: dict[str, Tensor] | None = None, **options: Any) -> lather.Shampoo:
    """An optimizer of equal shapes in this order, or in these param groups, which are separated by "|"."""
    values = values or {name: torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abcd")}
    groups: list[Any] = [{"params": []}]
    for name in names:
        if name == "|":
            groups.append({"params": []})
        else:
            groups[-1]["params"].append((name, nn.Parameter(values[name[-1]].clone())))
    return lather.Shampoo(groups, lr=0.01, **FAST | options)


def by_name(opt: lather.Shampoo) -> dict[str, Any]:
    return {name[-1]: found for name, found in zip(names_of(opt), snapshot(opt), strict=True)}


def names_of(opt: lather.Shampoo) -> list[str]:
    return [name for group in opt.param_groups for name in group["param_names"]]


def train_by_name(opt: lather.Shampoo, steps: int, start: int = 0) -> None:
    for t in range(start, start + steps):
        for name, p in zip(names_of(opt), all_params(opt), strict=True):
            w = p.detach()
            p.grad = (w + 0.1 * t).sin() * (1 + "abcd".index(name[-1]))
        opt.step()


WRAPPED = ("module.a", "module.b", "module.c", "module.d")
ORDERS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("a", "b"), ("b", "a")),
    (("a", "b", "c", "d"), ("d", "b", "a", "c")),
    (("a", "b", "|", "c", "d"), ("b", "a", "|", "d", "c")),
    (("a", "b", "c", "d"), WRAPPED[::-1]),
    (WRAPPED, ("b", "a", "d", "c")),
    (("module.module.a", "module.module.b"), ("module.b", "module.a")),
    (("_orig_mod.a", "_orig_mod.module.b"), ("module.b", "a")),
]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("before", "after"), ORDERS, ids=str)
def test_parameters_are_found_by_name(before: tuple[str, ...], after: tuple[str, ...], momentum: float) -> None:
    """Their order in a param group, and the names that torch's wrappers add, do not matter."""
    opt = named(*before, momentum=momentum)
    train_by_name(opt, 4)
    other = named(*after, values={name: w for name, (w, _) in by_name(opt).items()}, momentum=momentum)
    other.load_state_dict(through_file(opt.state_dict()))
    assert names_of(other) == [name for name in after if name != "|"]
    assert_same(by_name(other), by_name(opt))
    train_by_name(opt, 4, 4)
    train_by_name(other, 4, 4)
    assert_same(by_name(other), by_name(opt))


OTHERS: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    (("a", "b"), ("a", "c"), "param group 0 .* 'b' .*the optimizer has 'c'"),
    (("a", "b"), ("c", "d"), "param group 0 .* 'a', 'b' .*the optimizer has 'c', 'd'"),
    (("a", "b", "|", "c", "d"), ("a", "c", "|", "b", "d"), "param group 0 .* 'b' .*the optimizer has 'c'.*param group 1"),
    (("a", "|", "b"), ("b", "|", "a"), "param group 0 .* 'a' .*the optimizer has 'b'.*param group 1"),
]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("before", "after", "words"), OTHERS, ids=str)
def test_other_names_are_refused(before: tuple[str, ...], after: tuple[str, ...], words: str, steps: int) -> None:
    """And the way out is told: without names, a checkpoint is loaded by position."""
    opt, other = named(*before), named(*after)
    train_by_name(opt, 4)
    train_by_name(other, steps)
    saved, kept = opt.state_dict(), snapshot(other)
    with pytest.raises(ValueError, match=f"{words}.*'param_names'"):
        other.load_state_dict(saved)
    assert_same(snapshot(other), kept)
    for group in saved["param_groups"]:
        del group["param_names"]
    other.load_state_dict(saved)
    assert_same([state for _, state in snapshot(other)], [state for _, state in snapshot(opt)])


def test_without_names_the_position_counts() -> None:
    opt = named("a", "b")
    train_by_name(opt, 4)
    other = lather.Shampoo([nn.Parameter(w) for w, _ in snapshot(opt)], lr=0.01, **FAST)
    other.load_state_dict(opt.state_dict())
    assert_same(snapshot(other), snapshot(opt))
    back = named("b", "a")
    unnamed = other.state_dict()
    for group in unnamed["param_groups"]:
        group.pop("param_names", None)
    back.load_state_dict(unnamed)
    assert_same([state for _, state in snapshot(back)], [state for _, state in snapshot(opt)])
    assert names_of(back) == ["b", "a"]


@pytest.mark.parametrize("how", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
def test_another_order_through_torchs_api(how: dict[str, Any]) -> None:
    """It finds parameters by name itself, and leaves the names of the file in the groups."""
    model, other = nn.Module(), nn.Module()
    opt = named("a", "b")
    for name, p in zip("ab", all_params(opt), strict=True):
        model.register_parameter(name, p)
    train_by_name(opt, 4)
    fresh = named("b", "a", values={name: w for name, (w, _) in by_name(opt).items()})
    for name, p in zip("ba", all_params(fresh), strict=True):
        other.register_parameter(name, p)
    options = api.StateDictOptions(**how)
    api.set_optimizer_state_dict(other, fresh, api.get_optimizer_state_dict(model, opt, options=options), options=options)
    assert_same(by_name(fresh), by_name(opt))
    assert names_of(fresh) == ["b", "a"]


@pytest.mark.parametrize("make", [lather.Shampoo, lather.from_adamw, lather.muon])
def test_all_parameters_frozen(make: Callable[..., lather.Shampoo]) -> None:
    """There is nothing to do, and everything works."""
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).requires_grad_(False)
    opt = make(model, lr=0.1)
    for _ in range(2):
        assert opt.plan().params == [] and str(opt.plan())
        opt.step()
        opt.consolidate_state_dict()
        opt.load_state_dict(through_file(opt.state_dict()))
        assert not opt.state and not opt.health()
    model.requires_grad_(True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    assert len(opt.state) == len(opt.plan().params) == 4


# torch.distributed.checkpoint in one process.

API_OPTIONS = {
    "nested": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full, offloaded": {"full_state_dict": True, "cpu_offload": True},
}
API_CASES = [{"momentum": 0.9, "root": "track", "exponent": {2: 0.3}}, {"refresh": "staggered", "graft": "sgd"}]


@pytest.mark.parametrize("options", API_CASES, ids=["momentum", "staggered"])
@pytest.mark.parametrize("how", API_OPTIONS)
def test_state_dict_api(how: str, options: dict[str, Any]) -> None:
    chosen = api.StateDictOptions(**API_OPTIONS[how])
    model, opt, fresh_model, fresh = pair(4, torch.bfloat16, **options)
    saved = api.get_optimizer_state_dict(model, opt, options=chosen)
    saved = through_file(saved)
    api.set_optimizer_state_dict(fresh_model, fresh, saved, options=chosen)
    assert_same(snapshot(fresh), snapshot(opt))
    train(opt, 6, 4)
    train(fresh, 6, 4)
    assert_same(snapshot(fresh), snapshot(opt))


def save_and_load(
    saved: Any, fresh_model: nn.Module, fresh: lather.Shampoo, folder: Path, chosen: api.StateDictOptions, **options: Any
) -> None:
    """Through the files of torch.distributed.checkpoint."""
    dcp.save({"opt": saved}, checkpoint_id=folder, no_dist=True)
    loaded = {"opt": api.get_optimizer_state_dict(fresh_model, fresh, options=chosen)}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True, planner=dcp.DefaultLoadPlanner(**options))
    api.set_optimizer_state_dict(fresh_model, fresh, loaded["opt"], options=chosen)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint(flat: bool, tmp_path: Path) -> None:
    chosen = api.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, opt, fresh_model, fresh = pair(4, momentum=0.9, root="track")
    save_and_load(api.get_optimizer_state_dict(model, opt, options=chosen), fresh_model, fresh, tmp_path, chosen)
    assert_same(snapshot(fresh), snapshot(opt))
    train(opt, 15, 4)
    train(fresh, 15, 4)
    assert_same(snapshot(fresh), snapshot(opt))


def wide(**options: Any) -> tuple[nn.Module, lather.Shampoo]:
    """51 is cut into 32 and 19, or nearly equally into 26 and 25."""
    model = nn.Linear(6, 51)
    return model, lather.Shampoo(model.named_parameters(), max_preconditioner_dim=40, precondition_frequency=3, **options)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("multiple", [16, 1])
@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint_of_a_dimension_that_does_not_divide(
    flat: bool, version: int, multiple: int, tmp_path: Path
) -> None:
    """The files say how dimensions are cut. Those of version 1 do not: they need ``block_multiple=1`` and a partial load."""
    chosen = api.StateDictOptions(flatten_optimizer_state_dict=flat)
    (model, opt), (fresh_model, fresh) = wide(block_multiple=multiple), wide(block_multiple=multiple)
    train(opt, 7)
    fresh_model.load_state_dict(model.state_dict())
    saved = api.get_optimizer_state_dict(model, opt, options=chosen)
    if version == 1:
        for group in (saved,) if flat else saved["param_groups"]:
            for name in [name for name in group if "block_multiple" in name]:
                del group[name]
        with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: .*block_multiple"):
            save_and_load(saved, fresh_model, fresh, tmp_path / "strict", chosen)
    save_and_load(saved, fresh_model, fresh, tmp_path / "files", chosen, allow_partial_load=version == 1)
    assert [len(fresh.state[fresh_model.weight][f"L0.{i}"]) for i in (0, 1)] == ([32, 19] if multiple == 16 else [26, 25])
    assert fresh.param_groups[0]["block_multiple"] == multiple
    assert_same(snapshot(fresh), snapshot(opt))
    train(opt, 6, 7)
    train(fresh, 6, 7)
    assert_same(snapshot(fresh), snapshot(opt))


def test_state_dict_api_with_a_frozen_parameter() -> None:
    model, fresh_model = Model(), Model()
    for m in (model, fresh_model):
        m.twin.requires_grad_(False)
    opts = [lather.Shampoo(m.named_parameters(), **FAST) for m in (model, fresh_model)]
    for t in range(4):
        set_grads(model.parameters(), t)
        model.twin.grad = None
        opts[0].step()
    fresh_model.load_state_dict(model.state_dict())
    saved = api.get_optimizer_state_dict(model, opts[0])
    assert "twin" not in saved["state"]
    api.set_optimizer_state_dict(fresh_model, opts[1], saved)
    assert_same(snapshot(opts[1]), snapshot(opts[0]))


# The probe.


def probe(opt: lather.Shampoo) -> None:
    """How torch's checkpoint code allocates the state of a fresh optimizer."""
    rates = [group["lr"] for group in opt.param_groups]
    for group in opt.param_groups:
        group["lr"] = torch.zeros(()) if isinstance(group["lr"], Tensor) else 0.0
    for p in all_params(opt):
        p.grad = torch.zeros_like(p)
    opt.step()
    for group, lr in zip(opt.param_groups, rates, strict=True):
        group["lr"] = lr
    opt.zero_grad()


PROBES: dict[str, Callable[[nn.Module, lather.Shampoo], Any]] = {
    "by hand": lambda model, opt: probe(opt),
    "by torch": lambda model, opt: api.get_optimizer_state_dict(model, opt),
    "by torch, flat": lambda model, opt: api.get_optimizer_state_dict(
        model, opt, options=api.StateDictOptions(flatten_optimizer_state_dict=True)
    ),
}


@pytest.mark.parametrize("how", PROBES)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_probe_allocates_and_changes_nothing(how: str, lr: Any) -> None:
    models = [Model(), Model()]
    options = FAST | {"momentum": 0.9, "weight_decay_mode": "independent", "lr": lr}
    probed, plain = (lather.Shampoo(m.named_parameters(), **options) for m in models)
    PROBES[how](models[0], probed)
    assert len(probed.state) == len(SHAPES)
    assert [state["step"].item() for state in probed.state.values()] == [0.0] * len(SHAPES)
    assert_same(list(models[0].parameters()), list(models[1].parameters()))
    assert options_of(probed) == options_of(plain)
    plain.state_dict()
    assert_same(snapshot(probed), snapshot(plain))
    train(probed, 8)
    train(plain, 8)
    assert_same(snapshot(probed), snapshot(plain))


def test_a_step_without_learning_rate_counts() -> None:
    model = Model()
    opt = lather.Shampoo(model.parameters(), lr=0.0, **FAST)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    assert [state["step"].item() for state in opt.state.values()] == [1.0] * len(SHAPES)
    assert_same([p.detach() for p in model.parameters()], before)
    assert opt.state[model.weight]["L0.0"].any()


def test_zero_gradients_with_a_learning_rate_count() -> None:
    model = Model()
    opt = lather.Shampoo(model.parameters(), lr=0.1, **FAST)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = model.weight.detach().clone()
    opt.step()
    assert opt.state[model.weight]["step"] == 1
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.1 * 0.1))


# Loads that are refused.


def without(*keys: Any) -> Callable[[Any], Any]:
    def change(saved: Any) -> Any:
        *path, last = keys
        for key in path:
            saved = saved[key]
        del saved[last]

    return change


def with_value(value: Any, *keys: Any) -> Callable[[Any], Any]:
    def change(saved: Any) -> Any:
        *path, last = keys
        for key in path:
            saved = saved[key]
        saved[last] = value

    return change


def both(*changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda saved: [change(saved) for change in changes] and None


def doubled(saved: Any) -> None:
    saved["param_groups"].append(saved["param_groups"][0])


def shortened(saved: Any) -> None:
    saved["param_groups"][0]["params"].pop()


def wrapped(saved: Any) -> None:
    """The whole checkpoint instead of the optimizer's part of it."""
    saved["optimizer"] = dict(saved)
    del saved["state"], saved["param_groups"]


GROUP = ("param_groups", 0)
READ = "versions 1 to 3"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "missing block": (without("state", 0, "L0.1"), "L0.1.* weight"),
    "missing parameter": (without("state", 1), "step.* twin"),
    "missing momentum": (without("state", 3, "momentum"), "momentum.* bias"),
    "extra key": (with_value(torch.ones(2), "state", 0, "exp_avg"), "exp_avg.* weight"),
    "extra block": (with_value(torch.ones(3, 3), "state", 0, "L0.9"), r"L0\.9.* weight"),
    "wrong shape": (with_value(torch.ones(2, 2), "state", 0, "X1.2"), r"X1\.2.* weight.*\(2, 2\)"),
    "wrong shape late": (with_value(torch.ones(2, 2), "state", 3, "m.0"), r"m\.0.* bias"),
    "no tensor": (with_value(3.0, "state", 0, "L0.0"), r"L0\.0.* weight.* float"),
    "more groups": (doubled, r"\[6, 6\].*\[6\]"),
    "fewer parameters": (shortened, r"\[5\].*\[6\]"),
    "another format": (wrapped, "param_groups.*optimizer|optimizer.*param_groups"),
    "missing option": (without(*GROUP, "graft_eps"), "graft_eps"),
    "bad option": (with_value(-1.0, *GROUP, "lr"), "lr=-1.0"),
    "unknown root": (with_value("eigg", *GROUP, "root"), "eigg.* 'eigh'"),
    "other root": (with_value("track", *GROUP, "root"), "Q0"),
    "no filter": (with_value((0.0, 0.999), *GROUP, "betas"), r"m\.0"),
    "no momentum": (with_value(0.0, *GROUP, "momentum"), "momentum"),
    "newer version": (with_value(4, "lather_version"), rf"version 4,.* {READ}; update lather"),
    "version that is no number": (with_value("1.0", "lather_version"), rf"version '1\.0',.* {READ}; update lather"),
    "version that is nothing": (with_value(None, "lather_version"), rf"version None,.* {READ}; update lather"),
    "newer version in a group": (
        both(without("lather_version"), with_value(7, *GROUP, "lather_version")),
        rf"version 7,.* {READ}; update lather",
    ),
    "newer version in a group only": (with_value("two", *GROUP, "lather_version"), rf"version 'two',.* {READ}"),
    "no filter and cut short": (both(with_value((0.0, 0.999), *GROUP, "betas"), without("state", 0)), "weight"),
}


@pytest.mark.parametrize(("name", "steps"), [(name, 4) for name in REFUSED] + [(name, 0) for name in [*REFUSED][::3]])
def test_refused(name: str, steps: int) -> None:
    """A clear error, and nothing changed: the optimizer goes on as if nothing had been loaded."""
    change, message = REFUSED[name]
    _, opt, model, live = pair(2, momentum=0.9, root="eigh")
    twin_model = copy.deepcopy(model)
    twin = lather.Shampoo(twin_model.named_parameters(), lr=3.0, eps=0.5, **FAST, momentum=0.9, root="eigh")
    saved = copy.deepcopy(opt.state_dict())
    change(saved)
    train(live, steps)
    train(twin, steps)
    before, groups = snapshot(live), options_of(live)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        live.load_state_dict(saved)
    if steps:
        assert_same(snapshot(live), before)
    assert options_of(live) == groups
    train(live, 3, steps)
    train(twin, 3, steps)
    assert_same(snapshot(live), snapshot(twin))


STRUCTURE: dict[str, Any] = {
    "max_preconditioner_dim": 3,
    "graft": "sgd",
    "merge_dims": False,
    "large_dim": "diagonal",
    "batch_dims": 1,
    "precondition_1d": True,
    "state_dtype": "bfloat16",
    "root_dtype": "bfloat16",
    "filter_dtype": "bfloat16",
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_another_structure_is_refused(name: str) -> None:
    shapes = [p for n, p in Model().named_parameters() if p.dim() >= 1]
    theirs = lather.Shampoo([nn.Parameter(p.detach().clone()) for p in shapes], **FAST | {name: STRUCTURE[name]})
    live = lather.Shampoo(shapes, **FAST)
    train(theirs, 4)
    train(live, 4)
    before, groups = snapshot(live), options_of(live)
    with pytest.raises(ValueError, match=f"{name}={STRUCTURE[name]!r}"):
        live.load_state_dict(theirs.state_dict())
    assert_same(snapshot(live), before)
    assert options_of(live) == groups
    train(live, 1, 4)


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.SGD])
def test_another_optimizer_is_refused(other: type[torch.optim.Optimizer]) -> None:
    theirs = other(Model().parameters(), lr=0.1)
    live = lather.Shampoo(Model().parameters(), **FAST)
    train(theirs, 2)
    train(live, 2)
    before, groups = snapshot(live), options_of(live)
    with pytest.raises(ValueError, match="another optimizer"):
        live.load_state_dict(theirs.state_dict())
    assert_same(snapshot(live), before)
    assert options_of(live) == groups


def test_a_checkpoint_without_steps_resets_them() -> None:
    """Loading replaces all of the state, also by an earlier one."""
    _, opt, _, live = pair(0, momentum=0.9)
    train(live, 7)
    live.load_state_dict(opt.state_dict())
    assert_same([s for _, s in snapshot(live)], [s for _, s in snapshot(opt)])
    assert math.isclose(live.param_groups[0]["eps"], 1e-4)


# Versions.


def test_a_checkpoint_has_a_version() -> None:
    _, opt, _, _ = pair(2)
    saved = through_file(opt.state_dict())
    assert saved["lather_version"] == checkpoint.VERSION == 1 + len(checkpoint.UPGRADES) == 3
    assert saved.keys() == {"state", "param_groups", "lather_version"}


def test_a_checkpoint_without_a_version_is_the_first() -> None:
    """Also one of torch.distributed.checkpoint, which keeps state and param groups only."""
    model, opt, fresh_model, fresh = pair(4)
    saved = through_file(opt.state_dict())
    del saved["lather_version"]
    fresh.load_state_dict(saved)
    assert_same(snapshot(fresh), snapshot(opt))
    by_torch = api.get_optimizer_state_dict(model, opt)
    assert by_torch.keys() == {"state", "param_groups"}
    train(fresh, 1)
    api.set_optimizer_state_dict(fresh_model, fresh, by_torch)
    assert_same([s for _, s in snapshot(fresh)], [s for _, s in snapshot(opt)])


def test_a_version_in_param_groups_is_read_and_not_kept() -> None:
    _, opt, _, fresh = pair(4)
    saved = opt.state_dict()
    del saved["lather_version"]
    saved["param_groups"][0]["lather_version"] = 1
    fresh.load_state_dict(saved)
    assert_same(snapshot(fresh), snapshot(opt))
    assert "lather_version" not in fresh.param_groups[0] and saved["param_groups"][0]["lather_version"] == 1


def test_an_option_that_is_lacking_has_the_value_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither the default of today nor what the optimizer was made with."""
    _, opt, _, fresh = pair(4, graft_eps=0.25)
    saved = opt.state_dict()
    del saved["param_groups"][0]["graft_eps"]
    monkeypatch.setitem(OPTIONS, "graft_eps", replace(OPTIONS["graft_eps"], before=0.25))
    fresh.param_groups[0]["graft_eps"] = 0.5
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["graft_eps"] == 0.25 and "graft_eps" not in saved["param_groups"][0]
    train(opt, 3, 4)
    train(fresh, 3, 4)
    assert_same(snapshot(fresh), snapshot(opt))


def test_an_option_that_is_lacking_decides_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "root_dtype", replace(OPTIONS["root_dtype"], before="float32"))
    _, opt, _, fresh = pair(4, root_dtype="float32")
    saved = opt.state_dict()
    del saved["param_groups"][0]["root_dtype"]
    fresh.load_state_dict(saved)
    assert_same(snapshot(fresh), snapshot(opt))
    _, _, _, rounded = pair(4, root_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"saved with root_dtype='float32' but .* root_dtype='bfloat16'.*construct it with"):
        rounded.load_state_dict(saved)


@pytest.mark.parametrize("kinds", [("full", "packed"), ("packed", "full")], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"large_dim": "diagonal", "precondition_1d": True}, {"refresh_delay": 2}, {"preconditioner": "soap", "graft": None}],
    ids=str,
)
def test_packed_or_not_it_can_be_loaded(kinds: tuple[str, str], options: dict[str, Any]) -> None:
    """An optimizer keeps factors and roots in its own form, and goes on with the same bits. The file stays as it is."""
    (_, opt, _, _), (_, _, _, other) = (pair(4, factors=kind, **options) for kind in kinds)
    saved = opt.state_dict()
    before = copy.deepcopy(saved)
    shapes = {key: value.shape for state in other.state_dict()["state"].values() for key, value in state.items()}
    other.load_state_dict(saved)
    assert other.param_groups[0]["factors"] == kinds[1]
    assert {key: value.shape for state in other.state.values() for key, value in state.items()} == shapes
    torch.testing.assert_close(saved["state"], before["state"], rtol=0, atol=0)
    assert saved["param_groups"] == before["param_groups"]
    train(opt, 6, 4)
    train(other, 6, 4)
    assert all(map(torch.equal, all_params(other), all_params(opt)))
    back = pair(4, factors=kinds[0], **options)[3]
    back.load_state_dict(through_file(other.state_dict()))
    assert_same([state for _, state in snapshot(back)], [state for _, state in snapshot(opt)])


def test_a_triangle_of_another_size_does_not_fit() -> None:
    _, opt, _, fresh = pair(4, factors="packed")
    saved = opt.state_dict()
    entry = next(entry for entry in saved["state"].values() if "L0.0" in entry)
    entry["L0.0"] = entry["L0.0"][:, :-1].clone()
    with pytest.raises(ValueError, match="another shape when it was saved"):
        fresh.load_state_dict(saved)


def renamed(state: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    """An upgrade: what was called `velocity` is called `momentum`, and `nu` is called `graft_eps`."""
    for entry in state.values():
        entry["momentum"] = entry.pop("velocity")
    for group in groups:
        group["graft_eps"] = group.pop("nu")


def doubled_eps(state: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    for group in groups:
        group["graft_eps"] *= 2


def as_first_version(saved: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as a version would have written it that both upgrades come after."""
    for entry in saved["state"].values():
        entry["velocity"] = entry.pop("momentum")
    for group in saved["param_groups"]:
        group["nu"] = group.pop("graft_eps") / 2
    return saved


@pytest.mark.parametrize("where", ["nowhere", "top", "groups"])
def test_older_versions_are_upgraded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all upgrades that come after them, in order. The file itself does not change."""
    _, opt, _, fresh = pair(4, momentum=0.9, graft_eps=0.5)
    saved = as_first_version(through_file(opt.state_dict()))
    del saved["lather_version"]
    if where != "nowhere":
        (saved if where == "top" else saved["param_groups"][0])["lather_version"] = 1
    kept = copy.deepcopy(saved)
    monkeypatch.setattr(checkpoint, "UPGRADES", (renamed, doubled_eps))
    monkeypatch.setattr(checkpoint, "VERSION", 3)
    fresh.load_state_dict(saved)
    assert_same(snapshot(fresh), snapshot(opt))
    assert options_of(fresh) == options_of(opt)
    assert_same(saved["state"], kept["state"])
    assert saved["param_groups"] == kept["param_groups"]


def test_only_later_upgrades_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "UPGRADES", (renamed, doubled_eps))
    monkeypatch.setattr(checkpoint, "VERSION", 3)
    _, opt, _, fresh = pair(4, momentum=0.9, graft_eps=0.5)
    saved = opt.state_dict()
    assert saved["lather_version"] == 3
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["graft_eps"] == 0.5
    saved["lather_version"] = 2
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["graft_eps"] == 1.0
    assert_same(snapshot(fresh), snapshot(opt))
    with pytest.raises(ValueError, match=r"version 4, .* versions 1 to 3; update lather"):
        fresh.load_state_dict(saved | {"lather_version": 4})


def test_flipped_bits_are_found_in_a_file(tmp_path: Path) -> None:
    """As docs/checkpoints.md says. Torch itself reads them in silence."""
    opt = lather.Shampoo(Model().named_parameters(), **FAST)
    train(opt, 3)
    path = tmp_path / "saved.pt"
    torch.save(opt.state_dict(), path)
    records = [record for record in zipfile.ZipFile(path).infolist() if "/data/" in record.filename and record.file_size > 16]
    content = path.read_bytes()
    assert zipfile.ZipFile(path).testzip() is None and len(records) > 10
    for record in records:
        flipped = bytearray(content)
        flipped[content.index(zipfile.ZipFile(path).read(record), record.header_offset)] ^= 4
        torch.load(io.BytesIO(flipped), weights_only=True)
        assert zipfile.ZipFile(io.BytesIO(flipped)).testzip() == record.filename
