"""Routing: which options a parameter gets, by its name and by its module."""

import copy
import inspect
import io
import math
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import lather


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RmsNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.experts = nn.Parameter(torch.randn(4, width, 6))
        self.gain = nn.Parameter(torch.ones(()))


class Model(nn.Module):
    def __init__(self, tied: bool = False, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.words.weight


RULES: list[Any] = [(r"qkv\.weight", {"split": 3}), (r"experts", {"batch_dims": 1, "lr": 0.5})]


def taken(groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {group["rule"]: [name for name, _ in group["params"]] for group in groups}


def train(opt: lather.Shampoo, steps: int) -> None:
    for t in range(steps):
        for p in (p for group in opt.param_groups for p in group["params"]):
            p.grad = (p.detach() + 0.1 * t).sin() + 0.3 * p.detach()
        opt.step()


def test_rules_and_kinds() -> None:
    assert taken(lather.route(Model(), RULES)) == {
        r"rule 1: qkv\.weight": ["layers.0.qkv.weight", "layers.1.qkv.weight"],
        "rule 2: experts": ["layers.0.experts", "layers.1.experts"],
        "kind: embedding": ["words.weight"],
        "kind: head": ["head.weight"],
        "kind: norm": ["layers.0.norm.scale", "layers.1.norm.scale", "last.weight", "last.bias"],
        "kind: bias": ["layers.0.gain", "layers.0.qkv.bias", "layers.1.gain", "layers.1.qkv.bias"],
    }
    groups = lather.route(Model(), RULES)
    assert groups[0].keys() == {"params", "split", "rule"}
    assert groups[1]["batch_dims"] == 1
    assert groups[2]["preconditioner"] is None
    assert groups[4]["weight_decay"] == 0.0


def test_what_no_rule_takes_comes_first() -> None:
    groups = lather.route(Model())
    assert groups[0].keys() == {"params", "rule"}
    assert [name for name, _ in groups[0]["params"]] == [f"layers.{i}.qkv.weight" for i in range(2)]
    assert taken(lather.route(Model(), kinds=None)) == {"no rule": [name for name, _ in Model().named_parameters()]}


def test_every_parameter_once() -> None:
    for tied in (False, True):
        model = Model(tied)
        params = [p for group in lather.route(model, RULES) for _, p in group["params"]]
        assert len(params) == len(set(params)) == len(list(model.parameters()))


def test_first_match_wins() -> None:
    rules: list[Any] = [(re.compile(r"LAYERS\.0\.qkv", re.IGNORECASE), {"lr": 0.1}), (r"qkv", {"lr": 0.2})]
    groups = lather.route(Model(), rules, kinds=None)
    assert taken(groups)["rule 2: qkv"] == ["layers.1.qkv.weight", "layers.1.qkv.bias"]
    assert [group.get("lr") for group in groups] == [None, 0.1, 0.2]
    opt = lather.Shampoo(groups, lr=0.3)
    assert [group["lr"] for group in opt.param_groups] == [0.3, 0.1, 0.2]


def test_a_rule_comes_before_a_kind() -> None:
    groups = lather.route(Model(), [("words", {"lr": 0.1})])
    assert taken(groups)["rule 1: words"] == ["words.weight"]
    assert "kind: embedding" not in taken(groups)
    assert "preconditioner" not in groups[1]


def test_kinds_can_be_changed() -> None:
    groups = lather.route(Model(), kinds={"embedding": {"lr": 0.1}, "head": {}})
    found = {group["rule"]: group for group in groups}
    assert found["kind: embedding"].keys() == {"params", "lr", "rule"}
    assert found["kind: head"].keys() == {"params", "rule"}
    assert found["kind: norm"]["weight_decay"] == 0.0


def test_tied_weights() -> None:
    """They are embeddings, and rules find them by any of their names."""
    model = Model(tied=True)
    assert taken(lather.route(model))["kind: embedding"] == ["words.weight"]
    assert taken(lather.route(model, [("head", {"lr": 0.1})]))["rule 1: head"] == ["words.weight"]
    whole = Model()
    whole.head = whole.words  # type: ignore[assignment]
    assert taken(lather.route(whole, [("head", {"lr": 0.1})]))["rule 1: head"] == ["words.weight"]


def test_heads() -> None:
    """The last linear layer, if it is shaped like an embedding; a linear layer further up is none."""
    positions = nn.Sequential(nn.Embedding(50, 8), nn.Embedding(24, 8), nn.Linear(8, 24), nn.Linear(24, 8))
    assert "kind: head" not in taken(lather.route(positions))
    classifier = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Linear(8, 10))
    assert taken(lather.route(classifier)) == {
        "no rule": ["0.weight", "3.weight"],
        "kind: norm": ["1.weight", "1.bias", "2.weight", "2.bias"],
        "kind: bias": ["0.bias", "3.bias"],
    }
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(64, 20, [5, 10])
    assert set(taken(lather.route(adaptive))) == {"kind: head"}
    attention = nn.MultiheadAttention(8, 2)
    assert taken(lather.route(attention))["kind: bias"] == ["in_proj_bias", "out_proj.bias"]


class Wrapper(nn.Module):
    """As DDP: the model is its only child, of this name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when torch.compile is first used
def test_wrappers_do_not_count() -> None:
    """Rules are as for the bare model, whatever torch.compile, DDP and activation checkpointing add to names."""
    rules: list[Any] = [(r"^layers\.0\.qkv\.weight$", {"split": 3}), (r"^words", {"lr": 0.5})]
    parts = Model()
    parts.layers[0] = torch.compile(parts.layers[0])  # type: ignore[assignment]
    parts.layers[1] = checkpoint_wrapper(parts.layers[1])
    inside = Wrapper(Model())
    inside.head = nn.Linear(3, 2)  # not all of it is below
    for model in (torch.compile(Model()), Wrapper(Model()), torch.compile(Wrapper(Model())), parts):
        for given in (model, model.named_parameters()):  # type: ignore[attr-defined]
            groups = {group["rule"]: group["params"] for group in lather.route(given, rules)}
            names = [[name for name, _ in groups[f"rule {i}: {rule}"]] for i, (rule, _) in enumerate(rules, 1)]
            assert [len(some) for some in names] == [1, 1]
            assert names[0][0].endswith("qkv.weight") and names[0][0] in dict(model.named_parameters())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"nearest names are .*'module\.words\.weight'"):
        lather.route(inside, rules[1:])
    with pytest.raises(ValueError, match=r"the nearest names are 'layers\.0\.qkv\.weight'"):
        lather.route(torch.compile(Wrapper(Model())), [(r"^layers\.0\.qkw\.weight", {})])


def test_names_alone() -> None:
    groups = lather.route(Model().named_parameters(), RULES)
    assert list(taken(groups)) == ["no rule", r"rule 1: qkv\.weight", "rule 2: experts"]
    with pytest.raises(ValueError, match="pass the model itself"):
        lather.route(Model().named_parameters(), kinds={"norm": {}})


PRESETS = [lather.Shampoo, lather.from_sgd, lather.from_adagrad, lather.from_adam, lather.from_adamw, lather.low_memory]


@pytest.mark.parametrize("make", [*PRESETS, lather.soap, lather.muon], ids=lambda make: make.__name__)
def test_a_model_is_routed_by_kind(make: Any) -> None:
    model = Model()
    given, routed = make(model, lr=0.01, weight_decay=0.1), make(lather.route(model), lr=0.01, weight_decay=0.1)
    assert given.plan().params == routed.plan().params
    assert given.state_dict()["param_groups"] == routed.state_dict()["param_groups"]
    methods = {row.name: row.method for row in given.plan().params}
    assert methods["words.weight"] == methods["head.weight"] == methods["last.weight"]
    assert methods["words.weight"] != methods["layers.0.qkv.weight"]
    decays = {name: group["weight_decay"] for group in given.param_groups for name in group["param_names"]}
    assert decays["layers.0.norm.scale"] == decays["layers.0.qkv.bias"] == decays["last.bias"] == 0.0
    assert decays["words.weight"] > 0 and decays["layers.0.qkv.weight"] == 0.1


@pytest.mark.parametrize("make", [*PRESETS[1:-1], lather.soap, lather.muon], ids=lambda make: make.__name__)
def test_rules_have_the_arguments_of_presets(make: Any) -> None:
    """As if they were given for all parameters; those that do nothing here, or are refused, are none of them."""
    refused = {"lr_decay", "initial_accumulator_value", "shampoo_beta", "normalize_grads", "data_format"}
    refused |= {"foreach", "fused", "amsgrad", "capturable", "differentiable"}
    given = {name: p.default for name, p in inspect.signature(make).parameters.items() if p.default is not p.empty}
    for name in given.keys() & {"adamw", *refused}:
        del given[name]
    opt = make(lather.route(Model(), [(r"qkv\.weight", given)], kinds={"experts": None}))
    assert opt.param_groups[1]["param_names"] == ["layers.0.qkv.weight", "layers.1.qkv.weight"]
    assert without_params(opt.param_groups[1]) == without_params(opt.param_groups[0])


def without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def test_rules_go_by_whoever_takes_the_groups() -> None:
    def routed(make: Any, options: dict[str, Any]) -> Any:
        return make(lather.route(Model(), [(r"qkv\.weight", options)], kinds={"experts": None})).param_groups[1]

    assert routed(lather.muon, {"ns_steps": 3, "momentum": 0.5})["polar"] == "newton_schulz(steps=3, eps=1e-07)"
    assert routed(lather.soap, {"max_precond_dim": 4})["max_preconditioner_dim"] == 4
    assert routed(lather.from_adam, {"decoupled_weight_decay": True})["weight_decay_mode"] == "decoupled"
    assert routed(lather.from_adam, {"factor_eps": 0.25, "eps": 0.5})["eps"] == 0.25
    with pytest.raises(ValueError, match="'max_precond_dim'; in Shampoo it is 'max_preconditioner_dim'"):
        routed(lather.muon, {"max_precond_dim": 4})


@pytest.mark.parametrize("method", ["shampoo", "soap", "kl", "spectral"])
def test_without_a_graft_what_is_left_to_it_follows_adam(method: str) -> None:
    def methods(params: Any) -> dict[str, str]:
        rows = lather.Shampoo(params, preconditioner=method, graft=None).plan().params
        return {row.name: row.method for row in rows}

    found = methods(Model())
    assert (found["words.weight"], found["head.weight"], found["layers.0.qkv.weight"]) == ("adam", "adam", method)
    assert methods(lather.route(Model(), [("words", {"preconditioner": None})]))["words.weight"] == "adam"
    explicit = {"preconditioner": None, "graft": "sgd"}
    assert methods(lather.route(Model(), kinds={"embedding": explicit}))["words.weight"] == "sgd"


def test_plan_shows_the_rule() -> None:
    opt = lather.from_adamw(lather.route(Model(), RULES), lr=0.01)
    report = opt.plan()
    rows = {row.name: row for row in report.params}
    assert rows["layers.0.qkv.weight"].rule == r"rule 1: qkv\.weight"
    assert rows["layers.0.qkv.weight"].block_shapes == ((8, 8),)
    assert rows["layers.0.qkv.weight"].blocks == 3
    assert rows["layers.1.experts"].blocks == 4
    assert (rows["words.weight"].method, rows["words.weight"].reason) == ("adam", "preconditioner=None")
    assert rows["last.bias"].rule == "kind: norm"
    text = str(report)
    assert "routed by" in text and all(row.rule in text for row in report.params)
    assert report.to_dict()["params"][0]["rule"] == r"rule 1: qkv\.weight"
    assert "routed by" not in str(lather.Shampoo(Model().named_parameters()).plan())


def test_rules_of_later_groups() -> None:
    model = Model()
    params = list(model.parameters())
    opt = lather.Shampoo([{"params": params[:1], "rule": "mine"}])
    with pytest.raises(ValueError):
        opt.add_param_group({"params": params[1:2], "rule": "wrong", "lr": -1.0})
    opt.add_param_group({"params": params[1:2]})
    opt.add_param_group({"params": params[2:3], "rule": "later"})
    assert [row.rule for row in opt.plan().params] == ["mine", "", "later"]
    assert [row.rule for row in copy.deepcopy(opt).plan().params] == ["mine", "", "later"]
    assert [row.rule for row in pickle.loads(pickle.dumps(opt)).plan().params] == ["mine", "", "later"]
    taken_out = weakref.ref(opt.param_groups.pop(1)["params"][0])
    assert [row.rule for row in pickle.loads(pickle.dumps(opt)).plan().params] == ["mine", "later"]
    del params, model
    assert taken_out() is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
def test_checkpoints_do_not_know_rules(flat: bool, tmp_path: Path) -> None:
    """Saved with rules of one wording, loaded with another's: only the groups have to be the same."""
    model, twin = Model(), Model()
    opt = lather.from_adamw(lather.route(model, RULES), lr=0.01)
    train(opt, 12)
    twin.load_state_dict(model.state_dict())
    other: list[Any] = [(r"qkv\.weight$", {"split": 3}), (r"\.experts", {"batch_dims": 1, "lr": 0.5})]
    fresh = lather.from_adamw(lather.route(twin, other), lr=0.01)
    assert not any("rule" in group for group in opt.state_dict()["param_groups"])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    dcp.save({"opt": get_optimizer_state_dict(model, opt, options=options)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"opt": get_optimizer_state_dict(twin, fresh, options=options)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(twin, fresh, state["opt"], options=options)
    assert fresh.plan().params[0].rule == r"rule 1: qkv\.weight$"
    train(opt, 12)
    train(fresh, 12)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_resume_bit_for_bit() -> None:
    model, twin = Model(), Model()
    opt, fresh = (lather.from_adamw(lather.route(m, RULES), lr=0.01) for m in (model, twin))
    train(opt, 12)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(model.state_dict())
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    train(opt, 12)
    train(fresh, 12)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    changed = opt.state_dict()
    changed["param_groups"][0]["split"] = 2
    with pytest.raises(ValueError, match="saved with split=2"):
        fresh.load_state_dict(changed)


def test_lists_are_as_good_as_tuples() -> None:
    """Some checkpoints bring tuples back as lists."""
    opts = [lather.Shampoo([nn.Parameter(torch.randn(9, 4))], split=[2, 3, 4]) for _ in range(2)]
    train(opts[0], 2)
    state = opts[0].state_dict()
    state["param_groups"][0]["split"] = [2, 3, 4]
    opts[1].load_state_dict(state)
    assert opts[1].param_groups[0]["split"] == (2, 3, 4)


@pytest.mark.parametrize(
    ("split", "dim", "sizes"), [(3, 0, (4, 4, 4)), ((6, 2, 4), 0, (6, 2, 4)), (2, 1, (5, 5)), ((9, 1), 1, (9, 1))]
)
def test_parts_are_as_parameters_of_their_own(split: Any, dim: int, sizes: tuple[int, ...]) -> None:
    w = torch.randn(12, 10)
    whole, parts = nn.Parameter(w.clone()), [nn.Parameter(part.clone()) for part in w.split(sizes, dim)]
    options: dict[str, Any] = {"lr": 0.02, "max_preconditioner_dim": 5, "weight_decay": 0.1, "momentum": 0.5}
    train(lather.Shampoo([whole], split=split, split_dim=dim, **options), 25)
    train(lather.Shampoo(parts, **options), 25)
    assert torch.equal(whole, torch.cat(list(parts), dim))
    unsplit = nn.Parameter(w.clone())
    train(lather.Shampoo([unsplit], **options | {"max_preconditioner_dim": 1024}), 25)
    assert not torch.allclose(whole, unsplit)


def test_parts_and_shards() -> None:
    """Local blocks are cut where a shard ends, and where a part does."""
    report = lather.plan({"w": (12, 4)}, ranks=2, shard="fsdp", blocks="local", split=3)
    assert (report.params[0].blocks, report.params[0].block_shapes) == (4, ((4, 4), (2, 4)))
    assert lather.plan({"w": (12, 4)}, ranks=2, shard="fsdp", split=3).params[0].block_shapes == ((4, 4),)


def test_elementwise_is_never_preconditioned() -> None:
    a, b = (nn.Parameter(torch.ones(12, 10)) for _ in range(2))
    train(lather.Shampoo([a], lr=0.02, preconditioner=None), 25)
    train(lather.Shampoo([b], lr=0.02, start_preconditioning_step=math.inf), 25)
    torch.testing.assert_close(a, b)
    state: dict[str, Tensor] = lather.Shampoo([a], preconditioner=None).plan().memory
    assert set(state) == {"filtered gradient", "graft moment", "total"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": 5}, r"split=5 does not fit dimension 0 of parameter w, of shape \(12, 10\); give sizes with the sum 12"),
        ({"split": (4, 4)}, r"split=\(4, 4\) does not fit"),
        ({"split": 2, "split_dim": 2}, "split_dim=2 but parameter w has shape"),
        ({"split": 2, "batch_dims": 1}, "split_dim=0 but parameter w has shape .* batch_dims=1"),
        ({"split_dim": 1}, "split_dim=1 has no effect without split"),
        ({"split": 1}, "split=1 is not valid"),
        ({"split": (12,)}, r"split=\(12,\) is not valid: it must be a number of equal parts, or the sizes"),
        ({"split": (13, -1)}, r"split\[1\]=-1 is not valid"),
        ({"split": "qkv"}, "split='qkv' is not valid"),
        ({"preconditioner": "soup"}, "preconditioner='soup' is not valid"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lather.plan({"w": (12, 10)}, **options)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([("qkv_weight", {})], r"rule 1, 'qkv_weight', matches no parameter; the nearest names are .*'layers\.\d\.qkv\.weight'"),
        ([("qkv", {}), (r"qkv\.bias", {})], r"rule 2, 'qkv\\\\.bias', has no effect: rule 1 comes first"),
        ([("(", {})], "rule 1 has '\\(', which is not a regular expression"),
        ([("qkv", {"weight_dcay": 0.0})], "rule 1 has the unknown option 'weight_dcay'; did you mean 'weight_decay'"),
        ([("qkv", {"ns_step": 3})], "rule 1 has the unknown option 'ns_step'; did you mean 'ns_steps'"),
        ([("qkv", {"params": []})], "rule 1 has the unknown option 'params'"),
        ([("qkv", 3)], "rule 1 has 3 for options"),
        (["qkv"], "rule 1 is 'qkv'; it must be a pair"),
        ({"qkv": {}}, "rule 1 is 'qkv'; it must be a pair"),
    ],
)  # fmt: skip
def test_bad_rules(rules: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lather.route(Model(), rules)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r"qvk\.weight", ["layers.0.qkv.weight"]),
        (r"layers\.1\.qvk", ["layers.0.qkv.bias", "layers.0.qkv.weight"]),
        (r"layers\.\d+\.expert_", ["layers.0.experts"]),
        (r"wrods", ["words.weight"]),
    ],
)
def test_nearest_names(pattern: str, names: list[str]) -> None:
    """A part of the name counts, wherever it is, and layers of a kind are shown once."""
    with pytest.raises(ValueError, match="the nearest names are") as caught:
        lather.route(Model(), [(pattern, {})])
    near = re.findall(r"'([^']+)'", str(caught.value).partition("nearest names")[2])
    assert sorted(near[: len(names)]) == names
    assert len({re.sub(r"\d", "", name) for name in near}) == len(near) == 3


def test_bad_kinds() -> None:
    with pytest.raises(ValueError, match="unknown kind 'embed'; there are 'position', 'embedding'"):
        lather.route(Model(), kinds={"embed": {}})
    with pytest.raises(ValueError, match="kinds has options for 'head'"):
        lather.route(Model(tied=True), kinds={"head": {}})
    with pytest.raises(ValueError, match="kind 'head' has the unknown option 'size'"):
        lather.route(Model(), kinds={"head": {"size": 3}})


def test_names_are_needed() -> None:
    model = Model()
    with pytest.raises(ValueError, match="rule 1, 'qkv', matches no parameter: there are none at all"):
        lather.route([], [("qkv", {})])
    for wrong in (model.parameters(), [{"params": list(model.parameters())}], [("a", "b")]):
        with pytest.raises(ValueError, match=r"model\.named_parameters\(\) instead of"):
            lather.route(wrong, RULES)  # type: ignore[arg-type]


def test_weights_of_few_bits_under_adapters_are_left_out() -> None:
    """They are integers, which nobody can train. Passed by themselves they are refused."""
    model = nn.Module()
    model.base = nn.Parameter(torch.zeros(8, 4, dtype=torch.uint8), requires_grad=False)
    model.adapter = nn.Linear(4, 2, bias=False)
    for opt in (lather.Shampoo(model), lather.from_adamw(model), lather.Shampoo(lather.route(model, [("adapter", {"lr": 0.1})]))):
        assert [p for group in opt.param_groups for p in group["params"]] == [model.adapter.weight]
    assert "base" not in str(lather.plan(model))
    with pytest.raises(TypeError, match=r"parameter base has dtype torch\.uint8"):
        lather.Shampoo(model.named_parameters())
