"""Every option of the optimizer: its default, what it accepts, and one line on what it means.

Options live in the param groups as plain numbers, strings, bools, None and tuples, because checkpoints, schedulers and
``torch.load(weights_only=True)`` accept nothing else. They are read on every step.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from . import roots

Check = Callable[[str, Any], Any]
NOBODYS: Mapping[str, str | None] = {}


def _fail(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name}={value!r} is not valid: it must be {allowed}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = True) -> Check:
    bounds = f"{'more than' if open_low else 'at least'} {low:g}"
    bounds += f" and {'less than' if open_high else 'at most'} {high:g}" if high < math.inf else " and finite"

    def check(name: str, value: Any) -> Any:
        if not _is_number(value):
            raise _fail(name, value, f"a number, {bounds}")
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
        if not (above and below):
            raise _fail(name, value, bounds)
        return value if type(value) in (int, float) else float(value)  # NumPy's numbers do not survive in checkpoints

    return check


def _lr(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise _fail(name, value, "a number or a tensor of one element")
        if not 0 <= value.item() < math.inf:
            raise _fail(name, value, "at least 0 and finite")
        return value
    return _number(0)(name, value)


def _betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise _fail(name, value, "a pair (beta1, beta2)")
    return _number(0, 1)("betas[0]", value[0]), _number(0, 1, open_high=False)("betas[1]", value[1])


def _powers(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise _fail(name, value, "a pair of powers, of the learning rate and of the step")
    return _number(0)(f"{name}[0]", value[0]), _number(0)(f"{name}[1]", value[1])


def _count(low: int, *, infinite: bool = False) -> Check:
    allowed = f"a whole number of at least {low}" + (" or infinity" if infinite else "")

    def check(name: str, value: Any) -> Any:
        if infinite and value == math.inf:
            return math.inf
        if not _is_number(value) or not low <= value < math.inf or value != int(value):
            raise _fail(name, value, allowed)
        return int(value)

    return check


def _split(name: str, value: Any) -> Any:
    """A number of parts, or the size of each."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 1:
        return tuple(_count(1)(f"{name}[{i}]", size) for i, size in enumerate(value))
    if isinstance(value, Sequence) or not _is_number(value):
        raise _fail(name, value, "a number of equal parts, or the sizes of two parts or more")
    return _count(2)(name, value)


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _fail(name, value, "True or False")
    return value


def _choice(*names: str | None, meanings: Sequence[str] = (), others: Mapping[str, str | None] = NOBODYS) -> Check:
    """``meanings``: of the names, where they do not tell it; ``others``: what other libraries call them."""
    allowed = (
        [f"{name!r} ({text})" for name, text in zip(names, meanings, strict=True)] if meanings else map(repr, names)
    )
    listed = "one of " + ", ".join(allowed)

    def check(name: str, value: Any) -> Any:
        if value in names:
            return value
        close = difflib.get_close_matches(str(value), [n for n in names if n], n=1)
        guesses = [others[value]] if isinstance(value, str) and value in others else close
        raise _fail(name, value, listed + (f"; did you mean {guesses[0]!r}?" if guesses else ""))

    return check


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _exponent(name: str, value: Any) -> Any:
    """A number, or pairs ``((order, number), ...)``: a mapping does not survive in a param group."""
    if isinstance(value, Mapping):
        return tuple(sorted(_exponent(name, tuple(value.items()))))
    if isinstance(value, Sequence) and not isinstance(value, str):
        if any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in value):
            raise _fail(name, value, "a number or a mapping from orders to numbers")
        return tuple((_count(1)(f"{name} order", k), _number(0)(f"{name}[{k}]", v)) for k, v in value)
    return _number(0)(name, value)


def _root(name: str, value: Any) -> str:
    return value if value == "auto" else roots.spell(roots.parse(value))


def _polar(name: str, value: Any) -> str:
    return roots.spell(roots.parse_polar(value))


