"""Checkpoints that older versions wrote are loaded, and training goes on as it did with those versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make
from torch import Tensor

FILES = sorted(make.FOLDER.glob("*.pt"))
# What was written on another machine: products and decompositions are rounded in other ways by other processors and
# libraries, so bits may differ. Whatever is loaded wrongly is off by far more.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}


def load(path: Path) -> dict[str, Any]:
    saved = torch.load(path, weights_only=True)
    assert isinstance(saved, dict)
    return saved


def finish(name: str, saved: dict[str, Any], *, resumed: bool) -> dict[str, Tensor]:
    """The parameters after the steps that follow the checkpoint, with a new optimizer."""
    model, opt = make.build(name)
    for key, p in model.named_parameters():
        p.data = saved["model"][key].clone()
    if resumed:
        opt.load_state_dict(saved["optimizer"])
    make.advance(model, opt, make.SAVED + 1, make.END)
    return make.values(model)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_training_goes_on(path: Path) -> None:
    saved = load(path)
    _, name = path.stem.split("-", 1)
    torch.testing.assert_close(finish(name, saved, resumed=True), saved["after"], **CLOSE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_state_matters(path: Path) -> None:
    """Or the test above would compare nothing: without the checkpoint every parameter ends elsewhere."""
    saved = load(path)
    _, name = path.stem.split("-", 1)
    for key, value in finish(name, saved, resumed=False).items():
        assert not torch.allclose(value, saved["after"][key], **CLOSE), key


def test_every_version_has_all_files() -> None:
    versions = {path.stem.partition("-")[0] for path in FILES}
    assert {path.stem for path in FILES} == {f"{version}-{name}" for version in versions for name in make.MAKERS}
    assert "v1" in versions
    assert sum(path.stat().st_size for path in FILES if path.stem.startswith("v1")) < 300_000
