"""Shampoo: one factor and one root per mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from .. import options, roots
from ..compute.background import side_by_side
from ..linalg import ema_, gram, gram_diagonal, mode_product, pack, per_slot, positions, rotate, symmetrize, unpack
from .base import Batch, Context, Due, Preconditioner, Stack, State

FULL = "full"
# Elements of factors that are refreshed at a time, which bounds the memory for it: a quarter of all, within these limits.
SMALLEST, LARGEST = 1 << 23, 1 << 24


@dataclass(frozen=True)
class Kronecker(Preconditioner):
    """``L_i <- beta2 L_i + (1 - beta2) G_i G_i^T``, ``X_i = (L_i / bc2 + eps I)^(-e)``, ``P = u x_1 X_1 ... x_k X_k``.

    Under ``damping="relative"``, ``eps`` is times ``||(L_i / bc2)^2||_F^(1/2)``.
    A ``"diagonal"`` mode keeps the diagonal of its factor only. State: factors ``L0, L1, ...``, roots ``X0, X1, ...`` (not
    positive until the first refresh) in ``root_dtype``, and what the solver keeps for a warm start, such as a basis ``Q0``.
    Roots are ``[n, d, d]``, or ``[n, d]`` if diagonal; so are factors, except that with ``factors="packed"`` those of full
    modes are lower triangles ``[n, d (d + 1) / 2]``.
    """

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        state: State = {}
        kept = options.root_dtype(group)
        for i, (d, mode) in enumerate(zip(stack.shape, stack.modes, strict=True)):
            if mode == FULL:
                state[f"L{i}"] = first_factor(stack, d, group)
                state[f"X{i}"] = stack.zeros(d, d, dtype=kept)
                solver = options.solver(group, d, group["root_device"] or stack.device, len(stack.shape))
                warm = solver.init(stack.n, d, stack.dtype, stack.device)
                state |= {f"{role}{i}": value for role, value in warm.items()}
            else:
                state[f"L{i}"] = stack.zeros(d)
                state[f"X{i}"] = stack.zeros(d, dtype=kept)
        if group["refresh_delay"]:
            state |= {f"Y{i}": torch.zeros_like(state[f"X{i}"]) for i in range(len(stack.shape))}
        return state

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        beta2 = ctx.group["betas"][1]
        for i in modes_of(state):
            factor, full = state[f"L{i}"], is_full(state, i)
            seen, scale = self.seen_by(state, grad, i)
            new = gram(seen, i, scale) if full else gram_diagonal(seen, i, scale)
            new = pack(new) if full and factor.dim() == 2 else new
            if beta2 == 1:
                factor.add_(new)
            else:
                ema_(factor, new, ctx.weight(beta2))

    def seen_by(self, state: State, grad: Tensor, mode: int) -> tuple[Tensor, float]:
        """The gradient whose products a mode's factor takes in, and what they are multiplied by."""
        return grad, 1.0

    def batches(self, due: Sequence[Due], exact: bool = False) -> Iterator[Batch]:
        """Factors of one size are solved together, whatever block they belong to, in batches of bounded size."""
        for jobs in _batches(due):
            yield _Batch(self, jobs, exact)

    def solve(
        self, solver: roots.RootSolver, a: Tensor, e: float, group: Mapping[str, Any], warm: State, exact: bool
    ) -> tuple[State, Tensor]:
        """What is refreshed, by role and without the mode, of factors ``a [n, d, d]``; and ``[n]``, whether that went well."""
        ridge = _ridge(a, group)
        root = roots.rescue(a, e, ridge, warm) if exact else roots.solve(solver, a, e, ridge, warm)
        return {"X": root.value, **warm}, root.ok

    def put(self, state: State, index: Index, new: Mapping[int, Tensor], ok: Tensor) -> None:
        """Put to use what was refreshed of some slots, by mode, where it is ok."""
        for i, value in new.items():
            _write(refreshed(state, i), index, value, ok)

    def publish(self, state: State, slots: Sequence[int]) -> None:
        if modes := modes_of(state):
            first = state[f"Y{modes[0]}"]
            index = index_of(slots, first.device)
            come = self.has_come(first[index])  # it has not if the delay was lengthened in between
            self.put(state, index, {i: state[f"Y{i}"][index] for i in modes}, come)

    def has_come(self, waiting: Tensor) -> Tensor:
        """``[n]``: whether what waits to be put to use is there."""
        return _is_root(waiting)

    def is_capturable(self, due: Sequence[Due]) -> bool:
        for state, _, ctx in due:
            order, group = len(modes_of(state)), ctx.group
            if group["root_device"] or group["refresh_delay"]:
                return False
            sizes = {refreshed(state, i).shape[-1] for i in modes_of(state) if is_full(state, i)}
            device = ctx.alive.device
            able = (options.solver(group, d, device, order).is_capturable(device) for d in sizes)
            if ctx.exponent(order) and not all(able):
                return False
        return True

    def ready(self, state: State) -> Tensor:
        return _is_root(state["X0"])

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        order = u.dim() - 1
        if ctx.exponent(order) == 0:
            return u if out is None else out.copy_(u)
        if order > 2 and all(is_full(state, i) for i in range(order)):
            for i in reversed(range(order)):
                u = rotate(u, state[f"X{i}"].to(u.dtype), None if i else out)
            return u
        for i in range(order):
            u = mode_product(u, state[f"X{i}"].to(u.dtype), i, out if i == order - 1 else None)
        return u


