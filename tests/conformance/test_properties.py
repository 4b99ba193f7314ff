"""What must hold whatever the options: for the optimizer as a whole, and for the geometry and plans beneath it."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from reference import Reference
from torch import Tensor

import lather
from lather import linalg
from lather.planning.blocks import Block, Layout, Region, cut, merge_dims, pieces
from lather.planning.owners import greedy
from lather.planning.plan import GEOMETRY, Spec, make_plan
from lather.planning.schedule import is_due
from lather.storage.grids import Run, coalesce

Shape = tuple[int, ...]
Options = dict[str, Any]
Grads = Sequence[Sequence[Tensor | None]]  # by step and parameter

BASE: Options = {"lr": 0.05, "eps": 1e-4, "max_preconditioner_dim": 4, "precondition_frequency": 3}
VARIANTS: dict[str, Options] = {
    "adam": {"weight_decay": 0.1},
    "adagrad": {"graft": "adagrad", "betas": (0.9, 1.0), "weight_decay": 0.1, "weight_decay_mode": "corrected"},
    "rmsprop": {"graft": "rmsprop", "momentum": 0.9, "nesterov": True, "dampening": 0.1, "bias_correction": False},
    "sgd": {"graft": "sgd", "betas": (0.0, 0.95), "momentum": 0.9, "weight_decay": 0.1, "weight_decay_mode": "l2"},
    "ungrafted": {"graft": None, "beta3": 0.5, "exponent": 0.3, "maximize": True, "start_preconditioning_step": 1},
    "multiplier": {"exponent_multiplier": 1.82, "merge_dims": False, "weight_decay_mode": "independent"},
    "diagonal": {"large_dim": "diagonal", "precondition_1d": True},
    "large adagrad": {"large_dim": "adagrad"},
    "stacked": {"batch_dims": 1, "precondition_1d": True},
    "never": {"start_preconditioning_step": math.inf},
    "newton": {"root": "newton"},
    "higher_order": {"root": "higher_order"},
    "minimax": {"root": "minimax"},
    "qr": {"root": "qr"},
    "kl": {"preconditioner": "kl", "weight_decay": 0.1},
    "soap": {"preconditioner": "soap", "graft": None, "weight_decay": 0.1},
    "soap, grafted": {"preconditioner": "soap", "betas": (0.9, 1.0), "start_preconditioning_step": 2},
    "soap, qr": {"preconditioner": "soap", "graft": None, "root": "qr", "large_dim": "diagonal", "merge_dims": False},
    "soap, track": {"preconditioner": "soap", "graft": None, "root": "track", "betas": (0.0, 0.95)},
    "spectral": {"preconditioner": "spectral", "weight_decay": 0.1},
    "spectral, ungrafted": {"preconditioner": "spectral", "graft": None, "polar": "polar_express", "merge_dims": False},
    "spectral, whole": {
        "preconditioner": "spectral",
        "graft": None,
        "polar": "svd",
        "max_preconditioner_dim": math.inf,
    },
}
every_variant = pytest.mark.parametrize("options", [BASE | o for o in VARIANTS.values()], ids=list(VARIANTS))
every_graft = pytest.mark.parametrize("graft", ["sgd", "adagrad", "rmsprop", "adam", None])
SHAPES: list[Shape] = [(7, 5), (3, 4, 2), (6,), (2, 1)]
UNALIGNED: list[Shape] = [
    (18, 5),
    (10, 5),
    (6, 25),
]  # whole, slots of these begin at odd addresses, by which BLAS rounds


def tensors(shapes: Iterable[Shape]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def gradients(shapes: Sequence[Shape], steps: int, keep: float = 1.0) -> list[list[Tensor | None]]:
    return [[torch.randn(s) if torch.rand(()) < keep else None for s in shapes] for _ in range(steps)]


def build(start: Sequence[Tensor], options: Options) -> tuple[lather.Shampoo, list[torch.nn.Parameter]]:
    params = [torch.nn.Parameter(x.clone()) for x in start]
    return lather.Shampoo(params, **options), params


def advance(opt: lather.Shampoo, params: Sequence[Tensor], grads: Grads) -> None:
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else g.clone(memory_format=torch.preserve_format)
        opt.step()


def train(start: Sequence[Tensor], grads: Grads, options: Options) -> list[dict[str, Tensor]]:
    """Every parameter and its state after these gradients."""
    opt, params = build(start, options)
    advance(opt, params, grads)
    return [snapshot(opt, p) for p in params]


def snapshot(opt: lather.Shampoo, p: Tensor) -> dict[str, Tensor]:
    return {"": p.detach().clone()} | {key: value.clone() for key, value in opt.state[p].items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


# Stacking.


@every_variant
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stack_of_n_is_n_stacks_of_one(shape: Shape, options: Options) -> None:
    start, grads = tensors([shape] * 4), gradients([shape] * 4, 8, keep=0.75)
    together = train(start, grads, options)
    for i, mine in enumerate(together):
        (alone,) = train(start[i : i + 1], [row[i : i + 1] for row in grads], options)
        same(mine, alone)


@every_variant
@pytest.mark.parametrize("shape", UNALIGNED, ids=str)
def test_a_slot_is_rounded_alike_in_every_place(shape: Shape, options: Options) -> None:
    test_a_stack_of_n_is_n_stacks_of_one(shape, options | {"max_preconditioner_dim": 32, "precondition_frequency": 4})


@every_variant
def test_the_order_of_parameters_does_not_matter(options: Options) -> None:
    shapes = [*SHAPES, (7, 5), (5, 5)]
    start, grads = tensors(shapes), gradients(shapes, 7, keep=0.9)
    order = [5, 2, 4, 0, 3, 1]
    straight = train(start, grads, options)
    shuffled = train([start[i] for i in order], [[row[i] for i in order] for row in grads], options)
    for place, i in enumerate(order):
        same(shuffled[place], straight[i])


@every_variant
def test_without_a_gradient_nothing_is_touched(options: Options) -> None:
    shapes = [shape for shape in SHAPES for _ in range(2)]
    opt, params = build(tensors(shapes), options | {"momentum": 0.9})
    for step in range(1, 9):
        grads = gradients(shapes, 1)
        if step > 1:
            grads[0][step % 2 :: 2] = [None] * len(SHAPES)
        before = [(snapshot(opt, p), p._version) if step > 1 else None for p in params]
        advance(opt, params, grads)
        for p, g, old in zip(params, grads[0], before, strict=True):
            if g is None and old is not None:
                same(snapshot(opt, p), old[0])
                assert p._version == old[1]
            elif old is not None:
                assert not torch.equal(p, old[0][""])


@every_variant
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30], ids=["nan", "inf", "overflow"])
def test_a_bad_gradient_stays_with_its_block(bad: float, options: Options) -> None:
    """1e30 is finite but its square is not; it would spoil the statistics."""
    shape = (8, 3)
    options = options | {"momentum": 0.9}
    start, grads = tensors([shape] * 3), gradients([shape] * 3, 7)
    clean = train(start, grads, options)
    opt, params = build(start, options)
    blocks = cut(1, shape, **{name: opt.param_groups[0][name] for name in GEOMETRY})
    hit = next(b for b in blocks if b.region.meet(Region((2, 1), (3, 2))))
    hurt, others = box(hit.region), count(shape, [hit.region]) == 0
    for step, row in enumerate(grads, 1):
        if step not in (2, 3, 5):
            advance(opt, params, [row])
            continue
        spoilt = [g.clone() for g in row if g is not None]
        spoilt[1][2, 1] = bad
        before = snapshot(opt, params[1])
        # Reported once per parameter.
        with pytest.warns(lather.NumericalWarning, match=r"\[1\]") if step == 2 else nullcontext():
            advance(opt, params, [spoilt])
        after = snapshot(opt, params[1])
        # The roots may be refreshed from the statistics so far; the statistics stay.
        mine = [key for key in after if key.endswith(f".{hit.index}") and key[0] in "Lmvw"]
        assert all(torch.equal(after[key], before[key]) for key in mine)
        assert all(torch.equal(after[key][hurt], before[key][hurt]) for key in ("", "momentum"))
    for i in (0, 2):
        same(snapshot(opt, params[i]), clean[i])
    assert params[1].isfinite().all()
    assert torch.equal(params[1][others], clean[1][""][others])


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_zero_gradients_move_nothing(dtype: torch.dtype, options: Options) -> None:
    start = [x.to(dtype) for x in tensors(SHAPES)]
    zeros: list[Tensor | None] = [torch.zeros_like(x) for x in start]
    for after, x in zip(train(start, [zeros] * 4, options | {"weight_decay": 0.0}), start, strict=True):
        assert torch.equal(after[""], x)
        assert all(value.isfinite().all() for value in after.values())


# What belongs to the user.


@every_variant
def test_gradients_are_only_read(options: Options) -> None:
    opt, params = build(tensors(SHAPES), options | {"weight_decay": 0.1})
    for row in gradients(SHAPES, 4):
        for p, g in zip(params, row, strict=True):
            p.grad = g
        before = [(g, g.clone(), g._version) for g in row if g is not None]
        opt.step()
        for p, (g, bits, version) in zip(params, before, strict=True):
            assert p.grad is g
            assert torch.equal(g, bits)
            assert g._version == version


def _channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


def _reversed_strides(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def _inside_another(x: Tensor) -> Tensor:
    """A view with gaps in a larger tensor."""
    host = torch.full([2 * d + 1 for d in x.shape], 7.0)
    view = host[tuple(slice(1, None, 2) for _ in x.shape)]
    return view.copy_(x)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [_channels_last, _reversed_strides, _inside_another]


@pytest.mark.parametrize("of_gradient", [*LAYOUTS, torch.clone])
@pytest.mark.parametrize("of_parameter", [*LAYOUTS, torch.clone])
@pytest.mark.parametrize("variant", ["sgd", "stacked"])
def test_memory_layouts(variant: str, of_parameter: Any, of_gradient: Any) -> None:
    shapes: list[Shape] = [(7, 5), (5, 4, 3, 2), (6,), (3, 3, 4), (7, 5)]
    start, grads = tensors(shapes), gradients(shapes, 4)
    options = BASE | VARIANTS[variant]
    expected = train(start, grads, options)
    params = [of_parameter(x).requires_grad_() for x in start]
    strides = [p.stride() for p in params]
    opt = lather.Shampoo(params, **options)
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = of_gradient(g)
        opt.step()
    assert [p.stride() for p in params] == strides
    for p, other in zip(params, expected, strict=True):
        same(snapshot(opt, p), other)
        if p._base is not None and p.numel() < p._base.numel():
            host = p._base.detach().clone()
            host[tuple(slice(1, None, 2) for _ in p.shape)] = 7.0
            assert torch.equal(host, torch.full_like(host, 7.0))


@pytest.mark.parametrize("variant", ["adam", "sgd", "diagonal", "stacked"])
def test_expanded_gradients(variant: str) -> None:
    """As the backward pass of a sum makes them: one number seen many times."""
    start, options = tensors(SHAPES), BASE | VARIANTS[variant]
    narrow = [[torch.randn(1).expand(s) for s in SHAPES] for _ in range(4)]
    opt, params = build(start, options)
    for row in narrow:
        for p, g in zip(params, row, strict=True):
            p.grad = g
            assert set(g.stride()) <= {0, 1}
        opt.step()
    for p, other in zip(params, train(start, [[g.contiguous() for g in row] for row in narrow], options), strict=True):
        same(snapshot(opt, p), other)


# Known optimizers, and scale.

NO_FILTER: Options = {"betas": (0.0, 0.999)}
TORCHS: Options = {"betas": (0.9, 0.999)}  # the defaults of its Adam
TORCH: list[tuple[type[torch.optim.Optimizer], Options, Options]] = [
    (torch.optim.SGD, {}, {"graft": "sgd", **NO_FILTER}),
    (
        torch.optim.SGD,
        {"maximize": True, "momentum": 0.8},
        {"graft": None, "maximize": True, "momentum": 0.8, **NO_FILTER},
    ),
    (
        torch.optim.SGD,
        {"weight_decay": 0.1, "momentum": 0.8, "nesterov": True},
        {
            "graft": "sgd",
            "weight_decay": 0.1,
            "weight_decay_mode": "l2",
            "momentum": 0.8,
            "nesterov": True,
            **NO_FILTER,
        },
    ),
    (torch.optim.Adagrad, {"eps": 1e-8}, {"graft": "adagrad", **NO_FILTER}),
    (
        torch.optim.Adagrad,
        {"eps": 1e-6, "weight_decay": 0.1},
        {"graft": "adagrad", "graft_eps": 1e-6, "weight_decay": 0.1, "weight_decay_mode": "l2", **NO_FILTER},
    ),
    (torch.optim.RMSprop, {"alpha": 0.95}, {"graft": "rmsprop", "betas": (0.0, 0.95)}),
    (
        torch.optim.RMSprop,
        {"alpha": 0.9, "momentum": 0.8},
        {"graft": "rmsprop", "graft_beta2": 0.9, "momentum": 0.8, **NO_FILTER},
    ),
    (torch.optim.Adam, {}, TORCHS),
    (torch.optim.Adam, {"betas": (0.8, 0.999)}, {"betas": (0.8, 1.0)}),
    (
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"betas": (0.8, 0.95), "graft_eps": 1e-6, "weight_decay": 0.1, "weight_decay_mode": "l2"},
    ),
    (torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.1}, {"weight_decay": 0.1, "weight_decay_mode": "corrected", **TORCHS}),
    (
        torch.optim.AdamW,
        {"weight_decay": 0.1},
        {"weight_decay": 0.1 * 0.02, "weight_decay_mode": "independent", **TORCHS},
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("cls", "theirs", "ours"), TORCH, ids=lambda x: getattr(x, "__name__", ""))
def test_never_preconditioned_is_torch(
    cls: Callable[..., torch.optim.Optimizer], theirs: Options, ours: Options, dtype: torch.dtype
) -> None:
    shapes = [*SHAPES, (), (5, 3, 3, 2)]
    start = [x.to(dtype) for x in tensors(shapes)]
    never = {"start_preconditioning_step": math.inf, "max_preconditioner_dim": 4, "state_dtype": dtype}
    opt, params = build(start, {"lr": 0.02} | ours | never)
    others = [torch.nn.Parameter(x.clone()) for x in start]
    reference = cls(others, lr=0.02, **theirs)
    for t in range(20):
        for p in itertools.chain(params, others):  # of a loss that depends on p, so that errors in either feed back
            p.grad = (p.detach() + 0.1 * t).sin() + 0.3 * p.detach()
        opt.step()
        reference.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for p, q, x in zip(params, others, start, strict=True):
        assert not torch.allclose(p, x, rtol=1e-3)
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@every_graft
@pytest.mark.parametrize("start", [1, math.inf])
def test_scale_of_gradients(start: float, graft: str | None) -> None:
    """g -> c g with eps -> c^2 eps and graft_eps -> c graft_eps: parameters stay, where lr undoes the degree.

    A power of two scales without rounding. So do all grafts; roots are taken by `pow`, which promises no such thing.
    """
    c, grads = 16.0, gradients(SHAPES, 7)
    degree = 1 if graft == "sgd" or (graft is None and start == math.inf) else 0
    weights, moved = tensors(s for s in SHAPES if len(s) > 1), []
    grads = [[g for g in row if g is not None and g.dim() > 1] for row in grads]
    for scale in (1.0, c):
        eps = {} if graft in ("sgd", None) else {"graft_eps": 1e-3 * scale}
        options = BASE | {"graft": graft, "start_preconditioning_step": start, "eps": 1e-2 * scale**2, **eps}
        options |= {"lr": 0.05 / scale**degree, "precondition_1d": True}
        moved.append(train(weights, [[scale * g for g in row if g is not None] for row in grads], options))
    for a, b, w in zip(*moved, weights, strict=True):
        assert not torch.allclose(a[""], w, rtol=1e-3)
        if start == math.inf:
            assert torch.equal(a[""], b[""])
        torch.testing.assert_close(a[""], b[""], rtol=1e-6, atol=1e-6)


# Geometry.

sizes = st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13])
shapes = st.lists(sizes, max_size=5).map(tuple).filter(lambda s: math.prod(s) <= 600)


@st.composite
def cuttings(draw: Any) -> tuple[Shape, Options]:
    shape = draw(shapes)
    return shape, {
        "max_preconditioner_dim": draw(st.integers(1, 14)),
        "merge_dims": draw(st.booleans()),
        "large_dim": draw(st.sampled_from(["block", "diagonal", "adagrad"])),
        "batch_dims": draw(st.integers(0, len(shape))),
        "precondition_1d": draw(st.booleans()),
    }


def box(region: Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))


def count(shape: Shape, regions: Iterable[Region]) -> Tensor:
    """How many regions hold each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for region in regions:
        counts[box(region)] += 1
    return counts


