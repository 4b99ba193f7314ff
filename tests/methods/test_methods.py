"""Every method in the tables, directly on stacks. A new line in a table is tested by being there."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import lather
from lather import methods
from lather.compute.refresh import Batch, Due, cut_into_batches
from lather.methods import GRAFTS, Context, Graft, Hyper, Kronecker, Method, Stack, State, Transform, filter_gradient, init_filter
from lather.options import readers
from lather.roots import POLARS
from lather.settings import check_options

DEFAULTS = {name: option.default for name, option in lather.options.OPTIONS.items()}


class OnFactors(Transform):
    """A graft that reads factors, which are all that this keeps of Shampoo's state."""

    def __init__(self, graft: Graft) -> None:
        self.graft = graft

    def init(self, stack: Stack, hyper: Hyper) -> State:
        state = methods.METHODS["shampoo"].init(stack, hyper)
        return {role: value for role, value in state.items() if role.startswith("L")}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        methods.METHODS["shampoo"].accumulate(state, grad, ctx)

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        return self.graft.apply(state, u, ctx)


METHODS: dict[str, tuple[Transform, dict[str, Any]]] = {
    **{f"graft {name}": (OnFactors(method) if method.of_factors else method, {"graft": name}) for name, method in GRAFTS.items()},
    **{name: (method, {"preconditioner": name}) for name, method in methods.METHODS.items()},
    **{f"spectral, {polar}": (methods.METHODS["spectral"], {"preconditioner": "spectral", "polar": polar}) for polar in POLARS},
}
REFRESHED = [name for name, method in methods.METHODS.items() if isinstance(method, Kronecker)]
STACKS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "matrix": ((5, 3), ("full", "full")),
    "half diagonal": ((5, 3), ("diagonal", "full")),
    "diagonal": ((5, 3), ("diagonal", "diagonal")),
    "order 3": ((2, 4, 3), ("full", "full", "full")),
    "vector": ((4,), ("full",)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
OPTIONS: dict[str, dict[str, Any]] = {
    "average": {"betas": (0.9, 0.95)},
    "sum": {"betas": (0.9, 1.0)},
    "absolute": {"betas": (0.9, 0.95), "damping": "absolute"},
    "uncorrected": {"betas": (0.9, 0.95), "bias_correction": False, "exponent": 0.3},
    "packed": {"betas": (0.9, 0.95), "factors": "packed", "root_dtype": "bfloat16"},
}
STEPS = ((1, 4, 4), (2, 4, 5), (3, 5, 6))  # of three slots, after their parameters missed some gradients


def hyper_of(name: str, options: str, dtype: torch.dtype) -> Hyper:
    """What the method reads of these options."""
    method, own = METHODS[name]
    given = {"eps": 1e-4, "state_dtype": dtype} | OPTIONS[options]
    if isinstance(method, Method):
        given = {key: value for key, value in given.items() if key in method.reads or not readers(key)}
    return check_options(DEFAULTS | given | own).hyper


def stack_of(kind: str, dtype: torch.dtype, n: int = 3, device: str = "cpu") -> Stack:
    compute = torch.promote_types(dtype, torch.float32)
    return Stack(n, *STACKS[kind], dtype=dtype, compute=compute, device=torch.device(device))


def facts(name: str, kind: str, options: str, dtype: torch.dtype) -> Any:
    """Everything that the steps of a case depend on."""
    method, hyper, (shape, modes) = METHODS[name][0], hyper_of(name, options, dtype), STACKS[kind]
    if isinstance(method, Kronecker):
        return name, shape, modes, replace(hyper, packed=hyper.packed and "full" in modes)
    if isinstance(method, OnFactors):
        return name, shape, modes, dtype, hyper.beta2, hyper.packed and "full" in modes
    kept = dtype if method.init(stack_of(kind, dtype), hyper) else hyper.compute_dtype
    return type(method), shape, method.rates(hyper) if isinstance(method, Graft) else hyper.polar, kept


def distinct() -> list[tuple[str, str, str, torch.dtype]]:
    """Methods x stacks x options x dtypes. Of cases that agree in all facts only the first is here.

    Elementwise methods and polar factors see no modes. They read few of the options, and without state no dtype.
    """
    found: dict[Any, tuple[str, str, str, torch.dtype]] = {}
    for case in product(METHODS, STACKS, OPTIONS, DTYPES):
        found.setdefault(facts(*case), case)
    return list(found.values())


CASES = distinct()
NAMES = ("method", "kind", "options", "dtype")
every_case = pytest.mark.parametrize(NAMES, CASES, ids=lambda x: str(x).removeprefix("torch."))
every_stack = pytest.mark.parametrize("kind", STACKS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Case:
    """A method with its state for some of three slots. A slot gets the same gradients in every case."""

    def __init__(self, method: str, kind: str, options: str, dtype: torch.dtype, slots: Sequence[int] = (0, 1, 2)) -> None:
        self.method, self.hyper = METHODS[method][0], hyper_of(method, options, dtype)
        self.slots = list(slots)
        self.stack = stack_of(kind, dtype, len(self.slots))
        self.state = self.method.init(self.stack, self.hyper)

    def context(self, t: int, alive: Sequence[int] = (1, 1, 1)) -> Context:
        flags = torch.tensor([alive[i] for i in self.slots], dtype=self.stack.compute)
        return Context(self.hyper, [STEPS[t][i] for i in self.slots], flags)

    def refresh(self, slots: Sequence[int], ctx: Context) -> Tensor:
        """Whether the slots are ok."""
        assert isinstance(self.method, Kronecker)
        order, failed = len(self.stack.shape), torch.zeros(len(self.slots), dtype=torch.int32)
        exponent, solver = self.method.exponent(self.hyper, order), self.method.solver(self.hyper, "cpu", order)
        due = Due(self.state, slots, ctx, failed, (), exponent, solver)
        return torch.cat([ok for jobs in cut_into_batches([due]) for _, _, ok in Batch(self.method, jobs, False)()])

    def gradient(self, t: int, alive: Sequence[int] = (1, 1, 1)) -> Tensor:
        generator = torch.Generator().manual_seed(t)
        g = torch.randn(3, *self.stack.shape, generator=generator).to(self.stack.compute)
        g = g * torch.tensor(alive).view(-1, *[1] * len(self.stack.shape))
        return g[self.slots]

    def take(self, t: int, alive: Sequence[int] = (1, 1, 1), due: Sequence[int] = ()) -> Tensor:
        """One step: statistics, the roots of the slots `due`, the direction."""
        ctx, g = self.context(t, alive), self.gradient(t, alive)
        self.method.accumulate(self.state, g, ctx)
        if isinstance(self.method, Kronecker):
            if local := [self.slots.index(i) for i in due if i in self.slots]:
                self.refresh(local, ctx)
            self.method.follow(self.state, g, ctx)
        return self.method.apply(self.state, g, ctx)

    def copy(self) -> dict[str, Tensor]:
        return {role: value.clone() for role, value in self.state.items()}


@every_case
def test_a_stack_of_three_is_three_stacks_of_one(method: str, kind: str, options: str, dtype: torch.dtype) -> None:
    whole = Case(method, kind, options, dtype)
    parts = [Case(method, kind, options, dtype, [i]) for i in range(3)]
    for t, due in enumerate([(0, 1, 2), (), (1, 2)]):
        together = whole.take(t, due=due)
        for i, part in enumerate(parts):
            assert torch.equal(part.take(t, due=due)[0], together[i])
            for role, value in part.state.items():
                assert torch.equal(value[0], whole.state[role][i]), role


@every_case
def test_slots_that_sit_out_keep_their_bits(method: str, kind: str, options: str, dtype: torch.dtype) -> None:
    case, other = Case(method, kind, options, dtype), Case(method, kind, options, dtype)
    for run in (case, other):
        run.take(0, due=(0, 1, 2))
    before, alive = case.copy(), (1, 0, 1)
    case.take(1, alive, due=(0, 2))
    other.take(1, due=(0, 2))
    for role, value in case.state.items():
        assert torch.equal(value[1], before[role][1]), role
        assert torch.equal(value[[0, 2]], other.state[role][[0, 2]]), role
    if case.state:
        assert any(not torch.equal(value[[0, 2]], before[role][[0, 2]]) for role, value in case.state.items())


@pytest.mark.parametrize(NAMES, [case for case in CASES if case[2] in ("average", "packed")], ids=str)
def test_state_has_a_slot_per_block_and_keeps_its_dtype(method: str, kind: str, options: str, dtype: torch.dtype) -> None:
    case = Case(method, kind, options, dtype)
    fresh = {role: (value.shape, value.dtype) for role, value in case.state.items()}
    for role, value in case.state.items():
        assert value.shape[0] == 3
        assert value.dtype == (torch.bfloat16 if options == "packed" and role.startswith("X") else dtype)
    for t in range(3):
        before = case.copy()
        direction = case.take(t, due=(0, 1, 2))
        assert direction.shape == (3, *case.stack.shape)
        assert direction.dtype == case.stack.compute
        assert direction.isfinite().all()
        assert {role: (value.shape, value.dtype) for role, value in case.state.items()} == fresh
        after = case.copy()
        case.method.apply(case.state, case.gradient(t), case.context(t))  # pure
        assert all(torch.equal(case.state[role], after[role]) for role in after)
        assert not before or any(not torch.equal(before[role], after[role]) for role in after)
    empty = case.method.init(stack_of(kind, dtype, device="meta"), case.hyper)
    assert {role: (value.shape, value.dtype) for role, value in empty.items()} == fresh


@pytest.mark.parametrize(("method", "kind"), [case[:2] for case in CASES if case[2:] == ("average", torch.float32)])
def test_zero_gradients_give_zero_directions(method: str, kind: str) -> None:
    case = Case(method, kind, "average", torch.float32)
    ctx, zero = case.context(0), torch.zeros(3, *case.stack.shape)
    case.method.accumulate(case.state, zero, ctx)
    if isinstance(case.method, Kronecker):
        case.refresh([0, 1, 2], ctx)
        case.method.follow(case.state, zero, ctx)
    assert torch.equal(case.method.apply(case.state, zero, ctx), zero)


@every_stack
@pytest.mark.parametrize("method", REFRESHED)
def test_a_refresh_that_fails_keeps_what_there_was(method: str, kind: str) -> None:
    """Statistics are not finite in one slot. It is reported, and the others are not affected."""
    case, other = (Case(method, kind, "average", torch.float32) for _ in range(2))
    for run in (case, other):
        run.take(0, due=(0, 1, 2))
    before = case.copy()
    for role, value in case.state.items():
        if role.startswith("L"):
            value[1] = math.nan
    ok = case.refresh([0, 1, 2], case.context(1))
    other.refresh([0, 1, 2], other.context(1))
    has_factors = any(role.startswith("L") for role in case.state)
    assert ok.tolist() == [True, not has_factors, True]
    for role, value in case.state.items():
        assert torch.equal(value[[0, 2]], other.state[role][[0, 2]]), role
        assert role.startswith("L") or torch.equal(value[1], before[role][1]), role


@every_dtype
@pytest.mark.parametrize("beta3", [None, 0.5])
@pytest.mark.parametrize("options", ["average", "uncorrected"])
def test_the_filter(options: str, beta3: float | None, dtype: torch.dtype) -> None:
    whole = Case("graft sgd", "matrix", options, dtype)
    parts = [Case("graft sgd", "matrix", options, dtype, [i]) for i in range(3)]
    for case in (whole, *parts):
        case.hyper = replace(case.hyper, beta3=case.hyper.beta1 if beta3 is None else beta3)
        case.hyper = replace(case.hyper, filter_dtype=dtype)
        case.state = init_filter(case.stack, case.hyper)
    for t, alive in enumerate([(1, 1, 1), (1, 0, 1), (1, 1, 1)]):
        before = whole.copy()
        out = filter_gradient(whole.state, whole.gradient(t, alive), whole.context(t, alive))
        assert out.dtype == whole.stack.compute
        assert whole.state["m"].dtype == dtype
        for i, part in enumerate(parts):
            mine = filter_gradient(part.state, part.gradient(t, alive), part.context(t, alive))
            assert not alive[i] or torch.equal(mine[0], out[i])
            assert torch.equal(part.state["m"][0], whole.state["m"][i])
            assert torch.equal(whole.state["m"][i], before["m"][i]) == (not alive[i])


@pytest.mark.parametrize("method", ["shampoo", "kl", "soap"])
def test_only_what_has_come_is_put_to_use(method: str) -> None:
    """A refresh has failed, and its result waits. Another one did not have to wait, and succeeded."""
    weight = torch.nn.Parameter(torch.randn(4, 6))
    opt = lather.Shampoo([weight], preconditioner=method, precondition_frequency=2, refresh_delay=1)
    for _ in range(3):
        weight.grad = torch.randn(4, 6)
        opt.step()
    (bank,), rule = opt._session.run.banks, methods.METHODS[method]
    first = rule.init(bank.stack, opt._session.settings[0].hyper)
    for i in (0, 1):
        bank.state[f"Y{i}"].copy_(first[f"Y{i}" if method == "soap" else f"X{i}"])
    before = {role: tensor.clone() for role, tensor in bank.state.items()}
    rule.publish(bank.state, [0], opt._session.settings[0].hyper)
    assert all(torch.equal(bank.state[role], tensor) for role, tensor in before.items())


@pytest.mark.parametrize("root", ["eigh", "newton", "higher_order", "minimax", "track"])
def test_a_factor_need_not_be_symmetric_to_the_last_bit(root: str) -> None:
    """Whoever multiplied it may have rounded both triangles in another way."""
    p = torch.nn.Parameter(torch.randn(24, 16))
    opt = lather.Shampoo([p], precondition_frequency=1, root=root, damping="absolute", eps=1e-6)
    for step in range(3):
        p.grad = torch.randn(24, 16)
        opt.step()
        if step == 0:
            opt.state[p]["L0.0"][3] *= 1 + 2**-22
    assert opt.health() == {}
