"""A plan at work on this rank: banks with their state, units, process groups, and the views that are checkpointed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..compute.bank import Bank
from ..planning.plan import Plan, largest_first, make_plan
from ..settings import Settings
from ..storage import averaging
from ..storage.averaging import Averages
from ..storage.step import Rate, Step, Stored
from ..storage.tensors import groups_of, is_dtensor, layout_of, local, local_gradient
from . import checkpoint
from .checkpoint import Views
from .ranks import Comm, Ranks
from .unit import Unit
from .unit_plan import identity, make_banks, make_units

Groups = Sequence[Mapping[str, Any]]


@dataclass
class Run:
    """Everything that is made for a plan. Lists are by number of the parameter, unless they say otherwise. Empty at first."""

    plan: Plan = field(default_factory=lambda: make_plan([], [], []))
    places: Sequence[int] = ()  # this rank's, in every team
    params: list[Tensor] = field(default_factory=list)
    banks: list[Bank] = field(default_factory=list)  # those of this rank
    units: list[Unit] = field(default_factory=list)  # in the order of their collectives
    comms: dict[int, Comm] = field(default_factory=dict)  # of teams of more than one rank
    views: list[Views] = field(default_factory=list)  # what is published as the optimizer's state
    counter: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))  # published as "step"
    steps: list[int] = field(default_factory=list)  # the same on the host
    sharded: list[bool] = field(default_factory=list)  # whether parameters are DTensors
    averages: Averages = field(default_factory=lambda: Averages([], [], [], []))
    _stored: Stored | None = None
    _offsets: dict[Any, Mapping[int, int]] = field(default_factory=dict)

    def name_of(self, i: int) -> str:
        return self.plan.specs[i].name

    # A step.

    def gradients(self) -> dict[int, Tensor]:
        """This rank's part of every gradient there is, by number of the parameter."""
        grads = {}
        for i, p in enumerate(self.params):
            grad = p.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"parameter {self.name_of(i)} has a sparse gradient; use a dense one (sparse=False in nn.Embedding) or give "
                    "it to torch.optim.SparseAdam"
                )
            grads[i] = local_gradient(grad, p, self.name_of(i)) if self.sharded[i] else grad
        return grads

    def begin(self, grads: Mapping[int, Tensor], settings: Sequence[Settings], rates: Sequence[Rate], groups: Groups) -> Step:
        """Count a step for the parameters that have these gradients, and say what units need to know of it."""
        for i in grads:
            self.steps[i] += 1
        if len(grads) == len(self.steps):
            self.counter += 1
        else:
            self.counter += torch.tensor([i in grads for i in range(len(self.steps))], device="cpu")
        if self._stored is None:
            self._stored = self._local()
        shares = self.averages.shares(self.steps, grads, settings, groups) if self.averages.members else {}
        for i in shares:
            if self.steps[i] <= (i in grads):  # averages begin at the parameter's first step
                self._stored.kept[i].copy_(self._stored.params[i])
        first = self.steps[0] if self.steps else 0
        even = first if len(grads) == len(self.steps) == self.steps.count(first) else None
        offsets = {g: self.offsets(g, s) for g, s in enumerate(settings) if s.staggered}
        return Step(grads, self._stored, self.steps, even, settings, rates, shares, offsets)

    def offsets(self, group: int, settings: Settings) -> Mapping[int, int]:
        """Each block's step inside the period, where refreshes are staggered."""
        hyper = settings.hyper
        key = group, settings.frequency, hyper.root, hyper.exponent, hyper.exponent_multiplier
        if key not in self._offsets:
            self._offsets[key] = self.plan.offsets(group, settings)
        return self._offsets[key]

    def _local(self) -> Stored:
        def found(*roles: str) -> dict[int, Tensor]:
            return {i: local(views[role]) for i, views in enumerate(self.views) for role in roles if role in views}

        return Stored({i: local(p) for i, p in enumerate(self.params)}, found("momentum", "z", "x"), found("y"))

    def storage_changed(self) -> None:
        """To be called when parameters may lie elsewhere in memory."""
        self._stored = None

    def finish(self) -> None:
        """Wait for the background: the state is about to be read, or written."""
        for bank in self.banks:
            bank.background.finish()

    def connect(self) -> None:
        """Make the process groups that are not there yet, in an order that all ranks share."""
        for comm in sorted(self.comms.values(), key=lambda comm: (not comm.together, largest_first(comm.ranks))):
            comm.check_alive()

    # State.

    def is_replaced(self, state: Mapping[Tensor, Mapping[str, Any]], thorough: bool) -> bool:
        """Whether tensors in the optimizer's state are not ours any more, as after ``state[k] = v.to(device)``.

        A step looks at one tensor of the first and the last parameter. Saving and loading look at all.
        """
        some = slice(None) if thorough or not self.params else slice(None, None, max(1, len(self.params) - 1))
        for p, views in zip(self.params[some], self.views[some], strict=True):
            entry = state.get(p, {})
            if any(entry.get(k) is not views[k] for k in (views if thorough else ("step",))):
                return True
        return False

    def complete(self, groups: Groups) -> list[Views]:
        """The state of every parameter, with all that a checkpoint needs."""
        return self.averages.complete(self.steps, _training(groups))

    def load(self, entries: Mapping[Tensor, Mapping[str, Any]], groups: Groups, settings: Sequence[Settings]) -> None:
        """Copy a checkpoint into the live state. Averaged parameters then hold what their mode calls for."""
        self.averages.before_load(_training(groups))
        self.copy(entries)
        for i in self.averages.after_load(self.steps, _training(groups)):
            stored = self.plan.stored(i, self.places[self.plan.specs[i].team])
            checkpoint.copy_state(entries.get(self.params[i], {}), {"y": self.params[i].detach()}, stored)
        self.storage_changed()
        for bank in self.banks:
            bank.state_changed(settings[bank.key.group])

    def copy(self, entries: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for i, (p, views) in enumerate(zip(self.params, self.views, strict=True)):
            stored = self.plan.stored(i, self.places[self.plan.specs[i].team])
            checkpoint.copy_state(entries.get(p, {}), views, stored)
        self.steps = [int(t) for t in self.counter.tolist()]

    def switch(self, numbers: Sequence[int], *, train: bool) -> None:
        """Let parameters of some param groups hold the points at which gradients are taken, or their average."""
        for g in numbers:
            self.averages.switch(g, self.steps, train=train)
        self.storage_changed()


def _training(groups: Groups) -> dict[int, bool]:
    return {g: averaging.is_training(group) for g, group in enumerate(groups)}


def make_run(
    plan: Plan,
    places: Sequence[int],
    params: list[Tensor],
    state: Mapping[Tensor, Mapping[str, Any]],
    before: Run,
    groups: Groups,
    world: Ranks,
    everyone: Ranks,
    process_group: Any,
) -> Run:
    """Banks, units and process groups for the plan. The ``state`` that parameters have moves along, by key. A bank of the very
    same blocks as one ``before`` keeps its memory. ``world`` are the ranks of the process group, ``everyone`` all ranks."""
    old = {identity(bank, before.params): bank for bank in before.banks}
    banks = make_banks(plan, places, params, old)
    comms = _make_comms(plan, params, world, everyone, process_group)
    views, counter = _make_views(plan, params, banks, groups)
    averages = Averages([spec.group for spec in plan.specs], plan.settings, params, views)
    averages.make_sums({g: group["lr"] for g, group in enumerate(groups)})
    run = Run(plan, places, params, banks, views=views, counter=counter, averages=averages)
    run.sharded = [is_dtensor(p) for p in params]
    run.copy(state)
    for bank in banks:
        if state and bank not in old.values():
            bank.state_changed(plan.settings[bank.key.group])
    run.comms = {team: comm for team, comm in enumerate(comms) if len(comm.ranks) > 1}
    run.units = make_units(plan, places, banks, comms, params)
    return run


def _make_views(plan: Plan, params: Sequence[Tensor], banks: Sequence[Bank], groups: Groups) -> tuple[list[Views], Tensor]:
    """The state of every parameter, flat, of tensors only; and the tensor that all their steps are part of."""
    counter = torch.zeros(len(params), dtype=torch.float32, device="cpu")
    views = [{"step": step} for step in counter.unbind()]
    for p, spec, entry in zip(params, plan.specs, views, strict=True):
        settings, group = plan.settings[spec.group], groups[spec.group]
        roles = averaging.state_of(p.dtype, settings)
        if settings.averaging and not averaging.is_training(group):
            roles = {"y": p.dtype} | roles
        for role, dtype in roles.items():
            entry[role] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    for bank in banks:
        for block, role, view in bank.views():
            views[block.param][checkpoint.key(role, block.index)] = view
    return views, counter


def _make_comms(plan: Plan, params: Sequence[Tensor], world: Ranks, everyone: Ranks, process_group: Any) -> list[Comm]:
    """For each team. Those of parameters that are stored all over the world are made by all ranks together."""
    known = [process_group, *(group for p in params for group in groups_of(p))]
    devices = {spec.team: p.device for spec, p in zip(plan.specs, params, strict=True)}
    worldwide = {spec.team for spec, p in zip(plan.specs, params, strict=True) if layout_of(p, world)[0] == everyone}
    return [Comm(team, devices[number], known, number in worldwide) for number, team in enumerate(plan.teams)]
