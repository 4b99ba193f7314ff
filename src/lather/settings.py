"""Settings: one param group's options, checked and resolved. Nothing below looks options up by name."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch

from .kernels import has_kernels
from .methods import GRAFTS, METHODS, Graft, Hyper, Method
from .options import AUTO, DEFAULT, NESTEROV, OPTIONS, STRUCTURAL, is_on_host, readers

Group = Mapping[str, Any]
OFF = {"beta3": None, "exponent": None, "refresh_warmup": 0.0}  # values that switch a default off


@dataclass(frozen=True)
class Geometry:
    """How parameters are cut into blocks."""

    max_preconditioner_dim: float
    block_multiple: int
    merge_dims: bool
    large_dim: str
    batch_dims: int
    precondition_1d: bool
    split: int | tuple[int, ...] | None
    split_dim: int
    local: bool  # cut each shard apart, instead of the whole parameter


@dataclass(frozen=True)
class Averaging:
    """``kind`` is ``"schedule_free"`` or ``"gpa"``; the numbers are those of :mod:`lather.storage.averaging`."""

    kind: str
    beta: float
    decay: float
    powers: tuple[float, float]


@dataclass(frozen=True)
class Settings:
    """What a param group's options mean, as of this step. The learning rate is not here: it is read on every step."""

    method: Method | None
    graft_name: str | None  # what the graft of preconditioned blocks is called; None: nothing sets the length of directions
    elementwise: str  # the name of the graft of all other blocks
    hyper: Hyper  # of preconditioned blocks
    elementwise_hyper: Hyper  # of all other blocks
    geometry: Geometry
    averaging: Averaging | None
    master_weights: bool
    frequency: int
    warmup: float
    start: float | None  # the first preconditioned step, where the user set one
    first_refresh: float
    staggered: bool
    weight_decay: float
    decay_mode: str
    momentum: float
    dampening: float
    nesterov: bool
    maximize: bool
    raise_on_nonfinite: bool
    max_failed_refreshes: int
    precision: str | None  # how torch is to multiply in a step; None: as the user has set it
    wire_dtype: str  # what directions travel as
    rounds: bool  # whether that changes them
    given: Mapping[str, Any] = field(compare=False, repr=False)  # the options that this was made from; lr if it is a tensor

    @cached_property
    def graft(self) -> Graft:
        """The elementwise method of preconditioned blocks, which they follow until they start."""
        return GRAFTS[self.graft_name]

    @cached_property
    def grafted(self) -> bool:
        """Whether the graft sets the length of preconditioned directions."""
        return self.graft_name is not None

    def graft_of(self, kind: str) -> Graft:
        """The elementwise method of blocks of a kind: ``"kronecker"``, ``"graft"`` or ``"adagrad"``."""
        if kind == "kronecker":
            return self.graft
        return GRAFTS["adagrad" if kind == "adagrad" else self.elementwise]

    def hyper_of(self, kind: str) -> Hyper:
        return self.hyper if kind == "kronecker" else self.elementwise_hyper

    def method_of(self, kind: str) -> Method | None:
        return self.method if kind == "kronecker" else None

    def packs(self, device: str) -> bool:
        """Whether factors and roots of parameters on this device are packed: by default, if kernels do all the work with them."""
        if self.hyper.packed is not None or self.method is None:
            return bool(self.hyper.packed)
        by_kernels = self.method.kernels == "factors" and self.hyper.state_dtype == torch.float32
        return by_kernels and has_kernels(torch.device(device))

    @cached_property
    def rate_on_device(self) -> bool:
        """Whether the learning rate is a tensor that the host does not read, so that only the device knows whether it is valid."""
        return "lr" in self.given and not is_on_host(self.given["lr"])

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """The options that may not change once training has begun."""
        return tuple(self.graft_name if name == "graft" else self.given[name] for name in STRUCTURAL)

    @cached_property
    def told(self) -> dict[str, str]:
        """The options in words, to be compared between ranks. Without the learning rate. A graft may be settled on some ranks
        only, because they saved."""
        return {name: str(value) for name, value in self.given.items() if name != "lr"} | {"graft": str(self.graft_name)}

    @cached_property
    def text(self) -> str:
        return str(self.told)

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Everything that plan, banks, buffers and units depend on."""
        hyper, other = self.hyper, self.elementwise_hyper
        filters = hyper.beta1 > 0, hyper.beta3 == other.beta3, hyper.looks_ahead
        there = self.momentum > 0, hyper.refresh_delay > 0
        how = self.rate_on_device, self.decay_mode == "l2", self.maximize, self.raise_on_nonfinite, self.wire_dtype
        return (*filters, *there, *how, *self.structure, hyper.root, hyper.root_device, hyper.exponent, hyper.exponent_multiplier)


def resolve(group: dict[str, Any], last: Settings | None = None) -> Settings:
    """The settings of a param group; ``last`` again if nothing has changed since.

    Options are validated, and normalised in place. Raises ``ValueError`` for the first that is wrong.
    """
    lr, before = group["lr"], last.given if last is not None else {}
    # On a device a tensor is read only when it is new, because the host waits for that. Executors look at it on every step.
    in_tensor = isinstance(lr, torch.Tensor)
    unread = in_tensor and not is_on_host(lr) and group["on_nonfinite"] != "raise"
    if not unread and not (type(lr) is float and 0 <= lr < math.inf):
        group["lr"] = OPTIONS["lr"].check("lr", lr)
    if last is not None and in_tensor == ("lr" in before) and all(group[name] is before[name] for name in before):
        return last
    for name, option in OPTIONS.items():
        if name not in before or group[name] is not before[name]:
            group[name] = option.check(name, group[name])
    method = METHODS.get(group["preconditioner"])
    if group["eps"] is None:
        group["eps"] = (method or METHODS[DEFAULT]).default_eps[group["damping"]]
    if method is None and group["graft"] is None:
        group["graft"] = "adam"
    if group["exponent"] == AUTO:
        group["exponent"] = _usual_exponent(group, method)
    _refuse_pairs(group)
    found = _settings(group, method)
    found.graft.check(method)
    if method is not None:
        method.check(found.hyper)
    return found


def _refuse_pairs(group: Group) -> None:
    """Refuse options that contradict each other."""
    delay, warmup, frequency = group["refresh_delay"], _warmup(group), group["precondition_frequency"]
    if not delay < frequency:
        raise ValueError(
            f"refresh_delay={delay} must be less than precondition_frequency={frequency}: roots would be computed anew before "
            "they are used; lower the delay or raise the frequency"
        )
    if delay and warmup:
        raise ValueError(
            f"refresh_warmup={warmup} does not go with refresh_delay={delay}: roots would be computed anew before they are used; "
            "set one of them to 0"
        )
    if group["averaging"] is not None and group["momentum"] > 0:
        raise ValueError(
            f"momentum={group['momentum']!r} does not go with averaging={group['averaging']!r}, which replaces momentum; set "
            "momentum=0 (docs/algorithm.md says which averaging is the same), or averaging=None"
        )


# A default is ignored where another option leaves it no room. Only what a user wrote can be refused.


def _is_default(group: Group, name: str) -> bool:
    return bool(group[name] == OPTIONS[name].default)


def _never(group: Group) -> bool:
    return bool(group["start_preconditioning_step"] == math.inf)


def is_preconditioned(group: Group) -> bool:
    """Whether a method is applied to the parameters of a group, sooner or later."""
    return group["preconditioner"] is not None and not _never(group)


def _warmup(group: Group) -> float:
    yields = group["refresh_delay"] or _never(group)
    return 0.0 if yields and _is_default(group, "refresh_warmup") else group["refresh_warmup"]


def graft_name(group: Group) -> str | None:
    """The graft of a param group. ``"auto"`` is settled when training begins. It is Adam, with a second moment that is read off the
    factors if they can give one."""
    if group["graft"] != AUTO:
        return cast("str | None", group["graft"])
    method = METHODS.get(group["preconditioner"])
    at_hand = method is not None and method.squares and not _never(group)
    return "adafactor" if at_hand and group["betas"][1] < 1 and group["graft_beta2"] is None else "adam"


def _usual_exponent(group: Group, method: Method | None) -> float | None:
    """1/2, which leaves the length of steps to the graft. None for the paper's rule, and for a method that has no exponent."""
    if method is None or "exponent" not in method.reads or group["graft"] is None or group["exponent_multiplier"] != 1:
        return None
    return 0.5


