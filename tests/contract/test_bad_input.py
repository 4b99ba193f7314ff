"""Bad input: what the user gets for it, and that nothing else happens."""

import copy
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from paper import PAPER
from torch import Tensor, nn

import lather
from lather.options import ARGUMENTS, OF_META, OF_OTHERS, OF_PRESETS, OPTIONS, hint
from lather.presets import meta

FAST: dict[str, Any] = {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 3, "momentum": 0.9}
FAST |= {"refresh_warmup": 0.0}  # refreshes at even steps only
INF, NAN = math.inf, math.nan


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (6, 5), "twin": (6, 5), "conv": (4, 3, 2), "bias": (6,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_grads(params: dict[str, nn.Parameter], t: int) -> None:
    for p in params.values():
        p.grad = (p.detach() + 0.1 * t).sin() + 0.3 * p.detach()


def train(opt: lather.Shampoo, params: dict[str, nn.Parameter], steps: int, start: int = 0) -> None:
    for t in range(start, start + steps):
        set_grads(params, t)
        opt.step()


def snapshot(opt: lather.Shampoo, p: Tensor) -> Any:
    return p.detach().clone(), {k: v.clone() for k, v in opt.state[p].items()}


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# Options.

RANGES: list[tuple[str, Any, str]] = [
    *(("lr", bad, "at least 0") for bad in (-1.0, NAN, INF, "0.1", None, True)),
    *(("lr", torch.tensor(bad), "") for bad in (-1.0, NAN, [0.1, 0.2])),
    *(("lr", torch.ones(1, **kind), "one element") for kind in ({"device": "meta"}, {"dtype": torch.complex64})),
    ("lr", torch.ones(1).to_sparse(), "one element"),
    ("lr", 10**400, "finite"),
    *((name, 10**400, "up to 9223372036854775807") for name in ("precondition_frequency", "max_preconditioner_dim", "batch_dims")),
    ("averaging_powers", (2.0, 1e300), "at most 16"),
    *(("betas", bad, "pair") for bad in (0.9, (0.9,), (0.9, 0.9, 0.9), "ab")),
    *(("betas", (bad, 0.9), "less than 1") for bad in (-0.1, 1.0, NAN)),
    *(("betas", (0.9, bad), "at most 1") for bad in (-0.1, 1.1, NAN)),
    *(("beta3", bad, "less than 1") for bad in (-0.1, 1.0, NAN)),
    *(("beta3", bad, "less than 1, 'nesterov' or None") for bad in ("nesterv", "None", "paper")),
    *(("refresh_warmup", bad, "at least 0") for bad in (-0.1, 1.0, NAN, None, "paper")),
    *((name, bad, "more than 0") for name in ("eps", "graft_eps", "exponent_multiplier") for bad in (0.0, -1.0, NAN)),
    *(("weight_decay", bad, "at least 0") for bad in (-0.1, NAN, INF)),
    *(("momentum", bad, "less than 1") for bad in (-0.1, 1.0, NAN)),
    *(("dampening", bad, "at most 1") for bad in (-0.1, 1.1, NAN)),
    *(("graft_beta2", bad, "less than 1") for bad in (-0.1, 1.0, NAN)),
    *(("precondition_frequency", bad, "at least 1") for bad in (0, -1, 1.5, INF, NAN, "2", True)),
    *(("max_preconditioner_dim", bad, "at least 1") for bad in (0, -1, 1.5, NAN, None)),
    *(("block_multiple", bad, "at least 1") for bad in (0, -16, 1.5, INF, NAN, None, "16")),
    *(("start_preconditioning_step", bad, "at least 1") for bad in (0, -1, 1.5, NAN)),
    *(("batch_dims", bad, "at least 0") for bad in (-1, 0.5, INF)),
    *(("max_failed_refreshes", bad, "at least 0") for bad in (-1, 0.5, INF)),
    *(("exponent", bad, "at least 0") for bad in (-0.5, NAN, "half", "nesterov", {2: -1.0}, {2: NAN}, {2: "paper"})),
    *(("exponent", bad, "at least 1") for bad in ({0: 0.5}, {1.5: 0.5})),
    *((name, bad, "True or False") for name in ("nesterov", "maximize", "merge_dims") for bad in (1, "yes", None)),
]
NAMES: list[tuple[str, str, str]] = [
    ("precision", "tf32", "'fast' (the 11 bits of TF32, on a GPU); did you mean 'fast'?"),
    ("precision", "highest", "'float32' (exact to float32)"),
    ("precision", "highest", "did you mean 'float32'?"),
    ("precision", "flaot32", "did you mean 'float32'?"),
    ("root_device", "cuda", "None (where the parameter is), 'cpu' (on the host); did you mean None?"),
    ("graft", "adm", "'adam'"),
    ("graft", "Adam", "'adam'"),
    ("graft", "rms_prop", "'rmsprop'"),
    ("weight_decay_mode", "decouple", "'decoupled'"),
    ("preconditioner", "shampo", "'shampoo'"),
    ("preconditioner", "muon", "did you mean 'spectral'?"),
    ("polar", "newton_shulz", "did you mean 'newton_schulz'?"),
    ("polar", "newton_schulz(step=3)", "options of newton_schulz: steps"),
    ("polar", "newton_schulz(steps=0)", "steps=0 must be a whole number of at least 1"),
    ("polar", "polar_express(steps=2.5)", "steps=2.5 must be a whole number"),
    ("polar", "polar_express(lower=1.0)", "lower=1.0 must be at least 1e-16 and less than 1"),
    ("polar", "newton_schulz(steps=1001)", "steps=1001 must be a whole number of at least 1 and at most 1000"),
    ("polar", "polar_express(lower=1e-100)", "lower=1e-100 must be at least 1e-16"),
    ("polar", "newton_schulz(coefficients=(1, 2))", "coefficients=(1, 2) must be three numbers"),
    ("polar", "newton_schulz(coefficients=3)", "coefficients=3 must be three numbers"),
    ("polar", "newton_schulz(eps=-1)", "eps=-1 must be a number of at least 0"),
    ("polar", "svd(", "a name with options, as in"),
    ("polar", "", "'polar_express'"),
    ("polar", "eigh", "'newton_schulz', 'polar_express', 'svd'"),
    ("polar_scale", "orignal", "did you mean 'original'?"),
    ("polar_scale", "adamw", "did you mean 'match_rms_adamw'?"),
    ("polar_scale", "none", "did you mean None?"),
    ("large_dim", "diag", "'diagonal'"),
    ("refresh", "stagered", "'staggered'"),
    ("on_nonfinite", "rais", "'raise'"),
    ("state_dtype", "float33", "'float32'"),
    ("state_dtype", "float16", "'float32', 'float64' or 'bfloat16'"),
    ("state_dtype", torch.float16, "squares of gradients below 2e-4 are zero"),
    ("root_dtype", "bfloat", "'bfloat16'"),
    ("factors", "pack", "'packed'"),
    ("root", "eig", "'eigh'"),
    ("root", "neuton", "'newton'"),
    ("root", "newton(iteration=3)", "iterations"),
    ("root", "newton(iterations=0)", "iterations=0"),
    ("root", "", "'eigh'"),
    ("root", "import os", "'eigh'"),
    ("root", "eigh(", "'eigh'"),
]


def parts(value: Any) -> list[Any]:
    """What a message may show of a value: all of it, or the member that is wrong."""
    members = value.items() if isinstance(value, dict) else [value] if isinstance(value, tuple) else []
    return [value, *(part for pair in members for part in pair)]


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize(("name", "value", "allowed"), [*RANGES, *NAMES], ids=str)
def test_bad_option(name: str, value: Any, allowed: str, in_group: bool) -> None:
    """Argument, value, and what is allowed or was probably meant."""
    w = nn.Parameter(torch.ones(2, 2))
    where, options = ([{"params": [w], name: value}], {}) if in_group else ([w], {name: value})
    with pytest.raises(ValueError, match=rf"^{name}\b") as error:
        lather.Shampoo(where, **options)
    text = str(error.value)
    assert allowed in text
    assert any(repr(part) in text for part in parts(value))


@pytest.mark.parametrize("value", [None, 3, [1], {"eigh": 1}, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["root", "large_dim", "state_dtype", "refresh", "preconditioner", "factors", "polar"])
def test_option_of_another_type(name: str, value: Any) -> None:
    if (name, value) in (("state_dtype", torch.float32), ("preconditioner", None)):
        return
    with pytest.raises(ValueError, match=f"^{name}="):
        lather.Shampoo([nn.Parameter(torch.ones(2, 2))], **{name: value})


@pytest.mark.parametrize(("name", "meant"), [("momentun", "momentum"), ("weight_decays", "weight_decay"), ("grafts", "graft")])
def test_misspelt_option_in_a_group(name: str, meant: str) -> None:
    w = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=f"{name!r}.*{meant!r}"):
        lather.Shampoo([{"params": [w], name: 0.5}])
    opt = lather.Shampoo([w])
    with pytest.raises(ValueError, match=f"{name!r}.*{meant!r}"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: 0.5})
    assert len(opt.param_groups) == 1
    with pytest.raises(TypeError, match=f"^there is no option {name!r}; did you mean {meant!r}"):
        lather.Shampoo([w], **{name: 0.5})


