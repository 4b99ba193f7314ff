"""The cases of one process that ``trajectories.py`` records: tables of options, and of what may happen during training."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from distributed.cases import noise
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lather

Options = dict[str, Any]

MIXTURES = 100
# Defaults that have changed since the first version, so that recordings of all versions can be compared. Presets have their own.
FIRST: Options = {"betas": (0.9, 0.95), "beta3": None, "exponent": None, "refresh_warmup": 0.0}
ABSOLUTE: Options = {"damping": "absolute"}  # for methods that have damping
BASE = FIRST | {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1, "max_preconditioner_dim": 8, "precondition_frequency": 3}
SHAPES = {
    "wide": (20, 7),  # larger than max_preconditioner_dim
    "conv": (6, 3, 3, 3),
    "bias": (9,),
    "scalar": (),
    "thin": (1, 6, 1),
    "odd": (18, 5),
    "cube": (4, 3, 5),
    "table": (30, 4),
    "twin": (6, 5),
    "twins": (6, 5),
    "empty": (0, 2),
}


def zoo() -> nn.Module:
    """Parameters of all kinds of shapes."""
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})


def small() -> nn.Module:
    """Modules of all kinds that lather knows; the head is shaped like the embedding."""
    parts = {"embed": nn.Embedding(12, 6), "up": nn.Linear(6, 10), "norm": nn.LayerNorm(10), "down": nn.Linear(10, 6)}
    return nn.ModuleDict(parts | {"head": nn.Linear(6, 12, bias=False)})


@dataclass(frozen=True)
class Case:
    """Options, and what is unusual beside them."""

    options: Options
    make: str = "Shampoo"  # or a preset
    model: Callable[[], nn.Module] = zoo
    give: Callable[[nn.Module], Any] = lambda model: list(model.named_parameters())
    dtype: torch.dtype = torch.float32
    form: Callable[[Tensor], Tensor] = lambda x: x  # how parameters lie in memory
    grad: Callable[[int, int, Tensor], Tensor | None] = lambda number, step, grad: grad
    before: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)  # a step; 0: even ones


# What may happen before a step.


def resume(run: Any) -> None:
    """Through a file, into an optimizer that is new."""
    file = io.BytesIO()
    torch.save(run.opt.state_dict(), file)
    file.seek(0)
    run.opt = run.optimizer()
    run.opt.load_state_dict(torch.load(file, weights_only=True))


def look(run: Any, then: Callable[[Any], Any] = lambda run: None) -> None:
    """Evaluate, and do something in between."""
    run.opt.eval()
    run.keep(f"average {len(run.result)}")
    then(run)
    run.opt.train()


def take(pair: tuple[nn.Module, Any], run: Any) -> None:
    run.model, run.opt = pair


def add(run: Any) -> None:
    run.model["late"] = nn.Parameter(0.1 * noise("late", 0, (7, 6)))
    run.opt.add_param_group({"params": [("late", run.model["late"])], "lr": 0.02, "weight_decay": 0.0})


def put(**options: Any) -> Callable[[Any], Any]:
    return lambda run: [group.update(options) for group in run.opt.param_groups]


def groups(**own: Options) -> Callable[[nn.Module], Any]:
    """Param groups: one for each of these, with options of its own, after one for all others."""

    def give(model: nn.Module) -> Any:
        named = dict(model.named_parameters())
        apart = [{"params": [(name, named.pop(name))], **options} for name, options in own.items()]
        return [{"params": list(named.items())}, *apart]

    return give


def vary(**values: Iterable[Any]) -> list[Options]:
    return [{name: value} for name, some in values.items() for value in some]


# Tables.

METHODS: dict[str, Options] = {
    "shampoo": ABSOLUTE,
    "kl": ABSOLUTE | {"preconditioner": "kl"},
    "soap": ABSOLUTE | {"preconditioner": "soap", "graft": None},
    "spectral": {"preconditioner": "spectral", "graft": None},
    "elementwise": {"preconditioner": None},
}
GRAFTS, DECAYS = ("adam", "rmsprop", "adagrad", "sgd", "constant", None), ("decoupled", "l2", "corrected", "independent")
MOMENTUM: Options = {"momentum": 0.9, "nesterov": True, "dampening": 0.1}
FREE: Options = {"averaging": "schedule_free", "betas": (0.0, 0.95)}
GPA: Options = {"averaging": "gpa", "averaging_beta": 0.4, "averaging_decay": 0.8}
STAGGERED: Options = {"refresh": "staggered"}
DOUBLE: Options = {"state_dtype": "float64"}  # numbers of the host, which are float64, show all their bits

ANY: list[Options] = [  # for every method
    *vary(betas=[(0.0, 0.95), (0.9, 1.0), (0.0, 1.0), (0.5, 0.0)], beta3=[0.0, 0.5], eps=[None, 1e-2, 1e-10], momentum=[0.9]),
    *vary(maximize=[True], bias_correction=[False], weight_decay=[0.0], merge_dims=[False], precondition_1d=[True]),
    *vary(max_preconditioner_dim=[math.inf, 4], large_dim=["diagonal", "adagrad"], start_preconditioning_step=[1, 5, math.inf]),
    *vary(precondition_frequency=[1, 2], communication_dtype=["float32", "bfloat16", "float16", "int8"], stages=[2]),
    *({"graft": "adam"} | some for some in vary(graft_eps=[1e-3], graft_beta2=[0.5], precision=["float32"])),
    *(MOMENTUM | some for some in vary(weight_decay_mode=DECAYS, state_dtype=["float64", "bfloat16", "float16"])),
    *(some | mode for some in (FREE, GPA) for mode in vary(weight_decay_mode=DECAYS)),
    {"averaging": "schedule_free", "averaging_beta": 0.2, "averaging_powers": (1.0, 1.0)},
    {"bias_correction": False, "beta3": 0.81, "graft": "rmsprop"},
    {"large_dim": "diagonal", "merge_dims": False, "max_preconditioner_dim": 5},
]  # fmt: skip
OF_ROOTS: list[Options] = [  # for methods with roots or bases
    *vary(root=["eigh", "newton", "higher_order", "minimax", "track", lather.Newton(40), lather.HigherOrder(order=4)]),
    *vary(root=["track(iterations=1, tolerance=1e-3)", "minimax(relative_eps=1e-6)"]),
    *vary(refresh_delay=[1, 2], refresh_warmup=[0.1, 0.4], root_device=["cpu"], root_dtype=["bfloat16"], factors=["packed"]),
    *(STAGGERED | some for some in vary(root=["auto", "track"], refresh_delay=[1], refresh_warmup=[0.3])),
    *(STAGGERED | some for some in vary(precondition_frequency=[5], start_preconditioning_step=[5])),
    *({"refresh_delay": 1} | some for some in vary(root=["track"], root_device=["cpu"])),
    *({"damping": "relative"} | some for some in vary(eps=[1e-6, 1e-2], large_dim=["diagonal"])),
    {"factors": "packed", "root": "track", "refresh_delay": 1, "large_dim": "diagonal"},
    {"factors": "packed", "state_dtype": "bfloat16", "refresh": "staggered"},
]  # fmt: skip
OF_SHAMPOO: list[Options] = [
    *vary(exponent=[0.5, 1.0, 0.0, 0.455, {1: 0.25, 2: 0.5}, {2: 0.0, 3: 0.125}], exponent_multiplier=[1.82, 0.5]),
    *({"exponent": 0.5} | some for some in vary(root=["newton", "higher_order", "minimax", "track"])),
    *({"root": "newton(iterations=1)"} | some for some in vary(max_failed_refreshes=[0, 1], exponent=[0.455])),
    {"root_dtype": "float64", "state_dtype": "float64"},
]
OF_SPECTRAL: list[Options] = [
    *vary(polar=["polar_express", "svd", "newton_schulz(steps=3)", lather.NewtonSchulz(5, (3.0, -3.2, 1.2), 1e-7)]),
    *vary(polar=["polar_express(steps=6, lower=1e-2)"], polar_scale=["original", "match_rms_adamw"]),
    *({"graft": "adam"} | some for some in vary(polar=["svd", "polar_express"])),
]
VARIANTS: dict[str, list[Options]] = {
    "shampoo": ANY + OF_ROOTS + OF_SHAMPOO,
    **{"kl": ANY + OF_ROOTS, "soap": ANY + OF_ROOTS, "spectral": ANY + OF_SPECTRAL, "elementwise": ANY},
}
DURING: dict[str, Options] = {  # for every method: what is unusual, as fields of a case
    **{f"resumed at {step}": {"before": {step: resume}} for step in (1, 4, 6, 7)},
    **{f"{dtype}": {"dtype": dtype} for dtype in (torch.bfloat16, torch.float16, torch.float64)},
    **{f"all float64, {mode}": {"dtype": torch.float64, "options": DOUBLE | {"weight_decay_mode": mode}} for mode in DECAYS},
    "all float64, averaged": {"dtype": torch.float64, "options": DOUBLE | FREE},
    **{f"betas {betas} later": {"before": {5: put(betas=betas)}} for betas in ((0.5, 0.5), (0.9, 1.0), (0.0, 0.9))},
    **{f"{x}": {"grad": lambda n, t, g, x=x: g.masked_fill(g > 2, x) if t in (5, 6, 9) else g} for x in (math.nan, math.inf)},
    **{f"gradients times {x}": {"grad": lambda n, t, g, x=x: g * x} for x in (1e-20, 1e12, 1e25)},
    "raised": {"grad": lambda n, t, g: g / 0 if t == 5 else g, "options": {"on_nonfinite": "raise"}},
    "gaps": {"grad": lambda n, t, g: None if t == 7 or (n + t) % 4 == 0 else g},
    "gaps, staggered": {"grad": lambda n, t, g: None if (n + t) % 3 == 0 else g, "options": STAGGERED},
    "begun late": {"grad": lambda n, t, g: None if n % 2 and t < 5 else g},
    "zeros": {"grad": lambda n, t, g: torch.zeros_like(g) if n % 3 == 0 or t in (1, 2, 8) else g},
    "gradients transposed": {"grad": lambda n, t, g: g.mT.contiguous().mT if g.dim() > 1 else g},
    "schedule free, looked at": {"options": FREE, "before": {0: look}},
    "gpa, looked at": {"options": GPA, "before": {0: look}},
    "bfloat16, averaged": {"options": GPA, "before": {0: look}, "dtype": torch.bfloat16},
    "schedule free, resumed": {"options": FREE, "before": {5: resume}},
    "gpa, resumed": {"options": GPA, "before": {5: lambda run: look(run, resume)}},
    "step in eval mode": {"options": FREE, "before": {5: lambda run: run.opt.eval(), 7: lambda run: run.opt.train()}},
    "momentum later": {"before": {5: put(momentum=0.9), 9: put(momentum=0.0)}},
    "eps later": {"before": {5: put(eps=1e-3), 8: put(weight_decay=0.3, maximize=True)}},
    "frequency later": {"before": {5: put(precondition_frequency=2), 9: put(precondition_frequency=4)}},
    "staggered later": {"before": {5: put(refresh="staggered", communication_dtype="bfloat16")}},
    "root later": {"before": {5: put(root="track"), 10: put(root="eigh")}},
    "structure later": {"before": {5: put(max_preconditioner_dim=4), 7: put(max_preconditioner_dim=8)}},
    "lr a tensor": {"options": {"lr": torch.tensor(0.05)}},
    "lr a tensor, corrected": {"options": {"lr": torch.tensor(0.05), "weight_decay_mode": "corrected"}, "before": {5: resume}},
    "lr a tensor, averaged": {"options": FREE | {"lr": torch.tensor(0.05)}, "before": {0: look}},
    "lr zero": {"before": {5: put(lr=0.0)}},
    "group added": {"before": {5: add}},
    "group added, averaged": {"options": GPA, "before": {5: add}},
    "frozen": {"before": {4: lambda run: run.model["odd"].requires_grad_(False), 9: lambda run: run.model.requires_grad_()}},
    "copied": {"options": MOMENTUM, "before": {5: lambda run: take(copy.deepcopy((run.model, run.opt)), run)}},
    "pickled": {"options": GPA, "before": {5: lambda run: take(pickle.loads(pickle.dumps((run.model, run.opt))), run)}},
    "moved": {"options": MOMENTUM, "before": {5: lambda run: run.model.double().float()}},
    "probed": {"before": {1: lambda run: get_optimizer_state_dict(run.model, run.opt)}},
    "state replaced": {"before": {5: lambda run: [s.update(copy.deepcopy(s)) for s in run.opt.state.values()]}},
    "state cleared": {"before": {5: lambda run: run.opt.state.clear()}},
    "saved often": {"before": {0: lambda run: run.opt.state_dict(), 5: lambda run: run.opt.consolidate_state_dict()}},
    "one more step": {"before": {5: lambda run: run.opt.step(lambda: torch.ones(()))}},
    "channels last": {"form": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x},
    "transposed": {"form": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x, "options": MOMENTUM},
    "strided": {"form": lambda x: torch.stack([x, x], dim=-1)[..., 0], "options": MOMENTUM},
    "without names": {"give": lambda model: list(model.parameters())},
    "routed": {"give": lambda model: lather.route(model, [("tw|odd", {"lr": 0.01}), ("conv", {"weight_decay": 0.0})])},
    "split": {"give": groups(odd={"split": 3}, table={"split": (10, 20)}, wide={"split": (3, 4), "split_dim": 1})},
    "batched": {"give": groups(cube={"batch_dims": 1}, conv={"batch_dims": 2}, twin={"batch_dims": 1})},
    "methods": {"give": groups(wide=METHODS["soap"], conv=METHODS["kl"], odd=METHODS["spectral"], table={"graft": "sgd"})},
    "options": {"give": groups(wide={"lr": 0.01, "momentum": 0.5}, conv={"betas": (0.5, 0.9)}, odd={"maximize": True})},
}  # fmt: skip
GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "model": lambda model: model,
    "parameters": lambda model: list(model.parameters()),
    "rules": lambda model: lather.route(model, [("up", {"weight_decay": 0.3}), ("norm", {"lr": 0.01})]),
    "kinds": lambda model: lather.route(model, kinds={"embedding": {"lr": 0.1}, "head": {}, "bias": {"lr": 0.0}}),
    "no kinds": lambda model: lather.route(model, [(r"down\.weight", {"split": 2})], kinds=None),
}
PRESETS: dict[str, list[Options]] = {  # the first is given in every way
    "Shampoo": [{}],
    "from_adamw": [{"weight_decay": 0.3, "eps": 1e-6, "factor_eps": 1e-8}, {}, {"amsgrad": True}],
    "from_adam": [{"weight_decay": 0.1}, {}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "from_sgd": [MOMENTUM | {"weight_decay": 0.1}, {}, {"dampening": 0.3}],
    "from_adagrad": [{"weight_decay": 0.1, "eps": 1e-3}, {}, {"lr_decay": 0.1}],
    "muon": [{"adamw": {"lr": 0.01, "betas": (0.8, 0.9)}, "ns_steps": 3}, {}, {"adjust_lr_fn": "match_rms_adamw"}],
    "soap": [{}, {"precondition_frequency": 1}, {"max_precond_dim": 8, "correct_bias": False}, {"shampoo_beta": 0.9}],
    "low_memory": [STAGGERED | {"momentum": 0.9}, {}],
    "distributed_shampoo": [{"weight_decay": 0.1, "momentum": 0.5, "use_nesterov": True}, {}, {"inv_root_override": 2}],
}


def label(options: Options) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "plain"


def alone() -> Iterator[tuple[str, Case]]:
    """The cases of one process; the mixtures are of two variants and something unusual."""
    for method, options in METHODS.items():
        for graft, mode in ((graft, mode) for graft in GRAFTS for mode in DECAYS):
            yield f"{method}: {graft}, {mode}", Case(BASE | options | {"graft": graft, "weight_decay_mode": mode})
        for variant in VARIANTS[method]:
            yield f"{method}: {label(variant)}", Case(BASE | options | variant)
        for name, unusual in DURING.items():
            yield f"{method}: {name}", Case(**unusual | {"options": BASE | options | unusual.get("options", {})})
    for number in range(MIXTURES):
        dice = random.Random(number)
        method, name = dice.choice(list(METHODS)), dice.choice(list(DURING))
        first, second = dice.sample(VARIANTS[method], 2)
        mixed = METHODS[method] | DURING[name].get("options", {}) | first | second
        if not {"momentum", "averaging"} <= mixed.keys():
            yield f"mixture {number}: {name}, {label(mixed)}", Case(**DURING[name] | {"options": BASE | mixed})
    for preset, variants in PRESETS.items():
        for how, give in GIVEN.items():
            for options in variants if how == "model" else variants[:1]:
                some = {"lr": 0.03, "precondition_frequency": 3} | options
                yield f"{preset} of {how}: {label(options)}", Case(some, preset, small, give)
