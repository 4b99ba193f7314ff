"""Muon: the filtered gradient with every singular value set to 1."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from .. import roots
from .base import Context, Hyper, Method, Stack, State


@final
class Spectral(Method):
    """``P = U V^T`` of ``u = U S V^T``, times the factor that ``polar_scale`` asks for.

    A block with more than two modes counts as the matrix of its first mode and the rest. It has no state and no refreshes.
    """

    name = "spectral"
    text = "Muon, which orthogonalises the filtered gradient of every block"
    aliases = ("muon",)
    reads = frozenset({"polar", "polar_scale"})
    kernels = "graft"
    linear = False
    in_parts = True

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Nothing to remember."""

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        matrices = u.reshape(u.shape[0], u.shape[1], -1)
        scale = scale_of(ctx.hyper.polar_scale, *matrices.shape[1:])
        to = None if out is None else out.view(matrices.shape)
        return roots.parse_polar(ctx.hyper.polar)(matrices, scale, to).view(u.shape)

    def is_capturable(self, hyper: Hyper) -> bool:
        return roots.parse_polar(hyper.polar).is_capturable

    def idle(self, options: Mapping[str, Any]) -> dict[str, str]:
        found = {}
        if options["large_dim"] == "diagonal":
            found["large_dim"] = f"with preconditioner={self.name!r}, which has no factors; use 'block' or 'adagrad'"
        grafted = options["graft"] is not None and options["start_preconditioning_step"] != math.inf
        if options["polar_scale"] is not None and grafted:
            found["polar_scale"] = f"with graft={options['graft']!r}, which sets the length of directions"
        return found

    def step_flops(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper) -> float:
        return roots.parse_polar(hyper.polar).flops(shape[0], math.prod(shape[1:]))

    def solvers(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper, device: str) -> tuple[str, ...]:
        return (hyper.polar,)


def scale_of(rule: str | None, rows: int, columns: int) -> float:
    """What users of Muon multiply the polar factor of a matrix by.

    >>> scale_of("original", 400, 100), scale_of("match_rms_adamw", 100, 400), scale_of(None, 400, 100)
    (2.0, 4.0, 1.0)
    """
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else 1.0
