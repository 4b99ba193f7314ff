"""KL-Shampoo: what must hold of factors that see the gradient preconditioned by each other, at any size of gradients."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lather

Options = dict[str, Any]
Shape = tuple[int, ...]
Rows = Sequence[Sequence[Tensor]]

KL: Options = {"preconditioner": "kl", "lr": 0.05, "graft_eps": 1e-30, "merge_dims": False}
SHAPES: list[Shape] = [(7, 5), (5, 7), (6,)]
DTYPES = [torch.float32, torch.float64]


def parameters(dtype: torch.dtype, shapes: Sequence[Shape] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def gradients(steps: int, dtype: torch.dtype, shapes: Sequence[Shape] = SHAPES) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes] for _ in range(steps)]


def train(grads: Rows, dtype: torch.dtype, **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Parameters, and the state of the first."""
    params = parameters(dtype, [g.shape for g in grads[0]])
    opt = lather.Shampoo(params, **KL | {"state_dtype": dtype} | options)
    advance(opt, params, grads)
    assert not opt.health()
    return [p.detach() for p in params], opt.state[params[0]]


def advance(opt: lather.Shampoo, params: Sequence[nn.Parameter], grads: Rows) -> None:
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        opt.step()


OPTIONS: dict[str, Options] = {
    "by default": {},
    "late": {"refresh_warmup": 0.0, "precondition_frequency": 4},
    "sum": {"betas": (0.95, 1.0)},
    "uncorrected": {"bias_correction": False},
    "delayed": {"refresh_delay": 2, "precondition_frequency": 4},
    "diagonal": {"large_dim": "diagonal", "max_preconditioner_dim": 5},
    "packed": {"factors": "packed"},
}


@pytest.mark.parametrize(
    ("options", "dtype"), [(OPTIONS[name], DTYPES[i % 2]) for i, name in enumerate(OPTIONS)] + [({}, torch.float64)], ids=str
)
def test_relative_damping_does_not_see_the_scale_of_gradients(options: Options, dtype: torch.dtype) -> None:
    """Factors grow in proportion to gradients, from the first step on."""
    grads = gradients(14, dtype)
    plain, state = train(grads, dtype, **options)
    tolerance = 2e-3 if dtype == torch.float32 else 1e-9  # the first roots are of factors without full rank
    assert not any(torch.allclose(a, b.detach(), atol=1e-2) for a, b in zip(plain, parameters(dtype), strict=True))
    for c in (1e-6, 1e6):
        scaled, other = train([[c * g for g in row] for row in grads], dtype, **options)
        torch.testing.assert_close(scaled, plain, rtol=tolerance, atol=tolerance)
        for role in ("L0.0", "L1.0"):
            assert (other[role] - c * state[role]).norm() <= tolerance * c * state[role].norm()


