"""From param groups to specs: which parameters there are, which ranks store each, and which share the work on it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..planning.layouts import Layout, team_of
from ..planning.plan import Spec
from ..settings import dtype_text
from ..storage.tensors import check_parameter, is_stored, layout_of
from .ranks import Ranks

WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")  # in names, by torch
Groups = Sequence[Mapping[str, Any]]
Item = tuple[int, int, Tensor]  # param group, position in it, parameter


def stored_items(groups: Groups) -> list[Item]:
    """All parameters, except those on a mesh without this rank."""
    return [(g, i, p) for g, group in enumerate(groups) for i, p in enumerate(group["params"]) if is_stored(p)]


def name_of(group: Mapping[str, Any], number: int, position: int) -> str:
    names = group.get("param_names")
    return names[position] if names else f"param_groups[{number}]['params'][{position}]"


def forget_wrong_names(groups: Iterable[dict[str, Any]]) -> None:
    """Of param groups whose list of parameters the user has changed."""
    for group in groups:
        if len(group.get("param_names") or group["params"]) != len(group["params"]):
            del group["param_names"]


def team(p: Tensor, name: str, world: Ranks, rank: int, trainers: int | None) -> tuple[Ranks, Layout]:
    """The team of ``rank`` for a parameter, and the parameter's layout over it."""
    return team_of(*layout_of(p, world, name), trainers, rank, name)


def describe(
    items: Iterable[Item], groups: Groups, world: Ranks, rank: int, trainers: int | None
) -> tuple[list[Spec], list[Ranks]]:
    """What planning needs to know about the parameters, and the teams of this rank."""
    specs: list[Spec] = []
    teams: dict[Ranks, int] = {}
    devices: dict[torch.device, str] = {}  # kind, and number among those that this process uses: the same on every rank
    for g, i, p in items:
        name = name_of(groups[g], g, i)
        check_parameter(p, name)  # again, because wrappers swap parameters after construction
        ranks, layout = team(p, name, world, rank, trainers)
        number = teams.setdefault(ranks, len(teams))
        if p.device not in devices:
            others = sum(device.type == p.device.type for device in devices)
            devices[p.device] = f"{p.device.type}:{others}" if others else p.device.type
        specs.append(Spec(name, tuple(p.shape), g, devices[p.device], dtype_text(p.dtype), number, layout, grad_dtype(p)))
    return specs, list(teams)


def grad_dtype(p: Tensor) -> str:
    """The dtype of a gradient. Newer versions of torch let it differ from the parameter's."""
    return dtype_text(getattr(p, "grad_dtype", p.dtype) or torch.float32)
