"""What the README shows for many devices runs on two of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

import lather

from .harness import Pools

README = Path(__file__).parents[2] / "README.md"


def run_snippet(code: str, folder: str) -> int:
    """In a folder of its own; the number of tensors in the state that is complete in the end."""
    scope: dict[str, Any] = {"lather": lather, "model": torch.nn.Linear(4, 3)}
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(code, "README.md", "exec"), scope)
    finally:
        os.chdir(before)
    return sum(len(entry) for entry in scope["opt"].state_dict()["state"].values())


def test_snippet(pools: Pools, tmp_path: Path) -> None:
    (code,) = re.findall(r"```py\n(.*?)```", README.read_text(), flags=re.S)
    first, second = pools[2].run(run_snippet, code, str(tmp_path))
    assert first > second
    assert (tmp_path / "run" / "100" / ".metadata").exists()
