"""The preset for Meta's ``distributed_shampoo.DistributedShampoo``, with the settings of the paper (arXiv 2309.06497).

Config objects are read by the names of their classes and attributes. Meta's package need not be installed.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..optimizer import Shampoo
from ..options import OF_META, OPTIONS
from .from_torch import OF_PAPER, number, plain, preset
from .meta import READERS, Options, old_graft

# Root solvers other than eigh damp more than 1e-12.
PAPER: Options = {**OF_PAPER, "precondition_1d": True, "root": "eigh"}
OLD_GRAFT = {"grafting_type", "grafting_beta2", "grafting_epsilon"}
IGNORED = tuple(name for name, instead in OF_META.items() if not instead)
LATER = {  # names of the first versions
    "adam_w_mode": "weight_decay_type",
    "init_delay": "start_preconditioning_step",
    "threshold": "max_preconditioner_dim",
    "update_freq": "precondition_frequency",
}


def distributed_shampoo(
    params: Any,
    lr: float | Tensor = 1e-2,
    betas: tuple[float, float] = (0.9, 1.0),
    beta3: float = -1.0,
    epsilon: float = 1e-12,
    weight_decay: float | Tensor = 0.0,
    weight_decay_type: Any = "DECOUPLED",
    max_preconditioner_dim: float = 1024,
    precondition_frequency: int = 1,
    start_preconditioning_step: int = -1,
    use_bias_correction: bool = True,
    iterate_averaging_config: Any = None,
    grafting_config: Any = None,
    use_pin_memory: bool = False,
    shampoo_pt2_compile_config: Any = None,
    distributed_config: Any = None,
    preconditioner_config: Any = None,
    shampoo_runtime_config: Any = None,
    **options: Any,
) -> Shampoo:
    """``Shampoo`` with the arguments and defaults of Meta's ``DistributedShampoo``, and with the settings of the paper.

    The exponent is ``1 / (2 order)``, damping is absolute, roots are made by ``eigh``, and vectors have factors too. Config
    objects may be Meta's, or any with the same class names and attributes. Names of earlier versions, such as ``momentum``,
    ``use_nesterov``, ``inv_root_override`` and ``grafting_type``, may follow. What would change results and has no
    equivalent is refused. What only says how the work is done is ignored: compilation, pinned memory, load balancing,
    ``communicate_params`` and the kind of ``distributed_config``, because layouts are found by themselves.

    With ``model.parameters()`` all parameters are treated the same, as in Meta's package. A model is grouped by kind, as in all
    presets.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.distributed_shampoo(model.parameters(), lr=1e-3, epsilon=1e-8, precondition_frequency=50)
    >>> [opt.param_groups[0][name] for name in ("eps", "damping", "exponent", "graft")]
    [1e-08, 'absolute', None, None]
    """
    given = dict(locals())
    usual = {name: value for name, value in given.items() if name not in ("params", "options")} | options
    return preset(given, partial(_carry, usual), **PAPER)


def _carry(usual: Mapping[str, Any], given: Mapping[str, Any]) -> Options:
    """Meta's arguments, or a param group, as options of ``Shampoo``; ``usual`` are the arguments for all groups."""
    for name in given.keys() & LATER.keys():
        raise ValueError(f"{name}={given[name]!r} is not supported: use the name of later versions, {LATER[name]}")
    found: Options = {}
    for name, reader in READERS.items():
        if name in given:
            found |= reader(name, given[name])
    everything = {**usual, **given}
    if given.keys() & OLD_GRAFT:
        found |= old_graft(everything)
    _check_peak(given, everything)
    found |= {name: value for name, value in given.items() if name not in (*READERS, *OLD_GRAFT, *IGNORED, "peak_lr")}
    if "params" in given and found.pop("num_trainers_per_group", None) is not None:
        raise ValueError("num_trainers_per_group is the same for all param groups; pass it to lather.distributed_shampoo itself")
    _multiply(found, everything)
    return plain(_without_idle(found, everything))


def _check_peak(given: Mapping[str, Any], everything: Mapping[str, Any]) -> None:
    if "peak_lr" in given and number(given["peak_lr"]) != number(everything["lr"]):
        raise ValueError(
            f"peak_lr={given['peak_lr']!r} is not supported: the largest lr so far is used; leave it out, and pass it as lr"
        )


def _multiply(found: Options, everything: Mapping[str, Any]) -> None:
    """Meta's multiplier also holds for exponents that were given, to all groups or to this. The option multiplies the paper's rule
    only."""
    times, exponent = everything.get("exponent_multiplier", 1.0), None
    for name, reader in READERS.items():
        if name in everything:
            exponent = reader(name, everything[name]).get("exponent", exponent)
    if times == 1 or "exponent" in everything or exponent is None:
        return
    if isinstance(exponent, dict):
        found["exponent"] = {order: times * e for order, e in exponent.items()}
    else:
        found |= {"exponent": times * exponent, "exponent_multiplier": 1.0}


def _without_idle(found: Options, everything: Mapping[str, Any]) -> Options:
    """Without what is accepted there although it has no effect: dampening and Nesterov's form without momentum, beta3 without a
    filter."""
    for name in ("dampening", "nesterov"):
        if name in found:
            OPTIONS[name].check(name, found[name])
            if not found.get("momentum", everything.get("momentum", 0)):
                del found[name]
    beta1, _ = OPTIONS["betas"].check("betas", number(everything["betas"]))
    if "beta3" in found and beta1 == 0:
        found["beta3"] = None
    return found
