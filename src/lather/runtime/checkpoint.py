"""Checkpoints: their keys and versions, refusing what does not fit, and gathering a whole state.

``opt.state[p]`` is flat: ``step``, ``momentum`` and ``master`` (shaped like the parameter) and ``"<role>.<block>"`` such as
``L0.3``, which is a view of a bank. Keys depend on global shapes and options only, so they are the same for any number of ranks.
A block's keys are on its owner, and ``momentum`` is sharded as its parameter. Averaging has ``z`` or ``x`` instead of
``momentum``; ``y``, which a checkpoint has in both modes; and ``weight_sum``, the weights of all steps.

[Note: versions] ``state_dict()`` has ``VERSION`` under ``"lather_version"``. Files without it may be of any version, because
``torch.distributed.checkpoint`` keeps only state and param groups. So an upgrade in ``UPGRADES`` must tell by these what is to be
done, and leave a newer file as it is. An option that a file lacks takes the value that it had then (``Option.before``). A newer
version is refused.
"""

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..compute.bank import Bank, block_state
from ..linalg import is_complete, pack, unpack
from ..options import AUTO, OPTIONS, REQUIRED, STRUCTURAL, is_readable
from ..planning.blocks import Region, Shape
from ..planning.plan import BankKey, Plan
from ..roots import replaced
from ..settings import graft_name
from ..storage import averaging
from ..storage.averaging import Views
from ..storage.tensors import is_dtensor, local
from .parameters import WRAPPERS
from .ranks import Comm

MOST_STEPS = 1 << 24  # float32, which "step" is, counts no further


def key(role: str, block: int) -> str:
    return f"{role}.{block}"


def expected_shapes(plan: Plan, banks: Mapping[BankKey, Sequence[int]]) -> list[dict[str, Shape]]:
    """The state of each parameter with its blocks in these banks: key -> shape."""
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


Upgrade = Callable[[dict[str, Any], list[dict[str, Any]]], None]  # changes the state by parameter and the param groups in place


def _with_block_multiple(state: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Version 1 cut dimensions into nearly equal blocks. A newer file has the option, and keeps it."""
    for group in groups:
        group.setdefault("block_multiple", 1)


def _with_packed_roots(state: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Up to version 2 packed factors were vectors, and roots never packed. :func:`in_form` packs them when they are copied."""


UPGRADES: tuple[Upgrade, ...] = (_with_block_multiple, _with_packed_roots)  # from version 1 to 2, from 2 to 3, ...
VERSION = 1 + len(UPGRADES)
VERSION_KEY = "lather_version"


def upgraded(state_dict: Mapping[str, Any]) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """The state and the param groups of a checkpoint, in the form of this version."""
    _check_form(state_dict)
    state = {i: copy.copy(entry) for i, entry in state_dict["state"].items()}  # upgrades must not change the caller's
    groups = copy.deepcopy(list(state_dict["param_groups"]))
    for group in groups:
        if any(isinstance(i, str) for i in group["params"]):  # by torch.distributed.checkpoint, see :func:`ids_by_name`
            group.pop("param_names", None)
    versions = [each.pop(VERSION_KEY, 1) for each in groups] + [state_dict.get(VERSION_KEY, 1)]
    for version in versions:
        if not isinstance(version, int) or not 1 <= version <= VERSION:
            raise ValueError(
                f"the checkpoint has version {version!r}, and this lather reads versions 1 to {VERSION}; update lather to load it"
            )
    for step in UPGRADES[max(versions) - 1 :]:
        step(state, groups)
    for number, group in enumerate(groups):
        lacking = [name for name in OPTIONS if name not in group]
        if missing := [name for name in lacking if OPTIONS[name].before is REQUIRED]:
            raise ValueError(
                f"param group {number} of the checkpoint lacks the options {_few(missing)}: it was saved by another optimizer or "
                "another version of lather, or has the param groups of another pipeline stage; load a checkpoint of this "
                "optimizer, and save those of stages with StateDictOptions(flatten_optimizer_state_dict=True)"
            )
        group |= {name: OPTIONS[name].before for name in lacking}
        if isinstance(group["root"], str):
            group["root"] = replaced(group["root"])
    return state, groups


def _check_form(state_dict: Mapping[str, Any]) -> None:
    """Refuse what is not made of dictionaries and lists as a checkpoint is."""
    advice = "; pass what opt.state_dict() returned"
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"not the state of an optimizer but a {type(state_dict).__name__}{advice}")
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"not the state of an optimizer: it has the keys {_few(list(state_dict))} instead of 'state' and 'param_groups'{advice}"
        )
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        raise ValueError(f"the checkpoint's 'state' is not a dictionary of dictionaries, by parameter{advice}")
    if not isinstance(groups, Sequence) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"the checkpoint's 'param_groups' is not a list of dictionaries{advice}")
    for number, group in enumerate(groups):
        ids = group.get("params")
        if not isinstance(ids, (list, tuple)) or not all(isinstance(i, (int, str)) for i in ids) or len({*ids}) < len(ids):
            raise ValueError(f"'params' of the checkpoint's param group {number} is not a list of different ids{advice}")


