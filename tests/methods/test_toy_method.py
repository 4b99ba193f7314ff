"""Two toy methods: one class and one registration each. Then plans, training, ranks, checkpoints and errors know them."""

import copy
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final
from unittest import mock

import pytest
import torch
from distributed import cases, saving
from distributed.harness import Pool
from geometry import settings_of
from paper import PAPER
from torch import Tensor, nn

import lather
from lather.linalg import bias_correction, ema_, per_slot
from lather.methods import METHODS, Context, Hyper, Kronecker, Method, Stack, State, register
from lather.methods.shampoo import ROOT_OPTIONS
from lather.options import OPTIONS, markdown
from lather.planning.plan import Spec, make_plan
from lather.runtime.unit_plan import plan_units

Options = dict[str, Any]


@final
class MeanSize(Method):
    """``a <- beta2 a + (1 - beta2) |g|``, ``P = u / (a / bc2 + eps)``."""

    name = "mean_size"
    text = "a toy that divides by the mean size of each element"
    aliases = ("meansize",)
    roles = {"a": "mean sizes"}  # noqa: RUF012
    sums = "a"
    default_eps = {"relative": 1e-3, "absolute": 1e-3}  # noqa: RUF012
    reads = frozenset({"damping"})

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {"a": stack.zeros(*stack.shape)}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        ema_(state["a"], grad.abs(), ctx.alive * (1 - ctx.hyper.beta2))

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        a = state["a"].to(u.dtype)
        a = a / per_slot(bias_correction(ctx.steps, ctx.hyper.beta2, ctx.alive), a)
        eps: float | Tensor = ctx.hyper.eps
        if ctx.hyper.relative_damping:
            eps = ctx.hyper.eps * per_slot(a.flatten(1).amax(1), a)
        return u / (a + eps)

    def check(self, hyper: Hyper) -> None:
        if hyper.beta2 == 1:
            raise ValueError("betas[1]=1 does not go with preconditioner='mean_size', which needs an average; use less than 1")

    def step_flops(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper) -> float:
        return 3.0 * math.prod(shape)


@final
class Whitened(Kronecker):
    """Shampoo with half more than the paper's exponent. That is ``exponent_multiplier=1.5``, with which it can be compared."""

    name = "whitened"
    text = "a toy with other exponents"
    reads = ROOT_OPTIONS - {"exponent", "exponent_multiplier"}

    def factor_input(self, state: State, grad: Tensor, mode: int) -> tuple[Tensor, float]:
        return grad, 1.0

    def exponent(self, hyper: Hyper, order: int) -> float:
        return 1.5 / (2 * order)


def with_toys(f: Callable[..., Any], *args: Any) -> Any:
    register(MeanSize())
    register(Whitened())
    return f(*args)


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with mock.patch.dict(METHODS):
        with_toys(lambda: None)
        yield


SHAPES = {"weight": (6, 4), "conv": (5, 3, 2), "bias": (6,)}
TOY: Options = {"preconditioner": "mean_size", "lr": 0.05, "graft": None, "betas": (0.9, 0.95), "beta3": None}
BASE: Options = {"lr": 0.05, "eps": 1e-3, "precondition_frequency": 3, "max_preconditioner_dim": 4, "refresh_warmup": 0.0}
BASE |= {"graft": "adam"}  # as by default with a method that does not say that its factors have second moments
VARIANTS: dict[str, Options] = {
    "plain": {},
    "paper": {key: value for key, value in PAPER.items() if key != "eps"},
    "staggered": {"refresh": "staggered"},
    "delayed": {"refresh_delay": 1},
    "warmed up": {"refresh_warmup": 0.5},
    "ungrafted": {"graft": None, "betas": (0.0, 1.0)},
    "newton": {"root": "newton"},
    "track": {"root": "track", "factors": "packed"},
    "diagonal": {"large_dim": "diagonal", "precondition_1d": True, "root_dtype": "bfloat16"},
}


def build(**options: Any) -> tuple[lather.Shampoo, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]
    return lather.Shampoo(list(zip(SHAPES, params, strict=True)), **options), params


def gradient(t: int, i: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(100 * t + i))


def advance(opt: lather.Shampoo, params: Sequence[nn.Parameter], first: int, last: int) -> None:
    for t in range(first, last + 1):
        for i, p in enumerate(params):
            p.grad = gradient(t, i, p.shape)
        opt.step()


def end(**options: Any) -> list[Tensor]:
    opt, params = build(**options)
    advance(opt, params, 1, 10)
    return [p.detach() for p in params]


# Plans and reports.


