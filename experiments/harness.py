"""Training runs, and a command line that does those of a list which a log does not have yet.

    --runs NAME ...     of the experiment's table (all); shampoo@50 is refreshed every 50 steps, eigh@50 by that root solver
    --options JSON ...  lather with other options, a run for each: '{"root": "eigh"}'
    --lr, --seeds       instead of each recipe's grid, and of seed 0
    --bracket           go on by factors of two until the best of each has worse ones on both sides; from one --lr, uphill
    --best              at the learning rate that the log has as the best of each, at that length or else at the longest
    --looks N           evaluate so often in a run
    --dtype bfloat16    of the parameters, with a log of its own
    --shared            note in the log that the device had other work, so that times mean nothing
    --only REGEX        of those, the ones whose key it is found in
    --list              say which they are, and which are done
    --budget SECONDS    begin no run that would not be done by then, if it takes as long as the last of its optimizer, or of any

Runs append to their log as they go and what is complete in it is not run again, so a command that was cut short is continued by
giving it again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import pathlib
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import machine
from benchmarks.machine import DEVICE, Memory, now, solvers, state_mib
from experiments import log
from experiments.log import Finished, Row, Run
from experiments.recipes import Optimizers, Recipe
from experiments.tasks import Task


def one_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=pathlib.Path, help="where the data are")


class Experiment(NamedTuple):
    name: str  # and that of its log
    doc: str
    task: Callable[[argparse.Namespace], Task]  # from the command line
    tiny: Callable[[], Task]  # for a CPU, from data that are made up
    unit: str  # "steps" or "epochs"
    lengths: tuple[int, ...]  # none: as long as the data are enough for
    recipes: Mapping[str, Recipe]
    base: str  # what --options and eigh@50 vary
    score: str  # what the best learning rate has the least of
    looks: int | None = None  # evaluations in a run, if not as many as the task has
    arguments: Callable[[argparse.ArgumentParser], None] = one_path  # of this experiment alone: where the data are


# One run.


WATCHED = 100  # at most so many steps at the end have their memory looked at, which takes the host a little time


def train(task: Task, run: Run, recipe: Recipe, write: Callable[[Row], None], looks: int | None = None) -> Row:
    """Train, write a row at every look, and return the last: how it ended.

    ``seconds`` are those of the training steps with nothing left to do on the device, without evaluations, and without the
    compilation of the model, which came before. What an optimizer compiles and measures in its first steps is in the first
    look's seconds. ``ms`` is the mean of the steps after that look, or of all if there is one only. Memory is looked at in the
    last steps.
    """
    memory = Memory()
    task.begin(run.seed)
    steps = task.steps(run.length)
    optimizers = recipe.make(task.model, run.lr, **recipe.options, **({"steps": steps} if recipe.told else {}))
    peaks = [(group, group["lr"]) for opt in optimizers for group in opt.param_groups]
    looks = min(steps, looks or task.looks(run.length))
    watch = max(steps * (looks - 1) // looks, steps - WATCHED)
    total, since, seconds, rows = torch.zeros((), device=DEVICE), 0, 0.0, list[Row]()
    end, most, begin = Row(end="complete"), dict[str, float](), now()
    for step in range(1, steps + 1):
        for group, lr in peaks:
            group["lr"] = lr * task.rate(step, steps, recipe.constant)
        loss = task.backward(step)
        if task.clip:
            nn.utils.clip_grad_norm_(task.model.parameters(), task.clip)
        with watched(memory, most) if step > watch else nullcontext():
            for opt in optimizers:
                opt.step()
        for opt in optimizers:
            opt.zero_grad()
        total += loss
        if step * looks // steps > (step - 1) * looks // steps:
            seconds += (now() - begin) / 1e3
            rows.append({"step": step, "seconds": seconds, "train_loss": total.item() / (step - since)})
            with evaluating(task, optimizers):
                rows[-1] |= task.evaluate()
            write(rows[-1])
            if not all(map(math.isfinite, rows[-1].values())):
                end = Row(end="diverged")
                break
            total.zero_()
            since, begin = step, now()
    state = {"state_mib": sum(map(state_mib, optimizers)), "peak_mib": None, "step_peak_mib": None}
    end |= {"steps": steps, "seconds": seconds, "ms": steady_ms(rows), "solvers": solvers(*optimizers)}
    return end | state | most | reached(task, rows)


def reached(task: Task, rows: list[Row]) -> Row:
    """When the task's goal was reached, if it has one."""
    if task.goal is None:
        return {}
    name, value = task.goal
    first = next((row for row in rows if row[name] <= value), {})
    return {"goal_step": first.get("step"), "goal_seconds": first.get("seconds")}