UNKNOWN: list[tuple[str, str]] = [
    ("precondition_freqency", "did you mean 'precondition_frequency'?"),
    ("preconditon_frequency", "did you mean 'precondition_frequency'?"),
    ("epsilon", "in Shampoo it is 'eps', and lather.distributed_shampoo takes it as it is"),
    ("eps_root", "in Shampoo it is 'eps' or 'graft_eps'"),
    ("block_size", "in Shampoo it is 'max_preconditioner_dim'"),
    ("learning_rate", "in Shampoo it is 'lr'"),
    ("beta1", "in Shampoo it is 'betas'"),
    ("grafting_config", "in Shampoo it is 'graft', and lather.distributed_shampoo takes it as it is"),
    ("grafting_type", "in Shampoo it is 'graft', and lather.distributed_shampoo takes it as it is"),
    ("use_merge_dims", "in Shampoo it is 'merge_dims', and lather.distributed_shampoo takes it as it is"),
    ("inv_root_override", "in Shampoo it is 'exponent', and lather.distributed_shampoo takes it as it is"),
    ("distributed_config", "in Shampoo it is 'communication_dtype' or 'num_trainers_per_group', and lather.distributed_shampoo"),
    ("graft_epsilon", "in Shampoo it is 'graft_eps'"),
    ("update_freq", "in Shampoo it is 'precondition_frequency'"),
]
LOOSE: list[tuple[str, str]] = [  # where every unknown name is a mistake
    ("frequency", "did you mean 'precondition_frequency'?"),
    ("use_pin_memory", "it has no effect in Shampoo; leave it out"),
    ("weights_decay_mod", "did you mean 'weight_decay_mode'?"),
    ("stage", "did you mean 'stages'?"),
    ("preconditioner_type", "did you mean 'preconditioner'?"),
    ("colour", "docs/options.md has them all"),
]


@pytest.mark.parametrize(("name", "words"), [*UNKNOWN, *LOOSE], ids=str)
def test_an_unknown_option_names_what_was_meant(name: str, words: str) -> None:
    """Wherever options are given."""
    w, model = nn.Parameter(torch.ones(2, 2)), nn.Linear(2, 2)
    makes: list[Callable[..., Any]] = [
        lather.Shampoo,
        lather.from_adamw,
        lather.from_sgd,
        lather.low_memory,
        lather.muon,
        lather.soap,
    ]
    for make in makes:
        with pytest.raises(TypeError) as error:
            make([w], **{name: 0.5})
        assert str(error.value).startswith(f"there is no option {name!r}; {words}")
    with pytest.raises(ValueError) as wrong:
        lather.plan({"w": (2, 2)}, **{name: 0.5})
    assert str(wrong.value).startswith(f"unknown option {name!r}; {words}")
    with pytest.raises(ValueError) as wrong:
        lather.Shampoo(lather.route(model, [("weight", {name: 0.5})]))
    assert f" has the unknown option {name!r}; {words}" in str(wrong.value)
    for make in makes if (name, words) in UNKNOWN else ():
        with pytest.raises(ValueError) as wrong:
            make([{"params": [w], name: 0.5}])
        assert str(wrong.value).startswith(f"param group has the unknown option {name!r}; {words}")


