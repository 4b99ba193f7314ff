"""What must hold of the optimizer whatever the options."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from geometry import Options, Shape, box, count, cuttings
from hypothesis import example, given
from hypothesis import strategies as st
from paper import PAPER
from reference import Reference
from torch import Tensor

import lather
from lather.planning.blocks import Region, cut
from lather.settings import resolve

Grads = Sequence[Sequence[Tensor | None]]  # by step and parameter

BASE: Options = {"lr": 0.05, "eps": 1e-4, "max_preconditioner_dim": 4, "precondition_frequency": 3}
COLD: Options = {"refresh_warmup": 0.0}  # by default roots are refreshed in each of so few steps
VARIANTS: dict[str, Options] = {
    "adam": {"weight_decay": 0.1},
    "adam, cold": COLD | {"weight_decay": 0.1, "block_multiple": 2},
    "paper": PAPER | {"eps": 1e-4},
    "adagrad": {"graft": "adagrad", "betas": (0.9, 1.0), "weight_decay": 0.1, "weight_decay_mode": "corrected"},
    "rmsprop": COLD | {"graft": "rmsprop", "momentum": 0.9, "nesterov": True, "dampening": 0.1, "bias_correction": False},
    "sgd": {"graft": "sgd", "betas": (0.0, 0.95), "momentum": 0.9, "weight_decay": 0.1, "weight_decay_mode": "l2"},
    "ungrafted": {"graft": None, "beta3": 0.5, "exponent": 0.3, "maximize": True, "start_preconditioning_step": 1},
    "multiplier": COLD | {"exponent_multiplier": 1.82, "merge_dims": False, "weight_decay_mode": "independent"},
    "diagonal": {"large_dim": "diagonal", "precondition_1d": True},
    "large adagrad": {"large_dim": "adagrad"},
    "stacked": {"batch_dims": 1, "precondition_1d": True},
    "never": {"start_preconditioning_step": math.inf},
    "newton": COLD | {"root": "newton"},
    "higher_order": {"root": "higher_order"},
    "minimax": COLD | {"root": "minimax"},
    "track": {"root": "track"},
    "kl": {"preconditioner": "kl", "weight_decay": 0.1},
    "kl, cold": COLD | {"preconditioner": "kl", "damping": "absolute"},
    "soap": {"preconditioner": "soap", "graft": None, "weight_decay": 0.1},
    "soap, grafted": COLD | {"preconditioner": "soap", "betas": (0.9, 1.0), "start_preconditioning_step": 2},
    "soap, not square": {"preconditioner": "soap", "graft": None, "root": "track", "large_dim": "diagonal", "merge_dims": False},
    "soap, track": COLD | {"preconditioner": "soap", "graft": None, "root": "track", "betas": (0.0, 0.95)},
    "spectral": {"preconditioner": "spectral", "weight_decay": 0.1},
    "spectral, ungrafted": {"preconditioner": "spectral", "graft": None, "polar": "polar_express", "merge_dims": False},
    "spectral, whole": {"preconditioner": "spectral", "graft": None, "polar": "svd", "max_preconditioner_dim": math.inf},
}
every_variant = pytest.mark.parametrize("options", [BASE | o for o in VARIANTS.values()], ids=list(VARIANTS))
every_graft = pytest.mark.parametrize("graft", ["sgd", "adagrad", "rmsprop", "adam", "adafactor", None])
SHAPES: list[Shape] = [(7, 5), (3, 4, 2), (6,), (2, 1)]
UNALIGNED: list[Shape] = [(18, 5), (10, 5), (6, 25)]  # whole, slots of these begin at odd addresses, by which BLAS rounds


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


def in_turns(shapes: Sequence[Shape], number: int) -> pytest.MarkDecorator:
    """Every variant with so many of the shapes."""
    rows = [(shapes[(i + j) % len(shapes)], name) for i, name in enumerate(VARIANTS) for j in range(number)]
    return pytest.mark.parametrize(
        ("shape", "options"), [(shape, BASE | VARIANTS[name]) for shape, name in rows], ids=map(str, rows)
    )


@in_turns(SHAPES, 1)
def test_a_stack_of_n_is_n_stacks_of_one(shape: Shape, options: Options) -> None:
    start, grads = tensors([shape] * 3), gradients([shape] * 3, 7, keep=0.75)
    together = train(start, grads, options)
    for i, mine in enumerate(together):
        (alone,) = train(start[i : i + 1], [row[i : i + 1] for row in grads], options)
        same(mine, alone)


@in_turns(UNALIGNED, 1)
def test_a_slot_is_rounded_the_same_way_in_every_place(shape: Shape, options: Options) -> None:
    test_a_stack_of_n_is_n_stacks_of_one(shape, options | {"max_preconditioner_dim": 32, "precondition_frequency": 4})


@every_variant
def test_the_order_of_parameters_does_not_matter(options: Options) -> None:
    shapes = [*SHAPES, (7, 5), (5, 5)]
    start, grads = tensors(shapes), gradients(shapes, 5, keep=0.9)
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


BAD = [(bad, name) for i, name in enumerate(VARIANTS) for bad in (1e30, (math.nan, math.inf)[i % 2])]


@pytest.mark.parametrize(("bad", "options"), [(bad, BASE | VARIANTS[name]) for bad, name in BAD], ids=map(str, BAD))
def test_a_bad_gradient_stays_with_its_block(bad: float, options: Options) -> None:
    """1e30 is finite, but its square is not. It would spoil the statistics."""
    shape = (8, 3)
    options = options | {"momentum": 0.9}
    start, grads = tensors([shape] * 3), gradients([shape] * 3, 7)
    clean = train(start, grads, options)
    opt, params = build(start, options)
    blocks = cut(1, shape, resolve(opt.param_groups[0]).geometry)
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
def test_zero_gradients_move_nothing(options: Options) -> None:
    start = [x.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for x in tensors(SHAPES[:3])]
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


ORDERED = [*LAYOUTS, torch.clone]


@pytest.mark.parametrize(
    ("variant", "of_parameter", "of_gradient"),
    [
        *(("sgd", ORDERED[i], ORDERED[(i + j) % 4]) for i in range(4) for j in (0, 1)),
        *(("stacked", ORDERED[i], ORDERED[(i + 2) % 4]) for i in range(4)),
    ],
)
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
    (torch.optim.SGD, {"maximize": True, "momentum": 0.8}, {"graft": None, "maximize": True, "momentum": 0.8, **NO_FILTER}),
    (
        torch.optim.SGD,
        {"weight_decay": 0.1, "momentum": 0.8, "nesterov": True},
        {"graft": "sgd", "weight_decay": 0.1, "weight_decay_mode": "l2", "momentum": 0.8, "nesterov": True, **NO_FILTER},
    ),
    (torch.optim.Adagrad, {"eps": 1e-8}, {"graft": "adagrad", **NO_FILTER}),
    (
        torch.optim.Adagrad,
        {"eps": 1e-6, "weight_decay": 0.1},
        {"graft": "adagrad", "graft_eps": 1e-6, "weight_decay": 0.1, "weight_decay_mode": "l2", **NO_FILTER},
    ),
    (torch.optim.RMSprop, {"alpha": 0.95}, {"graft": "rmsprop", "betas": (0.0, 0.95)}),
    (torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.8}, {"graft": "rmsprop", "graft_beta2": 0.9, "momentum": 0.8, **NO_FILTER}),
    (torch.optim.Adam, {}, TORCHS),
    (torch.optim.Adam, {"betas": (0.8, 0.999)}, {"betas": (0.8, 1.0)}),
    (
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"betas": (0.8, 0.95), "graft_eps": 1e-6, "weight_decay": 0.1, "weight_decay_mode": "l2"},
    ),
    (torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.1}, {"weight_decay": 0.1, "weight_decay_mode": "corrected", **TORCHS}),
    (torch.optim.AdamW, {"weight_decay": 0.1}, {"weight_decay": 0.1 * 0.02, "weight_decay_mode": "independent", **TORCHS}),
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
    for t in range(12):
        for p in itertools.chain(params, others):  # of a loss that depends on p, so that errors in either feed back
            p.grad = (p.detach() + 0.1 * t).sin() + 0.3 * p.detach()
        opt.step()
        reference.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for p, q, x in zip(params, others, start, strict=True):
        assert not torch.allclose(p, x, rtol=1e-3)
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@every_graft
@pytest.mark.parametrize(("start", "damping"), [(1, "absolute"), (1, "relative"), (math.inf, "relative")])
def test_scale_of_gradients(start: float, damping: str, graft: str | None) -> None:
    """g -> c g with graft_eps -> c graft_eps, and eps -> c^2 eps if it is absolute. Parameters stay the same if lr undoes the
    degree, with the paper's exponent.

    A power of two scales without rounding. So do all grafts; roots are taken by `pow`, which promises no such thing.
    """
    c, grads = 16.0, gradients(SHAPES, 7)
    degree = 1 if graft == "sgd" or (graft is None and start == math.inf) else 0
    weights, moved = tensors(s for s in SHAPES if len(s) > 1), []
    grads = [[g for g in row if g is not None and g.dim() > 1] for row in grads]
    for scale in (1.0, c):
        eps = {} if graft in ("sgd", None) else {"graft_eps": 1e-3 * scale}
        options = BASE | {"graft": graft, "start_preconditioning_step": start, "exponent": "paper", "damping": damping, **eps}
        options |= {"eps": 1e-2 * (scale**2 if damping == "absolute" else 1.0)} | (COLD if start == 1 else {})
        options |= {"lr": 0.05 / scale**degree, "precondition_1d": True}
        moved.append(train(weights, [[scale * g for g in row if g is not None] for row in grads], options))
    for a, b, w in zip(*moved, weights, strict=True):
        assert not torch.allclose(a[""], w, rtol=1e-3)
        if start == math.inf:
            assert torch.equal(a[""], b[""])
        torch.testing.assert_close(a[""], b[""], rtol=1e-6, atol=1e-6)


# Any geometry.


@given(st.lists(cuttings(), min_size=1, max_size=3), st.sampled_from(["sgd", "adagrad", "adam", "adafactor", None]), st.booleans())
@example([((13, 11), {"max_preconditioner_dim": 5}), ((7, 5, 3), {"max_preconditioner_dim": 2})], "adam", False)
@example([((2, 3, 2, 2, 3), {"max_preconditioner_dim": 2, "merge_dims": False})], None, True)
def test_any_shape_trains_as_its_twin(cuttings: list[tuple[Shape, Options]], graft: str | None, gaps: bool) -> None:
    """In float64, so that conditioning does not matter."""
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
