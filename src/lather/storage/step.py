"""The record of one step, as storage and units see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..settings import Settings

Number = float | Tensor  # on the host where that costs no synchronisation; else a 0-d tensor on a device
Tensors = Mapping[int, Tensor]  # this rank's parts, by number of the parameter


@dataclass(frozen=True)
class Stored:
    """What this rank stores of every parameter. The mappings stay the same objects until something moves."""

    params: Tensors
    kept: Tensors  # momentum, or what averaging keeps
    exact: Tensors  # parameters that averaging keeps unrounded


@dataclass(frozen=True)
class Rate:
    """The learning rate of a param group in this step, and ``c`` in ``P <- P + c W``."""

    lr: Number
    decay: Number


@dataclass(frozen=True)
class Step:
    """What units need to know of a step."""

    grads: Tensors
    stored: Stored
    counts: Sequence[int]  # the step of every parameter
    even: int | None  # the step of all parameters, if all have a gradient and are at the same step
    settings: Sequence[Settings]  # of the param groups
    rates: Sequence[Rate]
    shares: Mapping[int, Number]  # of this step in the averages, by parameter
    offsets: Mapping[int, Mapping[int, int]]  # of blocks in the period, by param group, where refreshes are staggered
