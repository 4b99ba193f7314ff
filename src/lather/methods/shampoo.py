"""Shampoo: one factor and one inverse root per mode; and the base of all methods that keep Kronecker factors."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from .. import roots
from ..linalg import (
    all_finite,
    bias_correction,
    ema_,
    first_of,
    gram,
    gram_diagonal,
    is_packed,
    largest_eigenvalue,
    mode_product,
    norms,
    pack,
    per_slot,
    place_of_roots,
    positions,
    power,
    probe,
    relative_ridge,
    rotate,
    side_of,
    unpack,
)
from ..roots import directions
from .base import FULL, Context, Hyper, Method, Stack, State

Index = slice | Tensor  # some slots of a stack
AT_A_TIME = 1 << 23  # elements of roots that a GPU copies at a time: 32 MiB in float32, about what its cache holds
ROOT_OPTIONS = frozenset({"root", "exponent", "exponent_multiplier", "damping", "root_device", "root_dtype", "factors"})
ROOT_OPTIONS |= {"refresh", "refresh_warmup", "refresh_delay"}


class Kronecker(Method):
    """``L_i <- beta2 L_i + (1 - beta2) G_i G_i^T``, ``X_i = (L_i / bc2 + eps I)^(-e)``, ``P = u x_1 X_1 ... x_k X_k``.

    ``u`` is the filtered gradient, ``bc2`` the bias correction ``1 - beta2^t``.

    With ``damping="relative"``, ``eps`` is multiplied by ``||(L_i / bc2)^2||_F^(1/2)``. A ``"diagonal"`` mode keeps the diagonal
    of its factor only.

    State: factors ``L0, L1, ...``; roots ``X0, X1, ...`` in ``root_dtype``, which are not positive until the first refresh; and
    what the solver keeps for a warm start, such as a basis ``Q0``. Factors and roots are ``[n, d, d]``, or ``[n, d]`` if diagonal.
    A factor that is zero says nothing, and its root ``eps^(-e)`` would be far too large for the gradients to come: its block
    keeps the roots that it has, or none. The first element of such a root is -1. With ``factors="packed"`` full factors and roots
    are lower triangles ``[n, 1, d (d + 1) / 2]``. With ``refresh_delay``, roots wait as ``Y0, Y1, ...`` until they are put to use.
    """

    # Facts; base.Method says what each means.
    roles = {"L": "factors", "X": "roots", "Y": "roots to come", "Q": "basis"}  # noqa: RUF012
    sums = "L"
    reads = ROOT_OPTIONS
    refreshes = True
    waits = True

    @abstractmethod
    def factor_input(self, state: State, grad: Tensor, mode: int) -> tuple[Tensor, float]:
        """The gradient whose products a mode's factor takes in, and what the products are multiplied by."""

    @abstractmethod
    def exponent(self, hyper: Hyper, order: int) -> float:
        """The exponent ``e`` of roots ``(L + eps I)^(-e)`` of blocks of this order."""

    def products(self, modes: Sequence[str]) -> int:
        """How many times a step multiplies a gradient by the matrix of each mode, the factor's own product not counted."""
        return 1

    def solver(self, hyper: Hyper, device: torch.device | str, order: int) -> roots.RootSolver:
        """What refreshes the factors of blocks of this order, for parameters on this device."""
        return roots.resolve(hyper.root, place_of_roots(device, hyper.root_device), self.exponent(hyper, order))

    # State, and every step.

    def init(self, stack: Stack, hyper: Hyper) -> State:
        state: State = {}
        for i, (d, mode) in enumerate(zip(stack.shape, stack.modes, strict=True)):
            full = mode == FULL
            state[f"L{i}"] = first_factor(stack, d, hyper) if full else stack.zeros(d)
            state[f"X{i}"] = torch.zeros_like(state[f"L{i}"], dtype=hyper.root_dtype)
            if full:
                warm = self.solver(hyper, stack.device, len(stack.shape)).init(stack.n, d, stack.dtype, stack.device)
                state |= {f"{role}{i}": value for role, value in warm.items()}
        if hyper.refresh_delay:
            state |= {f"Y{i}": torch.zeros_like(state[f"X{i}"]) for i in range(len(stack.shape))}
        return state

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> Tensor | None:
        new: dict[str, Tensor] = {}
        for i in modes_of(state):
            x, scale = self.factor_input(state, grad, i)
            found = gram(x, i, scale) if is_full(state, i) else gram_diagonal(x, i, scale)
            new[f"L{i}"] = pack(found) if is_packed(state[f"L{i}"]) else found
        takes, beta2 = None, ctx.hyper.beta2
        weight = ctx.alive * (1 - beta2)
        if self.judges:
            takes = torch.stack([all_finite(value) for value in new.values()]).all(0)
            new, weight = {k: torch.where(per_slot(takes, value), value, 0) for k, value in new.items()}, weight * takes
        for role, value in new.items():
            if beta2 == 1:
                state[role].add_(value)  # slots that are not alive have a zero gradient
            else:
                ema_(state[role], value, weight)
        return takes

    def ready(self, state: State) -> Tensor:
        return first_of(state["X0"]) > 0  # positive definite once it is computed, so its first element tells

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        order = u.dim() - 1
        if self.exponent(ctx.hyper, order) == 0:
            return u if out is None else out.copy_(u)
        if ctx.sizes is not None and directions.fits(u, found := [state[f"X{i}"] for i in range(order)]):
            return directions.precondition(u, found, torch.empty_like(u) if out is None else out, ctx.sizes)
        if u.is_cuda and (most := at_a_time(state, u)) < len(u):
            out = torch.empty_like(u) if out is None else out
            for some in (slice(first, first + most) for first in range(0, len(u), most)):
                self.apply({role: x[some] for role, x in state.items()}, u[some], ctx, out[some])
            return out
        if order > 2 and all(state[f"L{i}"].dim() == 3 for i in range(order)):
            for i in reversed(range(order)):  # each brings its mode to the front, so nothing has to be transposed
                u = rotate(u, unpack(state[f"X{i}"], u.dtype), None if i else out)
            return u
        for i in range(order):
            u = mode_product(u, unpack(state[f"X{i}"], u.dtype), i, out if i == order - 1 else None)
        return u

    # A refresh. What is due is collected, and solved by size, in compute/refresh.py.

    def solve(self, solver: roots.RootSolver, a: Tensor, e: float, hyper: Hyper, warm: State, exact: bool) -> tuple[State, Tensor]:
        """What a refresh makes of bias-corrected factors ``a [n, d, d]``, by role; and ``[n]``, whether it succeeded.

        ``warm`` is what the solver kept, which it replaces. ``exact`` asks for the slowest and surest way.
        """
        ridge = roots.Relative(hyper.eps) if hyper.relative_damping else hyper.eps
        root = roots.rescue(a, e, ridge, warm) if exact else roots.solve(solver, a, e, ridge, warm)
        first = root.value[:, 0, 0]
        first.copy_(torch.where(a.diagonal(dim1=1, dim2=2).any(1), first, -1.0))  # a zero factor says nothing, and has no root
        return {"X": root.value, **warm}, root.ok

    def put(self, state: State, index: Index, new: Mapping[int, Tensor], ok: Tensor, hyper: Hyper) -> None:
        """Put to use what a refresh made for some slots, by mode, where it is ok. A block takes roots of all its modes or none."""
        for root in new.values():
            ok = ok & (first_of(root) > 0)
        for i, root in new.items():
            write(state[f"X{i}"], index, root, ok)

    def publish(self, state: State, slots: Sequence[int], hyper: Hyper) -> None:
        if modes := modes_of(state):
            first = state[f"Y{modes[0]}"]
            index = index_of(slots, first.device)
            come = self.has_come(first[index])  # nothing waits there if the delay was lengthened in between
            self.put(state, index, {i: state[f"Y{i}"][index] for i in modes}, come, hyper)

    def has_come(self, waiting: Tensor) -> Tensor:
        """``[n]``: whether what waits to be put to use is there."""
        return first_of(waiting) > 0

    def fit(self, a: Tensor, made: Tensor, e: float, hyper: Hyper) -> tuple[Tensor, Tensor]:
        """How well roots ``made`` of earlier factors fit bias-corrected factors ``a``, for metrics: two estimates ``[n]``.

        The first is the condition number of ``A + eps I``, whose smallest eigenvalue is told by the root. The second is
        ``||X^(1/2e) (A + eps I) X^(1/2e) - I||_F / sqrt(d)``, which is NaN if ``1 / e`` is not a whole number. Both are found
        by multiplying vectors.
        """
        dtype = torch.promote_types(torch.promote_types(a.dtype, made.dtype), torch.float32)
        a, x = a.to(dtype), made.to(dtype)
        ridge = ridge_of(a, hyper)
        if a.dim() == 2:
            damped = a + per_slot(ridge, a)
            return damped.amax(1) / damped.amin(1), (power(damped, e) * x - 1).square().mean(1).sqrt()
        none = torch.full_like(a[:, 0, 0], torch.nan)
        if e == 0:
            return none, none
        condition = (largest_eigenvalue(a) + ridge) * largest_eigenvalue(x) ** (1 / e)
        times = round(1 / e)
        if times != 1 / e:
            return condition, none
        z = y = probe(a)
        for i in range(times + 1):
            y = a @ y + per_slot(ridge, y) * y if i == times // 2 else x @ y
        return condition, norms(y - z) / math.sqrt(a.shape[-1])

    # Facts.

    def check(self, hyper: Hyper) -> None:
        if hyper.root == "auto":
            return
        given = dict(hyper.exponent) if isinstance(hyper.exponent, tuple) else {}
        for order in given or (1, 2, 3):
            if e := self.exponent(hyper, order):
                self.solver(hyper, "cpu", order).check(e)

    def step_flops(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper) -> float:
        each = 2.0 * (1 + self.products(modes)) * math.prod(shape)
        return sum(each * (d if mode == FULL else 1) for d, mode in zip(shape, modes, strict=True))

    def refresh_flops(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper, device: str) -> float:
        solver = self.solver(hyper, device, len(shape))
        return sum(solver.flops(d) if mode == FULL else float(d) for d, mode in zip(shape, modes, strict=True))

    def solvers(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper, device: str) -> tuple[str, ...]:
        name = roots.spell(self.solver(hyper, device, len(shape)))
        return tuple(name if mode == FULL else "diagonal" for mode in modes)


