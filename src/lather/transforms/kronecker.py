"""Shampoo: one factor and one root per mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from .. import options, roots
from ..aside import side_by_side
from ..linalg import ema_, gram, gram_diagonal, mode_product, pack, per_slot, positions, rotate, symmetrize, unpack
from .base import Batch, Context, Due, Preconditioner, Stack, State

FULL = "full"
# Elements of factors that are refreshed at a time, which bounds the memory for it: a quarter of all, within these limits.
SMALLEST, LARGEST = 1 << 23, 1 << 24


@dataclass(frozen=True)
class Kronecker(Preconditioner):
    """``L_i <- beta2 L_i + (1 - beta2) G_i G_i^T``, ``X_i = (L_i / bc2 + eps I)^(-e)``, ``P = u x_1 X_1 ... x_k X_k``.

    Under ``damping="relative"``, ``eps`` is times ``||(L_i / bc2)^2||_F^(1/2)``.
    A ``"diagonal"`` mode keeps the diagonal of its factor only. State: factors ``L0, L1, ...``, roots ``X0, X1, ...`` (zero
    until the first refresh) in ``root_dtype``, and what the solver keeps for a warm start, such as a basis ``Q0``. Roots are
    ``[n, d, d]``, or ``[n, d]`` if diagonal; so are factors, except that with ``factors="packed"`` those of full modes are
    lower triangles ``[n, d (d + 1) / 2]``.
    """

    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        state: State = {}
        kept, packed = options.root_dtype(group), group["factors"] == "packed"
        for i, (d, mode) in enumerate(zip(stack.shape, stack.modes, strict=True)):
            if mode == FULL:
                state[f"L{i}"] = stack.zeros(d * (d + 1) // 2) if packed else stack.zeros(d, d)
                state[f"X{i}"] = stack.zeros(d, d, dtype=kept)
                device = group["root_device"] or stack.device
                solver = roots.resolve(group["root"], d, device, options.exponent(group, len(stack.shape)))
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
        for i in range(grad.dim() - 1):
            factor, seen = state[f"L{i}"], self.seen_by(state, grad, i)
            new = gram(seen, i) if is_full(state, i) else gram_diagonal(seen, i)
            new = pack(new) if is_packed(state, i) else new
            if beta2 == 1:
                factor.add_(new)
            else:
                ema_(factor, new, ctx.weight(beta2))

    def seen_by(self, state: State, grad: Tensor, mode: int) -> Tensor:
        """The gradient whose products a mode's factor takes in."""
        return grad

    def batches(self, due: Sequence[Due], exact: bool = False) -> Iterator[Batch]:
        """Factors of one size are solved together, whatever block they belong to, in batches of bounded size."""
        for jobs in _batches(due):
            yield _Batch(jobs, exact)

    def publish(self, state: State, slots: Sequence[int]) -> None:
        index = index_of(slots, state["X0"].device)
        come = _is_root(state["Y0"][index])  # it has not if the delay was lengthened in between
        for i in range(_order(state)):
            old, new = state[f"X{i}"], state[f"Y{i}"][index]
            old[index] = torch.where(per_slot(come, new), new, old[index])

    def is_capturable(self, due: Sequence[Due]) -> bool:
        for state, _, ctx in due:
            e, group = ctx.exponent(_order(state)), ctx.group
            if group["root_device"] or group["refresh_delay"]:
                return False
            sizes = {state[f"X{i}"].shape[-1] for i in range(_order(state)) if is_full(state, i)}
            if e and not all(roots.resolve(group["root"], d, ctx.alive.device, e).is_capturable for d in sizes):
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


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal(dim1=1, dim2=2) if x.dim() == 3 else x


def _is_root(x: Tensor) -> Tensor:
    """``[n]``: a root is positive definite, so its first diagonal element tells it from the zero it starts as."""
    return _diagonal(x)[:, 0] != 0


def is_full(state: State, mode: int) -> bool:
    """Whether a mode has a whole factor; its root then is a matrix, whatever form the factor is kept in."""
    return state[f"X{mode}"].dim() == 3


def is_packed(state: State, mode: int) -> bool:
    return is_full(state, mode) and state[f"L{mode}"].dim() == 2


def factors_of(state: State, mode: int, index: Index) -> Tensor:
    """The factors of some slots: ``[n, d, d]``, or ``[n, d]`` if diagonal."""
    kept = state[f"L{mode}"][index]
    return unpack(kept, state[f"X{mode}"].shape[-1]) if is_packed(state, mode) else kept


