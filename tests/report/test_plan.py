"""The plan: known before the first step, and true to the byte."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lather

pytestmark = pytest.mark.filterwarnings("ignore:a parameter of shape")  # they come without a model

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (40, 12),
    "weight": (16, 16),
    "twin": (16, 16),
    "conv": (8, 4, 3, 3),
    "experts": (3, 10, 6),
    "norm": (16,),
    "column": (9, 1),
    "scale": (),
    "none": (0, 4),
}


class Allocations(TorchDispatchMode):
    """Counts the bytes of every tensor that is made outside the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type != "meta")
        return out


@contextmanager
def no_allocation() -> Iterator[None]:
    with Allocations() as seen:
        yield
    assert seen.bytes == 0


def parameters(shapes: Mapping[str, Any] = SHAPES, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in shapes.items()}


def step(opt: lather.Shampoo) -> None:
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    opt.step()


def state_tensors(opt: lather.Shampoo) -> list[Tensor]:
    return [value for state in opt.state.values() for key, value in state.items() if key != "step"]


def memory_bytes(tensors: list[Tensor]) -> int:
    """Of the storages behind them, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


MIX: dict[str, dict[str, Any]] = {
    "default": {},
    "blocked": {"max_preconditioner_dim": 5},
    "basis": {"root": "track", "max_preconditioner_dim": 12},
    "momentum": {"momentum": 0.9, "betas": (0.0, 0.99), "root": lather.Track(iterations=2)},
    "half": {"state_dtype": torch.bfloat16, "momentum": 0.9, "root": "track"},
    "packed": {"factors": "packed", "root_dtype": "bfloat16", "max_preconditioner_dim": 12},
    "packed diagonal": {"factors": "packed", "state_dtype": "bfloat16", "large_dim": "diagonal", "merge_dims": False},
    "double": {"state_dtype": "float64", "graft": "rmsprop", "root": "newton"},
    "diagonal": {"large_dim": "diagonal", "max_preconditioner_dim": 10, "graft": "sgd", "merge_dims": False},
    "adagrad": {"large_dim": "adagrad", "max_preconditioner_dim": 10, "graft": None},
    "soap": {"preconditioner": "soap", "graft": None, "max_preconditioner_dim": 12},
    "soap, diagonal": {"preconditioner": "soap", "large_dim": "diagonal", "merge_dims": False, "max_preconditioner_dim": 10},
    "vectors": {"precondition_1d": True, "graft": "adagrad", "exponent": {1: 0.25, 2: 0.5}},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIX)
def test_memory_is_exact(name: str, dtype: torch.dtype) -> None:
    opt = lather.Shampoo(parameters(dtype=dtype).items(), **MIX[name])
    report = opt.plan()
    step(opt)
    tensors = state_tensors(opt)
    assert report.state_bytes == sum(t.nbytes for t in tensors) == memory_bytes(tensors)
    kinds = {kind: size for kind, size in report.memory.items() if kind != "total"}
    assert sum(kinds.values()) == report.memory["total"] == report.state_bytes
    prefixes = {"L": "factors", "X": "roots", "Q": "basis", "m.": "filtered gradient", "v": "graft moment"}
    for prefix, kind in (prefixes | {"momentum": "momentum", "w": "moment in the basis"}).items():
        held = [v for s in opt.state.values() for k, v in s.items() if k.startswith(prefix)]
        assert kinds.get(kind, 0) == sum(v.nbytes for v in held)
    assert ("basis" in kinds) == ("track" in str(opt.param_groups[0]["root"]) or name.startswith("soap"))
    assert opt.plan().to_dict() == report.to_dict()


def test_memory_over_groups() -> None:
    params = list(parameters().values())
    groups = [{"params": params[:2], **MIX["half"]}, {"params": params[2:5]}, {"params": params[5:], "graft": "sgd"}]
    opt = lather.Shampoo(groups, momentum=0.5)
    report = opt.plan()
    step(opt)
    assert report.state_bytes == memory_bytes(state_tensors(opt))
    assert {row.group for row in report.banks} == {0, 1, 2}


def test_nothing_to_do() -> None:
    report = lather.Shampoo([{"params": []}]).plan()
    assert (report.params, report.state_bytes, report.step_flops) == ([], 0, 0)
    assert report.to_dict()["memory"] == {"total": 0} and str(report)


def test_ranks_that_share_the_work_are_a_table() -> None:
    assert "C(N)" in str(lather.plan(SHAPES, ranks=2)) and "C(N)" not in str(lather.plan(SHAPES))


def test_planning_allocates_nothing() -> None:
    params = parameters()
    with no_allocation():
        opt = lather.Shampoo(params.items(), momentum=0.9, root="track")
        report = opt.plan()
        text = str(report)
        report.to_dict()
        lather.plan({"huge": (10**6, 10**6)}, max_preconditioner_dim=math.inf)
    assert text
    assert len(opt.state) == 0
    assert all(p.grad is None for p in params.values())
    with pytest.raises(AssertionError), no_allocation():
        torch.ones(3)


@pytest.mark.parametrize("name", MIX)
def test_from_shapes_alone(name: str) -> None:
    """The same report for shapes, for parameters with names and for parameters without."""
    of_shapes = lather.plan(SHAPES, **MIX[name]).to_dict()
    named = lather.Shampoo(parameters().items(), **MIX[name])
    assert named.plan().to_dict() == of_shapes
    unnamed = lather.Shampoo(parameters().values(), **MIX[name]).plan().to_dict()
    assert [row.pop("name") for row in of_shapes["params"]] == list(SHAPES)
    names = [row.pop("name") for row in unnamed["params"]]
    assert len(set(names)) == len(SHAPES)
    assert unnamed == of_shapes
    step(named)
    assert named.plan().state_bytes == of_shapes["memory"]["total"]


@pytest.mark.parametrize("name", MIX)
def test_is_plain_data(name: str) -> None:
    data = lather.plan(SHAPES, **MIX[name]).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False))["memory"] == data["memory"]


def test_says_what_and_why() -> None:
    report = lather.plan(SHAPES, max_preconditioner_dim=12, momentum=0.9)
    rows = {row.name: row for row in report.params}
    assert {name: (row.method, row.blocks) for name, row in rows.items()} == {
        "embedding": ("shampoo", 4),
        "weight": ("shampoo", 4),
        "twin": ("shampoo", 4),
        "conv": ("shampoo", 1),
        "experts": ("shampoo", 1),
        "norm": ("adam", 1),
        "column": ("adam", 1),
        "scale": ("adam", 1),
        "none": ("nothing", 0),
    }
    assert rows["embedding"].block_shapes == ((10, 12),)
    assert rows["conv"].block_shapes == ((8, 4, 9),)
    assert all(row.reason for row in report.params if row.method != "shampoo")
    assert {(bank.shape, bank.slots) for bank in report.banks if bank.modes} == {
        ((10, 12), 4),
        ((8, 8), 8),
        ((8, 4, 9), 1),
        ((3, 10, 6), 1),
    }
    assert report.step_flops > 0
    assert report.refresh_flops > 0


def test_prints_everything() -> None:
    report = lather.plan(SHAPES, max_preconditioner_dim=12, momentum=0.9, root="track")
    text = str(report)
    for name in SHAPES:
        assert name in text
    for part in ("40 x 12", "4 of 10 x 12", "8 x 4 x 9", "track", "FLOP", "KiB"):
        assert part in text
    for row in report.params:
        assert row.reason in text
    for kind in ("factors", "roots", "basis", "filtered gradient", "graft moment", "momentum", "total"):
        assert kind in report.memory
        assert kind in text


def test_reasons() -> None:
    def reason(shape: tuple[int, ...], **options: Any) -> str:
        return lather.plan({"w": shape}, **options).params[0].reason

    assert reason((7,)) == "1-D"
    assert reason((7, 1)) == "1-D"
    assert reason(()) == "scalar"
    assert reason((1, 1)) == "scalar"
    assert reason((0, 3)) == "empty"
    assert "20 > 10" in reason((20, 3), max_preconditioner_dim=10, large_dim="adagrad")
    assert reason((7,), precondition_1d=True) == ""


@pytest.mark.parametrize("d", [8, 64])
def test_a_square_matrix_takes_six_times_its_size(d: int) -> None:
    """Two factors, two roots, the filtered gradient and the graft's moment; a solver that keeps a basis says so."""
    size = 4 * d * d
    report = lather.plan({"w": (d, d)}, max_preconditioner_dim=d)
    assert report.memory["factors"] + report.memory["roots"] <= 4 * size
    assert report.state_bytes <= 6 * size
    assert "basis" not in str(report)
    track = lather.plan({"w": (d, d)}, max_preconditioner_dim=d, root="track")
    assert track.memory["basis"] == 2 * size
    assert track.state_bytes == report.state_bytes + 2 * size
    assert "basis" in str(track)


