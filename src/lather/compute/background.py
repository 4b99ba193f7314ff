"""Work beside the training, on a side stream of the device or in a thread of the host; and work that is done at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Aside:
    """Starts work that nobody waits for, until :meth:`finish`. On a CPU it is done at once: results are the same.

    Work that raises is lost, and ``error`` says why: a rank that stopped here would leave the others waiting for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.error: str | None = None  # of the last work that was lost
        self.stream = stream_of(device, 0) if device.type == "cuda" else None
        self._done: Any = None  # an event after its last work: others use the stream as well
        self._pool: ThreadPoolExecutor | None = None
        self._threads: list[Future[None]] = []

    def start(self, work: Callable[[], None], touches: list[Tensor], threaded: bool) -> None:
        """Do ``work`` after all that was launched so far. ``touches`` is memory that it needs, maybe for longer than its owner;
        ``threaded``: it makes the host wait, so a thread does it."""
        if self.stream is None:
            self.attempt(work)
            return
        ready, stream = torch.cuda.current_stream(self.device).record_event(), self.stream
        for tensor in touches:
            tensor.record_stream(stream)

        def run() -> None:
            with torch.no_grad(), torch.cuda.stream(stream):
                stream.wait_event(ready)
                self.attempt(work)
                self._done = stream.record_event()

        if threaded:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="lather")
            self._threads.append(self._pool.submit(run))
        else:
            run()

    def attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def finish(self) -> None:
        """What is launched from now on sees the results."""
        threads, self._threads = self._threads, []
        wait(threads)
        for thread in threads:
            thread.result()
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)


@cache
def stream_of(device: torch.device, number: int) -> Any:
    """A stream for everyone: 0 for work aside, others for captures. There are few, and libraries keep memory for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Capture(threading.local):
    """The capture that is under way in this thread."""

    streams: Sequence[Any] = ()


_capture = _Capture()


@contextmanager
def branching(streams: Sequence[Any]) -> Iterator[None]:
    """Inside, :func:`side_by_side` has these streams for branches."""
    _capture.streams = streams
    try:
        yield
    finally:
        _capture.streams = ()


def side_by_side(works: Sequence[Callable[[], object]]) -> None:
    """Do independent things; in a graph, as branches that a device can run at the same time."""
    if len(works) < 2 or not _capture.streams:
        for work in works:
            work()
        return
    main, streams = torch.cuda.current_stream(), _capture.streams[: len(works)]
    for stream in streams:
        stream.wait_stream(main)
    for i, work in enumerate(works):
        with torch.cuda.stream(streams[i % len(streams)]):
            work()
    for stream in streams:
        main.wait_stream(stream)
