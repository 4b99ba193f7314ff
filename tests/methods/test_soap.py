"""SOAP: what must hold of Adam in eigenbases, and of the moment that is kept in them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from paper import PAPER
from reference import Reference
from torch import Tensor, nn

import lather
from lather.compute.refresh import Batch, Due, cut_into_batches
from lather.methods import METHODS, Context, Stack
from lather.methods.soap import Soap, places, rotated, squared_cosines
from lather.options import OPTIONS
from lather.roots import rescue_basis, resolve_basis, solve_basis
from lather.settings import resolve

Options = dict[str, Any]
Shape = tuple[int, ...]

SOAP: Options = PAPER | {"preconditioner": "soap", "graft": None, "lr": 0.05, "eps": 1e-4}
NOW: Options = {"preconditioner": "soap", "graft": None, "lr": 0.05}  # and all else as by default
SHAPES: list[Shape] = [(7, 5), (5, 7), (3, 4, 2), (6,), ()]
BASES = ["eigh", "track"]
every_root = pytest.mark.parametrize("root", BASES)


def parameters(shapes: Sequence[Shape] = SHAPES, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(steps: int, shapes: Sequence[Shape] = SHAPES, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(s, generator=generator).to(dtype) for s in shapes] for _ in range(steps)]


def train(opt: torch.optim.Optimizer, grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    params = [p for group in opt.param_groups for p in group["params"]]
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        opt.step()
    return [p.detach().clone() for p in params]


def orthogonal(d: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]


# Identity bases.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"precondition_frequency": 100},
        {"start_preconditioning_step": math.inf},
        {"large_dim": "diagonal", "max_preconditioner_dim": 1, "precondition_frequency": 2},
        {"start_preconditioning_step": math.inf, "refresh": "staggered", "precondition_1d": True, "factors": "packed"},
    ],
    ids=["before the first refresh", "never", "no factors", "never, vectors"],
)
def test_with_identity_bases_it_is_adam(options: Options, dtype: torch.dtype) -> None:
    """Vectors and scalars too, which have no bases."""
    given = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
    theirs = train(torch.optim.AdamW(parameters(dtype=dtype), eps=1e-6, **given), gradients(20, dtype=dtype))
    opt = lather.Shampoo(parameters(dtype=dtype), **SOAP | given | {"eps": 1e-6, "graft_eps": 1e-6} | options, state_dtype=dtype)
    ours = train(opt, gradients(20, dtype=dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_the_first_step_is_a_step() -> None:
    """Adam's first step has the same length in every element."""
    (before,) = parameters([(7, 5)])
    opt = lather.Shampoo([before], **SOAP | {"eps": 1e-12}, state_dtype="float64")
    start = before.detach().clone()
    (after,) = train(opt, gradients(1, [(7, 5)]))
    torch.testing.assert_close((start - after).abs(), torch.full((7, 5), 0.05, dtype=torch.float64))


@pytest.mark.parametrize("rank", [1, 4, 32])
@pytest.mark.parametrize("of_group", [False, True])
def test_steps_of_the_preset_are_not_too_long(rank: int, of_group: bool) -> None:
    """Bases of one gradient would make the next step far too long, so there are none, whatever the schedule."""
    longest = {}
    for start, beta3 in ((None, "nesterov"), (None, None), (1, None)):
        given = {"precondition_frequency": 1, "start_preconditioning_step": start, "beta3": beta3}
        weight, noise = torch.nn.Parameter(torch.zeros(64, 32)), torch.Generator().manual_seed(0)
        group: dict[str, Any] = {"params": [weight]}
        group, options = (group | given, {}) if of_group else (group, given)
        opt = lather.soap([group], lr=1.0, weight_decay=0.0, **options)
        lengths = []
        for _ in range(20):
            old = weight.detach().clone()
            weight.grad = torch.randn(64, rank, generator=noise) @ torch.randn(rank, 32, generator=noise)
            opt.step()
            lengths.append((weight - old).square().mean().sqrt().item())
        longest[start, beta3] = max(lengths)
    assert max(longest.values()) < 2


