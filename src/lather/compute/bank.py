"""A bank: all blocks of one shape that this rank owns, stacked on dim 0, with their state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from ..linalg import all_finite, positions
from ..methods import FILTER_SUMS, Kronecker, Stack, State, init_filter
from ..planning.blocks import Block
from ..planning.plan import BankKey, Plan
from ..settings import Settings
from .background import Background


@final
class Bank:
    """State ``role -> [n, ...]`` of ``n`` blocks.

    ``skipped [n]`` counts each slot's gradients that were not finite, ``failed [n]`` its refreshes that failed in a row. ``broken
    [n]`` is 1 for a slot whose gradient was finite and whose direction was not.
    """

    def __init__(
        self, key: BankKey, numbers: Sequence[int], blocks: Sequence[Block], settings: Settings, device: torch.device
    ) -> None:
        self.key = key
        self.numbers = tuple(numbers)  # of the blocks in the plan
        self.blocks = tuple(blocks)
        self.stack = make_stack(key, len(blocks), settings, device)
        self.state: State = {}
        self.begun = False  # whether a slot may have been refreshed, as far as the host knows
        self.failing: frozenset[int] = frozenset()  # slots whose last refresh failed, as far as the host knows
        self.restarts = [0] * len(blocks)  # how often each slot's state has been started anew
        self.skips = [0] * len(blocks)  # gradients skipped, as far as the host knows
        self.counts = torch.zeros(3, len(blocks), dtype=torch.int32, device=self.stack.device)
        self.skipped, self.failed, self.broken = self.counts.unbind()
        method = settings.method_of(key.kind)
        self.exponent, self.solver = 0.0, None
        if isinstance(method, Kronecker):
            self.exponent = method.exponent(settings.hyper, len(key.shape))
            self.solver = method.solver(settings.hyper, self.stack.device, len(key.shape))
        transforms = (method, settings.graft_of(key.kind))
        self.sums = FILTER_SUMS + "".join(each.sums for each in transforms if each)  # roles that take in gradients
        self.background = Background(self.stack.device)  # where refreshes go that are not needed at once

    def moved_to(self, other: Bank) -> Bank:
        """The same memory, with the place in the plan and the options of another bank of the same blocks."""
        self.key, self.numbers, self.blocks = other.key, other.numbers, other.blocks
        self.exponent, self.solver = other.exponent, other.solver
        return self

    def views(self) -> Iterator[tuple[Block, str, Tensor]]:
        """Every block's share of the state: what is checkpointed."""
        for role, tensor in self.state.items():
            for block, view in zip(self.blocks, tensor.unbind(), strict=True):
                yield block, role, view

    def state_changed(self, settings: Settings) -> None:
        """To be called when a checkpoint was written into the state: forget failures, look for roots."""
        self.counts.zero_()
        self.failing, self.restarts, self.skips = frozenset(), [0] * len(self.blocks), [0] * len(self.blocks)
        method = settings.method_of(self.key.kind)
        waits = method is not None and method.waits
        self.begun = method is not None and method.refreshes and (not waits or bool(method.ready(self.state).any()))

    def not_finite(self, slots: Sequence[int]) -> list[int]:
        """Those of some slots that have NaN or Inf in their state. The host waits."""
        every = len(slots) == len(self.blocks)
        index = slice(None) if every else positions(tuple(slots), self.stack.device)
        fine = torch.ones(len(slots), dtype=torch.bool, device=self.stack.device)
        for tensor in self.state.values():
            fine &= all_finite(tensor[index])
        return [slot for slot, good in zip(slots, fine.tolist(), strict=True) if not good]

    def restart(self, slots: Sequence[int], settings: Settings) -> None:
        """Give slots the state of new ones, and forget their failures. Nothing may be under way in the background."""
        device = self.stack.device
        fresh = initial_state(self.key, len(slots), settings, device)
        index = positions(tuple(slots), device)
        for role, tensor in self.state.items():
            tensor[index] = fresh[role]
        for count in (self.failed, self.broken):
            count[index] = 0
        self.failing = self.failing.difference(slots)
        for slot in slots:
            self.restarts[slot] += 1


def make_stack(key: BankKey, n: int, settings: Settings, device: torch.device) -> Stack:
    return Stack(n, key.shape, key.modes, settings.hyper.state_dtype, settings.hyper.compute_dtype, device)


def initial_state(key: BankKey, n: int, settings: Settings, device: torch.device) -> State:
    """Fresh state of ``n`` blocks for the options as they are now. On the meta device it has shapes and dtypes alone."""
    stack = make_stack(key, n, settings, device)
    state: State = {}
    if method := settings.method_of(key.kind):
        state |= method.init(stack, replace(settings.hyper, packed=settings.packs(key.device)))
    if settings.hyper.beta1 > 0:
        state |= init_filter(stack, settings.hyper)
    return state | settings.graft_of(key.kind).init(stack, settings.hyper)


def block_state(plan: Plan, key: BankKey) -> State:
    """The state of one block of a bank, on the meta device: role -> shape and dtype."""
    settings = plan.settings[key.group]
    state = initial_state(key, 1, settings, torch.device("meta"))
    return {role: tensor[0] for role, tensor in state.items()}