def _settings(group: Group, method: Method | None) -> Settings:
    hyper, start, frequency = _hyper(group), group["start_preconditioning_step"], group["precondition_frequency"]
    warmup = _warmup(group)
    first = 1 if warmup else frequency
    wire = group["communication_dtype"] or dtype_text(hyper.compute_dtype)
    same = ("master_weights", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "max_failed_refreshes")
    return Settings(
        method=method,
        graft_name=graft_name(group),
        elementwise=elementwise_graft(group) or "sgd",
        hyper=hyper,
        elementwise_hyper=replace(hyper, beta3=hyper.beta1) if group["beta3"] == NESTEROV else hyper,
        geometry=_geometry(group),
        averaging=_averaging(group),
        frequency=frequency,
        warmup=warmup,
        start=start,
        first_refresh=float(first if start is None else start),
        staggered=group["refresh"] == "staggered",
        decay_mode=group["weight_decay_mode"],
        raise_on_nonfinite=group["on_nonfinite"] == "raise",
        precision={"float32": "ieee", "fast": "tf32"}.get(group["precision"]),
        wire_dtype=wire,
        rounds=wire != dtype_text(hyper.compute_dtype),
        given={name: group[name] for name in OPTIONS if name != "lr" or isinstance(group["lr"], torch.Tensor)},
        **{name: group[name] for name in same},
    )


