"""What ranks must agree on before they exchange anything, and how they stop together where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import roots
from ..options import OPTIONS
from ..planning.plan import first_come
from ..storage.tensors import describe, groups_of, layout_of
from .census import Ranks, items_of, name_of
from .exchange import Circle, Comm, difference
from .run import Built

Facts = dict[str, str]


def find_circle(groups: Sequence[Mapping[str, Any]], world: Ranks, given: Any) -> Circle:
    """The ranks of all meshes that this rank stores parameters on; ``given`` is a process group to use if it fits."""
    known, devices = [given], dict[Ranks, torch.device]()
    for g, i, p in items_of(groups):
        devices[_mesh(p, world, name_of(groups[g], g, i))] = p.device
        known += groups_of(p)
    shared = [ranks for ranks in sorted(devices, key=first_come) if len(ranks) > 1]
    return Circle([Comm(ranks, devices[ranks], known) for ranks in shared])


def agree(circle: Circle, facts: Callable[[Ranks], Facts], error: Exception | None) -> None:
    """Compare the facts of every mesh. Raises on all ranks or on none; ``error`` is why this rank could not plan."""
    if error is not None and not circle:
        raise error
    problem = None
    for comm in circle.comms:
        told = {"the plan": f"{type(error).__name__}: {error}"} if error else {"the plan": "made"} | facts(comm.ranks)
        problem = difference(comm, told) or problem
    if error is not None:
        problem = problem or str(error)
    problem = circle.tell(problem)
    if problem is not None:
        if error is not None and problem == str(error):
            raise error
        raise ValueError(problem) from error


def facts_of(built: Built, world: Ranks, ranks: Ranks, given: Mapping[str, Any], loaded: bool) -> Facts:
    """All that must be the same on the ranks of a mesh, in words. ``given`` are arguments of the constructor; ``loaded``: from
    a checkpoint, which might have been another on another rank."""
    facts = {name: str(value) for name, value in given.items()}
    facts |= _planned(built, world, ranks, repeated=given["num_trainers_per_group"] is not None)
    for i in members(built.params, world, ranks):
        if loaded or given["check_ranks"]:
            facts[f"the step of parameter {built.name_of(i)}"] = str(built.steps[i])
        if given["check_ranks"]:
            facts[f"whether {built.name_of(i)} has a gradient"] = str(built.params[i].grad is not None)
    return facts


def _planned(built: Built, world: Ranks, ranks: Ranks, *, repeated: bool) -> Facts:
    """What is planned. ``repeated``: several ranks own the same block, so they must refresh it at the same steps."""
    plan, params = built.plan, built.params
    mine = members(params, world, ranks)
    facts = {"the number of parameters": str(len(mine))}
    facts |= {f"parameter number {k}": f"{plan.specs[i].name} {describe(params[i])}" for k, i in enumerate(mine)}
    schedule: dict[int, int] = {}
    for g in sorted({plan.specs[i].group for i in mine}):
        group = plan.groups[g]
        facts |= {f"{name} of param group {g}": _plain(group[name]) for name in OPTIONS}
        if repeated and group["refresh"] == "staggered":
            schedule |= plan.offsets(g)
    kept = set(mine)
    blocks = [(plan.owners[n], schedule.get(n)) for n, block in enumerate(plan.blocks) if block.param in kept]
    return facts | {"owners of blocks and steps of refreshes": str(blocks)}


def measure(built: Built, circle: Circle) -> roots.Choices:
    """The solvers for ``root="auto"``, the same on all ranks; times of this process are kept, so only once."""
    devices = {spec.device: p.device for spec, p in zip(built.plan.specs, built.params, strict=True)}
    stacks = {(devices[name], d, e): count for (name, d, e), count in built.plan.auto_stacks().items()}
    return roots.decide(circle.merge(roots.measure(stacks)))


def members(params: Sequence[Tensor], world: Ranks, ranks: Ranks) -> list[int]:
    """The numbers of the parameters that these ranks store."""
    return [i for i, p in enumerate(params) if _mesh(p, world) == ranks]


def _mesh(p: Tensor, world: Ranks, name: str = "") -> Ranks:
    return tuple(sorted(layout_of(p, world, name)[0]))


def _plain(value: Any) -> str:
    """An option's value in words that do not depend on a device."""
    return str(value.item() if isinstance(value, Tensor) else value)
