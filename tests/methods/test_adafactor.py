"""The graft "adafactor": Adam with a second moment of rank one, which is read off Shampoo's factors."""

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn

import lather
from lather.compute.torch_executor import TorchExecutor
from lather.settings import graft_name

Shape = tuple[int, ...]
Options = dict[str, Any]

STEPS = 12
NEVER: Options = {"start_preconditioning_step": math.inf}  # steps are the graft's own
WHOLE: Options = {"lr": 0.01, "merge_dims": False, "precondition_1d": True}
SHAPES: list[Shape] = [(6, 9), (4, 3, 5), (7,)]


def train(gradients: list[Tensor], **options: Any) -> tuple[Tensor, lather.Shampoo]:
    """A parameter that begins at zero, after a step with each of these gradients."""
    p = nn.Parameter(torch.zeros_like(gradients[0]))
    opt = lather.Shampoo([p], **WHOLE | options)
    for grad in gradients:
        p.grad = grad.clone()
        opt.step()
    return p.detach(), opt


def outer(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """A product of positive vectors."""
    x = torch.ones((), dtype=dtype)
    for d in shape:
        x = x[..., None] * torch.rand(d, dtype=dtype).add(0.05)
    return x


def close(one: Tensor, other: Tensor, rtol: float) -> None:
    assert (one - other).norm() <= rtol * other.norm() > 0


# Adam's steps, where its second moment has rank one.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("options", [{}, {"start_preconditioning_step": 9}, NEVER, {"max_preconditioner_dim": 4}], ids=str)
def test_gradients_whose_squares_have_rank_one_train_as_with_adam(shape: Shape, dtype: str, rtol: float, options: Options) -> None:
    """Signs change from step to step. As sizes do not, no filtered gradient is longer than its second moment says."""
    size = outer(shape, getattr(torch, dtype))
    gradients = [torch.randn(shape).sign() * size for _ in range(STEPS)]
    ours, theirs = (train(gradients, graft=graft, state_dtype=dtype, **options)[0] for graft in ("adafactor", "adam"))
    close(ours, theirs, rtol)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_size_of_such_gradients_may_change(shape: Shape) -> None:
    """With one decay for both moments, and no look ahead, Adam's own direction has no element beyond 1."""
    size = outer(shape)
    gradients = [torch.randn(shape).sign() * size * torch.randn(()).exp() for _ in range(STEPS)]
    options: Options = {"betas": (0.9, 0.9), "beta3": None, **NEVER}
    ours, theirs = (train(gradients, graft=graft, **options)[0] for graft in ("adafactor", "adam"))
    close(ours, theirs, 1e-5)


# How long a step is.


@pytest.mark.parametrize("shape", [*SHAPES, (16, 16)], ids=str)
def test_no_element_is_beyond_one_and_no_direction_longer_than_that(shape: Shape) -> None:
    """Gradients with heavy tails, most of whose elements are zero, and once in a while very large ones."""
    p = nn.Parameter(torch.zeros(shape))
    for start, most in ((math.inf, 1.0), (None, math.inf)):
        opt = lather.Shampoo([p], **WHOLE | {"lr": 1.0, "graft": "adafactor", "start_preconditioning_step": start})
        longest = 0.0
        for t in range(40):
            before, sparse = p.detach().clone(), torch.rand(shape) < 0.2
            p.grad = torch.randn(shape) ** 5 * sparse * (1e4 if t % 10 == 9 else 1.0)
            opt.step()
            step = p.detach() - before
            assert step.abs().max() <= most + 1e-4
            assert step.norm() <= math.sqrt(p.numel()) * (1 + 1e-4)
            longest = max(longest, step.abs().max().item())
        assert longest > 0.5


def test_a_block_that_is_cut_has_a_length_of_its_own() -> None:
    """Half the gradient is a million times as large."""
    gradient = torch.cat([torch.randn(8, 8), 1e6 * torch.randn(8, 8)])
    p, opt = train([gradient], lr=1.0, max_preconditioner_dim=8, block_multiple=1)
    assert opt.param_groups[0]["graft"] == "adafactor"  # after a step
    lengths = [half.norm() for half in p.chunk(2)]
    assert all(4 < length <= 8 + 1e-4 for length in lengths)


@pytest.mark.parametrize("options", [{}, NEVER], ids=["", "never"])
@pytest.mark.parametrize(("noise", "most"), [(0.5, 2.0), (2.0, 2.0), (1e3, 5.0)])
def test_two_scales_on_the_diagonal_have_steps_about_as_long_as_adams(noise: float, most: float, options: Options) -> None:
    """There a second moment of rank one is far too small: without the bound, steps would be a million times as long. With
    gradients that are all noise, Adam's elements are about 0.2, and where they are small ours are 1."""
    mean = torch.block_diag(torch.randn(8, 8), 1e-6 * torch.randn(8, 8))
    gradients = [mean * (1 + noise * torch.randn(16, 16)) for _ in range(40)]
    lengths = []
    for graft in ("adafactor", "adam"):
        before, after = (train(gradients[:last], graft=graft, **options)[0] for last in (39, 40))
        lengths.append((after - before).norm())
    ours, theirs = lengths
    assert theirs / most <= ours <= most * theirs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e3, 1e6])