def _check_kept(group: Mapping[str, Any], number: int) -> None:
    """Refuse what a param group holds besides options if it makes no sense."""
    names, expected = group.get("param_names"), len(group["params"])
    if names and not (isinstance(names, (list, tuple)) and len(names) == expected and all(isinstance(n, str) for n in names)):
        raise ValueError(
            f"'param_names' of the checkpoint's param group {number} is not a list of {expected} names; delete it, and the "
            "checkpoint is loaded by position"
        )
    for name in ("peak_lr", "top_lr"):
        OPTIONS["lr"].check(name, group.get(name, 0.0))
    if not isinstance(group.get("train_mode", True), bool):
        raise ValueError(f"train_mode={group['train_mode']!r} in the checkpoint's param group {number} must be True or False")


LATER_KINDS = "position", "router", "depthwise", "fused", "experts"


def check_groups(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]], *, started: bool) -> None:
    """Refuse param groups that were not made for this optimizer.

    An optimizer that has not ``started`` takes over how dimensions are cut, because checkpoints of version 1 have other blocks, and
    master weights. It takes over the graft if its own is ``"auto"``. With master weights of its own it also loads a file without
    them, because parameters stand in for them. Factors and roots may be packed or not.
    """
    sizes, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in live]
    if sizes != ours:
        raise ValueError(
            f"the checkpoint has param groups of {sizes} parameters but the optimizer has {ours}; build the optimizer from the "
            "same model with the same param groups, and not once from the model and once from its parameters. Earlier versions of "
            "lather knew fewer kinds of parameters: if one of them was given the model, pass "
            f"lather.route(model, kinds=dict.fromkeys({LATER_KINDS}))"
        )
    for number, (theirs, mine) in enumerate(zip(saved, live, strict=True)):
        _check_kept(theirs, number)
        theirs = {name: OPTIONS[name].check(name, theirs[name]) for name in OPTIONS if name != "lr"}  # a tuple may be a list now
        free = {"factors"}
        if not started:
            free |= {"block_multiple", "master_weights"}
        elif mine["master_weights"]:
            free.add("master_weights")
        if mine["graft"] == AUTO or (theirs["graft"] == AUTO and graft_name(theirs) == mine["graft"]):
            free.add("graft")  # the checkpoint, or the optimizer, has taken no step
        for name in STRUCTURAL:
            if name not in free and theirs[name] != mine[name]:
                raise ValueError(
                    f"param group {number} of the checkpoint was saved with {name}={theirs[name]!r} but the optimizer has "
                    f"{name}={mine[name]!r}, which gives other blocks or state; construct it with {name}={theirs[name]!r}"
                )


