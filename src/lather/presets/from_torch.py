"""Presets for torch's optimizers, and what all presets share.

``params`` may be a model, or parameters or param groups as torch's optimizers take them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..optimizer import Shampoo
from ..options import ARGUMENTS, AUTO, FLAGS, OPTIONS, readers, refuse_unknown
from ..routing import route
from ..settings import graft_name, is_preconditioned

Translate = Callable[[Mapping[str, Any]], dict[str, Any]]  # another optimizer's arguments -> options of Shampoo
OF_PAPER = {"exponent": None, "damping": "absolute", "refresh_warmup": 0.0}  # arXiv 2309.06497
SMALL = {"factors": "packed", "root_dtype": "bfloat16", "filter_dtype": "bfloat16"}
IGNORED = ("foreach", "fused")  # torch's ways to compute the same result
RENAMED = {"eps": "graft_eps", "factor_eps": "eps"}
REFUSED = {
    "amsgrad": "there is no running maximum of the second moment; leave it out",
    "capturable": "a step cannot be part of your CUDA graph (on CUDA it replays graphs of its own); leave it out",
    "differentiable": "no gradient flows through a step; leave it out",
    "lr_decay": "it is a schedule; leave it out, make "
    "torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + {value!r} * t)) and step it after every opt.step()",
    "initial_accumulator_value": "sums start at zero; leave it out, and for equally short first steps pass eps={value!r} ** 0.5",
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
    """``Shampoo`` with the arguments of ``torch.optim.SGD``, grafted onto SGD: ``graft="sgd"``, ``betas=(0.0, 0.95)``.

    Weight decay is added before momentum, as in SGD, but is not preconditioned. The first momentum buffer is dampened too.
    Exponent, damping and refreshes are the paper's, with which a ResNet trained better than with those of other presets
    (docs/defaults.md). ``differentiable`` is refused.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_sgd(model, lr=0.1, momentum=0.9, nesterov=True, precondition_frequency=50)
    >>> [opt.param_groups[0][name] for name in ("graft", "momentum", "weight_decay_mode")]
    ['sgd', 0.9, 'decoupled']
    """
    given = dict(locals())

    def translate(some: Mapping[str, Any]) -> dict[str, Any]:
        """Drops dampening without momentum: torch accepts it, although it has no effect."""
        both = {"momentum": momentum, "dampening": dampening} | dict(some)
        OPTIONS["dampening"].check("dampening", both["dampening"])
        return carry(both if both["momentum"] else both | {"dampening": 0})

    return preset(given, translate, graft="sgd", betas=(0.0, 0.95), weight_decay_mode="decoupled", **OF_PAPER)


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
    """``Shampoo`` with the arguments of ``torch.optim.Adagrad``, grafted onto Adagrad: ``graft="adagrad"``, ``betas=(0.0, 1.0)``.

    Factors are sums too. ``eps`` becomes ``graft_eps``. ``lr_decay``, ``initial_accumulator_value`` and ``differentiable``
    are refused.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_adagrad(model, lr=0.05)
    >>> [opt.param_groups[0][name] for name in ("graft", "graft_eps", "betas")]
    ['adagrad', 1e-10, (0.0, 1.0)]
    """
    return preset(dict(locals()), carry, graft="adagrad", betas=(0.0, 1.0), weight_decay_mode="l2")


def from_adam(
    params: Any,
    lr: float | Tensor = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.95, 0.95),
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
    """``Shampoo`` with the arguments of ``torch.optim.Adam``, and steps of Adam's length (``graft="auto"``).

    Betas that you give are kept. The default is (0.95, 0.95), torch's is (0.9, 0.999); docs/defaults.md compares some.
    ``betas[1]`` also averages the factors. ``eps`` becomes ``graft_eps``, and the factors' damping is ``factor_eps``.
    ``amsgrad``, ``capturable`` and ``differentiable`` are refused.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_adam(model, lr=1e-3, eps=1e-6, weight_decay=0.01, factor_eps=1e-10)
    >>> [opt.param_groups[0][name] for name in ("graft_eps", "eps", "weight_decay_mode")]
    [1e-06, 1e-10, 'l2']
    """
    return preset(dict(locals()), carry)


def from_adamw(
    params: Any,
    lr: float | Tensor = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.95, 0.95),
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
    """``Shampoo`` with the arguments of ``torch.optim.AdamW``: :func:`from_adam` with decoupled weight decay.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.from_adamw(model, lr=1.2e-3, weight_decay=0.1, precondition_frequency=20)
    >>> [opt.param_groups[0][name] for name in ("lr", "weight_decay", "graft", "precondition_frequency")]
    [0.0012, 0.1, 'auto', 20]
    """
    return preset(dict(locals()), carry, weight_decay_mode="decoupled")


def low_memory(params: Any, *arguments: Any, **options: Any) -> Shampoo:
    """:func:`from_adamw` with a state as small as AdamW's: 8 bytes for each element of a square matrix.

    These are 4 for the factors (``factors="packed"``), 2 for the roots (``root_dtype="bfloat16"``) and 2 for the filtered gradient
    (``filter_dtype="bfloat16"``). Factors stay in float32. Other presets take the same options. A method gets those that it reads.
    Where ``graft="auto"`` would be Adam, as with other methods than Shampoo, it is ``"constant"``. This is decided here, from the
    options of each param group. Groups that are added later get what the arguments give.

    >>> import torch, lather
    >>> model = torch.nn.Linear(1024, 1024, bias=False)
    >>> lather.low_memory(model.parameters()).plan().state_bytes / model.weight.numel()
    8.005859375
    """
    betas = options.get("betas", arguments[1] if len(arguments) > 1 else None)
    unfiltered = isinstance(betas, (tuple, list)) and bool(betas) and betas[0] == 0
    small = {name: value for name, value in chosen(SMALL, options).items() if not (unfiltered and name == "filter_dtype")}
    opt = from_adamw(params, *arguments, **small | options)
    for group in (*opt.param_groups, opt.defaults):
        if is_preconditioned(group) and group["graft"] == AUTO and graft_name(group) == "adam":
            group["graft"] = "constant"  # keeps no second moment either
    return opt


def preset(given: dict[str, Any], translate: Translate, **recipe: Any) -> Shampoo:
    """``Shampoo`` from all arguments of a preset, which are its ``locals()``."""
    params, options = given.pop("params"), given.pop("options")
    groups = [translate(item) if isinstance(item, dict) else item for item in listed(params)]
    return build(groups, chosen(recipe, options) | translate(given | options), given)


def chosen(recipe: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """What a preset chooses, without options that mean nothing to the method that the user chose."""
    method = options.get("preconditioner")
    return {name: value for name, value in recipe.items() if method is None or method in (readers(name) or [method])}


def build(params: Any, options: Mapping[str, Any], arguments: Iterable[str]) -> Shampoo:
    """``Shampoo``. An argument of another preset than this one, which has these ``arguments``, is an unknown option here."""
    refuse_unknown((name for name in options if name not in (*OPTIONS, *ARGUMENTS, *FLAGS)), arguments)
    return Shampoo(params, **options)


def listed(params: Any) -> list[Any]:
    """Parameters or param groups. Those of a model are grouped by kind."""
    if isinstance(params, Tensor):
        raise TypeError("params is a tensor, but must be a model or an iterable of parameters or param groups; pass [params]")
    return route(params) if isinstance(params, nn.Module) else list(params)


def carry(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of torch's optimizers, or a param group, as options of ``Shampoo``."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in REFUSED:
            value = number(value)
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"{name}={value!r} is not valid: it must be at least 0")
            if value:
                raise ValueError(f"{name}={value!r} is not supported: {REFUSED[name].format(value=value)}")
        elif name in RENAMED:
            options[RENAMED[name]] = OPTIONS[RENAMED[name]].check(name, value)
        elif name == "decoupled_weight_decay":
            options["weight_decay_mode"] = "decoupled" if value else "l2"
        elif name not in IGNORED:
            options[name] = value
    return plain(options)


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with numbers for the tensors that torch allows as ``betas`` and ``weight_decay``."""
    return {name: number(value) if name in ("betas", "weight_decay") else value for name, value in options.items()}


def number(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(number, value))
    return value.item() if isinstance(value, Tensor) else value
