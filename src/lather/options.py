"""Every option of the optimizer: its default, what it accepts, and one line on what it means.

Options live in the param groups as plain numbers, strings, bools, None and tuples, because checkpoints, schedulers and
``torch.load(weights_only=True)`` accept nothing else. ``settings.py`` makes typed settings of them.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from . import roots
from .methods import GRAFTS, METHODS

Check = Callable[[str, Any], Any]
AUTO, NESTEROV = "auto", "nesterov"
NO_ALIASES: Mapping[str, str | None] = {}
LARGEST = (1 << 63) - 1  # Python's whole numbers have no limit, but arithmetic on larger ones may fail


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
        if not (above and below) or (isinstance(value, int) and value > LARGEST):
            raise _fail(name, value, bounds)
        return value if type(value) in (int, float) else float(value)  # NumPy's numbers do not survive in checkpoints

    return check


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether it is an ordinary tensor of real numbers: not sparse, complex, quantised, or on the meta device."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return plain and not tensor.is_quantized and not tensor.is_complex()


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether it can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _lr(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_readable(value) or value.numel() != 1:
            raise _fail(name, value, "a number or a tensor of one element")
        if not 0 <= value.reshape(1).tolist()[0] < math.inf:
            raise _fail(name, value, "at least 0 and finite")
        return value
    return _number(0)(name, value)


def _pair(first: Check, second: Check, what: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise _fail(name, value, f"a pair {what}")
        return first(f"{name}[0]", value[0]), second(f"{name}[1]", value[1])

    return check


def _count(low: int, *, infinite: bool = False) -> Check:
    allowed = f"a whole number of at least {low}" + (" or infinity" if infinite else "")

    def check(name: str, value: Any) -> Any:
        if infinite and value == math.inf:
            return math.inf
        if not _is_number(value) or not low <= value < math.inf or value != int(value):
            raise _fail(name, value, allowed)
        if value > LARGEST:
            raise _fail(name, value, f"{allowed}, up to {LARGEST}")
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


def _choice(*names: str | None, meanings: Sequence[str] = (), others: Mapping[str, str | None] = NO_ALIASES) -> Check:
    """``meanings`` explain the names; ``others`` are the words of other libraries for them."""
    allowed = [f"{name!r} ({text})" for name, text in zip(names, meanings, strict=True)] if meanings else map(repr, names)
    listed = "one of " + ", ".join(allowed)

    def check(name: str, value: Any) -> Any:
        if (value is None or isinstance(value, str)) and value in names:
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


def _exponent_or_word(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if value not in (AUTO, "paper"):
            raise _fail(name, value, "a number of at least 0, 'auto', 'paper' or a mapping from orders to numbers")
        return AUTO if value == AUTO else None
    return None if value is None else _exponent(name, value)


def _beta3(name: str, value: Any) -> Any:
    if value is None or value == NESTEROV:
        return value
    if isinstance(value, str):
        raise _fail(name, value, f"a number, at least 0 and less than 1, {NESTEROV!r} or None")
    return _number(0, 1)(name, value)


def _root(name: str, value: Any) -> str:
    return AUTO if value == AUTO else roots.spell(roots.parse(value))


def _polar(name: str, value: Any) -> str:
    return roots.spell(roots.parse_polar(value))


def _dtype(*names: str) -> Check:
    return lambda name, value: str(_choice(*names)(name, str(value).removeprefix("torch.")))


dtype_name = _dtype("float32", "float64", "bfloat16", "float16")


_power = _number(0, 16, open_high=False)  # of a step count: more may overflow


def _state_dtype(name: str, value: Any) -> str:
    if str(value).removeprefix("torch.") == "float16":
        why = "in float16 squares of gradients below 2e-4 are zero, and bfloat16 takes as many bytes"
        raise _fail(name, value, f"'float32', 'float64' or 'bfloat16'; {why}")
    return str(_dtype("float32", "float64", "bfloat16")(name, value))


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
    None, "schedule_free", "gpa", others={"none": None, "schedulefree": "schedule_free", "sf": "schedule_free", "primal": "gpa"}
)
_root_device = _choice(
    None, "cpu", meanings=("where the parameter is", "on the host"), others={"cuda": None, "gpu": None, "host": "cpu"}
)


REQUIRED = object()


@dataclass(frozen=True)
class Option:
    default: Any
    check: Check
    wording: str | Callable[[], str]  # a function where it depends on which methods there are
    structural: bool = False  # decides which blocks and state there are, so it is fixed once training has begun
    before: Any = REQUIRED  # the value that it had in checkpoints from before it existed; REQUIRED if it always has

    @property
    def text(self) -> str:
        return self.wording if isinstance(self.wording, str) else self.wording()


def _named(name: str | None) -> str:
    return f'`"{name}"`' if name else "`None`"


def _methods() -> str:
    """What `preconditioner` may be, in words."""
    return "; ".join(f"{_named(name)}: {method.text}" for name, method in METHODS.items())


def _default_eps() -> str:
    found: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        numbers = method.default_eps
        text = f"{numbers['relative']:g}"
        text += f" ({numbers['absolute']:g} if absolute)" if numbers["absolute"] != numbers["relative"] else ""
        found.setdefault(text, []).append(_named(name))
    return "default " + "; ".join(f"{text} for {', '.join(names)}" for text, names in found.items())


def _method(name: str, value: Any) -> Any:
    """Methods may be registered at any time, so this looks them up when it is called."""
    aliases = {alias: key for key, method in METHODS.items() for alias in method.aliases}
    return _choice(*METHODS, None, others=aliases)(name, value)


def readers(option: str) -> list[str]:
    """The methods that read an option which means nothing to others. Empty if it is none of those."""
    return [name for name, method in METHODS.items() if option in method.reads]


DEFAULT = next(iter(METHODS))

OPTIONS: dict[str, Option] = {
    "lr": Option(1e-3, _lr, "learning rate: a number or a one-element tensor"),
    "betas": Option((0.95, 0.95), _pair(_number(0, 1), _number(0, 1, open_high=False), "(beta1, beta2)"), "decay of the gradient filter and of the statistics; `betas[1] = 1` is the AdaGrad sum"),
    "beta3": Option(NESTEROV, _beta3, "weight of the remembered gradients in the filtered gradient: a number, `None` for `betas[0]`, or `\"nesterov\"` for `betas[0]**2` in preconditioned blocks and `betas[0]` in all others"),
    "eps": Option(None, _optional(_number(0, open_low=True)), lambda: f"damping: added to the eigenvalues of every factor, or to the denominator of a method that has one; {_default_eps()}"),
    "damping": Option("relative", _choice("absolute", "relative"), "`\"absolute\"`: use `eps` as it is. `\"relative\"`: multiply it by each factor's size (the Schatten 4-norm, a bound of the largest eigenvalue; for SOAP by the mean of the denominator). Then nothing depends on the size of gradients. If you change it in training, set `eps` too"),
    "weight_decay": Option(0.0, _number(0), "strength of weight decay"),
    "weight_decay_mode": Option("decoupled", _choice("decoupled", "l2", "corrected", "independent"), "how decay enters: `\"decoupled\"` as in AdamW, `\"l2\"` as part of the gradient, `\"corrected\"` or `\"independent\"`; see [algorithm](algorithm.md)"),
    "momentum": Option(0.0, _number(0, 1), "heavy-ball momentum on the direction"),
    "dampening": Option(0.0, _number(0, 1, open_high=False), "dampening of momentum"),
    "nesterov": Option(False, _bool, "Nesterov's form of momentum"),
    "averaging": Option(None, _averaging, "instead of momentum: `\"schedule_free\"`, or `\"gpa\"` (generalised primal averaging); needs `opt.train()` and `opt.eval()`, see [algorithm](algorithm.md#averaging)", structural=True),
    "averaging_beta": Option(None, _optional(_number(0, 1, open_high=False)), "weight of the average in the point at which gradients are taken (GPA's mu_y); default 0.9, 0.7 for `\"gpa\"`", structural=True),
    "averaging_decay": Option(None, _optional(_number(0, 1)), "fraction of the average of `\"gpa\"` that a step keeps (its mu_x); default 0.9967"),
    "averaging_powers": Option((2.0, 0.0), _pair(_power, _power, "of powers, of the learning rate and of the step"), "`(p, r)`: in the average of `\"schedule_free\"`, step `t` has weight `max_lr**p * t**r`"),
    "maximize": Option(False, _bool, "ascend instead of descend"),
    "bias_correction": Option(True, _bool, "correct the averages for their start at zero"),
    "preconditioner": Option(DEFAULT, _method, lambda: f"the method. {_methods()}; `None`: no preconditioning, the graft alone (Adam if that is `None` too)", structural=True),
    "exponent": Option(AUTO, _exponent_or_word, "exponent of the inverse roots: a number for all modes; `\"paper\"` or `None` for the paper's `1 / (2 order)`; or `{order: exponent}`, where other orders follow the paper. 0 leaves a mode alone. `\"auto\"` is 0.5, or the paper's without a graft, because steps would then depend on the size of gradients"),
    "exponent_multiplier": Option(1.0, _number(0, open_low=True), "other than 1: the paper's exponent times this (1.82 in the paper for fully connected networks)"),
    "root": Option(AUTO, _root, "root solver: `\"auto\"`, `\"eigh\"`, `\"newton\"`, `\"higher_order\"`, `\"minimax\"`, `\"track\"` or a solver object. A method that needs bases takes `\"eigh\"` or `\"track\"`"),
    "polar": Option("newton_schulz", _polar, "how gradients are orthogonalised: `\"newton_schulz\"` (Muon's quintic; `steps=5`, `coefficients`), `\"polar_express\"` (the best quintics; `steps=5`, `lower=1e-3`), `\"svd\"` (exact, slow) or an object"),
    "polar_scale": Option(None, _polar_scale, "without a graft, multiplies orthogonalised directions: `\"original\"` by `sqrt(max(1, rows / columns))`, `\"match_rms_adamw\"` by `0.2 sqrt(max(rows, columns))`; default: by 1"),
    "graft": Option(AUTO, _choice(AUTO, *GRAFTS), "the method whose step length is taken over, block by block. `\"adafactor\"` is Adam with a second moment of rank one, which is read off Shampoo's factors. `\"constant\"` gives every block a root mean square of 0.2 per element, as Muon's `match_rms_adamw`. Both keep no second moment, and leave elementwise parameters to Adam. `\"auto\"` is settled by the first step: `\"adafactor\"` with Shampoo, unless `betas[1]` is 1, `graft_beta2` is set or `start_preconditioning_step` is infinite; else `\"adam\"`", structural=True),
    "graft_beta2": Option(None, _optional(_number(0, 1)), "decay of the graft's second moment; default `betas[1]`, or 0.999 when that is 1. `\"adafactor\"` uses the decay of the factors, `betas[1]`"),
    "graft_eps": Option(1e-8, _number(0, open_low=True), "added to the graft's denominator"),
    "max_preconditioner_dim": Option(1024, _count(1, infinite=True), "largest side of a factor or block; larger dimensions follow `large_dim`", structural=True),
    "block_multiple": Option(16, _count(1), "if a dimension is not cut evenly, block sizes are rounded up to a multiple of this, for tensor cores, and the last block takes the rest. 1: nearly equal blocks", structural=True),
    "merge_dims": Option(True, _bool, "fold small neighbouring dimensions together", structural=True),
    "large_dim": Option("block", _choice("block", "diagonal", "adagrad"), "for a dimension above the limit. `\"block\"`: cut it into blocks. `\"diagonal\"`: keep only the diagonal of its factor. `\"adagrad\"`: give the parameter diagonal AdaGrad", structural=True),
    "batch_dims": Option(0, _count(0), "number of leading dimensions that stack independent parameters, such as experts", structural=True),
    "split": Option(None, _optional(_split), "cuts a parameter into independent parts first, such as fused queries, keys and values: a number of equal parts, or their sizes", structural=True),
    "split_dim": Option(0, _count(0), "the dimension that `split` cuts", structural=True),
    "precondition_1d": Option(False, _bool, "give vectors a full matrix of their own", structural=True),
    "precondition_frequency": Option(10, _count(1), "steps between refreshes of a block's roots"),
    "start_preconditioning_step": Option(None, _optional(_count(1, infinite=True)), "first preconditioned step; infinity: never. Default: the step of the first refresh, or 1 for a method without refreshes"),
    "refresh_warmup": Option(0.1, _number(0, 1), "refresh more often early in training: the age of a root stays below this fraction of the step count. With 0.1: every step up to step 19, every 2 steps up to step 39, every 4 steps up to step 79. 0: always every `precondition_frequency` steps. With `refresh_delay` it is off by default"),
    "refresh": Option("together", _choice("together", "staggered"), "`\"together\"`: refresh all blocks in the same step. `\"staggered\"`: spread them evenly over the period"),
    "refresh_delay": Option(0, _count(0), "steps from a refresh to the first use of its roots. Meanwhile they are computed in the background, on CUDA by a stream of their own; takes the memory of the roots once more"),
    "root_device": Option(None, _root_device, "`\"cpu\"`: compute roots on the host. On CUDA with `refresh_delay` a thread does it. Devices other than CPU and CUDA, such as a Mac's GPU, always have their roots computed there"),
    "on_nonfinite": Option("skip", _choice("skip", "raise"), "for NaN or Inf in a gradient, or an invalid learning rate in a tensor on the device: `\"skip\"`: the block skips the step. `\"raise\"`: the step raises an error, for which the host waits for the device in every step"),
    "max_failed_refreshes": Option(3, _count(0), "raise an error after more than this many failed refreshes of a block in a row"),
    "communication_dtype": Option(None, _optional(_dtype("float32", "bfloat16", "float16", "int8")), "dtype in which directions are sent to the ranks that store the parameter: `\"float32\"`, `\"bfloat16\"`, `\"float16\"`, or `\"int8\"` with a scale per block; default: not rounded"),
    "blocks": Option("global", _choice("global", "local"), "`\"global\"`: cut blocks from whole parameters. `\"local\"`: cut them from each shard. Then no gradient travels, but results depend on the sharding", structural=True),
    "precision": Option(None, _precision, "precision of the products that update factors and apply roots: `\"float32\"`, or on a GPU `\"fast\"` with the 11 bits of TF32; default: torch's float32 matmul precision. It does not change how roots and polar factors are computed"),
    "master_weights": Option(False, _bool, "keep a float32 copy of bfloat16 and float16 parameters in the state and update that, so that small updates are not rounded away. Other parameters are unaffected", structural=True, before=False),
    "state_dtype": Option("float32", _state_dtype, "dtype of the state: `\"float32\"`, `\"float64\"` or `\"bfloat16\"`; arithmetic is in float32 or better, except for matrix products on a GPU", structural=True),
    "root_dtype": Option(None, _optional(dtype_name), "dtype in which roots are kept; default `state_dtype`", structural=True),
    "filter_dtype": Option(None, _optional(_dtype("float32", "bfloat16")), "dtype in which the filtered gradient is kept: `\"float32\"` or `\"bfloat16\"`; default `state_dtype`", structural=True, before=None),
    "factors": Option(AUTO, _choice(AUTO, "full", "packed"), "`\"full\"`: keep whole factors and roots. `\"packed\"`: only their lower triangles, the same numbers in half the memory. `\"auto\"`: packed on a GPU where kernels do all the work with them, else full. Checkpoints of one can be loaded into the other", structural=True),
}  # fmt: skip

# Arguments of the constructor that are not in param groups and checkpoints: they say how the work is done.
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "process_group": (None, "the ranks that share the work on plain tensors; default: all ranks. A DTensor has the ranks of its mesh"),
    "num_trainers_per_group": (None, "group size. Ranks in a group split the work; groups repeat it without communicating. Default: all ranks that store a parameter"),
    "stages": (None, "number of parts of a step, which overlap communication with compute; by default the plan chooses it"),
    "check_ranks": (False, "a number N: every N steps, ranks that store the same part of a parameter check that it has the same bits, and all stop with an error if not. `False`: only in the first step. `True`: in every step, and also which parameters have a gradient, for debugging"),
}  # fmt: skip

FLAGS = ("foreach", "fused", "capturable", "differentiable", "amsgrad")  # of torch's optimizers; not implemented here
# Names of other optimizers, and the options that each is in Shampoo. First Meta's; those with none have no effect.
OF_META = {
    "epsilon": "eps",
    "weight_decay_type": "weight_decay_mode",
    "use_bias_correction": "bias_correction",
    "iterate_averaging_config": "averaging momentum",
    "grafting_config": "graft",
    "distributed_config": "communication_dtype num_trainers_per_group",
    "preconditioner_config": "preconditioner",
    "use_nesterov": "nesterov",
    "use_decoupled_weight_decay": "weight_decay_mode",
    "use_merge_dims": "merge_dims",
    "inv_root_override": "exponent",
    "exponent_override": "exponent",
    "large_dim_method": "large_dim",
    "preconditioner_dtype": "state_dtype",
    "precision_config": "state_dtype root_dtype",
    "grafting_type": "graft",
    "grafting_beta2": "graft_beta2",
    "grafting_epsilon": "graft_eps",
    **dict.fromkeys(("use_pin_memory", "shampoo_pt2_compile_config", "shampoo_runtime_config", "concurrency_config"), ""),
    **dict.fromkeys(("use_pytorch_compile", "pytorch_compile_backend", "use_protected_eigh", "track_root_inv_residuals"), ""),
    **dict.fromkeys(("use_dtensor", "dist_strategy", "debug_mode"), ""),
}
# Arguments of presets. Anywhere else they are mistakes.
OF_PRESETS = {
    "factor_eps": "eps",
    "decoupled_weight_decay": "weight_decay_mode",
    "ns_steps": "polar",
    "ns_coefficients": "polar",
    "adjust_lr_fn": "polar_scale",
    "max_precond_dim": "max_preconditioner_dim",
    "correct_bias": "bias_correction",
    **{name: options for name, options in OF_META.items() if options},
}
# Of other libraries, and of Meta's first versions. They are mistakes everywhere.
OF_OTHERS = {
    "learning_rate": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "wd": "weight_decay",
    "weight_decouple": "weight_decay_mode",
    "eps_root": "eps graft_eps",
    "matrix_eps": "eps",
    "matrix_epsilon": "eps",
    "diagonal_epsilon": "graft_eps",
    "graft_epsilon": "graft_eps",
    "graft_type": "graft",
    "block_size": "max_preconditioner_dim",
    "preconditioning_compute_steps": "precondition_frequency",
    "adam_w_mode": "weight_decay_mode",
    "init_delay": "start_preconditioning_step",
    "threshold": "max_preconditioner_dim",
    "update_freq": "precondition_frequency",
}
STRUCTURAL = tuple(name for name, option in OPTIONS.items() if option.structural)


def refuse_flags(given: Mapping[str, Any]) -> None:
    for flag in FLAGS:
        if given.get(flag):
            raise ValueError(f"{flag}=True is not implemented by Shampoo; leave it out")


def whole(name: str, value: Any) -> int:
    """A whole number of at least 1."""
    return int(_count(1)(name, value))


def hint(name: str, also: Iterable[str] = (), *, sure: bool = False) -> str:
    """The end of a message about an unknown option: which known one was probably meant. Names in ``also`` are known too.

    ``sure``: empty unless the meaning is clear, for places where users may have names of their own.
    """
    if name in ARGUMENTS:
        return "; it is an argument of the constructor, the same for all parameters"
    if instead := OF_PRESETS.get(name) or OF_OTHERS.get(name):
        taker = ", and lather.distributed_shampoo takes it as it is" if name in OF_META else ""
        return f"; in Shampoo it is {' or '.join(map(repr, instead.split()))}{taker}"
    if name in OF_META and not sure:
        return "; it has no effect in Shampoo; leave it out"
    own, cutoff = (*also, *OPTIONS, *(() if sure else ARGUMENTS)), 0.85 if sure else 0.6
    if found := nearest(name, own, cutoff) or nearest(name, OF_PRESETS, cutoff):
        return f"; did you mean {found!r}?"
    return "" if sure else "; docs/options.md has them all"


def nearest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """The known name that is most like this one, or has it as a word; None if no name is."""
    known = list(known)
    words = [each for each in known if name in each.split("_")] if cutoff < 0.85 else []
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff) or words), None)


def refuse_unknown(names: Iterable[str], also: Iterable[str] = ()) -> None:
    """Refuse names of options that do not exist, as Python would, but with what was probably meant."""
    for name in names:
        raise TypeError(f"there is no option {name!r}{hint(name, also)}")


def plain(text: str) -> str:
    """Without Markdown.

    >>> plain("see [algorithm](algorithm.md#averaging), or `None`")
    'see docs/algorithm.md#averaging, or None'
    """
    return re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", text).replace("`", "")


def markdown() -> str:
    """``docs/options.md``."""
    rows = []
    for name, option in OPTIONS.items():
        users = readers(name)
        only = f" ({', '.join(map(_named, users))} only)" if 0 < len(users) < len(METHODS) else ""
        rows.append(f"| `{name}` | `{option.default!r}` | {option.text}{only}{' †' if option.structural else ''} |")
    more = [f"| `{name}` | `{default!r}` | {text} |" for name, (default, text) in ARGUMENTS.items()]
    return PAGE.format(options="\n".join(rows), arguments="\n".join(more))


PAGE = """\
# Options of `lather.Shampoo`

Written by `python -m lather options`. Give an option for all parameters, or per param group. Options are read on every
step, so schedulers may change them. Those marked † decide which blocks and state there are, and are fixed after the
first step. A value out of range, or an option that has no effect with the others, raises a `ValueError`. There are two
exceptions. An option that has no effect on your device raises no error, so one script runs anywhere; `opt.plan()` mentions it.
With `preconditioner=None` or `start_preconditioning_step=math.inf`, most options of factors and roots raise none. The defaults of `eps` and `exponent` depend on
other options, and are set when the optimizer is made. If you change `preconditioner`, `damping` or `graft` after that, set
them too.
`python -m lather plan` takes all of them: `max_preconditioner_dim` is `--max-preconditioner-dim 2048`.

| option | default | meaning |
|---|---|---|
{options}

## Arguments of the constructor only

They say how the work is done, not what is computed. A checkpoint does not hold them.

| argument | default | meaning |
|---|---|---|
{arguments}"""
