"""One rank's share of the work at 8 to 4096 ranks, on one device, with a process group that moves nothing.

    python benchmarks/scale.py [--models llama-8b llama-70b] [--layouts fsdp hsdp tp ddp] [--ranks 8 64 512 4096] [--budget 240]
    python benchmarks/scale.py --plot benchmarks/results/scale-DATE-DEVICE.json [--image docs/images/scale.png]

The rank is the one with the most work by the plan. It stores its own shard only, packs and unpacks every message, and computes
its blocks. Collectives are counted and not carried out: what arrives in the first step is what this rank sends, and stays. So
the numbers in a step mean nothing, and its operations are those of training. *Kernels* is the time that they take on the device,
without the host's gaps. Wire time is not measured: it is the larger of the bytes sent and received over a bandwidth, that inside
a host for at most `--inside` ranks and else that of the network. Nothing of it overlaps.

HSDP copies what is sharded over `--inside` ranks. TP splits the second dimension over as many, and the first over the others.
Models are routed, as in `lather.Shampoo(model)`. There is one set of random gradients. Memory is above weights and gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import common
import torch
import torch.distributed as dist
from common import Results, Schedule
from machine import CUDA, DEVICE, MIB, Memory, now
from report import scale_rows
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import lather
from lather.planning.layouts import layout_named
from lather.planning.plan import Plan, mean_flops
from lather.report.models import MODELS, load, shapes_of
from lather.report.plan import PlanReport, on_paper
from lather.runtime.ranks import ABSENT

LAYOUTS = ("fsdp", "hsdp", "tp", "ddp")
WORKERS = 8  # processes that plan while the device works
SPARE = 4096  # MiB of the device that a refresh, graphs and libraries may need
PANELS: dict[str, dict[str, str]] = {  # what is drawn over the number of ranks, and how
    "C(N), largest work over mean": {"c_n": "o-"},
    "ms per step: measured (o), kernels (+),\nwire (dots), 1/N (dashes)": {
        "mean_ms": "o-",
        "kernels_ms": "+-",
        "wire_ms": ":",
        "ideal_ms": "--",
    },
    "GiB per rank: measured (o), plan (dashes)": {"held_gib": "o", "plan_gib": "--"},
}
COLORS = dict(zip(LAYOUTS, ("#0072b2", "#e69f00", "#cc79a7", "#7a7a7a"), strict=True))


class Case(NamedTuple):
    model: str
    layout: str
    ranks: int
    inside: int  # ranks of a host
    dtype: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.ranks} ranks"

    @property
    def shard(self) -> str:
        """The layout as the plan spells it."""
        return f"{self.layout}={self.inside}" if self.layout in ("hsdp", "tp") else self.layout

    def shape(self) -> tuple[int, ...]:
        """Of the mesh."""
        return (self.ranks // self.inside, self.inside) if "=" in self.shard else (self.ranks,)

    def placements(self, dims: int) -> list[Any]:
        """Of a parameter on the mesh, for a number of dimensions."""
        ways = {"fsdp": [0], "hsdp": [None, 0], "tp": [0, 1 if dims > 1 else None]}
        return [Replicate() if dim is None else Shard(dim) for dim in ways[self.layout]]

    def part(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of what a rank stores of a tensor."""
        return layout_named(self.shard, self.ranks, len(shape)).region(tuple(shape), rank).shape


# On paper.


def paper(case: Case) -> dict[str, Any]:
    """What the plan says about the rank with the most work."""
    plan, rules = on_paper(load(case.model), DEVICE, case.dtype, case.ranks, case.shard, **case.options)
    work = [work_of(plan, place) for place in range(case.ranks)]
    rank = work.index(max(work))
    report = PlanReport(plan, [rank], rules)
    team = report.teams[0]
    stored = sum(torch.Size(case.part(shape, rank)).numel() for shape in shapes_of(load(case.model)).values())
    return {
        "rank": rank,
        "blocks": len(plan.blocks),
        "own_blocks": sum(map(len, plan.banks(0, rank).values())),
        "c_n": team.imbalance,
        "work_flop": team.work_max,
        "work_all_flop": team.work_mean * team.trainers,
        "weights_mib": stored * getattr(torch, case.dtype).itemsize / MIB,
        "plan_state_mib": team.state_bytes / MIB,
        "plan_buffers_mib": team.buffer_bytes / MIB,
        "plan_scratch_mib": team.scratch_bytes / MIB,
        "plan_received": team.inbound_bytes + team.outbound_bytes,
        "padding": team.padding,
        "solvers": sorted({solver for bank in report.banks for solver in bank.solvers}),
    }


def work_of(plan: Plan, place: int) -> float:
    """FLOP per step of a place, with refreshes spread over their period."""
    banks = plan.banks(0, place).items()
    return sum(len(ns) * mean_flops(plan.blocks[ns[0]], plan.settings[key.group], key.device) for key, ns in banks)