def test_names_of_your_own_in_param_groups() -> None:
    """As in torch, if they are no option's, nor nearly."""
    own = {"stage": 1, "colour": "red", "lr_scale": 0.5, "name": "head", "use_pin_memory": True, "frequency": 3}
    group = lather.Shampoo([{"params": [nn.Parameter(torch.ones(2, 2))], **own}]).param_groups[0]
    assert {name: group[name] for name in own} == own


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_the_constructor_in_a_group(name: str) -> None:
    w = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=f"unknown option {name!r}; it is an argument of the constructor"):
        lather.Shampoo([{"params": [w], name: 1}])
    with pytest.raises(ValueError, match=f"unknown option {name!r}; it is an argument of the constructor"):
        lather.route(nn.Linear(2, 2), [("weight", {name: 1})])


def test_every_name_of_metas_is_known() -> None:
    preset = importlib.import_module("lather.presets.distributed_shampoo")
    names = {*meta.READERS, *preset.OLD_GRAFT, *preset.IGNORED, *preset.LATER}
    for name in names - OPTIONS.keys() - ARGUMENTS.keys():
        assert "in Shampoo it is" in hint(name) or "it has no effect in Shampoo" in hint(name), name
    for text in (*OF_META.values(), *OF_PRESETS.values(), *OF_OTHERS.values()):
        assert all(option in OPTIONS or option in ARGUMENTS for option in text.split())


IDLE: list[tuple[str, dict[str, Any]]] = [
    ("beta3", {"beta3": 0.5, "betas": (0.0, 0.9)}),
    ("dampening", {"dampening": 0.5}),
    ("nesterov", {"nesterov": True}),
    ("graft_beta2", {"graft_beta2": 0.5, "graft": "sgd"}),
    ("graft_beta2", {"graft_beta2": 0.5, "graft": "adagrad"}),
    ("graft_beta2", {"graft_beta2": 0.5, "graft": None}),
    ("graft_eps", {"graft_eps": 0.5, "graft": "sgd"}),
    ("graft_eps", {"graft_eps": 0.5, "graft": None}),
    ("exponent_multiplier", {"exponent_multiplier": 1.82, "exponent": 0.25}),
    ("root_dtype", {"root_dtype": "float64"}),
    ("root_dtype", {"root_dtype": "float64", "state_dtype": "bfloat16"}),
    ("polar", {"polar": "svd"}),
    ("polar_scale", {"polar_scale": "original", "graft": None}),
    ("polar_scale", {"polar_scale": "original", "preconditioner": "spectral"}),
    ("exponent", {"exponent": 0.25, "preconditioner": "kl"}),
    ("exponent_multiplier", {"exponent_multiplier": 1.82, "preconditioner": "kl"}),
    ("polar", {"polar": "svd", "preconditioner": "kl"}),
    ("exponent", {"exponent": 0.25, "preconditioner": "soap"}),
    ("exponent_multiplier", {"exponent_multiplier": 1.82, "preconditioner": "soap"}),
    ("damping", {"damping": "absolute", "preconditioner": "spectral"}),
    ("root_dtype", {"root_dtype": "bfloat16", "preconditioner": "soap"}),
    ("polar", {"polar": "svd", "preconditioner": "soap"}),
    ("graft_beta2", {"graft_beta2": 0.5, "preconditioner": "soap", "graft": "sgd"}),
    ("root", {"root": "eigh", "preconditioner": "spectral"}),
    ("exponent", {"exponent": 0.25, "preconditioner": "spectral"}),
    ("refresh", {"refresh": "staggered", "preconditioner": "spectral"}),
    ("refresh_warmup", {"refresh_warmup": 0.2, "preconditioner": "spectral"}),
    ("refresh_warmup", {"refresh_warmup": 0.2, "start_preconditioning_step": math.inf}),
    ("refresh_delay", {"refresh_delay": 2, "start_preconditioning_step": math.inf}),
    ("factors", {"factors": "packed", "preconditioner": "spectral"}),
    ("large_dim", {"large_dim": "diagonal", "preconditioner": "spectral"}),
]


def test_warm_up_and_delay_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"refresh_warmup=0\.2 does not go with refresh_delay=2"):
        lather.Shampoo([nn.Parameter(torch.ones(2, 2))], refresh_warmup=0.2, refresh_delay=2)


def test_the_default_warm_up_yields_to_a_delay() -> None:
    """And is there again when the delay is gone."""
    params = parameters()
    opt = lather.Shampoo(params.items(), precondition_frequency=4, refresh_delay=1)
    train(opt, params, 4)
    assert not roots(opt, params["weight"])["X0.0"].any()
    train(opt, params, 1, 4)
    before = roots(opt, params["weight"])
    assert before["X0.0"].any()
    opt.param_groups[0]["refresh_delay"] = 0
    train(opt, params, 1, 5)
    assert not torch.equal(roots(opt, params["weight"])["X0.0"], before["X0.0"])


LEFT: list[dict[str, Any]] = [
    {},
    {"preconditioner": "soap"},
    {"preconditioner": "kl"},
    {"preconditioner": "spectral"},
    {"preconditioner": None},
    {"preconditioner": None, "graft": "sgd"},
    {"betas": (0.0, 0.9)},
    {"start_preconditioning_step": math.inf},
    {"refresh_delay": 1},
    {"exponent_multiplier": 1.82},
    {"averaging": "schedule_free"},
]
OFF: list[dict[str, Any]] = [{}, {"beta3": None}, {"exponent": None}, {"exponent": "paper"}, {"refresh_warmup": 0.0}]
OFF += [{"beta3": None, "exponent": None, "refresh_warmup": 0.0, "block_multiple": 1}]