def dtype_name(name: str, value: Any) -> str:
    spelled = str(value).removeprefix("torch.")
    return str(_choice("float32", "float64", "bfloat16", "float16")(name, spelled))


def _wire(name: str, value: Any) -> str:
    return str(_choice("float32", "bfloat16", "float16", "int8")(name, str(value).removeprefix("torch.")))


_precision = _choice(
    None,
    "float32",
    "fast",
    meanings=("as torch's float32 matmul precision is set", "exact to float32", "the 11 bits of TF32, on a GPU"),
    others={"tf32": "fast", "high": "fast", "medium": "fast", "ieee": "float32", "highest": "float32"},
)
_polar_scale = _choice(
    None,
    "original",
    "match_rms_adamw",
    meanings=("as it is", "times sqrt(max(1, rows / columns))", "times 0.2 sqrt(max(rows, columns))"),
    others={"none": None, "adamw": "match_rms_adamw", "moonshot": "match_rms_adamw", "keller": "original"},
)
_averaging = _choice(
    None,
    "schedule_free",
    "gpa",
    others={"none": None, "schedulefree": "schedule_free", "sf": "schedule_free", "primal": "gpa"},
)
_root_device = _choice(
    None,
    "cpu",
    meanings=("where the parameter is", "on the host"),
    others={"cuda": None, "gpu": None, "host": "cpu"},
)


@dataclass(frozen=True)
class Option:
    default: Any
    check: Check
    text: str
    structural: bool = False  # decides which blocks and state there are, so it is fixed once training has begun


