"""Kernels are compiled side by side, before they are launched for the first time.

By itself Triton compiles each when it is launched, one after the other. Threads are enough: its passes let go of Python's lock,
and otherwise it waits for programs that it starts. These are ptxas and, before Triton 3.7, a C compiler for what launches a kernel.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

THREADS = 8
LIFT = torch.ops.aten.lift_fresh.default  # how torch.tensor() shows what it has made of the host's numbers
_one_at_a_time = threading.Lock()


def compile_kernels(*launches: Callable[[], None]) -> None:
    """Compile the kernels that are launched by ``launches``, and do nothing else.

    They must be fit for graphs: then they change nothing but memory. Going through them without those changes leaves no trace.
    Errors are left to the launches themselves.
    """
    import triton
    from triton.runtime.jit import JITFunction

    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.5
        return
    thread = threading.get_ident()

    def only_compile(self: Any, *args: Any, warmup: bool, **given: Any) -> Any:
        return run(self, *args, warmup=warmup or threading.get_ident() == thread, **given)

    def walk() -> None:
        with triton.AsyncCompileMode(executor), _NothingChanges():
            for launch in launches:
                with suppress(Exception):
                    launch()

    device = torch.cuda.current_device()
    with _one_at_a_time, ThreadPoolExecutor(THREADS, "lather", torch.cuda.set_device, (device,)) as pool:
        executor: Any = SimpleNamespace(submit=partial(_submit, pool))
        run = JITFunction.run  # not before the lock: another thread may have put its own there
        JITFunction.run = only_compile
        try:
            with suppress(Exception):
                copy_context().run(walk)  # a copy, because after an error Triton's mode stays on
        finally:
            JITFunction.run = run


def _submit(pool: ThreadPoolExecutor, make: Callable[[], Any]) -> Future[Any]:
    """Compile a kernel in a thread. If that fails, as for want of memory, whoever asks for the kernel tries again."""
    future = pool.submit(_loaded, make)
    compiled = future.result

    def result() -> Any:
        try:
            return compiled()
        except Exception:
            return make()

    future.result = result  # type: ignore[method-assign, assignment]
    return future


def _loaded(make: Callable[[], Any]) -> Any:
    """A kernel on the device, with what launches it."""
    kernel = make()
    with suppress(Exception):
        _ = kernel.run
    return kernel


@final
class _NothingChanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations do not write into memory that was there before. They return what they would have written into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._new: set[int] = set()  # addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        given = dict(zip([each.name for each in schema.arguments], args, strict=False)) | kwargs
        written = [each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write and each.name in given]
        targets = [given[name] for name in written]
        if not _addresses(targets) <= self._new:
            return tuple(targets) if len(schema.returns) > 1 else targets[0] if schema.returns else None
        result = func(*args, **kwargs)
        if func is LIFT:
            self._new |= _addresses(result)
        elif not any(each.alias_info for each in schema.returns):  # a view's memory may be older
            self._new |= _addresses(result) - _addresses(list(given.values()))
        return result


def _addresses(found: Any) -> set[int]:
    """Where the memory of tensors is."""
    if isinstance(found, Tensor):
        return {found.untyped_storage().data_ptr()}
    return set[int]().union(*map(_addresses, found)) if isinstance(found, (list, tuple)) else set()
