"""What ranks must agree on before they exchange anything, and how they stop together if they do not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from ..options import is_on_host
from ..planning.blocks import Block
from ..planning.layouts import replicas
from ..planning.plan import Plan, largest_first
from ..settings import Settings
from ..storage.averaging import is_training
from ..storage.tensors import checksums, describe, groups_of, layout_of
from .health import failures, to_host, too_many
from .parameters import Groups, name_of, stored_items
from .ranks import MADE, PARAMETER, PLAN, Comm, Facts, Peers, Ranks, difference, digest, is_trouble
from .run import Phase, Run, in_turn

ALARM = 10  # steps between looks at the failures of all ranks
STEP = "step()"  # the call of a step; another is that of gathering


def find_peers(groups: Groups, world: Ranks, everyone: Ranks, given: Any) -> Peers:
    """The ranks of all meshes on which this rank stores parameters. ``given`` is a process group to use if it fits."""
    known, devices = [given], dict[Ranks, torch.device]()
    for g, i, p in stored_items(groups):
        devices[_mesh(p, world, name_of(groups[g], g, i))] = p.device
        known += groups_of(p)
    shared = [ranks for ranks in sorted(devices, key=largest_first) if len(ranks) > 1]
    return Peers([Comm(ranks, devices[ranks], known) for ranks in shared], everyone)


@dataclass(frozen=True)
class Intent:
    """What a rank is about to do, or ``error``: why it cannot."""

    run: Run
    groups: Groups
    settings: Sequence[Settings]
    world: Callable[[], Ranks]  # of the process group; a function, because a plain step should not list thousands of ranks
    everyone: Callable[[], Ranks]
    process_group: Any
    call: str  # the method that was called
    recorded: bool  # whether the step is
    error: Exception | None


@dataclass
class Claim:
    """What a rank tells about one mesh."""

    members: Sequence[int]  # its parameters
    groups: Sequence[int]  # their param groups
    facts: Facts  # of the plan
    owners: Facts  # and who computes what when, which follows from options
    settings: Sequence[Settings] = ()  # of the param groups
    step: Facts = field(default_factory=dict)  # what may be different in every step

    @cached_property
    def planned(self) -> str:
        return str(digest(self.facts | self.owners))

    @property
    def digest(self) -> int:
        texts = {str(g): settings.text for g, settings in zip(self.groups, self.settings, strict=True)}
        return digest({"plan": self.planned, **texts, **self.step})

    def told(self) -> Facts:
        """All of it, in the order in which differences are named."""
        options: Facts = {}
        for g, settings in zip(self.groups, self.settings, strict=True):
            options |= {f"{name} of param group {g}": value for name, value in settings.told.items()}
        return self.facts | self.step | options | self.owners


@final
class Agreement:
    """Every step of several ranks begins with it, and so does gathering their state: they compare a hash of what each is about to
    do, in one small all-reduce.

    An answer on the host is read at once. One on a device is read before the next step, so that a plain step does not wait for it.
    Only a rank that has a new plan, or gathers, waits: its collectives may not match those of the others.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        """``given`` are arguments of the constructor."""
        self.peers = Peers([], ())
        self.strict = False  # whether some rank has on_nonfinite="raise"
        self.loads = 0  # checkpoints that were loaded, or refused
        self.edited: set[Tensor] = set()  # parameters whose steps the user has changed or removed since the last agreement
        self._given = given
        self._calls, self._loads = 0, 0  # calls of step(), and loads before the last agreement
        self._due, self._compared = True, False  # whether values are to be compared in this step, and whether they ever were
        self._plan: Plan | None = None  # the last one that ranks agreed on, and the phases of its steps
        self._phases: Sequence[Phase] = ()
        self._claims: list[Claim] = []  # at the last vote, by mesh
        self._claimed: Plan | None = None  # the plan that they are of
        self._answer: Any = None  # to the last vote, on its way from the device

    def reach(self, intent: Intent) -> bool:
        """Compare what ranks are about to do. Raises on all ranks or on none. False if this rank has to miss the step."""
        run, error, calls = intent.run, intent.error, self._calls
        answer, self._answer = self._answer, None
        self._calls += intent.call == STEP
        if answer is not None:  # to the vote before the last step
            self._hear(_arrived(answer), intent)
        period = int(self._given["check_ranks"])
        self._due = not self._compared or (period > 0 and calls % period == 0)
        if not self._vote(intent, together=self._due or self.strict):
            return False
        if error is not None or run.plan is not self._plan:
            peers = find_peers(intent.groups, intent.world(), intent.everyone(), intent.process_group)
            if [comm.ranks for comm in peers.comms] != [comm.ranks for comm in self.peers.comms]:
                self.peers, self._claimed = peers, None
                self._vote(intent, together=True)
                peers.settle()
            if error is not None:
                raise error
            run.connect()
            # A missed step needs no executors, and they would keep banks alive.
            without = [replace(unit, executors=()) for unit in run.units]
            self._plan, self._phases = run.plan, in_turn(without)
        self._loads, self.edited = self.loads, set()
        return True

    def _vote(self, intent: Intent, *, together: bool) -> bool:
        """Tell the others, and hear them. ``together``: all ranks wait for the answer. False if this rank is out of step."""
        strict = any(settings.raise_on_nonfinite for settings in intent.settings)
        if not self.peers.comms:
            self.strict = strict
            return True
        for comm in self.peers.comms:
            comm.check_alive()
        self._claim(intent)
        stepping = intent.call == STEP
        alarm = too_many(intent.run.banks, intent.settings) if stepping and self._calls % ALARM == 0 else None
        answer = self.peers.vote([claim.digest for claim in self._claims], alarm, strict)
        if together or not _is_late(answer):
            self._hear(answer.tolist(), intent)
            return True
        self._answer = to_host(answer)
        if (stepping and intent.error is None and intent.run.plan is self._plan) or not is_trouble(_arrived(self._answer)):
            return True
        for phase in self._phases:  # others may be in this step, and hear of it before the next one
            phase(None)
        if not stepping:
            answer, self._answer = self._answer, None
            self._hear(_arrived(answer), intent)
        return False

    def _claim(self, intent: Intent) -> None:
        """Prepare what to tell the others in this step."""
        run, error = intent.run, intent.error
        if error is not None:
            failed = {PLAN: f"{type(error).__name__}: {error}"}
            self._claims, self._claimed = [Claim([], [], failed, {}) for _ in self.peers.comms], None
            return
        if self._claimed is not run.plan:
            self._claims = [make_claim(run, intent.world(), comm.ranks, self._given) for comm in self.peers.comms]
            self._claimed = run.plan
        thorough = self._given["check_ranks"] is True
        for claim in self._claims:
            told = {"what is called": intent.call, "the number of calls of step()": str(self._calls)}
            told |= {"the number of calls of load_state_dict": str(self.loads)}
            edited = [run.name_of(i) for i in claim.members if run.params[i] in self.edited] if self.edited else ["none"]
            told |= {"the parameters whose steps in opt.state were changed by hand": ", ".join(edited)}
            for name in ("lr", "peak_lr"):
                told |= {f"{name} of param group {g}": _rate(intent.groups[g].get(name), self._due) for g in claim.groups}
            told |= {f"train mode of param group {g}": str(is_training(intent.groups[g])) for g in claim.groups}
            if thorough or not self._compared:
                told["recording this step (lather.Monitor, opt.arm())"] = str(intent.recorded)
            if thorough or self.loads != self._loads:
                told |= {f"the step of parameter {run.name_of(i)}": str(run.steps[i]) for i in claim.members}
            watched = [i for i in claim.members if thorough or _weighs(intent, i)] if intent.call == STEP else []
            told |= {f"whether {run.name_of(i)} has a gradient": str(run.params[i].grad is not None) for i in watched}
            claim.settings, claim.step = [intent.settings[g] for g in claim.groups], told

    def _hear(self, answer: Sequence[int], intent: Intent) -> None:
        """Read an answer. If ranks do not agree, or a rank cannot go on, all raise."""
        self.strict = bool(answer[-1])
        if not is_trouble(answer):
            return
        problem = None
        for comm, claim in zip(self.peers.comms, self._claims, strict=True):
            problem = difference(comm, {comm.ranks: claim.told()}) or problem
        self._stop(problem, intent.error)
        failed = self.peers.tell(failures(intent.run, intent.settings))
        raise RuntimeError(failed or "a root failed to refresh more than max_failed_refreshes times in a row, on some rank")

    def _stop(self, problem: str | None, cause: Exception | None = None) -> None:
        """Raise the problem of any rank on all ranks."""
        problem = self.peers.tell(problem)
        if problem is not None:
            raise ValueError(problem) from cause

    def compare_values(self, run: Run, world: Callable[[], Ranks]) -> None:
        """If that is due, compare parameters between the ranks that hold the same part of them. The host waits for the device."""
        if not self._due:
            return
        problem, every = None, world()
        found: dict[Any, list[Ranks]] = {}  # sets of ranks that hold the same part, by layout
        for comm, claim in zip(self.peers.comms, self._claims, strict=True):
            layouts = {i: layout_of(run.params[i], every) for i in claim.members}
            found |= {layout: replicas(*layout) for layout in set(layouts.values()) - found.keys()}
            shared = [i for i in claim.members if found[layouts[i]]]
            facts: dict[Ranks, Facts] = {ranks: {} for i in shared for ranks in found[layouts[i]]}
            for i, total in zip(shared, checksums([run.params[i] for i in shared]), strict=True):
                for ranks in found[layouts[i]]:
                    if comm.me in ranks:
                        facts[ranks][f"the sum of the bits of parameter {run.name_of(i)}"] = str(total)
            problem = (difference(comm, facts) if facts else None) or problem
        self._stop(problem)
        self._compared = True