OPTIONS: dict[str, Option] = {
    "lr": Option(1e-3, _lr, "learning rate; a number or a one-element tensor"),
    "betas": Option((0.9, 0.95), _betas, "decay of the gradient filter and of the statistics; `betas[1] = 1` is the AdaGrad sum"),
    "beta3": Option(None, _optional(_number(0, 1)), "weight of the filtered gradient inside the direction; default `betas[0]`"),
    "eps": Option(None, _optional(_number(0, open_low=True)), "added to the eigenvalues of every factor, as `damping` says; for `\"soap\"`, to Adam's denominator; default 1e-12, for `\"kl\"` 1e-6, for `\"soap\"` 1e-8"),
    "damping": Option("absolute", _choice("absolute", "relative"), "`eps` as it is, or times each factor's size: its Schatten 4-norm, a bound of the largest eigenvalue"),
    "weight_decay": Option(0.0, _number(0), "strength of weight decay"),
    "weight_decay_mode": Option("decoupled", _choice("decoupled", "l2", "corrected", "independent"), "how decay enters; see [algorithm](algorithm.md)"),
    "momentum": Option(0.0, _number(0, 1), "heavy-ball momentum on the direction"),
    "dampening": Option(0.0, _number(0, 1, open_high=False), "dampening of momentum"),
    "nesterov": Option(False, _bool, "Nesterov's form of momentum"),
    "averaging": Option(None, _averaging, "in the place of momentum: `\"schedule_free\"`, or `\"gpa\"` (generalised primal averaging); needs `opt.train()` and `opt.eval()`, see [algorithm](algorithm.md#averaging)", structural=True),
    "averaging_beta": Option(None, _optional(_number(0, 1, open_high=False)), "how much of the average is in the point at which gradients are taken, GPA's mu_y; default 0.9, for `\"gpa\"` 0.7", structural=True),
    "averaging_decay": Option(None, _optional(_number(0, 1)), "how much of the average of `\"gpa\"` is kept in a step, its mu_x; default 0.9967"),
    "averaging_powers": Option((2.0, 0.0), _powers, "of the largest learning rate so far and of the step: their product is the step's weight in the average of `\"schedule_free\"`"),
    "maximize": Option(False, _bool, "ascend instead of descend"),
    "bias_correction": Option(True, _bool, "correct the averages for their start at zero"),
    "preconditioner": Option("shampoo", _choice("shampoo", "soap", "kl", "spectral", None, others={"muon": "spectral"}), "the method: `\"shampoo\"`, `\"soap\"`, which is Adam in the eigenbases of Shampoo's factors, `\"kl\"` (KL-Shampoo), whose factors see the gradient preconditioned by each other, or `\"spectral\"` (Muon), which orthogonalises the filtered gradient of every block; `None`: elementwise, by the graft alone, which is then Adam if it is `None`", structural=True),
    "exponent": Option(None, _optional(_exponent), "root exponent for all modes, or `{order: exponent}`; default `1 / (2 order)`, always `1 / 2` for `\"kl\"`; 0 leaves modes alone"),
    "exponent_multiplier": Option(1.0, _number(0, open_low=True), "multiplies the default exponent (1.82 in the paper for fully connected networks)"),
    "root": Option("auto", _root, "root solver: `\"auto\"`, `\"eigh\"`, `\"newton\"`, `\"higher_order\"`, `\"minimax\"`, `\"qr\"`, `\"track\"` or a solver object; for `\"soap\"` one that gives a basis: `\"eigh\"`, `\"qr\"` or `\"track\"`"),
    "polar": Option("newton_schulz", _polar, "how `\"spectral\"` orthogonalises: `\"newton_schulz\"` (Muon's quintic, `steps=5`, with other `coefficients` if given), `\"polar_express\"` (the best quintics, `steps=5, lower=1e-3`), `\"svd\"` (exact, slow) or an object"),
    "polar_scale": Option(None, _polar_scale, "what `\"spectral\"` without a graft multiplies directions by: `\"original\"` `sqrt(max(1, rows / columns))`, `\"match_rms_adamw\"` `0.2 sqrt(max(rows, columns))`; default: nothing"),
    "graft": Option("adam", _choice("adam", "rmsprop", "adagrad", "sgd", None), "method whose step size is taken over", structural=True),
    "graft_beta2": Option(None, _optional(_number(0, 1)), "decay of the graft's second moment; default `betas[1]`, 0.999 when that is 1"),
    "graft_eps": Option(1e-8, _number(0, open_low=True), "added to the graft's denominator"),
    "max_preconditioner_dim": Option(1024, _count(1, infinite=True), "largest factor, or side of a block; larger dimensions follow `large_dim`", structural=True),
    "merge_dims": Option(True, _bool, "fold small neighbouring dimensions together", structural=True),
    "large_dim": Option("block", _choice("block", "diagonal", "adagrad"), "a dimension above the limit: cut it, keep its factor's diagonal, or use diagonal AdaGrad", structural=True),
    "batch_dims": Option(0, _count(0), "leading dimensions that stack independent parameters, such as experts", structural=True),
    "split": Option(None, _optional(_split), "cuts a parameter into parts before all else, such as fused queries, keys and values: a number of equal ones, or their sizes", structural=True),
    "split_dim": Option(0, _count(0), "the dimension that `split` cuts", structural=True),
    "precondition_1d": Option(False, _bool, "give vectors a full matrix of their own", structural=True),
    "precondition_frequency": Option(10, _count(1), "steps between refreshes of a block's roots"),
    "start_preconditioning_step": Option(None, _optional(_count(1, infinite=True)), "first preconditioned step; default `precondition_frequency`, with `refresh_warmup` 1 (`\"soap\"`: 2), for `\"spectral\"` 1; infinity: never"),
    "refresh_warmup": Option(0.0, _number(0, 1), "refreshes more often at first, so that no root is much older than this part of the steps taken (0.1: every step up to the 19th, every 2 up to the 39th, every 4 ...); not with `refresh_delay`"),
    "refresh": Option("together", _choice("together", "staggered"), "refresh all blocks at once, or spread them over the period, with the same work in every step that has some"),
    "refresh_delay": Option(0, _count(0), "steps from a refresh to the first use of its roots. Until then they are computed beside the training, on a CUDA device by a stream of its own; takes the memory of the roots once more"),
    "root_device": Option(None, _root_device, "`\"cpu\"`: compute roots on the host, for a device without a solver; with `refresh_delay`, in a thread. No effect where parameters are on the host"),
    "on_nonfinite": Option("skip", _choice("skip", "raise"), "a block with NaN or Inf in its gradient sits the step out, or the step raises (which reads the device on every step)"),
    "max_failed_refreshes": Option(3, _count(0), "failed refreshes in a row that one block may have"),
    "communication_dtype": Option(None, _optional(_wire), "rounds directions for their way to the ranks that store the parameter: `\"float32\"`, `\"bfloat16\"`, `\"float16\"`, or `\"int8\"` with a scale per block; default: not rounded"),
    "blocks": Option("global", _choice("global", "local"), "cut blocks from whole parameters, or from each shard, so that no gradient travels and results depend on the sharding", structural=True),
    "precision": Option(None, _precision, "products that make statistics and apply roots: `\"float32\"`, or on a GPU `\"fast\"` with the 11 bits of TF32; default: as torch's float32 matmul precision. Roots are computed in float32 either way"),
    "state_dtype": Option("float32", dtype_name, "dtype of the state; arithmetic is in float32 or better", structural=True),
    "root_dtype": Option(None, _optional(dtype_name), "dtype that roots are kept in; default `state_dtype`", structural=True),
    "factors": Option("full", _choice("full", "packed"), "keep factors whole, or their lower triangles only: the same numbers in half the memory", structural=True),
}  # fmt: skip