@given(cuttings())
def test_blocks_tile_the_parameter(cutting: tuple[Shape, Options]) -> None:
    shape, options = cutting
    blocks, limit = cut(3, shape, **options), options["max_preconditioner_dim"]
    assert count(shape, [b.region for b in blocks]).eq(1).all()
    assert [(b.param, b.index) for b in blocks] == [(3, i) for i in range(len(blocks))]
    for b in blocks:
        assert math.prod(b.shape) == b.region.numel > 0
        if b.method == "kronecker":
            assert len(b.shape) == len(b.modes) >= (1 if options["precondition_1d"] else 2)
            assert all(d <= limit or mode == "diagonal" for d, mode in zip(b.shape, b.modes, strict=True))
            assert options["large_dim"] == "diagonal" or set(b.modes) == {"full"}
            assert all(d == 1 for d in b.region.shape[: options["batch_dims"]])
            # What the mathematics sees is the box with size-1 dimensions dropped and neighbours folded.
            assert torch.empty(b.region.shape).view(b.shape).shape == b.shape
        else:
            assert b.modes == ()
            assert b.reason
    kinds = {(b.method, b.modes) for b in blocks}
    assert len(kinds) == (math.prod(shape) > 0)
    if math.prod(shape) and blocks[0].method == "adagrad":
        assert options["large_dim"] == "adagrad"
        assert max(shape[options["batch_dims"] :]) > limit


