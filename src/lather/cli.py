"""The command line: ``lather demo``, ``plan``, ``tune``, ``view``, ``options`` and ``--version``."""

import argparse
import ast
import json
import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ._version import __version__
from .options import OF_OTHERS, OF_PRESETS, OPTIONS, markdown, nearest, plain
from .report.models import MODELS, load, num_params

MOST_LINES = 32  # numbers of ranks in one table: a plan is made for each


class UserError(Exception):
    """A mistake of the user, shown without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2, with a message, for a mistake of the user, and 130 for Ctrl-C."""
    args, unknown = make_parser().parse_known_args(argv)
    try:
        if unknown:
            guess = _meant(unknown[0]) if hasattr(args, "model") else None
            hint = f"did you mean {guess}?" if guess else "--help lists all arguments"
            raise UserError(f"unknown argument {unknown[0]!r}; {hint}")
        print(args.run(args))
    except UserError as error:
        print(f"lather: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nlather: stopped", file=sys.stderr)
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lather", description="Distributed Shampoo for PyTorch.")
    parser.add_argument("--version", action="version", version=f"lather {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="lather, AdamW and SGD on scikit-learn's digits: a table and a plot")
    demo.set_defaults(run=run_demo)
    demo.add_argument("--seed", type=whole, default=0, help="of initial weights and batches (default %(default)s)")
    demo.add_argument("--epochs", type=positive, default=15, help="of every run (default %(default)s)")
    demo.add_argument("--repeats", type=positive, default=3, help="runs per optimizer, each with the next seed (default 3)")
    demo.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo.png (default %(default)s)")
    demo.add_argument("--monitor", action="store_true", help="also a page about lather's first run, run.html")
    demo.add_argument("--sweep", action="store_true", help="instead: steps to the target over the grid of learning rates")

    usage = "lather plan MODEL [--preset NAME] [--ranks N,N,... --shard LAYOUT] [--json] [--OPTION VALUE ...]"
    about = "what would be preconditioned, its memory and work, without the model's memory"
    plan = commands.add_parser("plan", help=about, usage=usage, allow_abbrev=False)
    plan.set_defaults(run=run_plan)
    add_model(plan)
    plan.add_argument("--ranks", type=parse_counts, metavar="N,N,...", help="numbers of ranks: one line for each")
    size = "number of ranks that share the work (default: all)"
    plan.add_argument("--group", "--num-trainers-per-group", type=positive, metavar="N", help=size)
    plan.add_argument("--stages", type=positive, default=None, help="by default the plan chooses")
    plan.add_argument("--dtype", help="of the parameters (default: the model's own; float32 for shapes)")
    plan.add_argument("--device", default="cuda", help="of the parameters; decides on root solvers (default %(default)s)")
    add_options(plan)

    usage = "lather tune MODEL [--memory 40GB] [--step-ms 70] [--overhead 10%%] [--forward-backward-ms 60] [--OPTION VALUE ...]"
    about = "times options on this device, and recommends some that keep budgets of memory and time"
    tune = commands.add_parser("tune", help=about, usage=usage, allow_abbrev=False)
    tune.set_defaults(run=run_tune)
    add_model(tune)
    tune.add_argument("--memory", metavar="SIZE", help="budget of the optimizer, such as 40GB, 40GiB or 512MB")
    largest = "budget of the largest training step: forward, backward and optimizer"
    tune.add_argument("--step-ms", type=float, metavar="MS", help=largest)
    added = "budget of what the optimizer adds to forward and backward on average, such as 10%% or 0.1"
    tune.add_argument("--overhead", metavar="PART", help=added)
    known = "time of forward and backward (default: what --step-ms and --overhead leave)"
    tune.add_argument("--forward-backward-ms", type=float, dest="forward_backward", metavar="MS", help=known)
    tune.add_argument("--ranks", type=parse_counts, default=[], metavar="N,N,...", help="numbers of ranks to estimate for")
    tune.add_argument("--device", help="to time on (default: cuda if there is one, or else cpu)")
    tune.add_argument("--seconds", type=float, default=120.0, help="of search (default %(default)s)")
    add_options(tune)

    view = commands.add_parser("view", help="plots of a run, from the log of a monitor: one HTML page")
    view.set_defaults(run=run_view)
    view.add_argument("log", type=Path, metavar="RUN.JSONL", help="written by lather.Monitor: one JSON record per line")
    view.add_argument("--out", type=Path, metavar="RUN.HTML", help="the page (default: next to the log)")

    options = commands.add_parser("options", help="every option of lather.Shampoo, as Markdown")
    options.set_defaults(run=lambda args: markdown())
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    models = (
        f"one of {', '.join(MODELS)}; a function that returns a model, as module:function; a folder with a config.json of "
        'transformers; or shapes such as "w=64x32,b=64", all treated the same'
    )
    parser.add_argument("model", metavar="MODEL", help=models)
    preset = "function of lather that makes the optimizer, such as from_adamw (default %(default)s)"
    parser.add_argument("--preset", default="Shampoo", metavar="NAME", help=preset)
    layouts = "how ranks store the parameters: ddp (default), fsdp, hsdp=K, tp=K"
    parser.add_argument("--shard", default="ddp", metavar="LAYOUT", help=layouts)
    parser.add_argument("--json", action="store_true", help="as JSON")


def add_options(parser: argparse.ArgumentParser) -> None:
    more = parser.add_argument_group("options of lather.Shampoo", "explained in docs/options.md")
    for name, option in OPTIONS.items():
        text = plain(option.text).replace("%", "%%")
        more.add_argument(_flag(name), type=parse_value, default=argparse.SUPPRESS, metavar="VALUE", help=text)


def run_demo(args: argparse.Namespace) -> str:
    from . import demo

    try:
        if args.sweep:
            return demo.sweep(args.seed, args.epochs, args.repeats)
        return demo.demo(args.seed, args.epochs, args.repeats, args.out, args.monitor)
    except (demo.MissingExtra, OSError) as error:
        raise UserError(error) from error


def run_plan(args: argparse.Namespace) -> str:
    from .report.plan import plan, scale_table

    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    given |= {name: getattr(args, name) for name in ("preset", "shard", "dtype", "device", "stages")}
    try:
        model = load(args.model)
        reports = [plan(model, ranks=n, num_trainers_per_group=args.group, **given) for n in args.ranks or [1]]
    except (ValueError, TypeError) as error:
        raise UserError(error) from error
    if args.ranks is None:
        return json.dumps(reports[0].to_dict(), indent=2) if args.json else str(reports[0])
    if args.json:
        rows = zip(args.ranks, reports, strict=True)
        return json.dumps([{"ranks": n, **report.to_dict()["teams"][0]} for n, report in rows], indent=2)
    shapes = {row.name: row.shape for row in reports[0].params}
    title = f"{num_params(shapes):,} parameters in {len(shapes)} tensors, {args.shard}"
    return f"{title}\n\n{scale_table(args.ranks, [report.teams[0] for report in reports])}"


def run_tune(args: argparse.Namespace) -> str:
    from .report.tune import tune

    names = (*OPTIONS, "memory", "step_ms", "overhead", "forward_backward", "ranks", "shard", "device", "preset", "seconds")
    try:
        report = tune(load(args.model), **{name: value for name, value in vars(args).items() if name in names})
    except (ValueError, TypeError) as error:
        raise UserError(error) from error
    return json.dumps(report.to_dict(), indent=2) if args.json else str(report)


def run_view(args: argparse.Namespace) -> str:
    from .report.view import view

    try:
        return view(args.log, args.out)
    except OSError as error:
        raise UserError(f"{error.filename or args.log}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(error) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _meant(flag: str) -> str | None:
    """The flag of an option that was probably meant."""
    name = flag.partition("=")[0].strip("-").replace("-", "_")
    instead = (OF_PRESETS | OF_OTHERS).get(name)
    found = instead.split()[0] if instead else nearest(name, OPTIONS, 0.75)
    return _flag(found) if found else None


def whole(text: str, low: int = 0) -> int:
    digits = text.strip()
    if not (digits.isdecimal() and len(digits) < 19 and int(digits) >= low):
        limit = " with at most 18 digits" if digits.isdecimal() and len(digits) > 18 else ""
        raise ArgumentTypeError(f"{digits!r} is not a whole number of at least {low}{limit}")
    return int(digits)


positive = partial(whole, low=1)


def parse_value(text: str) -> Any:
    """The value of an option, as in Python; what is not Python is a name.

    >>> [parse_value(text) for text in ("packed", "0.9,0.95", "{2: 0.5}", "inf", "none", "newton(iterations=9)")]
    ['packed', (0.9, 0.95), {2: 0.5}, inf, None, 'newton(iterations=9)']
    """
    words = {"none": None, "true": True, "false": False, "inf": math.inf}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # the last two if it is nested too deep
        return text


def parse_counts(text: str) -> list[int]:
    counts = [positive(item) for item in text.split(",")]
    if len(counts) > MOST_LINES:
        raise ArgumentTypeError(f"{len(counts)} numbers; give at most {MOST_LINES}")
    return counts
