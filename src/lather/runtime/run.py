"""A plan at work on this rank: its banks, units and process groups, and the views that are checkpointed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..compute.bank import Bank
from ..planning.layouts import Layout
from ..planning.plan import Plan, make_plan
from ..settings import Settings
from ..storage import averaging
from ..storage.averaging import Averages, Groups, Views
from ..storage.copies import Located
from ..storage.step import Rate, Step, Stored
from ..storage.tensors import groups_of, is_dtensor, layout_of, local, local_gradient
from . import checkpoint
from .ranks import Comm, Parts, Ranks
from .unit import Unit
from .unit_plan import identity, make_banks, make_units

Entries = Mapping[Tensor, Mapping[str, Any]]  # the state of parameters
Phase = Callable[[Step | None], None]
Sharers = Mapping[tuple[int, Layout], Comm]  # of places that store the same, by team and mesh


@dataclass
class Run:
    """Everything that is made for a plan. Lists are by parameter unless noted otherwise. Empty at first."""

    plan: Plan = field(default_factory=lambda: make_plan([], [], []))
    places: Sequence[int] = ()  # this rank's place in every team
    params: list[Tensor] = field(default_factory=list)
    banks: list[Bank] = field(default_factory=list)  # of this rank
    units: list[Unit] = field(default_factory=list)  # in the order of their collectives
    comms: dict[int, Comm] = field(default_factory=dict)  # by team, if it has more than one rank
    sharers: Sharers = field(default_factory=dict)
    views: list[Views] = field(default_factory=list)  # what is published as the optimizer's state
    phases: Sequence[Phase] = ()  # of a step, in their order
    counter: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))  # published as "step"
    steps: list[int] = field(default_factory=list)  # the same on the host
    sharded: list[bool] = field(default_factory=list)  # whether parameters are DTensors
    averages: Averages = field(default_factory=lambda: Averages([], [], [], [], []))
    _memory: list[tuple[list[Tensor], list[int]]] = field(default_factory=list)  # plain views, and where they were made
    _published: list[float] = field(default_factory=list)  # the steps that we published last
    _is_underway: bool = False  # a step has begun and not ended
    _stored: Stored | None = None
    _masters: dict[int, Tensor] = field(default_factory=dict)  # parameters as they are before they are rounded
    _offsets: dict[Any, Mapping[int, int]] = field(default_factory=dict)

    def name_of(self, i: int) -> str:
        return self.plan.specs[i].name

    # A step.

    def refuse_gradients(self) -> None:
        """Raise for gradients that cannot be used."""
        for i, p in enumerate(self.params):
            if (grad := p.grad) is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"parameter {self.name_of(i)} has a sparse gradient; use a dense one (sparse=False in nn.Embedding), or "
                    "train this parameter with torch.optim.SparseAdam"
                )
            if self.sharded[i] and not is_dtensor(grad):
                raise TypeError(
                    f"parameter {self.name_of(i)} is a DTensor but its gradient is a plain tensor; wrap it with DTensor.from_local"
                )

    def gradients(self) -> Located:
        """This rank's part of every gradient, by parameter."""
        grads = Located()
        for i, p in enumerate(self.params):
            grad = p.grad
            if grad is None:
                continue
            grads[i] = local_gradient(grad, p) if self.sharded[i] else grad
        return grads

    def begin(self, grads: Mapping[int, Tensor], settings: Sequence[Settings], rates: Sequence[Rate], groups: Groups) -> Step:
        """What units need to know about a step of the parameters that have gradients. It counts once it has :meth:`ended <end>`."""
        if self._is_underway:  # the last step raised, and what it sent may still arrive, in buffers that this one fills
            for unit in self.units:
                unit.settle()
        self._is_underway = True
        self.connect()
        counts = [t + (i in grads) for i, t in enumerate(self.steps)]
        if self._stored is None:
            params, self._masters = {i: local(p) for i, p in enumerate(self.params)}, self._local("master")
            kept, exact = self._local("momentum", "z", "x"), self._local("y")
            self._stored = Stored(Located(params | self._masters), Located(kept), Located(exact))
        for i, master in self._masters.items():
            averaging.unrounded_(master, local(self.params[i]), self.params[i].dtype)
        shares = self.averages.shares(counts, grads, settings, groups) if self.averages.members else {}
        for i in shares:
            if self.steps[i] == 0:  # averages begin at the parameter's first step
                self._stored.kept[i].copy_(self._stored.params[i])
        first = counts[0] if counts else 0
        even = first if len(grads) == len(counts) == counts.count(first) else None
        offsets = {g: self.offsets(g, s) for g, s in enumerate(settings) if s.staggered}
        return Step(grads, self._stored, counts, even, settings, rates, shares, offsets)

    def end(self, step: Step) -> None:
        """Count a step that is done. One that raised before does not count."""
        self._is_underway = False
        if moved := [i for i in self._masters if self.comms or i in step.grads]:  # an owner may have had a gradient
            torch._foreach_copy_([local(self.params[i]) for i in moved], [self._masters[i] for i in moved])
        even = len(step.grads) == len(self.steps)
        self.counter += 1 if even else torch.tensor([i in step.grads for i in range(len(self.steps))], device="cpu")
        self._published = self.counter.tolist()
        self.steps = list(step.counts)
        if self.averages.members:
            self.averages.end()

    def offsets(self, group: int, settings: Settings) -> Mapping[int, int]:
        """Each block's step within the period, for staggered refreshes."""
        hyper = settings.hyper
        key = group, settings.frequency, hyper.root, hyper.root_device, hyper.exponent, hyper.exponent_multiplier
        if key not in self._offsets:
            self._offsets[key] = self.plan.offsets(group, settings)
        return self._offsets[key]

    def _local(self, *roles: str) -> dict[int, Tensor]:
        return {i: local(views[role]) for i, views in enumerate(self.views) for role in roles if role in views}

    def storage_changed(self) -> None:
        """Must be called when parameters may have moved in memory."""
        self._stored = None

    def finish(self) -> None:
        """Wait for the background, because the state is about to be read or written."""
        for bank in self.banks:
            bank.background.finish()

    def connect(self) -> None:
        """Make missing process groups, in an order that all ranks share. Refuse those that were destroyed."""
        for comm in sorted((*self.comms.values(), *self.sharers.values()), key=attrgetter("order")):
            comm.check_alive()

    # State.

    def is_replaced(self, state: Entries, thorough: bool) -> bool:
        """Whether the user has removed the state of a parameter, or replaced tensors or their memory, as by ``v.to(device)``.

        ``thorough``: look at all tensors, not only at those of two parameters.
        """
        step: Any = itemgetter("step")
        # Entries are in the order of parameters, unless the user has changed them.
        entries = state.values() if len(state) == len(self.params) else map(state.get, self.params)
        try:
            if not all(map(is_, map(step, entries), map(step, self.views))):  # a loop in C, because every step asks
                return True
        except (KeyError, TypeError):
            return True
        every = 1 if thorough else max(1, len(self.params) - 1)
        some = zip(self.params[::every], self.views[::every], strict=True)
        if any(state[p].get(k) is not view for p, views in some for k, view in views.items()):
            return True
        return any(list(map(Tensor.data_ptr, views)) != addresses for views, addresses in self._memory[::every])

    def changed_steps(self) -> list[Tensor]:
        """The parameters whose published steps the user has changed. Training goes on from these steps."""
        if (now := self.counter.tolist()) == self._published:
            return []
        changed = [i for i, (a, b) in enumerate(zip(now, self._published, strict=True)) if a != b]
        for i in changed:
            if not (0 <= now[i] <= checkpoint.MOST_STEPS and now[i] == int(now[i])):
                raise ValueError(
                    f"the step of parameter {self.name_of(i)} was changed to {now[i]}, but must be a whole number from 0 to "
                    f"{checkpoint.MOST_STEPS}"
                )
            self.steps[i] = int(now[i])
        self._published = now
        return [self.params[i] for i in changed]

    def remember_memory(self) -> None:
        """Where plain tensors of the state are. Not of ``y``, which comes and goes with the mode."""
        plain = [[view for k, view in entry.items() if k != "y" and not is_dtensor(view)] for entry in self.views]
        self._memory = [(views, list(map(Tensor.data_ptr, views))) for views in plain]

    def load(self, entries: Entries, groups: Groups, settings: Sequence[Settings]) -> None:
        """Copy a checkpoint into the live state. Averaged parameters then hold what their mode calls for."""
        self.averages.before_load(groups)
        for p, views in zip(self.params, self.views, strict=True):
            if "master" in views and "master" not in entries.get(p, {}):
                local(views["master"]).zero_()  # the parameter stands in for it
        self.copy(entries)
        for i in self.averages.after_load(self.steps, groups):
            self._copy(entries, i, {"y": self.params[i].detach()})
        self.storage_changed()
        for bank in self.banks:
            bank.state_changed(settings[bank.key.group])

    def copy(self, entries: Entries) -> None:
        for i, views in enumerate(self.views):
            self._copy(entries, i, views)
        self._published = self.counter.tolist()
        self.steps = list(map(int, self._published))

    def _copy(self, entries: Entries, i: int, views: Views) -> None:
        stored = self.plan.stored(i, self.places[self.plan.specs[i].team])
        checkpoint.copy_state(entries.get(self.params[i], {}), views, stored)


