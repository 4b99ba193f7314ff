"""What runs a plan on this rank: banks with their state, units, process groups, and the views that are checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .bank import Bank
from .census import Ranks
from .checkpoint import Views
from .exchange import Comm, world
from .layout import groups_of, is_dtensor, layout_of, local
from .options import state_dtype
from .plan import BankKey, Plan, first_come, make_plan
from .plan_report import check_memory
from .units import Step, Unit, identity, make_banks, make_units

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
    _stored: tuple[dict[int, Tensor], dict[int, Tensor]] | None = None

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
            self._stored = (
                {i: local(p) for i, p in enumerate(self.params)},
                {i: local(views["momentum"]) for i, views in enumerate(self.views) if "momentum" in views},
            )
        first = self.steps[0] if self.steps else 0
        even = first if len(grads) == len(self.steps) == self.steps.count(first) else None
        return Step(grads, *self._stored, self.steps, even, offsets, groups)

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
        """Copy a checkpoint into the live state."""
        self._copy(entries)
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
        if group["momentum"] > 0:
            entry["momentum"] = torch.zeros_like(p, dtype=state_dtype(group), requires_grad=False)
    for bank in banks:
        for block, role, view in bank.views():
            views[block.param][checkpoint.key(role, block.index)] = view
    return views, counter


def _make_comms(plan: Plan, params: Sequence[Tensor], ranks: Ranks, process_group: Any) -> list[Comm]:
    """For each team. Those of parameters that are stored all over the world are made by all ranks together."""
    known = [process_group, *(group for p in params for group in groups_of(p))]
    devices = {spec.team: p.device for spec, p in zip(plan.specs, params, strict=True)}
    worldwide = {spec.team for spec, p in zip(plan.specs, params, strict=True) if layout_of(p, ranks)[0] == world(None)}
    return [Comm(team, devices[number], known, number in worldwide) for number, team in enumerate(plan.teams)]