class _Side:
    """The factors of one mode of some slots, and what comes of them."""

    def __init__(self, mode: int, job: Due, index: Index) -> None:
        self.mode, self.job, self.index = mode, job, index
        self.e = job.ctx.exponent(_order(job.state))
        correction = job.ctx.factor_correction()
        a = factors_of(job.state, mode, index).to(job.ctx.alive.dtype)
        if isinstance(correction, Tensor):
            correction = (correction[index] if correction.dim() else correction).to(a.dtype)
        self.a = a / per_slot(correction, a)
        self.fresh: State = {}
        self.ok = torch.ones(len(a), dtype=torch.bool, device=a.device)

    @property
    def solver(self) -> roots.RootSolver:
        return roots.resolve(self.job.ctx.group["root"], self.a.shape[-1], self.device, self.e)

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


def _order(state: State) -> int:
    return sum(role.startswith("L") for role in state)


def _batches(due: Sequence[Due]) -> Iterator[dict[int, Due]]:
    """What is due, by its number, in pieces of bounded size; a slot stays whole."""
    sizes = [sum(job.state[f"X{i}"][0].numel() for i in range(_order(job.state))) for job in due]
    everything = sum(size * len(job.state["X0"]) for size, job in zip(sizes, due, strict=True))
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
    def __init__(self, jobs: Mapping[int, Due], exact: bool) -> None:
        self._jobs, self._exact = jobs, exact
        self._indices = [index_of(job.slots, job.ctx.alive.device) for job in jobs.values()]
        self._sides = [
            [_Side(i, job, index) for i in range(_order(job.state))]
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
        side_by_side([partial(_solve, alike, self._exact) for alike in largest_first])
        return [
            (number, job.slots, _publish(job, index, alive, sides))
            for (number, job), index, alive, sides in zip(
                self._jobs.items(), self._indices, self._alive, self._sides, strict=True
            )
        ]


def index_of(slots: Sequence[int], device: torch.device) -> Index:
    """Slots: as a slice if they follow each other, which copies nothing."""
    if slots[-1] - slots[0] + 1 == len(slots):
        return slice(slots[0], slots[-1] + 1)
    return positions(tuple(slots), device)


def _solve(sides: Sequence[_Side], exact: bool) -> None:
    """Roots of factors of one size, from the warm start if the solver has one."""
    group, e, solver = sides[0].job.ctx.group, sides[0].e, sides[0].solver
    a = _joined([side.a.to(side.device) for side in sides])
    a = a if solver.sees_what_is_not_finite(a, e) and not exact else symmetrize(a)
    roles = solver.init(0, a.shape[-1], a.dtype, a.device)
    warm = {role: _joined([side.warm(role) for side in sides]) for role in roles}
    ridge = _ridge(a, group)
    root = roots.rescue(a, e, ridge, warm) if exact else roots.solve(solver, a, e, ridge, warm)
    sizes = [len(side.a) for side in sides]
    for role, value in {"X": root.value, **warm}.items():
        for side, part in zip(sides, torch.split(value, sizes), strict=True):
            side.fresh[role] = part.to(side.a.device)
    for side, ok in zip(sides, torch.split(root.ok, sizes), strict=True):
        side.ok = ok.to(side.a.device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _publish(job: Due, index: Index, alive: Tensor, sides: Sequence[_Side]) -> Tensor:
    """Write the new roots of the slots that are ok and alive; a block takes all its new roots or none. Roots that are used
    later wait as ``Y``."""
    ok = sides[0].ok
    for side in sides:
        kept = job.state[f"X{side.mode}"].dtype
        ok = ok & side.ok
        if side.fresh["X"].dtype != kept:  # it must also be finite, and positive, in what it is kept in
            rounded = side.fresh["X"].to(kept)
            ok = ok & rounded.isfinite().flatten(1).all(1) & (_diagonal(rounded) > 0).all(1)
    for side in sides:
        for role, value in side.fresh.items():
            old = job.state[f"{role}{side.mode}"]
            new = job.state[f"Y{side.mode}"] if role == "X" and job.ctx.group["refresh_delay"] else old
            new[index] = torch.where(per_slot(ok & alive, value), value.to(old.dtype), old[index])
    return ok | ~alive


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
