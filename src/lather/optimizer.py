"""The optimizer: wiring, groups and the step. The mathematics is in ``transforms``, ``roots`` and ``rules``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from . import agreement, census, checkpoint, exchange, roots, rules
from .agreement import find_circle
from .bank import Bank
from .census import Item, Ranks, items_of
from .exchange import Circle, Comm
from .health import Alarm, Watch, failures, nonfinite, tally
from .layout import check_parameter, groups_of, is_dtensor, is_regular, is_stored, layout_of, local, local_gradient
from .options import OPTIONS, STRUCTURAL, check_options, check_values, closest, state_dtype, whole, with_choices
from .plan import BankKey, Plan, first_come, make_plan
from .plan_report import PlanReport, check_memory
from .units import Step, Unit, identity, make_banks, make_units

ALARM = 10  # steps between looks at the failures of all ranks; the same whatever options a rank knows of


class Shampoo(torch.optim.Optimizer):
    """Distributed Shampoo: preconditions each block of each weight with inverse roots of its Kronecker factors.

    Every option may be given per param group and changed between steps, except those that decide which state there is.
    ``docs/options.md`` explains them; ``docs/algorithm.md`` has the mathematics.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.Shampoo(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    >>> model(torch.randn(16, 8)).square().mean().backward()
    >>> opt.step()
    """

    _kept: tuple[dict[int, Tensor], dict[int, Tensor]] | None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        damping: str = "absolute",
        beta3: float | None = None,
        weight_decay_mode: str = "decoupled",
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        bias_correction: bool = True,
        preconditioner: str = "shampoo",
        exponent: float | Mapping[int, float] | None = None,
        exponent_multiplier: float = 1.0,
        root: Any = "auto",
        graft: str | None = "adam",
        graft_beta2: float | None = None,
        graft_eps: float = 1e-8,
        max_preconditioner_dim: float = 1024,
        merge_dims: bool = True,
        large_dim: str = "block",
        batch_dims: int = 0,
        precondition_1d: bool = False,
        precondition_frequency: int = 10,
        start_preconditioning_step: float | None = None,
        refresh: str = "together",
        refresh_delay: int = 0,
        root_device: str | None = None,
        on_nonfinite: str = "skip",
        max_failed_refreshes: int = 3,
        precision: str | None = None,
        state_dtype: str | torch.dtype = "float32",
        root_dtype: str | torch.dtype | None = None,
        factors: str = "full",
        blocks: str = "global",
        communication_dtype: str | torch.dtype | None = None,
        process_group: Any = None,
        num_trainers_per_group: int | None = None,
        stages: int = 1,
        check_ranks: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        amsgrad: bool = False,
    ) -> None:
        given = dict(locals())
        _refuse_flags(given)
        self._structure: list[tuple[Any, ...]] = []
        self._process_group, self._check_ranks = process_group, check_ranks
        self._trainers = (
            None if num_trainers_per_group is None else whole("num_trainers_per_group", num_trainers_per_group)
        )
        self._stages = whole("stages", stages)
        self._reset()
        super().__init__(params, {name: given[name] for name in OPTIONS})

    # Groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also between steps; they start at step 0."""
        for name in [n for n in param_group if n not in OPTIONS and n not in ("params", "param_names", "peak_lr")]:
            if name in _FLAGS:
                _refuse_flags(dict.fromkeys(_FLAGS) | {name: param_group.pop(name)})
            elif guess := closest(name):
                raise ValueError(f"param group has the unknown option {name!r}; did you mean {guess!r}?")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for flag in _FLAGS:  # torch's own defaults may bring one along
            group.pop(flag, None)
        try:
            check_options(group)
            for position, param in enumerate(group["params"]):
                name = census.name_of(group, len(self.param_groups) - 1, position)
                check_parameter(param, name)
                if is_stored(param):
                    census.team(param, name, self._world(), self._trainers)
        except Exception:
            self.param_groups.pop()
            raise
        group.setdefault("peak_lr", rules.first_peak(group["lr"]))

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure``, if given, computes the loss and is run first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._consolidated.clear()
        self._prepare_together()
        grads = self._gradients()
        for group in self.param_groups:
            rules.raise_peak(group)
        if (not grads and not self._circle) or self._is_probe(grads):
            return loss
        self._refuse_nonfinite(grads)
        self._count(grads)
        step = self._make_step(grads)
        for unit in self._units:
            unit.send(step)
        for unit in self._units:
            unit.compute(step)
        for unit in self._units:
            unit.apply(step)
        self._look_after()
        return loss

    def _make_step(self, grads: Mapping[int, Tensor]) -> Step:
        if self._kept is None:
            self._kept = (
                {i: local(p) for i, p in enumerate(self._params)},
                {i: local(views["momentum"]) for i, views in enumerate(self._views) if "momentum" in views},
            )
        first = self._steps[0] if self._steps else 0
        even = first if len(grads) == len(self._steps) == self._steps.count(first) else None
        groups = [with_choices(group, self._choices) for group in self.param_groups]
        return Step(grads, *self._kept, self._steps, even, self._offsets, groups)

    def _offsets(self, key: BankKey) -> Mapping[int, int] | None:
        staggered = self.param_groups[key.group]["refresh"] == "staggered" and key.modes
        return self._plan.offsets(key.group, self._choices) if staggered else None

    def _gradients(self) -> dict[int, Tensor]:
        """This rank's part of every gradient there is."""
        grads = {}
        for i, p in enumerate(self._params):
            grad = p.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"parameter {self._name_of(i)} has a sparse gradient; use a dense one (sparse=False in nn.Embedding) "
                    "or give it to torch.optim.SparseAdam"
                )
            grads[i] = local_gradient(grad, p, self._name_of(i)) if self._sharded[i] else grad
        return grads

    def _is_probe(self, grads: Mapping[int, Tensor]) -> bool:
        """torch's checkpoint code allocates state by a first step with all learning rates and gradients zero."""
        if any(self._steps) or not all(rules.number(group["lr"]) == 0 for group in self.param_groups):
            return False
        return not self._circle.any(any(bool(grad.any()) for grad in grads.values()))

    def _refuse_nonfinite(self, grads: Mapping[int, Tensor]) -> None:
        if not self._strict:
            return
        groups = [self.param_groups[spec.group] for spec in self._plan.specs]
        bad = nonfinite({i: grad for i, grad in grads.items() if groups[i]["on_nonfinite"] == "raise"})
        message = self._circle.tell(
            f"parameter {self._name_of(bad[0])} has NaN or Inf in its gradient at step {self._steps[bad[0]] + 1}; nothing was "
            "updated (on_nonfinite='raise')"
            if bad
            else None
        )
        if message is not None:
            raise FloatingPointError(message)

    def _count(self, grads: Mapping[int, Tensor]) -> None:
        for i in grads:
            self._steps[i] += 1
        if len(grads) == len(self._steps):
            self._step_tensor += 1
        else:
            self._step_tensor += torch.tensor([i in grads for i in range(len(self._steps))], device="cpu")

    def _look_after(self) -> None:
        """Report failures: on every step where reading is free, now and then where it is not."""
        for bank in self._banks:
            group = self.param_groups[bank.key.group]
            step = self._steps[bank.blocks[0].param]
            if bank.counts.is_cpu or step % group["precondition_frequency"] == 0:
                self._watch.look(bank, group, self._name_of, alone=not self._circle)
        self._calls += 1
        if (
            self._circle
            and self._calls % ALARM == 0
            and self._alarm.rings(self._banks, self.param_groups, self._circle)
        ):
            raise RuntimeError(self._circle.tell(failures(self._banks, self.param_groups, self._name_of)))

    def _name_of(self, i: int) -> str:
        return self._plan.specs[i].name

    def health(self) -> dict[str, dict[str, int]]:
        """What went wrong so far, by parameter: gradients skipped, and refreshes that failed in a row. Empty is good.

        A rank knows of the blocks that it owns.
        """
        return tally(self._banks, self._name_of)

    # Planning and state.

    def plan(self) -> PlanReport:
        """What is preconditioned and how, memory by kind and work per step; needs no step and allocates nothing.

        After the first step it also has what was measured for ``root="auto"``.
        """
        plan = self._make_plan(self._trainable(), self.param_groups)
        return PlanReport(plan, self._places(plan), self._choices)

    def _started(self) -> bool:
        """Whether any parameter has taken a step."""
        return any(self._steps) or (
            not self._params and any(entry["step"] > 0 for entry in self.state.values() if entry)
        )

    def _reset(self) -> None:
        self._signature: Any = None
        self._glanced: Any = None
        self._kept = None  # what this rank stores, and its momenta
        self._sharded: list[bool] = []  # whether parameters are DTensors
        self._seen: dict[int, dict[str, Any]] = {}  # options that have been checked, by group
        self._views: list[dict[str, Tensor]] = []  # what was published in self.state
        self._params: list[Tensor] = []
        self._steps: list[int] = []
        self._units: list[Unit] = []
        self._banks: list[Bank] = []
        self._comms: dict[int, Comm] = {}  # of teams of more than one rank
        self._circle = Circle([])
        self._agreed = False  # whether ranks have compared what they are about to do
        self._loaded = False  # whether a checkpoint was loaded since
        self._strict = False  # whether some rank has on_nonfinite="raise"
        self._choices = roots.NO_CHOICES  # solvers that were measured
        self._calls = 0
        self._owners: dict[tuple[int, int, int], int] = {}  # place, by group, position in it, block
        self._began: Ranks = ()  # the world in which they were chosen
        self._consolidated: dict[Tensor, dict[str, Tensor]] = {}
        self._watch, self._alarm = Watch(), Alarm()

    def _is_trainable(self, p: Tensor) -> bool:
        """It may get a gradient, or has had one: state that is there is kept when a parameter is frozen."""
        return p.requires_grad or p.grad is not None or p in self.state

    def _trainable(self) -> list[Item]:
        return [item for item in items_of(self.param_groups) if self._is_trainable(item[-1])]

    def _world(self) -> Ranks:
        return exchange.world(self._process_group)

    def _make_plan(self, trainable: Sequence[Item], groups: list[dict[str, Any]]) -> Plan:
        specs, teams = census.take(trainable, groups, self._world(), self._trainers)
        return make_plan(specs, groups, teams, self._stages, self._settled(trainable))

    def _settled(self, trainable: Sequence[Item]) -> dict[tuple[int, int], int]:
        """Owners that blocks have by now, by position in a plan for these parameters."""
        if not self._started():
            return {}
        numbers = {(g, i): n for n, (g, i, _) in enumerate(trainable)}
        return {(numbers[g, i], b): place for (g, i, b), place in self._owners.items() if (g, i) in numbers}

    def _places(self, plan: Plan) -> list[int]:
        """This rank's place in every team."""
        return [team.index(exchange.my_rank()) for team in plan.teams]

    # Agreement.

    def _prepare_together(self) -> None:
        """Plan, and compare with the other ranks before the first collective: a rank that fails takes all with it."""
        error = None
        try:
            self._prepare(thorough=False)
        except Exception as e:
            if self._agreed:
                raise
            error = e
        if not self._agreed:
            self._circle = find_circle(
                items_of(self.param_groups), self.param_groups, self._world(), self._process_group
            )
        if not self._agreed or self._check_ranks:
            self._agree(error)

    def _agree(self, error: Exception | None) -> None:
        """Raise on all ranks, or on none."""
        agreement.agree(self._circle, self._facts, error)
        if not self._agreed:
            self._strict = self._circle.any(any(group["on_nonfinite"] == "raise" for group in self.param_groups))
            for comm in sorted(self._comms.values(), key=lambda comm: (not comm.together, first_come(comm.ranks))):
                comm.check_alive()  # makes the groups that are not there yet, in an order that all ranks share
            self._choices = self._measure()
        self._agreed, self._loaded = True, False

    def _measure(self) -> roots.Choices:
        """The solvers for ``root="auto"``, the same on all ranks; times of this process are kept, so only once."""
        devices = {spec.device: p.device for spec, p in zip(self._plan.specs, self._params, strict=True)}
        stacks = {(devices[name], d, e): count for (name, d, e), count in self._plan.auto_stacks().items()}
        return roots.decide(self._circle.merge(roots.measure(stacks)))

    def _facts(self, ranks: Ranks) -> dict[str, str]:
        facts = {"num_trainers_per_group": str(self._trainers), "stages": str(self._stages)}
        facts |= {"check_ranks": str(self._check_ranks)}
        repeated = self._trainers is not None
        facts |= agreement.facts_of(self._plan, self._params, self._world(), ranks, repeated=repeated)
        for i in agreement.members(self._params, self._world(), ranks):
            if self._loaded or self._check_ranks:
                facts[f"the step of parameter {self._name_of(i)}"] = str(self._steps[i])
            if self._check_ranks:
                facts[f"whether {self._name_of(i)} has a gradient"] = str(self._params[i].grad is not None)
        return facts

    # Building.

    def _prepare(self, *, thorough: bool) -> None:
        """Bring plan, banks and state in step with the parameters and options; does nothing on nearly every call."""
        if thorough:
            self._finish()
        if self._views and not self.state:  # emptied by the user to begin anew
            self._finish()
            self._reset()
        elif self._is_replaced(thorough):  # by the user: what is there now counts
            self._finish()
            self._signature, self._units, self._banks = None, [], []
        for number, group in enumerate(self.param_groups):
            check_values(group, self._seen.setdefault(number, {}))
        if (glance := self._glance()) is not None and glance == self._glanced:
            return
        self._kept = None
        trainable = self._trainable()
        if self._sign(trainable) == self._signature:
            self._glanced = glance
            return
        if self._started():
            self._refuse_moving()
        self._agreed = False
        structure = [tuple(group[name] for name in STRUCTURAL) for group in self.param_groups]
        if self._started():
            _refuse_restructuring(self._structure, structure)
            self._refuse_reshaping(trainable)
        self._finish()
        self._build(self._make_plan(trainable, self.param_groups), trainable)
        self._signature, self._structure, self._glanced = self._sign(trainable), structure, None

    def _finish(self) -> None:
        """Wait for what is done aside: the state is about to be read, or written."""
        for bank in self._banks:
            if "aside" in vars(bank):
                bank.aside.finish()

    def _is_replaced(self, thorough: bool) -> bool:
        """Whether tensors in ``self.state`` are not ours any more, as after ``state[k] = v.to(device)``.

        A step looks at one tensor of the first and the last parameter, saving and loading look at all.
        """
        some = slice(None) if thorough or not self._params else slice(None, None, max(1, len(self._params) - 1))
        for p, views in zip(self._params[some], self._views[some], strict=True):
            entry = self.state.get(p, {})
            if any(entry.get(k) is not views[k] for k in (views if thorough else ("step",))):
                return True
        return False

    def _glance(self) -> Any:
        """What shows on nearly every step that nothing changed that :meth:`_sign` would tell; None if that is not easy."""
        if self._signature is None or any(self._sharded):
            return None
        params = [p for group in self.param_groups for p in group["params"]]
        where = [list(map(look, params)) for look in (id, Tensor.data_ptr, Tensor.stride, attrgetter("requires_grad"))]
        dtypes = [None if grad is None else grad.dtype for grad in map(attrgetter("grad"), params)]
        return where, dtypes, self._sign_options(), self._world()

    def _sign(self, trainable: Iterable[Item]) -> Any:
        """All that plan, banks and state depend on."""
        params = [
            (id(p), p.device, p.dtype, census.grad_dtype(p), p.shape, p.stride(), p.is_cuda and is_regular(p))
            for *_, p in trainable
        ]
        return params, self._sign_options(), self._world()

    def _sign_options(self) -> Any:
        return [
            (
                group["betas"][0] > 0,
                group["momentum"] > 0,
                group["refresh_delay"] > 0,
                group["beta3"] in (None, group["betas"][0]),
                group["weight_decay_mode"] == "l2",
                group["on_nonfinite"],
                *(group[name] for name in (*STRUCTURAL, *_ROOT_OPTIONS, "communication_dtype")),
            )
            for group in self.param_groups
        ]

    def _refuse_moving(self) -> None:
        if self._began != self._world():
            raise RuntimeError(
                f"the optimizer began on ranks {list(self._began)} and now there are {list(self._world())}: its process group was "
                "destroyed or replaced; save its state before that, and load it into a new optimizer"
            )

    def _refuse_reshaping(self, trainable: Iterable[Item]) -> None:
        planned = {id(p): spec for p, spec in zip(self._params, self._plan.specs, strict=True)} if self._params else {}
        for *_, p in trainable:
            if id(p) in planned and planned[id(p)].shape != p.shape:
                spec = planned[id(p)]
                raise ValueError(
                    f"parameter {spec.name} was of shape {spec.shape} and is now {tuple(p.shape)}; its state does not fit "
                    "any more, so build a new optimizer"
                )

    def _build(self, plan: Plan, trainable: Sequence[Item]) -> None:
        """Banks and units for the plan; whatever state there is moves along."""
        params = [p for *_, p in trainable]
        places = self._places(plan)
        check_memory(plan, places, {spec.device: p.device for spec, p in zip(plan.specs, params, strict=True)})
        old_banks = {identity(bank, self._params): bank for bank in self._banks}
        banks = make_banks(plan, places, params, self.param_groups, old_banks)
        old_state = {p: self.state[p] for p in params if p in self.state} if self._started() else {}
        self._plan, self._params, self._banks = plan, params, banks
        self._sharded = [is_dtensor(p) for p in params]
        self._publish(places, old_state)
        for bank in banks:
            if old_state and bank not in old_banks.values():
                bank.state_changed(self.param_groups[bank.key.group])
        self._steps = checkpoint.counts(self._step_tensor)
        known = [self._process_group, *(group for p in params for group in groups_of(p))]
        devices = {spec.team: p.device for spec, p in zip(plan.specs, params, strict=True)}
        worldwide = {
            spec.team
            for spec, p in zip(plan.specs, params, strict=True)
            if layout_of(p, self._world())[0] == exchange.world(None)
        }
        comms = [Comm(ranks, devices[team], known, team in worldwide) for team, ranks in enumerate(plan.teams)]
        self._comms = {team: comm for team, comm in enumerate(comms) if len(comm.ranks) > 1}
        self._units = make_units(plan, places, banks, comms, params)
        self._watch.keep(banks)
        self._alarm, self._began = Alarm(), self._world()
        self._owners = {
            (*trainable[block.param][:2], block.index): place
            for block, place in zip(plan.blocks, plan.owners, strict=True)
        }

    def _publish(self, places: list[int], old: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Fill ``self.state``: every trainable parameter has an entry, flat, of tensors only."""
        self._step_tensor = torch.zeros(len(self._params), dtype=torch.float32, device="cpu")
        views = [{"step": step} for step in self._step_tensor.unbind()]
        for p, spec, entry in zip(self._params, self._plan.specs, views, strict=True):
            group = self.param_groups[spec.group]
            if group["momentum"] > 0:
                entry["momentum"] = torch.zeros_like(p, dtype=state_dtype(group), requires_grad=False)
        for bank in self._banks:
            for block, role, view in bank.views():
                views[block.param][checkpoint.key(role, block.index)] = view
        self.state.clear()
        for i, (p, entry) in enumerate(zip(self._params, views, strict=True)):
            checkpoint.copy_state(old.get(p, {}), entry, self._plan.stored(i, places[self._plan.specs[i].team]))
            self.state[p] = dict(entry)
        self._views = views

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """As torch's; allocates the state if there has been no step.

        Of several ranks each has the blocks that it owns, which is what ``torch.distributed.checkpoint`` expects; for one
        that has everything see :meth:`consolidate_state_dict`.
        """
        with torch.no_grad():
            self._prepare(thorough=True)
        found = super().state_dict()
        numbers = [i for group in found["param_groups"] for i in group["params"]]
        gathered = (self._consolidated.get(p) for group in self.param_groups for p in group["params"])
        found["state"].update({i: dict(entry) for i, entry in zip(numbers, gathered, strict=True) if entry is not None})
        return found

    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to the rank ``to``: its :meth:`state_dict` is then complete, in host memory, until the next
        step, and can be loaded by any number of ranks. All ranks must call this together.
        """
        self._prepare(thorough=True)
        rank, world = exchange.my_rank(), self._world()
        known = {r for p in self._params for r in layout_of(p, world)[0]}
        if to not in known:
            raise ValueError(f"to={to} is none of the ranks {sorted(known)} that store these parameters")
        gathered = checkpoint.collect(self._plan, self._banks, self._views, self._comms, rank, to)
        self._consolidated = dict(zip(self._params, gathered, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a checkpoint into the live state; refuses one that does not fit, and then changes nothing."""
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        checkpoint.check_groups(state_dict, self.param_groups)
        saved = copy.deepcopy(state_dict["param_groups"])
        for theirs, mine in zip(saved, self.param_groups, strict=True):
            theirs |= {name: mine[name] for name in ("params", "param_names") if name in mine}
            check_values(theirs)
        entries = self._check_entries(state_dict, saved)
        for mine, theirs in zip(self.param_groups, saved, strict=True):
            mine.update(theirs)
        for p in entries:
            self.state.setdefault(p, {})  # so that it is planned even if it is frozen now
        self._prepare(thorough=True)
        places = self._places(self._plan)
        for i, p in enumerate(self._params):
            stored = self._plan.stored(i, places[self._plan.specs[i].team])
            checkpoint.copy_state(entries[p], self.state[p], stored)
        self._steps = checkpoint.counts(self._step_tensor)
        self._agreed, self._loaded = False, True
        self._consolidated.clear()
        for bank in self._banks:
            bank.state_changed(self.param_groups[bank.key.group])
        self._warn_of_blanks()
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def _warn_of_blanks(self) -> None:
        """torch fills a state that it gathered on one rank, and that lacks the others' blocks, with what is there: zeros."""
        blank = [i for i in checkpoint.blank(self._banks) if self._steps[i] > 0] if self._comms else []
        if blank:
            warnings.warn(
                f"the checkpoint has steps, but nothing but zeros for the blocks that this rank owns of {len(blank)} parameters, "
                f"{self._name_of(blank[0])} the first; if it was gathered on one rank, by "
                "get_optimizer_state_dict(full_state_dict=True) for instance, call opt.consolidate_state_dict() before that",
                stacklevel=3,
            )

    def _check_entries(self, state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, Any]:
        """The saved state of every trainable parameter, if all of it fits what ``groups`` call for."""
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        saved = {p: state_dict["state"].get(i, {}) for p, i in zip(ours, ids, strict=True)}
        trainable = [item for item in items_of(self.param_groups) if saved[item[-1]] or self._is_trainable(item[-1])]
        plan = self._make_plan(trainable, groups)
        needed = checkpoint.expected_shapes(plan, plan.banks_of(self._places(plan)))
        known = checkpoint.expected_shapes(plan, plan.all_banks())
        for i, (*_, p) in enumerate(trainable):
            spec = plan.specs[i]
            hint = (
                ", or sharded otherwise, which blocks='local' depends on"
                if groups[spec.group]["blocks"] == "local"
                else ""
            )
            checkpoint.check_state(saved[p], needed[i], known[i], spec.name, hint)
        return {p: saved[p] for *_, p in trainable}

    def __getstate__(self) -> dict[str, Any]:
        self._finish()
        kept = ("_structure", "_trainers", "_stages", "_check_ranks", "_owners", "_began")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After pickling or deepcopy the state is plain tensors; the next step or save moves it into fresh banks."""
        super().__setstate__(state)
        self._process_group = None  # a process group cannot be pickled; the default one takes its place
        self._reset()
        self._owners, self._began = state["_owners"], state["_began"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Shampoo:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._process_group = self._process_group
        return twin


_ROOT_OPTIONS = ("root", "exponent", "exponent_multiplier")
_FLAGS = ("foreach", "fused", "capturable", "differentiable", "amsgrad")


def _refuse_flags(given: Mapping[str, Any]) -> None:
    for flag in _FLAGS:
        if given[flag]:
            raise ValueError(f"{flag}=True is not implemented by Shampoo; leave it out")


def _refuse_restructuring(before: list[tuple[Any, ...]], now: list[tuple[Any, ...]]) -> None:
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        for name, was, is_now in zip(STRUCTURAL, old, new, strict=True):
            if was != is_now:
                raise ValueError(
                    f"{name} of param group {number} was changed from {was!r} to {is_now!r} after the first step; it decides which "
                    "state there is, so build a new optimizer instead"
                )
