"""Solvers as strings, for places that hold only primitives: `"newton(iterations=20)"`, `"polar_express(steps=6)"`."""

import ast
import difflib
import math
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, cast

import torch

from ..kernels import has_kernels
from .base import EigenSolver, RootSolver
from .coupled import supports
from .eigh import Eigh
from .higher_order import HigherOrder
from .minimax import Minimax
from .newton import Newton
from .polar import NewtonSchulz, Polar, PolarExpress, Svd
from .track import Track

SOLVERS: dict[str, type[RootSolver]] = {s.name: s for s in (Eigh, Newton, HigherOrder, Minimax, Track)}
POLARS: dict[str, type[Polar]] = {p.name: p for p in (NewtonSchulz, PolarExpress, Svd)}
REMOVED = {"qr": "track"}  # solvers of earlier versions, and what replaces them


def parse(spec: str | RootSolver) -> RootSolver:
    """The solver that `spec` spells: a name, or a name with options.

    >>> parse("newton(iterations=20)")
    Newton(iterations=20, tolerance=0.01, relative_eps=1e-06)
    """
    if isinstance(spec, RootSolver):
        return spec
    if spec == "auto":
        raise ValueError('root="auto" names no solver until device and exponent are known; use resolve')
    return cast(RootSolver, (_made if isinstance(spec, str) else _make)("root", spec))


def parse_polar(spec: str | Polar) -> Polar:
    """The solver for polar factors that `spec` spells.

    >>> parse_polar("polar_express(steps=6)")
    PolarExpress(steps=6, lower=0.001)
    """
    return spec if isinstance(spec, Polar) else cast(Polar, (_made if isinstance(spec, str) else _make)("polar", spec))


def choose(device: torch.device | str, e: float) -> RootSolver:
    """The solver that `root="auto"` stands for. This is a rule, so a plan on paper and all ranks with such a device agree.

    It is `minimax` where our kernels run, and `newton` on other CUDA devices. It is `eigh` on all other devices, and for
    exponents that the other two cannot do. `benchmarks/fastest.py` measures which of them is fastest on a device.

    >>> choose("cpu", e=1 / 4), choose("cuda", e=0.455)
    (Eigh(), Eigh())
    """
    device = torch.device(device)
    if device.type != "cuda" or not supports(e):
        return Eigh()
    return Minimax() if has_kernels(device) else Newton()


def resolve(spec: str | RootSolver, device: torch.device | str, e: float) -> RootSolver:
    """`parse`, with :func:`choose` for `"auto"`."""
    return choose(device, e) if spec == "auto" else parse(spec)


def resolve_basis(spec: str | RootSolver, device: torch.device | str) -> EigenSolver:
    """`parse` for eigenbases. `"auto"` is `track` with one iteration on CUDA, where `eigh` takes matrices one by one, else `eigh`.

    With two iterations of `track` a transformer trained no better.

    >>> spell(resolve_basis("auto", "cpu")), spell(resolve_basis("auto", "cuda"))
    ('eigh', 'track(iterations=1)')
    """
    if spec == "auto":
        return Track(iterations=1) if torch.device(device).type == "cuda" else Eigh()
    solver = parse(spec)
    if not isinstance(solver, EigenSolver):
        able = ", ".join(repr(name) for name, kind in SOLVERS.items() if issubclass(kind, EigenSolver))
        raise ValueError(f"root={spec!r} computes no eigenbasis, and this preconditioner needs one; use 'auto' or one of {able}")
    return solver


def spell(solver: RootSolver | Polar) -> str:
    """The string that `parse` or `parse_polar` reads back. It leaves out options that have their default values.

    >>> spell(Newton(iterations=20)), spell(Eigh())
    ('newton(iterations=20)', 'eigh')
    """
    values = [(f, getattr(solver, f.name)) for f in fields(solver)]  # type: ignore[arg-type]
    options = ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)
    return f"{solver.name}({options})" if options else solver.name


def _make(option: str, spec: str) -> RootSolver | Polar:
    """The solver that `spec` spells. `option` is the name of the user's argument: "root" or "polar"."""
    table: dict[str, Any] = SOLVERS if option == "root" else POLARS
    names, example = (["auto", *table], "newton(iterations=20)") if option == "root" else ([*table], "polar_express(steps=6)")
    listed = ", ".join(map(repr, names))
    try:
        name, options = _read(spec)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # the last two if it is nested too deep
        raise ValueError(
            f"{option}={spec!r} cannot be read; write a name ({listed}) or a name with options, "
            f'as in "{example}"{_hint(str(spec), names)}'
        ) from None
    if name not in table:
        raise ValueError(f"{option}={spec!r} is not a {option} solver; allowed: {listed}{_hint(name, names)}")
    try:
        return cast(RootSolver | Polar, table[name](**options))
    except (TypeError, ValueError) as error:
        known = ", ".join(f.name for f in fields(table[name])) or "none"
        raise ValueError(f"{option}={spec!r}: {error}; options of {name}: {known}") from None


_made = lru_cache(maxsize=256)(_make)  # a solver is immutable, and every step asks for it


def _read(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name` or `name(option=literal, ...)`. Raises what `ast` raises for anything else."""
    node = ast.parse(spec, mode="eval").body
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("not a name with options")
    return call.func.id, {str(k.arg): _literal(k.value) for k in call.keywords}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id == "inf":  # a float whose repr is no literal
        return math.inf
    value = ast.literal_eval(node)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError("no option is that large, and arithmetic on it may fail")
    return value


def replaced(spec: str) -> str:
    """What a spec of an earlier version is today, with default options.

    >>> replaced("qr(iterations=1)"), replaced("newton(iterations=20)")
    ('track', 'newton(iterations=20)')
    """
    return REMOVED.get(spec.partition("(")[0], spec)


def _hint(name: str, names: Sequence[str]) -> str:
    if name in REMOVED:
        return f"; {name!r} was removed, use {REMOVED[name]!r}"
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
