"""The solver behind `root="auto"`: by a rule in plans, by a measurement on the device in training.

[Note: auto] Which solver is fastest differs between devices and versions of their libraries by more than a rule could
know. A plan must be the same on all ranks and known before anything runs, so it goes by :func:`choose`. Before the first
refresh each rank times the candidates for its sizes once (:func:`measure`), ranks take the slowest of their times, and
:func:`decide` makes the same choices of them everywhere. Candidates keep no state, so checkpoints do not depend on the
choice. On a CPU there is nothing to measure: eigh, whose results are the same bits for any number of ranks.

Accuracy is judged twice. A candidate that is not ok on a synthetic stack is not taken. On the factors of the training every
solver reports a residual per slot, and a slot above its tolerance is not ok: it keeps its last root and is redone by eigh.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..compute.background import stream_of
from ..linalg import symmetrize
from .base import RootSolver
from .coupled import supports
from .eigh import Eigh
from .minimax import Minimax
from .newton import Newton
from .numerics import full_precision

SMALLEST = 32  # below it eigh is a last resort: it would often win, and make the host wait for every refresh
NUMEL = 1 << 23  # elements of the largest stack that is measured
MANY = 64  # matrices of the smallest: fewer share the device with other sizes, and then take what they take among many
BUDGET = 30.0  # milliseconds; a candidate that is slow is measured on fewer matrices
REPEATS = 3
HOPELESS = 4  # times the operations of a candidate that works; not measured
CLEARLY = 1.25  # how much faster than the rule's solver another must be: noise must not decide
DECADES = 6  # of the synthetic spectrum


class Task(NamedTuple):
    """What is measured: roots of exponent `e` of `n` matrices of size `d`; `n` is a power of two."""

    d: int
    e: float
    n: int


@final
@dataclass(frozen=True)
class Choice:
    """A solver, and what each candidate takes per matrix, by name; `inf` for one that cannot be used."""

    solver: RootSolver
    milliseconds: Mapping[str, float]

    @property
    def cost(self) -> float:
        """Milliseconds of the solver to two bits, so that noise seldom changes what is balanced by it."""
        ms = self.milliseconds.get(self.solver.name, math.inf)
        mantissa, exponent = math.frexp(ms)
        return math.ldexp(round(4 * mantissa) / 4, exponent) if ms < math.inf else ms


Times = dict[tuple[Task, str], float]  # milliseconds per matrix, by task and name of the candidate
Choices = Mapping[tuple[int, float], Choice]  # by size and exponent
NO_CHOICES: Choices = {}

_measured: dict[tuple[str, Task], dict[str, float]] = {}


def choose(device: torch.device | str, e: float) -> RootSolver:
    """The solver for roots of exponent `e` on `device`, as far as a rule can tell.

    On CUDA eigh takes its matrices one by one; solvers made of products do not, and `minimax` has the fewest of them.
    Everywhere else eigh. How many matrices there are is left out on purpose: it differs between ranks.
    """
    if torch.device(device).type != "cuda" or not supports(e):
        return Eigh()
    return Minimax()


def chosen(choices: Choices, d: int, device: torch.device | str, e: float) -> Choice | None:
    """The choice for this device, if one was measured."""
    return choices.get((d, e)) if _is_measurable(torch.device(device)) else None


def candidates(e: float) -> tuple[RootSolver, ...]:
    """What may be chosen: solvers without state."""
    return (Minimax(), Newton(), Eigh()) if supports(e) else (Eigh(),)


def measure(stacks: Mapping[tuple[torch.device, int, float], int]) -> Times:
    """Time the candidates for so many matrices on a device, of a size and exponent. Raises nothing: ranks wait for it.

    A measurement is kept as long as the process, by the kind of device and the number of matrices up to a power of two.
    """
    times: Times = {}
    for (device, d, e), count in stacks.items():
        if _is_measurable(device):
            task = Task(d, e, 1 << (count - 1).bit_length())
            for name, ms in _timed(task, device).items():
                times[task, name] = max(ms, times.get((task, name), 0.0))
    return times


def decide(times: Mapping[tuple[Task, str], float]) -> Choices:
    """The choice for every size and exponent. Of several numbers of matrices the largest counts, where most time goes."""
    largest: dict[tuple[int, float], Task] = {}
    for task, _ in times:
        key = task.d, task.e
        largest[key] = max(largest.get(key, task), task)
    return {key: _fastest(task, times) for key, task in largest.items()}


def _fastest(task: Task, times: Mapping[tuple[Task, str], float]) -> Choice:
    solvers = {solver.name: solver for solver in candidates(task.e)}
    ms = {name: times[task, name] for name in solvers if (task, name) in times}
    late = {Eigh.name} if task.d < SMALLEST else set()
    usual = choose("cuda", task.e).name
    best = min(ms, key=lambda name: (ms[name] == math.inf, name in late, ms[name]))
    if not ms[best] < math.inf:
        best = Eigh.name
    elif CLEARLY * ms[best] > ms.get(usual, math.inf):
        best = usual
    return Choice(solvers[best], ms)


def _timed(task: Task, device: torch.device) -> dict[str, float]:
    """Milliseconds per matrix of the candidates that are worth it, by name."""
    key = _kind(device), task
    if key not in _measured:
        times, least = dict[str, float](), math.inf
        for solver in candidates(task.e):
            flops = solver.flops(task.d)
            if flops <= HOPELESS * least:
                times[solver.name] = _time(solver, task, device)
                least = min(least, flops) if times[solver.name] < math.inf else least
        _measured[key] = times
    return _measured[key]


def _time(solver: RootSolver, task: Task, device: torch.device) -> float:
    """Milliseconds per matrix; `inf` if a root is not ok, or if the solver does not run at all."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # kernels go to the current one
            a = _synthetic(task, device)
            alone = _clock(solver, a[:1], task.e, repeats=1)
            if alone > BUDGET:
                return alone
            n = min(len(a), int(BUDGET / max(alone, 1e-3)))
            return _clock(solver, a[:n], task.e, REPEATS) / n
    except Exception:  # no compiler, no memory: reasons to choose another solver, not to stop
        return math.inf


def _clock(solver: RootSolver, a: Tensor, e: float, repeats: int) -> float:
    """Milliseconds of a call, the median, after one that compiles and warms up."""
    if not bool(solver(a, e, 1e-12, {}).ok.all()):
        return math.inf
    stream, times = torch.cuda.current_stream(a.device), list[float]()
    work = partial(solver, a, e, 1e-12, {})
    launch = _at_once(work, stream) if solver.is_capturable(a.device) else work
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        launch()
        stop.record(stream)
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def _at_once(work: Callable[[], object], stream: Any) -> Callable[[], object]:
    """The same as a CUDA graph, as refreshes are, if it can be one: what small matrices take is not the host's affair."""
    graph, side = torch.cuda.CUDAGraph(), stream_of(stream.device, 1)
    side.wait_stream(stream)
    try:
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
    except RuntimeError:
        return work
    return graph.replay


def _synthetic(task: Task, device: torch.device) -> Tensor:
    """A stack [n, d, d] with some decades of spectrum, made without the user's random numbers."""
    d = task.d
    n = max(1, min(max(task.n, MANY), NUMEL // d**2))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, d, d, generator=generator, dtype=torch.float32, device=device)
    x *= torch.logspace(0, -DECADES / 2, d, dtype=torch.float32, device=device) / math.sqrt(d)
    with full_precision(device):
        return symmetrize(x @ x.mT)


def _is_measurable(device: torch.device) -> bool:
    return device.type == "cuda"


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