def test_steps_are_not_too_long_after_a_zero_gradient() -> None:
    """As in a model whose last layer begins with zeros: all other gradients are zero in the first step."""
    weight, noise = torch.nn.Parameter(torch.zeros(64, 32)), torch.Generator().manual_seed(0)
    opt = lather.Shampoo([weight], **NOW | {"lr": 1.0})
    for t in range(8):
        old = weight.detach().clone()
        weight.grad = float(t > 0) * torch.randn(64, 32, generator=noise)
        opt.step()
        assert (weight - old).square().mean().sqrt() < 2


def test_before_the_start_it_follows_its_graft() -> None:
    given = SOAP | {"graft": "adam", "start_preconditioning_step": 6, "precondition_frequency": 2}
    theirs = train(torch.optim.Adam(parameters(), lr=0.05, betas=(0.9, 0.95)), gradients(5))
    ours = train(lather.Shampoo(parameters(), **given, state_dtype="float64"), gradients(5))
    torch.testing.assert_close(ours, theirs)
    later = train(lather.Shampoo(parameters(), **given, state_dtype="float64"), gradients(8))
    alone = train(lather.Shampoo(parameters(), **given | {"preconditioner": None}, state_dtype="float64"), gradients(8))
    assert all(torch.allclose(a, b) == (a.dim() < 2) for a, b in zip(later, alone, strict=True))


@pytest.mark.parametrize("graft", ["adam", "sgd", "rmsprop", "adagrad"])
def test_a_graft_decides_how_long_steps_are(graft: str) -> None:
    shapes: list[Shape] = [(5, 5), (3, 4, 2)]
    given = {"lr": 1.0, "betas": (0.0, 0.95), "graft": graft, "state_dtype": "float64"}
    for p in (soap := parameters(shapes)) + (plain := parameters(shapes)):
        p.data.zero_()
    one = lather.Shampoo(soap, **given, preconditioner="soap", precondition_frequency=2)
    other = lather.Shampoo(plain, **given, preconditioner=None)
    for row in gradients(5, shapes):
        before = [p.detach().clone() for p in (*soap, *plain)]
        for opt in (one, other):
            train(opt, [row])
        moved = [(p.detach() - old).norm() for p, old in zip((*soap, *plain), before, strict=True)]
        torch.testing.assert_close(moved[:2], moved[2:])


# Rotations, scale.


def not_the_first(opt: lather.Shampoo) -> lather.Shampoo:
    """As if there had been a gradient before, a very small one whose elements are all the same in any basis."""
    opt.state_dict()
    for state in opt.state.values():
        state["w.0"].fill_(torch.finfo(state["w.0"].dtype).tiny)
    return opt