@pytest.mark.parametrize("shape", [(6,), (3, 4, 2), (2, 3, 2, 3)], ids=str)
def test_nor_in_blocks_of_other_orders(shape: Shape) -> None:
    """Factors of order k that see each other grow with gradients to the power of 2 / k."""
    grads = gradients(14, torch.float64, [shape])
    plain, _ = train(grads, torch.float64, precondition_1d=True)
    for c in (1e-6, 1e6):
        scaled, _ = train([[c * g for g in row] for row in grads], torch.float64, precondition_1d=True)
        torch.testing.assert_close(scaled, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("graft", ["sgd", None])
def test_the_scale_of_directions(graft: str | None) -> None:
    """That of the graft; without one, roots of both factors divide by the gradient's size once, so nothing is left of it."""
    grads, degree = gradients(8, torch.float64), 1 if graft else 0
    moved = []
    for c in (1.0, 1e6):
        given = {"graft": graft, "lr": 0.05 / c**degree, "preconditioner": "kl", "state_dtype": "float64"}
        p = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
        opt = lather.Shampoo([p], **given)
        advance(opt, [p], [[c * row[0]] for row in grads])
        moved.append(p.detach())
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_factors_begin_at_the_size_of_gradients(size: float) -> None:
    """Both traces are the number of rows, or of columns, times the root mean square of the first gradient."""
    p, g = nn.Parameter(torch.zeros(7, 5)), size * torch.randn(7, 5)
    opt = lather.Shampoo([p], preconditioner="kl", betas=(0.9, 0.75), precondition_frequency=9, refresh_warmup=0.0)
    advance(opt, [p], [[g]])
    rms = g.square().mean().sqrt()
    for i, d in enumerate((7, 5)):
        torch.testing.assert_close(opt.state[p][f"L{i}.0"].trace(), 0.25 * d * rms)


AT_FIRST = [("by default", 1, 1.0), ("by default", 40, 1e6), ("late", 9, 1e6), ("delayed", 9, 1e-6)]


@pytest.mark.parametrize(("schedule", "zeros", "size"), AT_FIRST)
def test_zero_gradients_at_first_are_as_if_they_had_not_been(schedule: str, zeros: int, size: float) -> None:
    """Nothing moves; then steps are as long as the graft's, and in the end the product of the factors is what it would have been.
    That of one alone need not be: twice the one and half of the other explain gradients as well."""
    dtype, options = torch.float32, OPTIONS[schedule]
    params, adam = parameters(dtype), parameters(dtype)
    opt = lather.Shampoo(params, **KL | options)
    other = lather.Shampoo(adam, lr=0.05, graft_eps=1e-30, preconditioner=None, beta3=0.95**2)
    nothing, grads = [[torch.zeros_like(p) for p in params]] * zeros, [[size * g for g in row] for row in gradients(70, dtype)]
    for run, own in ((opt, params), (other, adam)):
        advance(run, own, nothing)
    assert all(torch.equal(p, q.detach()) for p, q in zip(params, parameters(dtype), strict=True))
    for row in grads:
        before = [p.detach().clone() for p in (*params, *adam)]
        for run, own in ((opt, params), (other, adam)):
            advance(run, own, [row])
        moved = [(p.detach() - q).norm() for p, q in zip((*params, *adam), before, strict=True)]
        torch.testing.assert_close(moved[:2], moved[3:5], rtol=1e-4, atol=0)
    assert not opt.health()
    _, fresh = train(grads, dtype, **options)
    late = opt.state[params[0]]
    product, expected = (state["L0.0"].norm() * state["L1.0"].norm() for state in (late, fresh))
    assert 0.5 < product / expected < 2


def test_a_zero_factor_keeps_the_root_that_counts_as_none() -> None:
    p = nn.Parameter(torch.zeros(4, 3))
    opt = lather.Shampoo([p], preconditioner="kl")
    advance(opt, [p], [[torch.zeros(4, 3)]] * 3)
    state = opt.state[p]
    assert torch.equal(state["X0.0"], -torch.eye(4)) and torch.equal(state["X1.0"], -torch.eye(3))
    advance(opt, [p], [[torch.randn(4, 3)]])
    assert all(torch.linalg.eigvalsh(state[role]).min() > 0 for role in ("X0.0", "X1.0"))
    assert math.isfinite(p.detach().norm().item()) and p.detach().any()


@pytest.mark.parametrize("options", [{"root_dtype": "bfloat16"}, {"root_dtype": "float16"}, {"state_dtype": "bfloat16"}], ids=str)
def test_zero_gradients_are_no_failure_however_roots_are_kept(options: Options) -> None:
    (p,) = params = [nn.Parameter(torch.zeros(7, 5))]
    opt = lather.Shampoo(params, **KL | {"graft_eps": 1e-8} | options)
    advance(opt, params, [[torch.zeros(7, 5)]] * 12)
    assert not opt.health() and not p.any()
    advance(opt, params, [[g] for (g, *_) in gradients(12, torch.float32)])
    assert not opt.health() and p.isfinite().all() and p.any()


def test_a_factor_that_vanishes_does_not_turn_steps_around() -> None:
    """If the factor of one mode is zero, because its products were too small, the block takes no root of the other either."""
    p = nn.Parameter(torch.zeros(4, 3))
    opt = lather.Shampoo([p], **KL | {"graft_eps": 1e-8, "precondition_frequency": 1})
    advance(opt, [p], [[torch.zeros(4, 3)]])
    opt.state[p]["L0.0"].copy_(torch.eye(4))
    advance(opt, [p], [[torch.zeros(4, 3)]])
    assert torch.equal(opt.state[p]["X0.0"], -torch.eye(4)) and torch.equal(opt.state[p]["X1.0"], -torch.eye(3))


@pytest.mark.parametrize("options", [{}, {"damping": "absolute", "eps": 1e-20}, {"graft": None}, {"betas": (0.9, 1.0)}], ids=str)
def test_a_preconditioned_gradient_that_overflows_is_skipped(options: Options) -> None:
    """Small gradients make large roots, and those times a large gradient are not finite. The block keeps its bits for the step."""
    p = nn.Parameter(torch.zeros(8, 6))
    opt = lather.Shampoo([p], **KL | {"graft_eps": 1e-8} | options)
    rows = gradients(40, torch.float32, [(8, 6)])
    advance(opt, [p], [[1e-20 * g] for (g,) in rows[:12]])
    before = {key: value.clone() for key, value in opt.state[p].items() if key != "step"} | {"": p.detach().clone()}
    with pytest.warns(lather.NumericalWarning, match="its affected blocks were not updated"):
        advance(opt, [p], [[1e16 * g] for (g,) in rows[12:13]])
    assert all(torch.equal(value, before[key]) for key, value in (opt.state[p] | {"": p.detach()}).items() if key != "step")
    assert [*opt.health().values()] == [{"skipped": 1, "failed": 0, "restarted": 0}]
    advance(opt, [p], rows[13:])
    assert all(value.isfinite().all() for value in opt.state[p].values()) and p.isfinite().all()


def test_metrics_leave_out_a_gradient_that_overflows() -> None:
    p = nn.Parameter(torch.ones(8, 6))
    opt = lather.Shampoo([p], **KL | {"graft_eps": 1e-8})
    rows = gradients(13, torch.float32, [(8, 6)])
    advance(opt, [p], [[1e-20 * g] for (g,) in rows[:12]])
    opt.arm()
    with pytest.warns(lather.NumericalWarning):
        advance(opt, [p], [[1e16 * g] for (g,) in rows[12:]])
    (found,) = opt.metrics(gather=True).values()
    assert found["skipped"] == 1 and not found["update"] > 0 and not math.isinf(found["update"])
