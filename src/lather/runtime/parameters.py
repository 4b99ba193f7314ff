"""From param groups to what is planned: which parameters there are, where each is stored, and who shares the work on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..planning.layouts import Layout, team_of
from ..planning.plan import Spec
from ..settings import dtype_text
from ..storage.tensors import check_parameter, is_stored, layout_of
from .ranks import Ranks

Groups = Sequence[Mapping[str, Any]]
Item = tuple[int, int, Tensor]  # param group, position in it, parameter


def stored_items(groups: Groups) -> list[Item]:
    """All parameters on meshes that this rank is part of."""
    found = [(g, i, p) for g, group in enumerate(groups) for i, p in enumerate(group["params"])]
    return [item for item in found if is_stored(item[-1])]


def name_of(group: Mapping[str, Any], number: int, position: int) -> str:
    names = group.get("param_names")
    return names[position] if names else f"param_groups[{number}]['params'][{position}]"


def team(p: Tensor, name: str, world: Ranks, rank: int, trainers: int | None) -> tuple[Ranks, Layout]:
    """The ranks that ``rank`` shares the work on a parameter with, and how the parameter lies over them."""
    return team_of(*layout_of(p, world, name), trainers, rank, name)


def describe(
    items: Iterable[Item], groups: Groups, world: Ranks, rank: int, trainers: int | None
) -> tuple[list[Spec], list[Ranks]]:
    """What planning needs to know of the parameters, and the teams of this rank."""
    specs: list[Spec] = []
    teams: dict[Ranks, int] = {}
    devices: dict[str, list[torch.device]] = {}
    for g, i, p in items:
        name = name_of(groups[g], g, i)
        check_parameter(p, name)  # again, because wrappers swap parameters after construction
        ranks, layout = team(p, name, world, rank, trainers)
        number = teams.setdefault(ranks, len(teams))
        device = _device_name(p.device, devices)
        specs.append(Spec(name, tuple(p.shape), g, device, dtype_text(p.dtype), number, layout, grad_dtype(p)))
    return specs, list(teams)


def grad_dtype(p: Tensor) -> str:
    """What a gradient comes in: newer versions of torch let it differ from the parameter."""
    return dtype_text(getattr(p, "grad_dtype", p.dtype) or torch.float32)


def _device_name(device: torch.device, seen: dict[str, list[torch.device]]) -> str:
    """A device's kind, and its number among those that this process uses: the same on every rank."""
    found = seen.setdefault(device.type, [])
    if device not in found:
        found.append(device)
    number = found.index(device)
    return f"{device.type}:{number}" if number else device.type
