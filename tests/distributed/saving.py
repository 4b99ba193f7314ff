"""What every rank runs to save in the middle of a run, and to resume it: through torch's distributed checkpoints or a file."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as api
from torch.distributed.tensor import DTensor

from .cases import Case, Run, Stored, changed, local, whole

MIDDLE, STEPS = 6, 9  # roots are refreshed before and after the middle
FRESH = {"lr": 1e-4}  # what a checkpoint must overrule, together with the largest learning rate so far


@dataclass(frozen=True)
class Way:
    """How to go through torch: options of its state dict functions, saving in the background, and a hook that gathers."""

    flat: bool = False
    offload: bool = False
    background: bool = False
    gathers: bool = False

    def options(self) -> api.StateDictOptions:
        return api.StateDictOptions(flatten_optimizer_state_dict=self.flat, cpu_offload=self.offload)


def fresh(layout: str, case: Case) -> Run:
    """A run that knows nothing of the other: its parameters are zero."""
    run = Run(layout, changed(case, **FRESH) if case.optimizer == "shampoo" else case)
    with torch.no_grad():
        for p in run.model.parameters():
            local(p).zero_()
    return run


def contents(run: Run, way: Way) -> dict[str, Any]:
    if way.gathers and not run.opt._optimizer_state_dict_pre_hooks:
        run.opt.register_state_dict_pre_hook(lambda opt: opt.consolidate_state_dict())
    return {
        "model": api.get_model_state_dict(run.model, options=api.StateDictOptions(cpu_offload=way.offload)),
        "opt": api.get_optimizer_state_dict(run.model, run.opt, options=way.options()),
    }


def save(layout: str, case: Case, path: Path, way: Way) -> Stored:
    """Write a checkpoint in the middle and go on to the end, which the checkpoint must not disturb."""
    run = Run(layout, case).advance(1, MIDDLE)
    if way.background:
        # Its own group: its messages must not meet those of the steps below.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        saved = dcp.async_save(contents(run, way), checkpoint_id=path, process_group=group, no_dist=not dist.is_initialized())
        run.advance(MIDDLE + 1, case.steps)
        saved.result()
    else:
        dcp.save(contents(run, way), checkpoint_id=path, no_dist=not dist.is_initialized())
        run.advance(MIDDLE + 1, case.steps)
    return run.stored()


def resume(layout: str, case: Case, path: Path, way: Way) -> Stored:
    run = fresh(layout, case)
    loaded = contents(run, way)
    dcp.load(loaded, checkpoint_id=path, no_dist=not dist.is_initialized())
    api.set_model_state_dict(run.model, loaded["model"])
    api.set_optimizer_state_dict(run.model, run.opt, loaded["opt"], options=way.options())
    return run.advance(MIDDLE + 1, case.steps).stored()


# One file.


def consolidate(layout: str, case: Case, path: Path, to: int = 0) -> Stored:
    """As ``save``, but gathered on one rank, which writes a plain file."""
    run = Run(layout, case).advance(1, MIDDLE)
    model = {name: whole(p).clone() for name, p in run.model.named_parameters()}
    taken = [int(run.opt.state[p]["step"]) for group in run.opt.param_groups for p in group["params"]]
    run.opt.consolidate_state_dict(to=to)
    if not dist.is_initialized() or dist.get_rank() == to:
        state = run.opt.state_dict()
        check_plain(state)
        torch.save({"model": model, "opt": state}, path)
    run.advance(MIDDLE + 1, case.steps)
    now = [entry["step"] for entry in run.opt.state_dict()["state"].values()]
    assert all(a < b for a, b in zip(taken, now, strict=True)), "the gathered state is stale"
    return run.stored()


def check_plain(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        for key, value in entry.items():
            assert isinstance(value, Tensor) and not isinstance(value, DTensor), key
            assert value.device.type == "cpu", key


def load_file(layout: str, case: Case, path: Path) -> Run:
    run = fresh(layout, case)
    saved = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            local(p).copy_(saved["model"][name].view(-1)[run.places[name]])
    run.opt.load_state_dict(saved["opt"])
    return run


def resume_file(layout: str, case: Case, path: Path) -> Stored:
    return load_file(layout, case, path).advance(MIDDLE + 1, case.steps).stored()


def write_own(layout: str, case: Case, folder: Path) -> None:
    """What a user does who does not know that state is shared out: every rank writes what it has."""
    run = Run(layout, case).advance(1, MIDDLE)
    model = {name: whole(p).clone() for name, p in run.model.named_parameters()}
    torch.save({"model": model, "opt": run.opt.state_dict()}, folder / f"{dist.get_rank()}.pt")


def try_loading(layout: str, case: Case, path: Path) -> None:
    load_file(layout, case, path)


# Parts of a state.


def warns(take: Callable[[], Any], by_torch: bool = False) -> bool:
    """Whether it is said that a state lacks the blocks of other ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        take()
    found = [each for each in caught if "consolidate_state_dict()" in str(each.message)]
    assert by_torch or all(each.filename == __file__ for each in found), "the line that called state_dict()"
    return bool(found)


def ways_to_take(layout: str, case: Case, path: Path) -> dict[str, bool]:
    """Which of them warn, in the order in which they are tried."""
    run = Run(layout, case)
    opt = run.opt
    put_back = lambda: opt.load_state_dict(opt.state_dict())  # noqa: E731  before training, as accelerate does it
    found = {"before the first step": warns(put_back)}
    found["torch's probe"] = warns(lambda: api.get_optimizer_state_dict(run.model, opt))
    run.advance(1, 2)
    found["after a step"] = warns(lambda: opt.state_dict())
    found["by a deepcopy"] = warns(lambda: copy.deepcopy(opt))
    if not layout.startswith("fsdp"):  # DTensors of a mesh cannot be pickled
        found["by a pickle"] = warns(lambda: pickle.dumps(opt))
    found["for torch's functions"] = warns(lambda: contents(run, Way()))
    found["by a thing that torch saves"] = warns(lambda: dcp.save({"opt": opt}, checkpoint_id=path))
    loaded = contents(run, Way())["opt"]
    found["to load through torch"] = warns(lambda: api.set_optimizer_state_dict(run.model, opt, loaded))
    whole = api.StateDictOptions(full_state_dict=True)
    found["as a whole, by torch"] = warns(lambda: api.get_optimizer_state_dict(run.model, opt, options=whole), by_torch=True)
    opt.consolidate_state_dict()
    found["consolidated"] = warns(lambda: opt.state_dict())
    found["as a whole, consolidated"] = warns(lambda: api.get_optimizer_state_dict(run.model, opt, options=whole))
    run.advance(3, 3)
    found["a step later"] = warns(lambda: opt.state_dict())
    return found


def gather_in_a_hook(layout: str, case: Case, path: Path) -> Stored:
    """As ``consolidate``, where a hook of ``state_dict()`` does it."""
    run = Run(layout, case).advance(1, MIDDLE)
    seen: list[dict[str, Any]] = []
    handle = run.opt.register_state_dict_pre_hook(lambda opt: opt.consolidate_state_dict())
    run.opt.register_state_dict_post_hook(lambda opt, state: seen.append(state))
    assert not warns(lambda: run.opt.state_dict())
    assert len(run.opt._optimizer_state_dict_pre_hooks) == 1, "the user's hooks are left in place"
    model = {name: whole(p).clone() for name, p in run.model.named_parameters()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        check_plain(seen[0])
        torch.save({"model": model, "opt": {**seen[0]}}, path)
    handle.remove()
    return run.advance(MIDDLE + 1, case.steps).stored()
