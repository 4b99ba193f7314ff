"""Who stores which region of which parameter: the only file that knows parameter types and placements."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from .blocks import Region


def check_parameter(param: Tensor, name: str) -> None:
    """Refuse what cannot be optimized, naming it and saying what to do."""
    if param.is_complex():
        raise NotImplementedError(
            f"parameter {name} is complex ({param.dtype}); pass torch.view_as_real of it as a real parameter instead"
        )
    if not param.is_floating_point():
        raise TypeError(f"parameter {name} has dtype {param.dtype}; only floating-point parameters can be optimized")
    if getattr(param, "_is_flat_param", False):
        raise ValueError(
            f"parameter {name} is a flat parameter of FSDP1, which hides the matrices; wrap the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if _is_dtensor(param):
        raise NotImplementedError(
            f"parameter {name} is a DTensor; sharded parameters are not supported by this version"
        )


def stored_regions(param: Tensor, ranks: Sequence[int]) -> dict[int, Region]:
    """The region of the global parameter that each rank stores: of a plain tensor, everyone stores everything."""
    return dict.fromkeys(ranks, Region.whole(param.shape))


def _is_dtensor(param: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # importing it costs more than the rest of this package
    return module is not None and isinstance(param, module.DTensor)
