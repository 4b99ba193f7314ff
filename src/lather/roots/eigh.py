"""Roots by a symmetric eigendecomposition, exact for every exponent; and the rescue of what other solvers give up on."""

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ..linalg import eye_like, factorize, normalize, norms, power, probe, product, ridge_of_size, symmetrize
from .base import Basis, EigenSolver, Relative, Ridge, Root, RootSolver, absolute, lift, settle

WORKERS = 8  # threads, each with a stream; one matrix leaves most of a GPU idle
RESOLVED = 1e-5  # the least part of a factor's size that a ridge has to be for float32
SMALL = 32  # up to this size the library itself is batched
IN_FLOAT64 = range(128, 513)  # on CUDA, where torch is about as fast in float64: up to 512 it uses Jacobi's method in float32


@final
@dataclass(frozen=True)
class Eigh(EigenSolver):
    """`A = Q diag(lambda) Q^T`, then `X = Q diag((lambda - min(lambda_min, 0) + eps)^(-e)) Q^T`.

    On a CPU the work is done in float64, or in the dtype of `A` if the ridge is relative and large enough for float32. On CUDA
    it is done in float64 for sizes from 128 to 512, else in the dtype of `A`. A slot is solved again in float64 if its
    decomposition fails or is inaccurate in float32, and is not ok only if that fails too. Finding such slots takes one host
    read per call. The residual is an estimate of `||Q diag(lambda) Q^T - A||_F / ||A||_F`, found by multiplying vectors.

    >>> Eigh()(16 * torch.eye(2).expand(1, 2, 2), e=0.25, eps=1e-12, state={}).value[0].diagonal()
    tensor([0.5000, 0.5000])
    """

    name: ClassVar[str] = "eigh"
    knows_size: ClassVar[bool] = True

    def flops(self, d: int) -> float:
        return 11.0 * d**3  # decomposition 9, root 2

    def _root(self, a: Tensor, e: float, eps: Ridge, state: dict[str, Tensor]) -> Root:
        work, scale = normalize(_working(a, eps))
        q, values, ok, residual = decompose(work)
        if isinstance(eps, Relative):
            eps = ridge_of_size(torch.linalg.vector_norm(values.double() * scale.squeeze(-1), 4, dim=1), eps.eps)
        f = power(lift(values, scale, eps), -e).to(work.dtype)
        return Root(symmetrize(product(q * f[:, None, :], q.mT)).to(a.dtype), ok, residual.to(a.dtype))

    def _basis(self, a: Tensor, state: dict[str, Tensor]) -> Basis:
        work, scale = normalize(_working(a))
        q, values, ok, residual = decompose(work)
        return Basis(q.to(a.dtype), (values * scale.squeeze(-1)).to(a.dtype), ok, residual.to(a.dtype))


def _working(a: Tensor, eps: Ridge | None = None) -> Tensor:
    """`a` in the dtype to work in. At condition 1e4 float32 eigenvectors cost a root 2e-4, far less than its age does. The errors
    grow with the condition. On a CPU float64 takes twice the time."""
    if a.is_cuda:
        return a.double() if a.shape[-1] in IN_FLOAT64 else a
    return a if isinstance(eps, Relative) and eps.eps >= RESOLVED else a.double()


def decompose(a: Tensor) -> Basis:
    """Eigenbasis of normalised, finite `a` [n, d, d]. Slots that float32 solves badly are solved again in float64."""
    bound = 32 * torch.finfo(a.dtype).eps * a.shape[-1] ** 0.5  # about 30 times the usual error
    first = _attempt(a, bound)
    if a.dtype == torch.float64 or not len(bad := (~first.ok).nonzero().squeeze(1)):  # the host read
        return first
    again = _attempt(a[bad].double(), bound)
    return Basis(*(old.index_copy(0, bad, new.to(old.dtype)) for old, new in zip(first, again, strict=True)))


def _attempt(a: Tensor, bound: float) -> Basis:
    """Slots are ok up to this residual and loss of orthogonality. What matters most in a root matters least in the residual.

    Norms are estimated: that of `M z` for a vector `z` of random signs is on average the Frobenius norm of `M`.
    """
    values, q = _eigh(a)
    z = probe(a)
    y = (q * z).sum(1, keepdim=True)  # as sums, because a CPU takes several times as long to multiply a matrix by one vector
    residual = norms((q * (values[:, None, :] * y)).sum(2) - (a * z.mT).sum(2)) / norms(a).clamp(min=1.0)  # 0 or norm >= 1
    skew = norms((q * y).sum(2) - z.squeeze(2)) / a.shape[-1] ** 0.5
    return Basis(q, values, (residual <= bound) & (skew <= bound), residual)