@contextmanager
def evaluating(task: Task, optimizers: Optimizers) -> Iterator[None]:
    """Weights as those want them evaluated that average, and statistics that belong to them."""
    two_modes = [opt for opt in optimizers if hasattr(opt, "eval")]
    for opt in two_modes:
        opt.eval()
    averaged = any(group.get("averaging") for opt in optimizers for group in opt.param_groups)
    with task.settled() if averaged else nullcontext():
        yield
    for opt in two_modes:
        opt.train()


@contextmanager
def watched(memory: Memory, most: dict[str, float]) -> Iterator[None]:
    """Add to ``most`` the largest memory before this, and that within, in MiB above weights and data."""
    for name in ("peak_mib", "step_peak_mib"):
        if (mib := memory.peak()) is not None:
            most[name] = max(mib, most.get(name, 0.0))
        if name == "peak_mib":
            yield


def steady_ms(rows: list[Row]) -> float:
    """Milliseconds of a step after the first look."""
    first = rows[0] if len(rows) > 1 else {"seconds": 0.0, "step": 0}
    return 1e3 * (rows[-1]["seconds"] - first["seconds"]) / (rows[-1]["step"] - first["step"])


# The command line.


def main(experiment: Experiment, argv: list[str]) -> int:
    args = parse(experiment, argv)
    task = None
    if not args.lengths:
        task = load(experiment, args)
        args.lengths = [task.most]
    finished = log.read(args.log)
    wanted, done = list(chosen(experiment, args, finished)), {f.run.key for f in finished}
    print(f"{len(wanted)} runs, {sum(run.key in done for run, _ in wanted)} of them in {args.log}")
    if args.best:
        warn_of_edges(experiment, args, finished)
    if args.list:
        print(*("done  " * (run.key in done) + run.key for run, _ in wanted), sep="\n")
        return 0
    if all(run.key in done for run, _ in wanted):
        return 0
    return perform(experiment, task or load(experiment, args), args)


def load(experiment: Experiment, args: argparse.Namespace) -> Task:
    """The task, if the data are enough and the log is of the same."""
    start = time.perf_counter()
    try:
        task = experiment.tiny() if args.tiny else experiment.task(args)
        task.model.to(getattr(torch, args.dtype))
        task.settings["dtype"] = args.dtype
        for length in args.lengths or [1]:
            task.steps(length)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    for finished in log.read(args.log):
        for name, value in task.settings.items():
            before = finished.end.get(name, value)
            if finished.run.task == experiment.name and before != value:
                raise SystemExit(f"error: {args.log} has runs with {name} {before}, and this is {value}; give another --log")
    print(f"data: {time.perf_counter() - start:.1f} s", flush=True)
    return task


