"""The optimizer in float32 against its textbook twin in float64, option by option.

Float32 statistics do not resolve eigenvalues below about 1e-7 of the largest, and an inverse root magnifies just those.
So gradients here are noise with mild correlations, and eps is large wherever a factor may be rank deficient: the
comparison must not hinge on digits that float32 does not have.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from paper import PAPER
from reference import Reference, cut
from torch import Tensor

import lather
from lather.settings import graft_name, resolve

Shape = tuple[int, ...]
Options = dict[str, Any]

STEPS = 20  # where the schedule of refreshes or the options change with them
SHORT = 10  # three refreshes, or two and steps after them
NEVER: dict[int, Any] = {}
GRAFTS = ("sgd", "adagrad", "rmsprop", "adam", "adafactor", "constant", None)
WITHOUT_FACTORS = [graft for graft in GRAFTS if graft != "adafactor"]  # Shampoo's
FEW: list[Shape] = [(8, 3), (3, 2, 3), (5,)]
ZOO: list[Shape] = [
    *FEW,
    (),
    (7, 5),  # four kinds of blocks
    (9, 4),
    (4, 3, 2, 3),  # a convolution
    (2, 3, 1, 2, 2),  # one in three dimensions
    (1, 5),
    (6, 1, 1),
    (1,),
    (0, 3),
    (11, 2),
]

# Two quite different optimizers, around which one option at a time is changed: near the defaults, and near the paper's. In 20
# steps the default warm-up of refreshes would leave nothing of their schedule.
ADAM: Options = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.1, "precondition_frequency": 3}
ADAM |= {"refresh_warmup": 0.0}
HEAVY: Options = PAPER | {
    "lr": 0.03, "betas": (0.0, 1.0), "eps": 5e-2, "weight_decay": 0.1, "weight_decay_mode": "l2", "momentum": 0.8,
    "nesterov": True, "merge_dims": False, "precondition_frequency": 4, "start_preconditioning_step": 1,
}  # fmt: skip
BASES = {"adam": ADAM | {"max_preconditioner_dim": 4}, "heavy": HEAVY | {"max_preconditioner_dim": 4}}

VARIANTS: dict[str, Options] = {
    "plain": {},
    "no filter": {"betas": (0.0, 0.999)},
    "sum": {"betas": (0.9, 1.0)},
    "short memory": {"betas": (0.9, 0.95)},
    "beta3": {"betas": (0.9, 0.95), "beta3": 0.7},
    "beta3 = 0": {"betas": (0.9, 1.0), "beta3": 0.0},
    "no beta3": {"beta3": None},
    "nesterov's filter": {"betas": (0.9, 0.95), "beta3": "nesterov"},
    "nesterov's filter, uncorrected sum": {"betas": (0.9, 1.0), "beta3": "nesterov", "bias_correction": False},
    "uncorrected": {"betas": (0.9, 0.95), "bias_correction": False},
    "relative damping": {"damping": "relative", "eps": 1e-2},
    "absolute damping": {"damping": "absolute"},
    "exponent": {"exponent": 0.3},
    "exponent 1/2": {"exponent": 0.5},
    "the paper's exponent": {"exponent": "paper"},
    "exponents": {"exponent": {2: 0.4, 3: 0.1}, "merge_dims": False},
    "exponent of one order": {"exponent": {3: 0.5}, "merge_dims": False},
    "exponent 0": {"exponent": 0.0},
    "multiplier": {"exponent_multiplier": 1.82},
    "no decay": {"weight_decay": 0.0},
    "momentum": {"momentum": 0.9, "nesterov": False},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "nesterov": False},
    "dampened nesterov": {"momentum": 0.9, "dampening": 0.3, "nesterov": True},
    "schedule free": {"momentum": 0.0, "nesterov": False, "averaging": "schedule_free"},
    "gpa": {"momentum": 0.0, "nesterov": False, "averaging": "gpa", "averaging_decay": 0.6},
    "maximize": {"maximize": True},
    "merged": {"merge_dims": True, "max_preconditioner_dim": 6},
    "unmerged": {"merge_dims": False},
    "whole": {"max_preconditioner_dim": 1024},
    "diagonal": {"large_dim": "diagonal"},
    "diagonal everywhere": {"large_dim": "diagonal", "max_preconditioner_dim": 1},
    "adagrad": {"large_dim": "adagrad"},
    "vectors": {"precondition_1d": True},
    "multiples of 2": {"precondition_1d": True, "block_multiple": 2},
    "elementwise": {"preconditioner": None},
    "every step": {"precondition_frequency": 1, "start_preconditioning_step": None},
    "third step": {"precondition_frequency": 3, "start_preconditioning_step": None},
    "start at 1": {"start_preconditioning_step": 1},
    "start at 5": {"start_preconditioning_step": 5},
    "never": {"start_preconditioning_step": math.inf},
    "packed": {"factors": "packed"},
    "staggered": {"refresh": "staggered"},
    "staggered late": {"refresh": "staggered", "start_preconditioning_step": 5, "precondition_frequency": 7},
    "warmed up as by default": {"refresh_warmup": 0.1},
    "warmed up": {"refresh_warmup": 0.25},
    "warmed up late": {"refresh_warmup": 0.5, "start_preconditioning_step": 3, "precondition_frequency": 5},
    "warmed up, staggered": {"refresh_warmup": 0.25, "refresh": "staggered"},
    "delayed": {"refresh_delay": 2},
    "delayed, staggered": {"refresh_delay": 3, "refresh": "staggered", "precondition_frequency": 4},
}
# What grafts have to do with. Each goes with every graft; the others with one in turn, and near the paper's options with another.
OF_GRAFTS = ("plain", "no filter", "sum", "nesterov's filter, uncorrected sum", "uncorrected", "elementwise", "start at 5", "never")
CASES = {
    f"{base}, {variant}, {graft}": BASES[base] | changes | {"graft": graft}
    for number, (variant, changes) in enumerate(VARIANTS.items())
    for turn in ([GRAFTS[(number + i) % len(GRAFTS)] for i in range(len(GRAFTS))],)
    for base, grafts in (("adam", [*turn, "auto"] if variant in OF_GRAFTS else turn[:1]), ("heavy", turn[2:3]))
    for graft in grafts
    if variant == "plain" or BASES[base] | changes != BASES[base]
}
# Every graft with one base here and with the other there, and all pairs of both together.
ONE_BASE = pytest.mark.parametrize(("base", "graft"), [(("adam", "heavy")[i % 2], graft) for i, graft in enumerate(GRAFTS)])
OTHER_BASE = pytest.mark.parametrize(("base", "graft"), [(("heavy", "adam")[i % 2], graft) for i, graft in enumerate(GRAFTS)])
RATES = {t: {"lr": 0.08 * (t / 6 if t < 6 else 0.9 ** (t - 6))} for t in range(1, STEPS + 1)}


def noise(shape: Shape) -> Tensor:
    """With a drift, so that every parameter gets somewhere, and correlated along every dimension."""
    g = 0.2 + 0.4 * torch.randn(shape)
    for dim in range(g.dim()):
        g = g + 0.3 * g.roll(1, dim)
    return g


def translate(opt: lather.Shampoo, group: int, first: int) -> dict[tuple[int, int], int]:
    """The offsets of a group's blocks as the twin wants them; `first` is the group's first parameter."""
    blocks, settings = opt._session.run.plan.blocks, resolve(opt.param_groups[group])
    offsets = opt._session.run.offsets(group, settings)
    return {(blocks[i].param - first, blocks[i].index): offset for i, offset in offsets.items()}


class Race:
    """The optimizer with one or more groups, and one twin per group, side by side."""

    def __init__(self, groups: Sequence[tuple[Sequence[Shape], Options]], dtype: torch.dtype = torch.float32) -> None:
        state = {"state_dtype": str(dtype).removeprefix("torch.")}
        self.params = [[torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes] for shapes, _ in groups]
        self.start = [[p.detach().to(torch.float64, copy=True) for p in params] for params in self.params]
        self.opt = lather.Shampoo([{"params": ps, **state, **o} for ps, (_, o) in zip(self.params, groups, strict=True)])
        self.opt.state_dict()  # makes the plan
        self.twins = [Reference(ps, **o, offsets={}) for ps, (_, o) in zip(self.params, groups, strict=True)]
        assert [graft_name(group) for group in self.opt.param_groups] == [twin.options["graft"] for twin in self.twins]

    def change(self, options: Mapping[str, Any]) -> None:
        for group, twin in zip(self.opt.param_groups, self.twins, strict=True):
            group.update(options)
            twin.options.update(options)

    def step(self, keep: float, spoil: Mapping[int, float]) -> None:
        """One step. A gradient is there with probability `keep`; `spoil` zeroes some, or their first element is bad."""
        first = 0
        for number, (params, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            if twin.options["refresh"] == "staggered":
                twin.offsets = translate(self.opt, number, first)
            for i, p in enumerate(params):
                g = noise(p.shape).to(p.dtype)
                if i in spoil:
                    g.view(-1)[slice(1 if spoil[i] else None)] = spoil[i]
                p.grad = g if torch.rand(()) < keep else None
            twin.step([p.grad for p in params])
            first += len(params)
        self.opt.step()

    def error(self) -> float:
        """The largest distance between a parameter and its twin's, relative to the way it went."""
        worst = 0.0
        for params, twin, start in zip(self.params, self.twins, self.start, strict=True):
            for p, w, w0 in zip(params, twin.params, start, strict=True):
                if p.numel():
                    assert (w - w0).norm() > 1e-2 * w0.norm(), "a race in which nobody moves shows nothing"
                    worst = max(worst, ((p.detach().double() - w).norm() / (w - w0).norm()).item())
        return worst

    def run(
        self,
        live: Mapping[int, Options] = NEVER,
        spoil: Mapping[int, Mapping[int, float]] = NEVER,
        keep: float = 1.0,
        steps: int | None = None,
    ) -> float:
        """All steps, with options changed live and gradients spoilt at some of them; see `step`."""
        for t in range(1, 1 + (steps or (STEPS if live else SHORT))):
            self.change(live.get(t, {}))
            self.step(keep, spoil.get(t, {}))
        return self.error()


