"""Every method in the tables, directly on stacks. A new line in a table is tested by being there."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lather
from lather.methods import (
    GRAFTS,
    PRECONDITIONERS,
    Context,
    Due,
    Preconditioner,
    Stack,
    Transform,
    filter_gradient,
    init_filter,
)
from lather.options import NOT_OF_BASES, OF_ROOTS
from lather.roots import POLARS

METHODS: dict[str, tuple[Transform, dict[str, Any]]] = {
    **{f"graft {name}": (method, {"graft": name}) for name, method in GRAFTS.items()},
    **{name: (method, {"preconditioner": name}) for name, method in PRECONDITIONERS.items()},
    **{
        f"spectral, {polar}": (PRECONDITIONERS["spectral"], {"preconditioner": "spectral", "polar": polar})
        for polar in POLARS
    },
}
REFRESHED = [name for name, method in PRECONDITIONERS.items() if isinstance(method, Preconditioner)]
STATELESS = [name for name in METHODS if name in ("graft sgd", "graft None") or name.startswith("spectral")]
STACKS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "matrix": ((5, 3), ("full", "full")),
    "half diagonal": ((5, 3), ("diagonal", "full")),
    "diagonal": ((5, 3), ("diagonal", "diagonal")),
    "order 3": ((2, 4, 3), ("full", "full", "full")),
    "vector": ((4,), ("full",)),
}
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
OPTIONS: dict[str, dict[str, Any]] = {
    "average": {"betas": (0.9, 0.95)},
    "sum": {"betas": (0.9, 1.0)},
    "relative": {"betas": (0.9, 0.95), "damping": "relative"},
    "uncorrected": {"betas": (0.9, 0.95), "bias_correction": False, "exponent": 0.3},
    "packed": {"betas": (0.9, 0.95), "factors": "packed", "root_dtype": "bfloat16"},
}

every_method = pytest.mark.parametrize("method", METHODS)
every_stack = pytest.mark.parametrize("kind", STACKS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_option = pytest.mark.parametrize("options", OPTIONS)

STEPS = ((1, 4, 4), (2, 4, 5), (3, 5, 6))  # of three slots, after their parameters missed some gradients


def refresh(method: Preconditioner, due: Due) -> Tensor:
    """All of it at once; whether the slots are ok."""
    return torch.cat([ok for batch in method.batches([due]) for _, _, ok in batch()])


class Case:
    """A method with its state for some slots of three, driven through the same gradients whichever they are."""

    def __init__(
        self, method: str, kind: str, options: str, dtype: torch.dtype, slots: Sequence[int] = (0, 1, 2)
    ) -> None:
        self.method, own = METHODS[method]
        settings = {"eps": 1e-4, "state_dtype": dtype} | OPTIONS[options] | own
        if own.get("preconditioner") == "spectral":
            settings = {name: value for name, value in settings.items() if name not in OF_ROOTS}
        if own.get("preconditioner") == "kl":
            settings.pop("exponent", None)
        if own.get("preconditioner") == "soap":
            settings = {name: value for name, value in settings.items() if name not in NOT_OF_BASES}
        self.group = lather.Shampoo([torch.nn.Parameter(torch.zeros(1))], **settings).param_groups[0]
        self.slots = list(slots)
        shape, modes = STACKS[kind]
        self.stack = Stack(
            n=len(self.slots),
            shape=shape,
            modes=modes,
            dtype=dtype,
            compute=torch.promote_types(dtype, torch.float32),
            device=torch.device("cpu"),
        )
        self.state = self.method.init(self.stack, self.group)

    def context(self, t: int, alive: Sequence[int] = (1, 1, 1)) -> Context:
        flags = torch.tensor([alive[i] for i in self.slots], dtype=self.stack.compute)
        return Context(group=self.group, steps=[STEPS[t][i] for i in self.slots], alive=flags)

    def gradient(self, t: int, alive: Sequence[int] = (1, 1, 1)) -> Tensor:
        generator = torch.Generator().manual_seed(t)
        g = torch.randn(3, *self.stack.shape, generator=generator).to(self.stack.compute)
        g = g * torch.tensor(alive).view(-1, *[1] * len(self.stack.shape))
        return g[self.slots]

    def take(self, t: int, alive: Sequence[int] = (1, 1, 1), due: Sequence[int] = ()) -> Tensor:
        """One step: statistics, the roots of the slots `due`, the direction."""
        ctx, g = self.context(t, alive), self.gradient(t, alive)
        self.method.accumulate(self.state, g, ctx)
        if isinstance(self.method, Preconditioner) and (local := [self.slots.index(i) for i in due if i in self.slots]):
            refresh(self.method, Due(self.state, local, ctx))
        if isinstance(self.method, Preconditioner):
            self.method.follow(self.state, g, ctx)
        return self.method.apply(self.state, g, ctx)

    def copy(self) -> dict[str, Tensor]:
        return {role: value.clone() for role, value in self.state.items()}


@every_dtype
@every_option
@every_stack
@every_method
def test_a_stack_of_three_is_three_stacks_of_one(method: str, kind: str, options: str, dtype: torch.dtype) -> None:
    whole = Case(method, kind, options, dtype)
    parts = [Case(method, kind, options, dtype, [i]) for i in range(3)]
    for t, due in enumerate([(0, 1, 2), (), (1, 2)]):
        together = whole.take(t, due=due)
        for i, part in enumerate(parts):
            assert torch.equal(part.take(t, due=due)[0], together[i])
            for role, value in part.state.items():
                assert torch.equal(value[0], whole.state[role][i]), role


@every_dtype
@every_option
@every_stack
@every_method
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
    if method not in STATELESS:
        assert any(not torch.equal(value[[0, 2]], before[role][[0, 2]]) for role, value in case.state.items())


@every_dtype
@every_stack
@every_method
@pytest.mark.parametrize("options", ["average", "packed"])
def test_state_has_a_slot_per_block_and_keeps_its_dtype(
    options: str, method: str, kind: str, dtype: torch.dtype
) -> None:
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
    empty = case.method.init(Stack(3, *STACKS[kind], dtype, case.stack.compute, torch.device("meta")), case.group)
    assert {role: (value.shape, value.dtype) for role, value in empty.items()} == fresh


@every_stack
@every_method
def test_zero_gradients_give_zero_directions(method: str, kind: str) -> None:
    case = Case(method, kind, "average", torch.float32)
    ctx, zero = case.context(0), torch.zeros(3, *case.stack.shape)
    case.method.accumulate(case.state, zero, ctx)
    if isinstance(case.method, Preconditioner):
        refresh(case.method, Due(case.state, [0, 1, 2], ctx))
        case.method.follow(case.state, zero, ctx)
    assert torch.equal(case.method.apply(case.state, zero, ctx), zero)


@every_stack
@pytest.mark.parametrize("method", REFRESHED)
def test_a_refresh_that_fails_keeps_what_there_was(method: str, kind: str) -> None:
    """Statistics that are not finite: the slot says so, and the others do not notice."""
    case, other = (Case(method, kind, "average", torch.float32) for _ in range(2))
    for run in (case, other):
        run.take(0, due=(0, 1, 2))
    before = case.copy()
    for role, value in case.state.items():
        if role.startswith("L"):
            value[1] = math.nan
    ok = refresh(case.method, Due(case.state, [0, 1, 2], case.context(1)))
    refresh(other.method, Due(other.state, [0, 1, 2], other.context(1)))
    has_factors = any(role.startswith("L") for role in case.state)
    assert ok.tolist() == [True, not has_factors, True]
    for role, value in case.state.items():
        assert torch.equal(value[[0, 2]], other.state[role][[0, 2]]), role
        assert role.startswith("L") or torch.equal(value[1], before[role][1]), role


@every_dtype
@pytest.mark.parametrize("beta3", [None, 0.5])
@every_option
def test_the_filter(options: str, beta3: float | None, dtype: torch.dtype) -> None:
    whole = Case("graft sgd", "matrix", options, dtype)
    parts = [Case("graft sgd", "matrix", options, dtype, [i]) for i in range(3)]
    for case in (whole, *parts):
        case.group["beta3"] = beta3
        case.state = init_filter(case.stack)
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
    """As if a refresh had failed, whose result then waits, and another one, that did not have to wait, had gone well."""
    weight = torch.nn.Parameter(torch.randn(4, 6))
    opt = lather.Shampoo([weight], preconditioner=method, precondition_frequency=2, refresh_delay=1)
    for _ in range(3):
        weight.grad = torch.randn(4, 6)
        opt.step()
    (bank,), rule = opt._banks, PRECONDITIONERS[method]
    assert isinstance(rule, Preconditioner)
    first = rule.init(bank.stack, opt.param_groups[0])
    for i in (0, 1):
        bank.state[f"Y{i}"].copy_(first[f"Y{i}" if method == "soap" else f"X{i}"])
    before = {role: tensor.clone() for role, tensor in bank.state.items()}
    rule.publish(bank.state, [0])
    assert all(torch.equal(bank.state[role], tensor) for role, tensor in before.items())
