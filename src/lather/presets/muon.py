"""The preset for Muon, with AdamW for everything that is not a matrix."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..optimizer import Shampoo
from ..options import OPTIONS, hint
from ..roots import NewtonSchulz
from ..routing import has_no_matrices
from .from_torch import IGNORED, REFUSED, build, carry, listed, plain

MUON = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")  # these become other options
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}  # torch's defaults
MUON_GROUP = {"preconditioner": "spectral", "graft": None, "max_preconditioner_dim": math.inf, "weight_decay_mode": "decoupled"}
# Options that are Muon's for the whole optimizer, so that AdamW's param groups need those of Shampoo.
CHANGED = ("beta3", "bias_correction", "max_preconditioner_dim", "polar", "polar_scale")
ADAMW_GROUP = {"preconditioner": None, "graft": "adam"} | {name: OPTIONS[name].default for name in CHANGED}


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
    """``Shampoo`` with the arguments of ``torch.optim.Muon`` for matrices, and of ``torch.optim.AdamW`` for everything else.

    ``adamw`` has the arguments of AdamW, with torch's defaults. AdamW takes parameters with fewer than two dimensions larger
    than 1, all kinds of a model (:func:`lather.route`) other than fused matrices and experts, and groups with another
    ``preconditioner``. ``betas`` is refused.

    >>> import torch, lather
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 24), torch.nn.LayerNorm(24))
    >>> opt = lather.muon(model, lr=0.02, adamw={"lr": 3e-4, "betas": (0.9, 0.95)})
    >>> [(row.name, row.method) for row in opt.plan().params]
    [('1.weight', 'spectral'), ('0.weight', 'adam'), ('2.weight', 'adam'), ('2.bias', 'adam'), ('1.bias', 'adam')]
    """
    given = dict(locals())
    others = carry(ADAMW | _checked(given.pop("adamw") or {}))
    params, options = given.pop("params"), given.pop("options")
    arguments = (*given, "adamw")
    given |= options
    return build(_groups(listed(params), given, others), _muon(given), arguments)


def _muon(given: Mapping[str, Any]) -> dict[str, Any]:
    """Muon's arguments as options of ``Shampoo``. Options that are given as such win."""
    if "betas" in given:
        raise ValueError(
            f"betas={given['betas']!r} is no argument of Muon: it has momentum; for AdamW's betas pass adamw={{'betas': ...}}"
        )
    mu = OPTIONS["momentum"].check("momentum", given["momentum"])
    nesterov = OPTIONS["nesterov"].check("nesterov", given["nesterov"]) and mu > 0
    scale, graft = given["adjust_lr_fn"], given.get("graft")
    if scale not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn={scale!r} is not valid: it must be None, 'original' or 'match_rms_adamw'")
    if graft is not None and scale is not None:
        raise ValueError(f"adjust_lr_fn={scale!r} has no effect with graft={graft!r}, which sets the step size; leave one out")
    averages = {"betas": (mu, 0.999), "beta3": "nesterov" if nesterov else None, "bias_correction": False}
    polar = {"polar": _newton_schulz(given), "polar_scale": None if graft is not None else scale or "original"}
    return MUON_GROUP | averages | polar | plain({name: value for name, value in given.items() if name not in MUON})


def _newton_schulz(given: Mapping[str, Any]) -> NewtonSchulz:
    try:
        return NewtonSchulz(given["ns_steps"], given["ns_coefficients"], given["eps"])
    except ValueError as error:  # in the names of Muon's arguments
        raise ValueError(f"{'' if str(error).startswith('eps') else 'ns_'}{error}") from None


def _groups(items: list[Any], given: dict[str, Any], adamw: dict[str, Any]) -> list[Any]:
    """Param groups of matrices with Muon's arguments ``given``, and of everything else with AdamW's options."""
    if items and not isinstance(items[0], dict):
        items = [{"params": items}]
    found = []
    for group in items:
        if not isinstance(group, dict) or isinstance(group["params"], set):
            found.append(group)  # torch explains the mistake
            continue
        own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        takes_matrices = own.get("preconditioner", None if has_no_matrices(group) else "spectral") == "spectral"
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if "param_names" in group:
            params = list(zip(group["param_names"], params, strict=True))
        matrices: list[Any] = []
        others: list[Any] = []
        for param in params:
            (matrices if takes_matrices and _is_matrix(param, given | own) else others).append(param)
        if matrices or not others:
            found.append({"params": matrices} | _muon(given | own))
        if others:
            if takes_matrices:  # the group was divided, and Muon's arguments were for its matrices
                own = {name: value for name, value in own.items() if name not in MUON or name == "eps"}
            found.append({"params": others} | ADAMW_GROUP | adamw | carry(own))
    return found


def _is_matrix(item: Any, options: Mapping[str, Any]) -> bool:
    """Whether Muon takes a parameter, with or without a name. What is no tensor goes on to torch, which explains the mistake."""
    param = item[1] if isinstance(item, tuple) and len(item) == 2 else item
    if not isinstance(param, Tensor):
        return True
    order = sum(size != 1 for size in param.shape[options.get("batch_dims", 0) :])
    return order >= (1 if options.get("precondition_1d") else 2)


def _checked(adamw: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(adamw, Mapping):
        raise ValueError(f"adamw={adamw!r} must be a mapping such as {{'lr': 3e-4, 'betas': (0.9, 0.95)}}")
    for name in adamw:
        if name not in {*ADAMW, *IGNORED, *REFUSED, *OPTIONS, "factor_eps"}:
            raise ValueError(f"adamw has the unknown option {name!r}{hint(name, ADAMW)}")
    return dict(adamw)
