"""Work in the background of the training: on a side stream of the device, or in a thread of the host."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, final

import torch
from torch import Tensor


@final
class Background:
    """Starts work that nobody waits for until :meth:`finish`. On a CPU it is done at once, with the same results.

    Work that raises is lost, and ``error`` says why. It does not raise: a rank that stopped here would leave the others
    waiting for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.error: str | None = None  # of the last work that was lost
        self._done: Any = None  # an event after its last work: others use the stream as well
        self._pool: ThreadPoolExecutor | None = None
        self._threads: list[Future[None]] = []

    def start(self, work: Callable[[], None], touches: list[Tensor], threaded: bool) -> None:
        """Do ``work`` after everything launched so far. ``touches`` is memory that it needs, maybe for longer than its owner.
        ``threaded``: the work makes the host wait, so a thread does it."""
        if self.device.type != "cuda":
            self.attempt(work)
            return
        ready, stream = torch.cuda.current_stream(self.device).record_event(), stream_of(self.device, 0)
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
    """A shared stream: 0 for the background, others for captures. There are few, because libraries keep memory for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