@given(st.lists(sizes.filter(bool), max_size=5), st.integers(1, 100))
def test_merged_dimensions(shape: list[int], limit: int) -> None:
    groups = merge_dims(shape, limit)
    assert [dim for group in groups for dim in group] == [dim for dim, size in enumerate(shape) if size != 1]
    assert len(groups) >= min(2, sum(size != 1 for size in shape))
    folded = [math.prod(shape[dim] for dim in group) for group in groups]
    assert all(len(group) == 1 or size <= limit for group, size in zip(groups, folded, strict=True))
    if len(groups) > 2:
        assert all(a * b > limit for a, b in itertools.pairwise(folded))


@pytest.mark.parametrize(
    ("shape", "limit", "groups"),
    [
        ((512, 512, 3, 3), 1024, [[0], [1], [2, 3]]),
        ((512, 512, 3, 3), 8192, [[0], [1, 2, 3]]),
        ((64, 3, 7, 7), 1024, [[0], [1, 2, 3]]),
        ((2, 3), 1024, [[0], [1]]),
        ((2, 1, 3, 1, 4), 1024, [[0], [2, 4]]),
        ((2, 3, 512, 4), 1024, [[0, 1], [2], [3]]),
        ((1, 5, 1), 1024, [[1]]),
        ((1, 1), 1024, []),
        ((4, 4, 4, 4), math.inf, [[0], [1, 2, 3]]),
    ],
)
def test_merging_examples(shape: Shape, limit: float, groups: list[list[int]]) -> None:
    assert merge_dims(shape, limit) == groups


