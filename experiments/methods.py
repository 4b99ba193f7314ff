"""Methods that lather does not have, for experiments.ideas.

They derive from lather's methods, which are final there: here a few lines say what differs. Kernels know none of them, so on a GPU
they take longer than they would as a part of the library.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lather import roots
from lather.linalg import ema_, first_of, mode_product, norms, per_slot, product, unpack
from lather.methods import GRAFTS, Context, Hyper, Kronecker, Method, Shampoo, Soap, Stack, State, refiltered, register
from lather.methods.grafts import Stateless
from lather.methods.shampoo import factor_correction, factors_of, modes_of
from lather.options import OPTIONS


def orthogonal(u: Tensor, hyper: Hyper) -> Tensor:
    """Every block as the matrix of its first mode and the rest, with all singular values set to 1."""
    return roots.parse_polar(hyper.polar)(u.reshape(*u.shape[:2], -1).contiguous()).view(u.shape)


class Orthogonalised(Kronecker):
    """A method whose direction is orthogonalised."""

    kernels = "none"
    linear = False

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        return orthogonal(super().apply(state, u, ctx), ctx.hyper)


class ShampooPolar(Orthogonalised, Shampoo):
    name = "shampoo_polar"
    text = "Shampoo, orthogonalised"
    reads = Shampoo.reads | {"polar"}


class SoapPolar(Orthogonalised, Soap):
    name = "soap_polar"
    text = "SOAP, orthogonalised"
    reads = Soap.reads | {"polar"}


class NormalisedRows(Method):
    """NorMuon (arXiv 2510.05491): ``O = U V^T``, ``r <- beta2 r + (1 - beta2) mean(O^2)`` over each row, ``P = O / sqrt(r)``.

    ``r`` is not corrected for its start at zero. That is one factor for the whole block, and a graft sets the length.
    """

    name = "normalised_rows"
    text = "Muon with normalised rows"
    roles = {"r": "moment of rows"}  # noqa: RUF012
    sums = "r"
    reads = frozenset({"polar"})
    follows = True
    linear = False

    def init(self, stack: Stack, hyper: Hyper) -> State:
        return {"r": stack.zeros(stack.shape[0])}

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Rows are seen in :meth:`follow`, when the gradient is filtered."""

    def follow(self, state: State, grad: Tensor, ctx: Context) -> None:
        squares = orthogonal(refiltered(state, grad, ctx), ctx.hyper).square().flatten(2).mean(2)
        ema_(state["r"], squares, ctx.alive * (1 - ctx.hyper.beta2))

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        size = state["r"].to(u.dtype).sqrt()
        size = size + 1e-8 * size.amax(1, keepdim=True)  # a row that is always zero stays zero
        return mode_product(orthogonal(u, ctx.hyper), torch.where(size > 0, 1 / size, 0), 0)


class OneSided(Kronecker):
    """Shampoo that preconditions only the smallest mode of blocks whose largest mode is at least ``ratio`` times as large."""

    text = "one-sided Shampoo"
    factor_input = Shampoo.factor_input
    exponent = Shampoo.exponent

    def __init__(self, name: str, ratio: float) -> None:
        self.name, self._ratio = name, ratio  # type: ignore[misc]

    def init(self, stack: Stack, hyper: Hyper) -> State:
        state, sizes = super().init(stack, hyper), stack.shape
        if max(sizes) < self._ratio * min(sizes):
            return state
        mode = sizes.index(min(sizes))
        return {role: value for role, value in state.items() if int(role[1:]) == mode}

    def ready(self, state: State) -> Tensor:
        return first_of(state[f"X{modes_of(state)[0]}"]) > 0

    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        for mode in modes_of(state):
            u = mode_product(u, unpack(state[f"X{mode}"], u.dtype), mode)
        return u


class KLSoap(Soap):
    """SOAP in the eigenbases of KL-Shampoo's factors (arXiv 2509.03378).

    Factors are those of :class:`lather.methods.KL`, whose roots are here ``Q (diag(Q^T L Q) + eps)^(-1/2) Q^T``, made anew in every
    step from the bases as they are. ``eps`` is :attr:`RIDGE` times the factor's size.
    """

    RIDGE = 1e-4  # KL's default

    name = "klsoap"
    text = "SOAP in the eigenbases of KL-Shampoo's factors"
    kernels = "none"
    judges = True

    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> Tensor | None:
        """Gradients are scaled by KL's rule for the first of them, and then by the bias correction of the roots."""
        others = grad.dim() - 2
        rms = norms(grad) / math.sqrt(grad[0].numel())
        begins = state["L0"].flatten(1).any(1).logical_not() & (rms > 0)
        past = factor_correction(replace(ctx, steps=[max(t - 1, 1) for t in ctx.steps])) ** (others / 2)
        scale = torch.where(begins, torch.where(begins, rms, 1.0) ** (-others / (others + 1)), past)
        return super().accumulate(state, grad * per_slot(scale.to(grad.dtype), grad), ctx)

    def factor_input(self, state: State, grad: Tensor, mode: int) -> tuple[Tensor, float]:
        others = [i for i in modes_of(state) if i != mode]
        for i in others:
            grad = mode_product(grad, self.root(state, i, grad.dtype), i)
        return grad, 1 / math.prod(grad.shape[1 + i] for i in others)

    def root(self, state: State, mode: int, dtype: torch.dtype) -> Tensor:
        """``[n, d, d]``; the identity if the factor is zero."""
        q, factor = state[f"Q{mode}"].to(dtype), factors_of(state, mode, slice(None), dtype)
        values = (q * product(factor, q)).sum(1).clamp_min(0)
        values = values + self.RIDGE * torch.linalg.vector_norm(values, 4, dim=1, keepdim=True)
        powers = torch.where(values > 0, values, 1.0).rsqrt()
        return product(q * powers[:, None, :], q.mT)


class ByTorch(Shampoo):
    """Shampoo as it is, for grafts that kernels do not know."""

    name = "shampoo_by_torch"
    kernels = "none"


class BlockMean(Stateless):
    """Adam with one second moment for a whole block, the mean of its squares (as Adam-mini has, arXiv 2406.16793).

    Shampoo keeps that mean already: it is the trace of a factor, over the number of elements. Only for full factors.
    """

    elementwise = "adam"
    reads = frozenset({"graft_eps"})

    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        factor = factors_of(state, 0, slice(None), u.dtype)
        trace = factor.diagonal(dim1=1, dim2=2).sum(1) / factor_correction(ctx)
        return u / per_slot((trace / u[0].numel()).sqrt() + ctx.hyper.graft_eps, u)


WIDE = 2.0  # a matrix with one side this many times the other


def register_all() -> None:
    """Not on import: whoever reads the table of lather's methods finds its own alone."""
    ratios = {"one_sided": 1.0, "one_sided_if_wide": WIDE}
    wide = (OneSided(*pair) for pair in ratios.items())
    for method in (ShampooPolar(), SoapPolar(), NormalisedRows(), KLSoap(), ByTorch(), *wide):
        register(method)
    GRAFTS["block_mean"] = BlockMean()
    OPTIONS["graft"] = replace(OPTIONS["graft"], check=lambda name, value: value)  # GRAFTS has no others
