"""What ranks must agree on before they exchange anything, and how they stop together if they do not."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..options import OPTIONS
from ..planning.blocks import Block
from ..planning.plan import largest_first
from ..storage.tensors import describe, groups_of, layout_of
from .parameters import Groups, name_of, stored_items
from .ranks import Comm, Peers, Ranks, difference
from .run import Run

Facts = dict[str, str]


def find_peers(groups: Groups, world: Ranks, everyone: Ranks, given: Any) -> Peers:
    """The ranks of all meshes on which this rank stores parameters. ``given`` is a process group to use if it fits."""
    known, devices = [given], dict[Ranks, torch.device]()
    for g, i, p in stored_items(groups):
        devices[_mesh(p, world, name_of(groups[g], g, i))] = p.device
        known += groups_of(p)
    shared = [ranks for ranks in sorted(devices, key=largest_first) if len(ranks) > 1]
    return Peers([Comm(ranks, devices[ranks], known) for ranks in shared], everyone)


def agree(
    peers: Peers, run: Run, groups: Groups, world: Ranks, given: Mapping[str, Any], loaded: bool, error: Exception | None
) -> None:
    """Compare the facts of every mesh. Raises on all ranks or on none.

    ``given`` are arguments of the constructor, and ``error`` is why this rank could not plan. ``loaded``: compare steps too.
    """
    problem = None if error is None else str(error)
    for comm in peers.comms:
        told = {"the plan": f"{type(error).__name__}: {error}" if error else "made"}
        if error is None:
            told |= facts_of(run, groups, world, comm.ranks, given, loaded)
        problem = difference(comm, told) or problem
    problem = peers.tell(problem)
    if error is not None and problem == str(error):
        raise error
    if problem is not None:
        raise ValueError(problem) from error


def facts_of(run: Run, groups: Groups, world: Ranks, ranks: Ranks, given: Mapping[str, Any], loaded: bool) -> Facts:
    """Everything that must be the same on the ranks of a mesh, in words."""
    plan, params = run.plan, run.params
    repeated = given["num_trainers_per_group"] is not None  # a block has several owners, which must refresh it in the same way
    mine = [i for i, p in enumerate(params) if _mesh(p, world) == ranks]
    facts = {name: str(value) for name, value in given.items()} | {"the number of parameters": str(len(mine))}
    facts |= {f"parameter number {k}": f"{plan.specs[i].name} {describe(params[i])}" for k, i in enumerate(mine)}
    schedule: dict[int, int] = {}
    for g in sorted({plan.specs[i].group for i in mine}):
        options = {name: groups[g][name] for name in OPTIONS}
        facts |= {f"{name} of param group {g}": str(x.item() if isinstance(x, Tensor) else x) for name, x in options.items()}
        if repeated and plan.settings[g].staggered:
            schedule |= run.offsets(g, plan.settings[g])
    kept = set(mine)
    blocks = {n: block for n, block in enumerate(plan.blocks) if block.param in kept}
    facts["owners of blocks and steps of refreshes"] = str([(plan.owners[n], schedule.get(n)) for n in blocks])
    facts |= {"root solvers": _solvers(run, blocks.values())} if repeated else {}
    for i in mine if loaded or given["check_ranks"] else ():
        facts[f"the step of parameter {run.name_of(i)}"] = str(run.steps[i])
        if given["check_ranks"]:
            facts[f"whether {run.name_of(i)} has a gradient"] = str(params[i].grad is not None)
    return facts


def _solvers(run: Run, blocks: Iterable[Block]) -> str:
    """What ``root="auto"`` means on this rank, which depends on the device."""
    found = set[str]()
    for block in blocks:
        settings = run.plan.settings[run.plan.specs[block.param].group]
        if settings.method and block.modes:
            device = str(run.params[block.param].device)
            found.update(settings.method.solvers(block.shape, block.modes, settings.hyper, device))
    return ", ".join(sorted(found))


def _mesh(p: Tensor, world: Ranks, name: str = "") -> Ranks:
    return tuple(sorted(layout_of(p, world, name)[0]))
