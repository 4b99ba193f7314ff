"""Checkpoints: their keys and versions, what does not fit, and the gathering of a whole state.

``opt.state[p]`` is flat: ``step``, ``momentum`` (shaped like the parameter) and ``"<role>.<block>"`` such as ``L0.3``, which
is a view of a bank. Keys depend on global shapes and options only, so they are the same for any number of ranks. A block's
keys are there on the rank that owns it; ``momentum`` lies as its parameter does. Averaging has ``z`` or ``x`` instead of
``momentum``; ``y``, which a checkpoint has in either mode; and ``weight_sum``, the weights of all steps.

[Note: versions] ``state_dict()`` has ``VERSION`` under ``"lather_version"``. Files without it are version 1, and so are those of
``torch.distributed.checkpoint``, which keeps only state and param groups. A version that changes what is stored appends its
upgrade to ``UPGRADES``, and must then write its number into param groups too. An option that a file lacks takes the value
that it had then (``Option.before``). A newer version is refused.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compute.bank import Bank, block_state
from ..options import OPTIONS, REQUIRED, STRUCTURAL
from ..planning.blocks import Region, Shape
from ..planning.plan import BankKey, Plan
from ..storage import averaging
from ..storage.tensors import is_dtensor, local
from .ranks import Comm

Views = dict[str, Tensor]


def key(role: str, block: int) -> str:
    return f"{role}.{block}"


def expected_shapes(plan: Plan, banks: Mapping[BankKey, Sequence[int]]) -> list[dict[str, Shape]]:
    """For each parameter, the state that the plan's options call for in these banks: key -> shape."""
    shapes: list[dict[str, Shape]] = [{"step": ()} for _ in plan.specs]
    for spec, entry in zip(plan.specs, shapes, strict=True):
        settings = plan.settings[spec.group]
        entry |= dict.fromkeys(averaging.state_of(getattr(torch, spec.dtype), settings), spec.shape)
        if settings.averaging:
            entry["y"] = spec.shape
            entry |= {"weight_sum": ()} if settings.averaging.kind == "schedule_free" else {}
    for bank, numbers in banks.items():
        state = block_state(plan, bank)
        for block in (plan.blocks[i] for i in numbers):
            for role, like in state.items():
                shapes[block.param][key(role, block.index)] = tuple(like.shape)
    return shapes


Upgrade = Callable[[dict[str, Any], list[dict[str, Any]]], None]  # of the state by parameter and the param groups, in place
UPGRADES: tuple[Upgrade, ...] = ()  # from version 1 to 2, from 2 to 3, ...
VERSION = 1 + len(UPGRADES)
VERSION_KEY = "lather_version"


def upgraded(state_dict: Mapping[str, Any]) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """The state and the param groups of a checkpoint, as this version has them. Refuses what is not an optimizer's state."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"not the state of an optimizer: it has the keys {_few(list(state_dict))} where 'state' and 'param_groups' are "
            "expected; pass what opt.state_dict() returned"
        )
    state, groups = dict(state_dict["state"]), copy.deepcopy(list(state_dict["param_groups"]))
    versions = [each.pop(VERSION_KEY, 1) for each in groups] + [state_dict.get(VERSION_KEY, 1)]
    version = max(versions, key=lambda v: v if isinstance(v, int) else math.inf)
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise ValueError(
            f"the checkpoint has version {version!r}, and this version of lather reads versions up to {VERSION}; update lather "
            "to load it"
        )
    for step in UPGRADES[version - 1 :]:
        step(state, groups)
    for number, group in enumerate(groups):
        lacking = [name for name in OPTIONS if name not in group]
        if missing := [name for name in lacking if OPTIONS[name].before is REQUIRED]:
            raise ValueError(
                f"param group {number} of the checkpoint lacks the options {_few(missing)}: it was saved by another optimizer or "
                "another version of lather"
            )
        group |= {name: OPTIONS[name].before for name in lacking}
    return state, groups


def check_groups(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> None:
    """Refuse param groups that were not made for this optimizer."""
    sizes, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in live]
    if sizes != ours:
        raise ValueError(
            f"the checkpoint has param groups of {sizes} parameters but the optimizer of {ours}; build the optimizer from the "
            "same model with the same param groups"
        )
    for number, (theirs, mine) in enumerate(zip(saved, live, strict=True)):
        for name in STRUCTURAL:
            if OPTIONS[name].check(name, theirs[name]) != mine[name]:  # a tuple may come back as a list
                raise ValueError(
                    f"param group {number} of the checkpoint was saved with {name}={theirs[name]!r} but the optimizer has "
                    f"{name}={mine[name]!r}, which gives other blocks or state; construct it with {name}={theirs[name]!r}"
                )


def check_states(entries: Sequence[Mapping[str, Any]], plan: Plan, places: Sequence[int]) -> None:
    """Refuse the saved state of a plan's parameters that does not fit it, as seen from these places."""
    needed = expected_shapes(plan, plan.banks_of(places))
    known = expected_shapes(plan, plan.all_banks())
    for i, (saved, spec) in enumerate(zip(entries, plan.specs, strict=True)):
        local_blocks = plan.settings[spec.group].geometry.local
        hint = ", or sharded otherwise, which blocks='local' depends on" if local_blocks else ""
        check_state(saved, needed[i], known[i], spec.name, hint)