def _eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Values (descending) and vectors. If one matrix fails, the batched call fails, and each matrix is solved alone."""
    try:
        many = a.is_cuda and len(a) > 1 and a.shape[-1] > SMALL
        values, q = _on_streams(a) if many else factorize(torch.linalg.eigh, a)
    except LinAlgError:
        pairs = [_eigh_alone(a[i : i + 1]) for i in range(len(a))]
        values, q = (torch.cat(part) for part in zip(*pairs, strict=True))
    return values.flip(-1), q.flip(-1)


def _on_streams(a: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of several matrices at a time."""
    values, q = a.new_empty(a.shape[:-1]), torch.empty_like(a)
    threads, streams = _workers(a.device)
    main = torch.cuda.current_stream(a.device)
    ready = main.record_event()

    def work(first: int) -> None:
        with torch.no_grad(), torch.cuda.stream(streams[first]):
            streams[first].wait_event(ready)
            for i in range(first, len(a), WORKERS):
                values[i], q[i] = torch.linalg.eigh(a[i])

    jobs = [threads.submit(work, first) for first in range(min(WORKERS, len(a)))]
    wait(jobs)
    for stream in streams:
        main.wait_stream(stream)
    for job in jobs:
        job.result()  # raises what went wrong
    return values, q


@cache
def _workers(device: torch.device) -> tuple[ThreadPoolExecutor, list[Any]]:
    torch.linalg.eigh(torch.eye(2, device=device))  # loads the library; torch cannot do that in two threads at once
    streams = [torch.cuda.Stream(device) for _ in range(WORKERS)]  # type: ignore[no-untyped-call]
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="lather-eigh"), streams


def _eigh_alone(a: Tensor) -> tuple[Tensor, Tensor]:
    """Values (ascending) and vectors of one matrix [1, d, d]; NaN if it fails."""
    for shift in (0.0, 2.0**-10):  # LAPACK fails on some factors with many zero rows, but not on the same factors off zero
        try:
            values, q = torch.linalg.eigh(a + shift * eye_like(a))
            return values - shift, q
        except LinAlgError:
            continue
    return torch.full_like(a[..., 0], torch.nan), torch.full_like(a, torch.nan)


def solve(solver: RootSolver, a: Tensor, e: float, eps: Ridge, state: dict[str, Tensor]) -> Root:
    """The solver's roots. On a CPU, slots that the solver gives up on are solved again by eigh in float64.

    On other devices the check would make the host wait. There such slots are not ok, and the caller passes them to :func:`rescue`
    later.
    """
    root = solver(a, e, eps, state)
    if isinstance(solver, Eigh) or not a.is_cpu or root.ok.all():
        return root
    bad = (~root.ok).nonzero().squeeze(1)
    warm = {role: value[bad] for role, value in state.items()}
    rescued = rescue(a[bad], e, eps[bad] if isinstance(eps, Tensor) else eps, warm)
    state |= {role: old.index_copy(0, bad, warm[role]) for role, old in state.items()}
    return Root(*(old.index_copy(0, bad, new) for old, new in zip(root, rescued, strict=True)))


def rescue(a: Tensor, e: float, eps: Ridge, state: dict[str, Tensor]) -> Root:
    """Roots by eigh in float64. A basis `"Q"` in `state`, the warm start of the solver that gave up, is replaced too."""
    basis = Eigh().basis(symmetrize(a.double()), {})
    values = lift(basis.values, torch.ones_like(basis.values[:, :1, None]), absolute(a, eps))
    value = symmetrize(product(basis.vectors * power(values, -e)[:, None, :], basis.vectors.mT))
    value, ok = settle(value.to(a.dtype), basis.ok)
    if "Q" in state:
        state["Q"] = torch.where(ok[:, None, None], basis.vectors.to(a.dtype), state["Q"])
    return Root(value, ok, basis.residual.to(a.dtype))


def solve_basis(solver: RootSolver, a: Tensor, state: dict[str, Tensor]) -> Basis:
    """The solver's eigenbases. Slots that it gives up on are treated as in :func:`solve`."""
    assert isinstance(solver, EigenSolver)
    before = state.get("Q") if solver.keeps_columns else None
    basis = solver.basis(a, state)
    if isinstance(solver, Eigh) or not a.is_cpu or basis.ok.all():
        return basis
    bad = (~basis.ok).nonzero().squeeze(1)
    rescued = rescue_basis(a[bad], None if before is None else before[bad])
    return Basis(*(old.index_copy(0, bad, new) for old, new in zip(basis, rescued, strict=True)))


def rescue_basis(a: Tensor, before: Tensor | None = None) -> Basis:
    """Eigenbases by eigh in float64. Columns are in the order of their eigenvalues, or in that of the basis ``before``."""
    vectors, values, ok, residual = Eigh().basis(symmetrize(a.double()), {})
    if before is not None:
        order = (before * product(a, before)).sum(1).argsort(dim=1, descending=True, stable=True)
        vectors = torch.empty_like(vectors).scatter_(2, order[:, None, :].expand_as(vectors), vectors)
        values = torch.empty_like(values).scatter_(1, order, values)
    return Basis(vectors.to(a.dtype), values.to(a.dtype), ok, residual.to(a.dtype))
