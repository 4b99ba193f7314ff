"""The preset ``muon``: torch's Muon for matrices, torch's AdamW for all else."""

import copy
import inspect
import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lather

Options = dict[str, Any]
MATRICES = [(12, 20), (20, 12), (9, 9), (12, 20), (2, 30)]
SHORT: Options = {"ns_steps": 3, "ns_coefficients": (2, -1.5, 0.5), "eps": 1e-2}
ARGUMENTS: list[Options] = [
    *(
        {"nesterov": nesterov, "adjust_lr_fn": scale, "momentum": mu}
        for nesterov in (True, False)
        for scale in ("original", "match_rms_adamw")
        for mu in (0.95, 0.0)
    ),
    {},
    {"weight_decay": 0.0},
    SHORT,
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.qkv = nn.Linear(8, 24)
        self.conv = nn.Conv1d(4, 6, 3)
        self.thin = nn.Linear(8, 1)
        self.norm = nn.LayerNorm((4, 8))
        self.slope_bias = nn.Parameter(torch.ones(3, 4))
        self.head = nn.Linear(8, 50, bias=False)


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def train(opt: optim.Optimizer, steps: Sequence[int] = range(60), size: float = 1.0) -> None:
    """On a loss that depends on parameter and step, so that every difference feeds back."""
    for t in steps:
        for p in (p for group in opt.param_groups for p in group["params"]):
            p.grad = size * ((p.detach() + 0.1 * t).sin() + 0.3 * p.detach())
        opt.step()


def methods(opt: lather.Shampoo) -> dict[str, str]:
    return {row.name: row.method for row in opt.plan().params}


def newton_schulz(g: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """What torch does in bfloat16, in the gradient's own dtype."""
    a, b, c = coefficients
    x = g.T if len(g) > g.shape[1] else g
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(g) > g.shape[1] else x


@pytest.mark.parametrize("options", ARGUMENTS, ids=str)
def test_is_torchs_muon(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding, over 60 steps in float64, once torch's own arithmetic is not in bfloat16."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz)
    ours, theirs, start = (parameters(MATRICES, torch.float64) for _ in range(3))
    size = 1e-4 if "eps" in options else 1.0  # below eps, or nearly
    train(lather.muon(ours, lr=0.02, state_dtype="float64", **options), size=size)
    train(optim.Muon(theirs, lr=0.02, **options), size=size)
    for p, q, w in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() <= 1e-12 * (q - w).norm()


def test_is_torchs_muon_as_it_comes() -> None:
    """In float32, from the same point at every step, as far as torch's bfloat16 allows."""
    ours, theirs = parameters(MATRICES), parameters(MATRICES)
    one, two = lather.muon(ours, lr=0.02), optim.Muon(theirs, lr=0.02)
    for t in range(20):
        before = [p.detach().clone() for p in ours]
        train(one, [t])
        for q, w in zip(theirs, before, strict=True):
            q.data.copy_(w)
        train(two, [t])
        for p, q, w in zip(ours, theirs, before, strict=True):
            assert (p - q).norm() <= 0.05 * (p - w).norm()


def test_a_gradient_below_eps_is_a_small_step() -> None:
    p, q = (nn.Parameter(torch.zeros(6, 4)) for _ in range(2))
    for param, eps in ((p, 1e-7), (q, 0.0)):
        opt = lather.muon([param], lr=1.0, weight_decay=0.0, eps=eps, momentum=0.0)
        param.grad = 1e-12 * torch.eye(6, 4)
        opt.step()
    assert p.norm() < 0.05
    assert q.norm() > 1


def test_adamw_for_other_parameters() -> None:
    shapes = [(12, 8), (7,), (), (5, 1), (1, 6), (1, 1, 4)]
    ours, theirs = parameters(shapes), parameters(shapes)
    given: Options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    train(lather.muon(ours, lr=0.02, adamw=given))
    train(optim.AdamW(theirs[1:], **given))
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-5)
    usual, twins = parameters(shapes), parameters(shapes)
    train(lather.muon(usual))
    train(optim.AdamW(twins[1:]))
    torch.testing.assert_close(usual[1:], twins[1:], rtol=1e-5, atol=1e-5)


def test_signature_is_torchs() -> None:
    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        known = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in known if p.name not in ("self", "options", "adamw")]

    assert arguments(lather.muon) == arguments(optim.Muon.__init__)


# What goes where.


def test_a_model_tells_more_than_shapes() -> None:
    model = Model()
    found = methods(lather.muon(model))
    assert {name for name, method in found.items() if method == "spectral"} == {"qkv.weight", "conv.weight"}
    assert set(found.values()) == {"spectral", "adam"}
    assert found == methods(lather.muon(lather.route(model)))
    by_shape = methods(lather.muon(model.named_parameters()))
    assert found.keys() == by_shape.keys()
    assert {name for name in found if found[name] != by_shape[name]} == {
        "words.weight", "head.weight", "norm.weight", "norm.bias", "slope_bias",
    }  # fmt: skip
    assert list(methods(lather.muon(model.parameters())).values()) == list(by_shape.values())


def test_rules_and_kinds() -> None:
    rules = [(r"words", {"preconditioner": "spectral"}), (r"conv\.weight", {"preconditioner": None, "lr": 0.5})]
    kinds = {"head": {"lr": 0.25}, "norm": {}}
    opt = lather.muon(lather.route(Model(), rules, kinds=kinds), lr=0.02, adamw={"lr": 0.125})
    found = methods(opt)
    assert {name for name, method in found.items() if method == "spectral"} == {"words.weight", "qkv.weight"}
    rates = {name: group["lr"] for group in opt.param_groups for name in group["param_names"]}
    assert [rates[f"{name}.weight"] for name in ("words", "conv", "head", "norm")] == [0.02, 0.5, 0.25, 0.125]
    decay = {name: group["weight_decay"] for group in opt.param_groups for name in group["param_names"]}
    assert [decay[name] for name in ("qkv.weight", "qkv.bias", "norm.weight")] == [0.1, 0.0, 0.01]
    assert opt.plan().params[0].rule == "no rule"


def test_groups() -> None:
    """Their options have the names of the method that takes them; those of a divided group hold for both parts."""
    model = Model()
    groups = [
        {"params": model.qkv.named_parameters(), "momentum": 0.5, "ns_steps": 2, "lr": 0.25, "rule": "mine"},
        {"params": [("norm.bias", model.norm.bias)], "preconditioner": None, "betas": (0.5, 0.75), "eps": 1e-4},
        {"params": [("words", model.words.weight)], "preconditioner": "shampoo", "root": "newton"},
        {"params": [("conv", model.conv.weight)], "batch_dims": 1, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    ]
    opt = lather.muon(iter(groups), lr=0.02, eps=1e-5)
    names = ("lr", "momentum", "eps", "nesterov", "betas", "beta3", "polar", "polar_scale", "graft_eps", "preconditioner")
    none = "newton_schulz"
    assert [tuple(group[name] for name in names) for group in opt.param_groups] == [
        (0.25, 0.0, 1e-4, False, (0.5, 0.999), "nesterov", "newton_schulz(steps=2, eps=1e-05)", "original", 1e-8, "spectral"),
        (0.25, 0.0, 1e-4, False, (0.9, 0.999), "nesterov", none, None, 1e-8, None),
        (1e-3, 0.0, 1e-4, False, (0.5, 0.75), "nesterov", none, None, 1e-4, None),
        (1e-3, 0.0, 1e-4, False, (0.9, 0.999), "nesterov", none, None, 1e-8, "shampoo"),
        (0.02, 0.0, 1e-4, False, (0.95, 0.999), None, "newton_schulz(eps=1e-05)", "match_rms_adamw", 1e-8, "spectral"),
    ]
    rows = opt.plan().params
    assert [(row.method, row.blocks) for row in rows] == [
        ("spectral", 1), ("adam", 1), ("adam", 1), ("shampoo", 1), ("spectral", 6),
    ]  # fmt: skip
    assert [row.rule for row in rows[:3]] == ["mine", "mine", ""]
    assert groups[0].keys() == {"params", "momentum", "ns_steps", "lr", "rule"}


def test_groups_that_are_not_muons() -> None:
    """They have the options of ``Shampoo``, momentum too, and no arguments of Muon."""
    model = Model()
    rules = [(r"qkv\.weight", {"preconditioner": "shampoo", "momentum": 0.5, "nesterov": True})]
    opt = lather.muon(lather.route(model, rules, kinds={"norm": {"momentum": 0.25}}))
    found = {group["param_names"][0]: (group["momentum"], group["nesterov"]) for group in opt.param_groups}
    assert (found["qkv.weight"], found["norm.weight"]) == ((0.5, True), (0.25, False))
    for name in ("ns_steps", "ns_coefficients", "adjust_lr_fn"):
        with pytest.raises(ValueError, match=f"unknown option '{name}'"):
            lather.muon(lather.route(model, kinds={"norm": {name: None}}))


def test_groups_of_torchs_muon_can_be_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz)
    ours, theirs = parameters(MATRICES, torch.float64), parameters(MATRICES, torch.float64)
    groups = [{"params": [("a", theirs[0])], "lr": 0.1, "nesterov": False}, {"params": [("b", p) for p in theirs[1:]]}]
    opt = optim.Muon(groups, lr=0.02, weight_decay=0.3, momentum=0.8)
    taken = [dict(group, params=live) for group, live in zip(opt.param_groups, (ours[:1], ours[1:]), strict=True)]
    mine = lather.muon(taken, state_dtype="float64")
    assert mine.param_groups[0]["param_names"] == ["a"]
    train(mine)
    train(opt)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_options_win() -> None:
    opt = lather.muon(parameters([(8, 4), (3,)]), polar="polar_express", max_preconditioner_dim=4, graft="sgd")
    first, second = opt.param_groups
    assert (first["polar"], first["max_preconditioner_dim"], first["graft"]) == ("polar_express", 4, "sgd")
    assert (first["polar_scale"], second["graft"], second["preconditioner"]) == (None, "adam", None)
    vectors = lather.muon(parameters([(3,), ()]), precondition_1d=True)
    assert list(methods(vectors).values()) == ["spectral", "adam"]


# Living with it.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_bit_for_bit(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    twin = copy.deepcopy(model)
    opt, fresh = (lather.muon(m, lr=0.02, adamw={"lr": 3e-3}) for m in (model, twin))
    train(opt, range(7))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    twin.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["opt"])
    train(opt, range(7, 14))
    train(fresh, range(7, 14))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.isfinite().all()


