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
    """A stack, and the places in it of the tensors it is copied from and to."""

    def __init__(self, runs: Sequence[Run], stack: Tensor) -> None:
        self.stack = stack
        self._slots = [(run, run.of_stack(stack)) for run in runs]
        self._loaded: list[tuple[Tensor, Tensor]] = []

    def load(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """Fill the slots of the parameters in ``tensors``; the others hold whatever they held."""
        pairs = [(slot, run.of_param(tensors[run.param])) for run, slot in self._slots if run.param in tensors]
        torch._foreach_copy_([slot for slot, _ in pairs], [view for _, view in pairs])
        self._loaded = pairs
        return self.stack

    def save(self) -> None:
        """Write the slots back to where they were loaded from."""
        torch._foreach_copy_([view for _, view in self._loaded], [slot for slot, _ in self._loaded])

    def forget(self) -> None:
        """Hold on to nobody's memory between steps."""
        self._loaded = []


class Store:
    """Reads a bank's gradients and moves its parameters, as far as this rank stores them."""

    def __init__(self, runs: Sequence[Run], shape: Sequence[int], keys: Mapping[str, ArenaKey], arena: Arena) -> None:
        self._mirrors = {role: Mirror(runs, arena.take(key, shape)) for role, key in keys.items()}

    def read(self, grads: Mapping[int, Tensor], params: Mapping[int, Tensor], group: Mapping[str, Any]) -> Tensor:
        """The gradients as the mathematics sees them; the parameters stay in their stack for :meth:`write`."""
        w = self._mirrors["params"].load(params)
        return rules.prepare_gradient(self._mirrors["grads"].load(grads), w, group)

    def write(self, p: Tensor, momenta: Mapping[int, Tensor], group: Mapping[str, Any]) -> None:
        """Apply directions to the parameters that were read: decay, momentum, learning rate."""
        m = self._mirrors["momenta"].load(momenta) if momenta else None
        rules.update_(self._mirrors["params"].stack, p, m, group)
        self._mirrors["params"].save()
        if momenta:
            self._mirrors["momenta"].save()
        for mirror in self._mirrors.values():
            mirror.forget()
