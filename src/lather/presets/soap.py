"""SOAP, by the arguments of its authors' optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..optimizer import Shampoo
from ..options import OPTIONS
from .from_torch import number, numbers, shampoo

OURS = {"max_precond_dim": "max_preconditioner_dim", "correct_bias": "bias_correction"}


def soap(
    params: Any,
    lr: float | Tensor = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = -1,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: float = 10000,
    merge_dims: bool = False,
    precondition_1d: bool = False,
    normalize_grads: bool = False,
    data_format: str = "channels_first",
    correct_bias: bool = True,
    **options: Any,
) -> Shampoo:
    """``Shampoo`` with the recipe of SOAP (arXiv 2409.11321), by the arguments of its authors' optimizer.

    | SOAP | Shampoo |
    |---|---|
    | the method | ``preconditioner="soap"``, ``graft=None``; parameters that have no factors follow Adam |
    | ``lr``, ``weight_decay`` (decoupled), ``precondition_frequency``, ``merge_dims``, ``precondition_1d`` | the same |
    | ``betas`` | the same; ``betas[1]`` averages the factors too |
    | ``shampoo_beta`` | refused from 0 on: factors have no average of their own |
    | ``eps`` | ``eps`` and, of parameters that have no factors, ``graft_eps`` |
    | ``max_precond_dim`` | ``max_preconditioner_dim`` with ``large_dim="diagonal"``: a larger dimension is not rotated |
    | ``correct_bias`` | ``bias_correction`` |
    | ``normalize_grads``, another ``data_format`` | refused |

    Their first step computes bases and moves nothing. Here it is Adam's, and so are all until the first refresh, at step
    ``precondition_frequency``; if that is 1, at step 2, for bases made of one gradient make the next step far too long. A
    group with ``preconditioner=None``, such as :func:`route` makes, is Adam's as well.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.soap(model, lr=1e-3, max_precond_dim=4096)
    >>> [row.method for row in opt.plan().params], opt.param_groups[0]["max_preconditioner_dim"]
    (['soap', 'adam'], 4096)
    """
    opt = shampoo(dict(locals()), _carry, preconditioner="soap", graft=None, large_dim="diagonal")
    for chosen in (opt.defaults, *opt.param_groups):
        if (chosen["preconditioner"], chosen["precondition_frequency"]) == ("soap", 1):
            chosen["start_preconditioning_step"] = chosen["start_preconditioning_step"] or 2
    return opt


def _carry(given: Mapping[str, Any]) -> dict[str, Any]:
    """As :func:`~lather.presets.from_torch.carry`, for the arguments of SOAP."""
    if given.get("shampoo_beta", -1) >= 0:
        raise ValueError(f"shampoo_beta={given['shampoo_beta']!r} is not supported: betas[1] averages factors too; leave it out")
    if given.get("normalize_grads"):
        raise ValueError("normalize_grads=True is not supported: gradients are taken as they are; leave it out")
    if given.get("data_format", "channels_first") != "channels_first":
        raise ValueError(
            f"data_format={given['data_format']!r} is not supported: dimensions are in torch's order, in any memory format; "
            "leave it out"
        )
    options = {OURS.get(name, name): value for name, value in given.items()}
    if "betas" in options:
        options["betas"] = numbers(options["betas"])
    if "weight_decay" in options:
        options["weight_decay"] = number(options["weight_decay"])
    for name in ("shampoo_beta", "normalize_grads", "data_format"):
        options.pop(name, None)
    if "eps" in options:
        options["graft_eps"] = options["eps"] = OPTIONS["graft_eps"].check("eps", options["eps"])
    return options
