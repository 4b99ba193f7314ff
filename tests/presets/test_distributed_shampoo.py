"""The preset for Meta's DistributedShampoo: its arguments, its config objects by their names, and the paper's results.

Meta's package is not needed. Config objects are stand-ins with the class names and attributes of theirs.
`PYTHONPATH=tests python tests/presets/test_distributed_shampoo.py` writes the table of docs/paper.md.
"""

import enum
import inspect
import math
import pathlib
import re
from typing import Any

import pytest
import torch
from reference import Reference
from torch import nn

import lather
from lather.options import ARGUMENTS

Options = dict[str, Any]
PAGE = pathlib.Path(__file__).parents[2] / "docs/paper.md"
PAPER: Options = {"exponent": None, "damping": "absolute", "refresh_warmup": 0.0, "beta3": None}
# The newest constructor that was read, without its params. None stands for a default config object.
SIGNATURE: Options = {
    "lr": 1e-2, "betas": (0.9, 1.0), "beta3": -1.0, "epsilon": 1e-12, "weight_decay": 0.0, "weight_decay_type": "DECOUPLED",
    "max_preconditioner_dim": 1024, "precondition_frequency": 1, "start_preconditioning_step": -1, "use_bias_correction": True,
    "iterate_averaging_config": None, "grafting_config": None, "use_pin_memory": False, "shampoo_pt2_compile_config": None,
    "distributed_config": None, "preconditioner_config": None, "shampoo_runtime_config": None,
}  # fmt: skip

WeightDecayType = enum.Enum("WeightDecayType", ["L2", "DECOUPLED", "CORRECTED", "INDEPENDENT"])
GraftingType = enum.Enum("GraftingType", ["NONE", "SGD", "ADAGRAD", "RMSPROP", "ADAM", "ADAM_NORMALIZED"])
CommunicationDType = enum.Enum("CommunicationDType", ["DEFAULT", "FP16", "BF16", "FP32"])
LargeDimMethod = enum.Enum("LargeDimMethod", ["DIAGONAL", "ADAGRAD", "BLOCKING"])


def config(kind: str, **attributes: Any) -> Any:
    """An object whose class has this name."""
    return type(kind, (), attributes)()


def eigen(**attributes: Any) -> Any:
    stability = config("PerturbationConfig", perturb_before_computation=True)
    usual = {"rank_deficient_stability_config": stability, "retry_double_precision": True, "tolerance": 0.0}
    return config("EigenConfig", **{"eigendecomposition_offload_device": "", **usual, **attributes})


def root_inv(kind: str = "RootInv", **attributes: Any) -> Any:
    """Meta's default, `DefaultShampooConfig`."""
    usual = {"amortized_computation_config": eigen(), "factor_matrix_dtype": torch.float32, "inverse_exponent_override": {}}
    usual |= {"num_tolerated_failed_amortized_computations": 3, "inv_factor_matrix_dtype": torch.float32}
    usual |= {"use_symmetric_packing": True, "use_trace_scaling": False, "trace_scaling_exponent": 0.5}
    usual |= {"drop_weighting_factor_on_gsquare": False}
    return config(f"{kind}ShampooPreconditionerConfig", **usual | attributes)


def single(**attributes: Any) -> Any:
    return config("SingleDeviceDistributedConfig", **{"target_parameter_dimensionality": 1, **attributes})


def ddp(**attributes: Any) -> Any:
    usual = {"communication_dtype": torch.float32, "num_trainers_per_group": -1, "communicate_params": False}
    usual |= {"target_parameter_dimensionality": 1, "load_balancing_config": config("LoadBalancingConfig")}
    return config("DDPDistributedConfig", **usual | attributes)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((6, 5), (4,))]


def group_of(**given: Any) -> Options:
    return lather.distributed_shampoo(parameters(), **given).param_groups[0]


# Arguments.


def test_signature() -> None:
    known = inspect.signature(lather.distributed_shampoo).parameters.values()
    assert [(p.name, p.default) for p in known if p.name not in ("params", "options")] == list(SIGNATURE.items())