def test_odd_gradients() -> None:
    """None, zero and NaN; a zero gradient on the first step moves nothing but what decays."""
    params = parameters([(6, 4), (4,), (0, 3), (5, 3), (3, 6)])
    opt = lather.muon(params, weight_decay=0.0, adamw={"weight_decay": 0.0})
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    params[3].grad = None
    params[4].grad = torch.full((3, 6), math.nan)
    with pytest.warns(lather.NumericalWarning):
        opt.step()
    for p, w in zip(params, before, strict=True):
        assert torch.equal(p, w)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (0.9, 0.95)}, r"betas=\(0.9, 0.95\) is no argument of Muon: it has momentum; .*adamw="),
        ({"momentum": 1.0}, "^momentum=1.0 is not valid"),
        ({"nesterov": 1}, "^nesterov=1 is not valid"),
        ({"lr": -1.0}, "^lr=-1.0 is not valid"),
        ({"ns_steps": 0}, "^ns_steps=0 must be a whole number"),
        ({"ns_coefficients": (1.0, 2.0)}, "^ns_coefficients=.* must be three numbers"),
        ({"ns_coefficients": (1.0, 2.0, math.nan)}, "^ns_coefficients=.* must be three numbers"),
        ({"eps": -1e-7}, "^eps=-1e-07 must be a number of at least 0"),
        ({"adjust_lr_fn": "adamw"}, "^adjust_lr_fn='adamw' is not valid: it must be None, 'original' or 'match_rms_adamw'"),
        ({"adjust_lr_fn": "original", "graft": "adam"}, "adjust_lr_fn='original' has no effect with graft='adam'"),
        ({"adamw": {"learning_rate": 1}}, "adamw has the unknown option 'learning_rate'"),
        ({"adamw": {"amsgrad": True}}, "amsgrad=True is not supported"),
        ({"adamw": {"eps": 0.0}}, "^eps=0.0 is not valid"),
        ({"adamw": 3e-4}, "adamw=0.0003 must be a mapping"),
        ({"root": "newton"}, "root='newton' has no effect with preconditioner='spectral'"),
    ],
)
def test_refused(options: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lather.muon(parameters([(4, 3), (3,)]), **options)


def test_bad_parameters() -> None:
    for wrong in (torch.ones(3), [1, 2], [{"params": {nn.Parameter(torch.ones(3))}}], [{"params": []}, 3]):
        with pytest.raises(TypeError):
            lather.muon(wrong)
    with pytest.raises(ValueError, match="empty"):
        lather.muon([])
    assert len(lather.muon([{"params": []}, {"params": parameters([(3,)])}]).param_groups) == 2
