"""Carries pieces of gradients to the owners of their blocks, and pieces of directions to their holders.

A collective moves bytes, so every dtype travels over every backend.
"""

from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch import Tensor

from ..linalg import per_slot
from ..planning.messages import SCALED


def encode(p: Tensor, wire: str) -> tuple[Tensor, Tensor | None]:
    """Directions ``[n, ...]`` as they travel and, for 8 bits, the scale of every slot ``[n]``. NaN stays NaN."""
    if wire == SCALED:
        scale = p.flatten(1).abs().amax(1).float() / 127
        steps = p / per_slot(torch.where(scale > 0, scale, 1.0).to(p.dtype), p)
        return steps.round_().nan_to_num_(0.0).to(torch.int8), scale
    dtype = cast(torch.dtype, getattr(torch, wire))
    if dtype == torch.float16:
        p = p.clamp(-65504, 65504)
    return p.to(dtype), None


def decode(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    p = values.to(dtype)
    return p if scale is None else p * per_slot(scale.to(dtype), p)


def rounded(p: Tensor, wire: str) -> Tensor:
    """A direction that does not travel, rounded as if it did, so that results do not depend on the number of ranks."""
    return decode(*encode(p, wire), p.dtype)


@final
class Collective:
    """One collective of every step, and the work in progress."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._work: Any = None

    def start(self) -> None:
        self._work = self._begin()

    def finish(self) -> None:
        self._work.wait()
        self._work = None

    def settle(self) -> None:
        """Finish what a step that raised has left over."""
        if self._work is not None:
            self.finish()
