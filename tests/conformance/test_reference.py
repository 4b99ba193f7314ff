"""The twin itself, against torch.optim and against mathematics done another way."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paper import PAPER
from reference import Block, Reference, cut, merged, piece_sizes
from torch import Tensor

SHAPES = [(5, 4), (3, 2, 4), (6,), ()]


def tensors(seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def gradient(w: Tensor, t: int) -> Tensor:
    """Of a loss that depends on w and on the step, so that errors in either feed back."""
    return (w + 0.1 * t).sin() + 0.3 * w


def close(a: Tensor, b: Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def power(a: Tensor, e: float) -> Tensor:
    """a^e of a symmetric positive definite matrix by the non-symmetric eigensolver: not the twin's route."""
    values, vectors = torch.linalg.eig(a)
    result: Tensor = (vectors @ torch.diag(values**e) @ torch.linalg.inv(vectors)).real
    return result


def compare_with_torch(twin: Reference, opt: torch.optim.Optimizer, grad: Callable[[Tensor, int], Tensor]) -> None:
    theirs = opt.param_groups[0]["params"]
    start = [p.detach().clone() for p in theirs]
    for t in range(1, 31):
        for p in theirs:
            p.grad = grad(p.detach(), t)
        twin.step([grad(w, t) for w in twin.params])
        opt.step()
    for w, p, w0 in zip(twin.params, theirs, start, strict=True):
        assert (w - w0).abs().max() > 1e-3
        close(w, p.detach())


SGD, ADAGRAD, RMSPROP = torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop
ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
NO_FILTER = {"betas": (0.0, 0.999)}
TORCHS = {"betas": (0.9, 0.999)}  # the defaults of its Adam
TORCH: list[Any] = [
    (SGD, {}, {"graft": "sgd", **NO_FILTER}),
    (SGD, {}, {"graft": None, **NO_FILTER}),
    (SGD, {"maximize": True}, {"graft": "sgd", "maximize": True, **NO_FILTER}),
    (SGD, {"weight_decay": 0.1}, {"graft": "sgd", "weight_decay": 0.1, "weight_decay_mode": "l2", **NO_FILTER}),
    (SGD, {"momentum": 0.8}, {"graft": "sgd", "momentum": 0.8, **NO_FILTER}),
    # Decoupled decay joins the direction before momentum, so for plain SGD it is the coupled one.
    (
        SGD,
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        {"graft": "sgd", "momentum": 0.8, "nesterov": True, "weight_decay": 0.1, **NO_FILTER},
    ),
    (ADAGRAD, {"eps": 1e-10}, {"graft": "adagrad", "graft_eps": 1e-10, **NO_FILTER}),
    (RMSPROP, {"alpha": 0.95, "eps": 1e-8}, {"graft": "rmsprop", "betas": (0.0, 0.95)}),
    (
        RMSPROP,
        {"alpha": 0.95, "eps": 1e-8, "momentum": 0.8},
        {"graft": "rmsprop", "graft_beta2": 0.95, "momentum": 0.8, **NO_FILTER},
    ),
    (ADAM, {}, TORCHS),
    (ADAM, {"betas": (0.8, 0.999)}, {"betas": (0.8, 1.0)}),
    (
        ADAM,
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"betas": (0.8, 0.95), "graft_eps": 1e-6, "weight_decay": 0.1, "weight_decay_mode": "l2"},
    ),
    (ADAMW, {"betas": (0.8, 0.95), "weight_decay": 0.1}, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    (ADAMW, {"weight_decay": 0.1}, {"weight_decay": 0.1, "weight_decay_mode": "corrected", **TORCHS}),
    (ADAMW, {"weight_decay": 0.1}, {"weight_decay": 0.1 * 0.02, "weight_decay_mode": "independent", **TORCHS}),
]


