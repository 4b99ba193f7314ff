"""The preset for SOAP."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..optimizer import Shampoo
from ..options import OPTIONS
from .from_torch import plain, preset

RENAMED = {"max_precond_dim": "max_preconditioner_dim", "correct_bias": "bias_correction"}


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
    """``Shampoo`` with the arguments of the SOAP authors' optimizer (arXiv 2409.11321): Adam in the eigenbases of the factors.

    ``betas[1]`` also averages the factors, so ``shampoo_beta`` is refused, as are ``normalize_grads`` and another ``data_format``.
    Their first step computes bases and moves nothing. Here, steps before the first refresh are Adam's. Two defaults are
    lather's: bases are refreshed often at first (``refresh_warmup=0.1``), and the filter is Nesterov's (``beta3="nesterov"``).
    Theirs are ``refresh_warmup=0.0, beta3=None``.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.soap(model, lr=1e-3, max_precond_dim=4096)
    >>> [row.method for row in opt.plan().params], opt.param_groups[0]["max_preconditioner_dim"]
    (['soap', 'adam'], 4096)
    """
    return preset(dict(locals()), _carry, preconditioner="soap", graft=None, large_dim="diagonal", damping="absolute")


def _carry(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SOAP, or a param group, as options of ``Shampoo``."""
    memory = given.get("data_format", "channels_first")
    refused = {
        "shampoo_beta": (given.get("shampoo_beta", -1) >= 0, "betas[1] averages factors too"),
        "normalize_grads": (given.get("normalize_grads"), "gradients are used as they are"),
        "data_format": (memory != "channels_first", "dimensions are in torch's order, in any memory format"),
    }
    for name, (wrong, why) in refused.items():
        if wrong:
            raise ValueError(f"{name}={given[name]!r} is not supported: {why}; leave it out")
    options = plain({RENAMED.get(name, name): value for name, value in given.items() if name not in refused})
    if "eps" in options:  # also that of Adam, for parameters without factors
        options["eps"] = OPTIONS["graft_eps"].check("eps", options["eps"])
        options.setdefault("graft_eps", options["eps"])
    return options
