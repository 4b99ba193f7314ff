"""Faults in the middle of a run on several ranks: what the other ranks see, how soon, and whether the job resumes.

python -m endurance.faults            # in tests/: prints the table
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from distributed import cases
from distributed.cases import Case, Run, Stored, local, whole
from distributed.harness import Pools

from lather.runtime import checkpoint
from lather.runtime.run import in_turn
from lather.runtime.session import Session
from lather.runtime.unit import Unit

CASE = Case({"momentum": 0.9, "weight_decay": 0.1})
EVERY, WHEN = 4, 7  # a checkpoint every so many steps; the fault comes in this step, or in the checkpoint after it
SECONDS = 20.0  # until every other rank must have an error
SLOW = 2.0
PHASES: dict[str, tuple[Any, str]] = {  # before the gradients leave, and so on; the last two are in a checkpoint
    "begin": (Session, "begin"),
    "send": (Unit, "send"),
    "compute": (Unit, "compute"),
    "apply": (Unit, "apply"),
    "report": (Session, "end"),
    "gather": (checkpoint, "collect"),
    "write": (torch, "save"),
}
IN_A_CHECKPOINT = ("gather", "write")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    """What an error that nobody catches does, without torch's report."""
    os._exit(1)


def wait() -> None:
    time.sleep(SLOW)


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FAULTS: dict[str, Callable[[], None]] = {
    "killed": kill,
    "error": crash,
    "slow": wait,
    "full disk": fill_the_disk,
    "cut short": kill,  # and the last checkpoint is
    "flipped": kill,  # and a bit of the last checkpoint is
}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit of the largest tensor."""
    with zipfile.ZipFile(path) as file:
        largest = max(file.infolist(), key=lambda record: record.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {"cut short": cut, "flipped": flip}


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and where."""

    kind: str
    phase: str
    rank: int = 1

    @property
    def step(self) -> int:
        if self.kind in DAMAGES:
            return 2 * EVERY + 1  # after two checkpoints
        return 2 * EVERY if self.phase in IN_A_CHECKPOINT else WHEN

    @contextmanager
    def strikes(self, run: Run, step: int) -> Iterator[None]:
        if step != self.step or dist.get_rank() != self.rank:
            yield
            return
        owner, name = PHASES[self.phase]
        real = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            FAULTS[self.kind]()
            return real(*args, **kwargs)

        made = run.opt._session.run
        with mock.patch.object(owner, name, struck), mock.patch.object(made, "phases", made.phases):
            made.phases = in_turn(made.units)  # which are methods of units
            yield


def save(run: Run, folder: Path, step: int) -> None:
    """A file that is complete, or not there, unless the disk loses some of it."""
    model = {name: whole(p).clone() for name, p in run.model.named_parameters()}
    run.opt.consolidate_state_dict()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"model": model, "opt": run.opt.state_dict()}, folder / "new")
        (folder / "new").rename(folder / f"{step:03d}.pt")


def train(layout: str, folder: Path, fault: Fault) -> Stored:
    """The process ends soon after an error, as that of a script does. Ranks that wait for it hear of the error by that alone."""
    try:
        return train_on(layout, folder, fault)
    except Exception:
        threading.Timer(0.5, crash).start()
        raise


def train_on(layout: str, folder: Path, fault: Fault) -> Stored:
    run = Run(layout, CASE)
    for step in range(1, CASE.steps + 1):
        with fault.strikes(run, step):
            run.advance(step, step)
            try:
                save(run, folder, step) if step % EVERY == 0 else None
            except OSError:  # a script that does not catch it ends
                crash()
    return run.stored()


def readable(folder: Path) -> Any:
    """The last checkpoint that is whole. Torch writes checksums and does not look at them."""
    for path in sorted(folder.glob("*.pt"), reverse=True):
        with suppress(RuntimeError, OSError, EOFError, UnpicklingError, zipfile.BadZipFile):
            if zipfile.ZipFile(path).testzip() is None:
                return torch.load(path, weights_only=True)
    raise FileNotFoundError(folder)


def resume(layout: str, folder: Path) -> Stored:
    run = Run(layout, CASE)
    saved = readable(folder)
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            local(p).copy_(saved["model"][name].view(-1)[run.places[name]])
    run.opt.load_state_dict(saved["opt"])
    done = int(max(entry["step"] for entry in saved["opt"]["state"].values()))
    return run.advance(done + 1, CASE.steps).stored()


@dataclass(frozen=True)
class Row:
    fault: Fault
    layout: str
    outcome: str
    seconds: float

    def __str__(self) -> str:
        return f"| {self.fault.kind} | {self.fault.phase} | {self.layout} | {self.outcome} | {self.seconds:.1f} |"


def try_fault(pools: Pools, layout: str, fault: Fault, then: str) -> Row:
    """Strike, look at all other ranks, resume in another layout, and compare the end with that of an undisturbed run."""
    shapes = cases.shapes_of(CASE.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pool = pools[cases.LAYOUTS[layout].world]
        pool.run(cases.keys_after_a_step, layout, CASE)  # so that the time does not include starting it
        began = time.monotonic()
        outcomes = pool.attempt(train, layout, folder, fault)
        seconds = time.monotonic() - began
        others = [outcome for rank, outcome in enumerate(outcomes) if rank != fault.rank]
        if not any(outcome.error for outcome in outcomes):
            cases.assert_same(cases.assemble([outcome.value for outcome in outcomes], shapes), cases.alone(CASE))
            return Row(fault, layout, "goes on", seconds)
        assert all(outcome.error and not outcome.hung for outcome in others), [outcome.error for outcome in others]
        assert seconds < SECONDS, seconds
        pool.close(kill=True)
        if fault.kind in DAMAGES:
            DAMAGES[fault.kind](max(folder.glob("*.pt")))
        stored = pools[cases.LAYOUTS[then].world].run(resume, then, folder)
        cases.assert_same(cases.assemble(stored, shapes), cases.alone(CASE))
        return Row(fault, layout, f"error on all ranks, resumed on {then}", seconds)


TRIALS = [
    *((layout, Fault(kind, phase)) for layout in ("ddp2", "fsdp3") for kind in ("killed", "slow") for phase in PHASES),
    *((layout, Fault("error", phase)) for layout in ("ddp3", "fsdp2", "hsdp22") for phase in ("begin", "compute")),
    *((layout, Fault(kind, "write", rank=0)) for layout in ("ddp2", "fsdp3") for kind in ("killed", "full disk", "slow")),
    *((layout, Fault(kind, "begin")) for layout in ("ddp2", "fsdp3") for kind in DAMAGES),
]
THEN = {"ddp2": "ddp3", "ddp3": "one", "fsdp2": "ddp2", "fsdp3": "fsdp2", "hsdp22": "fsdp2"}


def main() -> int:
    pools = Pools()
    print("| fault | phase | layout | outcome | seconds |\n|---|---|---|---|---|")
    for layout, fault in TRIALS:
        print(try_fault(pools, layout, fault, THEN[layout]), flush=True)
    pools.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
