"""The optimizer: wiring, groups and the step. The mathematics is in ``transforms``, ``roots`` and ``rules``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, rules
from .bank import Bank
from .health import Watch, nonfinite, tally
from .layout import check_parameter, stored_regions
from .options import OPTIONS, STRUCTURAL, check_options, check_values, closest, state_dtype
from .plan import Plan, Spec, make_plan
from .plan_report import PlanReport, check_memory
from .units import Unit, expected_shapes, identity, make_banks, make_units

RANK = 0  # this process among the ranks that share the work
Item = tuple[int, int, Tensor]  # group, position in it, parameter


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

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
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
        on_nonfinite: str = "skip",
        max_failed_refreshes: int = 3,
        state_dtype: str | torch.dtype = "float32",
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        amsgrad: bool = False,
    ) -> None:
        given = dict(locals())
        _refuse_flags(given)
        self._structure: list[tuple[Any, ...]] = []
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
                check_parameter(param, _name(group, len(self.param_groups) - 1, position))
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
        self._prepare(thorough=False)
        grads = self._gradients()
        if not grads or self._is_probe(grads):
            return loss
        self._refuse_nonfinite(grads)
        self._count(grads)
        for group in self.param_groups:
            rules.raise_peak(group)
        for unit in self._units:
            self._step_unit(unit, grads)
        self._look_after()
        return loss

    def _step_unit(self, unit: Unit, grads: Mapping[int, Tensor]) -> None:
        params = {i: self._params[i] for i in unit.members if i in grads}
        if not params:
            return
        key = unit.bank.key
        group = self.param_groups[key.group]
        momenta = {i: self.state[p]["momentum"] for i, p in params.items()} if group["momentum"] > 0 else {}
        offsets = self._plan.offsets(key.group) if group["refresh"] == "staggered" and key.modes else None
        unit.step({i: grads[i] for i in params}, params, momenta, self._steps, offsets, group)

    def _gradients(self) -> dict[int, Tensor]:
        grads = {i: p.grad for i, p in enumerate(self._params) if p.grad is not None}
        for i, grad in grads.items():
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"parameter {self._name_of(i)} has a sparse gradient; use a dense one (sparse=False in nn.Embedding) or "
                    "give it to torch.optim.SparseAdam"
                )
        return grads

    def _is_probe(self, grads: Mapping[int, Tensor]) -> bool:
        """torch's checkpoint code allocates state by a first step with all learning rates and gradients zero."""
        if any(self._steps) or not all(rules.number(group["lr"]) == 0 for group in self.param_groups):
            return False
        return not any(bool(grad.any()) for grad in grads.values())

    def _refuse_nonfinite(self, grads: Mapping[int, Tensor]) -> None:
        groups = [self.param_groups[spec.group] for spec in self._plan.specs]
        strict = {i: grad for i, grad in grads.items() if groups[i]["on_nonfinite"] == "raise"}
        for i in nonfinite(strict):
            raise FloatingPointError(
                f"parameter {self._name_of(i)} has NaN or Inf in its gradient at step {self._steps[i] + 1}; nothing was "
                "updated (on_nonfinite='raise')"
            )

    def _count(self, grads: Mapping[int, Tensor]) -> None:
        for i in grads:
            self._steps[i] += 1
        if len(grads) == len(self._steps):
            self._step_tensor += 1
        else:
            self._step_tensor += torch.tensor([i in grads for i in range(len(self._steps))], device="cpu")

    def _look_after(self) -> None:
        """Report failures: on every step where reading is free, now and then where it is not."""
        for unit in self._units:
            group = self.param_groups[unit.bank.key.group]
            step = max(self._steps[i] for i in unit.members)
            if unit.bank.counts.is_cpu or step % group["precondition_frequency"] == 0:
                self._watch.look(unit.bank, group, self._name_of)

    def _name_of(self, i: int) -> str:
        return self._plan.specs[i].name

    def health(self) -> dict[str, dict[str, int]]:
        """What went wrong so far, by parameter: gradients skipped, and refreshes that failed in a row. Empty is good."""
        return tally((unit.bank for unit in self._units), self._name_of)

    # Planning and state.

    def plan(self) -> PlanReport:
        """What is preconditioned and how, memory by kind and work per step; needs no step and allocates nothing."""
        return PlanReport(self._make_plan(self._trainable(), self.param_groups))

    def _started(self) -> bool:
        """Whether any parameter has taken a step."""
        return any(self._steps) or (
            not self._params and any(entry["step"] > 0 for entry in self.state.values() if entry)
        )

    def _reset(self) -> None:
        self._signature: Any = None
        self._seen: dict[int, dict[str, Any]] = {}  # options that have been checked, by group
        self._views: list[dict[str, Tensor]] = []  # what was published in self.state
        self._params: list[Tensor] = []
        self._steps: list[int] = []
        self._units: list[Unit] = []
        self._watch = Watch()

    def _everything(self) -> list[Item]:
        groups = enumerate(self.param_groups)
        return [(number, position, p) for number, group in groups for position, p in enumerate(group["params"])]

    def _is_trainable(self, p: Tensor) -> bool:
        """It may get a gradient, or has had one: state that is there is kept when a parameter is frozen."""
        return p.requires_grad or p.grad is not None or p in self.state

    def _trainable(self) -> list[Item]:
        return [item for item in self._everything() if self._is_trainable(item[-1])]

    def _make_plan(self, trainable: Iterable[Item], groups: list[dict[str, Any]]) -> Plan:
        specs = []
        for g, i, p in trainable:
            name = _name(groups[g], g, i)
            check_parameter(p, name)  # again, because wrappers swap parameters after construction
            specs.append(Spec(name, tuple(p.shape), g, str(p.device), str(p.dtype).removeprefix("torch.")))
        return make_plan(specs, groups, [stored_regions(p, (RANK,)) for *_, p in trainable])

    def _prepare(self, *, thorough: bool) -> None:
        """Bring plan, banks and state in step with the parameters and options; does nothing on nearly every call."""
        if not self.state:  # never stepped, or emptied by the user to begin anew
            self._reset()
        elif self._is_replaced(thorough):  # by the user: what is there now counts
            self._signature, self._units = None, []
        for number, group in enumerate(self.param_groups):
            check_values(group, self._seen.setdefault(number, {}))
        trainable = self._trainable()
        if self._sign(trainable) == self._signature:
            return
        structure = [tuple(group[name] for name in STRUCTURAL) for group in self.param_groups]
        if self._started():
            _refuse_restructuring(self._structure, structure)
            self._refuse_reshaping(trainable)
        self._build(self._make_plan(trainable, self.param_groups), [p for *_, p in trainable])
        self._signature, self._structure = self._sign(trainable), structure

    def _is_replaced(self, thorough: bool) -> bool:
        """Whether tensors in ``self.state`` are not ours any more, as after ``state[k] = v.to(device)``.

        A step looks at one tensor of each parameter, saving and loading look at all.
        """
        for p, views in zip(self._params, self._views, strict=True):
            entry = self.state.get(p, {})
            if any(entry.get(k) is not views[k] for k in (views if thorough else ("step",))):
                return True
        return False

    def _sign(self, trainable: Iterable[Item]) -> Any:
        """All that plan, banks and state depend on."""
        options = [
            (group["betas"][0] > 0, group["momentum"] > 0, *(group[name] for name in (*STRUCTURAL, *_ROOT_OPTIONS)))
            for group in self.param_groups
        ]
        return [(id(p), p.device, p.dtype, p.shape) for *_, p in trainable], options

    def _refuse_reshaping(self, trainable: Iterable[Item]) -> None:
        planned = {id(p): spec for p, spec in zip(self._params, self._plan.specs, strict=True)} if self._params else {}
        for *_, p in trainable:
            if id(p) in planned and planned[id(p)].shape != p.shape:
                spec = planned[id(p)]
                raise ValueError(
                    f"parameter {spec.name} was of shape {spec.shape} and is now {tuple(p.shape)}; its state does not fit "
                    "any more, so build a new optimizer"
                )

    def _build(self, plan: Plan, params: list[Tensor]) -> None:
        """Banks and units for the plan; whatever state there is moves along."""
        check_memory(plan)
        old_banks = {identity(unit.bank, self._params): unit.bank for unit in self._units}
        banks = make_banks(plan, RANK, params, self.param_groups, old_banks)
        old_state = {p: self.state[p] for p in params if p in self.state} if self._started() else {}
        self._plan, self._params = plan, params
        self._publish(banks, old_state)
        for bank in banks:
            if old_state and bank not in old_banks.values():
                bank.state_changed(self.param_groups[bank.key.group])
        self._steps = checkpoint.counts(self._step_tensor)
        self._units = make_units(plan, banks, params, self.param_groups)
        self._watch.keep(banks)

    def _publish(self, banks: Iterable[Bank], old: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Fill ``self.state``: every trainable parameter has an entry, flat, of tensors only."""
        self._step_tensor = torch.zeros(len(self._params), dtype=torch.float32, device="cpu")
        views = [{"step": step} for step in self._step_tensor.unbind()]
        for p, spec, entry in zip(self._params, self._plan.specs, views, strict=True):
            group = self.param_groups[spec.group]
            if group["momentum"] > 0:
                entry["momentum"] = torch.zeros_like(p, dtype=state_dtype(group), requires_grad=False)
        for bank in banks:
            for block, role, view in bank.views():
                views[block.param][checkpoint.key(role, block.index)] = view
        self.state.clear()
        for p, entry in zip(self._params, views, strict=True):
            checkpoint.copy_state(old.get(p, {}), entry)
            self.state[p] = dict(entry)
        self._views = views

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """As torch's; allocates the state if there has been no step."""
        with torch.no_grad():
            self._prepare(thorough=True)
        return super().state_dict()

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
        for p, entry in entries.items():
            checkpoint.copy_state(entry, self.state[p])
        self._steps = checkpoint.counts(self._step_tensor)
        for unit in self._units:
            unit.bank.state_changed(self.param_groups[unit.bank.key.group])
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def _check_entries(self, state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, Any]:
        """The saved state of every trainable parameter, if all of it fits what ``groups`` call for."""
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        saved = {p: state_dict["state"].get(i, {}) for p, i in zip(ours, ids, strict=True)}
        trainable = [item for item in self._everything() if saved[item[-1]] or self._is_trainable(item[-1])]
        plan = self._make_plan(trainable, groups)
        for (*_, p), spec, shapes in zip(trainable, plan.specs, expected_shapes(plan, RANK), strict=True):
            checkpoint.check_state(saved[p], shapes, spec.name)
        return {p: saved[p] for *_, p in trainable}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_structure": self._structure}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After pickling or deepcopy the state is plain tensors; the next step or save moves it into fresh banks."""
        super().__setstate__(state)
        self._reset()


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


def _name(group: Mapping[str, Any], number: int, position: int) -> str:
    names = group.get("param_names")
    return names[position] if names else f"param_groups[{number}]['params'][{position}]"
