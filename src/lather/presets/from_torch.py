"""Recipes of torch's optimizers by the arguments of torch's classes, and what all presets share.

``params`` is that of :class:`Shampoo`: a model, or parameters or param groups as torch's optimizers take them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..optimizer import Shampoo
from ..options import ARGUMENTS, FLAGS, OPTIONS, hint
from ..routing import route

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


def from_sgd(
    params: Any,
    lr: float | Tensor = 1e-3,
    momentum: float = 0,
    dampening: float = 0,
    weight_decay: float | Tensor = 0,
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
    | the method | ``graft="sgd"``, ``betas=(0.0, 0.95)``: no filter, and factors averaged over some 20 steps |
    | ``lr``, ``momentum``, ``nesterov``, ``maximize`` | the same |
    | ``dampening`` | the same; the first momentum buffer, which torch does not dampen, is dampened too |
    | ``weight_decay`` | the same, with ``weight_decay_mode="decoupled"``: added to the direction, before momentum, as SGD adds it |
    | ``foreach``, ``fused`` | nothing: they do not change results |
    | ``differentiable`` | refused |

    Under ``weight_decay_mode="l2"`` decay would be part of the gradient and be preconditioned as well, which trained worse
    (``docs/results.md``).

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_sgd(model, lr=0.1, momentum=0.9, nesterov=True, precondition_frequency=50)
    >>> [opt.param_groups[0][name] for name in ("graft", "momentum", "weight_decay_mode")]
    ['sgd', 0.9, 'decoupled']
    """
    given = dict(locals())

    def settled(some: Mapping[str, Any]) -> dict[str, Any]:
        """Without momentum dampening does nothing: in torch no mistake, so none here."""
        both = {"momentum": momentum, "dampening": dampening} | dict(some)
        OPTIONS["dampening"].check("dampening", both["dampening"])
        return carry(both if both["momentum"] else both | {"dampening": 0})

    return shampoo(given, settled, graft="sgd", betas=(0.0, 0.95), weight_decay_mode="decoupled")


def from_adagrad(
    params: Any,
    lr: float | Tensor = 1e-2,
    lr_decay: float = 0,
    weight_decay: float | Tensor = 0,
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
    >>> opt = lather.from_adagrad(model, lr=0.05)
    >>> [opt.param_groups[0][name] for name in ("graft", "graft_eps", "betas")]
    ['adagrad', 1e-10, (0.0, 1.0)]
    """
    return shampoo(dict(locals()), carry, graft="adagrad", betas=(0.0, 1.0), weight_decay_mode="l2")


def from_adam(
    params: Any,
    lr: float | Tensor = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0,
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
    >>> opt = lather.from_adam(model, lr=1e-3, eps=1e-6, weight_decay=0.01, factor_eps=1e-10)
    >>> [opt.param_groups[0][name] for name in ("graft_eps", "eps", "weight_decay_mode")]
    [1e-06, 1e-10, 'l2']
    """
    return shampoo(dict(locals()), carry, graft="adam")


def from_adamw(
    params: Any,
    lr: float | Tensor = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Tensor = 1e-2,
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
    >>> opt = lather.from_adamw(model, lr=3e-4, weight_decay=0.1, precondition_frequency=20)
    >>> [opt.param_groups[0][name] for name in ("lr", "weight_decay", "graft", "precondition_frequency")]
    [0.0003, 0.1, 'adam', 20]
    """
    return shampoo(dict(locals()), carry, graft="adam", weight_decay_mode="decoupled")


def low_memory(params: Any, *arguments: Any, **options: Any) -> Shampoo:
    """:func:`from_adamw` with the smallest state that keeps its averages in float32.

    ``factors="packed"`` and ``root_dtype="bfloat16"``: 4 times a square parameter instead of 6 (AdamW has 2). Other recipes
    take the same two options. Packing changes nothing, and no price of rounded roots in quality was found (``docs/results.md``).
    Large embeddings and heads cost most: :func:`route` gives them AdamW's state.

    >>> import torch, lather
    >>> model = torch.nn.Linear(64, 64, bias=False)
    >>> [make(model.parameters()).plan().state_bytes / model.weight.nbytes for make in (lather.from_adamw, lather.low_memory)]
    [6.0, 4.015625]
    """
    return from_adamw(params, *arguments, **{"factors": "packed", "root_dtype": "bfloat16"} | options)


def shampoo(given: dict[str, Any], replaced: Carry, **recipe: Any) -> Shampoo:
    """``given`` are a preset's arguments by name: ``params``, those of its class, and ``options`` for what is not of that;
    ``replaced`` makes options of them, of param groups too."""
    params, options = given.pop("params"), given.pop("options")
    return made(groups(params, replaced), recipe | replaced(given) | replaced(options))


def made(params: Any, options: Mapping[str, Any]) -> Shampoo:
    """``Shampoo``, unless there is an option that it does not have: no argument of the preset, which would have replaced it."""
    for name in options:
        if name not in (*OPTIONS, *ARGUMENTS, *FLAGS):
            raise TypeError(f"there is no option {name!r}{hint(name)}")
    return Shampoo(params, **options)


def groups(params: Any, replaced: Carry) -> Any:
    """Parameters as they are, param groups, of a model those by kind, with their options replaced."""
    if isinstance(params, Tensor):
        return params  # torch says what is wrong with that
    params = route(params) if isinstance(params, nn.Module) else params
    return [replaced(item) if isinstance(item, dict) else item for item in params]


def carry(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the optimizer, or a param group, with torch's replaced by what they are here."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in REFUSED:
            value = number(value)
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"{name}={value!r} is not valid: it must be at least 0")
            if value:
                raise ValueError(f"{name}={value!r} is not supported: " + REFUSED[name].format(value=value))
        elif name == "eps":
            options["graft_eps"] = OPTIONS["graft_eps"].check("eps", value)
        elif name == "factor_eps":
            options["eps"] = OPTIONS["eps"].check("factor_eps", value)
        elif name == "betas":
            options["betas"] = numbers(value)
        elif name == "weight_decay":
            options["weight_decay"] = number(value)
        elif name == "decoupled_weight_decay":
            options["weight_decay_mode"] = "decoupled" if value else "l2"
        elif name not in SAME_RESULT:
            options[name] = value
    return options


def numbers(betas: Any) -> Any:
    """Betas with tensors, which torch allows, as numbers."""
    if not isinstance(betas, (tuple, list)):
        return betas
    return tuple(map(number, betas))


def number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
