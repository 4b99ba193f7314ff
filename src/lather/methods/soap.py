"""SOAP: Adam in the eigenbases of Shampoo's factors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .. import roots
from ..kernels import has_kernels
from ..linalg import are_products_exact, at_least, ema_, norms, per_slot, place_of_roots, product, products_in, rotate
from .base import FULL, Context, Hyper, Stack, State
from .shampoo import ROOT_OPTIONS, Index, Kronecker, factor_correction, first_factor, modes_of, write

SAME = 0.999  # squared cosine above which two eigenvectors count as the same
ROUNDINGS = 64.0  # a rotated element below this many roundings counts as zero
COARSE = 2.0  # the same where bases, or the numbers in products, are of a coarser dtype
TF32 = 2.0**-10
BLOCK, SIDE = 4096, 64  # elements that one program of a kernel takes, and the side of a tile


@final
class Soap(Kronecker):
    """``w <- beta2 w + (1 - beta2) (Q^T g)^2``, ``P = Q [(Q^T u) / (sqrt(w / bc2) + eps)]``. ``Q^T`` multiplies all modes by the
    transposed eigenbases ``Q_i`` of Shampoo's factors ``L_i``.

    State: the second moment ``w``, and of the full modes the factors ``L0, L1, ...`` and bases ``Q0, Q1, ...``. Bases are
    identities until the first refresh, so until then it is Adam. A mode that is not full is not rotated.

    The solver ``track`` turns every column of a basis a little, so ``w`` stays as it is. ``eigh`` gives columns by descending
    eigenvalue. So an element of ``w`` belongs to ranks of eigenvalues: it stays too, except that it follows vectors that stay and
    change places (:func:`places`). When bases stop being made of axes, ``w`` is moved: ``w <- w x_i (Q_i^T Q_i,old)^2`` with
    squares of elements, which is exact for rotated gradients whose elements are not correlated.

    Where ``w`` should be zero, rotations leave rounding errors. So ``sqrt(w / bc2)`` counts as at least 64 roundings of its
    root mean square over the block, or 2 roundings of coarser bases or products. With relative damping, ``eps`` too is a part of
    that mean.
    """

    name = "soap"
    text = "SOAP, which is Adam in the eigenbases of Shampoo's factors"
    roles = Kronecker.roles | {"w": "moment in the basis"}
    sums = "Lw"
    default_eps = {"relative": 1e-8, "absolute": 1e-8}  # noqa: RUF012 (Adam's)
    reads = ROOT_OPTIONS - {"exponent", "exponent_multiplier", "root_dtype"}
    elementwise = "adam"  # which it is without bases
    waits = False
    follows = True
    kernels = "factors"

    def init(self, stack: Stack, hyper: Hyper) -> State:
        state: State = {}
        full = [(i, d) for i, (d, mode) in enumerate(zip(stack.shape, stack.modes, strict=True)) if mode == FULL]
        for i, d in full:
            state[f"L{i}"] = first_factor(stack, d, hyper)
            state[f"Q{i}"] = roots.first_basis(stack.n, d, stack.dtype, stack.device)["Q"]
        if hyper.refresh_delay:
            state |= {f"Y{i}": torch.zeros_like(state[f"Q{i}"]) for i, _ in full}
        return state | {"w": stack.zeros(*stack.shape)}

    def factor_input(self, state: State, grad: Tensor, mode: int) -> tuple[Tensor, float]:
        return grad, 1.0

    def exponent(self, hyper: Hyper, order: int) -> float:
        return 0.5  # a basis has none; one for all orders lets all be solved together

    def products(self, modes: Sequence[str]) -> int:
        return 3  # the gradient is rotated once, and what is applied twice

    def solver(self, hyper: Hyper, device: torch.device | str, order: int) -> roots.EigenSolver:
        return roots.resolve_basis(hyper.root, place_of_roots(device, hyper.root_device))

    def solvers(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper, device: str) -> tuple[str, ...]:
        name = roots.spell(self.solver(hyper, device, len(shape)))
        return tuple(name if mode == FULL else "identity" for mode in modes)

    def solve(self, solver: roots.RootSolver, a: Tensor, e: float, hyper: Hyper, warm: State, exact: bool) -> tuple[State, Tensor]:
        assert isinstance(solver, roots.EigenSolver)
        before = warm["Q"] if solver.keeps_columns else None
        basis = roots.rescue_basis(a, before) if exact else roots.solve_basis(solver, a, warm)
        if solver.keeps_columns:
            return {"Q": basis.vectors}, basis.ok
        axes = roots.first_basis(1, a.shape[-1], a.dtype, a.device)["Q"]
        seen = per_slot(a.flatten(1).any(1), a)  # any basis is one of a zero factor
        return {"Q": torch.where(seen, basis.vectors, axes)}, basis.ok

    def put(self, state: State, index: Index, new: Mapping[int, Tensor], ok: Tensor, hyper: Hyper) -> None:
        w = state["w"][index]
        # Not at the very first gradient: in bases of one gradient that gradient is diagonal, and the rest of w would be zero.
        ok = ok & w.flatten(1).any(1)
        old = {i: state[f"Q{i}"][index] for i in new}
        keeps = self.solver(hyper, w.device, w.dim() - 1).keeps_columns
        if keeps and isinstance(index, slice) and len(new) == w.dim() - 1 > 1 and _by_kernels(w, new[0]):
            turn_(w, new, ok & _begin_at_axes(w, old))
        else:
            fresh = (turned if keeps else placed)(w.to(torch.promote_types(w.dtype, torch.float32)), old, new).to(w.dtype)
            state["w"][index] = torch.where(per_slot(ok, w), fresh, w)
        for i, q in new.items():
            write(state[f"Q{i}"], index, q, ok)

    def has_come(self, waiting: Tensor) -> Tensor:
        return waiting[:, :, 0].ne(0).any(1)  # zeros are no basis

    def follow(self, state: State, grad: Tensor, ctx: Context) -> None:
        g, beta2 = rotated(grad, _transposed(bases(state, grad))), ctx.hyper.beta2
        if _by_kernels(g, state["w"]):
            _launch("take_in", state["w"], g, ctx.alive, beta2, 1.0 if beta2 == 1 else 1 - beta2)
        elif beta2 == 1:
            state["w"].add_(g.square())
        else:
            ema_(state["w"], g.square(), ctx.alive * (1 - beta2))

    def fit(self, a: Tensor, made: Tensor, e: float, hyper: Hyper) -> tuple[Tensor, Tensor]:
        """The condition number of factors by their diagonals in the bases, and the part of them off those diagonals."""
        x = torch.promote_types(a.dtype, torch.float32)
        a, q = a.to(x), made.to(x)
        values = (q * product(a, q)).sum(1).clamp_min(0)
        top, size = values.amax(1), norms(a)
        beside = (size.square() - values.square().sum(1)).clamp_min(0).sqrt() / size
        return top / torch.maximum(values.amin(1), top * torch.finfo(x).eps), beside

    def ready(self, state: State) -> Tensor:
        return torch.ones(len(state["w"]), dtype=torch.bool, device=state["w"].device)

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        q = bases(state, u)
        x = rotated(u, _transposed(q))
        x = _divided(x, state, ctx) if _by_kernels(x, state["w"]) and x is not u else x / _denominator(state, u.dtype, ctx)
        return rotated(x, q, out)


def bases(state: State, like: Tensor) -> list[Tensor | None]:
    """Of every mode of a stack, in its dtype; None for a mode that is not rotated."""
    found = (state.get(f"Q{i}") for i in range(like.dim() - 1))
    return [None if q is None else q.to(like.dtype) for q in found]


def turned(w: Tensor, old: Mapping[int, Tensor], new: Mapping[int, Tensor]) -> Tensor:
    """``w`` for bases whose columns kept their places: the same, or moved from the axes."""
    axes = _begin_at_axes(w, old)
    squares = [new[i].mT.to(w.dtype).square() if i in new else None for i in range(w.dim() - 1)]
    with products_in("tf32" if w.is_cuda else None, w.device):  # an estimate in any case
        return torch.where(per_slot(axes, w), rotated(w, squares), w)


def turn_(w: Tensor, new: Mapping[int, Tensor], on: Tensor) -> None:
    """:func:`turned` in place by kernels, for slots whose bases stop being axes. Mostly there are none, and it takes no time."""
    from ..kernels import moments

    x = w
    for i in reversed(range(len(new))):  # each brings its mode to the front
        n, *others, d = x.shape
        out, rows = w.new_empty(n, d, *others) if i else w, math.prod(others)
        grid = -(-d // SIDE) * -(-rows // SIDE), n
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            moments.turn[grid](x, new[i].contiguous(), out, on, rows, d, SIDE=SIDE, DEPTH=32, num_warps=4)
        x = out


def _begin_at_axes(w: Tensor, old: Mapping[int, Tensor]) -> Tensor:
    """``[n]``: whether the bases of ``w`` were identities."""
    axes = torch.ones(len(w), dtype=torch.bool, device=w.device)
    for q in old.values():
        axes = axes & q.diagonal(dim1=1, dim2=2).eq(1).all(1)  # columns are of length 1
    return axes


def placed(w: Tensor, old: Mapping[int, Tensor], new: Mapping[int, Tensor]) -> Tensor:
    """``w`` for bases whose columns go by descending eigenvalue."""
    axes, found, squares = torch.ones(len(w), dtype=torch.bool, device=w.device), w, dict[int, Tensor]()
    for i, q in new.items():
        axes = axes & _is_of_axes(old[i])
        squares[i] = squared_cosines(old[i].to(w.dtype), q.to(w.dtype))
        shape = [len(w), *(1 for _ in w.shape[1:])]
        shape[i + 1] = -1
        found = found.gather(i + 1, places(squares[i]).view(shape).expand_as(w))
    return torch.where(per_slot(axes, w), rotated(w, [squares.get(i) for i in range(w.dim() - 1)]), found)


def squared_cosines(old: Tensor, new: Tensor) -> Tensor:
    """``[n, d, d]``: of every column of ``new [n, d, d]`` with every column of ``old``."""
    new, old = (q / torch.linalg.vector_norm(q, dim=1, keepdim=True) for q in (new, old))  # they were rounded to a coarse dtype
    return product(new.mT, old).square()


def places(squares: Tensor) -> Tensor:
    """``[n, d]``: the old column that every new one takes over from, given their :func:`squared_cosines`.

    It is the column with the same vector, if there is one. The others take what is left, in order.

    >>> places(squared_cosines(torch.eye(3)[None], torch.eye(3)[None][:, :, [0, 2, 1]]))
    tensor([[0, 2, 1]])
    """
    most, same = squares.max(-1)
    stays = most > SAME
    taken = torch.zeros_like(same).scatter_add_(1, same, stays.long())
    columns, left = (x.argsort(dim=1, stable=True) for x in (stays.long(), taken))  # new ones, and old ones for them
    return torch.where(stays, same, torch.empty_like(same).scatter_(1, columns, left))


def rotated(x: Tensor, factors: Sequence[Tensor | None], out: Tensor | None = None) -> Tensor:
    """Every mode of ``x [n, d1, ..., dk]`` times its factor ``[n, d, d]``, if there is one. Writes to ``out`` if given."""
    if any(factor is not None for factor in factors):
        first, *others = factors
        for factor in reversed(others):
            x = x.movedim(-1, 1) if factor is None else rotate(x, factor)
        if first is not None:
            return rotate(x, first, out)
        x = x.movedim(-1, 1).contiguous()
    return x if out is None else out.copy_(x)


def _transposed(factors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if factor is None else factor.mT for factor in factors]


def _denominator(state: State, dtype: torch.dtype, ctx: Context) -> Tensor:
    w = state["w"].to(dtype)
    root = (w / per_slot(factor_correction(ctx), w)).sqrt_()
    size = norms(root)
    size = torch.where(size < torch.inf, size, torch.nan)  # a direction of zero would hide a moment that is not finite
    mean = per_slot(size / math.sqrt(root[0].numel()), root)  # the root mean square
    if rounding := _rounding(state, dtype):
        root = torch.maximum(root, rounding * mean)
    root = root.add_(ctx.hyper.eps * mean if ctx.hyper.relative_damping else ctx.hyper.eps)
    return at_least(root, _least(dtype))


def _divided(x: Tensor, state: State, ctx: Context) -> Tensor:
    """``x``, whose memory it uses, over the denominator, in two passes."""
    w, correction = state["w"], factor_correction(ctx)
    correction = correction if isinstance(correction, Tensor) else torch.full((), correction, dtype=w.dtype, device=w.device)
    mean = (w.flatten(1).sum(1) / correction / w[0].numel()).sqrt()
    mean = torch.where(mean < torch.inf, mean, torch.nan)
    part, eps = (ctx.hyper.eps, 0.0) if ctx.hyper.relative_damping else (0.0, ctx.hyper.eps)
    numbers = _rounding(state, x.dtype), part, eps, _least(x.dtype)
    _launch("divide", x, w, mean, correction, *numbers, PER_SLOT=correction.dim() > 0)
    return x


def _rounding(state: State, dtype: torch.dtype) -> float:
    """The part of the mean denominator that is taken for zero."""
    if not (modes := modes_of(state)):
        return 0.0
    q = state[f"Q{modes[0]}"]
    coarse = [torch.finfo(q.dtype).eps]
    coarse += [TF32] if q.is_cuda and dtype == torch.float32 and not are_products_exact() else []
    return max(ROUNDINGS * torch.finfo(dtype).eps, COARSE * max(coarse))


def _least(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).tiny)  # the root of the smallest square that is not zero


def _by_kernels(x: Tensor, w: Tensor) -> bool:
    return x.dtype == w.dtype == torch.float32 and x[0].numel() < 1 << 30 and len(x) < 1 << 16 and has_kernels(x.device)


def _launch(kernel: str, x: Tensor, y: Tensor, *arguments: Any, **fixed: Any) -> None:
    """A kernel of :mod:`lather.kernels.moments` for two stacks."""
    from ..kernels import moments

    assert x.is_contiguous() and y.is_contiguous()
    numel = x[0].numel()
    grid = -(-numel // BLOCK), len(x)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        getattr(moments, kernel)[grid](x, y, *arguments, numel, BLOCK=BLOCK, num_warps=8, **fixed)


def _is_of_axes(q: Tensor) -> Tensor:
    """``[n]`` of ``[n, d, d]``: whether every column has one element, as in identities and permutations."""
    return (q.square().amax(1) == 1).all(1)