def test_the_scale_of_gradients_does_not_matter(scale: float, shape: Shape) -> None:
    gradients = [torch.randn(shape) for _ in range(STEPS)]
    plain, scaled = (train([x * g for g in gradients], graft="adafactor", graft_eps=1e-30)[0] for x in (1.0, scale))
    close(scaled, plain, 1e-4)


@pytest.mark.parametrize(("shape", "mode"), [(shape, mode) for shape in SHAPES[:2] for mode in range(len(shape))], ids=str)
def test_rows_that_are_always_zero_stay_zero(shape: Shape, mode: int) -> None:
    """Of any mode, also if the first gradients are zero everywhere. Roots of factors that have such rows are rounded."""
    moves = torch.ones(shape)
    moves.select(mode, 1).zero_()
    for empty in (0, 2):
        gradients = [torch.randn(shape) * moves * (t >= empty) for t in range(STEPS)]
        own, preconditioned = (train(gradients, graft="adafactor", **options)[0] for options in (NEVER, {}))
        assert torch.equal(own != 0, moves.bool())
        assert (preconditioned * (1 - moves)).norm() <= 1e-4 * preconditioned.norm()


# State.


def test_there_is_no_second_moment_in_the_state() -> None:
    """But in that of vectors, which follow Adam by default."""
    params = {"weight": nn.Parameter(torch.ones(6, 4)), "bias": nn.Parameter(torch.ones(6))}
    opt = lather.Shampoo(params.items())
    for p in params.values():
        p.grad = torch.randn_like(p)
    opt.step()
    roles = {name: {key.partition(".")[0] for key in opt.state[p]} for name, p in params.items()}
    assert roles == {"weight": {"step", "m", "L0", "L1", "X0", "X1"}, "bias": {"step", "m", "v"}}
    report = lather.plan({"weight": (6, 4)})
    assert "graft moment" not in report.memory
    assert report.state_bytes == lather.plan({"weight": (6, 4)}, graft="adam").state_bytes - 4 * 24


def test_low_memory_has_eight_bytes_for_each_element() -> None:
    """Packed factors have diagonals, and are a little more than half."""
    opt = lather.low_memory(nn.Linear(512, 512, bias=False))
    assert graft_name(opt.param_groups[0]) == "adafactor"
    assert opt.plan().state_bytes / 512**2 == pytest.approx(8, rel=2e-3)


def test_low_memory_keeps_no_second_moment_where_there_is_none_to_read_off() -> None:
    """Option by option, also of a param group. But Adam itself is left alone."""
    apart: list[Options] = [
        {"preconditioner": "kl"},
        {"betas": (0.9, 1.0)},
        {"graft_beta2": 0.9},
        {},
        NEVER,
        {"preconditioner": None},
    ]
    layers = [nn.Linear(64, 64, bias=False) for _ in apart]
    opt = lather.low_memory([{"params": [layer.weight], **own} for layer, own in zip(layers, apart, strict=True)])
    grafts = [graft_name(group) for group in opt.param_groups]
    assert grafts == ["constant"] * 3 + ["adafactor", "adam", "adam"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, NEVER, {"large_dim": "diagonal", "max_preconditioner_dim": 5}], ids=str)
def test_packed_factors_have_the_same_diagonals(options: Options, shape: Shape) -> None:
    """Gradients are small whole numbers, of which products are exact."""
    gradients = [torch.randint(-3, 4, shape).float() for _ in range(STEPS)]
    full, packed = (train(gradients, graft="adafactor", factors=kind, **options)[0] for kind in ("full", "packed"))
    assert torch.equal(full, packed) and full.any()


# Options.


@pytest.mark.parametrize(
    ("options", "graft"),
    [
        ({}, "adafactor"),
        ({"precondition_1d": True, "large_dim": "diagonal"}, "adafactor"),
        ({"graft_beta2": 0.95}, "adam"),
        ({"betas": (0.95, 1.0)}, "adam"),
        (NEVER, "adam"),
        ({"preconditioner": "kl"}, "adam"),
        ({"preconditioner": "soap"}, "adam"),
        ({"preconditioner": "spectral"}, "adam"),
        ({"preconditioner": None}, "adam"),
        ({"graft": "adam"}, "adam"),
        ({"graft": None}, None),
    ],
    ids=str,
)
def test_what_auto_is(options: Options, graft: str | None) -> None:
    """Adafactor where factors have the second moment that Adam's would have."""
    p = nn.Parameter(torch.zeros(6, 4))
    opt = lather.Shampoo([p], **options)
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(6, 4))]})
    assert [graft_name(group) for group in opt.param_groups] == [graft] * 2