def test_defaults_are_the_papers() -> None:
    expected: Options = PAPER | {"lr": 1e-2, "betas": (0.9, 1.0), "eps": 1e-12, "weight_decay": 0.0, "graft": None, "root": "eigh"}
    expected |= {"max_preconditioner_dim": 1024, "precondition_frequency": 1, "start_preconditioning_step": None}
    expected |= {"bias_correction": True, "momentum": 0.0, "averaging": None, "precondition_1d": True, "refresh": "together"}
    expected |= {"preconditioner": "shampoo", "weight_decay_mode": "decoupled", "merge_dims": True, "large_dim": "block"}
    for group in (group_of(), group_of(**SIGNATURE), group_of(preconditioner_config=root_inv(), distributed_config=single())):
        assert {name: group[name] for name in expected} == expected
    rows = lather.distributed_shampoo(parameters()).plan().params
    assert [row.method for row in rows] == ["shampoo", "shampoo"]  # vectors too


GRAFTS: list[tuple[str | None, Any, Options]] = [
    (None, None, {}),
    ("sgd", config("SGDGraftingConfig"), {}),
    ("adagrad", config("AdaGradGraftingConfig", epsilon=1e-5), {"graft_eps": 1e-5}),
    ("rmsprop", config("RMSpropGraftingConfig", beta2=0.9, epsilon=1e-6), {"graft_beta2": 0.9, "graft_eps": 1e-6}),
    ("adam", config("AdamGraftingConfig", beta2=0.99, epsilon=1e-7), {"graft_beta2": 0.99, "graft_eps": 1e-7}),
]
GPA = config("GeneralizedPrimalAveragingConfig", eval_interp_coeff=0.9, train_interp_coeff=0.8)
FREE = config("ScheduleFreeConfig", train_interp_coeff=0.8, eval_coeff_lr_power=2)
CLASSIC = config("ClassicMomentumConfig", momentum=0.5, dampening=0.25, use_nesterov=True)
NEWTON = config("CoupledNewtonConfig", max_iterations=100, tolerance=1e-6)
HIGHER = config("CoupledHigherOrderConfig", rel_epsilon=1e-5, abs_epsilon=0.0, max_iterations=9, tolerance=1e-8, order=4)
QR = config("QREigendecompositionConfig", max_iterations=3, tolerance=0.0)
COMPUTED = config("PrecisionConfig", computation_dtype=torch.float32, inv_factor_matrix_dtype=torch.bfloat16)