def make_claim(run: Run, world: Ranks, ranks: Ranks, given: Mapping[str, Any]) -> Claim:
    """What of a plan concerns a mesh and must be the same on all its ranks, in words."""
    plan, params = run.plan, run.params
    repeated = given["num_trainers_per_group"] is not None  # a block has several owners, which must refresh it in the same way
    mine = [i for i, p in enumerate(params) if _mesh(p, world) == ranks]
    groups = sorted({plan.specs[i].group for i in mine})
    facts = {PLAN: MADE} | {name: str(value) for name, value in given.items()}
    facts |= {f"{PARAMETER} {k}": f"{plan.specs[i].name} {describe(params[i])}" for k, i in enumerate(mine)}
    facts |= {f"packed factors of param group {g}": str(_packs(plan, g, mine)) for g in groups}  # which depends on the device
    schedule: dict[int, int] = {}
    for g in groups:
        if repeated and plan.settings[g].staggered:
            schedule |= run.offsets(g, plan.settings[g])
    kept = set(mine)
    blocks = {n: block for n, block in enumerate(plan.blocks) if block.param in kept}
    owners = {"owners of blocks and steps of refreshes": str([(plan.owners[n], schedule.get(n)) for n in blocks])}
    owners |= {"root solvers": _solvers(run, blocks.values())} if repeated else {}
    return Claim(mine, groups, facts, owners)