def make_run(
    plan: Plan,
    places: Sequence[int],
    params: list[Tensor],
    state: Entries,
    before: Run,
    groups: Groups,
    comms: tuple[Sequence[Comm], Sharers],
) -> Run:
    """Banks and units for the plan. ``state`` is copied by key. A bank of the same blocks as one ``before`` keeps its memory."""
    old = {identity(bank, before.params): bank for bank in before.banks}
    banks = make_banks(plan, places, params, old)
    views, counter = _make_views(plan, params, banks, groups)
    averages = Averages([spec.group for spec in plan.specs], plan.settings, params, views, [group["lr"] for group in groups])
    sharded = [is_dtensor(p) for p in params]
    run = Run(plan, places, params, banks, views=views, counter=counter, sharded=sharded, averages=averages)
    run.copy(state)
    run.remember_memory()
    for bank in banks:
        if state and bank not in old.values():
            bank.state_changed(plan.settings[bank.key.group])
    teams, run.sharers = comms
    run.comms = {team: comm for team, comm in enumerate(teams) if len(comm.ranks) > 1}
    run.units = make_units(plan, places, banks, lambda t: (teams[t.team], run.sharers.get((t.team, t.mesh), teams[t.team])), params)
    run.phases = in_turn(run.units)
    return run


def in_turn(units: Sequence[Unit]) -> list[Phase]:
    """The phases of units, in the order of their collectives, which all ranks share.

    While a unit is computed, the gradients of the next one in its team and the directions of the last one are on the way. Units
    of all teams take their first turn together, then their second, so ranks of several teams never wait for each other in a
    circle.
    """
    teams: dict[int, list[Unit]] = {}
    for unit in units:
        teams.setdefault(unit.team, []).append(unit)
    turns = [[unit for unit in turn if unit is not None] for turn in zip_longest(*teams.values())]
    phases: list[Phase] = []
    for before, now, after in zip(([], [], *turns), ([], *turns, []), (*turns, [], []), strict=True):
        phases += [unit.send for unit in after if unit.inbound]
        phases += [unit.compute for unit in now]
        phases += [unit.apply for unit in before if unit.outbound]
    return phases