TRANSLATED: list[tuple[Options, Options]] = [
    ({"epsilon": 1e-8}, {"eps": 1e-8}),
    ({"beta3": 0.5}, {"beta3": 0.5}),
    ({"betas": (0.0, 1.0), "beta3": 0.5}, {"beta3": None}),  # there is no filter
    ({"betas": (0.0, 1.0)}, {"betas": (0.0, 1.0)}),
    ({"start_preconditioning_step": math.inf}, {"start_preconditioning_step": math.inf}),
    ({"preconditioner": "soap"}, {"preconditioner": "soap"}),
    ({"preconditioner": "kl"}, {"preconditioner": "kl"}),
    ({"preconditioner": "spectral"}, {"preconditioner": "spectral"}),
    ({"preconditioner": None, "grafting_config": config("SGDPreconditionerConfig")}, {"graft": "sgd"}),
    ({"use_bias_correction": False}, {"bias_correction": False}),
    ({"start_preconditioning_step": 7}, {"start_preconditioning_step": 7}),
    ({"weight_decay_type": WeightDecayType.CORRECTED}, {"weight_decay_mode": "corrected"}),
    ({"weight_decay_type": WeightDecayType.INDEPENDENT}, {"weight_decay_mode": "independent"}),
    ({"weight_decay_type": "L2"}, {"weight_decay_mode": "l2"}),
    ({"use_decoupled_weight_decay": False}, {"weight_decay_mode": "l2"}),
    ({"use_merge_dims": False}, {"merge_dims": False}),
    ({"momentum": 0.9, "dampening": 0.1, "use_nesterov": True}, {"momentum": 0.9, "dampening": 0.1, "nesterov": True}),
    ({"dampening": 0.1, "use_nesterov": True}, {"momentum": 0, "dampening": 0, "nesterov": False}),
    ({"iterate_averaging_config": CLASSIC}, {"averaging": None, "momentum": 0.5, "dampening": 0.25, "nesterov": True}),
    ({"iterate_averaging_config": GPA}, {"averaging": "gpa", "averaging_beta": 0.8, "averaging_decay": 0.9}),
    ({"iterate_averaging_config": FREE}, {"averaging": "schedule_free", "averaging_beta": 0.8, "averaging_powers": (2, 0)}),
    *(({"grafting_config": given}, {"graft": graft, **options}) for graft, given, options in GRAFTS),
    (
        {"grafting_config": config("AdamPreconditionerConfig", beta2=0.9, epsilon=1e-10, drop_weighting_factor_on_gsquare=False)},
        {"graft": "adam", "graft_beta2": 0.9, "graft_eps": 1e-10},
    ),
    ({"grafting_type": GraftingType.NONE}, {"graft": None}),
    ({"grafting_type": GraftingType.SGD, "grafting_epsilon": 1e-3}, {"graft": "sgd"}),
    ({"grafting_type": GraftingType.ADAGRAD, "grafting_beta2": 1.0}, {"graft": "adagrad", "graft_eps": 1e-3}),
    (
        {"grafting_epsilon": 1e-9, "grafting_beta2": 0.9, "grafting_type": GraftingType.ADAM},
        {"graft": "adam", "graft_beta2": 0.9, "graft_eps": 1e-9},
    ),
    ({"inv_root_override": 2}, {"exponent": 0.5}),
    ({"exponent_override": 4}, {"exponent": 0.25}),
    ({"inv_root_override": 0}, {"exponent": None}),
    ({"inv_root_override": [2, 0, 5]}, {"exponent": ((1, 0.5), (3, 0.2))}),
    ({"inv_root_override": [0, 0]}, {"exponent": None}),
    ({"exponent_multiplier": 1.82}, {"exponent": None, "exponent_multiplier": 1.82}),
    ({"inv_root_override": 4, "exponent_multiplier": 1.5}, {"exponent": 0.375, "exponent_multiplier": 1.0}),
    ({"inv_root_override": [0, 2], "exponent_multiplier": 1.5}, {"exponent": ((2, 0.75),), "exponent_multiplier": 1.5}),
    ({"preconditioner_config": root_inv(inverse_exponent_override={2: 0.2})}, {"exponent": ((2, 0.2),)}),
    (
        {"preconditioner_config": root_inv(inverse_exponent_override={0: 1.0, 3: {0: 0.1, 1: 0.1, 2: 0.1}})},
        {"exponent": ((3, 0.1),)},
    ),
    ({"preconditioner_config": root_inv(inverse_exponent_override={2: {}})}, {"exponent": ((2, 0.25),)}),
    ({"preconditioner_config": root_inv(num_tolerated_failed_amortized_computations=5)}, {"max_failed_refreshes": 5}),
    ({"preconditioner_config": root_inv(inv_factor_matrix_dtype=torch.bfloat16)}, {"root_dtype": "bfloat16"}),
    ({"preconditioner_config": root_inv("")}, {"root": "eigh", "exponent": None}),
    ({"preconditioner_config": root_inv("Eigendecomposed")}, {"root": "eigh", "exponent": None}),
    ({"preconditioner_config": root_inv("Eigendecomposed", amortized_computation_config=QR)}, {"root": "track(iterations=3)"}),
    ({"preconditioner_config": root_inv(amortized_computation_config=NEWTON)}, {"root": "newton"}),
    (
        {"preconditioner_config": root_inv(amortized_computation_config=HIGHER)},
        {"root": "higher_order(relative_eps=1e-05, order=4)"},
    ),
    (
        {"preconditioner_config": root_inv(amortized_computation_config=eigen(eigendecomposition_offload_device="cpu"))},
        {"root": "eigh", "root_device": "cpu"},
    ),
    (
        {"preconditioner_config": root_inv(amortized_computation_config=eigen(exponent_multiplier=1.82))},
        {"exponent": None, "exponent_multiplier": 1.82},
    ),
    ({"precision_config": COMPUTED}, {"root_dtype": "bfloat16"}),
    ({"preconditioner_dtype": torch.float32}, {"state_dtype": "float32"}),
    ({"large_dim_method": LargeDimMethod.DIAGONAL}, {"large_dim": "diagonal"}),
    ({"distributed_config": ddp()}, {"communication_dtype": "float32", "merge_dims": True}),
    ({"distributed_config": ddp(communication_dtype=torch.bfloat16)}, {"communication_dtype": "bfloat16"}),
    ({"distributed_config": ddp(communication_dtype=CommunicationDType.FP16)}, {"communication_dtype": "float16"}),
    ({"distributed_config": ddp(communication_dtype=CommunicationDType.DEFAULT)}, {"communication_dtype": None}),
    ({"distributed_config": single(target_parameter_dimensionality=2)}, {"merge_dims": True}),
    ({"distributed_config": single(target_parameter_dimensionality=math.inf)}, {"merge_dims": False}),
    ({"distributed_config": config("FullyShardShampooConfig")}, {"blocks": "global"}),
    ({"distributed_config": config("HSDPShampooConfig", device_mesh=None, param_to_metadata={})}, {"blocks": "global"}),
    ({"use_pin_memory": True, "shampoo_pt2_compile_config": config("ShampooPT2CompileConfig")}, {}),
    ({"use_protected_eigh": False, "use_dtensor": True, "shampoo_runtime_config": config("ShampooRuntimeConfig")}, {}),
    (
        {"eps": 1e-3, "graft": "adam", "exponent": 0.3, "root": "auto"},
        {"eps": 1e-3, "graft": "adam", "exponent": 0.3, "root": "auto"},
    ),
    ({"refresh": "staggered", "refresh_warmup": 0.1, "precondition_1d": False}, {"refresh": "staggered", "refresh_warmup": 0.1}),
]