@given(st.integers(1, 200), st.integers(1, 50) | st.just(math.inf))
def test_pieces_are_near_equal(size: int, limit: float) -> None:
    ends = pieces(size, limit)
    lengths = [b - a for a, b in ends]
    assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])]
    assert ends[-1][1] == size
    assert len(ends) == max(1, math.ceil(size / limit))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@st.composite
def regions(draw: Any, dims: int) -> Region:
    bounds = [sorted(draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))) for _ in range(dims)]
    return Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(*[regions(dims)] * 3)))
def test_regions_meet_as_sets_do(triple: tuple[Region, Region, Region]) -> None:
    def points(region: Region | None) -> set[Shape]:
        return set(itertools.product(*map(range, region.start, region.stop))) if region else set()

    a, b, c = triple
    assert points(a.meet(b)) == points(a) & points(b)
    assert a.meet(b) == b.meet(a)
    assert len(points(a)) == a.numel
    assert a.meet(a) == (a if a.numel else None)
    both, other = a.meet(b), b.meet(c)
    assert (both.meet(c) if both else None) == (a.meet(other) if other else None)


@given(st.lists(cuttings(), min_size=1, max_size=3), st.sampled_from(["sgd", "adagrad", "adam", None]), st.booleans())
@example([((13, 11), {"max_preconditioner_dim": 5}), ((7, 5, 3), {"max_preconditioner_dim": 2})], "adam", False)
@example([((2, 3, 2, 2, 3), {"max_preconditioner_dim": 2, "merge_dims": False})], None, True)
def test_any_shape_trains_as_its_twin(cuttings: list[tuple[Shape, Options]], graft: str | None, gaps: bool) -> None:
    """In float64, where no conditioning is an excuse."""
    common = {"lr": 0.05, "eps": 1e-4, "graft": graft, "precondition_frequency": 2, "betas": (0.9, 0.95)}
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape, _ in cuttings]
    groups = [{"params": [p], **options} for p, (_, options) in zip(params, cuttings, strict=True)]
    opt = lather.Shampoo(groups, state_dtype="float64", **common)
    twins = [Reference([p], **common, **options) for p, (_, options) in zip(params, cuttings, strict=True)]
    for t in range(4):
        for i, (p, twin) in enumerate(zip(params, twins, strict=True)):
            p.grad = None if gaps and (t + i) % 3 == 0 else torch.randn_like(p)
            twin.step([p.grad])
        opt.step()
    for p, twin in zip(params, twins, strict=True):
        assert (p.detach() - twin.params[0]).norm() <= 1e-11 * max(1.0, twin.params[0].norm().item())


