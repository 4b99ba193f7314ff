"""What runs a plan on this rank: banks with their state, units, process groups, and the views that are checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..compute.bank import Bank
from ..planning.plan import BankKey, Plan, first_come, make_plan
from ..report.plan import check_memory
from ..storage import averaging
from ..storage import update as rules
from ..storage.buffers import Stored, copy_pairs
from ..storage.tensors import groups_of, is_dtensor, layout_of, local
from . import checkpoint
from .census import Ranks
from .checkpoint import Views
from .exchange import Comm, world
from .unit import Step, Unit, identity, make_banks, make_units

Groups = Sequence[Mapping[str, Any]]


@dataclass
class Built:
    """All that is made for a plan; lists are by number of the parameter, unless they say otherwise. Empty at first."""

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
    sums: dict[int, Tensor] = field(default_factory=dict)  # weights in averages, by group; published as "weight_sum"
    _stored: Stored | None = None

    def name_of(self, i: int) -> str:
        return self.plan.specs[i].name

    def count(self, numbers: Mapping[int, Any]) -> None:
        """One more step for these parameters."""
        for i in numbers:
            self.steps[i] += 1
        if len(numbers) == len(self.steps):
            self.counter += 1
        else:
            self.counter += torch.tensor([i in numbers for i in range(len(self.steps))], device="cpu")

    def step(
        self, grads: Mapping[int, Tensor], groups: Groups, offsets: Callable[[BankKey], Mapping[int, int] | None]
    ) -> Step:
        """What units need to know of a step with these gradients."""
        if self._stored is None:
            self._stored = self._local()
        shares = self._shares(grads, groups) if self.averaged else {}
        new = [i for i in shares if self.steps[i] <= (i in grads)]  # averages begin at the parameter's first step
        copy_pairs([(self._stored.kept[i], self._stored.params[i]) for i in new])
        first = self.steps[0] if self.steps else 0
        even = first if len(grads) == len(self.steps) == self.steps.count(first) else None
        return Step(grads, self._stored, shares, self.steps, even, offsets, groups)

    def _local(self) -> Stored:
        def found(*roles: str) -> dict[int, Tensor]:
            return {i: local(views[role]) for i, views in enumerate(self.views) for role in roles if role in views}

        return Stored({i: local(p) for i, p in enumerate(self.params)}, found("momentum", "z", "x"), found("y"))

    def _group(self, i: int) -> Mapping[str, Any]:
        return self.plan.groups[self.plan.specs[i].group]

    def _shares(self, grads: Mapping[int, Tensor], groups: Groups) -> dict[int, float | Tensor]:
        """How much of the point that a step leads to goes into the average, for all parameters that are averaged."""
        found: dict[int, float | Tensor] = {}
        for g, members in self.averaged.items():
            if g in self.sums:
                steps, active = [self.steps[i] for i in members], [i in grads for i in members]
                found |= zip(members, averaging.shares_(self.sums[g], steps, active, groups[g]), strict=True)
            else:
                found |= dict.fromkeys(members, averaging.constant_share(groups[g]))
        return found

    @cached_property
    def averaged(self) -> dict[int, list[int]]:
        """Parameters that are averaged, by group."""
        found: dict[int, list[int]] = {}
        for i, spec in enumerate(self.plan.specs):
            if averaging.is_on(self.plan.groups[spec.group]):
                found.setdefault(spec.group, []).append(i)
        return found

    # What parameters hold that are averaged.

    def switch(self, g: int, *, train: bool) -> None:
        """From the points at which gradients are taken to their average, or back."""
        for i in self.averaged.get(g, ()):
            if not train:
                self._note(i)
                self._make_room(i, train=False)
            self._hold(i, train=train)
            if train:
                self._make_room(i, train=True)
        self.storage_changed()

    def _note(self, i: int) -> None:
        """In train mode: what was done to a parameter since its last step, where that is not ``y``."""
        p, y = self.params[i], self.views[i].get("y")
        if y is not None and self.steps[i] > 0:
            averaging.unrounded_(local(y), local(p), p.dtype)

    def _make_room(self, i: int, *, train: bool) -> None:
        """For ``y``, where the parameter is not it."""
        p, views = self.params[i], self.views[i]
        if train and not averaging.is_apart(p.dtype, self._group(i)):
            views.pop("y", None)
        elif "y" not in views:
            views["y"] = p.detach().clone()

    def _hold(self, i: int, *, train: bool) -> None:
        """What the mode calls for. Before its first step a parameter is its own average."""
        views, group = self.views[i], self._group(i)
        if self.steps[i] > 0 and "y" in views:
            y, other = local(views["y"]), local(views[averaging.kept(group)])
            local(self.params[i]).copy_(y if train else averaging.average(y, other, group))

    def complete(self) -> list[Views]:
        """The views, with ``y`` also where it is the parameter: loaded, they tell in either mode what parameters are."""
        found = [dict(views) for views in self.views]
        for g, members in self.averaged.items():
            for i in members:
                if averaging.is_training(self.plan.groups[g]):
                    self._note(i)
                found[i].setdefault("y", self.params[i].detach().clone())
        return found

    def storage_changed(self) -> None:
        """To be called when parameters may lie elsewhere in memory."""
        self._stored = None

    def finish(self) -> None:
        """Wait for what is done aside: the state is about to be read, or written."""
        for bank in self.banks:
            if "aside" in vars(bank):
                bank.aside.finish()

    def connect(self) -> None:
        """Make the process groups that are not there yet, in an order that all ranks share."""
        for comm in sorted(self.comms.values(), key=lambda comm: (not comm.together, first_come(comm.ranks))):
            comm.check_alive()

    def load(self, entries: Mapping[Tensor, Mapping[str, Any]], groups: Groups) -> None:
        """Copy a checkpoint into the live state. Parameters that are averaged then hold what their mode calls for."""
        for g, members in self.averaged.items():
            for i in members:
                self._make_room(i, train=averaging.is_training(groups[g]))
        self._copy(entries)
        for g, members in self.averaged.items():
            for i in members:
                self._hold(i, train=averaging.is_training(groups[g]))
                if "y" not in self.views[i] and self.steps[i] > 0:
                    stored = self.plan.stored(i, self.places[self.plan.specs[i].team])
                    checkpoint.copy_state(entries.get(self.params[i], {}), {"y": self.params[i].detach()}, stored)
        self.storage_changed()
        for bank in self.banks:
            bank.state_changed(groups[bank.key.group])

    def _copy(self, entries: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for i, (p, views) in enumerate(zip(self.params, self.views, strict=True)):
            stored = self.plan.stored(i, self.places[self.plan.specs[i].team])
            checkpoint.copy_state(entries.get(p, {}), views, stored)
        self.steps = [int(t) for t in self.counter.tolist()]


def build(
    plan: Plan,
    places: Sequence[int],
    params: list[Tensor],
    state: Mapping[Tensor, Mapping[str, Any]],
    before: Built,
    ranks: Ranks,
    process_group: Any,
) -> Built:
    """Banks, units and process groups for the plan. The ``state`` that parameters have moves along, by key; a bank of the very
    same blocks as one ``before`` keeps its memory.
    """
    check_memory(plan, places, {spec.device: p.device for spec, p in zip(plan.specs, params, strict=True)})
    old = {identity(bank, before.params): bank for bank in before.banks}
    banks = make_banks(plan, places, params, plan.groups, old)
    comms = _make_comms(plan, params, ranks, process_group)
    views, counter = _make_views(plan, params, banks)
    built = Built(plan, places, params, banks, views=views, counter=counter, sharded=[is_dtensor(p) for p in params])
    built.sums = _make_sums(built)
    built._copy(state)
    for bank in banks:
        if state and bank not in old.values():
            bank.state_changed(plan.groups[bank.key.group])
    built.comms = {team: comm for team, comm in enumerate(comms) if len(comm.ranks) > 1}
    built.units = make_units(plan, places, banks, comms, params)
    return built


def _make_views(plan: Plan, params: Sequence[Tensor], banks: Sequence[Bank]) -> tuple[list[Views], Tensor]:
    """The state of every parameter, flat, of tensors only; and the tensor that all their steps are part of."""
    counter = torch.zeros(len(params), dtype=torch.float32, device="cpu")
    views = [{"step": step} for step in counter.unbind()]
    for p, spec, entry in zip(params, plan.specs, views, strict=True):
        group = plan.groups[spec.group]
        roles = rules.state_of(p.dtype, group)
        if averaging.is_on(group) and not averaging.is_training(group):
            roles = {"y": p.dtype} | roles
        for role, dtype in roles.items():
            entry[role] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    for bank in banks:
        for block, role, view in bank.views():
            views[block.param][checkpoint.key(role, block.index)] = view
    return views, counter


def _make_sums(built: Built) -> dict[int, Tensor]:
    """Weights of all steps so far, where averages are made of them; parts of it are the parameters' state."""
    sums = {}
    for g, members in built.averaged.items():
        if built.plan.groups[g]["averaging"] == "schedule_free":
            sums[g] = averaging.empty_sums(len(members), built.plan.groups[g])
            for i, value in zip(members, sums[g].unbind(), strict=True):
                built.views[i]["weight_sum"] = value
    return sums


def _make_comms(plan: Plan, params: Sequence[Tensor], ranks: Ranks, process_group: Any) -> list[Comm]:
    """For each team. Those of parameters that are stored all over the world are made by all ranks together."""
    known = [process_group, *(group for p in params for group in groups_of(p))]
    devices = {spec.team: p.device for spec, p in zip(plan.specs, params, strict=True)}
    worldwide = {spec.team for spec, p in zip(plan.specs, params, strict=True) if layout_of(p, ranks)[0] == world(None)}
    return [Comm(team, devices[number], known, number in worldwide) for number, team in enumerate(plan.teams)]
