"""The optimizer: wiring, groups and the step. The mathematics is in ``transforms``, ``roots`` and ``rules``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import roots
from .compute.bank import Bank
from .options import FLAGS, OPTIONS, check_options, check_values, hint, refuse_flags, whole, with_choices
from .planning.plan import BankKey, Plan, make_plan
from .report.plan import PlanReport
from .routing import route
from .runtime import agreement, census, changes, checkpoint, exchange, health
from .runtime.census import Item, Ranks, items_of
from .runtime.exchange import Circle
from .runtime.run import Built, build
from .runtime.unit import Unit
from .storage import averaging
from .storage import update as rules
from .storage.tensors import check_parameter, is_stored, layout_of

OWN = ("peak_lr", "top_lr", "train_mode")  # what param groups hold beside options


class Shampoo(torch.optim.Optimizer):
    """Distributed Shampoo: preconditions each block of each weight with inverse roots of its Kronecker factors.

    ``params`` is a model, whose embeddings, head, norms and biases are then treated as :func:`route` has it, or what torch's
    optimizers take: parameters, with names or without, or param groups, which are all treated alike.

    Every option may be given per param group and changed between steps, except those that decide which state there is.
    ``docs/options.md`` explains them; ``docs/algorithm.md`` has the mathematics.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.Shampoo(model, lr=1e-2, weight_decay=0.1)
    >>> model(torch.randn(16, 8)).square().mean().backward()
    >>> opt.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float | None = None,
        weight_decay: float = 0.0,
        *,
        damping: str = "absolute",
        beta3: float | None = None,
        weight_decay_mode: str = "decoupled",
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        averaging: str | None = None,
        averaging_beta: float | None = None,
        averaging_decay: float | None = None,
        averaging_powers: tuple[float, float] = (2.0, 0.0),
        maximize: bool = False,
        bias_correction: bool = True,
        preconditioner: str | None = "shampoo",
        exponent: float | Mapping[int, float] | None = None,
        exponent_multiplier: float = 1.0,
        root: Any = "auto",
        polar: Any = "newton_schulz",
        polar_scale: str | None = None,
        graft: str | None = "adam",
        graft_beta2: float | None = None,
        graft_eps: float = 1e-8,
        max_preconditioner_dim: float = 1024,
        merge_dims: bool = True,
        large_dim: str = "block",
        batch_dims: int = 0,
        split: int | Sequence[int] | None = None,
        split_dim: int = 0,
        precondition_1d: bool = False,
        precondition_frequency: int = 10,
        start_preconditioning_step: float | None = None,
        refresh_warmup: float = 0.0,
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
        refuse_flags(given)
        if isinstance(params, torch.nn.Module):
            params = route(params)
        self._structure: list[tuple[Any, ...]] = []
        self._rules: list[str] = []  # what made each param group, for reports; not in checkpoints
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
        rule = (
            str(param_group.pop("rule", "")) if isinstance(param_group, dict) else ""
        )  # torch refuses what is no dict
        for name in [n for n in param_group if n not in OPTIONS and n not in ("params", "param_names", *OWN)]:
            if name in FLAGS:
                refuse_flags({name: param_group.pop(name)})
            elif meant := hint(name):  # other names are the user's own, as in torch
                raise ValueError(f"param group has the unknown option {name!r}{meant}")
        own = OPTIONS.keys() & set(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for flag in FLAGS:  # torch's own defaults may bring one along
            group.pop(flag, None)
        try:
            check_options(group, own, self.defaults)
            for position, param in enumerate(group["params"]):
                name = census.name_of(group, len(self.param_groups) - 1, position)
                check_parameter(param, name)
                if is_stored(param):
                    census.team(param, name, self._world(), self._trainers)
        except Exception:
            self.param_groups.pop()
            raise
        group.setdefault("peak_lr", rules.first_peak(group["lr"]))
        for name in ("top_lr", "train_mode"):  # of another optimizer
            group.pop(name, None)
        averaging.settle(group, train=all(map(averaging.is_training, self.param_groups[:-1])))
        self._rules[len(self.param_groups) - 1 :] = [rule]

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure``, if given, computes the loss and is run first."""
        if self._started():
            self._refuse_averages()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._consolidated.clear()
        self._prepare_together()
        grads = census.gradients(self._built.params, self._built.sharded, self._built.name_of)
        for group in self.param_groups:
            rules.raise_peak(group)
        if (not grads and not self._circle) or self._is_probe(grads):
            return loss
        self._refuse_averages()
        if self._strict:
            health.refuse_nonfinite(grads, self._built, self.param_groups, self._circle)
        self._built.count(grads)
        groups = [with_choices(group, self._choices) for group in self.param_groups]
        step = self._built.step(grads, groups, self._offsets)
        for unit in self._units:
            unit.send(step)
        for unit in self._units:
            unit.compute(step)
        for unit in self._units:
            unit.apply(step)
        self._watch.look_after(self._built, self.param_groups, self._circle)
        return loss

    def _offsets(self, key: BankKey) -> Mapping[int, int] | None:
        staggered = self.param_groups[key.group]["refresh"] == "staggered" and key.modes
        return self._plan.offsets(key.group, self._choices) if staggered else None

    def _refuse_averages(self) -> None:
        if not all(map(averaging.is_training, self.param_groups)):
            raise RuntimeError(
                "step() in eval mode: the parameters hold averages now, and gradients are not to be taken there; call "
                "opt.train() before the forward pass of a training step"
            )

    def _is_probe(self, grads: Mapping[int, Tensor]) -> bool:
        """torch's checkpoint code allocates state by a first step with all learning rates and gradients zero."""
        if any(self._built.steps) or not all(rules.number(group["lr"]) == 0 for group in self.param_groups):
            return False
        return not self._circle.any(any(bool(grad.any()) for grad in grads.values()))

    # Modes.

    def train(self) -> None:
        """Let parameters of param groups with ``averaging`` hold the points at which gradients are taken; bit for bit what
        they held before :meth:`eval`. A new optimizer is in this mode. Without ``averaging`` it does nothing.

        >>> import torch, lather
        >>> model = torch.nn.Linear(8, 4)
        >>> opt = lather.Shampoo(model.parameters(), lr=1e-2, betas=(0.0, 0.95), averaging="schedule_free")
        >>> opt.train()
        >>> model(torch.randn(16, 8)).square().mean().backward()
        >>> opt.step()
        >>> opt.eval()
        >>> loss = model(torch.randn(16, 8)).square().mean()
        """
        self._switch(train=True)

    def eval(self) -> None:
        """Let parameters of param groups with ``averaging`` hold the average, to evaluate or to keep it. There is no step in
        this mode, and what is done to the parameters is undone by :meth:`train`. Without ``averaging`` it does nothing.
        """
        self._switch(train=False)

    @torch.no_grad()
    def _switch(self, *, train: bool) -> None:
        numbers = [
            g
            for g, group in enumerate(self.param_groups)
            if averaging.is_on(group) and averaging.is_training(group) is not train
        ]
        if not numbers:
            return
        self._prepare(thorough=True)
        self._consolidated.clear()
        for g in numbers:
            self._built.switch(g, train=train)
            self.param_groups[g]["train_mode"] = train
        self._publish()

    def _publish(self) -> None:
        """The state of averaging has ``y`` always: where it is the parameter, that itself. torch looks here for keys."""
        for members in self._built.averaged.values():
            for i in members:
                p, views = self._built.params[i], self._built.views[i]
                self.state[p]["y"] = views.get("y", p)

    def health(self) -> dict[str, dict[str, int]]:
        """What went wrong so far, by parameter: gradients skipped, and refreshes that failed in a row. Empty is good.

        A rank knows of the blocks that it owns.
        """
        return health.tally(self._banks, self._built.name_of)

    # Planning and state.

    def plan(self) -> PlanReport:
        """What is preconditioned and how, memory by kind and work per step; needs no step and allocates nothing.

        After the first step it also has what was measured for ``root="auto"``.
        """
        plan = self._make_plan(self._trainable(), self.param_groups)
        return PlanReport(plan, self._places(plan), self._choices, self._rules)

    @property
    def _plan(self) -> Plan:
        return self._built.plan

    @property
    def _banks(self) -> list[Bank]:
        return self._built.banks

    @property
    def _units(self) -> list[Unit]:
        return self._built.units

    def _started(self) -> bool:
        """Whether any parameter has taken a step."""
        return any(self._built.steps) or (
            not self._built.params and any(entry["step"] > 0 for entry in self.state.values() if entry)
        )

    def _reset(self) -> None:
        self._built = Built()
        self._signature: Any = None  # what it was built for
        self._glanced: Any = None
        self._seen: dict[int, dict[str, Any]] = {}  # options that have been checked, by group
        self._circle = Circle([])
        self._agreed = False  # whether ranks have compared what they are about to do
        self._loaded = False  # whether a checkpoint was loaded since
        self._strict = False  # whether some rank has on_nonfinite="raise"
        self._choices = roots.NO_CHOICES  # solvers that were measured
        self._owners: dict[tuple[int, int, int], int] = {}  # place, by group, position in it, block
        self._began: Ranks = ()  # the world in which they were chosen
        self._consolidated: dict[Tensor, dict[str, Tensor]] = {}
        self._watch = health.Watch()

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
            self._circle = agreement.find_circle(self.param_groups, self._world(), self._process_group)
        if not self._agreed or self._check_ranks:
            self._agree(error)

    def _agree(self, error: Exception | None) -> None:
        """Raise on all ranks, or on none."""
        agreement.agree(self._circle, self._facts, error)
        if not self._agreed:
            self._strict = self._circle.any(any(group["on_nonfinite"] == "raise" for group in self.param_groups))
            self._built.connect()
            self._choices = agreement.measure(self._built, self._circle)
        self._agreed, self._loaded = True, False

    def _facts(self, ranks: Ranks) -> agreement.Facts:
        given = {"num_trainers_per_group": self._trainers, "stages": self._stages, "check_ranks": self._check_ranks}
        return agreement.facts_of(self._built, self._world(), ranks, given, self._loaded)

    # Building.

    def _prepare(self, *, thorough: bool) -> None:
        """Bring plan, banks and state in step with the parameters and options; does nothing on nearly every call."""
        if thorough:
            self._built.finish()
        if self._built.views and not self.state:  # emptied by the user to begin anew
            self._built.finish()
            self._reset()
        elif changes.is_replaced(self._built, self.state, thorough):  # by the user: what is there now counts
            self._built.finish()
            self._signature, self._built.units, self._built.banks = None, [], []
        for number, group in enumerate(self.param_groups):
            check_values(group, self._seen.setdefault(number, {}))
        easy = self._signature is not None and not any(self._built.sharded)
        glance = changes.glance(self.param_groups, self._world()) if easy else None
        if glance is not None and glance == self._glanced:
            return
        self._built.storage_changed()
        trainable = self._trainable()
        if changes.sign(trainable, self.param_groups, self._world()) == self._signature:
            self._glanced = glance
            return
        self._rebuild(trainable)

    def _rebuild(self, trainable: Sequence[Item]) -> None:
        structure, started = changes.structure(self.param_groups), self._started()
        training = all(averaging.is_training(group) for group in self.param_groups if averaging.is_on(group))
        if started:
            changes.refuse_moving(self._began, self._world())
        self._agreed = False
        if started:
            changes.refuse_restructuring(self._structure, structure)
            changes.refuse_reshaping(self._built, trainable)
        self._built.finish()
        for group in self.param_groups:
            averaging.settle(group, train=training)
        plan = self._make_plan(trainable, self.param_groups)
        params = [p for *_, p in trainable]
        state = {p: self.state[p] for p in params if p in self.state} if started else {}
        self._built = build(plan, self._places(plan), params, state, self._built, self._world(), self._process_group)
        self.state.clear()
        self.state.update({p: dict(views) for p, views in zip(self._built.params, self._built.views, strict=True)})
        self._publish()
        self._watch.keep(self._banks)
        self._owners = {
            (*trainable[block.param][:2], block.index): place
            for block, place in zip(plan.blocks, plan.owners, strict=True)
        }
        self._began, self._structure, self._glanced = self._world(), structure, None
        self._signature = changes.sign(trainable, self.param_groups, self._world())

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """As torch's; allocates the state if there has been no step.

        Of several ranks each has the blocks that it owns, which is what ``torch.distributed.checkpoint`` expects; for one
        that has everything see :meth:`consolidate_state_dict`.
        """
        with torch.no_grad():
            self._prepare(thorough=True)
            complete = self._built.complete() if self._built.averaged else []
        whole = dict(zip(self._built.params, complete, strict=False)) | self._consolidated
        live = self.state
        try:
            self.state = live | {p: dict(entry) for p, entry in whole.items()}  # so that hooks see it
            return super().state_dict()
        finally:
            self.state = live

    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to the rank ``to``: its :meth:`state_dict` is then complete, in host memory, until the next
        step, and can be loaded by any number of ranks. All ranks must call this together.
        """
        self._prepare(thorough=True)
        rank, world = exchange.my_rank(), self._world()
        known = {r for p in self._built.params for r in layout_of(p, world)[0]}
        if to not in known:
            raise ValueError(f"to={to} is none of the ranks {sorted(known)} that store these parameters")
        gathered = checkpoint.collect(self._plan, self._banks, self._built.complete(), self._built.comms, rank, to)
        self._consolidated = dict(zip(self._built.params, gathered, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a checkpoint into the live state; refuses one that does not fit, and then changes nothing.

        The mode is that of the checkpoint, and parameters of groups with ``averaging`` then hold what it calls for.
        """
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
        self._built.load(entries, self.param_groups)
        self._publish()
        self._agreed, self._loaded = False, True
        self._consolidated.clear()
        if self._built.comms:
            checkpoint.warn_of_blanks(self._banks, self._built.steps, self._built.name_of)
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def _check_entries(self, state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, Any]:
        """The saved state of every trainable parameter, if all of it fits what ``groups`` call for."""
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        saved = {p: state_dict["state"].get(i, {}) for p, i in zip(ours, ids, strict=True)}
        trainable = [item for item in items_of(self.param_groups) if saved[item[-1]] or self._is_trainable(item[-1])]
        plan = self._make_plan(trainable, groups)
        entries = {p: saved[p] for *_, p in trainable}
        checkpoint.check_states(list(entries.values()), plan, self._places(plan))
        return entries

    def __getstate__(self) -> dict[str, Any]:
        self._built.finish()
        kept = ("_structure", "_rules", "_trainers", "_stages", "_check_ranks", "_owners", "_began")
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
