"""Kernels on the CPU, under Triton's interpreter, in small tiles.

The interpreter has to be asked for before Triton is imported, so these tests have processes of their own, which
tests/test_kernels.py and tests/test_kernels_executor.py start. By hand: TRITON_INTERPRET=1 python -m pytest tests/kernels
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lather.compute import kernel_executor, slices, tables
from lather.methods import soap
from lather.storage import buffers, copies

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    """A GPU divides by zero in silence."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch.setattr)


def interpret(set_: Callable[[Any, str, Any], None]) -> None:
    """Kernels as on a GPU, with tiles so small that small blocks have several."""
    suits = slices.suits
    set_(slices, "suits", lambda device, *rest: suits("cuda", *rest))
    small = {"BLOCK": 128, "SIDE": 16, "DEPTH": 16, "REDUCE": 2, "DIAGONAL": 8, "ROWS": 8}
    for module in (buffers, soap):
        set_(module, "has_kernels", lambda device: True)
    for module in (slices, tables, kernel_executor, copies, soap):
        for name in small.keys() & vars(module).keys():
            set_(module, name, small[name])
    _hurry()


@functools.cache
def _hurry() -> None:
    """What takes most of the interpreter's time and none of its results.

    It puts its functions into triton.language at every call of a function of a kernel: here once, to stay. It looks for
    integers that overflow, which so small numbers do not. What there is to know of a dtype or a shape it works out again for
    every value.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, dtype_of, dtypes = interpreter.interpreter_builder, interpreter._get_np_dtype, dict[str, Any]()
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda kernel: SimpleNamespace(restore=lambda: None)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    builder.options = replace(builder.options, sanitize_overflow=False)

    def found(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    interpreter._get_np_dtype = found
    interpreter._convert_float = _rounded
    _remember_types(tl.core)
    _broadcast_seldom(type(interpreter.interpreter_semantic))


def _rounded(values: np.ndarray, source: Any, to: Any, mode: Any) -> np.ndarray:
    """Between float32 and bfloat16, which NumPy lacks. A GPU rounds to the nearest, where the interpreter cuts bits off."""
    if to.name == "bf16":
        return torch.tensor(values).to(torch.bfloat16).view(torch.uint16).numpy()
    return torch.tensor(values).view(torch.bfloat16).float().numpy()


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language, as the interpreter calls it."""
    from triton.runtime.interpreter import interpreter_semantic

    inner = getattr(member, "__wrapped__", member)

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, called)


def _remember_types(core: Any) -> None:
    """One object for each type of blocks, and one for each shape of values."""
    make, unwrap = core.block_type.__init__, core._unwrap_if_constexpr
    types, shapes, scalar = dict[Any, Any](), dict[Any, Any](), (core.tuple([]), core.constexpr(1))
    plain = {core.tensor, int, float, bool, str, type(None)}

    def new(cls: Any, element: Any, shape: Any) -> Any:
        key = (element.name, *[n.value if n.__class__ is core.constexpr else n for n in shape])
        if key not in types:
            kind = object.__new__(cls)
            make(kind, element, shape)
            facts = core.tuple(map(core.constexpr, kind.shape)), core.constexpr(kind.numel)
            kind.facts, types[key] = shapes.setdefault(key[1:], facts), kind
        return types[key]

    def fill(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.facts if kind.__class__ is core.block_type else scalar

    core.block_type.__new__, core.block_type.__init__ = new, lambda self, element, shape: None
    core.tensor.__init__ = fill
    core._unwrap_if_constexpr = lambda x: x if x.__class__ in plain else unwrap(x)


def _broadcast_seldom(semantic: Any) -> None:
    """Not where both have one shape."""
    broadcast = semantic.broadcast_impl_value
    semantic.broadcast_impl_value = lambda self, a, b: (a, b) if a.shape is b.shape else broadcast(self, a, b)


_counted: set[str] = set()


@pytest.fixture(autouse=True)
def _count_lines_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Counting lines makes the interpreter three times as slow, so it is done for the first case of every test."""
    again, counter = request.node.originalname in _counted, sys.gettrace()
    _counted.add(request.node.originalname)
    if again:
        sys.settrace(None)
    yield
    sys.settrace(counter)