@pytest.mark.parametrize("off", OFF, ids=str)
@pytest.mark.parametrize("options", LEFT, ids=str)
def test_neither_defaults_nor_their_off_values_raise(options: dict[str, Any], off: dict[str, Any]) -> None:
    """They say nothing that needs an effect, for all groups and for one."""
    for where in ([], [{"params": [nn.Parameter(torch.ones(2, 2))], **options, **off}]):
        params = parameters()
        opt = lather.Shampoo([{"params": params.values()}, *where], **options, **off)
        set_grads(params, 0)
        opt.step()
        assert all(p.isfinite().all() for p in params.values())
    lather.plan({"w": (2, 2)}, **options, **off)


@pytest.mark.parametrize(("name", "options"), IDLE, ids=str)
def test_option_without_effect(name: str, options: dict[str, Any]) -> None:
    w = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=f"{name}=.*no effect"):
        lather.Shampoo([w], **options)
    with pytest.raises(ValueError, match=f"{name}=.*no effect"):
        lather.plan({"w": (2, 2)}, **options)
    lather.Shampoo([w], **{key: value for key, value in options.items() if key != name})


MIXED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"root": "newton", "factors": "packed", "refresh": "staggered"}, {"preconditioner": "spectral"}),
    ({"polar": "svd", "preconditioner": "spectral"}, {"preconditioner": "shampoo"}),
    ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.0}),
    ({"graft_eps": 1e-6}, {"graft": "sgd"}),
    ({"beta3": 0.5}, {"betas": (0.0, 0.9)}),
]


@pytest.mark.parametrize(("options", "own"), MIXED, ids=str)
def test_an_option_for_other_groups_is_no_mistake(options: dict[str, Any], own: dict[str, Any]) -> None:
    """One that does something by default may do nothing in a group; one that the group has itself may not."""
    v, w = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    opt = lather.Shampoo([{"params": [v]}, {"params": [w], **own}], **options)
    for p in (v, w):
        p.grad = torch.eye(2)
    opt.step()
    with pytest.raises(ValueError, match="no effect"):
        lather.Shampoo([{"params": [v]}, {"params": [w], **own, **options, **own}], **options)
    with pytest.raises(ValueError, match="nesterov=True has no effect"):  # in none
        lather.Shampoo([{"params": [v], "lr": 0.1}], nesterov=True)


@pytest.mark.parametrize("root", ["newton", "higher_order"])
@pytest.mark.parametrize("options", [{"exponent": 0.123456}, {"exponent": {2: 9.5}}, {"exponent_multiplier": 1.8213}])
def test_exponent_that_a_solver_cannot_do(root: str, options: dict[str, Any]) -> None:
    w = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"exponent=.*eigh"):
        lather.Shampoo([w], root=root, **options)
    for able in ("eigh", "track", "auto"):
        lather.Shampoo([w], root=able, **options)
    lather.Shampoo([w], root=root, exponent={2: 0.5, 3: 0})


@pytest.mark.parametrize("root", ["newton", "higher_order(order=4)", lather.Minimax()], ids=str)
def test_a_solver_without_a_basis(root: Any) -> None:
    """At construction, and when it is changed later."""
    w = nn.Parameter(torch.ones(2, 2))
    for make in (lambda: lather.Shampoo([w], preconditioner="soap", root=root), lambda: lather.soap([w], root=root)):
        with pytest.raises(ValueError, match=r"^root=.*no eigenbasis.*'eigh', 'track'"):
            make()
    opt = lather.Shampoo([w], preconditioner="soap", root="track")
    w.grad = torch.ones(2, 2)
    opt.step()
    opt.param_groups[0]["root"] = root
    with pytest.raises(ValueError, match="no eigenbasis"):
        opt.step()


def test_batch_dims_name_the_parameter() -> None:
    params = parameters()
    opt = lather.Shampoo(params.items(), batch_dims=2)
    set_grads(params, 0)
    for call in (opt.plan, opt.step, opt.state_dict):
        with pytest.raises(ValueError, match=r"batch_dims=2.* bias .*\(6,\)"):
            call()
    assert len(opt.state) == 0


# Parameters.


@pytest.mark.parametrize(
    ("param", "error", "message"),
    [
        (torch.ones(2, 2, dtype=torch.complex64), NotImplementedError, "parameter odd .*complex64"),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, "parameter odd .*int64"),
        (torch.ones(2, 2, dtype=torch.bool), TypeError, "parameter odd .*bool"),
    ],
)
def test_dtypes_that_cannot_be_optimized(param: Tensor, error: type[Exception], message: str) -> None:
    odd = nn.Parameter(param, requires_grad=param.is_complex())
    with pytest.raises(error, match=message):
        lather.Shampoo([("odd", odd)])
    opt = lather.Shampoo(parameters().items())
    with pytest.raises(error, match=message):
        opt.add_param_group({"params": [("odd", odd)]})
    assert len(opt.param_groups) == 1


def test_flat_parameters_are_refused() -> None:
    from torch.distributed.fsdp import FlatParameter

    flat = FlatParameter(torch.ones(8), requires_grad=True)
    with pytest.raises(ValueError, match=r"parameter flat .*FSDP1.*fully_shard"):
        lather.Shampoo([("flat", flat)])


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("swapped", [False, True])
def test_sharded_parameters_without_values_are_refused(swapped: bool, mesh: Any) -> None:
    """Given at once, or put into the groups later, as launchers do."""
    from torch.distributed.tensor import DTensor, Partial

    sharded = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    opt = lather.Shampoo([("weight", nn.Parameter(torch.ones(4, 4)))])
    if swapped:
        opt.param_groups[0]["params"] = [sharded]
        sharded.grad = torch.ones_like(sharded)
    with pytest.raises(NotImplementedError, match=r"parameter weight .*Partial"):
        opt.step() if swapped else lather.Shampoo([("weight", sharded)])