def check_state(
    saved: Mapping[str, Any], needed: Mapping[str, Shape], known: Mapping[str, Shape], name: str, hint: str = ""
) -> None:
    """Refuse the state of one parameter that does not fit, listing the first keys and the likely cause.

    ``needed`` is what this rank keeps, ``known`` what all ranks keep; a checkpoint may hold either.
    """
    if missing := [k for k in needed if k not in saved]:
        cause = (
            "saved by another optimizer, or while the parameter was frozen"
            if len(missing) == len(needed)
            else "saved by one rank of several without consolidate_state_dict(), or cut short"
        )
        raise ValueError(f"the checkpoint lacks {_few(missing)} for parameter {name}: it was probably {cause}{hint}")
    if extra := [k for k in saved if k not in known]:
        raise ValueError(
            f"the checkpoint holds {_few(extra)} for parameter {name}, which this optimizer does not have: other options or "
            f"another optimizer{hint}"
        )
    for k in saved:
        if not isinstance(saved[k], Tensor) or saved[k].shape != known[k]:
            raise ValueError(
                f"the checkpoint's {k} for parameter {name} is {_shape(saved[k])} where {known[k]} is expected: the "
                f"parameter had another shape when it was saved{hint}"
            )


def copy_state(saved: Mapping[str, Any], live: Views, stored: Region) -> None:
    """Copy what there is into the live views; of whole tensors, the region that this rank stores."""
    for k, view in live.items():
        if k in saved:
            source, target = _part(saved[k], view, stored), local(view)
            if source.numel() and source.data_ptr() != target.data_ptr():
                target.copy_(source)


def _part(saved: Any, view: Any, stored: Region) -> Tensor:
    if is_dtensor(saved):
        alike = is_dtensor(view) and (saved.device_mesh, saved.placements) == (view.device_mesh, view.placements)
        if alike:
            return local(saved)
        saved = saved.full_tensor()
    whole = is_dtensor(view)
    return saved[tuple(map(slice, stored.start, stored.stop))] if whole else saved  # type: ignore[no-any-return]


def collect(
    plan: Plan, banks: Sequence[Bank], views: Sequence[Views], comms: Mapping[int, Comm], rank: int, to: int
) -> list[Views]:
    """The whole state on the rank ``to``, by parameter, in host memory. A collective.

    The others get what they have, without DTensors: torch would gather those again, and the rank ``to`` does not take part.
    Teams without ``to`` repeat the work of one with it, or work for parameters that it does not have.
    """
    found: list[Views] = []
    for entry in views:
        parts = {k: _whole(entry[k], keep=rank == to) for k in entry if "." not in k}
        found.append({k: value for k, value in parts.items() if value is not None})
    own = {bank.key: bank.state for bank in banks}
    for team, ranks in enumerate(plan.teams):
        if to not in ranks:
            continue
        for place, owner in enumerate(ranks):
            for bank, numbers in plan.banks(team, place).items():
                for role, like in block_state(plan, bank).items():
                    stack = own[bank][role] if owner == rank else None
                    if owner != to and rank in (owner, to):
                        shape = len(numbers), *like.shape
                        stack = _forward(stack, shape, like.dtype, comms[team], place, ranks.index(to))
                    if rank == to and stack is not None:
                        for number, value in zip(numbers, stack.cpu(), strict=True):
                            block = plan.blocks[number]
                            found[block.param][key(role, block.index)] = value.clone()  # a view would drag its bank along
    if rank == to:
        return found
    return [{k: view for k, view in entry.items() if not is_dtensor(view)} for entry in views]


def _whole(view: Tensor, keep: bool) -> Tensor | None:
    """A tensor brought together from all ranks, of which one keeps it."""
    full = view.full_tensor() if is_dtensor(view) else view  # type: ignore[attr-defined]
    return full.detach().cpu().clone() if keep else None


def _forward(stack: Tensor | None, shape: Shape, dtype: torch.dtype, comm: Comm, source: int, target: int) -> Tensor | None:
    """Send a stack from one place to another; the one that has it gives it, the other gets it."""
    if stack is not None:
        comm.send(stack.contiguous().to(comm.device), target)
        return None
    stack = torch.empty(shape, dtype=dtype, device=comm.device)
    comm.receive(stack, source)
    return stack


def blank(banks: Iterable[Bank]) -> list[int]:
    """Parameters that have blocks here, all of them as they were before the first step: nothing has been summed up."""
    seen: dict[int, bool] = {}
    for bank in banks:
        sums = [tensor for role, tensor in bank.state.items() if role[0] in bank.sums]
        marks = [tensor.flatten(1).any(1).tolist() for tensor in sums]
        for block, *used in zip(bank.blocks, *marks, strict=True):
            seen[block.param] = seen.get(block.param, False) or any(used) or not marks
    return [param for param, used in seen.items() if not used]


def warn_of_blanks(banks: Iterable[Bank], steps: Sequence[int], name_of: Callable[[int], str]) -> None:
    """Gathering on one rank without consolidating makes torch fill the other ranks' blocks with freshly initialised state."""
    if found := [i for i in blank(banks) if steps[i] > 0]:
        warnings.warn(
            f"the checkpoint has steps, but only zeros in the averages of the blocks that this rank owns, for {len(found)} "
            f"parameters ({name_of(found[0])} is the first). If it was gathered on one rank, for example by "
            "get_optimizer_state_dict(full_state_dict=True), call opt.consolidate_state_dict() before that",
            stacklevel=4,  # the line that called opt.load_state_dict()
        )


def _few(keys: Sequence[str], limit: int = 4) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(map(repr, keys[:limit])) + more


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"
