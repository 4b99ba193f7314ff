"""What the arguments and config objects of Meta's ``DistributedShampoo`` become, name by name.

Each has a reader, which returns options of ``Shampoo``, or raises an error that says what to use. The newest version and
earlier ones are known.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..options import OPTIONS, whole
from ..roots import HigherOrder, Track

Options = dict[str, Any]
NONE: Mapping[str, str] = {}
Reader = Callable[[str, Any], Options]  # a name for messages, and a value of Meta's -> options of Shampoo


def _to(option: str) -> Reader:
    return lambda name, value: {option: OPTIONS[option].check(name, value)}


def _nothing(name: str, value: Any) -> Options:
    return {}


def _only(usual: Any, instead: str) -> Reader:
    """Refuses any other value."""

    def reader(name: str, value: Any) -> Options:
        if value != usual:
            raise ValueError(f"{name}={_spell(value)} is not supported: {instead}")
        return {}

    return reader


def _word(table: Mapping[str, Any], option: str) -> Reader:
    """For a member of an enumeration, or its name."""

    def reader(name: str, value: Any) -> Options:
        word = getattr(value, "name", value)
        if word not in table:
            raise ValueError(f"{name}={word!r} is not supported: it must be one of {', '.join(map(repr, table))}")
        return {option: table[word]}

    return reader


def _read(name: str, config: Any, known: Mapping[str, Mapping[str, Reader]], instead: Mapping[str, str] = NONE) -> Options:
    """The options that the attributes of a config object become. ``known`` has a reader for each attribute of each class."""
    kind = type(config).__name__
    if kind not in known:
        use = instead.get(kind, f"use one of {', '.join(known)}, or leave it out and use an option of lather.Shampoo")
        raise ValueError(f"{name}={_spell(config)} is not supported: {use}")
    options: Options = {}
    for attribute, value in _attributes(config).items():
        if attribute not in known[kind]:
            raise ValueError(f"{kind}.{attribute}={_spell(value)} is not supported: lather has no such attribute; leave it out")
        options |= known[kind][attribute](f"{kind}.{attribute}", value)
    return options


def _attributes(config: Any) -> Options:
    names = [name for name in dir(config) if not name.startswith("_")]
    return {name: getattr(config, name) for name in names if not callable(getattr(config, name))}


def _spell(value: Any) -> str:
    """A config object by its class, because its own text may be long."""
    return type(value).__name__ if type(value).__module__ != "builtins" and hasattr(value, "__dict__") else repr(value)


# Grafts.

_BETA2 = {"beta2": _to("graft_beta2"), "drop_weighting_factor_on_gsquare": _only(False, "averages are weighted; leave it out")}
_GRAFT_ATTRIBUTES: dict[str, dict[str, Reader]] = {
    "SGD": {},
    "AdaGrad": {"epsilon": _to("graft_eps")},
    "RMSprop": {"epsilon": _to("graft_eps"), **_BETA2},
    "Adam": {"epsilon": _to("graft_eps"), **_BETA2},
}
_GRAFTS = {f"{name}{end}": of for end in ("GraftingConfig", "PreconditionerConfig") for name, of in _GRAFT_ATTRIBUTES.items()}


def _graft(name: str, config: Any) -> Options:
    if config is None:
        return {"graft": None}
    options = _read(name, config, _GRAFTS)
    stem = type(config).__name__.removesuffix("GraftingConfig").removesuffix("PreconditionerConfig")
    return {"graft": stem.lower(), **options}


def old_graft(given: Mapping[str, Any]) -> Options:
    """``grafting_type`` with ``grafting_beta2`` and ``grafting_epsilon``, which were 1 and 1e-3 by default."""
    if "grafting_type" not in given:
        raise ValueError("grafting_beta2 and grafting_epsilon are arguments of earlier versions; they need grafting_type")
    words = {"NONE": None, "SGD": "sgd", "ADAGRAD": "adagrad", "RMSPROP": "rmsprop", "ADAM": "adam"}
    options = _word(words, "graft")("grafting_type", given["grafting_type"])
    graft = options["graft"]
    if graft in ("adagrad", "rmsprop", "adam"):
        options |= _to("graft_eps")("grafting_epsilon", given.get("grafting_epsilon", 1e-3))
    if graft in ("rmsprop", "adam"):
        if given.get("grafting_beta2", 1) == 1:
            raise ValueError(f"grafting_type={graft.upper()} needs grafting_beta2 < 1; with 1 it is a sum, which is ADAGRAD")
        options |= _to("graft_beta2")("grafting_beta2", given["grafting_beta2"])
    return options


# Preconditioners.


def _exponents(name: str, given: Mapping[int, Any]) -> Options:
    """``{order: exponent}``. An order may have one exponent per dimension, if they are equal."""
    found = {}
    for order, value in given.items():
        of = value
        if isinstance(value, Mapping):
            each = {value.get(dim, 1 / (2 * max(order, 1))) for dim in range(max(order, 1))}
            if len(each) > 1:
                raise ValueError(f"{name}[{order}]={value!r} is not supported: all dimensions of a tensor have the same exponent")
            of = each.pop()
        if order:  # scalars have no factors
            found[order] = of
    return {"exponent": dict(OPTIONS["exponent"].check(name, found)) if found else None}


def _root_override(name: str, value: Any) -> Options:
    """The inverse root of all orders, or of orders 1, 2, ...; 0 is the default."""
    roots = tuple(value) if (several := isinstance(value, (list, tuple))) else (value,)
    if any(not isinstance(root, int) or isinstance(root, bool) or root < 0 for root in roots):
        raise ValueError(f"{name}={value!r} is not valid: it must be a whole number of at least 0, or one for each order")
    exponents = {order: 1 / root for order, root in enumerate(roots, 1) if root}
    if not exponents:
        return {"exponent": None}
    return {"exponent": exponents if several else exponents[1]}


def _root_dtype(name: str, value: Any) -> Options:
    dtype = OPTIONS["root_dtype"].check(name, value)
    return {"root_dtype": None if dtype == "float32" else dtype}


def _offload(name: str, device: Any) -> Options:
    return {"root_device": OPTIONS["root_device"].check(name, str(device) or None)}


def _stability(name: str, config: Any) -> Options:
    use = "give epsilon instead, which is added to all eigenvalues"
    return _read(name, config, {"PerturbationConfig": {"perturb_before_computation": _nothing}}, {"PseudoInverseConfig": use})


_STATE = "state is kept in float32; use state_dtype, which holds for all state"
_EIGEN: dict[str, Reader] = {
    "rank_deficient_stability_config": _stability,
    "retry_double_precision": _nothing,
    "eigendecomposition_offload_device": _offload,
    "make_positive_semidefinite": _only(True, "eigenvalues below zero are always shifted; leave it out"),
    "exponent_multiplier": _to("exponent_multiplier"),
    "tolerance": _only(0.0, "no refresh is skipped; leave it out"),
}
_ITERATION: dict[str, Reader] = {"max_iterations": _nothing, "tolerance": _nothing, "disable_tf32": _nothing}
_SOLVERS: dict[str, dict[str, Reader]] = {
    "EigenConfig": _EIGEN,
    "EighEigendecompositionConfig": _EIGEN,
    "CoupledNewtonConfig": _ITERATION,
    "CoupledHigherOrderConfig": {
        **_ITERATION,
        "order": _nothing,
        "rel_epsilon": _nothing,
        "abs_epsilon": _only(0.0, "give epsilon instead"),
    },
    "QREigendecompositionConfig": {**_ITERATION, "rank_deficient_stability_config": _stability},
}


def _solver(name: str, config: Any) -> Options:
    use = "pass root='minimax', and leave amortized_computation_config out"
    options, kind = _read(name, config, _SOLVERS, {"NewtonSchulzRootInvConfig": use}), type(config).__name__
    root: Any = {"CoupledNewtonConfig": "newton"}.get(kind, "eigh")
    if kind == "CoupledHigherOrderConfig":
        floor = {"relative_eps": config.rel_epsilon} if config.rel_epsilon else {}
        root = HigherOrder(order=config.order, **floor)
    elif kind == "QREigendecompositionConfig":
        root = Track(iterations=config.max_iterations)
    return {"root": OPTIONS["root"].check(name, root), **options}


_SHAMPOO: dict[str, Reader] = {
    "amortized_computation_config": _solver,
    "inverse_exponent_override": _exponents,
    "num_tolerated_failed_amortized_computations": _to("max_failed_refreshes"),
    "inv_factor_matrix_dtype": _root_dtype,
    "factor_matrix_eigenvectors_dtype": _root_dtype,
    "factor_matrix_eigenvalues_dtype": _nothing,
    "use_symmetric_packing": _nothing,
    "trace_scaling_exponent": _nothing,
    "use_trace_scaling": _only(False, "factors are not scaled; damping='relative' makes epsilon relative to their size"),
    "drop_weighting_factor_on_gsquare": _only(False, "averages are weighted; leave it out, or sum with betas[1] = 1"),
}


def _factor_dtype(name: str, value: Any) -> Options:
    return _only("float32", _STATE)(name, str(value).removeprefix("torch."))


_PRECONDITIONERS = {
    f"{kind}ShampooPreconditionerConfig": {**_SHAMPOO, "factor_matrix_dtype": _factor_dtype}
    for kind in ("RootInv", "Eigendecomposed", "")  # the last is RootInv in earlier versions
}
_ALONE = "for a method without factors pass preconditioner=None, and its config as grafting_config"
_INSTEAD = {
    "EigenvalueCorrectedShampooPreconditionerConfig": "use lather.soap",
    "RootInvKLShampooPreconditionerConfig": "use lather.Shampoo(params, preconditioner='kl')",
    "EigendecomposedKLShampooPreconditionerConfig": "use lather.Shampoo(params, preconditioner='kl')",
    "SpectralDescentPreconditionerConfig": "use lather.muon",
    **dict.fromkeys(_GRAFTS, _ALONE),
}


def _preconditioner(name: str, config: Any) -> Options:
    return {} if config is None else _read(name, config, _PRECONDITIONERS, _INSTEAD)


_PRECISION: dict[str, Reader] = {
    "inv_factor_matrix_dtype": _root_dtype,
    **dict.fromkeys(("computation_dtype", "factor_matrix_dtype", "filtered_grad_dtype"), _factor_dtype),
    **dict.fromkeys(("momentum_dtype", "grafting_state_dtype"), _factor_dtype),
}


def _precision(name: str, config: Any) -> Options:
    return {} if config is None else _read(name, config, {"PrecisionConfig": _PRECISION})


def _preconditioner_dtype(name: str, value: Any) -> Options:
    return {} if value is None else _factor_dtype(name, value)


# Ranks, averaging and the rest.


def _communication(name: str, value: Any) -> Options:
    words = {"DEFAULT": None, "FP16": "float16", "BF16": "bfloat16", "FP32": "float32"}
    return _to("communication_dtype")(name, words.get(getattr(value, "name", ""), value))


def _trainers(name: str, value: Any) -> Options:
    return {} if value in (None, -1) else {"num_trainers_per_group": whole(name, value)}


def _dimensionality(name: str, value: Any) -> Options:
    if value not in (1, 2, float("inf")):
        raise ValueError(f"{name}={value!r} is not supported: use 2, or math.inf to merge nothing")
    return {"merge_dims": value != float("inf")}


_RANKS: dict[str, Reader] = {
    "communication_dtype": _communication,
    "num_trainers_per_group": _trainers,
    "target_parameter_dimensionality": _dimensionality,
    **dict.fromkeys(("communicate_params", "load_balancing_config", "param_to_metadata", "device_mesh", "use_v2"), _nothing),
    **dict.fromkeys(("param_assignment_strategy", "num_sub_groups"), _nothing),
}
_LAYOUTS = ("SingleDevice", "DDP", "FSDP", "HSDP", "FullyShard", "HybridShard")
_DISTRIBUTED = {f"{layout}{end}": _RANKS for end in ("DistributedConfig", "ShampooConfig") for layout in _LAYOUTS}


def _distributed(name: str, config: Any) -> Options:
    return {} if config is None else _read(name, config, _DISTRIBUTED)


def _powers(name: str, value: Any) -> Options:
    return {"averaging_powers": OPTIONS["averaging_powers"].check(name, (value, 0))}


_AVERAGING: dict[str, dict[str, Reader]] = {
    "ClassicMomentumConfig": {"momentum": _to("momentum"), "dampening": _to("dampening"), "use_nesterov": _to("nesterov")},
    "GeneralizedPrimalAveragingConfig": {"eval_interp_coeff": _to("averaging_decay"), "train_interp_coeff": _to("averaging_beta")},
    "ScheduleFreeConfig": {"train_interp_coeff": _to("averaging_beta"), "eval_coeff_lr_power": _powers},
}
_AVERAGES = {"GeneralizedPrimalAveragingConfig": "gpa", "ScheduleFreeConfig": "schedule_free"}


def _averaging(name: str, config: Any) -> Options:
    if config is None:
        return {"averaging": None, "momentum": 0.0}
    options = _read(name, config, _AVERAGING)
    return {"averaging": _AVERAGES.get(type(config).__name__), "momentum": 0.0} | options


def _epsilon(name: str, value: Any) -> Options:
    return {"eps": OPTIONS["graft_eps"].check(name, value)}  # None has no meaning here


def _start(name: str, value: Any) -> Options:
    return {"start_preconditioning_step": None if value == -1 else OPTIONS["start_preconditioning_step"].check(name, value)}


def _beta3(name: str, value: Any) -> Options:
    return {"beta3": None if value == -1 else value}


def _decoupled(name: str, value: Any) -> Options:
    return {"weight_decay_mode": "decoupled" if value else "l2"}


_MODES = {mode.upper(): mode for mode in ("l2", "decoupled", "corrected", "independent")}
_LARGE = {"BLOCKING": "block", "DIAGONAL": "diagonal", "ADAGRAD": "adagrad"}
# The arguments that become other options; those of earlier versions come last, and win over defaults of the newest.
READERS: dict[str, Reader] = {
    "beta3": _beta3,
    "epsilon": _epsilon,
    "weight_decay_type": _word(_MODES, "weight_decay_mode"),
    "start_preconditioning_step": _start,
    "use_bias_correction": _to("bias_correction"),
    "iterate_averaging_config": _averaging,
    "grafting_config": _graft,
    "distributed_config": _distributed,
    "preconditioner_config": _preconditioner,
    "use_nesterov": _to("nesterov"),
    "use_decoupled_weight_decay": _decoupled,
    "use_merge_dims": _to("merge_dims"),
    "inv_root_override": _root_override,
    "exponent_override": _root_override,
    "exponent_multiplier": _to("exponent_multiplier"),
    "large_dim_method": _word(_LARGE, "large_dim"),
    "num_trainers_per_group": _trainers,
    "preconditioner_dtype": _preconditioner_dtype,
    "precision_config": _precision,
}