@pytest.mark.parametrize("options", [{}, {"betas": (0.0, 1.0)}, {"graft": "sgd"}], ids=["", "sum", "sgd"])
def test_rotated_gradients_give_rotated_steps(options: Options) -> None:
    """With bases from the first step. Square matrices have factors of full rank, so the basis is unique."""
    u, v = orthogonal(6, 3), orthogonal(6, 4)
    given = SOAP | {"precondition_frequency": 1, "start_preconditioning_step": 1, "eps": 1e-2, "state_dtype": "float64"}
    given |= options
    grads = gradients(6, [(6, 6)])
    results = []
    for turned in ([[g] for (g,) in grads], [[u @ g @ v.mT] for (g,) in grads]):
        p = nn.Parameter(torch.zeros(6, 6, dtype=torch.float64))
        results.append(train(not_the_first(lather.Shampoo([p], **given)), turned)[0])
    torch.testing.assert_close(results[1], u @ results[0] @ v.mT, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("graft", [None, "adam", "rmsprop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_relative_damping_does_not_see_the_scale_of_gradients(dtype: torch.dtype, graft: str | None) -> None:
    """By default, but for the eps of elementwise parameters. Factors have full rank, so bases are unique."""
    shapes: list[Shape] = [(6, 6), (3, 4, 3), (5,)]
    results = []
    for c in (1.0, 1e-6, 1e6):
        given = NOW | {"graft": graft, "graft_eps": 1e-30, "merge_dims": False, "state_dtype": dtype}
        opt = lather.Shampoo(parameters(shapes, dtype), **given)
        results.append(train(opt, [[c * g for g in row] for row in gradients(12, shapes, dtype)]))
    start = parameters(shapes, dtype)
    assert not any(torch.allclose(a, b.detach(), atol=1e-2) for a, b in zip(results[0], start, strict=True))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=tolerance, atol=tolerance)


def test_relative_eps_is_a_part_of_the_mean_denominator() -> None:
    """By hand, before the first refresh: it is Adam with eps times the root mean square of its denominators."""
    (p,), (g,) = parameters([(7, 5)]), gradients(1, [(7, 5)])[0]
    start = p.detach().clone()
    train(lather.Shampoo([p], **NOW | {"lr": 1.0, "eps": 0.5}, state_dtype="float64"), [[g]])
    torch.testing.assert_close(start - p.detach(), g / (g.abs() + 0.5 * g.square().mean().sqrt()))


@pytest.mark.parametrize("options", [{}, {"betas": (0.95, 1.0)}, {"bias_correction": False}, {"precondition_1d": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_zero_gradients_give_zero_directions(dtype: torch.dtype, options: Options) -> None:
    """Denominators are then all zero, and so is the relative eps."""
    start, opt = parameters(dtype=dtype), lather.Shampoo(parameters(dtype=dtype), **NOW | options)
    after = train(opt, [[torch.zeros_like(p) for p in start]] * 5)
    assert all(torch.equal(a, b.detach()) for a, b in zip(after, start, strict=True))
    later = train(opt, gradients(3, dtype=dtype))
    assert all(a.isfinite().all() and not torch.equal(a, b) for a, b in zip(later, after, strict=True)) and not opt.health()


def test_scale_of_gradients() -> None:
    """g -> c g with eps -> c eps, if that is absolute, gives the same steps, because eigenbases do not change."""
    results = []
    for c in (1.0, 16.0):
        opt = lather.Shampoo(parameters(), **SOAP | {"eps": 1e-3 * c, "graft_eps": 1e-3 * c}, precondition_frequency=3)
        results.append(train(opt, [[c * g for g in row] for row in gradients(9)]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@every_root
@pytest.mark.parametrize("frequency", [1, 3])
def test_with_diagonal_factors_it_is_adam(frequency: int, root: str) -> None:
    """Bases are permutations, and change when eigenvalues change their order. The moment must follow the vectors."""
    torch.manual_seed(0)
    sizes = 10 ** torch.randn(18, 5)
    grads = [[torch.diag(size * torch.randn(5).sign())] for size in sizes]
    soap, adam = (nn.Parameter(torch.zeros(5, 5)) for _ in range(2))
    given = SOAP | {"betas": (0.8, 0.9), "precondition_frequency": frequency, "root": root}
    train(lather.Shampoo([soap], **given, start_preconditioning_step=1), grads)
    train(torch.optim.Adam([adam], lr=given["lr"], betas=given["betas"], eps=given["eps"]), grads)
    torch.testing.assert_close(soap, adam, rtol=1e-4, atol=1e-5)


def dense(t: int) -> Tensor:
    return torch.ones(7, 5, dtype=torch.float64)


def diagonal_at_first(t: int) -> Tensor:
    """At first bases are permutations or identities. Later they are not."""
    return torch.ones(7, 5, dtype=torch.float64) if t > 4 else torch.eye(7, 5, dtype=torch.float64)


def zero_at_first(t: int) -> Tensor:
    return torch.full((7, 5), float(t > 4), dtype=torch.float64)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("mask", [dense, diagonal_at_first, zero_at_first])
@every_root
def test_permuted_rows_and_columns(root: str, mask: Callable[[int], Tensor], delay: int) -> None:
    """Also while bases are permutations, and at the refresh after that. The moment follows."""
    torch.manual_seed(0)
    rows, columns = torch.randperm(7), torch.randperm(5)
    grads = [[g * mask(t)] for t, (g,) in enumerate(gradients(17, [(7, 5)]), 1)]
    given = SOAP | {"precondition_frequency": 4, "state_dtype": "float64", "root": root, "refresh_delay": delay}
    straight = train(lather.Shampoo([nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))], **given), grads)[0]
    turned = [[g[rows][:, columns]] for (g,) in grads]
    shuffled = train(lather.Shampoo([nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))], **given), turned)[0]
    torch.testing.assert_close(shuffled, straight[rows][:, columns], rtol=1e-7, atol=1e-7)


# The moment and its basis.


def stack_of(shape: Shape, n: int = 3, **options: Any) -> tuple[Soap, dict[str, Tensor], Context]:
    method = METHODS["soap"]
    assert isinstance(method, Soap)
    hyper = resolve({name: option.default for name, option in OPTIONS.items()} | SOAP | options).hyper
    stack = Stack(n, shape, ("full",) * len(shape), torch.float64, torch.float64, torch.device("cpu"))
    ctx = Context(hyper, [4] * n, torch.ones(n, dtype=torch.float64))
    return method, method.init(stack, hyper), ctx


def refresh(method: Soap, state: dict[str, Tensor], slots: Sequence[int], ctx: Context) -> None:
    solver, failed = method.solver(ctx.hyper, "cpu", 2), torch.zeros(len(ctx.steps), dtype=torch.int32)
    due = Due(state, slots, ctx, failed, (), method.exponent(ctx.hyper, 2), solver)
    for jobs in cut_into_batches([due]):
        assert all(ok.all() for _, _, ok in Batch(method, jobs, exact=False)())


@every_root
def test_columns_go_by_descending_eigenvalue_or_stay(root: str) -> None:
    """So an element of the moment belongs to the same rank or column after a refresh, also when eigenvalues change their order."""
    method, state, ctx = stack_of((5, 4), root=root)
    state["w"].fill_(1e-30)
    generator = torch.Generator().manual_seed(0)
    for t in range(12):
        sizes = torch.linspace(1, 3, 5, dtype=torch.float64).roll(t)  # another row is the largest each time
        g = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64) * sizes[:, None]
        method.accumulate(state, g, ctx)
        before = state["w"].clone()
        refresh(method, state, [0, 1, 2], ctx)
        if t:
            assert torch.equal(state["w"], before)
        method.follow(state, g, ctx)
        for i, d in enumerate((5, 4)):
            q, factor = state[f"Q{i}"], state[f"L{i}"]
            torch.testing.assert_close(q.mT @ q, torch.eye(d, dtype=torch.float64).expand(3, d, d), rtol=0, atol=1e-6)
            values = (q.mT @ factor @ q).diagonal(dim1=1, dim2=2)
            assert root == "track" or (values.diff(dim=1) <= 1e-9).all()


def test_the_moment_moves_when_bases_are_no_longer_identities() -> None:
    """It becomes the moment of rotated gradients, if the elements of gradients are not correlated."""
    method, state, ctx = stack_of((5, 4))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    state["w"].copy_(sizes.square())
    g = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    method.accumulate(state, g, ctx)
    refresh(method, state, [0, 2], ctx)
    samples = sizes * torch.randn(200_000, 5, 4, generator=generator, dtype=torch.float64)
    for slot in (0, 2):
        q = [state[f"Q{i}"][slot].mT.expand(len(samples), -1, -1) for i in range(2)]
        torch.testing.assert_close(state["w"][slot], rotated(samples, q).square().mean(0), rtol=0.02, atol=0.0)
    assert torch.equal(state["w"][1], sizes.square())  # not refreshed
    moved = state["w"].clone()
    method.accumulate(state, g.flip(1), ctx)
    refresh(method, state, [0, 2], ctx)
    assert torch.equal(state["w"], moved)  # there was a basis


def test_signs_of_eigenvectors_do_not_matter() -> None:
    (p,), (q,) = parameters([(7, 5)]), parameters([(7, 5)])
    one, other = (lather.Shampoo([x], **SOAP, precondition_frequency=3, state_dtype="float64") for x in (p, q))
    grads = gradients(5, [(7, 5)])
    train(one, grads), train(other, grads)
    state = other.state[q]
    state["Q0.0"][:, ::2] *= -1
    state["Q1.0"][:, 1:3] *= -1
    for opt in (one, other):
        train(opt, gradients(8, [(7, 5)])[5:])
    torch.testing.assert_close(q, p)


def test_what_rotations_round_is_no_gradient() -> None:
    """In its own eigenbases a gradient is diagonal. The rest is rounding errors, which must not be divided by each other."""
    p = nn.Parameter(torch.zeros(48, 32))
    opt = not_the_first(lather.Shampoo([p], **SOAP | {"eps": 1e-12, "lr": 1.0, "start_preconditioning_step": 1}))
    g = torch.randn(48, 32)
    train(opt, [[g]])
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    along = -(p.detach() * (u @ vh)).sum() / (u @ vh).norm() ** 2
    torch.testing.assert_close(along, torch.tensor(1.0), rtol=0.1, atol=0)
    assert p.norm() < 48 * 32 / 40  # as long as a step of Adam would be, or shorter


def test_bases_help_with_a_coarse_state_too() -> None:
    """Bases in bfloat16 are wrong by less than a percent. Denominators far below their mean still count."""
    sizes = 10 ** torch.linspace(0, -1.5, 16)
    grads = [[sizes[:, None] * torch.randn(16, 8)] for _ in range(12)]
    ends = {}
    for dtype in ("float32", "bfloat16"):
        p = nn.Parameter(torch.zeros(16, 8))
        given = SOAP | {"eps": 1e-8, "betas": (0.0, 0.9), "precondition_frequency": 3, "state_dtype": dtype}
        ends[dtype] = train(lather.Shampoo([p], **given), grads)[0]
    small = slice(8, None)  # rows whose gradients are below the mean by one to one and a half decades
    torch.testing.assert_close(ends["bfloat16"][small].norm(), ends["float32"][small].norm(), rtol=0.15, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_are_the_same_if_they_are_rounded(dtype: torch.dtype) -> None:
    q = torch.linalg.qr(torch.randn(20, 12, 12)).Q
    order = torch.randperm(12)
    assert torch.equal(places(squared_cosines(q.to(dtype).float(), q[:, :, order])), order.expand(20, 12))


def one_row(t: int) -> Tensor:
    return torch.eye(24)[t % 24, :, None] * torch.randn(24, 16)


def seldom(t: int) -> Tensor:
    rows = (24 * torch.rand(4) ** 4).long()
    return torch.zeros(24, 16).index_add_(0, rows, torch.randn(4, 16) + 1)


def late(t: int) -> Tensor:
    return torch.randn(24, 16) * (t > 3)


@pytest.mark.parametrize("start", [None, 1])
@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"refresh_warmup": 0.1},
        {"precondition_frequency": 1},
        {"precondition_frequency": 2},
        {"refresh_warmup": 0.1, "damping": "relative", "beta3": "nesterov"},
    ],
    ids=["", "warmed up", "every step", "every other step", "by default"],
)
@pytest.mark.parametrize("gradient", [one_row, seldom, late, lambda t: torch.randn(24, 16)])
def test_with_its_graft_steps_are_as_long_as_adams(gradient: Callable[[int], Tensor], schedule: Options, start: int | None) -> None:
    """Also for rows that are seldom seen, without a gradient at first, and with bases of one gradient."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(24, 16))
    given = {"graft": "adam", "lr": 1.0, "betas": (0.95, 0.95), "eps": 1e-8, "start_preconditioning_step": start}
    opt = lather.Shampoo([p], **SOAP | given | schedule)
    for t in range(24):
        before = p.detach().clone()
        train(opt, [[gradient(t)]])
        assert (p.detach() - before).norm() <= 1.001 * math.sqrt(p.numel())


def test_warmed_up_bases_are_made_of_two_gradients_at_least() -> None:
    schedule = {"refresh_warmup": 0.1}
    p = nn.Parameter(torch.zeros(7, 5))
    opt = lather.Shampoo([p], **SOAP | schedule)
    for t, grads in enumerate(gradients(2, [(7, 5)], torch.float32)):
        train(opt, [grads])
        assert torch.equal(opt.state[p]["Q0.0"], torch.eye(7)) == (t == 0)
    asked = lather.Shampoo([nn.Parameter(torch.zeros(7, 5))], **SOAP | schedule, start_preconditioning_step=1)
    train(asked, gradients(1, [(7, 5)], torch.float32))
    assert torch.equal(asked._session.run.banks[0].state["Q0"][0], torch.eye(7))


@every_root
def test_without_a_gradient_bases_stay_identities(root: str) -> None:
    """A zero factor has any basis. The moment must still move when the first real one comes."""
    p = nn.Parameter(torch.zeros(7, 5))
    opt = lather.Shampoo([p], **SOAP, precondition_frequency=2, root=root)
    zeros, (row,) = [torch.zeros(7, 5)], gradients(1, [(7, 5)], torch.float32)
    train(opt, [zeros, zeros, row])
    assert torch.equal(opt.state[p]["Q0.0"], torch.eye(7)) and torch.equal(opt.state[p]["Q1.0"], torch.eye(5))
    assert not opt.health()
    train(opt, [row])
    assert not torch.equal(opt.state[p]["Q0.0"], torch.eye(7)) and not torch.equal(opt.state[p]["Q1.0"], torch.eye(5))


# Where parameters are large, and on what basis.


def test_a_mode_that_is_too_large_is_not_rotated() -> None:
    p = nn.Parameter(torch.zeros(9, 4, dtype=torch.float64))
    given = SOAP | {"large_dim": "diagonal", "max_preconditioner_dim": 4, "precondition_frequency": 2, "state_dtype": "float64"}
    opt = lather.Shampoo([p], **given)
    train(opt, gradients(6, [(9, 4)]))
    assert {key.partition(".")[0]: tuple(x.shape) for key, x in opt.state[p].items()} == {
        "step": (), "L1": (4, 4), "Q1": (4, 4), "m": (9, 4), "w": (9, 4),
    }  # fmt: skip
    assert opt._session.run.banks[0].counts.sum() == 0
    assert opt.plan().banks[0].solvers == ("identity", "eigh")


def test_memory() -> None:
    """Two factors, two bases, the filtered gradient and the moment; nothing else."""
    size = 4 * 64 * 64
    report = lather.plan({"w": (64, 64), "b": (64,)}, preconditioner="soap", graft=None)
    assert report.memory == {
        "factors": 2 * size, "basis": 2 * size, "filtered gradient": size + 256, "graft moment": 256,
        "moment in the basis": size, "total": 6 * size + 512,
    }  # fmt: skip
    assert [row.method for row in report.params] == ["soap", "adam"]
    delayed = lather.plan({"w": (64, 64)}, preconditioner="soap", graft=None, refresh_delay=1)
    assert delayed.memory["roots to come"] == 2 * size
    assert report.banks[0].solvers == ("eigh", "eigh")
    assert lather.plan({"w": (64, 64)}, preconditioner="soap", device="cuda").banks[0].solvers == ("track(iterations=1)",) * 2
    shampoo = lather.plan({"w": (64, 64)}, graft=None)
    assert report.step_flops == 2 * shampoo.step_flops  # four products and a Gram matrix against two, by mode


def test_solvers() -> None:
    assert [resolve_basis(name, "cuda").name for name in ("auto", *BASES)] == ["track", *BASES]
    with pytest.raises(ValueError, match="no eigenbasis"):
        resolve_basis("minimax", "cpu")


@every_root
def test_a_basis_that_fails_comes_from_eigh(root: str) -> None:
    solver = resolve_basis(root, "cpu")
    a = torch.diag_embed(torch.tensor([[3.0, 2.0, 1.0], [1.0, 5.0, 2.0], [1.0, math.nan, 1.0]]))
    warm = solver.init(3, 3, torch.float32, "cpu")
    if warm:
        warm["Q"][1] = math.nan
    basis = solve_basis(solver, a, warm)
    assert basis.ok.tolist() == [True, True, False]
    torch.testing.assert_close(basis.values[1], torch.tensor([5.0, 2.0, 1.0]))
    assert torch.equal(rescue_basis(a).vectors[1].abs(), basis.vectors[1].abs().round())


def test_a_refresh_that_fails_keeps_the_basis() -> None:
    p = parameters([(7, 5)])[0]
    opt = lather.Shampoo([p], **SOAP, precondition_frequency=2, state_dtype="float64")
    train(opt, gradients(3, [(7, 5)]))
    state = opt.state[p]
    state["L0.0"].fill_(torch.finfo(torch.float64).max)  # its eigenvalues overflow
    before = {key: x.clone() for key, x in state.items()}
    with pytest.warns(lather.NumericalWarning, match="could not be refreshed"):
        train(opt, gradients(1, [(7, 5)]))
    assert all(torch.equal(state[key], before[key]) for key in ("Q0.0", "Q1.0"))
    assert [counts["failed"] for counts in opt.health().values()] == [1]
    assert p.isfinite().all() and not torch.equal(state["w.0"], before["w.0"])


# The recipe.


def test_preset() -> None:
    """It agrees with the twin, and translates the arguments of SOAP's authors."""
    ours, theirs = parameters(), parameters()
    theirs_too = {"precondition_frequency": 3, "refresh_warmup": 0.0}  # with the default bases are not unique at first
    opt = lather.soap(ours, **theirs_too, eps=1e-3, max_precond_dim=5, state_dtype="float64")
    options = {"lr": 3e-3, "betas": (0.95, 0.95), "eps": 1e-3, "graft_eps": 1e-3, "weight_decay": 0.01, "merge_dims": False}
    options |= {"preconditioner": "soap", "graft": None, "large_dim": "diagonal", "max_preconditioner_dim": 5}
    twin = Reference(theirs, damping="absolute", **theirs_too, **options)
    train(opt, gradients(9))
    for row in gradients(9):
        twin.step(row)
    torch.testing.assert_close([p.detach() for p in ours], twin.params)
    group = lather.soap(parameters(), correct_bias=False, precondition_1d=True, merge_dims=True).param_groups[0]
    assert (group["bias_correction"], group["precondition_1d"], group["merge_dims"]) == (False, True, True)
    assert (group["lr"], group["betas"], group["eps"], group["graft_eps"]) == (3e-3, (0.95, 0.95), 1e-8, 1e-8)
    assert (group["weight_decay"], group["precondition_frequency"], group["max_preconditioner_dim"]) == (0.01, 10, 10000)
    assert (group["damping"], group["refresh_warmup"], group["beta3"]) == ("absolute", 0.1, "nesterov")
    for name, value in (("shampoo_beta", 0.9), ("normalize_grads", True), ("data_format", "channels_last")):
        with pytest.raises(ValueError, match=rf"^{name}={value!r}.*leave it out"):
            lather.soap(parameters(), **{name: value})