@pytest.mark.parametrize(("given", "expected"), TRANSLATED, ids=lambda x: ", ".join(x))
def test_translated(given: Options, expected: Options) -> None:
    found = group_of(**given)
    assert {name: found[name] for name in expected} == expected
    grouped = lather.distributed_shampoo([{"params": parameters(), **given}]).param_groups[0]
    assert {name: grouped[name] for name in expected} == expected


def test_num_trainers() -> None:
    assert lather.distributed_shampoo(parameters(), distributed_config=ddp())._session.trainers is None
    for given in ({"distributed_config": ddp(num_trainers_per_group=1)}, {"num_trainers_per_group": 1}):
        assert lather.distributed_shampoo(parameters(), **given)._session.trainers == 1
        with pytest.raises(ValueError, match="num_trainers_per_group is the same for all param groups"):
            lather.distributed_shampoo([{"params": parameters(), **given}])


def test_groups_of_an_optimizer_of_metas() -> None:
    """They have all arguments, and say what -1 stood for."""
    first, second = parameters(), parameters()
    usual = SIGNATURE | {"preconditioner_config": root_inv(), "distributed_config": ddp(), "grafting_config": GRAFTS[-1][1]}
    usual |= {"beta3": 0.9, "start_preconditioning_step": 1, "peak_lr": 1e-2}
    groups = [{"params": first, **usual}, {"params": second, **usual, "epsilon": 1e-6, "grafting_config": None}]
    opt = lather.distributed_shampoo(groups, preconditioner_config=root_inv(inverse_exponent_override={2: 0.1}), epsilon=1e-3)
    found = [[group[name] for name in ("eps", "graft", "beta3", "exponent")] for group in opt.param_groups]
    assert found == [[1e-12, "adam", 0.9, None], [1e-6, None, 0.9, None]]
    groups[0]["peak_lr"] = 1.0
    with pytest.raises(ValueError, match=r"^peak_lr=1\.0 is not supported: the largest lr so far is used"):
        lather.distributed_shampoo(groups)


def test_groups_share_arguments() -> None:
    groups = [{"params": parameters(), "inv_root_override": 2}, {"params": parameters(), "dampening": 0.25}]
    opt = lather.distributed_shampoo(groups, exponent_multiplier=1.5, momentum=0.5)
    assert [(group["exponent"], group["exponent_multiplier"]) for group in opt.param_groups] == [(0.75, 1.0), (None, 1.5)]
    assert [group["dampening"] for group in opt.param_groups] == [0.0, 0.25]