def ids_by_name(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The saved parameter for every live one: by name within a param group where both have names, else by position.

    ``torch.distributed.checkpoint`` has names for ids, in the live order. Its ``param_names`` are those of the file, which may be
    of a pipeline stage with other parameters, so :func:`upgraded` drops them.
    """
    found: list[Any] = []
    for number, (theirs, mine) in enumerate(zip(saved, live, strict=True)):
        names, ours = (_plain(group.get("param_names") or ()) for group in (theirs, mine))
        if not names or not ours:
            found += theirs["params"]
            continue
        bare, our_bare = ([name.removeprefix("module.") for name in some] for some in (names, ours))  # one may come from DDP
        pairs = [each for each in ((names, ours), (bare, ours), (names, our_bare)) if sorted(each[0]) == sorted(each[1])]
        if not pairs:
            raise ValueError(_other_names(number, names, ours, saved))
        ids: dict[str, list[Any]] = {}
        for name, i in zip(pairs[0][0], theirs["params"], strict=True):
            ids.setdefault(name, []).append(i)
        found += [ids[name].pop(0) for name in pairs[0][1]]
    return found


def _plain(names: Iterable[str]) -> list[str]:
    return [WRAPPERS.sub("", name) for name in names]


def _other_names(number: int, names: Sequence[str], ours: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> str:
    """Which names do not match, where the checkpoint has them, and what to do."""
    extra, missing = [name for name in names if name not in ours], [name for name in ours if name not in names]
    groups = [g for g, group in enumerate(saved) if {*_plain(group.get("param_names") or ())} & {*missing}]
    moved = f" (in the checkpoint they are in param group {', '.join(map(str, groups))})" if groups else ""
    return (
        f"param group {number} of the checkpoint has the parameters {_few(extra)} where the optimizer has {_few(missing)}{moved}; "
        "build the optimizer from the same model with the same param groups. If parameters were only renamed, delete "
        "'param_names' from the checkpoint's param groups, and it is loaded by position"
    )


def check_states(entries: Sequence[Mapping[str, Any]], plan: Plan, places: Sequence[int]) -> None:
    """Refuse saved state that does not fit the plan. It may be that of this rank, which has these places, or that of all ranks."""
    needed, known = expected_shapes(plan, plan.banks_of(places)), expected_shapes(plan, plan.all_banks())
    for i, (saved, spec) in enumerate(zip(entries, plan.specs, strict=True)):
        settings = plan.settings[spec.group]
        if problem := _misfit(saved, needed[i], known[i], spec.name, settings.graft_name):
            depends = settings.geometry.local
            hint = ", or it was sharded differently (blocks='local' depends on the sharding)" if depends else ""
            raise ValueError(problem + hint)


def _misfit(
    saved: Mapping[str, Any], needed: Mapping[str, Shape], known: Mapping[str, Shape], name: str, graft: str | None
) -> str | None:
    """What is wrong with the saved state of a parameter, if anything: the first keys, and the likely cause.

    A master may be missing or left over, because the dtype of its parameter may have changed. The parameter then stands in for it.
    """
    if "master" not in known:
        saved = {k: value for k, value in saved.items() if k != "master"}
    if missing := [k for k in needed if k not in saved and k != "master"]:
        cause = "by one rank of several without consolidate_state_dict(), or cut short"
        if len(missing) == len({*needed} - {"master"}):
            cause = "by another optimizer, or while the parameter was frozen; if it was, freeze it, load, and unfreeze it again"
        elif graft == "adam" and any(k[0] == "L" for k in needed) and {k[0] for k in missing} == {"v"}:
            # Torch's checkpoint code reads only what the optimizer has.
            cause = "with graft='adam', and read by an optimizer that does not keep its moment; construct it with graft='adam'"
        return f"the checkpoint lacks {_few(missing)} for parameter {name}: it was probably saved {cause}"
    if extra := [k for k in saved if k not in known]:
        return (
            f"the checkpoint holds {_few(extra)} for parameter {name}, which this optimizer does not have: it was saved with other "
            "options or by another optimizer, or somebody put it into opt.state"
        )
    for k, value in saved.items():
        if not isinstance(value, Tensor) or not is_readable(value) or not (value.is_floating_point() or k == "step"):
            kind = f"{value.layout} {value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
            return (
                f"the checkpoint's {k} for parameter {name} is no ordinary tensor of floating-point numbers but {kind}: it was "
                "changed after it was saved"
            )
        if value.shape != known[k] and not (k[0] in SYMMETRIC and triangle(value.shape) == triangle(known[k])):
            return (
                f"the checkpoint's {k} for parameter {name} is {tuple(value.shape)} but {known[k]} is expected: the parameter had "
                "another shape when it was saved"
            )
        if k in ("y", "weight_sum") and not local(value).isfinite().all():
            return f"the checkpoint's {k} for parameter {name} has NaN or Inf, and nothing can stand in for it; load an earlier one"
    step = saved["step"].item()
    if not (type(step) in (int, float) and 0 <= step <= MOST_STEPS and step == int(step)):
        return f"the checkpoint's step for parameter {name} is {step!r} but a whole number from 0 to {MOST_STEPS} is expected"
    return None


def copy_state(saved: Mapping[str, Any], live: Mapping[str, Any], stored: Region) -> None:
    """Copy what was saved into the live views. Of whole tensors, copy the region that this rank stores."""
    for k, view in live.items():
        if k not in saved:
            continue
        source, target, sharded = saved[k], local(view), is_dtensor(view)
        if is_dtensor(source):
            same = sharded and (source.device_mesh, source.placements) == (view.device_mesh, view.placements)
            source, sharded = (local(source), False) if same else (source.full_tensor(), sharded)
        if sharded:
            source = source[tuple(map(slice, stored.start, stored.stop))]
        if source.numel() and source.data_ptr() != target.data_ptr():
            target.copy_(source if source.shape == target.shape else in_form(source, target.shape))


SYMMETRIC = "LXY"  # first letters of roles that are packed, or not


def triangle(shape: Sequence[int]) -> int:
    """Elements of the lower triangle of a symmetric matrix that is kept in this shape: ``(d, d)``, or packed as ``(1, n)`` or, up
    to version 2, as ``(n,)``."""
    return shape[0] * (shape[0] + 1) // 2 if len(shape) == 2 and shape[0] == shape[1] else math.prod(shape)


def in_form(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """A symmetric matrix in another shape that has the same :func:`triangle`."""
    if matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]:
        return pack(matrix[None])[0]
    return matrix.view(1, -1) if shape[0] == 1 else unpack(matrix.view(1, 1, -1))[0]


def apart(state: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """The same memory, in tensors with storages of their own. With a view, ``torch.save`` would write all of its bank.

    They are not in ``opt.state`` itself: what moves such a tensor to other memory, such as ``share_memory_()``, would part it from
    its bank.
    """
    return {p: {k: _alone(v) if isinstance(v, Tensor) else v for k, v in entry.items()} for p, entry in state.items()}


def _alone(view: Tensor) -> Tensor:
    if is_dtensor(view) or view.layout is not torch.strided or not view.is_contiguous():
        return view
    memory, start = view.untyped_storage(), view.storage_offset() * view.itemsize
    if memory.nbytes() == view.nbytes:
        return view
    if not is_complete(view.device):  # a Mac's GPU has no storage that begins within another
        return view.clone()
    return view.new_empty(0).set_(memory[start : start + view.nbytes], 0, view.shape, view.stride())


def collect(
    plan: Plan, banks: Sequence[Bank], views: Sequence[Views], comms: Mapping[int, Comm], rank: int, to: int
) -> list[Views]:
    """The whole state on the rank ``to``, by parameter, in host memory. A collective.

    Other ranks get what they have, without DTensors, because torch would gather those again and the rank ``to`` does not take
    part. Teams without ``to`` are left out: they repeat the work of one with it, or work for parameters that it does not have.
    """
    found: list[Views] = [{} for _ in views]
    for entry, whole in zip(views, found, strict=True):
        for k, view in entry.items():
            if "." not in k:
                full = view.full_tensor() if is_dtensor(view) else view  # type: ignore[attr-defined]
                if rank == to:
                    whole[k] = full.detach().cpu().clone()
    own = {bank.key: bank.state for bank in banks}
    for team, ranks in enumerate(plan.teams):
        for place, owner in enumerate(ranks if to in ranks else ()):
            for bank, numbers in plan.banks(team, place).items():
                for role, like in block_state(plan, bank).items():
                    stack = own[bank][role] if owner == rank else None
                    if owner != to and rank in (owner, to):
                        stack = comms[team].forward(stack, len(numbers), like, place, ranks.index(to))
                    if rank == to and stack is not None:
                        for number, value in zip(numbers, stack.cpu(), strict=True):
                            block = plan.blocks[number]
                            found[block.param][key(role, block.index)] = value.clone()  # a view would keep its bank alive
    if rank == to:
        return found
    return [{k: view for k, view in entry.items() if not is_dtensor(view)} for entry in views]


# Callers that want what this rank has, by module and function: torch, which writes checkpoints of all ranks together, and
# accelerate, which puts it back at once.
TAKERS_OF_PARTS = (("torch.distributed.checkpoint", None), ("accelerate.optimizer", "__init__"))
PROBES = "torch.distributed.checkpoint.state_dict", "_init_optim_state"  # allocates state by a step with zero gradients


def _callers() -> Iterator[tuple[str, str, FrameType]]:
    """Module, function and frame of everything on the stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__") or "", frame.f_code.co_name, frame
        frame = frame.f_back


def is_probe() -> bool:
    """Whether the call comes from torch's checkpoint code, which allocates state by a step."""
    return any((name, function) == PROBES for name, function, _ in _callers())


def is_for_parts() -> bool:
    """Whether the call comes from one of ``TAKERS_OF_PARTS``, directly or not.

    With ``full_state_dict=True`` torch saves what rank 0 has alone, so that does not count. While torch loads, every call counts.
    """
    found = whole = False
    for name, function, frame in _callers():
        if any(f"{name}.".startswith(f"{module}.") and only in (None, function) for module, only in TAKERS_OF_PARTS):
            if function == "_load_optim_state_dict":
                return True
            found = True
            whole |= function == "_get_optim_state_dict" and getattr(frame.f_locals.get("info"), "full_state_dict", False)
    return found and not whole


def warn_of_parts() -> None:
    """Warn that a state lacks the blocks of other ranks."""
    warnings.warn(
        "this state_dict() has only the blocks that this rank owns, so no other rank can load a file of it. Call "
        "opt.consolidate_state_dict() on all ranks before it, and save the state of rank 0. With accelerate use "
        "lather.integrations.accelerate.register(accelerator), with transformers' Trainer put "
        "lather.integrations.transformers.Callback() at the end of its callbacks, and if another trainer calls state_dict() on "
        "all ranks, use opt.register_state_dict_pre_hook(lambda opt: opt.consolidate_state_dict())",
        stacklevel=4,  # the line that called opt.state_dict()
    )


def warn_of_blanks(banks: Iterable[Bank], steps: Sequence[int], name_of: Callable[[int], str]) -> None:
    """Warn of steps without gradients. torch fills in new state for blocks that were not gathered, if nobody consolidated."""
    used: dict[int, bool] = {}
    for bank in banks:
        sums = [tensor for role, tensor in bank.state.items() if role[0] in bank.sums]
        marks = [tensor.flatten(1).any(1).tolist() for tensor in sums]
        for block, *marked in zip(bank.blocks, *marks, strict=True):
            used[block.param] = used.get(block.param, False) or any(marked) or not marks
    if found := [i for i in used if steps[i] > 0 and not used[i]]:
        warnings.warn(
            f"the checkpoint has steps, but only zeros in the averages of the blocks that this rank owns, for {len(found)} "
            f"parameters ({name_of(found[0])} is the first). If it was gathered on one rank, for example by "
            "get_optimizer_state_dict(full_state_dict=True), call opt.consolidate_state_dict() before you save it",
            stacklevel=5,  # the line that called opt.load_state_dict()
        )


def _few(keys: Sequence[str]) -> str:
    """The first four in words, and how many more there are."""
    more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
    return ", ".join(map(repr, keys[:4])) + more
