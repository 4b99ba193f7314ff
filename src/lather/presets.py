"""Recipes of torch's optimizers, and of SOAP, carried over to :class:`Shampoo`.

A preset takes the arguments of torch's class, with its defaults, and then any options of ``Shampoo``, which win over what
the preset chose. That holds for param groups too. One name has two meanings: ``eps`` is torch's here, ``graft_eps`` in
``Shampoo``; the damping of the factors, which ``Shampoo`` calls ``eps``, is ``factor_eps``. (:func:`soap` has no damping.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .optimizer import Shampoo
from .options import OPTIONS

Carry = Callable[[Mapping[str, Any]], dict[str, Any]]
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
OF_SOAP = {"max_precond_dim": "max_preconditioner_dim", "correct_bias": "bias_correction"}  # what its authors call them


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


def soap(
    params: Any,
    lr: float | Tensor = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = -1,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: float = 10000,
    merge_dims: bool = False,
    precondition_1d: bool = False,
    normalize_grads: bool = False,
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
    | ``normalize_grads`` | refused |

    Their first step computes bases and moves nothing. Here it is Adam's, and so are all until the first refresh, at step
    ``precondition_frequency``. A group with ``preconditioner=None``, such as :func:`route` makes, is Adam's as well.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.soap(model.named_parameters(), lr=1e-3, max_precond_dim=4096)
    >>> [row.method for row in opt.plan().params], opt.param_groups[0]["max_preconditioner_dim"]
    (['soap', 'adam'], 4096)
    """
    return _shampoo(dict(locals()), _carry_soap, preconditioner="soap", graft=None, large_dim="diagonal")


def _shampoo(given: dict[str, Any], carry: Carry | None = None, **recipe: Any) -> Shampoo:
    """``given`` are a preset's arguments by name: ``params``, torch's own, and ``options`` for what is not torch's."""
    params, options, carry = given.pop("params"), given.pop("options"), carry or _carry
    return Shampoo(_groups(params, carry), **recipe | carry(given) | carry(options))


def _groups(params: Any, carry: Carry) -> Any:
    """Parameters as they are, param groups with their options carried over."""
    if isinstance(params, Tensor):
        return params  # torch says what is wrong with that
    return [carry(item) if isinstance(item, dict) else item for item in params]


def _carry_soap(given: Mapping[str, Any]) -> dict[str, Any]:
    """As :func:`_carry`, for the arguments of SOAP."""
    if given.get("shampoo_beta", -1) >= 0:
        raise ValueError(
            f"shampoo_beta={given['shampoo_beta']!r} is not supported: betas[1] averages factors too; leave it out"
        )
    if given.get("normalize_grads"):
        raise ValueError("normalize_grads=True is not supported: gradients are taken as they are; leave it out")
    options = {OF_SOAP.get(name, name): value for name, value in given.items()}
    for name in ("shampoo_beta", "normalize_grads"):
        options.pop(name, None)
    if "eps" in options:
        options["graft_eps"] = options["eps"] = OPTIONS["eps"].check("eps", options["eps"])
    if options.get("preconditioner", "soap") is None:
        options.setdefault("graft", "adam")
    return options


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