def test_a_model_is_routed() -> None:
    """As in all presets. Its parameters are all treated the same, as by Meta's package."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 6), nn.LayerNorm(6))
    routed, plain = (lather.distributed_shampoo(given, weight_decay=0.1) for given in (model, model.named_parameters()))
    assert {row.name: row.method for row in routed.plan().params if row.method != "shampoo"} == {"0.weight": "adam"}
    assert {row.method for row in plain.plan().params} == {"shampoo"}
    decays = {name: group["weight_decay"] for group in routed.param_groups for name in group["param_names"]}
    assert {name for name, decay in decays.items() if decay} == {"0.weight", "1.weight"}
    assert [group["weight_decay"] for group in plain.param_groups] == [0.1]


# Errors.


def solver(kind: str = "EigenConfig", **attributes: Any) -> Options:
    return {"preconditioner_config": root_inv(amortized_computation_config=config(kind, **attributes))}


REFUSED: list[tuple[Options, str]] = [
    ({"epsilon": 0.0}, r"^epsilon=0\.0 is not valid: it must be more than 0"),
    ({"epsilon": None}, "^epsilon=None is not valid"),
    ({"betas": 0.9}, r"^betas=0\.9 is not valid: it must be a pair"),
    ({"dampening": -1.0}, r"^dampening=-1\.0 is not valid"),
    ({"start_preconditioning_step": 0}, "^start_preconditioning_step=0 is not valid"),
    ({"weight_decay_type": "decoupled"}, "^weight_decay_type='decoupled' is not supported: it must be one of 'L2', 'DECOUPLED'"),
    ({"threshold": 512}, "^threshold=512 is not supported: use the name of later versions, max_preconditioner_dim$"),
    ({"inv_root_override": -2}, "^inv_root_override=-2 is not valid: it must be a whole number of at least 0"),
    ({"inv_root_override": [2, 0.5]}, r"^inv_root_override=\[2, 0\.5\] is not valid"),
    ({"grafting_config": "adam"}, "^grafting_config='adam' is not supported: use one of SGDGraftingConfig, .* option"),
    ({"grafting_config": config("AdamGraftingConfig", beta2=1.0)}, r"^AdamGraftingConfig\.beta2=1\.0 is not valid"),
    (
        {"grafting_config": config("AdamGraftingConfig", beta1=0.9)},
        r"^AdamGraftingConfig\.beta1=0\.9 is not supported: .* leave it out",
    ),
    (
        {"grafting_config": config("RMSpropPreconditionerConfig", drop_weighting_factor_on_gsquare=True)},
        r"^RMSpropPreconditionerConfig\.drop_weighting_factor_on_gsquare=True is not supported",
    ),
    ({"grafting_type": GraftingType.ADAM_NORMALIZED}, "^grafting_type='ADAM_NORMALIZED' is not supported"),
    ({"grafting_type": GraftingType.ADAM}, "^grafting_type=ADAM needs grafting_beta2 < 1; .* ADAGRAD"),
    ({"grafting_beta2": 0.9}, "need grafting_type"),
    (
        {"preconditioner_config": config("EigenvalueCorrectedShampooPreconditionerConfig")},
        "^preconditioner_config=EigenvalueCorrectedShampooPreconditionerConfig is not supported: use lather.soap$",
    ),
    ({"preconditioner_config": config("RootInvKLShampooPreconditionerConfig")}, "use .*preconditioner='kl'"),
    ({"preconditioner_config": config("SpectralDescentPreconditionerConfig")}, "use lather.muon$"),
    ({"preconditioner_config": config("AdamPreconditionerConfig")}, "pass preconditioner=None, and its config as grafting_config$"),
    ({"preconditioner_config": config("SignDescentPreconditionerConfig")}, "use one of RootInvShampooPreconditionerConfig, "),
    (
        {"preconditioner_config": root_inv(inverse_exponent_override={3: {0: 0.0, 1: 0.25}})},
        r"inverse_exponent_override\[3\]=.* is not supported: all dimensions of a tensor have the same exponent",
    ),
    ({"preconditioner_config": root_inv(use_trace_scaling=True)}, r"use_trace_scaling=True is not supported: .*damping='relative'"),
    ({"preconditioner_config": root_inv(factor_matrix_dtype=torch.float64)}, "factor_matrix_dtype='float64' .* use state_dtype"),
    ({"preconditioner_config": root_inv(drop_weighting_factor_on_gsquare=True)}, "drop_weighting_factor_on_gsquare=True is not"),
    (solver("NewtonSchulzRootInvConfig"), "amortized_computation_config=NewtonSchulzRootInvConfig .* pass root='minimax'"),
    (solver("CoupledHigherOrderConfig", abs_epsilon=1e-3), r"abs_epsilon=0\.001 is not supported: give epsilon instead"),
    (solver("EighEigendecompositionConfig", tolerance=0.1), r"tolerance=0\.1 is not supported: no refresh is skipped"),
    (solver(rank_deficient_stability_config=config("PseudoInverseConfig")), "PseudoInverseConfig is not supported: give epsilon"),
    (solver(eigendecomposition_offload_device="xpu"), "eigendecomposition_offload_device='xpu' is not valid"),
    (
        {"precision_config": config("PrecisionConfig", momentum_dtype=torch.bfloat16)},
        "momentum_dtype='bfloat16' .* use state_dtype",
    ),
    ({"preconditioner_dtype": torch.float64}, "^preconditioner_dtype='float64' is not supported: .* use state_dtype"),
    (
        {"distributed_config": single(target_parameter_dimensionality=3)},
        "target_parameter_dimensionality=3 is not supported: use 2",
    ),
    ({"distributed_config": ddp(num_trainers_per_group=0)}, "num_trainers_per_group=0 is not valid"),
    ({"distributed_config": ddp(communication_dtype=torch.int32)}, "communication_dtype=.* is not valid"),
    ({"distributed_config": config("MyConfig")}, "^distributed_config=MyConfig is not supported"),
    ({"iterate_averaging_config": config("Ema")}, "^iterate_averaging_config=Ema is not supported: use one of ClassicMomentum"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=lambda x: ", ".join(x) if isinstance(x, dict) else "")
def test_refused(given: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lather.distributed_shampoo(parameters(), **given)
    with pytest.raises(ValueError, match=words):
        lather.distributed_shampoo([{"params": parameters(), **given}])


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match="there is no option 'use_separate_momentum'"):
        lather.distributed_shampoo(parameters(), use_separate_momentum=True)
    with pytest.raises(ValueError, match="unknown option 'factor_eps'; in Shampoo it is 'eps'"):
        lather.distributed_shampoo([{"params": parameters(), "factor_eps": 1e-3}])


# Results.

SHAPES = {1: (4,), 2: (5, 4), 3: (5, 4, 3), 4: (4, 3, 4, 3)}


def distance(shape: tuple[int, ...], graft: Any, twin: Options, **given: Any) -> float:
    """Of the preset in float32 from the twin in float64 after 20 steps, relative to the way that the twin went."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    param = nn.Parameter(start.clone())
    usual: Options = {"lr": 0.1, "max_preconditioner_dim": 5}
    opt = lather.distributed_shampoo([param], grafting_config=graft, **usual, **given)
    paper = PAPER | {"betas": (0.9, 1.0), "eps": 1e-12, "precondition_1d": True, "precondition_frequency": 1}
    reference = Reference([start], **paper | usual | twin)
    for _ in range(20):
        param.grad = torch.randn(shape, generator=generator)
        opt.step()
        reference.step([param.grad])
    ours, theirs = param.detach().double(), reference.params[0]
    assert len(reference.blocks[0]) == 1 and len(reference.blocks[0][0].factors) == len(shape)
    return float((ours - theirs).norm() / (theirs - start).norm())


