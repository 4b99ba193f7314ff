"""Work beside the training, on a side stream of the device or in a thread of the host; and work that is done at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
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
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pool: ThreadPoolExecutor | None = None
        self._threads: list[Future[None]] = []

    def start(self, work: Callable[[], None], touches: list[Tensor], threaded: bool) -> None:
        """Do ``work`` after all that was launched so far. ``touches`` is memory that it needs, maybe for longer than its owner;
        ``threaded``: it makes the host wait, so a thread does it."""
        if self.stream is None:
            self._attempt(work)
            return
        ready, stream = torch.cuda.current_stream(self.device).record_event(), self.stream
        for tensor in touches:
            tensor.record_stream(stream)

        def run() -> None:
            with torch.no_grad(), torch.cuda.stream(stream):
                stream.wait_event(ready)
                self._attempt(work)

        if threaded:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="lather")
            self._threads.append(self._pool.submit(run))
        else:
            run()

    def _attempt(self, work: Callable[[], None]) -> None:
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
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


_branches: list[Any] = []  # streams of the capture that is under way


@contextmanager
def branching(streams: list[Any]) -> Iterator[None]:
    _branches[:] = streams
    try:
        yield
    finally:
        _branches.clear()


def side_by_side(works: Sequence[Callable[[], object]]) -> None:
    """Do independent things; in a graph, as branches that a device can run at the same time."""
    if len(works) < 2 or not _branches:
        for work in works:
            work()
        return
    main, streams = torch.cuda.current_stream(), _branches[: len(works)]
    for stream in streams:
        stream.wait_stream(main)
    for i, work in enumerate(works):
        with torch.cuda.stream(streams[i % len(streams)]):
            work()
    for stream in streams:
        main.wait_stream(stream)
