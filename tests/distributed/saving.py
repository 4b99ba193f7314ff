"""What every rank runs to save in the middle of a run, and to resume it: through torch's distributed checkpoints or a file."""

from __future__ import annotations

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

MIDDLE = 10
FRESH = {"lr": 1e-4}  # what a checkpoint must overrule, together with the largest learning rate so far


@dataclass(frozen=True)
class Way:
    """How to go through torch: options of its state dict functions, and saving in the background."""

    flat: bool = False
    offload: bool = False
    background: bool = False

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
    run.opt.consolidate_state_dict(to=to)
    if not dist.is_initialized() or dist.get_rank() == to:
        state = run.opt.state_dict()
        check_plain(state)
        torch.save({"model": model, "opt": state}, path)
    run.advance(MIDDLE + 1, case.steps)
    assert all(entry["step"] > MIDDLE for entry in run.opt.state_dict()["state"].values()), "the gathered state is stale"
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