@pytest.mark.parametrize("order", SHAPES)
@pytest.mark.parametrize(("graft", "given", "options"), GRAFTS, ids=lambda x: x if isinstance(x, str) else "")
def test_follows_the_twin(order: int, graft: str | None, given: Any, options: Options) -> None:
    """With all defaults but a start at step 10: with an epsilon of 1e-12 the root of a factor of one vector, which has rank 1,
    depends on digits that float32 does not have. With an epsilon of 1e-2 it does not, from the first step on."""
    twin = {"graft": graft, **options}
    late = {"start_preconditioning_step": 10}
    assert distance(SHAPES[order], given, twin | late, **late) <= 1e-5
    assert distance(SHAPES[order], given, twin | {"precondition_frequency": 10}, precondition_frequency=10) <= 1e-5
    assert distance(SHAPES[order], given, twin | {"eps": 1e-2}, epsilon=1e-2) <= 1e-5


def test_follows_the_twin_with_more_options() -> None:
    given: Options = {"betas": (0.9, 0.99), "weight_decay": 0.1, "weight_decay_type": "CORRECTED", "epsilon": 1e-3}
    given |= {"momentum": 0.5, "use_nesterov": True, "inv_root_override": [0, 3], "beta3": 0.7}
    twin: Options = {"betas": (0.9, 0.99), "weight_decay": 0.1, "weight_decay_mode": "corrected", "eps": 1e-3}
    twin |= {"momentum": 0.5, "nesterov": True, "exponent": {2: 1 / 3}, "beta3": 0.7, "graft": None}
    assert distance((5, 4), None, twin, **given) <= 1e-5
    assert distance((5, 4, 3), None, twin, **given) <= 1e-5


