"""Which root solver is the fastest on this device: the candidates behind `root="auto"`, timed.

    python benchmarks/fastest.py [--models gpt2 resnet50] [--block 1024]
    python benchmarks/fastest.py --sizes 64 1024 --exponents 1/4 1/2 --counts 1 64

Each row is a number of matrices of one size, and an exponent. For a model, the rows are one refresh of all its roots. The
synthetic factors have a spectrum of six decades. Times are per matrix, the median of three calls after a warm-up, on CUDA
by a graph if the solver can be captured. A candidate fails if a root is not ok. A slow candidate is timed on fewer
matrices. `root="auto"` goes by a rule (`lather.roots.choose`), not by these times; the table shows both.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from itertools import product

import common
import torch
from common import Results
from machine import CUDA, DEVICE
from torch import Tensor

import lather
from lather import roots
from lather.report.models import MODELS, load, shapes_of
from lather.roots.coupled import supports

EPS, DECADES = 1e-12, 6
ELEMENTS = 1 << 23  # of the largest stack
BUDGET = 30.0  # milliseconds of a call

Task = tuple[int, float, int]  # size, exponent, number of matrices


def candidates(e: float) -> tuple[roots.RootSolver, ...]:
    """Solvers without state, so that checkpoints do not depend on the choice."""
    return (roots.Minimax(), roots.Newton(), roots.Eigh()) if supports(e) else (roots.Eigh(),)


def stacks_of(model: str, block: int) -> Counter[tuple[int, float]]:
    """The roots of a model with default options, by size and exponent."""
    counts: Counter[tuple[int, float]] = Counter()
    for bank in lather.plan(shapes_of(load(model)), max_preconditioner_dim=block).banks:
        for d, mode in zip(bank.shape, bank.modes, strict=False):
            counts[d, 1 / (2 * len(bank.shape))] += bank.slots if mode == "full" else 0
    return +counts


def synthetic(d: int, n: int) -> Tensor:
    """[n, d, d], or fewer matrices if they would be too large."""
    n = max(1, min(n, ELEMENTS // d**2))
    x = torch.randn(n, d, d, generator=torch.Generator(DEVICE).manual_seed(0), dtype=torch.float64, device=DEVICE)
    x *= torch.logspace(0, -DECADES / 2, d, dtype=torch.float64, device=DEVICE) / math.sqrt(d)
    a = x @ x.mT
    return ((a + a.mT) / 2).float()


def milliseconds(solver: roots.RootSolver, a: Tensor, e: float) -> float | None:
    """Per matrix; None if a root is not ok."""
    alone = clock(solver, a[:1], e, repeats=1)
    if alone > BUDGET:
        return alone if alone < math.inf else None
    n = min(len(a), int(BUDGET / max(alone, 1e-3)))
    ms = clock(solver, a[:n], e, repeats=3) / n
    return ms if ms < math.inf else None


def clock(solver: roots.RootSolver, a: Tensor, e: float, repeats: int) -> float:
    """Of one call; infinity if a root is not ok."""
    call = partial(solver, a, e, EPS, {})
    if not call().ok.all():  # this also compiles
        return math.inf
    if not (CUDA and solver.is_capturable(a.device)):
        return common.time_ms(call, repeats)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return common.time_ms(graph.replay, repeats)


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    for model in args.models:
        for (d, e), count in sorted(stacks_of(model, args.block).items()):
            yield d, e, count
    yield from product(args.sizes, args.exponents, args.counts)


def main(argv: list[str]) -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--block", type=int, default=1024, help="max_preconditioner_dim of --models")
    parser.add_argument("--sizes", nargs="+", type=int, default=[])
    parser.add_argument("--exponents", nargs="+", type=common.argument(lambda text: float(Fraction(text))), default=[1 / 4])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 64])
    args = parser.parse_args(argv)
    if args.models is None:
        args.models = [] if args.sizes else ["gpt2" if CUDA else "gpt2-tiny"]
    results = Results("fastest", args, argv, eps=EPS, decades=DECADES)
    for d, e, n in dict.fromkeys(tasks(args)):
        a, ms = synthetic(d, n), dict[str, float | None]()
        for solver in candidates(e):
            with results.attempt(f"{solver.name}, size {d}, exponent {e}, {n} matrices"):
                ms[solver.name] = milliseconds(solver, a, e)
        timed = {name: x for name, x in ms.items() if x is not None}
        fastest = min(timed, key=timed.__getitem__, default=None)
        results.add(d=d, exponent=e, matrices=n, ms=ms, fastest=fastest, auto=roots.choose(DEVICE, e).name)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