def test_work_follows_the_options() -> None:
    def report(**options: Any) -> lather.PlanReport:
        return lather.plan({"w": (64, 64)}, **options)

    whole, cut = report(), report(max_preconditioner_dim=16)
    assert cut.refresh_flops < whole.refresh_flops
    assert cut.step_flops < whole.step_flops
    assert report(root="newton").refresh_flops != report(root="track").refresh_flops
    assert lather.plan({"w": (64,)}).refresh_flops == 0


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="'max_preconditioner_dim'"):
        lather.plan(SHAPES, max_precondition_dim=5)
    with pytest.raises(ValueError, match=r"graft='adm'.*'adam'"):
        lather.plan(SHAPES, graft="adm")
    with pytest.raises(ValueError, match=r"batch_dims=2.*norm.*\(16,\)"):
        lather.plan(SHAPES, batch_dims=2)


def test_frozen_parameters_are_left_out() -> None:
    params = parameters()
    params["twin"].requires_grad_(False)
    opt = lather.Shampoo(params.items())
    assert [row.name for row in opt.plan().params] == [name for name in SHAPES if name != "twin"]
    report = opt.plan()
    for p in params.values():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    opt.step()
    assert report.state_bytes == memory_bytes(state_tensors(opt))


@pytest.mark.parametrize("shapes", ["w", [(2, 2)], {"a": 3}, {"a": (3, -1)}, {"a": (3, 2.0)}])
def test_wrong_shapes_are_refused(shapes):
    with pytest.raises(ValueError, match="shape"):
        lather.plan(shapes)


def test_scratch_is_what_the_stacks_take():
    params = [torch.nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    opt = lather.Shampoo(params, momentum=0.9)
    assert opt.plan().scratch_bytes == 3 * 6 * 4 * 4 * 3
    assert "scratch" in repr(opt.plan())


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        ("cpu", {}, []),
        ("cpu", {"precision": "float32"}, []),
        ("cpu", {"precision": "fast"}, ["precision='fast' has no effect on cpu"]),
        ("cpu", {"root_device": "cpu"}, ["root_device='cpu' has no effect on cpu"]),
        ("mps", {"precision": "float32", "root_device": "cpu"}, ["precision='float32' has no effect on mps"]),
        ("cuda:1", {"precision": "fast", "root_device": "cpu"}, []),
    ],
)
def test_options_without_effect_on_a_device_are_noted(device: str, options: Any, words: list[str]) -> None:
    """They are accepted, for the same script may run on another."""
    report = lather.plan(SHAPES, device=device, **options)
    assert len(report.notes) == len(words) and all(word in str(report) for word in words)
    assert report.to_dict()["notes"] == report.notes
    if device == "cpu":
        assert lather.Shampoo(parameters().items(), **options).plan().notes == report.notes