def test_a_factor_that_does_not_fit() -> None:
    """Unblocked, one factor of a vocabulary takes 61 GiB; many of them fit nowhere."""
    tiny = torch.zeros(1)
    params = [(f"vocabulary{i}", nn.Parameter(tiny.expand(128256, 4))) for i in range(64)]
    opt = lather.Shampoo(params, max_preconditioner_dim=math.inf)
    for _, p in params:
        p.grad = tiny.expand(128256, 4)
    report = opt.plan()
    assert report.state_bytes > 64 * 2 * 61 * 2**30
    for call in (opt.step, opt.state_dict):
        with pytest.raises(ValueError, match=r"GiB.*128256.*vocabulary.*max_preconditioner_dim.*large_dim"):
            call()
    assert len(opt.state) == 0
    opt.param_groups[0].update(max_preconditioner_dim=64, large_dim="diagonal")
    assert opt.plan().state_bytes < 2**30


# A learning rate in a tensor, changed in place.

RATES = [NAN, INF, -1.0]


@pytest.mark.parametrize("bad", RATES)
def test_a_learning_rate_that_becomes_wrong_in_place(bad: float) -> None:
    """As a number that is wrong: an error, nothing changes, and training goes on with the next one."""
    params, clean = parameters(), parameters()
    lr = torch.tensor(0.02)
    opt, other = (lather.Shampoo(each.items(), **FAST | {"lr": rate}) for each, rate in ((params, lr), (clean, lr.clone())))
    train(opt, params, 3)
    train(other, clean, 3)
    set_grads(params, 3)
    with pytest.raises(ValueError, match=r"^lr=.*at least 0 and finite"):
        lr.fill_(bad)
        opt.step()
    lr.fill_(0.02)
    train(opt, params, 3, 3)
    train(other, clean, 3, 3)
    assert_same([snapshot(opt, p) for p in params.values()], [snapshot(other, p) for p in clean.values()])
    assert opt.param_groups[0]["peak_lr"] == other.param_groups[0]["peak_lr"]


