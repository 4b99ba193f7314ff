"""Accuracy and time of the root solvers, on synthetic factors and on factors of real training.

    python benchmarks/solvers.py [--sizes 256 1024] [--spectra 1e-4 1e-8] [--solvers eigh "newton(iterations=20)"]
    python benchmarks/solvers.py --sizes --factors FILE.pt ...

The error is `||X g - X* g|| / ||X* g||`, `X* = (A + eps I)^(-e)` by eigh in float64, `eps = 1e-6 lambda_max`. Gradients `g` are
drawn with the covariance `A`; the *white* error is that for all directions alike, which weighs small eigenvalues more. A solver is
given `eps` and adds what it adds. One with a warm start has followed the factor over earlier refreshes.

Synthetic: `A = L M L^T`, where `L L^T` has a random basis and a spectrum that falls evenly in its logarithm from 1 to the given
value, and `M` is the moving average of sampled identities that beta2 = 0.95 and 10 steps between refreshes make. FILE.pt is from
benchmarks/factors.py; its errors are those of all refreshes but the first, and *previous root* is what not refreshing costs.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import common
import torch
from common import Results
from machine import CUDA, DEVICE
from torch import Tensor

from lather import roots

EPS, BETA2, FREQUENCY, REFRESHES = 1e-6, 0.95, 10, 5
PROBES = 16  # gradients per matrix
MOST = 32 if CUDA else 8  # matrices that differ
ELEMENTS, LONGEST = 1 << 24, 200  # a stack to time a solver on has so many elements, or takes so many ms


class Reference(NamedTuple):
    """Eigenbases of one refresh in float64, and gradients."""

    q: Tensor  # [n, d, d]
    values: Tensor  # [n, d]
    probes: dict[str, Tensor]  # [n, d, PROBES]

    @classmethod
    def of(cls, a: Tensor, generator: torch.Generator) -> Reference:
        values, q = torch.linalg.eigh(a.double())
        values = values.clamp(min=0)
        white = draw(len(a), a.shape[-1], PROBES, generator)
        return cls(q, values, {"error": q @ (values.sqrt()[:, :, None] * white), "white": white})

    def apply(self, e: float, g: Tensor) -> Tensor:
        return self.q @ ((self.values + EPS).pow(-e)[:, :, None] * (self.q.mT @ g))

    def errors(self, e: float, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """[n] for each kind of probe, given `X g`."""
        exact = {kind: self.apply(e, g) for kind, g in self.probes.items()}
        return {kind: norm(results[kind] - x) / norm(x) for kind, x in exact.items()}


class Problem(NamedTuple):
    """A sequence of refreshes of a stack, and references for those that are judged."""

    about: dict[str, Any]
    stacks: Tensor  # [refreshes, n, d, d], the largest eigenvalues about 1
    references: dict[int, Reference]


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2))


def draw(n: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, rows, columns, dtype=torch.float64, device=DEVICE, generator=generator)


def scaled(a: Tensor) -> Tensor:
    """`a` [n, d, d] over its largest eigenvalue, by power iteration; both sides of a comparison get the same matrix."""
    a = a.double()
    v = torch.ones_like(a[..., :1])
    for _ in range(30):
        v = a @ v
        v = v / norm(v)[:, None, None].clamp(min=torch.finfo(v.dtype).tiny)
    largest = v.mT @ a @ v
    a = a / torch.where(largest > 0, largest, 1.0)
    return ((a + a.mT) / 2).float()


def synthetic(d: int, spectrum: float) -> Problem:
    generator = torch.Generator(DEVICE).manual_seed(d)
    n = max(1, min(MOST, ELEMENTS // d**2))
    level = torch.logspace(0, torch.tensor(spectrum).log10().item(), d, dtype=torch.float64, device=DEVICE)
    left = torch.linalg.qr(draw(n, d, d, generator))[0] * level.sqrt()
    core, keep = torch.eye(d, dtype=torch.float64, device=DEVICE), BETA2**FREQUENCY
    stacks = []
    for _ in range(REFRESHES):
        z = draw(n, d, 2 * d, generator)
        core = keep * core + (1 - keep) / (2 * d) * z @ z.mT
        stacks.append(scaled(left @ core @ left.mT))
    last = REFRESHES - 1
    about = {"source": "synthetic", "spectrum": spectrum, "d": d, "matrices": n}
    return Problem(about, torch.stack(stacks), {last: Reference.of(stacks[last][:8], generator)})


def recorded(path: pathlib.Path) -> Iterator[Problem]:
    """One problem for each size of factor in the file."""
    record = torch.load(path, weights_only=True)
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for factor in record["factors"].values():
        groups.setdefault(tuple(factor.shape), []).append(factor)
    for (refreshes, d, _), factors in groups.items():
        generator = torch.Generator(DEVICE).manual_seed(d)
        stacks = torch.stack([scaled(torch.stack(step).to(DEVICE)) for step in zip(*factors, strict=True)])
        about = {"source": path.stem, "d": d, "matrices": len(factors), "refreshes": refreshes}
        about |= {name: record[name] for name in ("frequency", "beta2")}
        yield Problem(about, stacks, {k: Reference.of(stacks[k], generator) for k in range(1, refreshes)})


def measure(solver: roots.RootSolver, e: float, problem: Problem) -> dict[str, Any]:
    _, stacks, references = problem
    state = before = solver.init(stacks.shape[1], stacks.shape[2], stacks.dtype, stacks.device)
    bad, errors = {"failed": 0, "nonfinite": 0}, []
    for k, a in enumerate(stacks):
        if not state and k not in references:
            continue
        before, state = state, dict(state)
        root = solver(a, e, EPS, state)
        state = {name: kept(root.ok, x, before[name]) for name, x in state.items()}
        if k in references:
            errors.append(judge(root, e, references[k]))
            bad["failed"] += int((~root.ok).sum())
            bad["nonfinite"] += int((~root.value.isfinite().flatten(1).all(1)).sum())
    return bad | statistics_of(errors) | timing(solver, e, stacks[-1], before)


def judge(root: roots.Root, e: float, reference: Reference) -> dict[str, Tensor]:
    """The errors of the slots that have a reference; NaN where the solver gave up, which is counted elsewhere."""
    x, ok = (part[: len(reference.q)] for part in root[:2])
    errors = reference.errors(e, {kind: x.double() @ g for kind, g in reference.probes.items()})
    return {kind: torch.where(ok, error, torch.nan) for kind, error in errors.items()}


def kept(ok: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """State of the slots that are ok is replaced, as the optimizer does it."""
    return torch.where(ok.view(-1, *[1] * (new.dim() - 1)), new, old)


def previous_root(e: float, problem: Problem) -> dict[str, Any]:
    """The errors of roots that were exact one refresh ago."""
    pairs = [(problem.references[k - 1], now) for k, now in problem.references.items() if k - 1 in problem.references]
    return statistics_of([now.errors(e, {kind: old.apply(e, g) for kind, g in now.probes.items()}) for old, now in pairs])


def statistics_of(errors: list[dict[str, Tensor]]) -> dict[str, float | None]:
    """Mean, median, 95% and worst of each kind of error, None where there are none."""
    out: dict[str, float] = {}
    for kind in ("error", "white"):
        values = torch.cat([row[kind] for row in errors])
        out[kind] = values.nanmean().item()
        for name, part in (("median", 0.5), ("p95", 0.95), ("worst", 1.0)):
            out[f"{kind}_{name}"] = values.nanquantile(part).item()
    return {name: None if math.isnan(x) else x for name, x in out.items()}


def timing(solver: roots.RootSolver, e: float, a: Tensor, state: dict[str, Tensor]) -> dict[str, Any]:
    """ms per matrix in a stack as large as it takes to fill the device, or as small as a slow solver needs."""
    ms = common.time_ms(lambda: solver(a, e, EPS, dict(state)))
    copies = min(ELEMENTS // a.numel(), int(LONGEST / ms)) if CUDA else 1
    if copies > 1:
        a, state = repeat(a, copies), {name: repeat(x, copies) for name, x in state.items()}
        ms = common.time_ms(lambda: solver(a, e, EPS, dict(state)))
    return {"ms": ms / len(a), "timed_matrices": len(a)}


def repeat(x: Tensor, copies: int) -> Tensor:
    return x.repeat(copies, *[1] * (x.dim() - 1))


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    for d in args.sizes:
        for spectrum in args.spectra:
            yield synthetic(d, spectrum)
    for path in args.factors:
        yield from recorded(path)


def main(argv: list[str]) -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("--quick", action=argparse.BooleanOptionalAction, default=not CUDA, help="fewer sizes and spectra")
    parser.add_argument("--sizes", nargs="*", type=int, help="of synthetic factors; none: only --factors")
    parser.add_argument("--spectra", nargs="+", type=float)
    parser.add_argument("--exponents", nargs="+", type=float, default=[0.25, 0.5])
    parser.add_argument(
        "--solvers", nargs="+", type=common.argument(roots.parse), default=[make() for make in roots.SOLVERS.values()]
    )
    parser.add_argument("--factors", nargs="+", type=pathlib.Path, default=[], metavar="FILE.pt")
    args = parser.parse_args(argv)
    if args.sizes is None:
        args.sizes = [64, 128] if args.quick else [64, 128, 256, 512, 768, 1024, 2048]
    args.spectra = args.spectra or ([1e-4, 1e-8] if args.quick else [1e-2, 1e-4, 1e-8, 1e-12])
    results = Results("solvers", args, argv, eps=EPS, beta2=BETA2, frequency=FREQUENCY)
    for problem in problems(args):
        for e in args.exponents:
            if len(problem.references) > 1:
                results.add(**problem.about, exponent=e, solver="previous root", **previous_root(e, problem))
            for solver in args.solvers:
                name = roots.spell(solver)
                with results.attempt(f"{name}, {problem.about}, exponent {e}"):
                    results.add(**problem.about, exponent=e, solver=name, **measure(solver, e, problem))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
