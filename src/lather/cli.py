"""The command line: ``lather demo``, ``lather plan``, ``lather options`` and ``lather --version``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; arguments that make no sense exit with 2 and a message."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
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
    demo.add_argument(
        "--repeats", type=positive, default=3, help="runs per optimizer, with seeds from --seed on (default 3)"
    )
    demo.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo.png (default %(default)s)")
    demo.add_argument("--sweep", action="store_true", help="instead: validation loss over the grid of learning rates")

    plan = commands.add_parser("plan", help="what would be preconditioned, its memory and work, from shapes alone")
    plan.set_defaults(run=run_plan)
    plan.add_argument(
        "--shapes", type=parse_shapes, required=True, metavar="NAME=DxD,...", help='such as "w=64x32,b=64"'
    )
    plan.add_argument("--max-preconditioner-dim", type=float, default=1024, metavar="N", help="default %(default)s")
    plan.add_argument("--json", action="store_true", help="as JSON")

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
    from .plan_report import plan

    try:
        report = plan(args.shapes, max_preconditioner_dim=args.max_preconditioner_dim)
    except ValueError as error:
        raise UserError(error) from error
    return json.dumps(report.to_dict(), indent=2) if args.json else str(report)


def run_options(args: argparse.Namespace) -> str:
    from .options import markdown

    return markdown()


def whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def positive(text: str) -> int:
    if not whole(text):
        raise ValueError
    return int(text)


def parse_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """
    >>> parse_shapes("w=64x32, b=64")
    {'w': (64, 32), 'b': (64,)}
    """
    shapes = {}
    for item in text.split(","):
        name, equals, dims = item.strip().partition("=")
        if not name or not equals or name in shapes:
            raise argparse.ArgumentTypeError(f"{item.strip()!r} is not a new name with a shape, such as w=64x32")
        try:
            shapes[name] = tuple(whole(dim) for dim in dims.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{dims!r} is not a shape, such as 64x32") from None
    return shapes
