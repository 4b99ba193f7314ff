"""Recipes of torch's optimizers, carried over to :class:`Shampoo`.

A preset takes the arguments of torch's class, with its defaults, and then any options of ``Shampoo``, which win over what
the preset chose. That holds for param groups too. Names that torch has are torch's: ``eps`` is ``graft_eps`` in ``Shampoo``
(in :func:`muon`, like ``momentum`` and ``nesterov``, something else again); the damping of the factors, which ``Shampoo``
calls ``eps``, is ``factor_eps``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .optimizer import Shampoo
from .options import OPTIONS
from .roots import NewtonSchulz
from .routing import is_kind, route

SAME_RESULT = ("foreach", "fused")  # ways to compute the same, which say nothing here
REFUSED = {
    "amsgrad": "there is no running maximum of the second moment; leave it out",
    "capturable": "a step cannot be part of your CUDA graph (on CUDA it replays graphs of its own); leave it out",
    "differentiable": "no gradient flows through a step; leave it out",
    "lr_decay": "it is a schedule; leave it out, make "
    "torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + {value!r} * t)) and step it after every opt.step()",
    "initial_accumulator_value": "sums begin at zero; leave it out, and for first steps as short as with it pass "
    "eps={value!r} ** 0.5",
}
MUON = (
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
)  # arguments that mean something else here
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}  # of torch
# AdamW beside Muon: what that changes has its default again.
BESIDE = {
    name: OPTIONS[name].default
    for name in ("beta3", "bias_correction", "max_preconditioner_dim", "polar", "polar_scale")
}


def from_sgd(
    params: Any,
    lr: float | Tensor = 1e-3,
    momentum: float = 0,
    dampening: float = 0,
    weight_decay: float = 0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
    foreach: bool | None = None,
    differentiable: bool = False,
    fused: bool | None = None,
    **options: Any,
) -> Shampoo:
    """``Shampoo`` with the recipe of ``torch.optim.SGD``.

    | SGD | Shampoo |
    |---|---|
    | the method | ``graft="sgd"``, ``betas=(0.0, 0.999)``: no filter, and factors averaged over some 1000 steps |
    | ``lr``, ``momentum``, ``nesterov``, ``maximize`` | the same |
    | ``dampening`` | the same; the first momentum buffer, which torch does not dampen, is dampened too |
    | ``weight_decay`` | the same, with ``weight_decay_mode="l2"`` |
    | ``foreach``, ``fused`` | nothing: they do not change results |
    | ``differentiable`` | refused |

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_sgd(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, precondition_frequency=50)
    >>> [opt.param_groups[0][name] for name in ("graft", "momentum", "weight_decay_mode")]
    ['sgd', 0.9, 'l2']
    """
    return _shampoo(dict(locals()), graft="sgd", betas=(0.0, 0.999), weight_decay_mode="l2")


def from_adagrad(
    params: Any,
    lr: float | Tensor = 1e-2,
    lr_decay: float = 0,
    weight_decay: float = 0,
    initial_accumulator_value: float = 0,
    eps: float = 1e-10,
    foreach: bool | None = None,
    *,
    maximize: bool = False,
    differentiable: bool = False,
    fused: bool | None = None,
    **options: Any,
) -> Shampoo:
    """``Shampoo`` with the recipe of ``torch.optim.Adagrad``.

    | Adagrad | Shampoo |
    |---|---|
    | the method | ``graft="adagrad"``, ``betas=(0.0, 1.0)``: no filter, and factors are sums too |
    | ``lr``, ``maximize`` | the same |
    | ``lr_decay`` | refused above 0: ``LambdaLR(opt, lambda t: 1 / (1 + lr_decay * t))`` is the same |
    | ``weight_decay`` | the same, with ``weight_decay_mode="l2"`` |
    | ``initial_accumulator_value`` | refused above 0: sums begin at zero |
    | ``eps`` | ``graft_eps`` |
    | ``foreach``, ``fused`` | nothing: they do not change results |
    | ``differentiable`` | refused |

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_adagrad(model.parameters(), lr=0.05)
    >>> [opt.param_groups[0][name] for name in ("graft", "graft_eps", "betas")]
    ['adagrad', 1e-10, (0.0, 1.0)]
    """
    return _shampoo(dict(locals()), graft="adagrad", betas=(0.0, 1.0), weight_decay_mode="l2")


def from_adam(
    params: Any,
    lr: float | Tensor = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    amsgrad: bool = False,
    *,
    foreach: bool | None = None,
    maximize: bool = False,
    capturable: bool = False,
    differentiable: bool = False,
    fused: bool | None = None,
    decoupled_weight_decay: bool = False,
    **options: Any,
) -> Shampoo:
    """``Shampoo`` with the recipe of ``torch.optim.Adam``.

    | Adam | Shampoo |
    |---|---|
    | the method | ``graft="adam"`` |
    | ``lr``, ``maximize`` | the same |
    | ``betas`` | the same; ``betas[1]`` averages the factors too |
    | ``eps`` | ``graft_eps`` |
    | ``weight_decay`` | the same, with ``weight_decay_mode="l2"`` |
    | ``decoupled_weight_decay`` | ``weight_decay_mode="decoupled"`` |
    | ``foreach``, ``fused`` | nothing: they do not change results |
    | ``amsgrad``, ``capturable``, ``differentiable`` | refused |

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_adam(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.01, factor_eps=1e-10)
    >>> [opt.param_groups[0][name] for name in ("graft_eps", "eps", "weight_decay_mode")]
    [1e-06, 1e-10, 'l2']
    """
    return _shampoo(dict(locals()), graft="adam")


def from_adamw(
    params: Any,
    lr: float | Tensor = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    foreach: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
    fused: bool | None = None,
    **options: Any,
) -> Shampoo:
    """``Shampoo`` with the recipe of ``torch.optim.AdamW``.

    | AdamW | Shampoo |
    |---|---|
    | the method | ``graft="adam"`` |
    | ``lr``, ``maximize`` | the same |
    | ``betas`` | the same; ``betas[1]`` averages the factors too |
    | ``eps`` | ``graft_eps`` |
    | ``weight_decay`` | the same, with ``weight_decay_mode="decoupled"`` |
    | ``foreach``, ``fused`` | nothing: they do not change results |
    | ``amsgrad``, ``capturable``, ``differentiable`` | refused |

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_adamw(model.parameters(), lr=3e-4, weight_decay=0.1, precondition_frequency=20)
    >>> [opt.param_groups[0][name] for name in ("lr", "weight_decay", "graft", "precondition_frequency")]
    [0.0003, 0.1, 'adam', 20]
    """
    return _shampoo(dict(locals()), graft="adam", weight_decay_mode="decoupled")


def low_memory(params: Any, *arguments: Any, **options: Any) -> Shampoo:
    """:func:`from_adamw` with the smallest state that keeps its averages in float32.

    ``factors="packed"`` and ``root_dtype="bfloat16"``: 4 times a square parameter instead of 6 (AdamW has 2). Other recipes
    take the same two options. Large embeddings and heads cost most: :func:`route` gives them AdamW's state.

    >>> import torch, lather
    >>> model = torch.nn.Linear(64, 64, bias=False)
    >>> [make(model.parameters()).plan().state_bytes / model.weight.nbytes for make in (lather.from_adamw, lather.low_memory)]
    [6.0, 4.015625]
    """
    return from_adamw(params, *arguments, **{"factors": "packed", "root_dtype": "bfloat16"} | options)


def muon(
    params: Any,
    lr: float | Tensor = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    adamw: Mapping[str, Any] | None = None,
    **options: Any,
) -> Shampoo:
    """``Shampoo`` with the recipe of ``torch.optim.Muon`` for matrices, and of ``torch.optim.AdamW`` for all else.

    ``adamw`` has arguments of AdamW, whose defaults hold for what is not given. It takes what is no matrix: what has fewer
    than two dimensions larger than 1. Of a model, which may be given in the place of parameters and stands for
    ``route(model)``, it also takes embeddings, a head that is shaped like one, norms and biases; of param groups, those that
    ``route`` made for a kind, and those with a ``preconditioner`` other than ``"spectral"``.

    | Muon | Shampoo |
    |---|---|
    | the method | ``preconditioner="spectral"``, ``graft=None``, ``max_preconditioner_dim=math.inf``: whole matrices |
    | ``lr``, ``weight_decay`` | the same, with ``weight_decay_mode="decoupled"`` |
    | ``momentum`` | ``betas[0]``, with ``bias_correction=False``: it averages gradients, before they are orthogonalised |
    | ``nesterov`` | ``beta3=momentum**2`` |
    | ``ns_steps``, ``ns_coefficients``, ``eps`` | ``polar=NewtonSchulz(steps, coefficients, eps)`` |
    | ``adjust_lr_fn`` | ``polar_scale``, None being ``"original"`` |

    >>> import torch, lather
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 24), torch.nn.LayerNorm(24))
    >>> opt = lather.muon(model, lr=0.02, adamw={"lr": 3e-4, "betas": (0.9, 0.95)})
    >>> for row in opt.plan().params:
    ...     print(row.name, row.method)
    1.weight spectral
    0.weight adam
    2.weight adam
    2.bias adam
    1.bias adam
    """
    given = dict(locals())
    beside = _carry(ADAMW | _checked(given.pop("adamw") or {}))
    params, options = given.pop("params"), given.pop("options")
    given |= options
    groups = _muon_groups(route(params) if isinstance(params, nn.Module) else params, given, beside)
    return Shampoo(groups, **_muon(given))


def _muon(given: Mapping[str, Any]) -> dict[str, Any]:
    """Muon's arguments replaced by what they are here; options of ``Shampoo`` beside them win."""
    if "betas" in given:
        raise ValueError(
            f"betas={given['betas']!r} is no argument of Muon: it has momentum; AdamW's, beside it, are adamw={{'betas': ...}}"
        )
    mu = OPTIONS["momentum"].check("momentum", given["momentum"])
    inside = OPTIONS["nesterov"].check("nesterov", given["nesterov"]) and mu > 0
    scale = given["adjust_lr_fn"]
    if scale not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn={scale!r} is not valid: it must be None, 'original' or 'match_rms_adamw'")
    graft = given.get("graft")
    if graft is not None and scale is not None:
        raise ValueError(
            f"adjust_lr_fn={scale!r} has no effect with graft={graft!r}, whose lengths directions have; leave one out"
        )
    recipe = {
        "preconditioner": "spectral",
        "graft": None,
        "max_preconditioner_dim": math.inf,
        "betas": (mu, 0.999),
        "beta3": mu**2 if inside else None,
        "bias_correction": False,
        "polar": _newton_schulz(given),
        "polar_scale": None if graft is not None else scale or "original",
        "weight_decay_mode": "decoupled",
    }
    return recipe | {name: value for name, value in given.items() if name not in MUON}


