"""From parameters to what is planned: which there are, where each is stored, and with which ranks its work is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..planning.blocks import Layout
from ..planning.plan import Spec
from ..storage.tensors import check_parameter, is_stored, layout_of, local_gradient, team_of
from .exchange import my_rank

Item = tuple[int, int, Tensor]  # group, position in it, parameter
Ranks = tuple[int, ...]


def items_of(groups: Sequence[Mapping[str, Any]]) -> list[Item]:
    """All parameters on meshes that this rank is part of."""
    found = [(g, i, p) for g, group in enumerate(groups) for i, p in enumerate(group["params"])]
    return [item for item in found if is_stored(item[-1])]


def name_of(group: Mapping[str, Any], number: int, position: int) -> str:
    names = group.get("param_names")
    return names[position] if names else f"param_groups[{number}]['params'][{position}]"


def team(p: Tensor, name: str, world: Ranks, trainers: int | None) -> tuple[Ranks, Layout]:
    """The ranks that this one shares the work on a parameter with, and how it lies over them."""
    return team_of(*layout_of(p, world, name), trainers, my_rank(), name)


def take(
    items: Iterable[Item], groups: Sequence[Mapping[str, Any]], world: Ranks, trainers: int | None
) -> tuple[list[Spec], list[Ranks]]:
    """What planning needs to know of the parameters, and the teams of this rank."""
    specs: list[Spec] = []
    teams: dict[Ranks, int] = {}
    devices: dict[str, list[torch.device]] = {}
    for g, i, p in items:
        name = name_of(groups[g], g, i)
        check_parameter(p, name)  # again, because wrappers swap parameters after construction
        ranks, layout = team(p, name, world, trainers)
        number, dtype = teams.setdefault(ranks, len(teams)), str(p.dtype).removeprefix("torch.")
        device = _device_name(p.device, devices)
        specs.append(Spec(name, tuple(p.shape), g, device, dtype, number, layout, grad_dtype(p)))
    return specs, list(teams)


def gradients(params: Sequence[Tensor], sharded: Sequence[bool], name_of: Callable[[int], str]) -> dict[int, Tensor]:
    """This rank's part of every gradient there is, by number of the parameter; ``sharded`` says which are DTensors."""
    grads = {}
    for i, p in enumerate(params):
        grad = p.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {name_of(i)} has a sparse gradient; use a dense one (sparse=False in nn.Embedding) or give it to "
                "torch.optim.SparseAdam"
            )
        grads[i] = local_gradient(grad, p, name_of(i)) if sharded[i] else grad
    return grads


def grad_dtype(p: Tensor) -> str:
    """What a gradient comes in: newer versions of torch let it differ from the parameter."""
    return str(getattr(p, "grad_dtype", p.dtype) or torch.float32).removeprefix("torch.")


def _device_name(device: torch.device, seen: dict[str, list[torch.device]]) -> str:
    """A device's kind, and its number among those that this process uses: the same on every rank."""
    found = seen.setdefault(device.type, [])
    if device not in found:
        found.append(device)
    number = found.index(device)
    return f"{device.type}:{number}" if number else device.type
