"""The life of a run: plan, agree with the other ranks, build, rebuild, load."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..compute.bank import block_state
from ..options import STRUCTURAL
from ..planning.plan import Plan, make_plan
from ..settings import Settings, resolve
from ..storage import averaging
from ..storage.step import Step
from ..storage.tensors import is_regular, is_stored, layout_of, local
from ..storage.update import number, rate_of
from . import checkpoint
from .agreement import STEP, Agreement, Intent
from .health import Health, refuse_nonfinite
from .metrics import Record
from .parameters import Item, describe, forget_wrong_names, grad_dtype, name_of, stored_items
from .ranks import Ranks
from .run import Entries, Run, make_comms, make_run

Groups = list[dict[str, Any]]
State = dict[Tensor, dict[str, Any]]


class Fixed(NamedTuple):
    """What may not change any more, once a parameter has state."""

    structure: tuple[Any, ...]  # options
    owners: dict[int, int]  # places by block


@final
class Session:
    """What an optimizer runs on: its plan, state and ranks. Methods take its current param groups and state."""

    def __init__(self, process_group: Any, trainers: int | None, stages: int | None, check_ranks: int) -> None:
        self.process_group, self.trainers, self._stages, self._check_ranks = process_group, trainers, stages, check_ranks
        self._fixed: dict[Tensor | tuple[int, int], Fixed] = {}  # by parameter, and by its param group and place there
        self._began: Ranks = ()  # the world in which owners were chosen
        self._meet()
        self.reset()

    def _meet(self) -> None:
        """Begin to agree with the other ranks, who are not known yet."""
        given = {"num_trainers_per_group": self.trainers, "stages": self._stages, "check_ranks": self._check_ranks}
        self._agreement = Agreement(given)

    def reset(self) -> None:
        """Forget everything except who owns what."""
        self.run = Run()
        self.settings: list[Settings] = []
        self.consolidated: State | None = None  # the whole state, from consolidate() to the next step
        # If the next step is to be recorded: a function that tells what made each param group.
        self.armed: Callable[[], Sequence[str]] | None = None
        self.record: Record | None = None  # of the last step that was
        self._health = Health()
        self.count = 0  # steps taken, as many on all ranks
        self._signature: Any = None  # what the run was built for
        self._glance: Any = None  # what :meth:`_look` saw last
        self._agreed = False  # whether ranks have compared the plan

    # A step.

    def begin(self, groups: Groups, state: State) -> Step | None:
        """Prepare a step. None if there is nothing to do."""
        self.consolidated = None
        if not self.count and checkpoint.is_probe():  # alone: ranks that have state already do not take this step
            self.prepare(groups, state)
            return None
        grads = self._prepare_together(groups, state)
        if grads is None:
            if self.armed is not None:  # the others may gather what they record
                self.record, self.armed = Record({}, [], ()), None
            return None
        run = self.run
        rates = [rate_of(group, settings) for group, settings in zip(groups, self.settings, strict=True)]
        if (not grads and not self._agreement.peers.comms) or self._is_probe(grads, groups):
            return None
        if self._agreement.peers.comms:
            self._agreement.compare_values(run, self.world)
        refuse_averages(groups)  # not before: a probe may come in eval mode
        if self._agreement.strict:
            refuse_nonfinite(grads, run, self.settings, self._agreement.peers)
        step = run.begin(grads, self.settings, rates, groups)
        if self.armed is None:
            return step
        self.record, self.armed = Record(step.stored.params, run.plan.specs, self.armed()), None
        return replace(step, record=self.record)

    def metrics(self, by: str, gather: bool) -> dict[str, dict[str, Any]]:
        """What the last step that was armed did."""
        if self.record is None:
            raise RuntimeError("no step was recorded: call opt.arm() before the step, or use lather.Monitor")
        return self.record.gathered(by, self._agreement.peers) if gather else self.record.metrics(by)

    def end(self, step: Step, groups: Groups) -> None:
        """Count a step that is done, and report its failures."""
        self.run.end(step)
        self.count += 1
        if any(self.run.steps):
            settle_grafts(groups, self.settings)
        self._health.report(self.run, self.settings, alone=not self._agreement.peers.comms)

    def _is_probe(self, grads: Mapping[int, Tensor], groups: Groups) -> bool:
        """Whether somebody allocates state by a first step with zero learning rates and gradients, as torch does."""
        if any(self.run.steps) or not all(number(group["lr"]) == 0 for group in groups):
            return False
        return not self._agreement.peers.any(any(bool(grad.any()) for grad in grads.values()))

    def started(self, state: State) -> bool:
        """Whether any parameter has taken a step."""
        return self.count > 0 or any(entry.get("step", 0) > 0 for entry in state.values())

    # Agreement.

    def _prepare_together(self, groups: Groups, state: State) -> Mapping[int, Tensor] | None:
        """Prepare a step, and compare it with those of the other ranks. If one rank fails, all raise. Returns this rank's
        gradients; None if it has to miss the step."""
        error: Exception | None = None
        try:
            run = self.prepare(groups, state)
            run.refuse_gradients()
            if any(run.steps):
                refuse_averages(groups)
        except Exception as e:
            error = e
        if (error is None and self._agreed and not self._agreement.peers.comms) or self._agree(groups, STEP, error):
            return self.run.gradients()  # not before, because those of DTensors may be redistributed
        return None

    def _agree(self, groups: Groups, call: str, error: Exception | None) -> bool:
        """Compare what ranks are about to do. Raises on all ranks or on none. False if this rank has to miss the step."""
        worlds = self.world, partial(all_ranks, None), self.process_group
        intent = Intent(self.run, groups, self.settings, *worlds, call, self.armed is not None, error)
        self._agreed = self._agreement.reach(intent)
        return self._agreed

    def world(self) -> Ranks:
        return all_ranks(self.process_group)

    # Building.

    def prepare(
        self, groups: Groups, state: State, *, thorough: bool = False, keep: Collection[Tensor] = (), hold: bool = False
    ) -> Run:
        """Update run and state to the parameters and options. On nearly every call there is nothing to do.

        ``thorough``: also look at every tensor of the state, and wait for the background. ``keep``: parameters to be planned even
        if they are frozen. ``hold``: blocks stay with their owners, as they do once training has begun.
        """
        if thorough:
            self.run.finish()
        edited, before = self._agreement.edited, dict[Tensor, int]()
        if self.run.views and not state:  # the user emptied it to start over
            self.run.finish()
            edited.update(self.run.params)
            self.reset()
        elif self.run.is_replaced(state, thorough):  # rebuild from the tensors that the user put there
            self.run.finish()
            before = dict(zip(self.run.params, self.run.steps, strict=True))
            self._signature, self.run.units, self.run.phases, self.run.banks = None, [], [], []
        edited.update(self.run.changed_steps())
        last = self.settings
        self.settings = [resolve(group, last[g] if g < len(last) else None) for g, group in enumerate(groups)]
        world = self.world()
        glance = self._look(groups, world)
        if not keep and glance is not None and glance == self._glance:
            return self.run
        self.run.storage_changed()
        trainable = self._trainable(groups, state, keep)
        if self._sign(trainable, world) != self._signature:
            self._rebuild(groups, state, trainable, world, hold)
            edited.update(p for p, t in zip(self.run.params, self.run.steps, strict=True) if before.get(p, t) != t)
            glance = None
        self._glance = glance
        return self.run

    def _look(self, groups: Groups, world: Ranks) -> Any:
        """A cheap test for a step: if this has not changed, neither has :meth:`_sign`, and no part of a parameter has moved."""
        if self._signature is None:
            return None
        params = [p for group in groups for p in group["params"]]
        parts = list(map(local, params)) if any(self.run.sharded) else params
        dtypes = [None if grad is None else grad.dtype for grad in map(attrgetter("grad"), params)]
        looks = list(map(id, params)), list(map(Tensor.numel, params)), list(map(attrgetter("requires_grad"), params))
        places = list(map(Tensor.data_ptr, parts)), list(map(Tensor.stride, parts))
        return looks, places, dtypes, [settings.signature for settings in self.settings], world

    def _sign(self, trainable: Iterable[Item], world: Ranks) -> Any:
        """Everything that plan, banks and state depend on."""
        params = [p for *_, p in trainable]
        facts = [(id(p), p.device, p.dtype, grad_dtype(p), p.shape, p.stride(), p.is_cuda and is_regular(p)) for p in params]
        return facts, [settings.signature for settings in self.settings], world

    def _rebuild(self, groups: Groups, state: State, trainable: Sequence[Item], world: Ranks, hold: bool) -> None:
        started, before = self.started(state), self.run
        training = all(averaging.is_training(group) for group in groups if group["averaging"] is not None)
        if started and self._began != world:
            raise RuntimeError(
                f"the optimizer began on ranks {list(self._began)} and now there are {list(world)}: its process group was "
                "destroyed or replaced; save its state before that, and load it into a new optimizer"
            )
        self._agreed = False
        if started:
            _refuse_changes(self._fixed_of(state, trainable), self.settings, before, trainable)
            settle_grafts(groups, self.settings)  # of param groups that were added since
        before.finish()
        for group in groups:
            averaging.settle(group, train=training)
        plan, places = self._make_plan(groups, state, trainable, self.settings, hold)
        params = [p for *_, p in trainable]
        check_memory(plan, places, {spec.device: p.device for spec, p in zip(plan.specs, params, strict=True)})
        old = {p: state[p] for p in params if p in state} if started else {}
        comms = make_comms(plan, places, params, world, all_ranks(None), self.process_group)
        self.run = make_run(plan, places, params, old, before, groups, comms)
        state.clear()
        state.update({p: dict(views) for p, views in zip(params, self.run.views, strict=True)})
        self.run.averages.publish(state)
        self._health.keep(self.run.banks)
        self._fixed = {}
        for g, i, p in trainable:
            self._fixed[p] = self._fixed[g, i] = Fixed(self.settings[g].structure, {})
        for block, place in zip(plan.blocks, plan.owners, strict=True):
            self._fixed[params[block.param]].owners[block.index] = place
        self._began = world
        self.count = max([self.count, *self.run.steps])
        self._signature = self._sign(trainable, world)

    def plan(self, groups: Groups, state: State) -> tuple[Plan, list[int]]:
        """The plan for the current parameters and options, and this rank's places. Allocates nothing."""
        return self._make_plan(groups, state, self._trainable(groups, state), [resolve(group) for group in groups])

    def _make_plan(
        self, groups: Groups, state: State, trainable: Sequence[Item], settings: Sequence[Settings], hold: bool = False
    ) -> tuple[Plan, list[int]]:
        """The plan, and this rank's place in every team. Once training has begun, or with ``hold``, blocks keep their owners."""
        forget_wrong_names(groups)
        specs, teams = describe(trainable, groups, self.world(), my_rank(), self.trainers)
        settled: dict[tuple[int, int], int] = {}
        if hold or self.started(state):  # existing state stays where it is
            kept = enumerate(self._fixed_of(state, trainable))
            settled = {(n, b): place for n, found in kept if found for b, place in found.owners.items()}
        return make_plan(specs, settings, teams, self._stages, settled), [team.index(my_rank()) for team in teams]

    def _fixed_of(self, state: State, items: Sequence[Item]) -> list[Fixed | None]:
        """What is fixed for each parameter that has state. A parameter that replaced another, and took over its state, has what was
        fixed for that one."""
        return [self._fixed.get(p, self._fixed.get((g, i)) if p in state else None) for g, i, p in items]

    def _trainable(self, groups: Groups, state: State, keep: Collection[Tensor] = ()) -> list[Item]:
        """Parameters that may get a gradient, or have taken a step: their state is kept when they are frozen.

        A frozen one without a step has nothing to keep. It may have state all the same, because ``state_dict()`` allocates it.
        """

        def has_begun(p: Tensor) -> bool:
            entry = state.get(p)
            return bool(entry and entry.get("step", 0) > 0)

        items = stored_items(groups)
        return [(g, i, p) for g, i, p in items if p.requires_grad or p.grad is not None or p in keep or has_begun(p)]

    # Modes and checkpoints.

    def switch(self, groups: Groups, state: State, *, train: bool) -> None:
        """Let parameters that are averaged hold the points at which gradients are taken, or their average."""
        averaged = [g for g, group in enumerate(groups) if group["averaging"] is not None]
        if numbers := [g for g in averaged if averaging.is_training(groups[g]) is not train]:
            run = self.prepare(groups, state, thorough=True)
            self.consolidated = None
            run.averages.switch(numbers, run.steps, train=train)
            run.storage_changed()
            for g in numbers:
                groups[g]["train_mode"] = train
            run.averages.publish(state)

    def saved(self, groups: Groups, state: State) -> State:
        """The state for a checkpoint: what was consolidated, or else what this rank has."""
        run = self.prepare(groups, state, thorough=True)
        consolidated = self.consolidated
        if run.comms and checkpoint.is_for_parts():
            consolidated = None
        elif consolidated is None and run.comms and any(run.steps):
            checkpoint.warn_of_parts()
        complete = run.averages.complete(run.steps, groups) if run.averages.members else []
        whole = dict(zip(run.params, complete, strict=False)) | (consolidated or {})
        return checkpoint.apart(state | {p: dict(entry) for p, entry in whole.items()})

    def consolidate(self, groups: Groups, state: State, to: int) -> None:
        """Bring the whole state to one rank. A collective."""
        error = None
        try:
            run, world = self.prepare(groups, state, thorough=True), self.world()
            known = {rank for p in run.params for rank in layout_of(p, world)[0]}
            if run.params and to not in known:
                raise ValueError(f"to={to} does not store these parameters; use one of the ranks {sorted(known)}")
        except Exception as e:
            error = e
        self._agree(groups, f"consolidate_state_dict(to={to})", error)
        run = self.run
        views = run.averages.complete(run.steps, groups)
        gathered = checkpoint.collect(run.plan, run.banks, views, run.comms, my_rank(), to)
        every = [(p, name_of(group, g, i)) for g, group in enumerate(groups) for i, p in enumerate(group["params"])]
        away = next((name for p, name in every if p.requires_grad and not is_stored(p)), None)
        if away := self._agreement.peers.tell(away if my_rank() == to else None):  # others need not store all
            raise ValueError(
                f"rank {to} does not store parameter {away}, so it cannot have the whole state; save with "
                "torch.distributed.checkpoint"
            )
        self.consolidated = dict(zip(run.params, gathered, strict=True))

    def load(self, groups: Groups, state: State, state_dict: Mapping[str, Any]) -> None:
        """Copy a checkpoint into the live state. One that does not fit is refused, and changes nothing.

        Everything that can be wrong with it is checked first. If there is no memory for new state, all is put back.
        """
        self._agreement.loads += 1  # also if it is refused: other ranks may have loaded it
        saved, entries, hold = self._fitting(groups, state, state_dict)
        run = self.run
        changing: list[dict[Any, Any]] = [vars(self), vars(run), *map(vars, run.banks), *run.views, *groups, *state.values()]
        changing.append(state)
        before = [dict(each) for each in changing]
        try:
            for mine, theirs in zip(groups, saved, strict=True):
                mine.update(theirs)
            run = self.prepare(groups, state, thorough=True, keep=entries, hold=hold)
            run.load(entries, groups, self.settings)
            self.count = max(run.steps, default=0)
            run.averages.publish(state)
        except BaseException:
            for each, was in zip(changing, before, strict=True):
                each.clear()
                each.update(was)
            raise
        self.consolidated = None
        self._agreement.edited.clear()
        self._health.check(run, self.settings)
        if run.comms:
            checkpoint.warn_of_blanks(run.banks, run.steps, run.name_of)

    def _fitting(self, groups: Groups, state: State, state_dict: Mapping[str, Any]) -> tuple[Groups, Entries, bool]:
        """The param groups and the state by parameter of a checkpoint, and whether that is only this rank's part of it, as
        torch.distributed.checkpoint reads it: then blocks keep their owners. Raises if they do not fit, and changes nothing."""
        forget_wrong_names(groups)
        saved_state, saved = checkpoint.upgraded(state_dict)
        checkpoint.check_groups(saved, groups, started=self.started(state))
        ids = checkpoint.ids_by_name(saved, groups)
        for theirs, mine in zip(saved, groups, strict=True):
            theirs |= {name: mine[name] for name in ("params", "param_names", "factors") if name in mine}
            theirs["master_weights"] |= mine["master_weights"]
        params = [p for group in groups for p in group["params"]]
        entries = {p: saved_state.get(i, {}) for p, i in zip(params, ids, strict=True)}
        trainable = self._trainable(groups, state, {p for p, entry in entries.items() if entry})
        entries = {p: entries[p] for *_, p in trainable}
        hold = bool(self.run.comms) and all(entry.keys() <= state.get(p, {}).keys() for p, entry in entries.items())
        plan, places = self._make_plan(saved, state, trainable, [resolve(group) for group in saved], hold)
        checkpoint.check_states(list(entries.values()), plan, places)
        return saved, entries, hold

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs. The state itself belongs to the optimizer, and is copied into new banks."""
        self.run.finish()
        kept = ("trainers", "_stages", "_check_ranks", "_fixed", "_began", "count")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_group = None  # a process group cannot be pickled, so the default one is used
        self._meet()
        self.reset()
        self.count = state["count"]


def all_ranks(group: Any) -> Ranks:
    """The ranks of a process group, by default all ranks. A single process is rank 0."""
    if not dist.is_available() or not dist.is_initialized():
        return (0,)
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def my_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def settle_grafts(groups: Groups, settings: Sequence[Settings]) -> None:
    """Tell which graft is used where the user left the choice. The state depends on it from now on."""
    for group, each in zip(groups, settings, strict=True):
        group["graft"] = each.graft_name


def refuse_averages(groups: Groups) -> None:
    """Refuse a step in eval mode."""
    for group in groups:
        if not group.get("train_mode", True):
            raise RuntimeError(
                "step() in eval mode: the parameters hold averages, where gradients must not be taken; call opt.train() before "
                "the forward pass of a training step"
            )


def _refuse_changes(kept: Iterable[Fixed | None], settings: Sequence[Settings], run: Run, trainable: Sequence[Item]) -> None:
    """Refuse changes that the state does not survive, of options that decide about it and of shapes."""
    for (g, *_), found in zip(trainable, kept, strict=True):
        now = settings[g].structure
        for name, was, is_now in zip(STRUCTURAL, found.structure if found else now, now, strict=True):
            if was != is_now:
                raise ValueError(
                    f"{name} of param group {g} was changed from {was!r} to {is_now!r} after the first step; the state depends on "
                    "it, so build a new optimizer instead"
                )
    planned = {id(p): spec for p, spec in zip(run.params, run.plan.specs, strict=True)}
    for *_, p in trainable:
        spec = planned.get(id(p))
        if spec is not None and spec.shape != p.shape:
            raise ValueError(
                f"parameter {spec.name} had shape {spec.shape} and now has {tuple(p.shape)}; its state does not fit any more, so "
                "build a new optimizer"
            )


def check_memory(plan: Plan, places: Sequence[int], devices: Mapping[str, torch.device]) -> None:
    """Refuse state that cannot fit on its device, before anything is allocated. ``devices`` are by the plan's names."""
    totals = Counter[str]()
    for key, numbers in plan.banks_of(places).items():
        totals[key.device] += len(numbers) * sum(like.nbytes for like in block_state(plan, key).values())
    for device, total in totals.items():
        limit = device_memory(devices[device])
        if limit is not None and total > limit:
            blocks = [block for block in plan.blocks if plan.specs[block.param].device == device]
            sides = [
                (d, block.param) for block in blocks for d, mode in zip(block.shape, block.modes, strict=False) if mode == "full"
            ]
            side, param = max(sides, default=(1, 0))
            spec = plan.specs[param]
            dim = plan.settings[spec.group].geometry.max_preconditioner_dim
            raise ValueError(
                f"the optimizer state would take {total / 2**30:.1f} GiB but {device} has {limit / 2**30:.1f} GiB; the largest "
                f"factor is of side {side}, for parameter {spec.name} of shape {spec.shape}. Lower max_preconditioner_dim (now "
                f"{dim}) or set large_dim='diagonal'"
            )


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of the device, if they are known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
