"""Times of real steps of an optimizer, on parameters like the model's with random gradients. The model is not touched."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ..optimizer import Shampoo
from ..runtime.parameters import name_of, stored_items
from ..storage.tensors import is_dtensor

TOGETHER = 4  # steps of a period in which refreshes are together: three without and one with all of them
SPREAD = (5, 20)  # steps of the periods in which staggered refreshes are timed
REPEATS = 3  # periods; a time is the median over them
PATIENCE = 10.0  # seconds; what would take longer is timed in fewer steps


class Line(NamedTuple):
    """Milliseconds that depend on the steps of a period: a constant, and work that is shared by all its steps."""

    constant: float
    shared: float

    def at(self, frequency: int) -> float:
        return self.constant + self.shared / frequency


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step: the mean over a period and the largest, by refresh and steps in the period. Bytes at the peak."""

    together: tuple[Line, Line]  # mean, largest
    staggered: tuple[Line, Line]
    peak_bytes: int | None = None  # above parameters and gradients, where the device counts

    def mean(self, refresh: str, frequency: int) -> float:
        return self._lines(refresh, frequency)[0].at(frequency)

    def largest(self, refresh: str, frequency: int) -> float:
        mean, largest = self._lines(refresh, frequency)
        return max(mean.at(frequency), largest.at(frequency))

    def _lines(self, refresh: str, frequency: int) -> tuple[Line, Line]:
        return self.staggered if refresh == "staggered" and frequency > 1 else self.together


def line_through(points: Mapping[float, float], floor: float) -> Line:
    """The line through two points ``{1 / frequency: ms}``. Whatever the noise, it does not fall, and is nowhere below the floor.

    >>> line_through({0.25: 5.0, 0.5: 7.0}, floor=1.0)
    Line(constant=3.0, shared=8.0)
    """
    (near, low), (far, high) = sorted(points.items())
    shared = max(0.0, (high - low) / (far - near))
    constant = (low + high - shared * (near + far)) / 2
    return Line(constant, shared) if constant >= floor else Line(floor, max(0.0, (low + high - 2 * floor) / (near + far)))


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
        """Put the stand-ins in the place of the model's parameters, in an optimizer that has taken no step."""
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
        mean, largest = Line(plain, sum(ms - plain for ms in period)), Line(max(period), 0.0)
        points: dict[float, tuple[float, float]] = {}
        for frequency in SPREAD:
            if plain * frequency * (2 + REPEATS) < 1e3 * PATIENCE or not points:
                times = self._period(opt, "staggered", frequency)
                points[1 / frequency] = statistics.mean(times), max(times)
        if len(points) < len(SPREAD):
            points[0.0] = plain, plain  # the least that it can be
        spread = [line_through({x: both[i] for x, both in points.items()}, plain) for i in range(2)]
        return Times((mean, largest), (spread[0], spread[1]), memory.bytes())

    def run(self, opt: Shampoo, refresh: str, frequency: int) -> tuple[float, float]:
        """Mean and largest time of a step of a new optimizer of the model, in a run after two periods that warm it up."""
        self._seat(opt)
        self._schedule(opt, refresh, frequency)
        for _ in range(2 * frequency):
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
    """The most memory in use, above what is in use now. Known on CUDA only."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._base = device, 0
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self._base = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) - self._base if self._device.type == "cuda" else None


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