def papers(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """The plans of all cases, in their order; beside a GPU by other processes, so that it does not wait."""
    if not CUDA:
        yield from map(paper, cases)
        return
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(paper, cases)


def needs_mib(found: dict[str, Any]) -> float:
    """Weights, gradients, and what the plan knows of."""
    return 2 * found["weights_mib"] + sum(found[f"plan_{kind}_mib"] for kind in ("state", "buffers", "scratch"))


def room_mib() -> float:
    """Of the device. A CPU is only given what is tiny."""
    return torch.cuda.get_device_properties(0).total_memory / MIB if CUDA else math.inf


# A process group that moves nothing.


class Done:
    def wait(self) -> None:
        pass


class Wire:
    """Replaces torch's collectives: counts bytes from and to other ranks, and moves nothing."""

    def __init__(self) -> None:
        self.bytes = Counter[str]()
        self._filled: set[int] = set()

    def all_to_all(self, received: Tensor, sent: Tensor, into: list[int], out: list[int], group: Any, async_op: bool) -> Done:
        me, size = dist.get_rank(group), sent.element_size()
        self._count(received.nbytes - size * into[me], sent.nbytes - size * out[me], received, sent)
        return Done()

    def all_gather(self, received: Tensor, sent: Tensor, group: Any, async_op: bool) -> Done:
        """By a ring, in which a rank passes on as much as it receives."""
        others = received.nbytes - sent.nbytes
        self._count(others, others, received, sent)
        return Done()

    def all_reduce(self, values: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        """The others agree, also about what this rank has no part in."""
        self.bytes["vote"] += values.nbytes
        if values.is_cpu:
            values[values == ABSENT] = 0

    def _count(self, received: int, sent: int, target: Tensor, source: Tensor) -> None:
        self.bytes.update(received=received, sent=sent)
        if target.data_ptr() not in self._filled and source.numel():  # numbers, because a device multiplies zeros faster
            self._filled.add(target.data_ptr())
            for some in target.split(source.numel()):
                some.copy_(source[: some.numel()])

    @contextlib.contextmanager
    def world(self, rank: int, ranks: int) -> Iterator[None]:
        gathers = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
        ours = {"all_to_all_single": self.all_to_all, "all_reduce": self.all_reduce} | dict.fromkeys(gathers, self.all_gather)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            with mock.patch.multiple(dist, **ours):
                yield
        finally:
            dist.destroy_process_group()


def stored_model(case: Case, rank: int) -> nn.Module:
    """The model with this rank's part of every parameter and gradient, of random numbers."""
    model, generator = load(case.model), torch.Generator(DEVICE).manual_seed(0)
    assert isinstance(model, nn.Module)
    mesh = None if case.layout == "ddp" else init_device_mesh(DEVICE, case.shape())
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is there twice
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p not in made:
                part, dtype = case.part(p.shape, rank), getattr(torch, case.dtype)
                draw = [torch.empty(part, dtype=dtype, device=DEVICE).normal_(0, s, generator=generator) for s in (0.02, 0.01)]
                weight, grad = (x if mesh is None else spread(x, p, mesh, case) for x in draw)
                made[p] = nn.Parameter(weight)
                made[p].grad = grad
            module.register_parameter(name, made[p])
    return model


def spread(part: Tensor, whole: Tensor, mesh: DeviceMesh, case: Case) -> DTensor:
    """A rank's part as a DTensor of the whole's shape."""
    places = case.placements(whole.dim())
    return DTensor.from_local(part, mesh, places, run_check=False, shape=whole.shape, stride=whole.stride())


# Measuring.


def measure(case: Case, rank: int, frequency: int) -> dict[str, Any]:
    wire = Wire()
    with wire.world(rank, case.ranks):
        model, start = stored_model(case, rank), time.perf_counter()
        memory = Memory()
        opt = common.shampoo(model, frequency, case.options)
        schedule = Schedule.of(opt)
        opt.step()
        first_s = time.perf_counter() - start
        for _ in range(1, schedule.warmup):
            opt.step()
        memory.peak()
        wire.bytes.clear()
        steps = [timed(opt) for _ in range(frequency)]
        peak, numbers = memory.peak(), range(schedule.warmup + 1, schedule.warmup + 1 + frequency)
        plain = [times for t, times in zip(numbers, steps, strict=True) if not schedule.refreshes(t)]
        counted = {name: wire.bytes[name] // frequency for name in ("received", "sent", "vote")}
        return (
            common.summary([ms for ms, _ in steps])
            | {
                "plain_ms": statistics.median(ms for ms, _ in plain),
                "plain_host_ms": statistics.median(host for _, host in plain),
                "kernels_ms": kernels_ms(opt, frequency),
                "first_s": first_s,
                "held_mib": memory.held(),
                "peak_mib": peak,
                "health": opt.health(),
            }
            | counted
        )


def timed(opt: lather.Shampoo) -> tuple[float, float]:
    """Milliseconds of a step, by CUDA events where there are any, and until the host has launched it."""
    launched = 0.0

    def step() -> None:
        nonlocal launched
        start = time.perf_counter()
        opt.step()
        launched = 1e3 * (time.perf_counter() - start)

    return common.time_ms(step, repeats=1), launched


def kernels_ms(opt: lather.Shampoo, frequency: int) -> float | None:
    """Milliseconds on the device per step, over a period: of kernels and copies, added up."""
    if not CUDA:
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(frequency):
            opt.step()
        now()
    kernels = (event for event in prof.key_averages() if not event.key.startswith("Optimizer."))  # torch marks a whole step
    return sum(event.self_device_time_total for event in kernels) / 1e3 / frequency


def row_of(case: Case, found: dict[str, Any], frequency: int, bandwidth: tuple[float, float]) -> dict[str, Any]:
    """A row of the table. What does not fit on the device is not tried."""
    row = {"model": case.model, "layout": case.layout, "ranks": case.ranks, **found, "fits": True}
    if needs_mib(found) + SPARE > room_mib():
        return row | {"fits": False}
    row |= measure(case, found["rank"], frequency)
    return row | {"wire_ms": max(row["received"], row["sent"]) / bandwidth[case.ranks > case.inside] / 1e6}


# Drawing.


def draw(path: pathlib.Path, image: pathlib.Path) -> None:
    """For every model: C(N), milliseconds and memory over the number of ranks."""
    from matplotlib.figure import Figure  # without pyplot: no global state

    rows = scale_rows(json.loads(path.read_text())["results"])
    models, ticks = list(dict.fromkeys(row["model"] for row in rows)), sorted({row["ranks"] for row in rows})
    fig = Figure(figsize=(12, 3.6 * len(models)), dpi=150, layout="constrained")
    for model, axes in zip(models, fig.subplots(len(models), len(PANELS), squeeze=False), strict=True):
        for panel, (title, lines) in zip(axes, PANELS.items(), strict=True):
            for layout, color in COLORS.items():
                mine = [row for row in rows if (row["model"], row["layout"]) == (model, layout)]
                for key, style in lines.items():
                    dots = [(row["ranks"], row[key]) for row in mine if row.get(key) is not None]
                    if dots:
                        panel.plot(*zip(*dots, strict=True), style, color=color, label=layout, linewidth=1.2, markersize=4)
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, ticks)
            panel.set(xlabel="ranks", title=f"{model}: {title}", yscale="linear" if "c_n" in lines else "log")
            panel.title.set_fontsize("small")
            panel.grid(alpha=0.3, linewidth=0.5)
    labels = {text: handle for handle, text in zip(*axes[0].get_legend_handles_labels(), strict=True)}
    fig.legend(labels.values(), labels.keys(), frameon=False, fontsize="small", loc="outside right center")
    image.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(image)
    print(image)


def make_parser() -> argparse.ArgumentParser:
    parser = common.make_parser(__doc__)
    names = [*MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=["llama-8b", "llama-70b"], metavar="MODEL")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128, 512, 4096], help="world sizes")
    parser.add_argument("--inside", type=int, default=8, help="ranks of a host")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and gradients")
    parser.add_argument("--frequency", type=int, default=10)
    parser.add_argument("--bandwidth", nargs=2, type=float, default=[450.0, 50.0], metavar=("INSIDE", "NETWORK"), help="GB/s")
    parser.add_argument("--option", type=common.argument(common.read_options), default={}, metavar="JSON", help="of lather.Shampoo")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no row that may end later")
    parser.add_argument("--tiny", action="store_true", help="a small model on a few ranks, for a CPU")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.json", help="draw a result, and measure nothing")
    parser.add_argument("--image", type=pathlib.Path, default=pathlib.Path("docs/images/scale.png"))
    return parser


