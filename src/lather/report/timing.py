"""Times of real steps of an optimizer, on parameters like the model's with random gradients. The model is not touched."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ..optimizer import Shampoo
from ..planning.plan import Plan, refresh_flops
from ..runtime.parameters import name_of, stored_items
from ..storage.tensors import is_dtensor

TOGETHER = 4  # steps of a period in which refreshes are together: three without and one with all of them
SPREAD = (5, 20)  # steps of the periods in which staggered refreshes are timed
REPEATS = 3  # periods; a time is the median over them
WARMING = 3  # periods before a run is timed: one until the first refresh, and two as in Bench._period
PATIENCE = 10.0  # seconds; what would take longer is timed in fewer steps


class Line(NamedTuple):
    """Milliseconds of a step that does a share of the work of a refresh."""

    constant: float
    work: float

    def at(self, share: float) -> float:
        return self.constant + self.work * share


def line_through(points: Sequence[tuple[float, float]], floor: float) -> Line:
    """The line through two points ``(share, ms)``. Whatever the noise, it does not fall, and is nowhere below the floor.

    >>> line_through([(0.5, 7.0), (0.25, 5.0)], floor=1.0)
    Line(constant=3.0, work=8.0)
    """
    (near, low), (far, high) = sorted(points)
    work = max(0.0, (high - low) / (far - near)) if far > near else 0.0
    constant = (low + high - work * (near + far)) / 2
    return Line(constant, work) if constant >= floor else Line(floor, max(0.0, (low + high - 2 * floor) / (near + far)))


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step, with refreshes together and staggered: ``mean`` over a period, and the largest."""

    together: Line
    largest_together: float
    staggered: Line
    largest_staggered: Line
    share: Callable[[int], float]  # of all staggered refreshes that falls on one step at most, by the steps of a period
    peaks: Mapping[str, int] = field(default_factory=dict)  # bytes above parameters and gradients, where the device counts

    def mean(self, refresh: str, frequency: int) -> float:
        line = self.staggered if refresh == "staggered" and frequency > 1 else self.together
        return line.at(1 / frequency)

    def largest(self, refresh: str, frequency: int) -> float:
        if refresh != "staggered" or frequency == 1:
            return max(self.largest_together, self.mean(refresh, frequency))
        return max(self.largest_staggered.at(self.share(frequency)), self.mean(refresh, frequency))


def largest_share(plan: Plan, frequency: int) -> float:
    """The part of all refreshes that falls on one step at most if they are staggered."""
    loads = Counter[int]()
    for group, settings in enumerate(plan.settings):
        for number, offset in plan.offsets(group, replace(settings, frequency=frequency)).items():
            block = plan.blocks[number]
            loads[offset] += int(refresh_flops(block, settings, plan.specs[block.param].device))
    return max(loads.values(), default=0) / max(1, loads.total())


