"""Presets: torch's arguments, and torch's results as long as nothing is preconditioned."""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lather
from lather.options import OPTIONS

Make = Callable[..., lather.Shampoo]
Options = dict[str, Any]
SHAPES: list[tuple[int, ...]] = [(6, 5), (6, 5), (4, 3, 2, 2), (9, 2), (6,), ()]
NEVER: Options = {"start_preconditioning_step": math.inf, "max_preconditioner_dim": 4}
TORCH_BETAS = (0.9, 0.999)
PRESETS: list[tuple[Make, type[optim.Optimizer]]] = [
    (lather.from_sgd, optim.SGD),
    (lather.from_adagrad, optim.Adagrad),
    (lather.from_adam, optim.Adam),
    (lather.from_adamw, optim.AdamW),
    (lather.low_memory, optim.AdamW),
]
CASES: list[tuple[Make, type[optim.Optimizer], Options]] = [
    *((make, torch_class, {}) for make, torch_class in PRESETS),
    *((make, torch_class, {"lr": 0.02, "weight_decay": 0.1, "maximize": True}) for make, torch_class in PRESETS),
    *((make, torch_class, {"lr": torch.tensor(0.02), "foreach": False}) for make, torch_class in PRESETS),
    *((make, torch_class, {"lr": 0.02, "foreach": True}) for make, torch_class in PRESETS),
    *((make, torch_class, {"lr": 0.02, "fused": True}) for make, torch_class in PRESETS),
    *((make, torch_class, {"lr": 0.02, "weight_decay": torch.tensor(0.125)}) for make, torch_class in PRESETS),
    (lather.from_sgd, optim.SGD, {"lr": 0.02, "dampening": 0.3}),
    (lather.from_sgd, optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    (lather.from_sgd, optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (lather.from_adagrad, optim.Adagrad, {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.1}),
    (lather.from_adam, optim.Adam, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    (lather.from_adam, optim.Adam, {"lr": 0.02, "betas": (0.0, 0.9)}),
    (lather.from_adam, optim.Adam, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (lather.from_adamw, optim.AdamW, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}),
    (lather.from_adamw, optim.AdamW, {"lr": 0.02, "betas": (torch.tensor(0.75), torch.tensor(0.875))}),
    (lather.low_memory, optim.AdamW, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}),
]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def torchs(make: Make) -> Options:
    """torch's defaults, where those of the preset are others; its second moment, and a filter that is not rounded."""
    exact = {"graft": "adam", "filter_dtype": None} if make is lather.low_memory else {}
    return exact | ({"betas": TORCH_BETAS} if make in (lather.from_adam, lather.from_adamw, lather.low_memory) else {})


def train(opt: optim.Optimizer, steps: int = 15, schedule: Any = None) -> None:
    """On a loss that depends on parameter and step, so that every difference feeds back."""
    for t in range(steps):
        for p in (p for group in opt.param_groups for p in group["params"]):
            p.grad = (p.detach() + 0.1 * t).sin() + 0.3 * p.detach()
        opt.step()
        if schedule is not None:
            schedule.step()


def assert_close(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for p, q, start in zip(ours, theirs, parameters(), strict=True):
        assert not torch.allclose(q, start, rtol=1e-3)
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("make", "torch_class"), PRESETS[:-1], ids=lambda x: x.__name__)  # the last passes them on
def test_signature_is_torchs(make: Make, torch_class: type) -> None:
    """Except for the default betas, which are those of Shampoo."""

    def arguments(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        known = inspect.signature(function).parameters.values()
        found = {p.name: p for p in known if p.name not in ("self", "options")}
        if "betas" in found:
            assert found["betas"].default == (OPTIONS["betas"].default if function is make else TORCH_BETAS)
            found["betas"] = found["betas"].replace(default=None)
        return [(p.name, p.kind, p.default) for p in found.values()]

    theirs, ours = arguments(torch_class.__init__), arguments(make)
    assert [a for a in ours if a[1] != inspect.Parameter.KEYWORD_ONLY] == [
        a for a in theirs if a[1] != inspect.Parameter.KEYWORD_ONLY
    ]
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize(("make", "torch_class", "options"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_never_preconditioned_is_torch(make: Make, torch_class: Any, options: Options) -> None:
    ours, theirs = parameters(), parameters()
    train(make(ours, **NEVER, **torchs(make) | copy.deepcopy(options)))
    train(torch_class(theirs, **copy.deepcopy(options)))
    if "lr" in options:
        assert_close(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("make", "torch_class"), PRESETS, ids=lambda x: x.__name__)
def test_preconditioning_makes_a_difference(make: Make, torch_class: Any) -> None:
    ours, theirs = parameters(), parameters()
    train(make(ours, lr=0.02, **torchs(make)), 12)
    train(torch_class(theirs, lr=0.02), 12)
    assert not torch.allclose(ours[0], theirs[0], rtol=1e-3)
    torch.testing.assert_close(ours[4:], theirs[4:])  # vectors are elementwise


def test_positional_arguments() -> None:
    ours, theirs = parameters(), parameters()
    train(lather.from_sgd(ours, 0.02, 0.8, 0, 0.1, True, **NEVER))
    train(optim.SGD(theirs, 0.02, 0.8, 0, 0.1, True))
    assert_close(ours, theirs)


def test_dampening() -> None:
    """torch does not dampen the first momentum buffer; with a gradient of zero in the first step both do the same."""
    ours, theirs = parameters(), parameters()
    for opt in (
        lather.from_sgd(ours, lr=0.02, momentum=0.8, dampening=0.3, **NEVER),
        optim.SGD(theirs, lr=0.02, momentum=0.8, dampening=0.3),
    ):
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        opt.step()
        train(opt)
    assert_close(ours, theirs)


def test_dampening_without_momentum_does_nothing() -> None:
    """It waits for groups that have momentum; those of torch can be taken over."""
    params = parameters()
    groups: list[Options] = [{"params": params[:2], "momentum": 0.8}, {"params": params[2:]}]
    for given in (groups, optim.SGD(groups, lr=0.02, dampening=0.3).param_groups):
        opt = lather.from_sgd(given, dampening=0.3)
        assert [(group["momentum"], group["dampening"]) for group in opt.param_groups] == [(0.8, 0.3), (0, 0)]
    with pytest.raises(ValueError, match=r"dampening=0\.3 has no effect"):
        lather.Shampoo(params, dampening=0.3)
    with pytest.raises(ValueError, match=r"dampening=-0\.3 is not valid"):
        lather.from_sgd(params, dampening=-0.3)


def test_lr_decay_is_a_schedule() -> None:
    ours, theirs = parameters(), parameters()
    with pytest.raises(ValueError, match="LambdaLR") as caught:
        lather.from_adagrad(ours, lr=0.05, lr_decay=0.1)
    opt = lather.from_adagrad(ours, lr=0.05, **NEVER)
    call = str(caught.value).partition("make ")[2].partition(" and step")[0]  # what the message says
    train(opt, schedule=eval(call, {"torch": torch, "opt": opt}))
    train(optim.Adagrad(theirs, lr=0.05, lr_decay=0.1))
    assert_close(ours, theirs)


def test_first_steps_of_an_accumulator() -> None:
    """What the message says about steps: as short as with the initial value, for tiny gradients."""
    with pytest.raises(ValueError, match=r"eps=0\.09 \*\* 0\.5"):
        lather.from_adagrad(parameters(), initial_accumulator_value=0.09)
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for opt in (
        lather.from_adagrad([ours], lr=1e4, eps=0.09**0.5),
        optim.Adagrad([theirs], lr=1e4, initial_accumulator_value=0.09),
    ):
        opt.param_groups[0]["params"][0].grad = torch.full((3,), 1e-5)
        opt.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("make", "torch_class"), PRESETS, ids=lambda x: x.__name__)
def test_groups(make: Make, torch_class: Any) -> None:
    """Options of param groups have torch's names and meanings, and an existing optimizer's groups can be taken over."""
    ours, theirs, others = parameters(), parameters(), parameters()

    def groups(params: list[nn.Parameter]) -> list[Options]:
        first: Options = {"params": params[:2], "lr": 0.01, "weight_decay": 0.3, "foreach": None}
        return [first | ({} if torch_class is optim.SGD else {"eps": 1e-2}), {"params": params[2:]}]

    given = groups(ours)
    before = copy.copy(given[0])
    train(make(iter(given), lr=0.02, **torchs(make), **NEVER))
    assert given[0].keys() == before.keys()
    theirs_opt = torch_class(groups(theirs), lr=0.02)
    taken = copy.deepcopy(theirs_opt.param_groups)
    for group, live in zip(taken, (others[:2], others[2:]), strict=True):
        group["params"] = live
    train(theirs_opt)
    assert_close(ours, theirs)
    train(make(taken, **{name: value for name, value in torchs(make).items() if name != "betas"}, **NEVER))
    assert_close(others, theirs)


def test_options_win() -> None:
    opt = lather.from_adamw(
        parameters(), eps=1e-6, factor_eps=1e-9, weight_decay_mode="corrected", precondition_frequency=7, graft="rmsprop"
    )
    group = opt.param_groups[0]
    assert (group["graft_eps"], group["eps"]) == (1e-6, 1e-9)
    assert (group["weight_decay_mode"], group["precondition_frequency"], group["graft"]) == ("corrected", 7, "rmsprop")
    assert lather.from_sgd(parameters(), betas=(0.0, 0.9)).param_groups[0]["betas"] == (0.0, 0.9)
    given = {"eps": 1e-6, "graft_eps": 1e-3}
    for soap in (lather.soap(parameters(), **given), lather.soap([{"params": parameters(), **given}])):
        assert (soap.param_groups[0]["eps"], soap.param_groups[0]["graft_eps"]) == (1e-6, 1e-3)


def test_names() -> None:
    model = nn.Linear(4, 3)
    assert [row.name for row in lather.from_sgd(model.named_parameters()).plan().params] == ["weight", "bias"]
    assert len(lather.from_sgd(model.parameters()).plan().params) == 2


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lather.from_adamw, {"amsgrad": True}, "amsgrad=True is not supported: .*leave it out"),
        (lather.from_adam, {"capturable": True}, "capturable=True is not supported: .*CUDA graph"),
        (lather.from_sgd, {"differentiable": True}, "differentiable=True is not supported"),
        (lather.from_adamw, {"eps": 0.0}, "^eps=0.0 is not valid: it must be more than 0"),
        (lather.from_adamw, {"factor_eps": -1.0}, "^factor_eps=-1.0 is not valid"),
        (lather.from_adamw, {"lr": -1.0}, "^lr=-1.0 is not valid"),
        (lather.from_adamw, {"weight_decay": torch.tensor(-1.0)}, "^weight_decay=-1.0 is not valid"),
        (lather.from_adagrad, {"initial_accumulator_value": -1}, "^initial_accumulator_value=-1 is not valid: .* at least 0$"),
        (lather.from_adagrad, {"lr_decay": -0.5}, "^lr_decay=-0.5 is not valid: .* at least 0$"),
        (lather.from_sgd, {"eps": 1e-6}, "has no effect with graft='sgd'"),
        (lather.from_sgd, {"nesterov": True}, "nesterov=True has no effect without momentum"),
    ],
)
def test_refused(make: Make, options: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(parameters(), **options)
    if "differentiable" in options or "amsgrad" in options:
        with pytest.raises(ValueError, match=words):
            make([{"params": parameters(), **options}])


FOREIGN: list[tuple[Make, Options, str]] = [
    (lather.soap, {"factor_eps": 1e-3}, "'factor_eps'; in Shampoo it is 'eps'$"),
    (lather.soap, {"decoupled_weight_decay": False}, "'decoupled_weight_decay'; in Shampoo it is 'weight_decay_mode'$"),
    (lather.soap, {"ns_step": 3}, "'ns_step'; did you mean 'ns_steps'[?]$"),
    (lather.muon, {"factor_eps": 1e-3}, "'factor_eps'; in Shampoo it is 'eps'$"),
    (lather.muon, {"correct_bias": False}, "'correct_bias'; in Shampoo it is 'bias_correction'$"),
    (lather.muon, {"weight_dcay": 0.1}, "'weight_dcay'; did you mean 'weight_decay'[?]$"),
    (lather.from_adamw, {"ns_steps": 3}, "'ns_steps'; in Shampoo it is 'polar'$"),
    (lather.from_sgd, {"max_precond_dim": 9}, "'max_precond_dim'; in Shampoo it is 'max_preconditioner_dim'$"),
]


@pytest.mark.parametrize(("make", "options", "words"), FOREIGN, ids=lambda x: getattr(x, "__name__", ""))
def test_arguments_of_others(make: Make, options: Options, words: str) -> None:
    with pytest.raises(TypeError, match=f"^there is no option {words}"):
        make(parameters(), **options)
    for groups in ([{"params": parameters(), **options}], [{"params": parameters()[:1]}, {"params": parameters(), **options}]):
        with pytest.raises(ValueError, match=f"^param group has the unknown option {words}"):
            make(groups)


@pytest.mark.parametrize("name", ["factor_eps", "decoupled_weight_decay", "adjust_lr_fn", "max_precond_dim", "ns_coefficients"])
def test_arguments_of_presets_are_none_of_shampoo(name: str) -> None:
    for params in ([{"params": parameters(), name: 1}], lather.route(nn.Linear(4, 3), [("weight", {name: 1})])):
        with pytest.raises(ValueError, match=f"unknown option '{name}'; in Shampoo it is"):
            lather.Shampoo(params)
    opt = lather.muon(parameters())
    with pytest.raises(ValueError, match=f"unknown option '{name}'; in Shampoo it is"):
        opt.add_param_group({"params": parameters(), name: 1})
    with pytest.raises(ValueError, match=f"unknown option '{name}'; in Shampoo it is"):
        lather.plan({"w": (4, 3)}, **{name: 1})
    opt.add_param_group({"params": parameters(), "mine": 1})  # as torch has it
    assert opt.param_groups[-1]["mine"] == 1


def test_bad_parameters() -> None:
    with pytest.raises(TypeError, match="iterable"):
        lather.from_sgd(torch.ones(3))
    for make in (lather.Shampoo, lather.from_adamw, lather.soap, lather.muon, lather.distributed_shampoo):
        with pytest.raises(ValueError, match="empty"):
            make(nn.ReLU())
    with pytest.raises(TypeError, match="wrong"):
        lather.from_sgd(parameters(), wrong=1)
    with pytest.raises(TypeError, match="'precondition_freqency'; did you mean 'precondition_frequency'"):
        lather.soap(parameters(), precondition_freqency=5)
    assert lather.soap(parameters(), betas=(torch.tensor(0.5), 0.75)).param_groups[0]["betas"] == (0.5, 0.75)
    for make in (lather.soap, lather.muon):
        assert make(parameters(), weight_decay=torch.tensor(0.5)).param_groups[0]["weight_decay"] == 0.5
    with pytest.raises(ValueError, match="empty"):
        lather.from_sgd([])


def test_from_sgd_does_not_precondition_decay() -> None:
    """A gradient of zero leaves decay alone, which is SGD's, also once there are roots."""
    weight = nn.Parameter(torch.randn(4, 3))
    twin = nn.Parameter(weight.detach().clone())
    given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    opts = lather.from_sgd([weight], precondition_frequency=2, **given), optim.SGD([twin], **given)
    for _ in range(6):
        for opt in opts:
            for p in (weight, twin):
                p.grad = torch.zeros_like(p)
            opt.step()
    torch.testing.assert_close(weight, twin)


@pytest.mark.parametrize("method", ["soap", "spectral", "kl", None])
@pytest.mark.parametrize("make", [lather.low_memory, lather.from_adamw, lather.distributed_shampoo], ids=lambda make: make.__name__)
def test_what_a_preset_chooses_yields_to_the_method(make: Make, method: str | None) -> None:
    """What the user wrote does not."""
    model = nn.Linear(6, 5)
    opt = make(model.parameters(), preconditioner=method)
    model.weight.grad = model.weight.detach().sin()
    opt.step()
    if method == "soap":
        with pytest.raises(ValueError, match="root_dtype='bfloat16' has no effect with preconditioner='soap'"):
            make(model.parameters(), preconditioner=method, root_dtype="bfloat16")


def test_low_memory() -> None:
    """As small as AdamW; the same checkpoints, schedulers and all."""
    w = nn.Parameter(torch.randn(256, 256))
    assert lather.low_memory([w]).plan().state_bytes / w.nbytes == pytest.approx(2, rel=0.02)
    a, b = parameters(), parameters()
    opt, fresh = lather.low_memory(a, lr=0.02), lather.low_memory(b, lr=0.02)
    train(opt, 15)
    fresh.load_state_dict(opt.state_dict())
    state: list[Tensor] = [v for entry in fresh.state.values() for v in entry.values()]
    assert {v.dtype for v in state} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("arguments", [{"betas": (0.0, 0.95)}, {"lr": 1e-3, "betas": [0.0, 0.9]}], ids=str)
def test_low_memory_without_a_filter(arguments):
    """What a preset chooses never raises."""
    model = torch.nn.Linear(4, 4)
    assert lather.low_memory(model, **arguments).param_groups[0]["filter_dtype"] is None
    assert lather.low_memory(model, 1e-3, arguments["betas"]).param_groups[0]["filter_dtype"] is None
    assert lather.low_memory(model).param_groups[0]["filter_dtype"] == "bfloat16"