def test_preset_of_groups() -> None:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 20, bias=False))
    opt = lather.soap(lather.route(model, [("^1", {"eps": 1e-5, "max_preconditioner_dim": 7})]), lr=1e-2)
    methods = {row.name: row.method for row in opt.plan().params}
    assert methods == {
        "0.weight": "adam", "1.weight": "soap", "1.bias": "adam", "2.weight": "soap", "2.bias": "adam", "3.weight": "adam",
    }  # fmt: skip
    group = next(group for group in opt.param_groups if group["eps"] == 1e-5)
    assert (group["graft_eps"], group["max_preconditioner_dim"], group["graft"]) == (1e-5, 7, None)


@pytest.mark.parametrize("seed", range(3))
def test_a_rescued_basis_keeps_the_order_of_the_last_one(seed):
    """So that the moment of every column stays its own."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(2, 6, 6, generator=generator, dtype=torch.float64))[0]
    values = torch.rand(2, 6, generator=generator, dtype=torch.float64) + torch.randperm(6, generator=generator)
    a = (q * values[:, None, :]) @ q.mT
    rescued = lather.roots.rescue_basis(a, q)
    torch.testing.assert_close((rescued.vectors * q).sum(1).abs(), torch.ones(2, 6, dtype=torch.float64))
    torch.testing.assert_close(rescued.values, values)
    assert not torch.equal(lather.roots.rescue_basis(a).values, rescued.values)