# How the work is done, not what is computed: arguments of the constructor that are not kept in param groups and checkpoints.
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "process_group": (None, "the ranks that share the work on plain tensors; default: all. A DTensor has the ranks of its mesh"),
    "num_trainers_per_group": (None, "ranks that share the work; every other so many repeat it and exchange nothing with them; default: all ranks that store a parameter"),
    "stages": (1, "parts of a step: while one's directions are on the wire the next is computed"),
    "check_ranks": (False, "for debugging: before every step ranks compare their options, and which parameters have a gradient, and fail together where they differ"),
}  # fmt: skip

FLAGS = ("foreach", "fused", "capturable", "differentiable", "amsgrad")  # of torch's optimizers, none of which we have
# Arguments of presets, and the option that they become there; everywhere else they are mistakes.
OF_PRESETS = {
    "factor_eps": "eps",
    "decoupled_weight_decay": "weight_decay_mode",
    "ns_steps": "polar",
    "ns_coefficients": "polar",
    "adjust_lr_fn": "polar_scale",
    "max_precond_dim": "max_preconditioner_dim",
    "correct_bias": "bias_correction",
}
# Without effect where there are no roots. Plain numbers, such as eps, may stay when the method is changed.
OF_ROOTS = (
    "root",
    "exponent",
    "exponent_multiplier",
    "damping",
    "refresh_warmup",
    "refresh",
    "refresh_delay",
    "root_device",
    "root_dtype",
    "factors",
)
# Without effect where there are bases instead of roots.
NOT_OF_BASES = ("exponent", "exponent_multiplier", "damping", "root_dtype")
# Roots that make the next factors need more than those that do not; SOAP's is Adam's.
EPS = {"kl": 1e-6, "soap": 1e-8}
STRUCTURAL = tuple(name for name, option in OPTIONS.items() if option.structural)


def refuse_flags(given: Mapping[str, Any]) -> None:
    for flag in FLAGS:
        if given.get(flag):
            raise ValueError(f"{flag}=True is not implemented by Shampoo; leave it out")


