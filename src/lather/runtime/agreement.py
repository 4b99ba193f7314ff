"""What ranks must agree on before they exchange anything, and how they stop together where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..options import OPTIONS
from ..planning.plan import largest_first
from ..storage.tensors import describe, groups_of, layout_of
from .parameters import Groups, name_of, stored_items
from .ranks import Comm, Peers, Ranks, difference
from .run import Run

Facts = dict[str, str]


def find_peers(groups: Groups, world: Ranks, everyone: Ranks, given: Any) -> Peers:
    """The ranks of all meshes that this rank stores parameters on. ``given`` is a process group to use if it fits."""
    known, devices = [given], dict[Ranks, torch.device]()
    for g, i, p in stored_items(groups):
        devices[_mesh(p, world, name_of(groups[g], g, i))] = p.device
        known += groups_of(p)
    shared = [ranks for ranks in sorted(devices, key=largest_first) if len(ranks) > 1]
    return Peers([Comm(ranks, devices[ranks], known) for ranks in shared], everyone)


def agree(peers: Peers, facts: Callable[[Ranks], Facts], error: Exception | None) -> None:
    """Compare the facts of every mesh. Raises on all ranks or on none. ``error`` is why this rank could not plan."""
    if error is not None and not peers:
        raise error
    problem = None
    for comm in peers.comms:
        told = {"the plan": f"{type(error).__name__}: {error}"} if error else {"the plan": "made"} | facts(comm.ranks)
        problem = difference(comm, told) or problem
    if error is not None:
        problem = problem or str(error)
    problem = peers.tell(problem)
    if problem is not None:
        if error is not None and problem == str(error):
            raise error
        raise ValueError(problem) from error


def facts_of(run: Run, groups: Groups, world: Ranks, ranks: Ranks, given: Mapping[str, Any], loaded: bool) -> Facts:
    """Everything that must be the same on the ranks of a mesh, in words.

    ``given`` are arguments of the constructor. ``loaded``: a checkpoint was loaded, and other ranks may have loaded another.
    """
    facts = {name: str(value) for name, value in given.items()}
    facts |= _planned(run, groups, world, ranks, repeated=given["num_trainers_per_group"] is not None)
    for i in members(run.params, world, ranks):
        if loaded or given["check_ranks"]:
            facts[f"the step of parameter {run.name_of(i)}"] = str(run.steps[i])
        if given["check_ranks"]:
            facts[f"whether {run.name_of(i)} has a gradient"] = str(run.params[i].grad is not None)
    return facts


def _planned(run: Run, groups: Groups, world: Ranks, ranks: Ranks, *, repeated: bool) -> Facts:
    """What is planned. ``repeated``: several ranks own the same block, so they must refresh it at the same steps and alike."""
    plan, params = run.plan, run.params
    mine = members(params, world, ranks)
    facts = {"the number of parameters": str(len(mine))}
    facts |= {f"parameter number {k}": f"{plan.specs[i].name} {describe(params[i])}" for k, i in enumerate(mine)}
    schedule: dict[int, int] = {}
    for g in sorted({plan.specs[i].group for i in mine}):
        facts |= {f"{name} of param group {g}": _plain(groups[g][name]) for name in OPTIONS}
        if repeated and plan.settings[g].staggered:
            schedule |= run.offsets(g, plan.settings[g])
    kept = set(mine)
    blocks = [(plan.owners[n], schedule.get(n)) for n, block in enumerate(plan.blocks) if block.param in kept]
    facts["owners of blocks and steps of refreshes"] = str(blocks)
    return facts | ({"root solvers": _solvers(run, kept)} if repeated else {})


def _solvers(run: Run, kept: set[int]) -> str:
    """What `root="auto"` means on this rank, which depends on the device."""
    found = set[str]()
    for block in run.plan.blocks:
        settings = run.plan.settings[run.plan.specs[block.param].group]
        if block.param in kept and settings.method and block.modes:
            device = str(run.params[block.param].device)
            found.update(settings.method.solvers(block.shape, block.modes, settings.hyper, device))
    return ", ".join(sorted(found))


def members(params: Sequence[Tensor], world: Ranks, ranks: Ranks) -> list[int]:
    """The numbers of the parameters that these ranks store."""
    return [i for i, p in enumerate(params) if _mesh(p, world) == ranks]


def _mesh(p: Tensor, world: Ranks, name: str = "") -> Ranks:
    return tuple(sorted(layout_of(p, world, name)[0]))


def _plain(value: Any) -> str:
    """An option's value in words that do not depend on a device."""
    return str(value.item() if isinstance(value, Tensor) else value)