def _make_views(plan: Plan, params: Sequence[Tensor], banks: Sequence[Bank], groups: Groups) -> tuple[list[Views], Tensor]:
    """The state of every parameter, and the tensor that all steps are views of."""
    counter = torch.zeros(len(params), dtype=torch.float32, device="cpu")
    views = [{"step": step} for step in counter.unbind()]
    for p, spec, entry in zip(params, plan.specs, views, strict=True):
        settings = plan.settings[spec.group]
        roles = averaging.state_of(p.dtype, settings)
        if settings.averaging and not averaging.is_training(groups[spec.group]):
            roles = {"y": p.dtype} | roles
        for role, dtype in roles.items():
            entry[role] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    for bank in banks:
        for block, role, view in bank.views():
            views[block.param][checkpoint.key(role, block.index)] = view
    return views, counter


def make_comms(
    plan: Plan, places: Sequence[int], params: Sequence[Tensor], world: Ranks, everyone: Ranks, process_group: Any
) -> tuple[list[Comm], Sharers]:
    """The groups of all teams, and those of the places in a team that store the same as this one. ``world`` is the process group.

    If ``everyone`` stores a parameter, all ranks make its groups together.
    """
    known = [process_group, *(group for p in params for group in groups_of(p))]
    devices = {spec.team: p.device for spec, p in zip(plan.specs, params, strict=True)}
    worldwide = {spec.team for spec, p in zip(plan.specs, params, strict=True) if layout_of(p, world)[0] == everyone}

    def comm(team: int, parts: Parts) -> Comm:
        (mine,) = (part for part in parts if places[team] in part)
        ranks = [plan.teams[team][place] for place in mine]
        return Comm(ranks, devices[team], known, parts if team in worldwide else None)

    partial = {(t.team, t.mesh) for t in plan.transports if t.gather and not t.mesh.replicated}
    teams = [comm(team, (tuple(range(len(ranks))),)) for team, ranks in enumerate(plan.teams)]
    return teams, {(team, mesh): comm(team, tuple(dict.fromkeys(mesh.sharers))) for team, mesh in partial}