def race(shapes: Sequence[Shape], options: Options, **conditions: Any) -> None:
    assert Race([(shapes, options)]).run(**conditions) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_one_option_at_a_time(case: str) -> None:
    race(FEW, CASES[case], steps=STEPS if "warmed" in case or "late" in case else SHORT)


@ONE_BASE
def test_every_shape(base: str, graft: str | None) -> None:
    race(ZOO, BASES[base] | {"graft": graft})


PAIRS: dict[str, Options] = {
    "blocks of one element": {"max_preconditioner_dim": 1, "precondition_1d": True},
    "coupled": {"weight_decay_mode": "l2"},
    "nesterov, beta3": {"momentum": 0.9, "nesterov": True, "beta3": 0.5},
    "maximize, l2": {"maximize": True, "weight_decay_mode": "l2", "weight_decay": 0.3},
    "maximize, momentum, corrected": {"maximize": True, "momentum": 0.9, "weight_decay_mode": "corrected"},
    "sum, uncorrected": {"betas": (0.9, 1.0), "bias_correction": False},
    "sum, graft_beta2": {"betas": (0.9, 1.0), "graft_beta2": 0.9, "graft_eps": 1e-2},
    "uncorrected, graft_beta2": {"bias_correction": False, "graft_beta2": 0.8, "graft_eps": 1e-3},
    "diagonal, vectors": {"large_dim": "diagonal", "precondition_1d": True},
    "unmerged, sum": {"merge_dims": False, "betas": (0.9, 1.0)},
    "absolute damping, diagonal": {"damping": "absolute", "large_dim": "diagonal", "precondition_1d": True},
    "absolute damping, unmerged, sum": {"damping": "absolute", "merge_dims": False, "betas": (0.9, 1.0)},
    "multiples of 3, limit 5": {"block_multiple": 3, "max_preconditioner_dim": 5, "precondition_1d": True},
    "multiples of 2, unmerged": {"block_multiple": 2, "merge_dims": False},
    "diagonal, exponents": {"large_dim": "diagonal", "exponent": {1: 0.2, 2: 0.4, 3: 0.3}, "precondition_1d": True},
    "diagonal, vectors, unmerged": {"large_dim": "diagonal", "merge_dims": False, "precondition_1d": True},
    "diagonal, multiplier, ungrafted": {"large_dim": "diagonal", "exponent_multiplier": 1.82, "graft": None},
    "adagrad, ungrafted": {"large_dim": "adagrad", "graft": None, "graft_eps": 1e-3, "momentum": 0.8},
    "adagrad, sgd, uncorrected": {"large_dim": "adagrad", "graft": "sgd", "bias_correction": False},
    "staggered, diagonal, vectors": {"refresh": "staggered", "large_dim": "diagonal", "precondition_1d": True},
    "staggered, start at 1, ungrafted": {"refresh": "staggered", "start_preconditioning_step": 1, "graft": None},
    "staggered, every step": {"refresh": "staggered", "precondition_frequency": 1},
    "staggered, never": {"refresh": "staggered", "start_preconditioning_step": math.inf},
    "vectors, pieces, exponent 0": {"precondition_1d": True, "exponent": {1: 0.0, 2: 0.5}},
    "ungrafted, uncorrected": {"graft": None, "bias_correction": False, "momentum": 0.9},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_options_together(pair: str) -> None:
    race([*FEW, (7, 5), ()], BASES["adam"] | PAIRS[pair])


@pytest.mark.parametrize(("graft", "momentum"), [("adam", {}), ("sgd", {"momentum": 0.9, "nesterov": True})], ids=["adam", "sgd"])
@pytest.mark.parametrize("mode", ["decoupled", "l2", "corrected", "independent"])
def test_decay_while_the_rate_changes(mode: str, graft: str, momentum: Options) -> None:
    race(FEW, BASES["adam"] | {"graft": graft, "weight_decay": 0.3, "weight_decay_mode": mode} | momentum, live=RATES)


@pytest.mark.parametrize("mode", ["decoupled", "l2", "corrected", "independent"])
def test_decay_when_the_rate_starts_at_zero(mode: str) -> None:
    """Warm-up from zero: parameters do not move at first, but momentum builds up."""
    rates = {1: {"lr": 0.0}, 3: {"lr": 0.03}, 4: {"lr": 0.05}}
    race(FEW, BASES["heavy"] | {"lr": 0.0, "weight_decay": 0.3, "weight_decay_mode": mode}, live=rates)


@pytest.mark.parametrize("graft", GRAFTS)
@pytest.mark.parametrize(("base", "refresh"), [("adam", "together"), ("heavy", "staggered")])
def test_missing_gradients(refresh: str, base: str, graft: str | None) -> None:
    """Same-shaped parameters whose steps drift apart."""
    race([*FEW, *FEW, (8, 3)], BASES[base] | {"graft": graft, "refresh": refresh}, keep=0.6)


@pytest.mark.parametrize(("base", "refresh"), [("heavy", "together"), ("adam", "staggered")])
def test_missing_gradients_with_the_other_refresh(refresh: str, base: str) -> None:
    test_missing_gradients(refresh, base, "rmsprop")


LIVE: dict[str, dict[int, Options]] = {
    "lr": RATES,
    "betas": {5: {"betas": (0.8, 0.9)}, 12: {"betas": (0.95, 0.99)}},
    "sum": {7: {"betas": (0.9, 1.0)}},
    "filter on": {1: {"betas": (0.0, 0.95)}, 6: {"betas": (0.9, 0.95)}},
    "filter off": {6: {"betas": (0.0, 0.95)}},
    "momentum on": {6: {"momentum": 0.9}},
    "momentum off": {1: {"momentum": 0.9}, 6: {"momentum": 0.0}},
    "eps": {5: {"eps": 1e-1}, 10: {"eps": 2e-2}},
    "damping": {5: {"damping": "absolute"}, 12: {"damping": "relative"}},
    "weight_decay": {1: {"weight_decay": 0.0}, 5: {"weight_decay": 0.5}, 11: {"weight_decay": 0.2}},
    "weight_decay_mode": {4: {"weight_decay_mode": "l2"}, 9: {"weight_decay_mode": "independent"}},
    "exponent": {8: {"exponent": None}, 14: {"exponent": 0.3}},
    "beta3": {4: {"beta3": None}, 8: {"beta3": 0.5}, 13: {"beta3": "nesterov"}},
    "no start any more": {8: {"start_preconditioning_step": math.inf}, 14: {"start_preconditioning_step": None}},
    "graft_eps": {5: {"graft_eps": 1e-2}},
    "graft_beta2": {5: {"graft_beta2": 0.7}},
    "more often": {8: {"precondition_frequency": 2}},
    "warm-up on and off": {4: {"refresh_warmup": 0.5}, 9: {"refresh_warmup": 0.0}},
    "delay on": {6: {"refresh_delay": 2}},
    "delay beside the default warm-up": {1: {"refresh_warmup": 0.1}, 6: {"refresh_delay": 2}, 13: {"refresh_delay": 0}},
    "delay on and off": {1: {"refresh_delay": 1}, 6: {"refresh_delay": 0}, 9: {"refresh_delay": 2}},
    "less often": {10: {"precondition_frequency": 5}},
    "bias_correction": {6: {"bias_correction": False}},
    "maximize": {6: {"maximize": True}, 9: {"maximize": False}},
}


@pytest.mark.parametrize("change", LIVE)
def test_options_change_between_steps(change: str) -> None:
    race(FEW, BASES["adam"], live=LIVE[change])


@pytest.mark.parametrize("graft", ["adam", "sgd", None])
@pytest.mark.parametrize(("before", "after"), [(10, 3), (3, 8)], ids=["no root yet", "root there"])
def test_the_frequency_changes_around_the_first_refresh(before: int, after: int, graft: str | None) -> None:
    """A block follows its graft until it has a root, and its root from then on, whatever the default start becomes."""
    live = {1: {"precondition_frequency": before}, 5: {"precondition_frequency": after}}
    race(FEW, BASES["adam"] | {"graft": graft}, live=live)


@pytest.mark.parametrize("refresh", ["together", "staggered"])
def test_groups_have_options_of_their_own(refresh: str) -> None:
    one = BASES["adam"] | {"refresh": refresh, "precondition_frequency": 5}
    two = BASES["heavy"] | {"graft": "rmsprop", "large_dim": "diagonal", "precondition_1d": True}
    three = BASES["adam"] | {"graft": None, "weight_decay_mode": "independent", "max_preconditioner_dim": 1024}
    assert Race([(FEW, one), (FEW, two), ([(8, 3)], three), (FEW, one)]).run(keep=0.8) <= 1e-5


LARGE = ("block", "diagonal", "adagrad")


@pytest.mark.parametrize(("large_dim", "graft"), [(LARGE[(i + j) % 3], graft) for i, graft in enumerate(GRAFTS) for j in range(2)])
def test_batch_dimensions(large_dim: str, graft: str | None) -> None:
    shapes: list[Shape] = [(3, 6, 4), (2, 1, 5), (3, 2, 3, 2), (4,), (2, 3)]
    race(shapes, BASES["adam"] | {"batch_dims": 1, "large_dim": large_dim, "graft": graft})


@pytest.mark.parametrize("refresh", ["together", "staggered"])
def test_a_bad_gradient_is_skipped(refresh: str) -> None:
    """At any point of the period, also at a refresh. The other blocks go on."""
    run = Race([([(8, 3), (8, 3), (5,)], BASES["adam"] | {"momentum": 0.9, "refresh": refresh})])
    bad = {2: {0: math.nan}, 3: {1: math.inf}, 6: {0: math.nan, 2: -math.inf}, 7: {0: math.nan}}
    with pytest.warns(lather.NumericalWarning):
        error = run.run(spoil=bad)
    assert error <= 1e-5


@ONE_BASE
def test_a_zero_gradient_is_a_gradient(base: str, graft: str | None) -> None:
    """From the first step on or in between: its direction is zero, and decay and momentum go on."""
    zeros = {t: {0: 0.0, 2: 0.0} if t < 6 else {1: 0.0} for t in (1, 2, 3, 4, 8, 9)}
    options = BASES[base] | {"graft": graft, "weight_decay_mode": "decoupled", "damping": "absolute"}
    assert Race([(FEW, options)]).run(spoil=zeros) <= 1e-5


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 3)], ids=str)
def test_after_zero_gradients_a_step_is_as_long_as_the_grafts(shape: Shape) -> None:
    """Roots are refreshed while all gradients are zero, and used before they are refreshed again."""
    moved = []
    for start in (None, math.inf):
        p = torch.nn.Parameter(torch.zeros(shape))
        opt = lather.Shampoo(
            [p], lr=1.0, beta3=None, refresh_warmup=0.0, precondition_frequency=3, start_preconditioning_step=start
        )
        for t in range(1, 5):
            p.grad = torch.full(shape, float(t == 4))
            opt.step()
        moved.append(p.detach().norm())
    torch.testing.assert_close(moved[0], moved[1])