def check_options(group: dict[str, Any], own: Collection[str] = (), defaults: Mapping[str, Any] | None = None) -> None:
    """Validate and normalise the options that a user gave a param group: its ``own``, and for the rest the ``defaults``.

    An option that would do nothing is a mistake the user should hear about, unless it is a default that is there for others.
    """
    check_values(group)
    idle = _without_effect(group)
    if idle and defaults is not None:
        usual = dict(defaults)
        check_values(usual)
        idle = {name: why for name, why in idle.items() if name in own or name in _without_effect(usual)}
    for name, why in idle.items():
        raise ValueError(f"{name}={group[name]!r} has no effect {why}; remove it or change the other option")


def check_values(group: dict[str, Any], seen: dict[str, Any] | None = None) -> None:
    """Validate and normalise a param group's options in place; raise ``ValueError`` on the first that is wrong.

    ``seen`` remembers what has been found good, so that doing this on every step costs next to nothing.
    """
    seen = {} if seen is None else seen
    changed = [name for name in OPTIONS if name not in seen or group[name] is not seen[name]]
    for name in changed:
        group[name] = OPTIONS[name].check(name, group[name])
    if group["eps"] is None:
        group["eps"] = EPS.get(group["preconditioner"], 1e-12)
    if group["preconditioner"] is None and group["graft"] is None:
        group["graft"] = "adam"
    if not group["refresh_delay"] < group["precondition_frequency"]:
        raise ValueError(
            f"refresh_delay={group['refresh_delay']} must be less than precondition_frequency={group['precondition_frequency']}: "
            "roots would be computed anew before they are used; lower the delay or raise the frequency"
        )
    if group["refresh_delay"] and group["refresh_warmup"]:
        raise ValueError(
            f"refresh_warmup={group['refresh_warmup']} does not go with refresh_delay={group['refresh_delay']}: "
            "roots would be computed anew before they are used; set one of them to 0"
        )
    if group["averaging"] is not None and group["momentum"] > 0:
        raise ValueError(
            f"momentum={group['momentum']!r} beside averaging={group['averaging']!r}: averaging takes the place of momentum, so set "
            "momentum=0 (docs/algorithm.md says which averaging is the same), or averaging=None"
        )
    if group["root"] != "auto" and not {"root", "exponent", "exponent_multiplier"}.isdisjoint(changed):
        _check_exponents(group)
    seen.update({name: group[name] for name in changed})


def _check_exponents(group: Mapping[str, Any]) -> None:
    solver = roots.resolve_basis(group["root"], "cpu") if is_soap(group) else roots.parse(group["root"])
    given = dict(group["exponent"]) if isinstance(group["exponent"], tuple) else {}
    for order in given or (1, 2, 3):
        if e := exponent(group, order):
            solver.check(e)


