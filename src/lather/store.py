"""The stored side of a bank: copies between parameters and stacks.

A stack holds, slot by slot, the pieces of a bank's blocks that this rank stores. Gradients, parameters and momenta are
copied into stacks, changed there by a handful of batched operations, and copied back, each by one foreach call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import rules
from .plan import Run

ArenaKey = tuple[str, torch.device, torch.dtype]


class Arena:
    """Scratch memory that all banks share, one after the other: as large as the largest of them needs."""

    def __init__(self) -> None:
        self._sizes: dict[ArenaKey, int] = {}
        self._flat: dict[ArenaKey, Tensor] = {}

    def reserve(self, key: ArenaKey, numel: int) -> None:
        self._sizes[key] = max(numel, self._sizes.get(key, 0))

    def take(self, key: ArenaKey, shape: Sequence[int]) -> Tensor:
        if key not in self._flat:
            _, device, dtype = key
            self._flat[key] = torch.empty(self._sizes[key], dtype=dtype, device=device)
        return self._flat[key][: math.prod(shape)].view(*shape)


class Mirror:
    """One tensor per run beside the run's place in a stack."""

    def __init__(self, runs: Sequence[Run], stack: Tensor) -> None:
        self.runs = runs
        self.stack = stack
        self._slots = [run.of_stack(stack) for run in runs]
        self._views: dict[int, Tensor] = {}
        self._seen: dict[int, tuple[int, tuple[int, ...]]] = {}

    def load(self, tensors: Mapping[int, Tensor], keep: bool) -> Tensor:
        """Fill the slots of the parameters in ``tensors``; ``keep`` the views if the tensors will come again."""
        pairs = self._pairs(tensors, keep)
        torch._foreach_copy_([slot for slot, _ in pairs], [view for _, view in pairs])
        return self.stack

    def save(self, tensors: Mapping[int, Tensor]) -> None:
        """Write the slots back."""
        pairs = self._pairs(tensors, True)
        torch._foreach_copy_([view for _, view in pairs], [slot for slot, _ in pairs])

    def _pairs(self, tensors: Mapping[int, Tensor], keep: bool) -> list[tuple[Tensor, Tensor]]:
        view = self._kept if keep else lambda _, run, tensor: run.of_param(tensor)
        return [
            (self._slots[i], view(i, run, tensors[run.param]))
            for i, run in enumerate(self.runs)
            if run.param in tensors
        ]

    def _kept(self, i: int, run: Run, tensor: Tensor) -> Tensor:
        """A parameter's view, made anew only when its memory has moved (``p.data = ...``)."""
        seen = (tensor.data_ptr(), tensor.stride())
        if self._seen.get(i) != seen:
            self._views[i], self._seen[i] = run.of_param(tensor.detach()), seen
        return self._views[i]


class Store:
    """Reads a bank's gradients and moves its parameters, as far as this rank stores them."""

    def __init__(self, runs: Sequence[Run], shape: Sequence[int], keys: Mapping[str, ArenaKey], arena: Arena) -> None:
        self._mirrors = {role: Mirror(runs, arena.take(key, shape)) for role, key in keys.items()}

    def read(self, grads: Mapping[int, Tensor], params: Mapping[int, Tensor], group: Mapping[str, Any]) -> Tensor:
        """The gradients as the mathematics sees them; the parameters stay in their stack for :meth:`write`."""
        w = self._mirrors["params"].load(params, keep=True)
        return rules.prepare_gradient(self._mirrors["grads"].load(grads, keep=False), w, group)

    def write(
        self, p: Tensor, params: Mapping[int, Tensor], momenta: Mapping[int, Tensor], group: Mapping[str, Any]
    ) -> None:
        """Apply directions: decay, momentum, learning rate."""
        m = self._mirrors["momenta"].load(momenta, keep=True) if momenta else None
        rules.update_(self._mirrors["params"].stack, p, m, group)
        self._mirrors["params"].save(params)
        if momenta:
            self._mirrors["momenta"].save(momenta)