# Runs: many blocks copied as one.


def check_runs(blocks: Sequence[Block], tensors: Sequence[Tensor], skipped: Iterable[int] = ()) -> list[Run]:
    """Coalesced or one by one, the same elements go to the same slots, and back. Some slots may be skipped."""
    slots = [i for i in range(99 + len(blocks)) if i not in set(skipped)][: len(blocks)]
    stack = torch.zeros(max(slots, default=0) + 1, *(blocks[0].shape if blocks else ()), dtype=torch.int64)
    size = blocks[0].region.numel if blocks else 1
    pairs = zip(slots, blocks, strict=True)
    runs = coalesce(Run(b.param, slot * size, b.region.start, b.region.shape) for slot, b in pairs)
    assert [slot for run in runs for slot in range(run.offset // size, (run.offset + run.numel) // size)] == slots
    for run in runs:
        run.of_flat(stack.view(-1)).copy_(run.of_tensor(tensors[run.key]))
    for slot, b in zip(slots, blocks, strict=True):
        assert torch.equal(stack[slot], tensors[b.param][box(b.region)].reshape(b.shape))
    blank = [torch.zeros_like(x) for x in tensors]
    for x, y in zip(tensors, blank, strict=True):
        assert x.stride() == y.stride()
    for run in runs:
        run.of_tensor(blank[run.key]).copy_(run.of_flat(stack.view(-1)))
    for i, (x, y) in enumerate(zip(tensors, blank, strict=True)):
        held = count(tuple(x.shape), [b.region for b in blocks if b.param == i])
        assert torch.equal(y, x * held)
    return runs


def strided(shape: Shape, order: Sequence[int]) -> Tensor:
    """Distinct numbers in a dense tensor whose dimensions lie in memory in this order."""
    x = torch.arange(1, math.prod(shape) + 1).view([shape[i] for i in order])
    return x.permute(*[order.index(i) for i in range(len(shape))])


def test_a_grid_is_one_run() -> None:
    geometry = {"merge_dims": False, "large_dim": "block", "batch_dims": 0, "precondition_1d": False}
    blocks = cut(0, (6, 4, 4), max_preconditioner_dim=2, **geometry)
    assert len(check_runs(blocks, [strided((6, 4, 4), (2, 0, 1))])) == 1


@given(cuttings(), st.permutations(range(5)), st.data())
def test_runs_of_blocks(cutting: tuple[Shape, Options], order: list[int], data: Any) -> None:
    """For every bank of a parameter and its copies, in any memory layout."""
    shape, options = cutting
    order = [i for i in order if i < len(shape)]
    assume(math.prod(shape) > 1)
    copies = data.draw(st.integers(1, 3))
    blocks = [b for i in range(copies) for b in cut(i, shape, **options)]
    tensors = [strided(shape, order) + 1000 * i for i in range(copies)]
    for kind in dict.fromkeys(b.shape for b in blocks):
        bank = [b for b in blocks if b.shape == kind]
        check_runs(bank, tensors, data.draw(st.lists(st.integers(0, 20), max_size=2)))


@pytest.mark.parametrize("orders", [st.just([0, 1, 2]), st.permutations(range(3))], ids=["row-major", "any layout"])
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_runs_of_some_blocks(orders: Any, grid: list[int], data: Any) -> None:
    """A rank that owns only some blocks has holes in its grid, and a neighbour in slots may lie before it in memory."""
    shape = tuple(2 * n for n in grid)
    boxes = [[(2 * c, 2 * c + 2) for c in corner] for corner in itertools.product(*map(range, grid))]
    regions = [Region(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in boxes]
    blocks = [Block(0, i, region, region.shape, (), "graft") for i, region in enumerate(regions)]
    owned = [b for b in blocks if data.draw(st.booleans())]
    tensor = strided(shape, [i for i in data.draw(orders) if i < len(grid)])
    check_runs(owned, [tensor])


# Who does what, and when.


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_greedy_is_near_the_optimum(costs: list[int], bins: int) -> None:
    def longest(chosen: Sequence[int]) -> int:
        return max(sum(c for c, b in zip(costs, chosen, strict=True) if b == index) for index in range(bins))

    chosen = greedy(costs, bins)
    assert chosen == greedy(list(costs), bins)
    best = min(map(longest, itertools.product(range(bins), repeat=len(costs))))
    assert 3 * bins * longest(chosen) <= (4 * bins - 1) * best  # Graham's bound for longest processing time first


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 9))
def test_greedy_leaves_no_bin_idle(costs: list[float], bins: int) -> None:
    chosen = greedy(costs, bins)
    assert len(chosen) == len(costs)
    assert set(chosen) <= set(range(bins))
    loads = [sum(c for c, b in zip(costs, chosen, strict=True) if b == index) for index in range(bins)]
    assert max(loads) <= (sum(costs) / bins + (1 - 1 / bins) * max(costs, default=0.0)) * (1 + 1e-9)


@given(st.integers(1, 12), st.integers(1, 30), st.data())
def test_staggered_blocks_are_due_once_per_period(frequency: int, start: int, data: Any) -> None:
    offset = data.draw(st.integers(0, frequency - 1))
    group = group_of(precondition_frequency=frequency, start_preconditioning_step=start)
    due = [t for t in range(1, start + 4 * frequency) if is_due(t, group, offset)]
    assert start <= due[0] < start + frequency
    assert all(b - a == frequency for a, b in itertools.pairwise(due))


@pytest.mark.parametrize("shape", [(33,), (100,), (1, 70)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_column_is_rounded_alike_in_every_stack(shape: Shape, dtype: torch.dtype) -> None:
    d = shape[-1]
    factors, x = torch.randn(5, d, d, dtype=dtype), torch.randn(5, *shape, dtype=dtype)
    mode = len(shape) - 1
    for number in range(5):
        alone = factors[number : number + 1].clone(), x[number : number + 1].clone()
        assert torch.equal(
            linalg.mode_product(x, factors, mode)[number], linalg.mode_product(alone[1], alone[0], mode)[0]
        )
        assert torch.equal(linalg.rotate(x, factors)[number], linalg.rotate(alone[1], alone[0])[0])
        assert torch.equal(linalg.gram(x, mode)[number], linalg.gram(alone[1], mode)[0])
        columns = x.flatten(1)[:, :, None].repeat(1, 20, 1)  # of 660 to 2000 elements
        assert torch.equal(linalg.gram(columns, 1)[number], linalg.gram(columns[number : number + 1].clone(), 1)[0])
    whole = linalg.mode_product(x, factors + factors.mT, mode)
    torch.testing.assert_close(whole, torch.einsum("nij,n...j->n...i", factors + factors.mT, x))


def everywhere(f: Callable[..., Tensor], *matrices: Tensor) -> None:
    """The same matrices in all slots of stacks, which may begin anywhere in memory: all slots of the result are the same."""
    results = []
    for n, offset in [(1, 0), (5, 0), (2, 1), (3, 4)]:
        buffers = [torch.empty(offset + n * x.numel(), dtype=x.dtype) for x in matrices]
        stacks = [b[offset:].view(n, *x.shape).copy_(x) for b, x in zip(buffers, matrices, strict=True)]
        results += f(*stacks).unbind()
    assert all(torch.equal(x, results[0]) for x in results)


SIZES = [
    (18, 5),
    (10, 5),
    (6, 25),
    (64, 147),
    (34, 8),
    (2, 100),
    (3, 19),
    (33, 33),
    (65, 127),
    (64, 96),
    (100, 1),
    (1, 70),
]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_are_rounded_alike_in_every_place(shape: Shape, dtype: torch.dtype) -> None:
    x, (left, right) = torch.randn(shape, dtype=dtype), (torch.randn(d, d, dtype=dtype) / d**0.5 for d in shape)
    for mode, factor in enumerate((left, right)):
        everywhere(lambda x, mode=mode: linalg.gram(x, mode, 0.3), x)
        everywhere(lambda x, f, mode=mode: linalg.mode_product(x, f, mode), x, factor)
    everywhere(linalg.rotate, x, right)
    everywhere(lambda x, f: linalg.rotate(x, f.mT), x, right)
    everywhere(lambda x, f: linalg.product(f, x, add=x, beta=0.3, alpha=0.7), x, left)
    everywhere(lambda x, f: linalg.product(f, x, alpha=0.7), x, left)
    everywhere(lambda x: linalg.matrix_power(x, 6), left)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(linalg.product(left[None], x[None], add=x[None], beta=0.3, alpha=0.7)[0], 0.3 * x + 0.7 * left @ x)
    out = torch.full_like(x, torch.nan)[None]
    assert linalg.product(left[None], x[None], out, x[None], alpha=0.7, beta=0.3) is out
    close(out[0], 0.3 * x + 0.7 * left @ x)
    close(linalg.product(left[None], x[None], alpha=0.7)[0], 0.7 * left @ x)
    close(linalg.mode_product(x[None], right[None] + right.mT, 1)[0], x @ (right + right.mT))
    close(linalg.matrix_power(left[None], 6)[0], torch.linalg.matrix_power(left, 6))


@pytest.mark.parametrize("d", [1, 5, 7, 10, 18, 33, 64, 65, 127])
@pytest.mark.parametrize("f", [torch.linalg.eigh, torch.linalg.qr, torch.linalg.cholesky_ex])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decompositions_are_rounded_alike_in_every_place(
    f: Callable[..., Sequence[Tensor]], d: int, dtype: torch.dtype
) -> None:
    x = torch.randn(d, 2 * d, dtype=dtype)
    everywhere(lambda a: linalg.factorize(f, a)[0], x @ x.mT)
    everywhere(lambda a: linalg.factorize(f, a)[1], x @ x.mT)


@given(st.integers(1, 12), st.integers(1, 30))
def test_together_blocks_are_due_at_the_start_and_at_multiples(frequency: int, start: int) -> None:
    group = group_of(precondition_frequency=frequency, start_preconditioning_step=start)
    due = [t for t in range(1, 60) if is_due(t, group, None)]
    assert due == sorted({start} | {t for t in range(frequency, 60, frequency) if t > start})
    for offset in (None, 0):
        assert not any(is_due(t, group | {"start_preconditioning_step": math.inf}, offset) for t in range(60))


@given(st.integers(1, 40), st.floats(0.05, 1, exclude_max=True), st.data())
def test_warmed_up_roots_are_young_and_then_as_old_as_ever(frequency: int, warmup: float, data: Any) -> None:
    group = group_of(precondition_frequency=frequency, refresh_warmup=warmup)
    offset = data.draw(st.none() | st.integers(0, frequency - 1))
    last, end = 0, math.ceil(2 * frequency / warmup)
    for t in range(1, end + 3 * frequency):
        last = t if is_due(t, group, offset) else last
        assert t - last < 2 * max(1, min(frequency, warmup * t))
        if t >= end:
            assert is_due(t, group, offset) == (t % frequency == (offset or 0))


# Plans for several ranks.


def group_of(**options: Any) -> Options:
    group: Options = lather.Shampoo([torch.nn.Parameter(torch.zeros(1))], **options).param_groups[0]
    return group


def test_owners_are_balanced_and_offsets_flat() -> None:
    shapes: list[Shape] = [(64, 64)] * 3 + [(32, 48), (16, 64), (100,), (8, 8)]
    group = group_of(max_preconditioner_dim=16, precondition_frequency=7, refresh="staggered")
    specs = [Spec(str(i), s, 0, layout=Layout.everywhere(4)) for i, s in enumerate(shapes)]
    plan = make_plan(specs, [group], [range(4)])
    full = [i for i, b in enumerate(plan.blocks) if b.shape == (16, 16)]
    for choice, bins in ((dict(enumerate(plan.owners)), 4), (plan.offsets(0), 7)):
        per_bin = [sum(choice[i] == index for i in full) for index in range(bins)]
        assert max(per_bin) - min(per_bin) <= 1
    assert plan.offsets(0).keys() == {i for i, b in enumerate(plan.blocks) if b.modes}
    assert set(plan.offsets(0).values()) == set(range(7))
    single = make_plan([Spec(str(i), s, 0) for i, s in enumerate(shapes)], [group])
    assert single.offsets(0) == plan.offsets(0)  # when a block is refreshed does not depend on who owns it