def _without_effect(group: Mapping[str, Any]) -> dict[str, str]:
    """Options that do nothing beside the others, and why."""
    no_filter, no_momentum = group["betas"][0] == 0, group["momentum"] == 0
    idle = [
        ("beta3", group["beta3"] is not None and no_filter, "without betas[0] > 0"),
        ("dampening", group["dampening"] != 0 and no_momentum, "without momentum > 0"),
        ("nesterov", group["nesterov"] and no_momentum, "without momentum > 0"),
        ("averaging_beta", group["averaging_beta"] is not None and group["averaging"] is None, "without averaging"),
        ("averaging_decay", group["averaging_decay"] is not None and group["averaging"] != "gpa",
         f"with averaging={group['averaging']!r}; only 'gpa' uses it"),
        ("averaging_powers", group["averaging_powers"] != OPTIONS["averaging_powers"].default
         and group["averaging"] != "schedule_free", f"with averaging={group['averaging']!r}; only 'schedule_free' uses it"),
        ("graft_beta2", group["graft_beta2"] is not None and elementwise(group) not in ("adam", "rmsprop"),
         f"with graft={group['graft']!r}; only 'adam' and 'rmsprop' use it"),
        ("graft_eps", group["graft_eps"] != OPTIONS["graft_eps"].default and elementwise(group) in ("sgd", None)
         and group["large_dim"] != "adagrad", f"with graft={group['graft']!r}; it has no denominator"),
        *((name, group[name] > 0 and group["start_preconditioning_step"] == math.inf,
           "with start_preconditioning_step=inf; nothing is ever refreshed") for name in ("refresh_delay", "refresh_warmup")),
        ("split_dim", group["split_dim"] != 0 and group["split"] is None, "without split"),
        ("exponent_multiplier", group["exponent_multiplier"] != 1 and isinstance(group["exponent"], (int, float)),
         "beside exponent, which replaces the default that it multiplies"),
        ("root_dtype", group["root_dtype"] == "float64" and group["state_dtype"] != "float64",
         f"with state_dtype={group['state_dtype']!r}: roots are computed in float32"),
        *((name, is_spectral(group) and group[name] != OPTIONS[name].default, "with preconditioner='spectral', which has no roots")
          for name in OF_ROOTS),
        ("large_dim", is_spectral(group) and group["large_dim"] == "diagonal",
         "with preconditioner='spectral', which has no factors; use 'block' or 'adagrad'"),
        *((name, is_soap(group) and group[name] != OPTIONS[name].default, "with preconditioner='soap', which has bases and no roots")
          for name in NOT_OF_BASES),
        *((name, group["preconditioner"] in ("shampoo", "soap", "kl") and group[name] != OPTIONS[name].default,
           f"with preconditioner={group['preconditioner']!r}; only 'spectral' uses it") for name in ("polar", "polar_scale")),
        *((name, group["preconditioner"] == "kl" and group[name] != OPTIONS[name].default,
           "with preconditioner='kl', which is made of roots of exponent 1/2") for name in ("exponent", "exponent_multiplier")),
        ("polar_scale", is_spectral(group) and group["polar_scale"] is not None and group["graft"] is not None
         and group["start_preconditioning_step"] != math.inf,
         f"with graft={group['graft']!r}, which decides how long directions are"),
    ]  # fmt: skip
    found: dict[str, str] = {}
    for name, useless, why in idle:
        if useless:
            found.setdefault(name, why)
    return found


def idle_on(device: str, group: Mapping[str, Any]) -> list[str]:
    """Options that do nothing for parameters on such a device, in words. No mistake: a script may run on any."""
    kind, notes = torch.device(device).type, []
    if group["root_device"] == kind:
        notes.append(f"root_device={kind!r} has no effect on {kind}: roots are computed there anyway")
    if (group["precision"] == "fast" and kind != "cuda") or (group["precision"] and kind not in ("cuda", "cpu")):
        notes.append(f"precision={group['precision']!r} has no effect on {kind}: products are as torch is set")
    return notes


def whole(name: str, value: Any) -> int:
    """A whole number of at least 1."""
    return int(_count(1)(name, value))


def hint(name: str) -> str:
    """How a message about an unknown option goes on: what was probably meant, if that can be told."""
    if name in OF_PRESETS:
        return f"; in Shampoo it is {OF_PRESETS[name]!r}"
    found = difflib.get_close_matches(name, (*OPTIONS, *OF_PRESETS), n=1, cutoff=0.85)
    return f"; did you mean {found[0]!r}?" if found else ""


def exponent(group: Mapping[str, Any], order: int) -> float:
    """The exponent ``e`` of a block of this order: roots are ``(L + eps I)^(-e)``."""
    given = group["exponent"]
    if isinstance(given, (tuple, list)):
        given = dict(given).get(order)
    fixed = group["preconditioner"] in ("kl", "soap")  # a basis has none, but one for all lets all be solved together
    usual = 0.5 if fixed else group["exponent_multiplier"] / (2 * order)
    return float(usual if given is None else given)


def is_spectral(group: Mapping[str, Any]) -> bool:
    """Whether there are polar factors instead of factors and roots."""
    return bool(group["preconditioner"] == "spectral")