@pytest.mark.parametrize(
    ("name", "value", "graft"),
    [
        ("preconditioner", "kl", "adam"),
        ("betas", (0.9, 1.0), "adam"),
        ("start_preconditioning_step", math.inf, "adam"),
        ("lr", 1.0, "adafactor"),
    ],
)
def test_auto_is_settled_by_the_first_step(name: str, value: object, graft: str) -> None:
    """So options may change before it, and afterwards the state decides."""
    p = nn.Parameter(torch.ones(6, 4))
    opt = lather.Shampoo([p], lr=0.1)
    opt.state_dict()  # allocates state
    opt.param_groups[0][name] = value
    assert opt.param_groups[0]["graft"] == "auto"
    p.grad = torch.ones(6, 4)
    opt.step()
    assert opt.param_groups[0]["graft"] == graft and ("v.0" in opt.state[p]) == (graft == "adam")
    opt.param_groups[0]["betas"] = (0.9, 1.0)
    opt.step()
    assert opt.param_groups[0]["graft"] == graft and ("v.0" in opt.state[p]) == (graft == "adam")


def test_a_step_that_fails_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.ones(6, 4))
    opt = lather.Shampoo([p])
    p.grad = torch.ones(6, 4)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(TorchExecutor, "give_out", raise_memory_error)
        opt.step()
    assert opt.param_groups[0]["graft"] == "auto"
    opt.step()
    assert opt.param_groups[0]["graft"] == "adafactor"


