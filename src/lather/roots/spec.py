"""Solvers as strings, for places that hold only primitives: `"newton(iterations=20)"`, `"polar_express(steps=6)"`."""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch

from .auto import Choices, choose, chosen
from .base import EigenSolver, RootSolver
from .eigh import Eigh
from .higher_order import HigherOrder
from .minimax import Minimax
from .newton import Newton
from .polar import NewtonSchulz, Polar, PolarExpress, Svd
from .qr import Qr
from .track import Track

SOLVERS: dict[str, type[RootSolver]] = {s.name: s for s in (Eigh, Newton, HigherOrder, Minimax, Qr, Track)}
POLARS: dict[str, type[Polar]] = {p.name: p for p in (NewtonSchulz, PolarExpress, Svd)}

T = TypeVar("T")


def parse(spec: str | RootSolver) -> RootSolver:
    """The solver that `spec` spells: a name, or a name with options.

    >>> parse("newton(iterations=20)")
    Newton(iterations=20, tolerance=0.01, relative_eps=1e-06)
    """
    if isinstance(spec, RootSolver):
        return spec
    if spec == "auto":
        raise ValueError('root="auto" is no solver before the size of the matrices is known; use resolve')
    return _parse("root", spec, SOLVERS, "a root solver", ["auto", *SOLVERS])


def parse_polar(spec: str | Polar) -> Polar:
    """As `parse`, for iterations to the polar factor.

    >>> parse_polar("polar_express(steps=6)")
    PolarExpress(steps=6, lower=0.001)
    """
    if isinstance(spec, Polar):
        return spec
    return _parse("polar", spec, POLARS, "a way to the polar factor", list(POLARS))


def _parse(option: str, spec: str, table: Mapping[str, type[T]], what: str, names: Sequence[str]) -> T:
    """What `spec` spells of a table; `names` are those that the option allows."""
    listed = ", ".join(map(repr, names))
    read = _read(spec)
    if read is None:
        example = {"root": "newton(iterations=20)", "polar": "polar_express(steps=6)"}[option]
        raise ValueError(
            f"{option}={spec!r} cannot be read; write a name ({listed}) or a name with options, "
            f'as in "{example}"{_hint(str(spec), names)}'
        )
    name, options = read
    if name not in table:
        raise ValueError(f"{option}={spec!r} is not {what}; allowed: {listed}{_hint(name, names)}")
    try:
        return table[name](**options)
    except (TypeError, ValueError) as error:
        known = ", ".join(f.name for f in fields(table[name])) or "none"  # type: ignore[arg-type]
        raise ValueError(f"{option}={spec!r}: {error}; options of {name}: {known}") from None


def resolve(spec: str | RootSolver | Choices, d: int, device: torch.device | str, e: float) -> RootSolver:
    """`parse`, with `"auto"` decided for matrices of size `d` and the exponent `e`: by the rule, or by choices measured."""
    if isinstance(spec, Mapping):
        found = chosen(spec, d, device, e)
        return found.solver if found else choose(device, e)
    return choose(device, e) if spec == "auto" else parse(spec)


def resolve_basis(spec: str | RootSolver, device: torch.device | str) -> EigenSolver:
    """As `resolve`, for eigenbases: `"auto"` is `eigh`, or on CUDA, where that takes matrices one by one, `track` with one
    iteration: with two a transformer trained no better (docs/results.md).

    >>> spell(resolve_basis("auto", "cpu")), spell(resolve_basis("auto", "cuda"))
    ('eigh', 'track(iterations=1)')
    """
    if spec == "auto":
        return Track(iterations=1) if torch.device(device).type == "cuda" else Eigh()
    solver = parse(spec)
    if not isinstance(solver, EigenSolver):
        able = ", ".join(repr(name) for name, kind in SOLVERS.items() if issubclass(kind, EigenSolver))
        raise ValueError(
            f"root={spec!r} gives no eigenbasis, which preconditioner='soap' is made of; use 'auto' or one of {able}"
        )
    return solver


def spell(solver: RootSolver | Polar) -> str:
    """The string that `parse`, or `parse_polar`, reads back: options that differ from their defaults only.

    >>> spell(Newton(iterations=20)), spell(Eigh())
    ('newton(iterations=20)', 'eigh')
    """
    values = [(f, getattr(solver, f.name)) for f in fields(solver)]  # type: ignore[arg-type]
    options = ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)
    return f"{solver.name}({options})" if options else solver.name


def _read(spec: str) -> tuple[str, dict[str, Any]] | None:
    """Name and options of `name` or `name(option=literal, ...)`; None if it is neither."""
    try:
        node = ast.parse(spec, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {_word(k.arg): _literal(k.value) for k in node.keywords}
    except (SyntaxError, ValueError, TypeError):
        pass
    return None


def _word(name: str | None) -> str:
    if name is None:
        raise ValueError("** is not an option")
    return name


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id == "inf":  # the repr of a float that has no literal
        return math.inf
    return ast.literal_eval(node)


def _hint(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