def is_soap(group: Mapping[str, Any]) -> bool:
    """Whether there are eigenbases instead of roots."""
    return bool(group["preconditioner"] == "soap")


def elementwise(group: Mapping[str, Any]) -> str | None:
    """The method of parameters without factors: the graft's or, for SOAP without one, Adam, which it is without bases."""
    return "adam" if is_soap(group) and group["graft"] is None else group["graft"]


def solver(group: Mapping[str, Any], d: int, device: torch.device | str, order: int) -> roots.RootSolver:
    """What refreshes factors of size ``d`` of blocks of this order."""
    if is_soap(group):
        return roots.resolve_basis(group["root"], device)
    return roots.resolve(group["root"], d, device, exponent(group, order))


def graft_beta2(group: Mapping[str, Any]) -> float:
    if group["graft_beta2"] is not None:
        return float(group["graft_beta2"])
    return 0.999 if group["betas"][1] == 1 else float(group["betas"][1])


def averaging_beta(group: Mapping[str, Any]) -> float:
    usual = 0.7 if group["averaging"] == "gpa" else 0.9
    return float(usual if group["averaging_beta"] is None else group["averaging_beta"])


def averaging_decay(group: Mapping[str, Any]) -> float:
    return float(0.9967 if group["averaging_decay"] is None else group["averaging_decay"])


def state_dtype(group: Mapping[str, Any]) -> torch.dtype:
    return getattr(torch, group["state_dtype"])  # type: ignore[no-any-return]


def root_dtype(group: Mapping[str, Any]) -> torch.dtype:
    return getattr(torch, group["root_dtype"] or group["state_dtype"])  # type: ignore[no-any-return]


def compute_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """float32, or better where the state is."""
    return torch.promote_types(state_dtype(group), torch.float32)


def with_choices(group: Mapping[str, Any], choices: roots.Choices) -> Mapping[str, Any]:
    """The group with the solvers that were measured in the place of ``root="auto"``."""
    return {**group, "root": choices} if choices and is_measured(group) else group


def is_measured(group: Mapping[str, Any]) -> bool:
    """Whether solvers are to be measured for it; that is done in float32."""
    auto = group["root"] == "auto" and not group["root_device"] and not is_spectral(group) and not is_soap(group)
    return auto and compute_dtype(group) == torch.float32


def products(group: Mapping[str, Any]) -> str | None:
    """How torch is to multiply in a step; None as the user has set it."""
    return {"float32": "ieee", "fast": "tf32"}.get(group["precision"])


def wire_dtype(group: Mapping[str, Any]) -> str:
    """What directions travel as."""
    return str(group["communication_dtype"] or str(compute_dtype(group)).removeprefix("torch."))


def markdown() -> str:
    """``docs/options.md``."""
    rows = [
        f"| `{name}` | `{option.default!r}` | {option.text}{' †' if option.structural else ''} |"
        for name, option in OPTIONS.items()
    ]
    return "\n".join(
        [
            "# Options of `lather.Shampoo`",
            "",
            "Written by `python -m lather options`. Every option may be given for all parameters or per param group, and is read",
            "on every step, so schedulers may change it; those marked † decide which blocks and state there are and are fixed",
            "after the first step. A value out of range, and an option that would have no effect beside the others, is a",
            "`ValueError`; one that has no effect on a device is not, so that a script runs on any, but `opt.plan()` says so.",
            "`python -m lather plan` takes them all: `max_preconditioner_dim` is `--max-preconditioner-dim 2048`.",
            "",
            "| option | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
            "## Arguments of the constructor only",
            "",
            "How the work is done, not what is computed. A checkpoint does not hold them.",
            "",
            "| argument | default | meaning |",
            "|---|---|---|",
            *(f"| `{name}` | `{default!r}` | {text} |" for name, (default, text) in ARGUMENTS.items()),
        ]
    )
