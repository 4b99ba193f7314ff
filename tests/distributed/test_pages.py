"""What the site shows for several ranks runs on two of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from .harness import Pools

DOCS = Path(__file__).parents[2] / "docs"
WRITTEN = {
    "ddp.md": "checkpoint.pt",
    "fsdp2.md": "run/step-100/.metadata",
    "tp.md": ".",
    "experts.md": "run/step-100/.metadata",
}  # by the snippets of each page


def snippets(page: str) -> list[str]:
    return re.findall(r"^```py\n(.*?)^```$", (DOCS / page).read_text(), flags=re.S | re.M)


def run_snippets(page: str, folder: str) -> int:
    """One after the other, in a folder. The number of tensors in this rank's state."""
    scope: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for snippet in snippets(page):
            exec(compile(snippet, page, "exec"), scope)
    finally:
        os.chdir(before)
    return sum(len(entry) for entry in scope["opt"].state.values())


def test_all_pages_are_run() -> None:
    assert {page.name for page in DOCS.glob("*.md") if snippets(page.name)} == set(WRITTEN)


@pytest.mark.parametrize("page", WRITTEN)
def test_snippets(pools: Pools, tmp_path: Path, page: str) -> None:
    assert all(pools[2].run(run_snippets, page, str(tmp_path)))
    assert (tmp_path / WRITTEN[page]).exists()