@pytest.mark.parametrize("bad", RATES)
@pytest.mark.parametrize("options", [{"weight_decay": 0.1, "weight_decay_mode": "corrected"}, {"preconditioner": "soap"}], ids=str)
def test_a_wrong_learning_rate_on_the_device(bad: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not know, so all blocks skip the step and are counted, as for a gradient that is not finite."""
    for module in ("settings", "storage.update"):
        monkeypatch.setattr(f"lather.{module}.is_on_host", lambda tensor: False)
    params, lr = parameters(), torch.tensor(0.02)
    opt = lather.Shampoo(params.items(), **FAST | options | {"lr": lr})
    train(opt, params, 3)
    before, peak = [snapshot(opt, p) for p in params.values()], float(opt.param_groups[0]["peak_lr"])
    lr.fill_(bad)
    with pytest.warns(lather.NumericalWarning, match="had a gradient .* or a learning rate that is NaN") as caught:
        train(opt, params, 2, 3)
    assert len(caught) == len(params)
    for (w, state), (old, kept) in zip([snapshot(opt, p) for p in params.values()], before, strict=True):
        assert state.pop("step") == 5 and kept.pop("step") == 3
        assert_same((w, strip(state)), (old, strip(kept)))
    assert {name: found["skipped"] for name, found in opt.health().items()} == dict.fromkeys(params, 2)
    assert float(opt.param_groups[0]["peak_lr"]) == peak
    lr.fill_(0.02)
    train(opt, params, 2, 5)
    assert all(p.isfinite().all() and not torch.equal(p, old) for p, (old, _) in zip(params.values(), before, strict=True))


def strip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what a refresh makes from the rest."""
    return {key: value for key, value in state.items() if key[0] not in "XQ"}


def test_raising_reads_a_learning_rate_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lather.settings.is_on_host", lambda tensor: False)
    params, lr = parameters(), torch.tensor(0.02)
    opt = lather.Shampoo(params.items(), on_nonfinite="raise", **FAST | {"lr": lr})
    train(opt, params, 2)
    lr.fill_(NAN)
    with pytest.raises(ValueError, match=r"^lr="):
        train(opt, params, 1, 2)


# Gradients.


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_sparse_gradient(name: str) -> None:
    params = parameters()
    opt = lather.Shampoo(params.items(), **FAST)
    train(opt, params, 2)
    before = [snapshot(opt, p) for p in params.values()]
    params[name].grad = params[name].grad.to_sparse()
    with pytest.raises(RuntimeError, match=f"parameter {name} .*sparse.*(sparse=False|SparseAdam)"):
        opt.step()
    assert_same([snapshot(opt, p) for p in params.values()], before)


BLOCK = (slice(3, 6), slice(3, 5))  # the last of the four blocks of a 6 x 5 matrix


WAITS = [
    ((NAN, INF, -INF)[(i + j) % 3], g, at) for i, g in enumerate(("adam", "adagrad", "sgd", None)) for j, at in enumerate((1, 2, 4))
]


@pytest.mark.parametrize(("bad", "graft", "at"), WAITS)
def test_a_bad_block_waits_and_the_others_do_not(bad: float, graft: str | None, at: int) -> None:
    """At the first step, at the first refresh and later: as if the block had not been there, for that step."""
    params, clean = parameters(), parameters()
    options = FAST | {"graft": graft, "weight_decay": 0.1}
    opt, other = lather.Shampoo(params.items(), **options), lather.Shampoo(clean.items(), **options)
    train(opt, params, at - 1)
    train(other, clean, at - 1)
    set_grads(params, at)
    set_grads(clean, at)
    params["weight"].grad[4, 4] = bad
    if at > 1:
        before = snapshot(opt, params["weight"])
    else:
        before = params["weight"].detach().clone(), {}
    with pytest.warns(lather.NumericalWarning, match="parameter weight ") as caught:
        opt.step()
    assert len(caught) == 1
    other.step()
    w, state = snapshot(opt, params["weight"])
    good, good_state = snapshot(other, clean["weight"])
    assert_same(w[BLOCK], before[0][BLOCK])
    kept = [key for key in before[1] if key.endswith(".3") and key[0] != "X"]
    assert_same({key: state[key] for key in kept}, {key: before[1][key] for key in kept})
    assert len(kept) >= 3 or at == 1
    assert state["step"] == at
    if at > 1:
        assert_same(state["momentum"][BLOCK], before[1]["momentum"][BLOCK])
    else:
        assert not state["momentum"][BLOCK].any()
        assert not state["L0.3"].any()
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[BLOCK] = False
    assert_same(w[mask], good[mask])
    assert_same(state["momentum"][mask], good_state["momentum"][mask])
    rest = [key for key in state if "." in key and not key.endswith(".3")]
    assert_same({key: state[key] for key in rest}, {key: good_state[key] for key in rest})
    for name in ("twin", "conv", "bias"):
        assert_same(snapshot(opt, params[name]), snapshot(other, clean[name]))
    train(opt, params, 4, at)
    assert all(v.isfinite().all() for s in opt.state.values() for v in s.values())
    assert not torch.equal(params["weight"][BLOCK], w[BLOCK])


def test_bad_gradients_are_reported_once_per_parameter() -> None:
    params = parameters()
    opt = lather.Shampoo(params.items(), **FAST)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(6):
            set_grads(params, t)
            params["weight"].grad.fill_(NAN)
            if t > 2:
                params["bias"].grad[0] = INF
            opt.step()
    assert [w.category for w in caught] == [lather.NumericalWarning] * 2
    assert [name for w in caught for name in params if f" {name} " in str(w.message)] == ["weight", "bias"]
    assert issubclass(lather.NumericalWarning, RuntimeWarning)


def test_a_vector_waits_whole() -> None:
    params = parameters()
    opt = lather.Shampoo(params.items(), **FAST)
    train(opt, params, 3)
    before = snapshot(opt, params["bias"])
    set_grads(params, 3)
    params["bias"].grad[2] = NAN
    with pytest.warns(lather.NumericalWarning, match="parameter bias "):
        opt.step()
    w, state = snapshot(opt, params["bias"])
    assert state.pop("step") == before[1].pop("step") + 1
    assert_same((w, state), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_raising_on_bad_gradients(bad: float, dtype: torch.dtype) -> None:
    params = {name: nn.Parameter(p.detach().to(dtype)) for name, p in parameters().items()}
    opt = lather.Shampoo(params.items(), on_nonfinite="raise", **FAST)
    train(opt, params, 4)
    before = [snapshot(opt, p) for p in params.values()]
    set_grads(params, 4)
    params["conv"].grad[1, 1, 1] = bad
    with pytest.raises(FloatingPointError, match=r"parameter conv .*step 5\b"):
        opt.step()
    assert_same([snapshot(opt, p) for p in params.values()], before)
    train(opt, params, 2, 4)


def test_raising_is_per_group() -> None:
    params = parameters()
    groups = [{"params": [("weight", params["weight"])]}, {"params": [("bias", params["bias"])], "on_nonfinite": "raise"}]
    opt = lather.Shampoo(groups, **FAST)
    set_grads(params, 0)
    params["weight"].grad.fill_(NAN)
    with pytest.warns(lather.NumericalWarning, match="weight"):
        opt.step()
    params["bias"].grad[0] = NAN
    with pytest.raises(FloatingPointError, match="bias"):
        opt.step()


# Roots that fail.


class Eigh:
    """Stands in for `torch.linalg.eigh` and fails for stacks that `fails` picks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.true, self.fails = torch.linalg.eigh, lambda a: False
        monkeypatch.setattr(torch.linalg, "eigh", self)

    def __call__(self, a: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.fails(a):
            raise torch.linalg.LinAlgError("does not converge")
        return self.true(a, *args, **kwargs)


@pytest.fixture
def eigh(monkeypatch: pytest.MonkeyPatch) -> Eigh:
    return Eigh(monkeypatch)


def of_size(d: int) -> Callable[[Tensor], bool]:
    return lambda a: a.shape[-1] == d


def roots(opt: lather.Shampoo, p: Tensor) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in opt.state[p].items() if key.startswith("X")}


SHAPED = {"max_preconditioner_dim": 8, "momentum": 0.0, "root": "eigh", "merge_dims": False}


def test_a_failed_refresh_keeps_the_last_good_root(eigh: Eigh) -> None:
    params, clean = parameters(), parameters()
    params["weight"] = nn.Parameter(torch.cat([params["weight"].detach()] * 2, 1)[:, :7])
    clean["weight"] = nn.Parameter(params["weight"].detach().clone())
    opt, other = (lather.Shampoo(p.items(), **FAST | SHAPED) for p in (params, clean))
    train(opt, params, 3)
    train(other, clean, 3)
    before = roots(opt, params["weight"])
    eigh.fails = of_size(7)
    with pytest.warns(lather.NumericalWarning, match="block 0 of parameter weight ") as caught:
        train(opt, params, 1, 3)
    assert len(caught) == 1
    eigh.fails = lambda a: False
    train(other, clean, 1, 3)
    after = roots(opt, params["weight"])
    assert_same(after["X1.0"], before["X1.0"])
    assert not torch.equal(roots(other, clean["weight"])["X1.0"], before["X1.0"])
    for name in ("twin", "conv", "bias"):
        assert_same(snapshot(opt, params[name]), snapshot(other, clean[name]))
    assert params["weight"].isfinite().all()
    train(opt, params, 2, 4)
    assert not torch.equal(roots(opt, params["weight"])["X1.0"], before["X1.0"])


def test_a_first_root_that_fails(eigh: Eigh) -> None:
    """There is no last good one: the step is finite all the same, and of the graft's size."""
    params = parameters()
    opt = lather.Shampoo(params.items(), **FAST | SHAPED)
    eigh.fails = lambda a: True
    with pytest.warns(lather.NumericalWarning):
        train(opt, params, 3)
    assert all(p.isfinite().all() for p in params.values())


@pytest.mark.parametrize("factors", ["full", "packed"])
@pytest.mark.parametrize("limit", [0, 2])
def test_too_many_failures_in_a_row(eigh: Eigh, limit: int, factors: str) -> None:
    params = {"first": nn.Parameter(torch.ones(3, 3)), "wide": nn.Parameter(torch.randn(3, 14))}
    opt = lather.Shampoo(params.items(), **FAST | SHAPED, max_failed_refreshes=limit, factors=factors)
    train(opt, params, 2)
    eigh.fails = of_size(7)
    for refresh in range(limit):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lather.NumericalWarning)
            train(opt, params, 2, 2 + 2 * refresh)
    with pytest.raises(RuntimeError, match=r"block [01] of parameter wide") as error:
        train(opt, params, 2, 20)
    text = str(error.value)
    assert "(3, 7)" in text
    assert f"{limit + 1} times" in text
    assert f"max_failed_refreshes={limit}" in text
    assert "condition" in text
    assert "e+" in text
    assert all(p.isfinite().all() for p in params.values())


@pytest.mark.parametrize("where", ["lather.roots.solve", "lather.compute.refresh.factors_of"])
def test_an_error_in_the_background_is_a_failed_refresh(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not stop one rank of several: roots are kept, the user is warned, and eigh tries again. The error may already
    come when the refresh copies its factors."""
    params = {"weight": nn.Parameter(torch.randn(6, 4)), "bias": nn.Parameter(torch.randn(4))}
    options = FAST | SHAPED | {"root_device": "cpu", "refresh_delay": 1, "root": "newton"}
    opt = lather.Shampoo(params.items(), **options)
    train(opt, params, 5)
    before = roots(opt, params["weight"])
    with monkeypatch.context() as patch:
        patch.setattr(where, mock.Mock(side_effect=MemoryError("too little")))
        with pytest.warns(lather.NumericalWarning) as caught:
            train(opt, params, 2, 5)
        texts = sorted(str(w.message) for w in caught)
        assert len(texts) == 2 and "MemoryError: too little" in texts[0] and "block 0 of parameter weight" in texts[1]
        assert opt.health() == {"weight": {"skipped": 0, "failed": 1, "restarted": 0}}
        assert_same(roots(opt, params["weight"]), before)
        if where == "lather.roots.solve":
            train(opt, params, 2, 7)  # by eigh
    train(opt, params, 2, 9)
    assert opt.health() == {}
    assert [bank.background.error for bank in opt._session.run.banks] == [None, None]
    assert not torch.equal(roots(opt, params["weight"])["X0.0"], before["X0.0"])
    assert all(p.isfinite().all() for p in params.values())


BROKEN: list[dict[str, Any]] = [
    {},
    {"graft": None, "betas": (0.0, 0.95)},
    {"preconditioner": "soap"},
    {"preconditioner": "kl", "graft": "adagrad", "factors": "packed"},
    {"root": "track", "refresh_delay": 1},
    {"preconditioner": None},
]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("options", BROKEN, ids=str)
def test_state_that_is_not_finite_freezes_nothing(options: dict[str, Any], bad: float) -> None:
    """Whatever role it is in, parameters move again soon, and all state is finite again. Where a direction was lost, one warning
    and health() name the parameter."""
    roles = set(lather.Shampoo([nn.Parameter(torch.ones(6, 5))], **options).state_dict()["state"][0]) - {"step"}
    for role in sorted(roles):
        params = {"weight": nn.Parameter(torch.ones(6, 5)), "twin": nn.Parameter(torch.ones(6, 5))}
        opt = lather.Shampoo(params.items(), precondition_frequency=4, refresh_warmup=0.0, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", lather.NumericalWarning)
            train(opt, params, 9)
            opt.state[params["weight"]][role].flatten()[-1] = bad
            train(opt, params, 9, 9)
            before = params["weight"].detach().clone()
            train(opt, params, 1, 18)
        assert params["weight"].isfinite().all() and (params["weight"] != before).any(), role
        assert all(value.isfinite().all() for value in opt.state[params["weight"]].values()), role
        told = [str(w.message) for w in caught]
        assert len(told) == len(opt.health()) <= 1 and all("parameter weight;" in text for text in told), role
        assert [(found["failed"], found["restarted"]) for found in opt.health().values()] == [(0, 1)] * len(told)
        if role[0] in "mvwL":
            assert told, role


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(
    "averaged", [{"momentum": 0.9}, {"averaging": "schedule_free"}, {"averaging": "gpa", "averaging_beta": 0.3}]
)
def test_momentum_that_is_not_finite_starts_anew(averaged: dict[str, Any], bad: float) -> None:
    params = {"weight": nn.Parameter(torch.ones(6, 5))}
    opt = lather.Shampoo(params.items(), lr=0.02, **averaged)
    train(opt, params, 3)
    role = ({"momentum", "z", "x"} & opt.state[params["weight"]].keys()).pop()
    opt.state[params["weight"]][role][0, 0] = bad
    for t in range(3, 6):
        before = params["weight"].detach().clone()
        train(opt, params, 1, t)
        assert params["weight"].isfinite().all() and params["weight"][0, 0] != before[0, 0]
    assert opt.state[params["weight"]][role].isfinite().all()


@pytest.mark.parametrize(
    ("role", "graft"),
    [("m.0", "adam"), ("v.1", "adam"), ("L0.0", "adam"), ("L0.0", "adafactor"), ("X1.0", "adam"), ("momentum", "adam")],
)
def test_a_checkpoint_that_is_not_finite_is_told_of(role: str, graft: str) -> None:
    params = parameters()
    opt = lather.Shampoo(params.items(), graft=graft, **FAST)
    train(opt, params, 4)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0][role].flatten()[0] = NAN
    with pytest.warns(lather.NumericalWarning, match=r"the checkpoint has .* parameter weight;") as caught:
        opt.load_state_dict(saved)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert role == "momentum" or opt.health() == {"weight": {"skipped": 0, "failed": 0, "restarted": 1}}
    before = params["weight"].detach().clone()
    train(opt, params, 4, 4)
    assert (params["weight"] != before).all() and all(v.isfinite().all() for v in opt.state[params["weight"]].values())


@pytest.mark.parametrize("averaged", [{"averaging": "schedule_free"}, {"averaging": "gpa", "averaging_beta": 0.3}], ids=str)
def test_eval_mode_shows_no_nan(averaged: dict[str, Any]) -> None:
    params = {"weight": nn.Parameter(torch.ones(6, 5))}
    opt = lather.Shampoo(params.items(), lr=0.02, **averaged)
    train(opt, params, 3)
    role = ({"z", "x"} & opt.state[params["weight"]].keys()).pop()
    opt.state[params["weight"]][role][0, 0] = NAN
    opt.eval()
    assert params["weight"].isfinite().all()


@pytest.mark.parametrize("role", ["y", "weight_sum"])
def test_an_average_that_is_not_finite_is_refused(role: str) -> None:
    params = parameters()
    opt = lather.Shampoo(params.items(), averaging="schedule_free", betas=(0.0, 0.95))
    train(opt, params, 2)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0][role].fill_(NAN)
    with pytest.raises(ValueError, match=f"{role} for parameter weight has NaN or Inf"):
        opt.load_state_dict(saved)
    assert all(p.isfinite().all() for p in params.values())


def test_a_sum_that_overflows_starts_anew() -> None:
    w = nn.Parameter(torch.ones(6, 5))
    opt = lather.Shampoo([w], graft="adagrad", preconditioner=None)
    w.grad = 5e17 * (1 + torch.arange(30.0).view(6, 5) / 6)
    opt.step()
    opt.state[w]["v.0"].fill_(3.4e38)
    with pytest.warns(lather.NumericalWarning, match="starts anew"):
        opt.step()
    before = w.detach().clone()
    opt.step()
    assert w.isfinite().all() and (w != before).all()


@pytest.mark.parametrize("options", [{}, {"averaging": "schedule_free"}], ids=str)
def test_a_step_that_raises_does_not_count(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it raises in a refresh, before parameters have moved. The next step has the same bias corrections."""
    params = {"weight": nn.Parameter(torch.ones(6, 5)), "unused": nn.Parameter(torch.ones(3))}
    opt = lather.Shampoo(params.items(), precondition_frequency=2, refresh_warmup=0.0, **options)
    set_grads(params, 0)
    params["unused"].grad = None
    opt.step()
    before = {name: p.detach().clone() for name, p in params.items()}
    with monkeypatch.context() as patch:
        patch.setattr("lather.roots.solve", mock.Mock(side_effect=MemoryError("too little")))
        with pytest.raises(MemoryError):
            opt.step()
    assert [opt.state[p]["step"].item() for p in params.values()] == [1, 0]
    assert all(torch.equal(p, before[name]) for name, p in params.items())
    sums = [entry["weight_sum"].item() for entry in opt.state.values() if "weight_sum" in entry]
    assert sums == [1e-6, 0.0][: len(sums)]  # the square of the learning rate, for one step
    opt.step()
    assert [opt.state[p]["step"].item() for p in params.values()] == [2, 0]
    assert opt._session.run.steps == [2, 0]


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_diagonal_factors_that_are_zero_have_no_root(delay: int) -> None:
    w = nn.Parameter(torch.zeros(6, 5))
    options = {"large_dim": "diagonal", "max_preconditioner_dim": 2, "graft": None, "damping": "absolute", "refresh_delay": delay}
    opt = lather.Shampoo([w], lr=1.0, precondition_frequency=5, refresh_warmup=0.0, **options)
    for t in range(12):
        w.grad = torch.zeros_like(w) if t < 6 else 1e-3 * torch.ones_like(w)
        before = w.detach().clone()
        opt.step()
        assert (w - before).abs().max() < 2


def test_recovery_starts_the_count_again(eigh: Eigh) -> None:
    params = parameters()
    opt = lather.Shampoo(params.items(), **FAST | SHAPED, max_failed_refreshes=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lather.NumericalWarning)
        for t in range(12):
            eigh.fails = lambda a, t=t: t % 4 == 1
            train(opt, params, 1, t)
        eigh.fails = lambda a: True
        with pytest.raises(RuntimeError, match="max_failed_refreshes=1"):
            train(opt, params, 4, 12)


def test_loading_starts_the_count_again(eigh: Eigh) -> None:
    """After too many failures the user goes back to a checkpoint and trains on."""
    params = parameters()
    opt = lather.Shampoo(params.items(), **FAST | SHAPED, max_failed_refreshes=0)
    train(opt, params, 2)
    saved = copy.deepcopy(opt.state_dict())
    eigh.fails = lambda a: True
    with pytest.raises(RuntimeError, match="max_failed_refreshes=0"):
        train(opt, params, 2, 2)
    eigh.fails = lambda a: False
    opt.load_state_dict(saved)
    assert opt.health() == {}
    before = roots(opt, params["weight"])
    train(opt, params, 3, 2)
    assert opt.health() == {} and opt.state[params["weight"]]["step"] == 5
    assert not torch.equal(roots(opt, params["weight"])["X0.0"], before["X0.0"])


@pytest.mark.parametrize("root", ["newton(iterations=1)", "higher_order(iterations=1)"])
def test_a_solver_that_gives_up_is_helped_out(root: str) -> None:
    """One round is never enough; float64 does what is left, silently and accurately."""
    params, exact = parameters(), parameters()
    opt, other = lather.Shampoo(params.items(), root=root, **FAST), lather.Shampoo(exact.items(), root="eigh", **FAST)
    train(opt, params, 2)
    train(other, exact, 2)
    torch.testing.assert_close(roots(opt, params["weight"]), roots(other, exact["weight"]), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("options", [FAST, PAPER | FAST, {"lr": 0.02}], ids=str)
def test_large_and_small_gradients(options: dict[str, Any]) -> None:
    """Finite gradients of any size give finite parameters and state."""
    for scale in (1e-30, 1e-15, 1e10, 1e18):
        params = parameters()
        opt = lather.Shampoo(params.items(), **options)
        start = params["weight"].detach().clone()
        for t in range(5):
            set_grads(params, t)
            for p in params.values():
                p.grad.mul_(scale)
            opt.step()
        assert scale < 1 or not torch.equal(params["weight"], start)
        assert all(p.isfinite().all() for p in params.values())
        assert all(v.isfinite().all() for s in opt.state.values() for v in s.values())