SPLITS: dict[str, tuple[list[Shape], Options]] = {
    "thirds": ([(9, 4), (6, 2), (9,), (0, 3)], {"split": 3}),
    "sizes": ([(9, 4), (9, 2, 3)], {"split": (5, 2, 2)}),
    "columns": ([(4, 9), (2, 9, 2)], {"split": (1, 8), "split_dim": 1}),
    "experts": ([(2, 6, 5)], {"split": 2, "split_dim": 1, "batch_dims": 1}),
    "diagonal": ([(9, 4), (15, 3)], {"split": 3, "large_dim": "diagonal"}),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("base", BASES)
def test_split(base: str, name: str) -> None:
    shapes, options = SPLITS[name]
    assert Race([(shapes, BASES[base] | options)]).run(keep=0.8) <= 1e-5


@pytest.mark.parametrize(("base", "graft"), [("adam", "auto"), ("adam", "adam"), ("heavy", "adam")])
def test_state(base: str, graft: str) -> None:
    """Not only the parameters: factors, roots, filtered gradients, graft moments and momenta."""
    run = Race([(ZOO, BASES[base] | {"graft": graft, "precondition_1d": True, "large_dim": "diagonal"})])
    run.run()
    (params,), (twin,) = run.params, run.twins
    for p, blocks, sizes in zip(params, twin.blocks, twin.sizes, strict=True):
        state = run.opt.state[p]
        for j, block in enumerate(blocks if p.numel() else []):
            expected = {"v": block.v} if block.method == "adam" else {}
            expected |= {"m": block.m} if twin.options["betas"][0] else {}
            expected |= {f"L{i}": factor for i, factor in enumerate(block.factors)}
            expected |= {f"X{i}": root for i, root in enumerate(block.roots or []) if root is not None}
            assert {key.partition(".")[0] for key in state if key.endswith(f".{j}")} == expected.keys()
            for role, value in expected.items():
                ours = state[f"{role}.{j}"].double().reshape(value.shape)
                assert (ours - value).norm() <= 1e-5 * value.norm(), (p.shape, role)
            if twin.options["momentum"]:
                ours = cut(state["momentum"].double(), sizes[0])[j]
                assert (ours - block.momentum).norm() <= 1e-5 * block.momentum.norm()


@OTHER_BASE
def test_float64(base: str, graft: str | None) -> None:
    assert Race([(ZOO, BASES[base] | {"graft": graft})], torch.float64).run(keep=0.8) <= 1e-12


@pytest.mark.parametrize(("base", "kept"), [("adam", "bfloat16"), ("heavy", "bfloat16"), ("heavy", "float16"), ("adam", "float32")])
def test_rounded_roots(base: str, kept: str) -> None:
    """In float64 both round the same number. In float32 a root may be rounded the other way."""
    options = BASES[base] | {"root_dtype": kept, "precondition_1d": True, "large_dim": "diagonal"}
    exact = Race([(ZOO, options)], torch.float64)
    assert exact.run(keep=0.8) <= 1e-12
    single = Race([(ZOO, options)])
    assert single.run(keep=0.8) <= 1e-2
    assert {x.dtype for s in exact.opt.state.values() for k, x in s.items() if k[0] == "X"} == {getattr(torch, kept)}


@pytest.mark.parametrize("base", BASES)
def test_a_rounded_filter(base: str) -> None:
    """As with rounded roots."""
    options = BASES[base] | {"filter_dtype": "bfloat16", "betas": (0.9, 0.95)}
    exact = Race([(ZOO, options)], torch.float64)
    assert exact.run(keep=0.8) <= 1e-12
    assert Race([(ZOO, options)]).run(keep=0.8) <= 1e-2
    assert {x.dtype for s in exact.opt.state.values() for k, x in s.items() if k.startswith("m.")} == {torch.bfloat16}


@pytest.mark.parametrize("graft", GRAFTS)
def test_the_papers_eps_where_factors_have_full_rank(graft: str | None) -> None:
    """By the first refresh every factor has seen more columns than it has rows, so eps = 1e-12 decides nothing."""
    options = PAPER | {"lr": 0.05, "betas": (0.9, 1.0), "graft": graft, "precondition_1d": True, "precondition_frequency": 10}
    race([(8, 6), (5, 3, 2), (4,)], options, steps=12)


# By order, shapes whose factors have full rank from the first refresh on: the bases of SOAP are then unique.
ORDERS: dict[int, list[Shape]] = {1: [(2,), (2,)], 2: [(5, 5), (4, 4)], 3: [(3, 4, 3)], 4: [(2, 3, 3, 2)]}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", ["shampoo", "kl", "soap", "spectral", None])
def test_the_defaults(method: str | None, order: int) -> None:
    """Shapes only decide what is preconditioned. All else is as it comes, the learning rate apart."""
    options = {"lr": 0.05, "preconditioner": method, "precondition_1d": True, "merge_dims": False}
    assert Race([(ORDERS[order], options)], torch.float64).run(steps=STEPS) <= 1e-9
    assert Race([(ORDERS[order], options)]).run() <= 1e-4  # KL of order 2: 1.5e-5 on an Intel CPU


@pytest.mark.parametrize("method", ["shampoo", "kl", "soap", "spectral"])
def test_the_defaults_without_a_graft(method: str) -> None:
    """How long directions are then depends on small eigenvalues too, which float32 does not resolve."""
    options = {"lr": 0.5, "preconditioner": method, "precondition_1d": True, "merge_dims": False, "graft": None}
    assert Race([(shapes, options) for shapes in ORDERS.values()], torch.float64).run() <= 1e-9


@pytest.mark.parametrize("method", ["shampoo", "kl", "spectral", None])
def test_the_defaults_where_factors_have_no_full_rank_at_first(method: str | None) -> None:
    """Also vectors that are not preconditioned, beside matrices that look ahead; and parameters that sit steps out."""
    shapes = [*ZOO, (20, 3), (3, 20)]
    assert Race([(shapes, {"lr": 0.05, "preconditioner": method})], torch.float64).run(keep=0.8, steps=STEPS) <= 1e-9


# The other methods in float64, with every shape in the cases that cut them differently. In float32, whose errors hide more, the
# cases that round differently.
SOME: list[Shape] = [*FEW, (7, 5)]
CUT = ("plain", "ungrafted", "diagonal", "diagonal everywhere", "adagrad", "vectors", "unmerged", "unmerged, nesterov", "whole")
CUT += ("experts", "original", "match_rms_adamw", "multiples of 2", "near the defaults", "near the defaults, grafted", "packed")
SINGLE = ("plain", "grafted", "ungrafted", "sum", "near the defaults", "diagonal", "svd", "polar express")


def shapes_of(case: str) -> list[Shape]:
    shapes = ZOO if case in CUT else [*SOME, (4, 3, 2, 3), ()]
    return [shape for shape in shapes if shape] if case == "experts" else shapes


def length(case: str) -> int:
    """All steps where the schedule of refreshes changes with them."""
    return STEPS if "near the defaults" in case else SHORT


# Factors that see the gradient preconditioned by each other.

KL: dict[str, Options] = {
    "plain": {},
    "ungrafted": {"graft": None},
    "sum": {"betas": (0.9, 1.0)},
    "every step": {"precondition_frequency": 1, "graft": "sgd", "bias_correction": False},
    "staggered": {"refresh": "staggered", "momentum": 0.9},
    "delayed": {"refresh_delay": 1},
    "diagonal": {"large_dim": "diagonal", "precondition_1d": True, "merge_dims": False},
    "relative": {"damping": "relative"},
    "near the defaults": {"damping": "relative", "eps": 1e-2, "refresh_warmup": 0.1, "beta3": "nesterov"},
    "multiples of 2": {"block_multiple": 2, "damping": "relative"},
}


@pytest.mark.parametrize("case", KL)
def test_kl(case: str) -> None:
    given = PAPER | {"lr": 0.03, "eps": 0.1, "precondition_frequency": 3, "max_preconditioner_dim": 4}
    options = given | {"preconditioner": "kl"} | KL[case]
    assert Race([(shapes_of(case), options)], torch.float64).run(keep=0.8, steps=length(case)) <= 1e-10
    assert case not in SINGLE or Race([(SOME, options)]).run(keep=0.8) <= 1e-3


# Adam in eigenbases.

EIGEN: Options = PAPER | {"lr": 0.03, "eps": 1e-2, "weight_decay": 0.1, "precondition_frequency": 3}
EIGEN |= {"max_preconditioner_dim": 4, "preconditioner": "soap", "graft": None}
SOAP: dict[str, Options] = {
    "plain": {},
    "grafted": {"graft": "adam"},
    "sgd": {"graft": "sgd", "betas": (0.0, 0.95), "momentum": 0.9},
    "rmsprop, start at 5": {"graft": "rmsprop", "start_preconditioning_step": 5},
    "start at 5": {"start_preconditioning_step": 5},
    "never": {"start_preconditioning_step": math.inf},
    "sum": {"betas": (0.9, 1.0)},
    "no filter": {"betas": (0.0, 0.95)},
    "beta3, uncorrected": {"beta3": 0.7, "bias_correction": False},
    "every step": {"precondition_frequency": 1, "start_preconditioning_step": 4},
    "staggered": {"refresh": "staggered", "start_preconditioning_step": 4, "momentum": 0.9},
    "delayed": {"refresh_delay": 2, "precondition_frequency": 4},
    "delayed, staggered": {"refresh_delay": 1, "refresh": "staggered", "start_preconditioning_step": 5},
    "packed": {"factors": "packed"},
    "diagonal": {"large_dim": "diagonal", "merge_dims": False},
    "diagonal everywhere": {"large_dim": "diagonal", "max_preconditioner_dim": 1, "precondition_1d": True},
    "adagrad": {"large_dim": "adagrad"},
    "vectors": {"precondition_1d": True, "precondition_frequency": 5},
    "elementwise eps": {"graft_eps": 1e-3, "graft_beta2": 0.8},
    "unmerged, nesterov": {"merge_dims": False, "momentum": 0.9, "nesterov": True},
    "l2, maximize": {"weight_decay_mode": "l2", "maximize": True},
    "experts": {"batch_dims": 1},
    "relative": {"damping": "relative"},
    "relative sum, uncorrected": {"damping": "relative", "betas": (0.9, 1.0), "bias_correction": False},
    "near the defaults": {"damping": "relative", "refresh_warmup": 0.1, "beta3": "nesterov"},
    "near the defaults, grafted": {"damping": "relative", "refresh_warmup": 0.1, "beta3": "nesterov", "graft": "adam"},
}


@pytest.mark.parametrize("case", SOAP)
def test_soap(case: str) -> None:
    """In float32, eigenvectors of close eigenvalues are less exact than in float64."""
    assert Race([(shapes_of(case), EIGEN | SOAP[case])], torch.float64).run(keep=0.8, steps=length(case)) <= 1e-9
    assert case not in SINGLE or Race([(SOME, EIGEN | SOAP[case])]).run(keep=0.8) <= 1e-2


def test_soap_options_change_between_steps() -> None:
    live = {4: {"eps": 0.1, "lr": 0.05}, 6: {"refresh_delay": 1}, 9: {"betas": (0.8, 0.9)}, 11: {"refresh_delay": 0}}
    live |= {13: {"precondition_frequency": 2}, 15: {"betas": (0.8, 1.0)}}
    assert Race([(FEW, EIGEN)], torch.float64).run(live=live) <= 1e-9


@pytest.mark.parametrize("graft", WITHOUT_FACTORS)
def test_soap_beside_shampoo(graft: str | None) -> None:
    """Parts, and zero and bad gradients."""
    groups = [([(9, 4), (6, 3), (9,)], EIGEN | {"split": 3, "graft": graft}), (FEW, BASES["adam"])]
    with pytest.warns(lather.NumericalWarning):
        assert Race(groups, torch.float64).run(spoil={5: {0: 0.0, 2: 0.0}, 7: {1: math.nan}}) <= 1e-9


# Polar factors instead of roots.

MUON: Options = {"lr": 0.03, "betas": (0.9, 0.95), "weight_decay": 0.1, "preconditioner": "spectral"}
UNGRAFTED: Options = {"graft": None}
SPECTRAL: dict[str, Options] = {
    "plain": UNGRAFTED,
    "grafted": {},
    "sgd": {"graft": "sgd", "betas": (0.0, 0.95), "momentum": 0.9},
    "adagrad": {"graft": "adagrad", "large_dim": "adagrad"},
    "original": UNGRAFTED | {"polar_scale": "original"},
    "match_rms_adamw": UNGRAFTED | {"polar_scale": "match_rms_adamw", "weight_decay_mode": "corrected"},
    "two steps": UNGRAFTED | {"polar": "newton_schulz(steps=2)"},
    "coefficients": UNGRAFTED | {"polar": "newton_schulz(steps=4, coefficients=(2, -1.5, 0.5))"},
    "eps": UNGRAFTED | {"polar": "newton_schulz(steps=2, eps=2.0)"},
    "polar express": UNGRAFTED | {"polar": "polar_express"},
    "polar express, long": UNGRAFTED | {"polar": "polar_express(steps=7, lower=0.01)", "polar_scale": "original"},
    "svd": UNGRAFTED | {"polar": "svd", "polar_scale": "original"},
    "whole": UNGRAFTED | {"max_preconditioner_dim": math.inf, "polar_scale": "original"},
    "unmerged": UNGRAFTED | {"merge_dims": False, "momentum": 0.9, "nesterov": True},
    "vectors": {"precondition_1d": True, "graft": "rmsprop"},
    "start at 5": {"start_preconditioning_step": 5},
    "start at 5, ungrafted": UNGRAFTED | {"start_preconditioning_step": 5},
    "never": {"start_preconditioning_step": math.inf},
    "beta3": UNGRAFTED | {"beta3": 0.7, "bias_correction": False},
    "no beta3": UNGRAFTED | {"beta3": None},
    "nesterov's filter, uncorrected": {"beta3": "nesterov", "bias_correction": False},
    "l2, maximize": UNGRAFTED | {"weight_decay_mode": "l2", "maximize": True},
}
every_spectral = pytest.mark.parametrize("case", SPECTRAL)


@every_spectral
def test_spectral(case: str) -> None:
    """Small singular values grow by a factor of up to a few hundred, and so do their rounding errors in float32."""
    options = MUON | {"max_preconditioner_dim": 4} | SPECTRAL[case]
    assert Race([(shapes_of(case), options)], torch.float64).run(keep=0.8, steps=length(case)) <= 1e-11
    assert case not in SINGLE or Race([(SOME, options)]).run(keep=0.8) <= 1e-4


def test_spectral_options_change_between_steps() -> None:
    live = {3: {"polar": "svd"}, 7: {"polar": "polar_express(steps=6)", "polar_scale": "original"}, 12: {"polar_scale": None}}
    live[15] = {"start_preconditioning_step": 18}
    assert Race([(FEW, MUON | UNGRAFTED)], torch.float64).run(live=live) <= 1e-11


@pytest.mark.parametrize("graft", WITHOUT_FACTORS)
def test_spectral_beside_shampoo(graft: str | None) -> None:
    """Batch dimensions, and zero and bad gradients."""
    groups = [([(3, 6, 4), (2, 1, 5), (4,)], MUON | {"batch_dims": 1, "graft": graft}), (FEW, BASES["adam"])]
    run = Race(groups, torch.float64)
    with pytest.warns(lather.NumericalWarning):
        assert run.run(spoil={2: {0: 0.0}, 5: {0: 0.0, 2: 0.0}, 6: {1: math.nan}}) <= 1e-11
