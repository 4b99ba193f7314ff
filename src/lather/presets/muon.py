"""Muon for matrices beside AdamW for all else, by the arguments of torch's classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..optimizer import Shampoo
from ..options import OPTIONS
from ..roots import NewtonSchulz
from ..routing import is_kind, route
from .from_torch import REFUSED, SAME_RESULT, carry, made, number

MUON = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")  # arguments that mean something else here
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}  # of torch
# AdamW beside Muon: what that changes has its default again.
BESIDE = {name: OPTIONS[name].default for name in ("beta3", "bias_correction", "max_preconditioner_dim", "polar", "polar_scale")}


def muon(
    params: Any,
    lr: float | Tensor = 1e-3,
    weight_decay: float | Tensor = 0.1,
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
    beside = carry(ADAMW | _checked(given.pop("adamw") or {}))
    params, options = given.pop("params"), given.pop("options")
    given |= options
    groups = _muon_groups(route(params) if isinstance(params, nn.Module) else params, given, beside)
    return made(groups, _muon(given))


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
        raise ValueError(f"adjust_lr_fn={scale!r} has no effect with graft={graft!r}, whose lengths directions have; leave one out")
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
    decay = {"weight_decay": number(given["weight_decay"])} if "weight_decay" in given else {}
    return recipe | {name: value for name, value in given.items() if name not in MUON} | decay


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
            if _is_muons(group):  # and was divided by shape: what is Muon's is for its matrices
                own = {name: value for name, value in own.items() if name not in MUON or name == "eps"}
            found.append({"params": others, "preconditioner": None, "graft": "adam"} | BESIDE | beside | carry(own))
    return found


def _is_muons(group: Mapping[str, Any]) -> bool:
    """Whether Muon takes the matrices of a group."""
    return bool(group.get("preconditioner", None if is_kind(group) else "spectral") == "spectral")


def _sorted(group: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The parameters of a group that Muon takes, and those that AdamW takes."""
    params = group["params"]
    if isinstance(params, set):
        return params, []  # torch says what is wrong with that
    params = [params] if isinstance(params, Tensor) else list(params)
    if "param_names" in group:
        params = list(zip(group["param_names"], params, strict=True))
    if not _is_muons(group):
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
            raise ValueError(f"adamw has the unknown option {name!r}; it has those of AdamW, {', '.join(ADAMW)}, and of Shampoo")
    return dict(adamw)