# The page.

NAMES = {  # options on the page, and what Meta calls them
    "lr": "`lr`",
    "betas": "`betas`",
    "beta3": "`beta3`; -1 is `betas[0]`",
    "eps": "`epsilon`",
    "damping": "",
    "exponent": "`inverse_exponent_override` of `preconditioner_config`; earlier `inv_root_override`",
    "graft": "`grafting_config`",
    "graft_beta2": "`beta2` of `grafting_config`",
    "graft_eps": "`epsilon` of `grafting_config`",
    "weight_decay": "`weight_decay`",
    "weight_decay_mode": "`weight_decay_type`; earlier `use_decoupled_weight_decay`",
    "bias_correction": "`use_bias_correction`",
    "momentum": "`ClassicMomentumConfig` as `iterate_averaging_config`; earlier `momentum`",
    "nesterov": "its `use_nesterov`; earlier `use_nesterov`",
    "averaging": "`iterate_averaging_config`",
    "max_preconditioner_dim": "`max_preconditioner_dim`",
    "merge_dims": "`target_parameter_dimensionality` of `distributed_config`; earlier `use_merge_dims`",
    "precondition_1d": "",
    "precondition_frequency": "`precondition_frequency`",
    "start_preconditioning_step": "`start_preconditioning_step`; -1 is `precondition_frequency`",
    "refresh_warmup": "",
    "root": "`amortized_computation_config` of `preconditioner_config`",
    "root_dtype": "`inv_factor_matrix_dtype` of `preconditioner_config`",
    "max_failed_refreshes": "`num_tolerated_failed_amortized_computations` of `preconditioner_config`",
    "communication_dtype": "`communication_dtype` of `distributed_config`",
    "num_trainers_per_group": "`num_trainers_per_group` of `distributed_config`; -1 is `None`",
}


def table() -> str:
    ours, paper = lather.Shampoo(parameters()).param_groups[0], group_of()
    rows = ["| option | `lather.Shampoo` | `lather.distributed_shampoo` | Meta's name |", "|---|---|---|---|"]
    for name, theirs in NAMES.items():
        fixed = {name: ARGUMENTS[name][0]} if name in ARGUMENTS else {}
        rows.append(f"| `{name}` | `{(ours | fixed)[name]!r}` | `{(paper | fixed)[name]!r}` | {theirs} |")
    return "\n".join(rows)


def written(text: str) -> str:
    return re.sub(r"^\| option .*?(?=\n\n)", lambda _: table(), text, flags=re.S | re.M)


def test_the_page_has_all_defaults() -> None:
    assert table() in PAGE.read_text(), f"run PYTHONPATH=tests python {__file__}"
    assert written(PAGE.read_text().replace("`1e-12`", "`2`")) == written(PAGE.read_text()) == PAGE.read_text()


def test_a_multiplier_of_a_group_holds_for_exponents_of_all() -> None:
    group = {"params": [torch.nn.Parameter(torch.zeros(3, 2))], "exponent_multiplier": 1.5}
    assert lather.distributed_shampoo([group], inv_root_override=2).param_groups[0]["exponent"] == 0.75


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
