"""Kernels on the CPU, under Triton's interpreter, in small tiles.

The interpreter has to be asked for before Triton is imported, so these tests have processes of their own, which
tests/test_kernels.py and tests/test_kernels_executor.py start. By hand: TRITON_INTERPRET=1 python -m pytest tests/kernels
"""

from __future__ import annotations

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
from lather.roots import has_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_kernels(torch.device("cuda"))
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
    small = {"BLOCK": 128, "SIDE": 16, "DEPTH": 16, "REDUCE": 2}
    for module in (slices, tables, kernel_executor):
        for name in small.keys() & vars(module).keys():
            set_(module, name, small[name])
    _hurry(set_)


def _hurry(set_: Callable[[Any, str, Any], None]) -> None:
    """What takes most of the interpreter's time and none of its results.

    It puts its functions into triton.language at every call of a function of a kernel: here at every launch, also for the
    functions that are Triton's own. It looks for integers that overflow, which so small numbers do not, and makes a table of
    all dtypes whenever it wants one of them.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, everything = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    set_(interpreter, "_patch_lang", lambda kernel: patch(everything))
    set_(interpreter.InterpretedFunction, "__call__", lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs))
    builder, dtype_of, dtypes = interpreter.interpreter_builder, interpreter._get_np_dtype, dict[str, Any]()
    set_(builder, "options", replace(builder.options, sanitize_overflow=False))

    def found(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    set_(interpreter, "_get_np_dtype", found)


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