def raise_memory_error(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("saved", [False, True])
def test_the_graft_of_a_group_that_is_added_later(saved: bool) -> None:
    """It is settled by the next step, or when state is made for the group before that."""
    first, second = (nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    opt = lather.Shampoo([first])
    first.grad = second.grad = torch.ones(6, 4)
    opt.step()
    opt.add_param_group({"params": [second]})
    if saved:
        opt.state_dict()
    opt.param_groups[1]["betas"] = (0.9, 1.0)
    opt.step()
    assert opt.param_groups[1]["graft"] == ("adafactor" if saved else "adam")


@pytest.mark.parametrize(("name", "value"), [("betas", 0.9), ("betas", None), ("preconditioner", [1]), ("graft", "autumn")])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_damaged_file_is_refused_by_name(name: str, value: object, steps: int) -> None:
    p = nn.Parameter(torch.ones(6, 4))
    saved = lather.Shampoo([p]).state_dict()
    saved["param_groups"][0][name] = value
    opt = lather.Shampoo([p])
    p.grad = torch.ones(6, 4)
    for _ in range(steps):
        opt.step()
    with pytest.raises(ValueError, match=f"^{name}=.*is not valid"):
        opt.load_state_dict(saved)


def test_a_new_optimizer_takes_over_what_a_checkpoint_has_for_auto() -> None:
    p = nn.Parameter(torch.ones(6, 4))
    started, other = lather.Shampoo([p]), lather.Shampoo([p], graft="adam")
    p.grad = torch.ones(6, 4)
    for opt in (started, other):
        opt.step()
    for options in ({}, {"betas": (0.9, 1.0)}, {"graft_beta2": 0.9}):
        new = lather.Shampoo([p], **options)
        new.load_state_dict(started.state_dict())
        assert new.param_groups[0]["graft"] == "adafactor" and "v.0" not in new.state[p]
        new = lather.Shampoo([p], **options)
        new.load_state_dict(other.state_dict())
        assert new.param_groups[0]["graft"] == "adam" and "v.0" in new.state[p]
    explicit = lather.Shampoo([p], graft="adafactor")
    with pytest.raises(ValueError, match="saved with graft='adam' but the optimizer has graft='adafactor'"):
        explicit.load_state_dict(other.state_dict())
    unsettled = lather.Shampoo([p]).state_dict()  # of an optimizer without a step
    for opt in (explicit, started):
        opt.load_state_dict(unsettled)


@pytest.mark.parametrize("graft", ["adam", "sgd", "constant", None])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_graft_that_the_user_chose_does_not_become_auto(graft: str | None, steps: int) -> None:
    p = nn.Parameter(torch.ones(6, 4))
    opt, unsettled = lather.Shampoo([p], graft=graft), lather.Shampoo([p]).state_dict()
    p.grad = torch.ones(6, 4)
    for _ in range(steps):
        opt.step()
    with pytest.raises(ValueError, match=f"saved with graft='auto' but the optimizer has graft={graft!r}"):
        opt.load_state_dict(unsettled)
    assert opt.param_groups[0]["graft"] == graft


@pytest.mark.parametrize("preconditioner", ["kl", "soap", "spectral"])
def test_it_goes_with_shampoo_only(preconditioner: str) -> None:
    message = rf"graft='adafactor' does not go with preconditioner='{preconditioner}'.* build the optimizer with graft='adam'"
    with pytest.raises(ValueError, match=message):
        lather.Shampoo([nn.Parameter(torch.zeros(6, 4))], graft="adafactor", preconditioner=preconditioner)
    with pytest.raises(ValueError, match=message):
        lather.plan({"w": (6, 4)}, graft="adafactor", preconditioner=preconditioner)


def test_nothing_is_preconditioned_and_all_follow_adam() -> None:
    gradients = [torch.randn(6, 4) for _ in range(STEPS)]
    ours, theirs = (train(gradients, preconditioner=None, graft=graft)[0] for graft in ("adafactor", "adam"))
    assert torch.equal(ours, theirs)


# Checkpoints.


def steps(opt: lather.Shampoo, params: list[nn.Parameter], first: int, last: int) -> None:
    for t in range(first, last + 1):
        generator = torch.Generator().manual_seed(t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


def test_a_new_optimizer_takes_over_adams_moments() -> None:
    """A checkpoint from before there was this graft. Training goes on with the same bits."""
    params = [nn.Parameter(torch.ones(shape)) for shape in ((6, 9), (4, 3, 5), (7,))]
    opt = lather.Shampoo(params, lr=0.01, graft="adam")
    steps(opt, params, 1, 4)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved, again = torch.load(file, weights_only=True), copy.deepcopy(params)
    other = lather.Shampoo(again, lr=0.5)
    assert other.param_groups[0]["graft"] == "auto"
    other.load_state_dict(saved)
    assert other.param_groups[0]["graft"] == "adam" and all("v.0" in other.state[p] for p in again)
    for run, own in ((opt, params), (other, again)):
        steps(run, own, 5, 8)
    assert all(map(torch.equal, again, params))


def test_an_optimizer_that_has_taken_steps_does_not() -> None:
    """Nor does one that was told which graft to have, take another."""
    params = [nn.Parameter(torch.ones(6, 9))]
    saved = {}
    for graft in ("adam", "adafactor"):
        opt = lather.Shampoo(params, graft=graft)
        steps(opt, params, 1, 2)
        saved[graft] = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=r"graft='adam' but .* graft='adafactor'.* construct it with graft='adam'"):
        opt.load_state_dict(saved["adam"])
    with pytest.raises(ValueError, match=r"graft='adafactor' but .* graft='adam'.* construct it with graft='adafactor'"):
        lather.Shampoo(params, graft="adam").load_state_dict(saved["adafactor"])
    opt.load_state_dict(saved["adafactor"])
    steps(opt, params, 3, 4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoint_code_is_told_what_to_build(tmp_path: Any) -> None:
    """It takes the options from the file, and reads no state that the optimizer does not have."""
    model, name = nn.Linear(4, 3), {"model": None}
    for graft in ("adam", "auto"):
        opt = lather.Shampoo(model.named_parameters(), graft=graft)
        state = dcp_state.get_optimizer_state_dict(model, opt)
        if graft == "adam":
            dcp.save(name | {"optimizer": state}, checkpoint_id=tmp_path)
        else:
            dcp.load(name | {"optimizer": state}, checkpoint_id=tmp_path)
            with pytest.raises(ValueError, match=r"lacks 'v\.0'.* construct it with graft='adam'"):
                dcp_state.set_optimizer_state_dict(model, opt, state)


@pytest.mark.parametrize("preconditioner", ["kl", "soap", "spectral"])
def test_low_memory_keeps_no_second_moment_with_other_methods(preconditioner: str) -> None:
    opt = lather.low_memory([nn.Parameter(torch.ones(4, 3))], preconditioner=preconditioner)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]})
    assert [group["graft"] for group in opt.param_groups] == ["constant"] * 2


def test_a_factor_that_is_infinite_starts_the_block_anew() -> None:
    """The graft leads, and its quotient would be zero."""
    p = nn.Parameter(torch.ones(4, 3))
    opt = lather.Shampoo([p], start_preconditioning_step=9)
    p.grad = torch.ones(4, 3)
    opt.step()
    opt.state[p]["L0.0"][1, 1] = math.inf
    with pytest.warns(lather.NumericalWarning, match="starts anew"):
        opt.step()
    opt.step()
    assert opt.state[p]["L0.0"].isfinite().all() and p.isfinite().all()
