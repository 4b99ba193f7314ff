"""Units: a bank with its way in and out, built from a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .bank import Bank, initial_state, make_stack
from .blocks import Shape
from .exchange import Exchange
from .plan import BankKey, Move, Plan, Run, coalesce
from .store import Arena, ArenaKey, Store

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Unit:
    """One bank, the stored pieces of its blocks, and the exchange between them."""

    bank: Bank
    store: Store
    exchange: Exchange
    members: tuple[int, ...]  # the parameters that its blocks belong to

    def step(
        self,
        grads: Mapping[int, Tensor],
        params: Mapping[int, Tensor],
        momenta: Mapping[int, Tensor],
        steps: Sequence[int],
        offsets: Mapping[int, int] | None,
        group: Group,
    ) -> None:
        """Gradients in, directions out, parameters moved. ``grads`` and ``params`` hold the active members."""
        stored = self.store.read(grads, params, group)
        with torch.autocast(self.bank.stack.device.type, enabled=False):
            directions = self.bank.update(
                self.exchange.inbound(stored),
                [steps[block.param] for block in self.bank.blocks],
                [block.param in grads for block in self.bank.blocks],
                offsets,
                group,
            )
        self.store.write(self.exchange.outbound(directions), momenta, group)


def make_banks(
    plan: Plan, rank: int, params: Sequence[Tensor], groups: Sequence[Group], old: Mapping[Any, Bank]
) -> list[Bank]:
    """The rank's banks with state for the options as they are; a bank of the very same blocks keeps its memory."""
    banks = []
    for key, numbers in plan.banks(rank).items():
        blocks = [plan.blocks[i] for i in numbers]
        bank = Bank(key, numbers, blocks, groups[key.group])
        if same := old.get(identity(bank, params)):
            same.numbers, same.blocks = bank.numbers, bank.blocks
            bank = same
        _allocate(bank, groups[key.group])
        banks.append(bank)
    return banks


def expected_shapes(plan: Plan, rank: int) -> list[dict[str, Shape]]:
    """For each parameter, the state that the plan's options call for: key -> shape."""
    shapes: list[dict[str, Shape]] = [{"step": ()} for _ in plan.specs]
    for spec, entry in zip(plan.specs, shapes, strict=True):
        if plan.groups[spec.group]["momentum"] > 0:
            entry["momentum"] = spec.shape
    for key, numbers in plan.banks(rank).items():
        group = plan.groups[key.group]
        state = initial_state(key, make_stack(key, len(numbers), group, torch.device("meta")), group)
        for block in (plan.blocks[i] for i in numbers):
            for role, tensor in state.items():
                shapes[block.param][checkpoint.key(role, block.index)] = tuple(tensor.shape[1:])
    return shapes


def identity(bank: Bank, params: Sequence[Tensor]) -> tuple[BankKey, torch.dtype, tuple[tuple[int, int], ...]]:
    """What a bank's memory belongs to, independent of positions in a plan."""
    return bank.key, bank.stack.dtype, tuple((id(params[block.param]), block.index) for block in bank.blocks)


def _allocate(bank: Bank, group: Group) -> None:
    shapes = initial_state(bank.key, replace(bank.stack, device=torch.device("meta")), group)
    if shapes.keys() != bank.state.keys():
        bank.state = initial_state(bank.key, bank.stack, group) | {k: v for k, v in bank.state.items() if k in shapes}


def make_units(plan: Plan, banks: Sequence[Bank], params: Sequence[Tensor], groups: Sequence[Group]) -> list[Unit]:
    arena = Arena()
    layouts = [_arena_keys(bank, params, groups[bank.key.group]) for bank in banks]
    for bank, keys in zip(banks, layouts, strict=True):
        for key in keys.values():
            arena.reserve(key, len(bank.blocks) * bank.blocks[0].region.numel)
    inbound, outbound = _by_block(plan.inbound), _by_block(plan.outbound)
    return [
        Unit(
            bank,
            Store(_runs(bank), (len(bank.blocks), *bank.key.shape), keys, arena),
            Exchange([m for i in bank.numbers for m in inbound[i]], [m for i in bank.numbers for m in outbound[i]]),
            tuple(dict.fromkeys(block.param for block in bank.blocks)),
        )
        for bank, keys in zip(banks, layouts, strict=True)
    ]


def _runs(bank: Bank) -> list[Run]:
    return coalesce(Run(b.param, slot, b.region.start, b.region.shape) for slot, b in enumerate(bank.blocks))


def _by_block(moves: Sequence[Move]) -> dict[int, list[Move]]:
    table: dict[int, list[Move]] = {}
    for move in moves:
        table.setdefault(move.block, []).append(move)
    return table


def _arena_keys(bank: Bank, params: Sequence[Tensor], group: Group) -> dict[str, ArenaKey]:
    """Gradients and momenta in the compute dtype; parameters in their own where that is better."""
    compute, device = bank.stack.compute, bank.stack.device
    own = compute
    for block in bank.blocks:
        own = torch.promote_types(own, params[block.param].dtype)
    keys = {"grads": ("grads", device, compute), "params": ("params", device, own)}
    return keys | ({"momenta": ("momenta", device, compute)} if group["momentum"] > 0 else {})
