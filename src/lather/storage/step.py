"""The record of one step, as storage and units see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..settings import Settings

Number = float | Tensor  # on the host if that takes no synchronisation, else a 0-d tensor on the device
Tensors = Mapping[int, Tensor]  # this rank's parts, by number of the parameter


@dataclass(frozen=True)
class Stored:
    """What this rank stores. The mappings stay the same objects until a tensor moves in memory."""

    params: Tensors  # or their masters, which are rounded to parameters at the end of a step
    kept: Tensors  # momentum, or what averaging keeps
    exact: Tensors  # unrounded parameters, where averaging keeps them


@dataclass(frozen=True)
class Rate:
    """The learning rate of a param group in this step, and ``c`` in ``P <- P + c W``."""

    lr: Number
    decay: Number


@dataclass(frozen=True)
class Step:
    """What units need to know about a step."""

    grads: Tensors
    stored: Stored
    counts: Sequence[int]  # the step of every parameter
    common_step: int | None  # the step of all parameters, if all have a gradient and are at the same step
    settings: Sequence[Settings]  # of the param groups
    rates: Sequence[Rate]
    shares: Mapping[int, Number]  # of this step in the averages, by parameter
    offsets: Mapping[int, Mapping[int, int]]  # by param group with staggered refreshes, then by block: the step in the period
    record: Any = None  # records an armed step (see runtime/metrics.py)