def _newton_schulz(given: Mapping[str, Any]) -> NewtonSchulz:
    try:
        return NewtonSchulz(given["ns_steps"], given["ns_coefficients"], given["eps"])
    except ValueError as error:
        name = str(error).partition("=")[0]
        raise ValueError(str(error) if name in given else f"ns_{error}") from None


def _muon_groups(params: Any, given: dict[str, Any], beside: dict[str, Any]) -> Any:
    """Param groups of matrices with ``given``, and of all else with AdamW's options, which are ``beside`` them."""
    if isinstance(params, Tensor):
        return params  # torch says what is wrong with that
    items = list(params)
    if items and not isinstance(items[0], dict):
        items = [{"params": items}]
    found = []
    for group in items:
        if not isinstance(group, dict):
            return items  # as above
        own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        matrices, others = _sorted(group, given | own)
        if matrices or not others:
            found.append({"params": matrices} | _muon(given | own))
        if others:
            carried = _carry({name: value for name, value in own.items() if name not in MUON or name == "eps"})
            found.append({"params": others, "preconditioner": None, "graft": "adam"} | BESIDE | beside | carried)
    return found


def _sorted(group: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The parameters of a group that Muon takes, and those that AdamW takes."""
    params = group["params"]
    if isinstance(params, set):
        return params, []  # torch says what is wrong with that
    params = [params] if isinstance(params, Tensor) else list(params)
    if "param_names" in group:
        params = list(zip(group["param_names"], params, strict=True))
    method = group.get("preconditioner", None if is_kind(group) else "spectral")
    if method != "spectral":
        return [], params
    least = 1 if options.get("precondition_1d") else 2
    flags = [_order(item, options.get("batch_dims", 0)) >= least for item in params]
    matrices, others = ([p for p, flag in zip(params, flags, strict=True) if flag is kind] for kind in (True, False))
    return matrices, others


def _order(item: Any, batch_dims: int) -> int:
    """Dimensions larger than 1 of a parameter, with or without a name; something else is whatever it is."""
    param = item[1] if isinstance(item, tuple) and len(item) == 2 else item
    return sum(size != 1 for size in param.shape[batch_dims:]) if isinstance(param, Tensor) else 2


def _checked(adamw: Mapping[str, Any]) -> dict[str, Any]:
    known = {*ADAMW, *SAME_RESULT, *REFUSED, *OPTIONS, "factor_eps"}
    if not isinstance(adamw, Mapping):
        raise ValueError(f"adamw={adamw!r} must be a mapping such as {{'lr': 3e-4, 'betas': (0.9, 0.95)}}")
    for name in adamw:
        if name not in known:
            raise ValueError(
                f"adamw has the unknown option {name!r}; it has those of AdamW, {', '.join(ADAMW)}, and of Shampoo"
            )
    return dict(adamw)


def _shampoo(given: dict[str, Any], **recipe: Any) -> Shampoo:
    """``given`` are a preset's arguments by name: ``params``, torch's own, and ``options`` for what is not torch's."""
    params, options = given.pop("params"), given.pop("options")
    return Shampoo(_groups(params), **recipe | _carry(given) | _carry(options))


def _groups(params: Any) -> Any:
    """Parameters as they are, param groups with their options carried over."""
    if isinstance(params, Tensor):
        return params  # torch says what is wrong with that
    if isinstance(params, nn.Module):
        raise TypeError("params is a module; pass lather.route(model), or model.named_parameters()")
    return [_carry(item) if isinstance(item, dict) else item for item in params]


def _carry(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the optimizer, or a param group, with torch's replaced by what they are here."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in REFUSED:
            if value:
                raise ValueError(f"{name}={value!r} is not supported: " + REFUSED[name].format(value=value))
        elif name == "eps":
            options["graft_eps"] = OPTIONS["graft_eps"].check("eps", value)
        elif name == "factor_eps":
            options["eps"] = OPTIONS["eps"].check("factor_eps", value)
        elif name == "betas" and isinstance(value, (tuple, list)):
            options["betas"] = tuple(beta.item() if isinstance(beta, Tensor) else beta for beta in value)
        elif name == "decoupled_weight_decay":
            options["weight_decay_mode"] = "decoupled" if value else "l2"
        elif name not in SAME_RESULT:
            options[name] = value
    return options
