"""The examples: stopped and killed under real torchrun, and resumed on another number of ranks.

Where torchrun is not what is looked at, processes as it would start them are forked, because to start one takes longer than to
train.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from distributed.harness import Pool

pytestmark = pytest.mark.scripts

ROOT = Path(__file__).parent.parent.parent
SIZES = ("--width=16", "--layers=1", "--batch=12", "--context=32", "--lr=0.01", "--double")
TINY = (*SIZES, "--steps=60", "--print-every=10", "--save-every=10")
SECONDS = 120  # for one run, which takes about 6
# Torch's bug 190489: Python ends while a thread of gloo still drops a tensor. On a busy machine the pause of `common.finish` may
# be too short. The tests look at what the run has written before, so they do not need its exit code then.
ABORTED = "terminate called without an active exception"

# Another number of ranks adds up the gradients of a batch in another order, and inverse roots amplify the rounding
# where there is next to no gradient. Final parameters, of size 1, then differ by 5e-6 in float64; in float32 by 4e-2,
# which would hide mistakes: without the last ten steps they differ by 5e-2, with the optimizer's state lost at step 50
# by 3e-2.
TOLERANCE = 1e-4


def start(ranks: int, script: str, *flags: object) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*torchrun, str(ROOT / "examples" / script), *TINY, *map(str, flags)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> str:
    try:
        output, _ = job.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        job.terminate()  # and torchrun ends its workers
        output, _ = job.communicate(timeout=30)
        pytest.fail(f"not done after {SECONDS} s:\n{output}")
    return output


def run(ranks: int, script: str, *flags: object) -> str:
    job = start(ranks, script, *flags)
    output = finish(job)
    assert job.returncode == 0 or ABORTED in output, output
    return output


def fork(ranks: int, script: str, *flags: object) -> str:
    """As ``run``, without torchrun. What rank 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pool = Pool(ranks, port=port)
    try:
        return pool.run(play, port, script, [*TINY, *map(str, flags)], timeout=SECONDS)[0]
    finally:
        pool.close()


def play(port: int, script: str, flags: list[str]) -> str:
    """What a forked process does."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone | os.environ)
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv, printed = [script, *flags], io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    return printed.getvalue()


def held_out(output: str) -> list[float]:
    losses = [float(x) for x in re.findall(r"held-out (\S+)", output)]
    assert len(losses) > 1 and all(map(math.isfinite, losses)), output
    return losses


def assert_same_end(file: Path, other: Path) -> None:
    ours, theirs = torch.load(file), torch.load(other)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The final parameters of a run on one rank that nothing happened to."""
    file = tmp_path_factory.mktemp("undisturbed") / "final.pt"
    fork(1, "train_ddp.py", "--save-final", file)
    return file


def test_ddp_stops_on_2_ranks_and_resumes_on_3(undisturbed: Path, tmp_path: Path) -> None:
    first = run(2, "train_ddp.py", "--checkpoint", tmp_path / "run", "--stop-after", 35)
    assert "resumed" not in first and first.rstrip().endswith("saved step 35")
    second = fork(3, "train_ddp.py", "--checkpoint", tmp_path / "run", "--save-final", tmp_path / "final.pt")
    assert "resumed at step 35 on 3 ranks" in second
    assert held_out(second)[-1] < held_out(second)[0] < held_out(first)[0] - 0.5
    assert_same_end(tmp_path / "final.pt", undisturbed)


def test_killed_tensor_parallel_job_resumes_with_fsdp2_from_its_last_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(2, "train_fsdp2.py", "--tp=2", "--checkpoint", folder, "--print-pids") as job:
        workers = kill_a_worker(job, after="saved step 20")
        output = finish(job)
    assert job.returncode != 0 and "saved step 60" not in output
    assert not any(map(alive, workers))
    (folder / "saving").mkdir(exist_ok=True)  # as if it had come in the middle of a checkpoint

    output = fork(3, "train_fsdp2.py", "--checkpoint", folder, "--save-final", tmp_path / "final.pt")
    resumed = int(re.search(r"resumed at step (\d+) on 3 ranks", output)[1])
    assert resumed in (20, 30, 40, 50)
    assert_same_end(tmp_path / "final.pt", undisturbed)


def test_experts_stop_and_resume_in_another_layout(tmp_path: Path) -> None:
    """HSDP x TP and a rank for each expert, then FSDP2 and two ranks for each half of the experts."""
    folder, few = tmp_path / "run", ("--steps=16", "--print-every=16", "--save-every=16")
    alone = fork(1, "experts.py", *few, "--save-final", tmp_path / "alone.pt")
    first = fork(4, "experts.py", *few, "--replicate=2", "--tp=2", "--checkpoint", folder, "--stop-after=8")
    second = fork(4, "experts.py", *few, "--expert-ranks=2", "--checkpoint", folder, "--save-final", tmp_path / "final.pt")
    assert "saved step 8" in first and "resumed at step 8 on 4 ranks" in second
    assert held_out(second)[-1] == held_out(alone)[-1] < held_out(second)[0] < held_out(alone)[0] - 0.5
    assert_same_end(tmp_path / "final.pt", tmp_path / "alone.pt")


def kill_a_worker(job: subprocess.Popen[str], after: str) -> list[int]:
    """SIGKILL to rank 1 once the line has come; the process ids of all ranks."""
    watchdog = threading.Timer(SECONDS, job.terminate)
    watchdog.start()
    lines = list(itertools.takewhile(lambda line: line.strip() != after, job.stdout))
    watchdog.cancel()
    workers = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+) pid (\d+)", "".join(lines))}
    assert sorted(workers) == [0, 1], "".join(lines)
    os.kill(workers[1], signal.SIGKILL)
    return list(workers.values())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