def test_plan() -> None:
    report = lather.plan(SHAPES, **TOY)
    assert [(row.name, row.method) for row in report.params] == [("weight", "mean_size"), ("conv", "mean_size"), ("bias", "sgd")]
    assert [(row.method, row.shape, row.solvers) for row in report.banks[:2]] == [
        ("mean_size", (6, 4), ()),
        ("mean_size", (5, 6), ()),
    ]
    assert report.memory == {"mean sizes": 4 * 54, "filtered gradient": 4 * 60, "total": 4 * 114}
    assert (report.step_flops, report.refresh_flops) == (3 * 54, 0)
    assert "mean_size" in str(report) and "mean sizes" in str(report)
    opt, _ = build(**TOY)
    assert opt.plan().to_dict() == report.to_dict()
    assert lather.plan(SHAPES, **TOY, ranks=2).teams[0].trainers == 2


def test_plan_of_a_refreshed_method() -> None:
    given = BASE | {"refresh": "staggered"}
    ours = lather.plan(SHAPES, preconditioner="whitened", **given)
    theirs = lather.plan(SHAPES, exponent_multiplier=1.5, **given)
    assert ours.memory == theirs.memory and ours.refresh_flops == theirs.refresh_flops > 0
    assert [row.method for row in ours.params] == ["whitened", "whitened", "adam"]
    assert {row.solvers for row in ours.banks} == {("eigh",) * 2, ("eigh",) * 3, ()}
    opt, _ = build(preconditioner="whitened", **given)
    assert opt.plan().to_dict() == ours.to_dict()


def test_kernels_leave_alone_what_they_do_not_know() -> None:
    """A method says how much of it kernels cover, and by default that is nothing."""
    for method, covered in (("shampoo", 2), ("whitened", 1), ("mean_size", 1)):
        specs = [Spec(name, shape, 0, "cuda:0") for name, shape in SHAPES.items() if name != "conv"]
        (unit,) = plan_units(make_plan(specs, [settings_of(preconditioner=method)]), [0])
        assert sum(map(len, unit.by_kernels)) == covered  # the bias is Adam's in any case
        assert len(unit.by_torch) == 2 - covered


# Training.


@pytest.mark.parametrize("damping", ["absolute", "relative"])
def test_training(damping: str) -> None:
    opt, params = build(**TOY, damping=damping)
    start = [p.detach().clone() for p in params]
    advance(opt, params, 1, 5)
    assert opt.param_groups[0]["eps"] == 1e-3
    for i, (p, w) in enumerate(zip(params, start, strict=True)):
        m, a = torch.zeros_like(w), torch.zeros_like(w)
        for t in range(1, 6):
            g = gradient(t, i, w.shape)
            m, a = 0.9 * m + 0.1 * g, 0.95 * a + 0.05 * g.abs()
            u, size = m / (1 - 0.9**t), a / (1 - 0.95**t)
            eps = 1e-3 * (size.max() if damping == "relative" else 1.0)
            w = w - 0.05 * (u / (size + eps) if w.dim() > 1 else u)
        torch.testing.assert_close(p.detach(), w, rtol=1e-5, atol=1e-5)
        if w.dim() == 1:
            assert opt.state[p].keys() == {"step", "m.0"}
        else:
            assert opt.state[p].keys() == {"step", "m.0", "a.0"}
            torch.testing.assert_close(opt.state[p]["a.0"].view(w.shape), a)
    assert not opt.health()


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_with_refreshes(variant: str) -> None:
    """Bit for bit what Shampoo does with the same exponent."""
    given = BASE | VARIANTS[variant]
    ours, theirs = end(preconditioner="whitened", **given), end(exponent_multiplier=1.5, **given)
    plain = end(**given)
    assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(ours[0], plain[0])


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    opt, params = build(**TOY)
    advance(opt, params, 1, 2)
    before = {key: value.clone() for key, value in opt.state[params[0]].items()}
    weight = params[0].detach().clone()
    params[0].grad = torch.full((6, 4), math.nan)
    with pytest.warns(lather.NumericalWarning, match="weight"):
        opt.step()
    assert torch.equal(params[0], weight) and torch.equal(opt.state[params[0]]["a.0"], before["a.0"])
    assert opt.health() == {"weight": {"skipped": 1, "failed": 0, "restarted": 0}}


# Checkpoints.


@pytest.mark.parametrize(
    "options",
    [TOY, TOY | {"momentum": 0.9}, BASE | {"preconditioner": "whitened", "root": "track", "refresh_delay": 1}],
    ids=["", "momentum", "refreshed"],
)
def test_checkpoint(options: Options) -> None:
    straight = end(**options)
    opt, params = build(**options)
    advance(opt, params, 1, 4)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other, again = build(**options | {"lr": 1.0})
    for p, q in zip(params, again, strict=True):
        q.data.copy_(p.detach())
    other.load_state_dict(torch.load(file, weights_only=True))
    twin = copy.deepcopy((opt, params))
    for run, own in ((opt, params), (other, again), twin):
        advance(run, own, 5, 10)
        assert all(map(torch.equal, own, straight))


def test_a_checkpoint_of_another_method_is_refused() -> None:
    opt, _ = build(**TOY)
    with pytest.raises(ValueError, match=r"preconditioner='mean_size'.*preconditioner='shampoo'"):
        build(lr=0.05, graft=None)[0].load_state_dict(opt.state_dict())