def _packs(plan: Plan, group: int, params: Iterable[int]) -> list[bool]:
    return sorted({plan.settings[group].packs(plan.specs[i].device) for i in params if plan.specs[i].group == group})


def _weighs(intent: Intent, i: int) -> bool:
    """Whether an average goes by this rank's own gradient: each begins by it, and that of Schedule-Free weighs every step by it."""
    found = intent.settings[intent.run.plan.specs[i].group].averaging
    return found is not None and (found.kind == "schedule_free" or not intent.run.steps[i])


def _rate(lr: Any, read: bool) -> str:
    """A learning rate in words. ``read``: also one on a device, for which the host waits."""
    if not isinstance(lr, Tensor):
        return repr(lr)
    return repr(lr.item()) if read or is_on_host(lr) else "in a tensor on the device"


def _is_late(answer: Tensor) -> bool:
    """Whether the host would have to wait for it."""
    return answer.is_cuda


def _arrived(answer: tuple[Tensor, Any]) -> list[int]:
    """What was on its way to the host. The host waits for it."""
    answer[1].synchronize()
    return answer[0].tolist()


def _solvers(run: Run, blocks: Iterable[Block]) -> str:
    """What ``root="auto"`` means on this rank, which depends on the device."""
    found = set[str]()
    for block in blocks:
        settings = run.plan.settings[run.plan.specs[block.param].group]
        if settings.method and block.modes:
            device = str(run.params[block.param].device)
            found.update(settings.method.solvers(block.shape, block.modes, settings.hyper, device))
    return ", ".join(sorted(found))


def _mesh(p: Tensor, world: Ranks, name: str = "") -> Ranks:
    return tuple(sorted(layout_of(p, world, name)[0]))
