"""Kernels that are compiled before they are launched, without a GPU."""

from __future__ import annotations

import importlib.util
import threading
from types import SimpleNamespace

import pytest
import torch

from lather.compute.ahead import _NothingChanges, compile_kernels

has_mode = importlib.util.find_spec("triton") is not None and hasattr(importlib.import_module("triton"), "AsyncCompileMode")
needs_triton = pytest.mark.skipif(not has_mode, reason="needs Triton 3.5 or later, which there is for Linux")


def test_only_what_is_new_is_written():
    old, other, ok = torch.ones(4, 4), torch.ones(2), torch.zeros((), dtype=torch.int32)
    with _NothingChanges():
        assert old.add_(1) is old
        assert torch.mul(old, 3, out=old) is old
        torch._foreach_add_([old, other], 1)
        old[0] = 5
        old.view(-1)[1:].zero_()
        old.T.copy_(torch.zeros(4, 4))
        lower, info = torch.linalg.cholesky_ex(torch.eye(4), out=(old, ok))
        assert lower is old and info is ok
        new = old + 1
        new[0].add_(5)
        new += torch.zeros(4, 4).fill_(1.0)
        torch.add(old[0], old[0], out=new[1])
        into = torch.empty(4, 4)
        torch.bmm(torch.eye(4)[None], old[None], out=into[None])
        told = torch.tensor([1.0, 2.0]).mul_(2)
        torch.ops.aten._unsafe_view(old, [2, 8]).add_(1)  # says that its memory is new
    assert old.eq(1).all() and other.eq(1).all()
    assert new.tolist() == [[8.0] * 4, [2.0] * 4, [3.0] * 4, [3.0] * 4] and into.eq(1).all()
    assert told.tolist() == [2.0, 4.0]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """What Triton asks of a GPU. It says which kernels were loaded, by which threads, and which were launched, by which."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    seen = SimpleNamespace(loaded=[], launched=[], loaders=set(), launchers=[])

    def launch(name):
        seen.launched.append(name)
        seen.launchers.append(threading.get_ident())

    def launcher(source, metadata):
        seen.loaded.append(source.fn.__name__)
        seen.loaders.add(threading.get_ident())
        return lambda *args: launch(source.fn.__name__)

    utils = SimpleNamespace(
        load_binary=lambda *args: (1, 1, 0, 0, 1024), get_device_properties=lambda device: {"max_shared_mem": 1 << 20}
    )
    device = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=launcher,
        utils=utils,
    )
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return seen


@needs_triton
def test_other_threads_launch_and_compile_meanwhile(gpu):
    """One thread waits in the middle of its compilation. Another launches what is compiled already, then compiles too."""
    from triton.runtime.jit import JITFunction

    from lather.kernels import moments

    run, w, one = JITFunction.run, torch.zeros(2, 8), torch.ones(2)
    inside, go_on = threading.Event(), threading.Event()

    def kernel(block):
        moments.take_in[1, 2](w, w, one, 0.5, 0.5, 8, BLOCK=block)

    def waits():
        kernel(1024)
        inside.set()
        assert go_on.wait(60)
        kernel(2048)

    def other():
        kernel(4096)
        go_on.set()
        compile_kernels(lambda: kernel(8192))
        kernel(8192)

    kernel(4096)
    first = threading.Thread(target=compile_kernels, args=(waits,))
    second = threading.Thread(target=other)
    first.start()
    assert inside.wait(60)
    second.start()
    first.join()
    second.join()
    assert JITFunction.run is run and gpu.launched == ["take_in"] * 3 and gpu.loaded == ["take_in"] * 4
    kernel(1024)
    assert gpu.launchers.count(threading.get_ident()) == 2


@needs_triton
def test_kernels_are_compiled_and_loaded_but_not_launched(monkeypatch, gpu):
    import triton
    from triton.runtime.jit import JITFunction

    from lather.kernels import moments

    loaded, launched, threads = gpu.loaded, gpu.launched, gpu.loaders
    run, w, one = JITFunction.run, torch.zeros(2, 8), torch.ones(2)

    def launch():
        w.add_(1)
        for block in (128, 256, 256):
            moments.take_in[1, 2](w, w, one, 0.5, 0.5, 8, BLOCK=block)
        moments.divide[1, 2](w, w, one, one, 0.5, 0.5, 0.5, 0.5, 8, PER_SLOT=True, BLOCK=128)

    def fails():
        launch()
        moments.take_in[1, 2](w, w, one, 0.5, 0.5, 8, BLOCK=100)  # not a power of two
        raise ValueError

    compile_kernels(launch)
    assert sorted(loaded) == ["divide", "take_in", "take_in"] and launched == []
    assert threading.get_ident() not in threads and w.eq(0).all() and JITFunction.run is run
    compile_kernels(fails)
    launch()
    assert len(loaded) == 3 and launched == ["take_in"] * 3 + ["divide"] and w.eq(1).all()
    with pytest.raises(Exception, match="power of 2"):
        moments.take_in[1, 2](w, w, one, 0.5, 0.5, 8, BLOCK=100)
    assert triton.runtime._async_compile.active_mode.get() is None

    def takes_in_more():
        moments.take_in[1, 2](w, w, one, 0.5, 0.5, 8, BLOCK=512)

    compiler, calls = moments.take_in.compile, []

    def without_room(*args, **given):
        calls.append(threading.get_ident())
        if len(calls) == 1:
            raise OSError("no room")
        return compiler(*args, **given)

    monkeypatch.setattr(moments.take_in, "compile", without_room)
    compile_kernels(takes_in_more)
    takes_in_more()
    assert len(calls) == 2 and launched[-1] == "take_in" and len(launched) == 5  # what failed once is tried again

    def raises():
        raise ValueError

    before = len(loaded)
    compile_kernels(raises, lambda: moments.divide[1, 2](w, w, one, one, 0.5, 0.5, 0.5, 0.5, 8, PER_SLOT=True, BLOCK=256))
    assert len(loaded) == before + 1  # one that raises does not stop the others