def _hyper(group: Group) -> Hyper:
    (beta1, beta2), beta3, graft_beta2 = group["betas"], group["beta3"], group["graft_beta2"]
    if beta3 == NESTEROV:
        beta3 = None if _never(group) else beta1**2
    if graft_beta2 is None:
        graft_beta2 = 0.999 if beta2 == 1 else beta2
    state_dtype: torch.dtype = getattr(torch, group["state_dtype"])
    same = ["bias_correction", "eps", "exponent", "exponent_multiplier", "root", "root_device", "refresh_delay"]
    same += ["polar", "polar_scale", "graft_eps"]
    return Hyper(
        beta1=beta1,
        beta2=beta2,
        beta3=beta1 if beta3 is None else beta3,
        relative_damping=group["damping"] == "relative",
        packed=None if group["factors"] == AUTO else group["factors"] == "packed",
        state_dtype=state_dtype,
        root_dtype=getattr(torch, group["root_dtype"] or group["state_dtype"]),
        filter_dtype=getattr(torch, group["filter_dtype"] or group["state_dtype"]),
        compute_dtype=torch.promote_types(state_dtype, torch.float32),
        graft_beta2=float(graft_beta2),
        **{name: group[name] for name in same},
    )


def _geometry(group: Group) -> Geometry:
    same = (
        "max_preconditioner_dim",
        "block_multiple",
        "merge_dims",
        "large_dim",
        "batch_dims",
        "precondition_1d",
        "split",
        "split_dim",
    )
    return Geometry(**{name: group[name] for name in same}, local=group["blocks"] == "local")


def _averaging(group: Group) -> Averaging | None:
    kind, beta, decay = group["averaging"], group["averaging_beta"], group["averaging_decay"]
    if kind is None:
        return None
    if beta is None:
        beta = 0.7 if kind == "gpa" else 0.9
    if decay is None:
        decay = 0.9967
    return Averaging(kind, float(beta), float(decay), group["averaging_powers"])


def elementwise_graft(group: Group) -> str | None:
    """The graft of parameters that are not preconditioned: the group's, or what it or the method names for them."""
    method, name = METHODS.get(group["preconditioner"]), graft_name(group)
    if method and name is None:
        return method.elementwise
    return GRAFTS[name].elementwise or name


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Options without effect.