def diagonal_of(x: Tensor) -> Tensor:
    return x.diagonal(dim1=1, dim2=2) if x.dim() == 3 else x


def _is_root(x: Tensor) -> Tensor:
    """``[n]``: a root is positive definite, so its first diagonal element tells it from what it starts as."""
    return diagonal_of(x)[:, 0] > 0


def _write(to: Tensor, index: Index, value: Tensor, ok: Tensor, old: Tensor | None = None) -> None:
    """Values where they are ok, ``old`` ones (those that are there) where not."""
    kept = (to if old is None else old)[index]
    to[index] = torch.where(per_slot(ok, value), value.to(to.dtype), kept)


def first_factor(stack: Stack, d: int, group: Mapping[str, Any]) -> Tensor:
    """Of a full mode."""
    return stack.zeros(d * (d + 1) // 2) if group["factors"] == "packed" else stack.zeros(d, d)


def modes_of(state: State) -> list[int]:
    """The modes that have factors."""
    return [int(role[1:]) for role in state if role[0] == "L"]


def refreshed(state: State, mode: int) -> Tensor:
    """What is made of a mode's factor: a root, or where there are none, a basis."""
    return state[f"X{mode}"] if f"X{mode}" in state else state[f"Q{mode}"]


def is_full(state: State, mode: int) -> bool:
    """Whether a mode has a whole factor; what is made of it then is a matrix, whatever form the factor is kept in."""
    return refreshed(state, mode).dim() == 3


def is_packed(state: State, mode: int) -> bool:
    return is_full(state, mode) and state[f"L{mode}"].dim() == 2


def factors_of(state: State, mode: int, index: Index) -> Tensor:
    """The factors of some slots: ``[n, d, d]``, or ``[n, d]`` if diagonal."""
    kept = state[f"L{mode}"][index]
    return unpack(kept, refreshed(state, mode).shape[-1]) if is_packed(state, mode) else kept


class _Side:
    """The factors of one mode of some slots, and what comes of them."""

    def __init__(self, mode: int, job: Due, index: Index) -> None:
        self.mode, self.job, self.index = mode, job, index
        self.order = len(modes_of(job.state))
        self.e = job.ctx.exponent(self.order)
        correction = job.ctx.factor_correction()
        a = factors_of(job.state, mode, index).to(job.ctx.alive.dtype)
        if isinstance(correction, Tensor):
            correction = (correction[index] if correction.dim() else correction).to(a.dtype)
        self.a = a / per_slot(correction, a)
        self.fresh: State = {}
        self.ok = torch.ones(len(a), dtype=torch.bool, device=a.device)

    @property
    def solver(self) -> roots.RootSolver:
        return options.solver(self.job.ctx.group, self.a.shape[-1], self.device, self.order)

    @property
    def device(self) -> torch.device:
        """Where roots are computed."""
        return torch.device(self.job.ctx.group["root_device"] or self.a.device)

    @property
    def alike(self) -> Any:
        """What sides that are solved together have in common."""
        return self.a.shape[1:], self.e, id(self.job.ctx.group)

    def warm(self, role: str) -> Tensor:
        return self.job.state[f"{role}{self.mode}"][self.index].to(self.device, self.a.dtype)


Index = slice | Tensor


def _batches(due: Sequence[Due]) -> Iterator[dict[int, Due]]:
    """What is due, by its number, in pieces of bounded size; a slot stays whole."""
    sizes = [max(1, sum(refreshed(job.state, i)[0].numel() for i in modes_of(job.state))) for job in due]
    everything = sum(size * len(job.ctx.alive) for size, job in zip(sizes, due, strict=True))
    most = min(LARGEST, max(SMALLEST, everything // 4))
    batch: dict[int, Due] = {}
    room = most
    for number, (size, job) in enumerate(zip(sizes, due, strict=True)):
        slots = list(job.slots)
        while slots:
            fit = max(room // size, 0 if batch else 1)
            if fit:
                batch[number] = job._replace(slots=slots[:fit])
                room -= size * len(slots[:fit])
            slots = slots[fit:]
            if slots:
                yield batch
                batch, room = {}, most
    if batch:
        yield batch


@final
class _Batch(Batch):
    def __init__(self, method: Kronecker, jobs: Mapping[int, Due], exact: bool) -> None:
        self._method, self._jobs, self._exact = method, jobs, exact
        self._indices = [index_of(job.slots, job.ctx.alive.device) for job in jobs.values()]
        self._sides = [
            [_Side(i, job, index) for i in modes_of(job.state)]
            for job, index in zip(jobs.values(), self._indices, strict=True)
        ]
        self._alive = [job.ctx.alive[index] > 0 for job, index in zip(jobs.values(), self._indices, strict=True)]
        touched = [tensor for job in jobs.values() for tensor in job.state.values()]
        self.reads = [*(side.a for sides in self._sides for side in sides), *self._alive, *touched]

    def __call__(self) -> list[tuple[int, Sequence[int], Tensor]]:
        together: dict[Any, list[_Side]] = {}
        for side in (side for sides in self._sides for side in sides):
            if side.e == 0:
                side.fresh["X"] = _identity_like(side.a)
            elif side.a.dim() == 2:
                _diagonal_root(side)
            else:
                together.setdefault(side.alike, []).append(side)
        largest_first = sorted(together.values(), key=lambda sides: -sum(side.a.numel() for side in sides))
        side_by_side([partial(_solve, self._method, alike, self._exact) for alike in largest_first])
        return [
            (number, job.slots, _publish(self._method, job, index, alive, sides))
            for (number, job), index, alive, sides in zip(
                self._jobs.items(), self._indices, self._alive, self._sides, strict=True
            )
        ]


def index_of(slots: Sequence[int], device: torch.device) -> Index:
    """Slots: as a slice if they follow each other, which copies nothing."""
    if slots[-1] - slots[0] + 1 == len(slots):
        return slice(slots[0], slots[-1] + 1)
    return positions(tuple(slots), device)


def _solve(method: Kronecker, sides: Sequence[_Side], exact: bool) -> None:
    """What is refreshed of factors of one size, from the warm start if the solver has one."""
    group, e, solver = sides[0].job.ctx.group, sides[0].e, sides[0].solver
    a = _joined([side.a.to(side.device) for side in sides])
    a = a if solver.sees_what_is_not_finite(a, e) and not exact else symmetrize(a)
    roles = solver.init(0, a.shape[-1], a.dtype, a.device)
    warm = {role: _joined([side.warm(role) for side in sides]) for role in roles}
    fresh, fine = method.solve(solver, a, e, group, warm, exact)
    sizes = [len(side.a) for side in sides]
    for role, value in fresh.items():
        for side, part in zip(sides, torch.split(value, sizes), strict=True):
            side.fresh[role] = part.to(side.a.device)
    for side, ok in zip(sides, torch.split(fine, sizes), strict=True):
        side.ok = ok.to(side.a.device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _publish(method: Kronecker, job: Due, index: Index, alive: Tensor, sides: Sequence[_Side]) -> Tensor:
    """Write what is new of the slots that are ok and alive; a block takes all its new roots, or bases, or none. Those that are
    used later wait as ``Y``."""
    state, ok = job.state, torch.ones_like(alive)
    for side in sides:
        ok = ok & side.ok & _is_kept(side.fresh, refreshed(state, side.mode).dtype)
    new: dict[int, Tensor] = {}
    for side in sides:
        for role, value in side.fresh.items():
            old = state[f"{role}{side.mode}"]
            if old is refreshed(state, side.mode):
                new[side.mode] = value
            else:
                _write(old, index, value, ok & alive)
    if job.ctx.group["refresh_delay"]:
        for i, value in new.items():
            _write(state[f"Y{i}"], index, value, ok & alive, old=refreshed(state, i))
    else:
        method.put(state, index, new, ok & alive)
    return ok | ~alive


def _is_kept(fresh: State, kept: torch.dtype) -> Tensor | bool:
    """A root must also be finite, and positive, in what it is kept in."""
    if "X" not in fresh or fresh["X"].dtype == kept:
        return True
    rounded = fresh["X"].to(kept)
    return rounded.isfinite().flatten(1).all(1) & (diagonal_of(rounded) > 0).all(1)


def _ridge(a: Tensor, group: Mapping[str, Any]) -> float | Tensor:
    """``eps``, or under ``damping="relative"`` that times each factor's size: ``[n]``."""
    eps: float = group["eps"]
    return roots.relative_ridge(a, eps) if group["damping"] == "relative" else eps


def _identity_like(a: Tensor) -> Tensor:
    return torch.ones_like(a) if a.dim() == 2 else torch.diag_embed(torch.ones_like(a[..., 0]))


def _diagonal_root(side: _Side) -> None:
    ridge = per_slot(_ridge(side.a, side.job.ctx.group), side.a)
    side.fresh["X"] = roots.power(side.a.double() + ridge, -side.e).to(side.a.dtype)
    side.ok = side.fresh["X"].isfinite().all(1)