@final
class Bench:
    """Stand-ins for the parameters of a model on a device, and two sets of gradients."""

    def __init__(self, opt: Shampoo, device: torch.device) -> None:
        self._device, self._turn = device, 0
        self._generator = torch.Generator(device).manual_seed(0)
        self._params: dict[str, nn.Parameter] = {}
        for g, i, p in stored_items(opt.param_groups):
            if p.requires_grad:
                self._params[name_of(opt.param_groups[g], g, i)] = nn.Parameter(self._draw(p, 0.02))
        self._grads = [[self._draw(p, 0.01) for p in self._params.values()] for _ in range(2)]

    def _draw(self, like: Tensor, size: float) -> Tensor:
        like = torch.empty(like.shape, dtype=like.dtype, device="meta") if is_dtensor(like) else like.detach()
        return torch.empty_like(like, device=self._device).normal_(0, size, generator=self._generator)

    def _seat(self, opt: Shampoo) -> None:
        """Replace the model's parameters by the stand-ins, in an optimizer that has taken no step."""
        for g, group in enumerate(opt.param_groups):
            names = [name_of(group, g, i) for i, p in enumerate(group["params"]) if p.requires_grad]
            group["params"] = [self._params[name] for name in names]
            if "param_names" in group:
                group["param_names"] = names

    def measure(self, opt: Shampoo) -> Times:
        """Times of a new optimizer of the model."""
        self._seat(opt)
        memory = _Peak(self._device)
        period = self._period(opt, "together", max(TOGETHER, 2 + max(g["refresh_delay"] for g in opt.param_groups)))
        plain = statistics.median(period)
        work, peaks = sum(ms - plain for ms in period), {"together": memory.bytes()}
        share = partial(largest_share, opt._session.run.plan)
        means, most = list[tuple[float, float]](), list[tuple[float, float]]()
        for frequency in SPREAD:
            if plain * frequency * (2 + REPEATS) < 1e3 * PATIENCE or not means:
                times = self._period(opt, "staggered", frequency)
                means.append((1 / frequency, statistics.mean(times)))
                most.append((share(frequency), max(times)))
        if len(means) < len(SPREAD):
            means, most = [(0.0, plain), *means], [(0.0, plain), *most]  # the least that it can be
        spread = line_through(means, plain), line_through(most, plain)
        peaks["staggered"] = memory.bytes()
        return Times(Line(plain, max(0.0, work)), max(period), *spread, share, peaks)

    def run(self, opt: Shampoo, refresh: str, frequency: int) -> tuple[float, float]:
        """Mean and largest time of a step of a new optimizer of the model, in a run after periods that warm it up."""
        self._seat(opt)
        self._schedule(opt, refresh, frequency)
        for _ in range(WARMING * frequency):
            self._step(opt)
        periods = [[self._step(opt) for _ in range(frequency)] for _ in range(max(1, -(-30 // frequency)))]
        return statistics.mean(map(statistics.mean, periods)), max(map(statistics.median, zip(*periods, strict=True)))

    def _period(self, opt: Shampoo, refresh: str, frequency: int) -> list[float]:
        """The time of each step of a period."""
        self._schedule(opt, refresh, frequency)
        start = time.perf_counter()
        for _ in range(2 * frequency):  # kernels are compiled the first time, and captured in graphs the second time
            self._step(opt)
        slow = time.perf_counter() - start > PATIENCE
        periods = [[self._step(opt) for _ in range(frequency)] for _ in range(1 if slow else REPEATS)]
        return [statistics.median(times) for times in zip(*periods, strict=True)]

    def _schedule(self, opt: Shampoo, refresh: str, frequency: int) -> None:
        for group in opt.param_groups:
            group |= {"refresh": refresh, "precondition_frequency": frequency, "refresh_warmup": 0.0}
            group["refresh_delay"] = min(group["refresh_delay"], frequency - 1)

    def _step(self, opt: Shampoo) -> float:
        self._turn = 1 - self._turn
        for p, grad in zip(self._params.values(), self._grads[self._turn], strict=True):
            p.grad = grad
        start = now(self._device)
        opt.step()
        return now(self._device) - start


def now(device: torch.device) -> float:
    """Milliseconds, with nothing left to do on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return 1e3 * time.perf_counter()


@final
class _Peak:
    """The most memory in use, above what is in use now. Known on CUDA only, elsewhere 0."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._base = device, 0
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self._base = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._base if self._device.type == "cuda" else 0


def time_closure(closure: Callable[[], Any], model: Any, device: torch.device) -> float:
    """Milliseconds of a closure that runs forward and backward. Gradients, buffers and random numbers stay what they were."""
    has_modules = isinstance(model, nn.Module)
    params, buffers = (list(model.parameters()), list(model.buffers())) if has_modules else ([], [])
    grads, kept = [p.grad for p in params], [buffer.clone() for buffer in buffers]
    times = []
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(8):
                for p in params:
                    p.grad = None
                start = now(device)
                closure()
                times.append(now(device) - start)
    finally:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        with torch.no_grad():
            for buffer, old in zip(buffers, kept, strict=True):
                buffer.copy_(old)
    return statistics.median(times[3:])
