"""What the benchmarks share: arguments, clocks, schedules, and results that are on disk as soon as they are known."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import pathlib
import shlex
import statistics
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import machine
import report
import torch
from machine import CUDA, DEVICE, now

import lather
from lather.planning.schedule import is_due
from lather.settings import Settings, resolve

# Arguments.


def make_parser(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench_out"), help="folder, or a .json file")
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    text = """lather with other options, a row for each JSON: '{"root": "eigh"}'"""
    parser.add_argument("--options", nargs="+", type=argument(read_options), default=[], metavar="JSON", help=text)


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of argparse that says why it refuses."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return reader


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Options of lather.Shampoo; what it would refuse is refused before anything was measured."""
    lather.Shampoo([torch.zeros(2, 2, requires_grad=True)], **options)
    return options


def read_options(text: str) -> dict[str, Any]:
    return checked(json.loads(text))


def spell(options: dict[str, Any]) -> str:
    """The name of a row: `lather root=eigh`."""
    return " ".join(["lather", *(f"{name}={value}" for name, value in options.items())])


# Optimizers and when they refresh.


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **options)


def shampoo(params: Any, frequency: int, options: dict[str, Any]) -> lather.Shampoo:
    """With its defaults, but without their frequent refreshes at first: what is measured is a steady state."""
    return lather.Shampoo(params, **{"lr": 1e-4, "refresh_warmup": 0.0, "precondition_frequency": frequency} | options)


class Schedule(NamedTuple):
    """Which steps, counted from 1, refresh roots. The optimizers of torch never do, nor does Muon."""

    start: int = 4
    frequency: int = 1
    refresh: str = "never"  # or "together", "staggered"
    settings: Settings | None = None

    @classmethod
    def of(cls, opt: torch.optim.Optimizer) -> Schedule:
        groups = [resolve(group) for group in opt.param_groups] if isinstance(opt, lather.Shampoo) else []
        if not any(settings.method and settings.method.refreshes for settings in groups):
            return cls()
        settings = groups[0]
        refresh = "staggered" if settings.staggered else "together"
        return cls(int(settings.first_refresh), settings.frequency, refresh, settings)

    @property
    def warmup(self) -> int:
        """Steps until every block was refreshed twice: the second time kernels are captured in graphs."""
        return self.start + 2 * self.frequency

    def whole(self, steps: int) -> int:
        """At least so many steps, in whole periods."""
        return -(-steps // self.frequency) * self.frequency

    def refreshes(self, t: int) -> bool:
        if self.refresh == "staggered":
            return t >= self.start
        return self.settings is not None and self.refresh == "together" and is_due(t, self.settings)

    def first(self, times: list[float]) -> float | None:
        """The time of the first refresh, given those of all steps; staggered, the worst step with a part of it."""
        steps = {"never": 0, "together": 1, "staggered": self.frequency}[self.refresh]
        return max(times[self.start - 1 :][:steps], default=None)


# Clocks.


def time_ms(call: Callable[[], Any], repeats: int = 3) -> float:
    """Median time of a call, by CUDA events where there are any."""
    times = []
    for _ in range(repeats):
        if CUDA:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            start = now()
            call()
            times.append(now() - start)
    return statistics.median(times)


def summary(times: list[float]) -> dict[str, Any]:
    return {"mean_ms": statistics.mean(times), "median_ms": statistics.median(times), "worst_ms": max(times), "step_ms": times}


# Results.


class Results:
    """One run. Every row rewrites the JSON and its Markdown, so a run that is cut short leaves what it has."""

    def __init__(self, kind: str, args: argparse.Namespace, argv: list[str], **settings: Any) -> None:
        torch.set_float32_matmul_precision("high")  # for everyone
        self.data = environment(kind, argv) | {"settings": settings, "notes": [], "results": []}
        stem = f"{kind}-{self.data['date']}-{DEVICE}.json"
        self.path = args.out if args.out.suffix == ".json" else args.out / stem
        self.failures = 0

    def add(self, **row: Any) -> None:
        self.data["results"].append(row)
        print(report.line(self.data["kind"], row), flush=True)
        self._save()

    def note(self, text: str) -> None:
        self.data["notes"].append(text)
        print(text, flush=True)
        self._save()

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What fails inside becomes a note, and the run goes on with the next row."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failures += 1
            self.note(f"{name} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    def finish(self) -> int:
        """The exit status."""
        self._save()
        print(f"\n{report.markdown(self.data)}\nwritten to {self.path} and {self.path.with_suffix('.md')}")
        return min(self.failures, 1)

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")
        report.write(self.path, self.path.parent)


def environment(kind: str, argv: list[str]) -> dict[str, Any]:
    # Of a path the name says enough.
    words = [pathlib.Path(word).name if word.startswith("/") else word for word in argv]
    return {
        "kind": kind,
        "command": shlex.join(["python", f"benchmarks/{kind}.py", *words]),
        "date": datetime.date.today().isoformat(),
        "device": machine.device(),
        "versions": machine.versions(),
    }