@pytest.mark.parametrize(("cls", "theirs", "ours"), TORCH)
def test_never_started_is_torch(cls: type, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    params = tensors(0)
    twin = Reference(params, lr=0.02, start_preconditioning_step=math.inf, **ours)
    compare_with_torch(twin, cls([p.clone() for p in params], lr=0.02, **theirs), gradient)


def test_dampening_is_torch_after_a_zero_gradient() -> None:
    """torch does not dampen the first momentum buffer. If that is zero, the definitions agree."""
    params = tensors(0)
    twin = Reference(params, lr=0.02, graft="sgd", momentum=0.8, dampening=0.3, betas=(0.0, 0.999))
    twin.options["start_preconditioning_step"] = math.inf
    opt = SGD([p.clone() for p in params], lr=0.02, momentum=0.8, dampening=0.3)
    compare_with_torch(twin, opt, lambda w, t: gradient(w, t) * (t > 1))


@pytest.mark.parametrize("nesterov", [False, True])
def test_dampening_scales_the_rate(nesterov: bool) -> None:
    """Dampened from the first step, and in the Nesterov term (torch allows neither), it is a factor on lr."""
    params = tensors(0)
    ours: dict[str, Any] = {"graft": "sgd", "momentum": 0.8, "nesterov": nesterov, **NO_FILTER}
    twin = Reference(params, lr=0.02, dampening=0.3, start_preconditioning_step=math.inf, **ours)
    opt = SGD([p.clone() for p in params], lr=0.02 * 0.7, momentum=0.8, nesterov=nesterov)
    compare_with_torch(twin, opt, gradient)


def test_beta3_and_bias_correction() -> None:
    """Two steps of the filter, by hand: m = 0.2 a, then g_bar = beta3 m + (1 - beta3) b."""
    a, b = tensors(1, [(3,), (3,)])
    for corrected in (True, False):
        twin = Reference([torch.zeros(3)], lr=1.0, betas=(0.8, 1.0), beta3=0.5, graft="sgd", bias_correction=corrected)
        twin.step([a])
        twin.step([b])
        first, second = (0.5, 1 - 0.5 * 0.8) if corrected else (1.0, 1.0)
        close(twin.params[0], -(0.5 * a / first + (0.1 * a + 0.5 * b) / second))
    raw = Reference([torch.zeros(3)], lr=1.0, betas=(0.0, 1.0), beta3=0.5, graft="sgd")
    raw.step([a])
    raw.step([b])
    close(raw.params[0], -(a + b))


def test_nesterovs_filter_is_of_preconditioned_blocks() -> None:
    """0.8 of the memory in a vector, 0.64 in a matrix, and 0.8 again in one that is never preconditioned."""
    for shape, start, beta3 in (((3,), None, 0.8), ((3, 1), 9, 0.8), ((3, 2), 9, 0.64), ((3, 2), math.inf, 0.8)):
        a, b = tensors(1, [shape, shape])
        twin = Reference([torch.zeros(shape)], lr=1.0, betas=(0.8, 0.95), graft="sgd", start_preconditioning_step=start)
        twin.step([a])
        twin.step([b])
        close(twin.params[0], -(a + (beta3 * 0.2 * a + (1 - beta3) * b) / (1 - 0.8 * beta3)))


def test_decay_follows_the_peak_rate() -> None:
    w, zero = torch.ones(2), [torch.zeros(2)]
    after = {}
    for mode in ("decoupled", "corrected", "independent"):
        twin = Reference([w], lr=0.5, weight_decay=0.1, weight_decay_mode=mode)
        for lr in (1.0, 0.25):
            twin.options["lr"] = lr
            twin.step(zero)
        after[mode] = twin.params[0][0].item()
    assert after == pytest.approx(
        {"decoupled": 0.9 * 0.975, "corrected": 0.9 * (1 - 0.1 / 16), "independent": 0.9 * 0.975}, rel=1e-12
    )


def test_merging() -> None:
    assert merged((512, 512, 3, 3), 1024) == [512, 512, 9]
    assert merged((512, 512, 3, 3), 8192) == [512, 4608]
    assert merged((64, 3, 7, 7), 1024) == [64, 147]
    assert merged((2, 3), 1024) == [2, 3]
    assert merged((2, 1, 3, 1, 4), 1024) == [2, 12]
    assert merged((2, 3, 512, 4), 1024) == [6, 512, 4]
    assert merged((2, 4, 4), 16) == [2, 16]
    assert merged((1, 5), 1024) == [5]
    assert piece_sizes(10, 4, 1) == [4, 3, 3]
    assert piece_sizes(8, 4, 1) == [4, 4]
    assert piece_sizes(3, 4, 1) == [3]
    assert piece_sizes(5632, 1024, 1) == [939] * 4 + [938] * 2
    assert piece_sizes(5632, 1024, 16) == [944] * 5 + [912]
    assert piece_sizes(2050, 1024, 16) == [688, 688, 674]
    assert piece_sizes(4096, 1024, 16) == [1024] * 4
    assert piece_sizes(33, 32, 16) == [32, 1]
    assert piece_sizes(10, 4, 16) == [4, 3, 3]  # a multiple is longer than the limit
    assert piece_sizes(6, 5, 4) == [3, 3]  # it divides
    assert piece_sizes(19, 8, 8) == [8, 8, 3]
    assert piece_sizes(34, 16, 16) == [16, 16, 2]
    assert piece_sizes(65, 24, 16) == [22, 22, 21]  # so is 32


def test_blocks_are_numbered_batch_first_then_row_major() -> None:
    x = torch.arange(2 * 3 * 2).view(2, 3, 2)
    blocks = cut(x, [[2, 1], [1, 1]])
    assert [b.flatten().tolist() for b in blocks[:4]] == [[0, 2], [1, 3], [4], [5]]
    assert [b.flatten().tolist() for b in blocks[4:]] == [[6, 8], [7, 9], [10], [11]]


def shampoo(w: Tensor, **options: Any) -> Reference:
    """As in the paper, but ungrafted and unfiltered, with roots from the first step: w - 1 * P."""
    plain: dict[str, Any] = PAPER | {"lr": 1.0, "betas": (0.0, 1.0), "graft": None, "precondition_frequency": 1}
    return Reference([w], **(plain | options))


def test_two_by_two_closed_form() -> None:
    """G = Q diag(4, 9) has L = Q diag(16, 81) Q^T and R = diag(16, 81), so L^-1/4 G R^-1/4 = Q."""
    c, s = math.cos(0.7), math.sin(0.7)
    q = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    twin = shampoo(torch.zeros(2, 2), eps=0.0)
    twin.step([q @ torch.diag(torch.tensor([4.0, 9.0], dtype=torch.float64))])
    close(twin.params[0], -q)


@pytest.mark.parametrize(("beta2", "corrected"), [(1.0, True), (0.9, True), (0.9, False)])
@pytest.mark.parametrize(("option", "e"), [({}, 0.25), ({"exponent_multiplier": 1.82}, 0.455), ({"exponent": 0.5}, 0.5)])
def test_two_steps_of_a_matrix(beta2: float, corrected: bool, option: dict[str, Any], e: float) -> None:
    a, b = tensors(2, [(3, 4), (3, 4)])
    twin = shampoo(torch.zeros(3, 4), betas=(0.0, beta2), eps=1e-2, bias_correction=corrected, **option)
    twin.step([a])
    first = twin.params[0].clone()
    twin.step([b])
    old, new, bc = (1.0, 1.0, 1.0) if beta2 == 1 else (0.09, 0.1, 0.19 if corrected else 1.0)
    left = (old * a @ a.T + new * b @ b.T) / bc + 1e-2 * eye(3)
    right = (old * a.T @ a + new * b.T @ b) / bc + 1e-2 * eye(4)
    close(first - twin.params[0], power(left, -e) @ b @ power(right, -e), 1e-10)


def test_third_order() -> None:
    (g,) = tensors(3, [(3, 4, 2)])
    twin = shampoo(torch.zeros(3, 4, 2), merge_dims=False, eps=1e-2, exponent={2: 9.0})
    twin.step([g])
    subscripts = ("iab,jab->ij", "aib,ajb->ij", "abi,abj->ij")
    x = [power(torch.einsum(s, g, g) + 1e-2 * eye(d), -1 / 6) for s, d in zip(subscripts, g.shape, strict=True)]
    close(-twin.params[0], torch.einsum("abc,ai,bj,ck->ijk", g, *x), 1e-10)
    idle = shampoo(torch.zeros(3, 4, 2), merge_dims=False, exponent={3: 0.0})
    idle.step([g])
    assert torch.equal(-idle.params[0], g)


def test_vectors() -> None:
    """Order 1, e = 1/2: (g g^T)^(-1/2) g = g / |g|, up to eps; and in pieces, each its own."""
    g = torch.tensor([3.0, 4.0, 5.0, 12.0], dtype=torch.float64)
    for limit, norms in ((4, [194**0.5] * 4), (2, [5.0, 5.0, 13.0, 13.0])):
        twin = shampoo(torch.zeros(4), precondition_1d=True, max_preconditioner_dim=limit)
        twin.step([g])
        close(-twin.params[0], g / torch.tensor(norms, dtype=torch.float64), 1e-6)


def test_large_dimensions() -> None:
    (g,) = tensors(4, [(5, 3)])
    w = torch.zeros(5, 3)

    def direction(g: Tensor, **options: Any) -> Tensor:
        twin = shampoo(torch.zeros(g.shape), **({"max_preconditioner_dim": 3, "eps": 1e-2} | options))
        twin.step([g])
        return -twin.params[0]

    close(direction(g), torch.cat([direction(g[:3]), direction(g[3:])]))
    rows = ((g**2).sum(1) + 1e-2) ** -0.25
    right = power(g.T @ g + 1e-2 * eye(3), -0.25)
    close(direction(g, large_dim="diagonal"), rows[:, None] * g @ right, 1e-10)
    adagrad = Reference([w], lr=1.0, large_dim="adagrad", max_preconditioner_dim=3, graft_eps=0.5)
    adagrad.step([g])
    adagrad.step([g])
    close(-adagrad.params[0], g / (g.abs() + 0.5) + g / (2**0.5 * g.abs() + 0.5))


def test_batch_dims_are_independent_parameters() -> None:
    w, *grads = tensors(5, [(2, 5, 4)] * 4)
    options: dict[str, Any] = {"max_preconditioner_dim": 3, "precondition_frequency": 2, "lr": 0.1}
    stack = Reference([w], batch_dims=1, **options)
    apart = Reference(list(w), **options)
    for g in grads:
        stack.step([g])
        apart.step(list(g))
    assert len(stack.blocks[0]) == 8
    close(stack.params[0], torch.stack(apart.params))


@pytest.mark.parametrize("graft", ["sgd", "adagrad", "rmsprop", "adam", "adafactor"])
def test_graft_gives_the_norm_and_shampoo_the_direction(graft: str) -> None:
    w, g = tensors(6, [(4, 3), (4, 3)])
    moved = {}
    for name, start in ((graft, 1), (graft, math.inf), (None, 1)):
        twin = Reference([w], lr=1.0, graft=name, start_preconditioning_step=start, exponent=0.5)
        twin.step([g])
        moved[name, start] = w - twin.params[0]
    ours, size, way = moved[graft, 1], moved[graft, math.inf], moved[None, 1]
    close(ours / ours.norm(), way / way.norm())
    close(ours.norm(), size.norm())
    assert (ours - size).abs().max() > 1e-2


@pytest.mark.parametrize(("shape", "products"), [((4, 3), "i,j->ij"), ((4, 3, 2), "i,j,k->ijk")])
@pytest.mark.parametrize("beta2", [0.9, 1.0])
def test_a_second_moment_of_rank_one(beta2: float, shape: tuple[int, ...], products: str) -> None:
    """Two steps of sums over all modes but one, and no preconditioning: by hand, with the total once for each mode but one."""
    w, a, b = tensors(6, [shape] * 3)
    twin = Reference([w], lr=1.0, betas=(0.0, beta2), graft="adafactor", merge_dims=False, start_preconditioning_step=9)
    twin.step([a])
    first = twin.params[0].clone()
    twin.step([b])
    square = a**2 + b**2 if beta2 == 1 else (0.09 * a**2 + 0.1 * b**2) / 0.19
    modes = range(len(shape))
    sums = [square.sum([other for other in modes if other != mode]) for mode in modes]
    v = torch.einsum(products, *sums) / square.sum() ** (len(shape) - 1)
    close(first - twin.params[0], (b / v.sqrt()).clamp(-1, 1), 1e-6)
    assert (b / v.sqrt()).abs().max() > 1


def test_zero_gradient_is_a_zero_direction() -> None:
    twin = Reference([torch.ones(3, 2)], precondition_frequency=1)
    twin.step([torch.zeros(3, 2)])
    assert torch.equal(twin.params[0], torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize(("graft", "degree"), [("sgd", 1), ("adam", 0), ("adafactor", 0), ("adagrad", 0), (None, 0)])
def test_scale_equivariance(graft: str | None, degree: int) -> None:
    """Gradients times c, and ``eps`` times c squared, which the singular first factors need. e = 1/(2k) removes the scale, and
    the graft puts its own back."""
    w, *grads = tensors(7, [(5, 4)] * 7)
    c, moved = 64.0, []
    for scale in (1.0, c):
        options: dict[str, Any] = PAPER | {"graft": graft, "eps": 1e-6 * scale**2, "graft_eps": 0.0, "bias_correction": True}
        twin = Reference([w], lr=0.01, precondition_frequency=2, start_preconditioning_step=1, **options)
        twin.params[0].zero_()
        for g in grads:
            twin.step([scale * g])
        moved.append(twin.params[0])
    close(moved[1], c**degree * moved[0], 1e-9)


@pytest.mark.parametrize(("graft", "degree"), [("sgd", 1), ("adam", 0), ("adafactor", 0), ("adagrad", 0), (None, 0)])
def test_scale_equivariance_of_the_defaults(graft: str | None, degree: int) -> None:
    """Relative damping needs no help. Without a graft the exponent is the paper's; 1/2 would take the scale out twice."""
    w, *grads = tensors(7, [(5, 4)] * 7)
    moved = []
    for scale in (1.0, 64.0):
        twin = Reference([w], lr=0.01, graft=graft, graft_eps=0.0)
        twin.params[0].zero_()
        for g in grads:
            twin.step([scale * g])
        moved.append(twin.params[0])
    close(moved[1], 64.0**degree * moved[0], 1e-9)


def test_missing_gradients_leave_everything_alone() -> None:
    w, *grads = tensors(8, [(4, 3)] * 7)
    options: dict[str, Any] = {"precondition_frequency": 2, "momentum": 0.9, "weight_decay": 0.1}
    gaps, whole = Reference([w, w], **options), Reference([w], **options)
    for g in grads:
        gaps.step([g, g])
        gaps.step([None, g])
        whole.step([g])
    assert gaps.steps == [6, 12]
    assert torch.equal(gaps.params[0], whole.params[0])
    assert not torch.allclose(gaps.params[0], gaps.params[1])


def state_of(block: Block) -> list[Tensor]:
    return [x.clone() for x in (block.m, block.v, block.momentum, *block.factors)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_block_waits_and_the_others_do_not(bad: float) -> None:
    w, *grads = tensors(9, [(6, 3)] * 7)
    options: dict[str, Any] = {"precondition_frequency": 3, "momentum": 0.9, "max_preconditioner_dim": 3, "graft": "adam"}
    hit, clean = Reference([w], **options), Reference([w], **options)
    for t, g in enumerate(grads, 1):
        broken = g.clone()
        broken[1, 1] = bad if t in (3, 5) else g[1, 1]
        block, before = hit.blocks[0][0], hit.params[0].clone()
        state = state_of(block)
        hit.step([broken])
        clean.step([g])
        same = [torch.equal(a, b) for a, b in zip(state, state_of(block), strict=True)]
        assert torch.equal(hit.params[0][:3], before[:3]) == (t in (3, 5))
        assert same == [t in (3, 5)] * 5
        assert not torch.equal(hit.params[0][3:], before[3:])
    assert hit.steps == [6]
    assert hit.params[0].isfinite().all()
    assert torch.equal(hit.params[0][3:], clean.params[0][3:])


def test_a_refresh_due_at_a_bad_gradient_waits_for_the_next() -> None:
    (g,) = tensors(12, [(3, 2)])
    twin = shampoo(torch.zeros(3, 2), betas=(0.0, 0.9), precondition_frequency=2)
    for t in range(1, 5):
        twin.step([g * math.nan if t == 2 else g])
        assert (twin.blocks[0][0].roots is None) == (t < 4)


def test_a_later_start_gives_the_graft_back() -> None:
    w, *grads = tensors(13, [(3, 2)] * 5)
    twin = Reference([w], betas=(0.0, 0.9), graft="sgd", lr=0.5, precondition_frequency=2, start_preconditioning_step=2)
    for g in grads[:3]:
        twin.step([g])
    twin.options["start_preconditioning_step"] = math.inf
    before = twin.params[0].clone()
    twin.step([grads[3]])
    assert twin.blocks[0][0].roots is not None
    close(before - twin.params[0], 0.5 * grads[3], 1e-10)


def test_a_refresh_that_is_not_finite_keeps_the_last_roots() -> None:
    twin = shampoo(torch.zeros(3, 3), eps=0.0)
    twin.step([torch.zeros(3, 3)])
    assert twin.blocks[0][0].roots is None
    twin.step([eye(3)])
    good = twin.blocks[0][0].roots
    assert good is not None
    twin.step([1e200 * tensors(0, [(3, 3)])[0]])
    assert twin.blocks[0][0].roots is good


def test_a_bad_vector_waits_whole() -> None:
    twin = Reference([torch.ones(3)])
    twin.step([torch.tensor([1.0, math.nan, 1.0])])
    assert torch.equal(twin.params[0], torch.ones(3, dtype=torch.float64))
    assert twin.steps == [1]


def refreshes(twin: Reference, block: int, steps: int) -> list[int]:
    """The steps at which the block's roots changed."""
    seen, last = [], None
    for t, g in enumerate(tensors(10, [(4, 2)] * steps), 1):
        twin.step([g])
        if twin.blocks[0][block].roots is not last:
            seen.append(t)
            last = twin.blocks[0][block].roots
    return seen


def test_when_roots_are_refreshed() -> None:
    w = torch.zeros(4, 2)
    for start, steps in ((None, [4, 8, 12]), (3, [3, 4, 8, 12]), (6, [6, 8, 12]), (math.inf, [])):
        together = Reference([w], **PAPER, precondition_frequency=4, start_preconditioning_step=start)
        assert refreshes(together, 0, 13) == steps
    early = {"refresh_warmup": 0.5, "precondition_frequency": 4}
    assert refreshes(Reference([w], **early), 0, 13) == [1, 2, 3, 4, 6, 8, 12]
    assert refreshes(Reference([w], **early, start_preconditioning_step=5), 0, 13) == [5, 6, 8, 12]
    assert refreshes(Reference([w], preconditioner="soap", **early), 0, 13) == [2, 3, 4, 6, 8, 12]
    assert refreshes(Reference([w]), 0, 45) == [*range(1, 20), *range(20, 40, 2), 40, 44]
    assert refreshes(Reference([w], refresh_delay=1), 0, 31) == [11, 21, 31]
    for block, expected in ((0, [7, 11]), (1, [5, 9, 13])):
        offsets = {(0, 0): 3, (0, 1): 1}
        options: dict[str, Any] = PAPER | {"max_preconditioner_dim": 2, "precondition_frequency": 4, "refresh": "staggered"}
        staggered = Reference([w], offsets=offsets, start_preconditioning_step=5, **options)
        assert refreshes(staggered, block, 13) == expected


def test_before_the_first_root_the_graft_leads() -> None:
    w, *grads = tensors(11, [(4, 3)] * 5)
    for graft in ("adam", "adafactor", None):
        late = Reference([w], **PAPER | {"graft": graft}, precondition_frequency=4)
        never = Reference([w], **PAPER | {"graft": graft}, start_preconditioning_step=math.inf)
        for t, g in enumerate(grads, 1):
            late.step([g])
            never.step([g])
            assert torch.equal(late.params[0], never.params[0]) == (t < 4)


def test_an_indefinite_factor_is_shifted_least() -> None:
    """Eigenvalues 2 and -1 become 3 and 0 before eps is added."""
    twin = shampoo(torch.zeros(2, 2), eps=1.0)
    q = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    twin.blocks[0][0].factors[0] = q @ torch.diag(torch.tensor([2.0, -1.0], dtype=torch.float64)) @ q.T
    twin.blocks[0][0].factors[1] = torch.eye(2, dtype=torch.float64)  # a block has roots if no factor is zero
    twin._refresh(twin.blocks[0][0], 1)
    roots = twin.blocks[0][0].roots
    assert roots is not None and roots[0] is not None
    close(roots[0], q @ torch.diag(torch.tensor([4.0**-0.25, 1.0], dtype=torch.float64)) @ q.T)


def test_mistakes() -> None:
    w = [torch.zeros(2, 2)]
    with pytest.raises(TypeError, match="learning_rate"):
        Reference(w, learning_rate=0.1)
    with pytest.raises(ValueError, match="exponent_multiplier"):
        Reference(w, exponent=0.25, exponent_multiplier=1.82)
    with pytest.raises(ValueError, match="graft='adm'"):
        Reference(w, graft="adm")
    with pytest.raises(ValueError, match="offsets"):
        Reference(w, refresh="staggered")


def test_params_are_copies_and_empty_ones_are_left() -> None:
    w, g, empty = torch.ones(2, 3), torch.ones(2, 3), torch.zeros(0, 3)
    twin = Reference([w, empty], precondition_frequency=1)
    twin.step([g, torch.zeros(0, 3)])
    assert torch.equal(w, torch.ones(2, 3)) and torch.equal(g, torch.ones(2, 3))
    assert twin.params[0].dtype == torch.float64
    assert twin.params[1].shape == (0, 3)
    assert twin.steps == [1, 0]