# Ranks.


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


RANKS = {
    "mean_size": cases.Case({"preconditioner": "mean_size", "momentum": 0.9, "weight_decay": 0.1}, gaps=True, spoilt=True),
    "whitened": cases.Case({"preconditioner": "whitened", "refresh": "staggered", "eps": 1e-3}, gaps=True),
}


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_are_one(name: str, layout: str, pool: Pool) -> None:
    case = RANKS[name]
    stored = pool.run(with_toys, cases.train, layout, case)
    cases.assert_same(cases.assemble(stored, cases.shapes_of(case.model)), cases.alone(case))
    mine, yours = pool.run(with_toys, cases.keys_after_a_step, layout, case)
    blocks = [{key for key in keys if "/a." in key or "/X0." in key} for keys in (mine, yours)]
    assert all(blocks) and blocks[0].isdisjoint(blocks[1])


@pytest.mark.parametrize("name", RANKS)
def test_a_checkpoint_of_two_ranks_goes_on_with_one(name: str, pool: Pool, tmp_path: Path) -> None:
    case = cases.replaced(RANKS[name], gaps=False, spoilt=False)
    pool.run(with_toys, saving.consolidate, "ddp2", case, tmp_path / "state.pt")
    stored = saving.resume_file("one", case, tmp_path / "state.pt")
    cases.assert_same(cases.assemble([stored], cases.shapes_of(case.model)), cases.alone(case))


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preconditioner": "mean_sizes"}, r"preconditioner='mean_sizes'.*'mean_size', 'whitened', None; did you mean 'mean_size'"),
        ({"preconditioner": "meansize"}, "preconditioner='meansize'.*did you mean 'mean_size'"),
        ({"eps": -1.0}, "eps=-1.0 is not valid"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1 does not go with preconditioner='mean_size'"),
        ({"root": "newton"}, "root='newton' has no effect with preconditioner='mean_size'; it is read by .*'kl', 'whitened'"),
        ({"refresh": "staggered"}, "refresh='staggered' has no effect with preconditioner='mean_size'"),
        ({"polar": "svd"}, "polar='svd' has no effect with preconditioner='mean_size'; it is read by 'spectral'"),
        ({"preconditioner": "whitened", "exponent": 0.25}, "exponent=0.25 has no effect with preconditioner='whitened'"),
        (
            {"preconditioner": "whitened", "graft": "adafactor"},
            "graft='adafactor'.* does not go with .*'whitened'.* build the optimizer with graft='adam'",
        ),
        ({"preconditioner": "whitened", "root": "nwton"}, "did you mean 'newton'"),
        ({"preconditioner": "spectral", "damping": "absolute"}, "damping='absolute' has no effect .*'kl', 'mean_size', 'whitened'"),
    ],
    ids=str,
)
def test_bad_options(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**TOY | options)
    with pytest.raises(ValueError, match=message):
        lather.plan(SHAPES, **TOY | options)


def test_a_method_cannot_be_changed_in_training() -> None:
    opt, params = build(**TOY)
    advance(opt, params, 1, 1)
    opt.param_groups[0]["preconditioner"] = "whitened"
    with pytest.raises(ValueError, match="preconditioner of param group 0 was changed from 'mean_size' to 'whitened'"):
        advance(opt, params, 2, 2)


def test_groups_with_methods_of_their_own() -> None:
    params = [nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    methods = ("mean_size", "whitened", "shampoo")
    opt = lather.Shampoo([{"params": [p], "preconditioner": m} for p, m in zip(params, methods, strict=True)], eps=1e-3)
    advance(opt, params, 1, 11)
    assert [row.method for row in opt.plan().params] == list(methods)
    assert [sorted({key[0] for key in opt.state[p]} - {"s"}) for p in params] == [list("amv"), list("LXmv"), list("LXm")]
    assert [group["graft"] for group in opt.param_groups] == ["adam", "adam", "adafactor"]


def test_the_table_of_options_has_it() -> None:
    row = next(line for line in markdown().splitlines() if line.startswith("| `preconditioner`"))
    assert f'`"mean_size"`: {MeanSize.text}' in row
    assert '0.001 for `"mean_size"`' in OPTIONS["eps"].text
    assert '`"mean_size"`' in next(line for line in markdown().splitlines() if line.startswith("| `damping`"))


def test_a_name_belongs_to_one_method() -> None:
    @final
    class Other(Kronecker):
        name = "mean_size"
        factor_input = Whitened.factor_input
        exponent = Whitened.exponent

    with pytest.raises(ValueError, match=r"Other.*'mean_size'.*MeanSize.*another name"):
        register(Other())
    register(MeanSize())  # again


def test_without_registration_it_is_not_there() -> None:
    del METHODS["mean_size"]
    with pytest.raises(ValueError, match="preconditioner='mean_size' is not valid"):
        settings_of(**TOY)
