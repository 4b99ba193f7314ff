"""The command line: ``lather demo``, ``lather plan``, ``lather options`` and ``lather --version``."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ._version import __version__
from .options import OPTIONS, markdown
from .report import models as shapes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; arguments that make no sense exit with 2 and a message."""
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    try:
        if unknown:
            refuse(unknown[0], OPTIONS if args.run is run_plan else ())
        print(args.run(args))
    except UserError as error:
        print(f"lather: {error}", file=sys.stderr)
        return 2
    return 0


class UserError(Exception):
    """What the user can put right; shown without a traceback."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lather", description="Distributed Shampoo for PyTorch.")
    parser.add_argument("--version", action="version", version=f"lather {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="lather, AdamW and SGD on scikit-learn's digits: a table and a plot")
    demo.set_defaults(run=run_demo)
    demo.add_argument("--seed", type=whole, default=0, help="of initial weights and batches (default %(default)s)")
    demo.add_argument("--epochs", type=positive, default=15, help="of every run (default %(default)s)")
    demo.add_argument("--repeats", type=positive, default=3, help="runs per optimizer, with seeds from --seed on (default 3)")
    demo.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo.png (default %(default)s)")
    demo.add_argument("--sweep", action="store_true", help="instead: validation loss over the grid of learning rates")

    plan = commands.add_parser(
        "plan",
        help="what would be preconditioned, its memory and work, from shapes alone",
        usage="lather plan MODEL_OR_SHAPES [--ranks N,N,... --shard LAYOUT] [--json] [--OPTION VALUE ...]",
        allow_abbrev=False,
    )
    plan.set_defaults(run=run_plan)
    plan.add_argument(
        "shapes",
        type=parse_shapes,
        metavar="MODEL_OR_SHAPES",
        help=f'one of {", ".join(shapes.MODELS)}, or shapes such as "w=64x32,b=64"',
    )
    plan.add_argument("--ranks", type=parse_counts, metavar="N,N,...", help="a line for each number of ranks")
    plan.add_argument(
        "--shard", default="ddp", metavar="LAYOUT", help="how parameters lie over them: ddp (default), fsdp, hsdp=K, tp=K"
    )
    plan.add_argument(
        "--group", "--num-trainers-per-group", type=positive, metavar="N", help="ranks that share the work (default: all)"
    )
    plan.add_argument("--stages", type=positive, default=1, help="default %(default)s")
    plan.add_argument("--dtype", default="float32", help="of the parameters (default %(default)s)")
    plan.add_argument("--device", default="cuda", help="where they are, which decides on root solvers (default %(default)s)")
    plan.add_argument("--json", action="store_true", help="as JSON")
    more = plan.add_argument_group("options of lather.Shampoo", "as docs/options.md explains them; unset, their defaults")
    for name, option in OPTIONS.items():
        text = option.text.replace("`", "").replace("%", "%%")
        more.add_argument(flag(name), type=parse_value, default=argparse.SUPPRESS, metavar="VALUE", help=text)

    options = commands.add_parser("options", help="every option of lather.Shampoo, as Markdown")
    options.set_defaults(run=run_options)
    return parser


def run_demo(args: argparse.Namespace) -> str:
    from . import demo

    try:
        if args.sweep:
            return demo.sweep(args.seed, args.epochs, args.repeats)
        return demo.demo(args.seed, args.epochs, args.repeats, args.out)
    except (demo.MissingExtra, OSError) as error:
        raise UserError(error) from error


def run_plan(args: argparse.Namespace) -> str:
    from .report.plan import PlanReport, plan, scale_table

    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    given |= {"dtype": args.dtype, "device": args.device, "num_trainers_per_group": args.group, "stages": args.stages}

    def report(ranks: int) -> PlanReport:
        return plan(args.shapes, ranks=ranks, shard=args.shard, **given)

    try:
        if args.ranks is None:
            whole = report(1)
            return json.dumps(whole.to_dict(), indent=2) if args.json else str(whole)
        rows = {ranks: report(ranks).teams[0] for ranks in args.ranks}
    except ValueError as error:
        raise UserError(error) from error
    if args.json:
        return json.dumps([{"ranks": ranks, **row.to_dict()} for ranks, row in rows.items()], indent=2)
    return f"{shapes.num_params(args.shapes):,} parameters in {len(args.shapes)} tensors, {args.shard}\n\n{scale_table(rows)}"


def run_options(args: argparse.Namespace) -> str:
    return markdown()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse(unknown: str, names: Iterable[str]) -> None:
    """An argument that nobody knows, beside options of these names."""
    guess = difflib.get_close_matches(unknown.partition("=")[0], map(flag, names), n=1, cutoff=0.75)
    hint = f"did you mean {guess[0]}?" if guess else "--help lists what there is"
    raise UserError(f"unknown argument {unknown!r}; {hint}")


def whole(text: str, low: int = 0) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if number < low:
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is not a whole number of at least {low}")
    return number


def positive(text: str) -> int:
    return whole(text, 1)


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
    except (ValueError, SyntaxError):
        return text


def parse_counts(text: str) -> list[int]:
    """
    >>> parse_counts("8,64")
    [8, 64]
    """
    return [positive(item) for item in text.split(",")]


def parse_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """
    >>> parse_shapes("w=64x32, b=64")
    {'w': (64, 32), 'b': (64,)}
    """
    if text in shapes.MODELS:
        return shapes.MODELS[text]()
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a shape such as w=64x32 nor one of {', '.join(shapes.MODELS)}")
    found: dict[str, tuple[int, ...]] = {}
    for item in text.split(","):
        name, equals, dims = item.strip().partition("=")
        if not name or not equals or name in found:
            raise argparse.ArgumentTypeError(f"{item.strip()!r} is not a new name with a shape, such as w=64x32")
        try:
            found[name] = tuple(whole(dim) for dim in dims.split("x"))
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"{dims!r} is not a shape, such as 64x32") from None
    return found