def main(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.plot:
        draw(args.plot, args.image)
        return 0
    if args.tiny:
        args.models, args.ranks, args.inside, args.frequency = ["gpt2-tiny"], [2, 4], 2, 2
        args.option = {"max_preconditioner_dim": 64} | args.option
    if wrong := [n for n in args.ranks if n % args.inside]:
        parser.error(f"--ranks {wrong[0]} is not a multiple of --inside {args.inside}")
    return run(args, argv)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Layout by layout, so that a run that is cut short has whole lines of the plot."""
    begin, longest = time.perf_counter(), Counter[str]()  # seconds of a row, by model
    options = {"refresh_warmup": 0.0, "precondition_frequency": args.frequency} | args.option
    grid = product(args.layouts, args.models, sorted(args.ranks))
    cases = [Case(model, layout, n, args.inside, args.dtype, options) for layout, model, n in grid]
    inside, network = args.bandwidth
    settings = {"frequency": args.frequency, "weights and gradients": args.dtype, "ranks of a host": args.inside}
    results = Results("scale", args, argv, **settings, **{"GB/s inside a host": inside, "GB/s between hosts": network})
    left = []
    with contextlib.closing(papers(cases)) as found:
        for case, numbers in zip(cases, found, strict=False):
            start = time.perf_counter()
            if start - begin + longest[case.model] > args.budget:
                left.append(str(case))
                continue
            with results.attempt(str(case)):
                results.add(**row_of(case, numbers, args.frequency, (inside, network)))
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
            longest[case.model] = max(longest[case.model], time.perf_counter() - start)
    if left:
        results.note(f"no time was left for {'; '.join(left)}")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
