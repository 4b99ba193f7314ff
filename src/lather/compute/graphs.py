"""CUDA graphs of launches that are always the same, with branches for what is independent."""

import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, final

import torch

from .ahead import compile_kernels
from .background import stream_of

BRANCHES = 4  # of a graph, at most: libraries keep 32 MiB for every stream


@final
class Graphs:
    """CUDA graphs by key. What is launched a second time under the same key is captured. Then and later it is replayed.

    Captures use the same streams every time, because graphs share memory only if they were captured on the same stream. Libraries
    keep one workspace for each stream, so graphs of two optimizers share those too.
    """

    MOST = 1024  # keys; beyond that, something changes on every step
    AHEAD = 64  # keys whose kernels are compiled ahead. Later ones seldom have new kernels, and torch's work is done twice

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._compiled: set[Hashable] = set()
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._enabled = True

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        if key not in self._graphs:
            if key not in self._seen:
                self.compile({key: launch})
                launch()
                if len(self._seen) < self.MOST:  # now, because a launch that raised has to run again before it is captured
                    self._seen.add(key)
                return
            if not self._enabled or torch.cuda.is_current_stream_capturing():
                launch()
                return
            try:
                self._graphs[key] = self._capture(launch)
            except RuntimeError as error:  # nothing was launched yet
                self._enabled = False
                warnings.warn(f"CUDA graphs are not used, because a capture failed: {error}", stacklevel=2)
                launch()
                return
        turns_on(torch.cuda.current_device()).replay(self._graphs[key])

    def is_new(self, key: Hashable) -> bool:
        """Whether the kernels of a launch are still to be compiled."""
        return key not in self._compiled and len(self._compiled) < self.AHEAD

    def compile(self, launches: Mapping[Hashable, Callable[[], None]]) -> None:
        """Compile the kernels of launches, by key, side by side. Those that were compiled before are left out."""
        new = {key: launch for key, launch in launches.items() if self.is_new(key)}
        if new and not is_capturing():
            self._compiled |= new.keys()
            compile_kernels(*new.values())

    def _capture(self, launch: Callable[[], None]) -> Any:
        """Not by ``torch.cuda.graph``, which collects garbage and empties the cache of memory first."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = stream_of(torch.device("cuda", torch.cuda.current_device()), 1)
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(RuntimeError):  # the first error is the one that matters
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


@final
class Turns:
    """Replays on a device. Each waits for what was replayed on another stream: both may write into the same workspaces."""

    def __init__(self) -> None:
        self._last: Any = None  # the stream of the last replay
        self._lock = threading.Lock()

    def replay(self, graph: Any) -> None:
        stream = torch.cuda.current_stream()
        with self._lock:
            if self._last is not None and self._last != stream and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._last)
            self._last = stream
            graph.replay()


@cache
def turns_on(device: int) -> Turns:
    return Turns()


_numbers: ContextVar[Sequence[int]] = ContextVar("numbers", default=range(2, 2 + BRANCHES))  # of the streams that branches may use


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def side_by_side(works: Sequence[Callable[[], object]], branches: int = BRANCHES) -> None:
    """Do independent things. While a graph is captured they become branches, which a device can run at the same time.

    A branch may branch again. Branches share the streams that there are, so none waits for another one's work.
    """
    numbers = _numbers.get()
    branches = min(branches, len(numbers), len(works))
    if branches < 2 or not is_capturing():
        for work in works:
            work()
        return
    main, shares = torch.cuda.current_stream(), [numbers[i::branches] for i in range(branches)]
    streams = [stream_of(main.device, share[0]) for share in shares]
    for stream in streams:
        stream.wait_stream(main)
    for i, work in enumerate(works):
        token = _numbers.set(shares[i % branches])
        try:
            with torch.cuda.stream(streams[i % branches]):
                work()
        finally:
            _numbers.reset(token)
    for stream in streams:
        main.wait_stream(stream)
