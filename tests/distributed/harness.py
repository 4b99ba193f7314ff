"""Worlds of processes that are started once and run many cases.

``pool.run(f, *args)`` calls ``f(*args)`` on every rank and returns what each returned. Nothing can block the tests: a rank
that does not answer in time is a failure that shows where it stands, and the next case gets fresh processes.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = [
    "pytest",
    "torch._dynamo",  # which every optimizer imports
    "lather",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
TIMEOUT = 60.0
START = 20.0  # on top of the first case of a pool: importing torch takes its time
GRACE = 4.0  # once a rank has failed the others probably wait for it in vain


class Failed(Exception):
    """A case raised on some rank; the message holds the traceback of every such rank."""


class Hang(Failed):
    """A rank did not answer in time."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case on one rank: a value, or the kind and text of an error."""

    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""

    @property
    def hung(self) -> bool:
        return self.error == "hang"


class Pool:
    """The processes of one world size, started with the first case."""

    def __init__(self, world: int, *, port: int | None = None, preload: Sequence[str] = ()) -> None:
        """``port``: processes have no process group but the environment of torchrun, or of a single process for a world of one.

        ``preload``: modules that are imported once for all processes, if this is the first pool.
        """
        self.world, self._port, self._preload = world, port, preload
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """The result of every rank; raises if any rank does, and then starts anew: the ranks may be out of step."""
        outcomes = self.attempt(function, *args, timeout=timeout)
        bad = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.error}
        if not bad:
            return [outcome.value for outcome in outcomes]
        self.close()
        # If a rank raised, it is the cause, and those that wait for it are not.
        kind = Hang if all(outcome.hung for outcome in bad.values()) else Failed
        title = "hang" if kind is Hang else "failed"
        raise kind("\n".join([f"{title} in {function.__name__}", *_texts(bad, self.world)]))

    def attempt(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Outcome]:
        """As ``run``, for cases that are expected to raise: one outcome per rank."""
        timeout += 0 if self._processes else START
        self._start()
        request = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(request)
        outcomes = self._answers(timeout)
        if any(outcome.error in ("hang", "death") for outcome in outcomes):
            self.close(kill=True)
        return outcomes

    def _answers(self, timeout: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = dict(zip(self._connections, range(self.world), strict=True))
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                outcomes[rank] = _receive(connection)
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in waiting.values():
            outcomes[rank] = Outcome(error="hang", message="no answer; it was here:", trace=self._whereabouts(rank))
        return [outcomes[rank] for rank in range(self.world)]

    def _whereabouts(self, rank: int) -> str:
        """The stack of a rank that hangs: it writes it to a file when signalled."""
        assert self._folder is not None
        path = _trace_file(self._folder.name, rank)
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        return path.read_text() if path.exists() else ""

    def _start(self) -> None:
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="lather-")
        context = multiprocessing.get_context("forkserver")  # torch is imported once, and no thread is forked
        context.set_forkserver_preload([*PRELOAD, *self._preload])
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, self._folder.name, there, self._port), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def close(self, *, kill: bool = False) -> None:
        for connection in self._connections:
            connection.close()  # which ends the process, unless it hangs
        for process in self._processes:
            process.join(0 if kill else 5)
            if process.is_alive():
                process.kill()
                process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._folder = [], [], None


class Pools:
    """A pool for every world size, as they are asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __getitem__(self, world: int) -> Pool:
        return self._pools.setdefault(world, Pool(world))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _texts(bad: dict[int, Outcome], world: int) -> Iterable[str]:
    """Ranks that fail alike are shown once."""
    for outcome in dict.fromkeys(bad.values()):
        ranks = ", ".join(str(rank) for rank, other in bad.items() if other == outcome)
        yield f"--- rank {ranks} of {world}: {outcome.error} {outcome.message}\n{outcome.trace}"


def _receive(connection: Connection) -> Outcome:
    try:
        outcome = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return Outcome(error="death", message="the process ended")
    assert isinstance(outcome, Outcome)
    return outcome


def _trace_file(folder: str, rank: int) -> Path:
    return Path(folder, f"trace{rank}")


def _serve(rank: int, world: int, folder: str, connection: Connection, port: int | None) -> None:
    """What a process does: run what comes down the pipe until it is closed."""
    torch.set_num_threads(1)
    gc.freeze()  # the modules that every rank begins with need not be searched again and again
    faulthandler.register(signal.SIGUSR1, file=_trace_file(folder, rank).open("w"), all_threads=False)
    # Torch's own warnings are not ours to mend here; those that lather causes are.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module="lather")
    logging.getLogger("torch").setLevel(logging.ERROR)
    if port is None:
        store = dist.FileStore(str(Path(folder, "store")), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2 * TIMEOUT))
    elif world > 1:
        os.environ.update(_as_torchrun(rank, world, port))
    for request in _requests(connection):
        connection.send_bytes(pickle.dumps(_call(request)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _as_torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "lather"}
    return {name: str(value) for name, value in names.items()}


def _requests(connection: Connection) -> Iterable[bytes]:
    while True:
        try:
            yield connection.recv_bytes()
        except (EOFError, ConnectionError):
            return


def _call(request: bytes) -> Outcome:
    try:
        function, args = pickle.loads(request)
        with _counting_lines_once(f"{function.__name__}{args[:2]}"):
            return Outcome(function(*args))
    except Exception as error:
        return Outcome(error=type(error).__name__, message=str(error), trace=traceback.format_exc())


_counted: set[str] = set()


@contextmanager
def _counting_lines_once(case: str) -> Iterator[None]:
    """Counting lines takes half as long again, so it is done the first time that a rank runs a case in a layout."""
    counter = sys.gettrace()
    if case in _counted:
        sys.settrace(None)
    _counted.add(case)
    try:
        yield
    finally:
        sys.settrace(counter)