def parse(experiment: Experiment, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{experiment.doc}\n{__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    experiment.arguments(parser)
    parser.add_argument("--runs", nargs="*", metavar="NAME")
    parser.add_argument("--options", nargs="+", type=json.loads, default=[], metavar="JSON")
    parser.add_argument("--lr", nargs="+", type=float)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(f"--{experiment.unit}", dest="lengths", nargs="+", type=int, default=list(experiment.lengths))
    parser.add_argument("--bracket", action="store_true")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--looks", type=int, default=experiment.looks, metavar="N")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--log", type=pathlib.Path, help=f"default: experiments/results/{experiment.name}.jsonl")
    parser.add_argument("--compile-mode", help="of torch.compile, such as reduce-overhead")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the parameters")
    parser.add_argument("--commit", default=os.environ.get("LATHER_COMMIT"), help="for the log; or LATHER_COMMIT")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model and made-up data, for a CPU")
    args = parser.parse_args(argv)
    if args.best and args.bracket:
        parser.error("--bracket looks for the learning rate that --best takes; give one, then the other")
    if not (args.data or args.tiny or (args.list and args.lengths)):
        parser.error("--data says where the data are; --tiny does without")
    other = f"-{args.dtype}" if args.dtype != "float32" else ""
    args.log = args.log or log.RESULTS / f"{experiment.name}{other}{'-tiny' * args.tiny}.jsonl"
    try:
        args.recipes = recipes(experiment, args)
    except ValueError as error:
        parser.error(str(error))
    return args


def recipes(experiment: Experiment, args: argparse.Namespace) -> dict[str, Recipe]:
    """Those that are asked for, by name. What lather refuses is an error, or if it was not asked for by name, left out."""
    named = {name: find(experiment, name) for name in args.runs or ()}
    named |= {spell(options): experiment.recipes[experiment.base].varied(options) for options in args.options}
    for name, recipe in named.items():
        if why := recipe.why_not():
            raise ValueError(f"{name}: {why}")
    if args.runs is not None or args.options:
        return named
    found = {}
    for name, recipe in experiment.recipes.items():
        if why := recipe.why_not():
            print(f"{name} is left out: {why}")
        else:
            found[name] = recipe
    return found


def find(experiment: Experiment, name: str) -> Recipe:
    if name in experiment.recipes:
        return experiment.recipes[name]
    first, at, frequency = name.rpartition("@")
    if not (at and frequency.isdigit()):
        raise ValueError(f"{name} is neither one of {', '.join(experiment.recipes)} nor a root solver such as eigh@50")
    options = {} if first in experiment.recipes else {"root": first}
    recipe = experiment.recipes[experiment.base if options else first]
    return recipe.varied(options | {"precondition_frequency": int(frequency)})


def spell(options: Mapping[str, Any]) -> str:
    """The name of options: `root=eigh,eps=1e-08`."""
    return ",".join(f"{name}={value}" for name, value in options.items())


def chosen(experiment: Experiment, args: argparse.Namespace, finished: list[Finished]) -> Iterator[tuple[Run, Recipe]]:
    for length in args.lengths:
        for name, recipe in args.recipes.items():
            for lr in rates(experiment, args, recipe, [f for f in finished if f.run.optimizer == name], length):
                for seed in args.seeds:
                    run = Run(experiment.name, name, lr, seed, length, experiment.unit)
                    if args.only.search(run.key):
                        yield run, recipe


def rates(experiment: Experiment, args: argparse.Namespace, recipe: Recipe, finished: list[Finished], length: int) -> list[float]:
    """The learning rates that are wanted of an optimizer, as far as its runs tell yet."""
    if args.best:
        rate = log.best_rate(log.of_length(finished, length), experiment.score)
        return [] if rate is None else [rate]
    grid, same = list(args.lr or recipe.rates), [f for f in finished if f.run.length == length]
    if args.bracket and set(grid) <= {f.run.lr for f in same}:
        rate = log.beyond(same, experiment.score)
        if rate is not None and min(grid) / FARTHEST <= rate <= max(grid) * FARTHEST:
            grid.append(rate)
    return grid


FARTHEST = 16  # times beyond its grid that a learning rate is looked for


def warn_of_edges(experiment: Experiment, args: argparse.Namespace, finished: list[Finished]) -> None:
    for length in args.lengths:
        for name in args.recipes:
            same = log.of_length([f for f in finished if f.run.optimizer == name], length)
            if (rate := log.beyond(same, experiment.score)) is not None:
                print(f"{name}: the best may be beyond those that were tried, such as {rate:g}; --bracket looks for it")


def perform(experiment: Experiment, task: Task, args: argparse.Namespace) -> int:
    """Train one after the other. A run that fails is in the log as failed, and will be run again the next time."""
    start, took, failures, begun = time.perf_counter(), dict[str, float](), 0, set[str]()
    torch.set_float32_matmul_precision("high")
    task.compile(args.compile_mode)
    print(f"compilation: {time.perf_counter() - start:.1f} s", flush=True)
    while left := unfinished(experiment, args, begun):
        begin, (run, recipe) = time.perf_counter(), left[0]
        if begin - start + took.get(run.optimizer, max(took.values(), default=0.0)) > args.budget:
            print(f"the budget is used up; {len(left)} runs are left")
            break
        begun.add(run.key)
        end = record(task, run, recipe, args)
        failures += end["end"] == "failed"
        took[run.optimizer] = time.perf_counter() - begin
        print(f"{run.key}: {describe(end)}, {took[run.optimizer]:.1f} s in all", flush=True)
    return min(failures, 1)


def unfinished(experiment: Experiment, args: argparse.Namespace, begun: set[str]) -> list[tuple[Run, Recipe]]:
    """Runs that are neither in the log, whoever put them there, nor begun here."""
    finished = log.read(args.log)
    done = begun | {f.run.key for f in finished}
    return [(run, recipe) for run, recipe in chosen(experiment, args, finished) if run.key not in done]


def record(task: Task, run: Run, recipe: Recipe, args: argparse.Namespace) -> Row:
    """Train with everything in the log; the last row."""
    name = {"run": run.key, "attempt": datetime.datetime.now().isoformat(timespec="milliseconds")}
    last: Row = {}

    def write(row: Row) -> None:
        last.update(row)
        log.append(args.log, name | {key: round(x, 6) if math.isfinite(x) else None for key, x in row.items()})

    try:
        end = train(task, run, recipe, write, args.looks)
    except Exception as error:
        traceback.print_exc()
        end = {"end": "failed", "error": f"{type(error).__name__}: {error}"[:500]}
    settings = task.settings | {"options": recipe.options, "constant": recipe.constant, "tiny": args.tiny}
    about = {"date": datetime.date.today().isoformat(), "device": machine.device(), "versions": machine.versions()}
    about |= {"commit": args.commit, "shared": args.shared}
    log.append(args.log, name | run._asdict() | end | settings | about)
    return last | end


def describe(end: Row) -> str:
    numbers = ("train_loss", "valid_loss", "train_error", "valid_error", "bits", "ms", "seconds", "state_mib")
    shown = [f"{name} {end[name]:.4g}" for name in (*numbers, "goal_step", "goal_seconds") if end.get(name) is not None]
    return ", ".join([end["end"], *shown, *([end["error"]] if "error" in end else [])])
