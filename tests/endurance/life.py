"""What may happen to an optimizer, in any order: steps with all kinds of gradients, and everything in between.

A twin lives through what matters only. It must end with the same bits.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.cases import BASE, Case, Run, Stored, local, noise, whole
from distributed.saving import Way, contents
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as api
from torch.distributed.tensor import DTensor

import lather

Action = tuple[str, Any]  # a method of Life, and its argument

SIZES = {"ordinary": 1.0, "huge": 1e12, "tiny": 1e-25, "zero": 0.0}
GRADIENTS = (*SIZES, "some missing", "all missing", "some nan", "all inf")
BAD_OPTIONS: list[tuple[str, Any]] = [("lr", -1.0), ("betas", (2.0, 0.9)), ("eps", 0.0), ("precondition_frequency", 0)]
QUIET = ("arm", "copy", "distributed_checkpoint", "file", "look", "plan", "probe", "refused_load", "refused_option", "save")
QUIET += ("unpickle",)


class Life(Run):
    """A run on one rank. ``folder`` is for checkpoints, the same on all ranks."""

    def __init__(self, layout: str, case: Case, folder: Path) -> None:
        super().__init__(layout, case)
        self.folder, self.layout, self.clock, self.added = folder, layout, 0, 0

    def play(self, actions: Sequence[Action]) -> Life:
        for name, argument in actions:
            getattr(self, name)(argument)
        return self

    # What matters.

    def step(self, kind: str) -> None:
        self.clock += 1
        for number, (name, p) in enumerate(self.model.named_parameters()):
            p.grad = self._gradient(kind, name, number, p) if p.requires_grad else None
        self.opt.step()
        for name, p in self.model.named_parameters():
            assert local(p).isfinite().all(), f"{name} is not finite after {kind} gradients"

    def _gradient(self, kind: str, name: str, number: int, p: Tensor) -> Tensor | None:
        if kind == "all missing" or (kind == "some missing" and (number + self.clock) % 2):
            return None
        grad = noise(name, self.clock, self.shapes[name]) * SIZES.get(kind, 1.0)
        if kind == "all inf" or (kind == "some nan" and (number + self.clock) % 2):
            grad.view(-1)[grad.numel() // 2] = torch.inf if kind == "all inf" else torch.nan
        return self.share_of(grad, name, p, p.dtype)

    def put(self, option: tuple[str, Any]) -> None:
        """Change an option. Some do not go with others, which is said at once and then put back."""
        name, value = option
        before = [group[name] for group in self.opt.param_groups]
        for group in self.opt.param_groups:
            group[name] = value
        try:
            self.opt.plan()
        except ValueError:
            for group, old in zip(self.opt.param_groups, before, strict=True):
                group[name] = old

    def add(self, shape: tuple[int, ...]) -> None:
        name, self.added = f"late{self.added}", self.added + 1
        value = noise(name, 0, shape).to(self.case.dtype)
        self.model.register_parameter(name, nn.Parameter(value))
        self.shapes[name] = value.shape
        self.places = {**self.places, name: torch.arange(value.numel()).view(shape)}
        self.opt.add_param_group({"params": [(name, self.model.get_parameter(name))], "lr": 0.02})

    def freeze(self, number: int) -> None:
        params = list(self.model.parameters())
        params[number % len(params)].requires_grad_(False)

    def thaw(self, _: None) -> None:
        self.model.requires_grad_()

    def move(self, dtype: torch.dtype) -> None:
        if not self._sharded():
            self.model.to(dtype)

    # What does not.

    def save(self, _: None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="this state_dict")
            self.opt.state_dict()

    def plan(self, _: None) -> None:
        str(self.opt.plan())
        self.opt.health()

    def arm(self, _: None) -> None:
        self.opt.arm()

    def probe(self, _: None) -> None:
        api.get_optimizer_state_dict(self.model, self.opt)

    def look(self, _: None) -> None:
        self.opt.eval()
        self.opt.train()

    def refused_option(self, option: tuple[str, Any]) -> None:
        name, value = option
        group = self.opt.param_groups[-1]
        before, group[name] = group[name], value
        try:
            self.opt.step()
        except ValueError:
            group[name] = before
        else:
            raise AssertionError(f"{name}={value} was taken")

    def refused_load(self, _: None) -> None:
        self.opt.consolidate_state_dict()
        state = copy.deepcopy(self.opt.state_dict()) if self._first() else {}
        state["param_groups"] = [{"params": [0], "lr": 1.0}]
        try:
            self.opt.load_state_dict(state)
        except ValueError:
            return
        raise AssertionError("a wrong checkpoint was taken")

    def copy(self, _: None) -> None:
        if not self._sharded():
            self.model, self.opt = copy.deepcopy((self.model, self.opt))

    def unpickle(self, _: None) -> None:
        if not self._sharded():
            self.model, self.opt = pickle.loads(pickle.dumps((self.model, self.opt)))

    def file(self, _: None) -> None:
        """Through a file that the first rank writes, into an optimizer that is new."""
        path = self.folder / f"{self.layout}{self.clock}.pt"
        self.opt.consolidate_state_dict()
        if self._first():
            torch.save(self.opt.state_dict(), path)
        self._wait()
        self.opt = self._new()
        self.opt.load_state_dict(torch.load(path, weights_only=True))
        self._wait()

    def distributed_checkpoint(self, _: None) -> None:
        """Torch leaves out the state of parameters that are frozen where they are loaded."""
        if not all(p.requires_grad for p in self.model.parameters()):
            return
        path = self.folder / f"{self.layout}{self.clock}"
        alone = not dist.is_initialized()
        dcp.save(contents(self, Way()), checkpoint_id=path, no_dist=alone)
        before = self.opt.param_groups
        self.opt = self._new()
        for group, old in zip(self.opt.param_groups, before, strict=True):  # torch asks what state there is before it loads
            group |= {name: old[name] for name in ("betas", "graft")}  # and these decide about filters and moments
        loaded = contents(self, Way())
        dcp.load(loaded, checkpoint_id=path, no_dist=alone)
        api.set_optimizer_state_dict(self.model, self.opt, loaded["opt"])
        self._wait()

    def _new(self) -> lather.Shampoo:
        """An optimizer as a new process would make it."""
        named = [list(zip(group["param_names"], group["params"], strict=True)) for group in self.opt.param_groups]
        return lather.Shampoo([{"params": params} for params in named], **BASE | self.case.options)

    def _sharded(self) -> bool:
        return any(isinstance(p, DTensor) for p in self.model.parameters())

    def _first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _wait(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def state(self) -> dict[str, Tensor]:
        """All state of parameters that have taken a step, if there is one rank. Not as an earlier snapshot has it."""
        self.opt.consolidate_state_dict()
        entries = {i: entry for i, entry in self.opt.state_dict()["state"].items() if entry["step"] > 0}
        return {f"{number} {key}": value.clone() for number, entry in entries.items() for key, value in entry.items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(p).clone() for name, p in self.model.named_parameters()}


def live(layout: str, case: Case, actions: Sequence[Action], folder: Path) -> Stored:
    """What this rank stores in the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lather.NumericalWarning)
        return Life(layout, case, folder).play(actions).stored()


def that_matters(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action[0] not in QUIET]