@final
class Shampoo(Kronecker):
    """Every factor sees the gradient itself."""

    name = "shampoo"
    text = "Shampoo"
    squares = True
    kernels = "factors"

    def factor_input(self, state: State, grad: Tensor, mode: int) -> tuple[Tensor, float]:
        return grad, 1.0

    def exponent(self, hyper: Hyper, order: int) -> float:
        given = hyper.exponent
        if isinstance(given, tuple):
            given = dict(given).get(order)
        return float(hyper.exponent_multiplier / (2 * order) if given is None else given)


def first_factor(stack: Stack, d: int, hyper: Hyper) -> Tensor:
    """The zero factor of a full mode."""
    return stack.zeros(1, d * (d + 1) // 2) if hyper.packed else stack.zeros(d, d)


def factor_correction(ctx: Context) -> float | Tensor:
    """``bc2 = 1 - beta2^t``; 1 for the sum and without bias correction."""
    if ctx.bc2 is not None:
        return ctx.bc2
    if ctx.hyper.beta2 == 1 or not ctx.hyper.bias_correction:
        return 1.0
    return bias_correction(ctx.steps, ctx.hyper.beta2, ctx.alive)


def ridge_of(a: Tensor, hyper: Hyper) -> float | Tensor:
    """``eps``; with relative damping, that times each factor's size: ``[n]``."""
    return relative_ridge(a, hyper.eps) if hyper.relative_damping else hyper.eps


# The state of some slots.


def index_of(slots: Sequence[int], device: torch.device) -> Index:
    """Slots as a slice if they follow each other, which copies nothing; else as positions on the device."""
    if slots[-1] - slots[0] + 1 == len(slots):
        return slice(slots[0], slots[-1] + 1)
    return positions(tuple(slots), device)


def modes_of(state: State) -> list[int]:
    """The modes that have factors."""
    return [int(role[1:]) for role in state if role[0] == "L"]


def refreshed(state: State, mode: int) -> Tensor:
    """What a refresh makes of a mode's factor: a root or, where there are none, a basis."""
    return state[f"X{mode}"] if f"X{mode}" in state else state[f"Q{mode}"]


def is_full(state: State, mode: int) -> bool:
    """Whether a mode has a factor with all its elements, packed or not, and not the diagonal alone."""
    return state[f"L{mode}"].dim() == 3


def elements_of(state: State, mode: int) -> int:
    """Elements of the factor of one slot, when it is not packed."""
    return side_of(state[f"L{mode}"]) ** (2 if is_full(state, mode) else 1)


def factors_of(state: State, mode: int, index: Index, dtype: torch.dtype | None = None) -> Tensor:
    """The factors of some slots: ``[n, d, d]``, or ``[n, d]`` if diagonal."""
    return unpack(state[f"L{mode}"][index], dtype)


def at_a_time(state: State, u: Tensor) -> int:
    """How many slots to multiply by their roots at a time. Roots that are packed or rounded are copied for it, and the copies
    stay in the cache."""
    copied = [x for role, x in state.items() if role[0] == "X" and x.dim() == 3 and (is_packed(x) or x.dtype != u.dtype)]
    return max(1, AT_A_TIME // max(side_of(x) ** 2 for x in copied)) if copied else len(u)


def write(to: Tensor, index: Index, value: Tensor, ok: Tensor, old: Tensor | None = None) -> None:
    """Values where they are ok. Elsewhere the ``old`` ones, by default those that are there."""
    kept, value = (to if old is None else old)[index], value.to(to.dtype)
    if isinstance(index, slice):
        torch.where(per_slot(ok, value), value, kept, out=to[index])
    else:
        to[index] = torch.where(per_slot(ok, value), value, kept)
