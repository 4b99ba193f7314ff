"""Runs tests of kernels in a process where Triton interprets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 600  # a file takes 40 to 90 on one core


def measured() -> list[str]:
    """How to run a module so that its lines are counted, if ours are. All counts are combined at the end."""
    coverage = sys.modules.get("coverage")
    if coverage is None or coverage.Coverage.current() is None:
        return []
    return ["-m", "coverage", "run", "--parallel-mode", f"--rcfile={ROOT / 'pyproject.toml'}"]


def run_interpreted(*files: str) -> None:
    """Files of tests/kernels."""
    job = subprocess.run(
        [sys.executable, *measured(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + [f"tests/kernels/{file}" for file in files],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert job.returncode == 0 and " passed" in job.stdout, job.stdout + job.stderr