def check_options(group: dict[str, Any], own: Collection[str] = (), defaults: Group | None = None) -> Settings:
    """The settings of a param group that a user wrote: its ``own`` options, and for the rest the ``defaults``.

    An option that has no effect raises an error, unless it is a default that has an effect for other groups.
    """
    found = resolve(group)
    idle = _without_effect(group)
    if idle and defaults is not None:
        usual = dict(defaults)
        resolve(usual)
        idle = {name: why for name, why in idle.items() if name in own or name in _without_effect(usual)}
    for name, why in idle.items():
        raise ValueError(f"{name}={group[name]!r} has no effect {why}; remove it or change the other option")
    return found


def _without_effect(group: Group) -> dict[str, str]:
    """Options that do nothing with the others as they are, and why."""
    changed = {name for name in OPTIONS if name != "lr" and not _is_default(group, name)}
    changed -= {name for name, off in OFF.items() if group[name] == off}  # what is off needs no effect
    averaging, never = group["averaging"], _never(group)
    rows = [
        ("beta3", group["betas"][0] == 0, "without betas[0] > 0"),
        ("filter_dtype", group["betas"][0] == 0, "without betas[0] > 0"),
        ("dampening", group["momentum"] == 0, "without momentum > 0"),
        ("nesterov", group["momentum"] == 0, "without momentum > 0"),
        ("averaging_beta", averaging is None, "without averaging"),
        ("averaging_decay", averaging != "gpa", f"with averaging={averaging!r}; only 'gpa' uses it"),
        ("averaging_powers", averaging != "schedule_free", f"with averaging={averaging!r}; only 'schedule_free' uses it"),
        ("refresh_delay", never, "with start_preconditioning_step=inf; nothing is ever refreshed"),
        ("refresh_warmup", never, "with start_preconditioning_step=inf; nothing is ever refreshed"),
        ("split_dim", group["split"] is None, "without split"),
        (
            "exponent_multiplier",
            isinstance(group["exponent"], (int, float)),
            "with exponent, which replaces the paper's exponent that it multiplies",
        ),
        (
            "root_dtype",
            group["root_dtype"] == "float64" and group["state_dtype"] != "float64",
            f"with state_dtype={group['state_dtype']!r}: roots are computed in float32",
        ),
        *((name, useless, why) for name, (useless, why) in _graft_options(group).items()),
    ]
    found = {name: why for name, useless, why in rows if useless and name in changed}
    return found | {name: why for name, why in _method_options(group, changed).items() if name not in found}


def _graft_options(group: Group) -> dict[str, tuple[bool, str]]:
    graft = GRAFTS[elementwise_graft(group)]
    users = [name for name, other in GRAFTS.items() if name and "graft_beta2" in other.reads]
    return {
        "graft_beta2": (
            "graft_beta2" not in graft.reads,
            f"with graft={graft_name(group)!r}; only {' and '.join(map(repr, users))} use it",
        ),
        "graft_eps": (
            "graft_eps" not in graft.reads and group["large_dim"] != "adagrad",
            f"with graft={graft_name(group)!r}; it has no denominator",
        ),
    }


def _method_options(group: Group, changed: Collection[str]) -> dict[str, str]:
    """Options that only other methods read."""
    method = METHODS.get(group["preconditioner"])
    if method is None:
        return {}
    found = {}
    for name in OPTIONS:
        if name in changed and name not in method.reads and (users := readers(name)):
            found[name] = f"with preconditioner={method.name!r}; it is read by {', '.join(map(repr, users))}"
    return found | method.idle(group)


def idle_on(device: str, group: Group) -> list[str]:
    """Options that do nothing for parameters on a device, in words. They raise no error, so that a script runs anywhere."""
    kind, notes = torch.device(device).type, []
    if group["root_device"] == kind:
        notes.append(f"root_device={kind!r} has no effect on {kind}: roots are computed there anyway")
    if (group["precision"] == "fast" and kind != "cuda") or (group["precision"] and kind not in ("cuda", "cpu")):
        notes.append(f"precision={group['precision']!r} has no effect on {kind}: products are as torch is set")
    return notes
