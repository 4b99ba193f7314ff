"""Time of an optimizer step on the shapes of real models, beside torch's fused AdamW and Muon in the same run.

    python benchmarks/step.py [--models gpt2 llama-953m] [--frequency 10] [--options '{"root": "eigh"}' ...] [--profile]

*Routed* is what lather makes of a model that it is given: embeddings and a head like them are left to Adam. With the row `routed`,
those of `--options` are routed too. torch's Muon gets all matrices, and no others.

Synthetic gradients, four sets in rotation so that factors are not of rank one. Every step is timed by a synchronised clock. A
*plain* step refreshes nothing; staggered there are none. *State* is what a checkpoint holds, *held* what stays allocated between
steps, *peak* the most during the timed steps, all above parameters and gradients; the first steps have a peak of their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import common
import torch
from common import Results, Schedule
from machine import CUDA, DEVICE, Memory, now, solvers, state_mib
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import lather
from lather.report.models import MODELS, load, num_params, shapes_of

CHANNELS_LAST = "-channels-last"  # added to the name of a model
NAMES = [*MODELS, "resnet50" + CHANNELS_LAST]
ROWS = ("adamw", "muon", "lather-muon", "together", "staggered", "routed")
LEAVE_TABLES = [(r"^(wte|wpe|head)\.weight$", {"preconditioner": None})]  # embeddings and heads among the shapes of models
Make = Callable[[dict[str, torch.Tensor]], torch.optim.Optimizer]


def tensors(model: str) -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]]]:
    """Parameters, and four sets of gradients."""
    last = model.endswith(CHANNELS_LAST)
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(shape: tuple[int, ...], size: float) -> torch.Tensor:
        x = torch.randn(shape, device=DEVICE, generator=generator).mul_(size)
        return x.to(memory_format=torch.channels_last) if last and x.dim() == 4 else x

    shapes = shapes_of(load(model.removesuffix(CHANNELS_LAST)))
    params = {name: torch.nn.Parameter(draw(shape, 0.02)) for name, shape in shapes.items()}
    return params, [[draw(shape, 0.01) for shape in shapes.values()] for _ in range(4)]


def contenders(args: argparse.Namespace) -> Iterator[tuple[str, Make]]:
    if "adamw" in args.rows:
        yield "AdamW fused", lambda params: common.adamw(params.items(), lr=1e-4)
    if "muon" in args.rows:
        yield "Muon (2-D only)", lambda params: torch.optim.Muon([p for p in params.values() if p.dim() == 2], lr=1e-4)
    if "lather-muon" in args.rows:
        yield "lather.muon, routed", lambda params: lather.muon(lather.route(params.items(), LEAVE_TABLES), lr=1e-4)
    for refresh in ("together", "staggered"):
        make = partial(make_shampoo, args.frequency, {"refresh": refresh})
        if refresh in args.rows:
            yield f"lather {refresh}", make
        if "routed" in args.rows:
            yield f"lather {refresh}, routed", partial(make, routed=True)
    routed = "routed" in args.rows
    for options in args.options:
        yield common.spell(options) + ", routed" * routed, partial(make_shampoo, args.frequency, options, routed=routed)


def make_shampoo(
    frequency: int, options: dict[str, Any], params: dict[str, torch.Tensor], routed: bool = False
) -> torch.optim.Optimizer:
    return common.shampoo(lather.route(params.items(), LEAVE_TABLES if routed else []), frequency, options)


def why_not(name: str, model: str) -> str | None:
    """Why a contender sits this model out."""
    shapes = shapes_of(load(model.removesuffix(CHANNELS_LAST)))
    if name.endswith("routed"):
        return None if "wte.weight" in shapes else "it has no embeddings"
    if not name.startswith("Muon"):
        return None
    if not hasattr(torch.optim, "Muon"):
        return "this torch has no Muon"
    matrices = {key: shape for key, shape in shapes.items() if len(shape) == 2}
    return "most of the parameters are not 2-D" if 2 * num_params(matrices) < num_params(shapes) else None


def measure(make: Make, model: str, steps: int, full: bool) -> dict[str, Any]:
    params, sets = tensors(model)
    memory = Memory()
    opt = make(params)
    schedule = Schedule.of(opt)

    def step(t: int) -> float:
        for p, grad in zip(params.values(), sets[t % 4], strict=True):
            p.grad = grad
        start = now()
        opt.step()
        return now() - start

    warm = [step(t) for t in range(1, schedule.warmup + 1)]
    first_peak = memory.peak()
    last = schedule.warmup + schedule.whole(steps)
    timed = {t: step(t) for t in range(schedule.warmup + 1, last + 1)}
    peak = memory.peak()
    plain = [ms for t, ms in timed.items() if not schedule.refreshes(t)]
    row = common.summary(list(timed.values())) | {
        "warmup_ms": warm,
        "first_refresh_ms": schedule.first(warm),
        "plain_ms": statistics.median(plain) if plain else None,
        "solvers": solvers(opt),
        "state_mib": state_mib(opt),
        "held_mib": memory.held(),
        "peak_mib": peak,
        "peak_all_mib": max(peak, first_peak) if CUDA else None,
    }
    profiles = trace(step, schedule, last, full) if CUDA or full else {}
    row["kernels"] = num_kernels(profiles["plain"]) if CUDA and "plain" in profiles else None
    return row | ({"profile": {kind: top(p) for kind, p in profiles.items()}} if full else {})


def trace(step: Callable[[int], float], schedule: Schedule, done: int, full: bool) -> dict[str, profile]:
    """Profiles of the next plain step, and in full of the next that refreshes."""
    found: dict[str, profile] = {}
    for t in range(done + 1, done + 1 + (schedule.frequency if full else 1)):
        kind = "refresh" if schedule.refreshes(t) else "plain"
        if kind in found or not (full or kind == "plain"):
            step(t)
            continue
        with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as found[kind]:
            step(t)
    return found


def num_kernels(prof: profile) -> int:
    """Kernels, copies and fills on the device."""
    return sum(e.device_type == DeviceType.CUDA and not e.is_user_annotation for e in prof.events())


def top(prof: profile, rows: int = 25) -> str:
    """The kernels (on a CPU, the operators) that took most time."""
    totals = [(e.self_device_time_total if CUDA else e.self_cpu_time_total, e.count, e.key) for e in prof.key_averages()]
    totals = sorted((x for x in totals if not x[2].startswith("Optimizer.")), reverse=True)
    lines = [f"{us / 1e3:10.3f} {count:7d}  {key[:100]}" for us, count, key in totals[:rows]]
    rest = sum(us for us, *_ in totals[rows:]) / 1e3
    count = sum(count for _, count, _ in totals)
    lines.append(f"{rest:10.3f}          the rest; in all {sum(us for us, *_ in totals) / 1e3:.3f} ms, {count} calls")
    return "\n".join([f"{'ms':>10} {'calls':>7}", *lines])


def main(argv: list[str]) -> int:
    parser = common.make_parser(__doc__)
    models = ["gpt2", "resnet50", "resnet50" + CHANNELS_LAST, "llama-953m"] if CUDA else ["gpt2-tiny"]
    parser.add_argument("--models", nargs="+", choices=NAMES, default=models, metavar="MODEL", help=", ".join(NAMES))
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS, help="without those of --options")
    parser.add_argument("--steps", type=int, help="timed steps, rounded up to whole periods; default 20, or 2 periods")
    parser.add_argument("--frequency", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="the top kernels of a plain step and of a refresh")
    common.add_options(parser)
    args = parser.parse_args(argv)
    steps = args.steps or max(20, 2 * args.frequency)
    results = Results("step", args, argv, frequency=args.frequency, steps=steps)
    for model in args.models:
        for name, make in contenders(args):
            if why := why_not(name, model):
                results.note(f"{model}, {name}: skipped, {why}")
                continue
            with results.attempt(f"{model}, {name}"):
                row = measure(make, model, steps, args.profile)
                results.add(model=model, optimizer=name, **row)
                for kind, table in row.get("profile", {}).items():
                    print(f"{kind} step\n{table}", flush=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
