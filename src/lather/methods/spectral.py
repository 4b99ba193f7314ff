"""Muon: the filtered gradient with all singular values made 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

from torch import Tensor

from .. import roots
from .base import Context, Stack, State, Transform

_polar = lru_cache(maxsize=64)(roots.parse_polar)


@final
@dataclass(frozen=True)
class Spectral(Transform):
    """``P = U V^T`` of ``u = U S V^T``, times what ``polar_scale`` says. A block of more than two modes is the matrix of its
    first mode and the rest. No state, nothing to refresh."""

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        return {}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Nothing to remember."""

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        matrices = u.reshape(u.shape[0], u.shape[1], -1)
        factors = _polar(ctx.group["polar"])(matrices)
        return (factors * scale_of(ctx.group["polar_scale"], *matrices.shape[1:])).view(u.shape)


def scale_of(rule: str | None, rows: int, columns: int) -> float:
    """What users of Muon multiply the polar factor of a matrix by.

    >>> scale_of("original", 400, 100), scale_of("match_rms_adamw", 100, 400), scale_of(None, 400, 100)
    (2.0, 4.0, 1.0)
    """
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else 1.0
