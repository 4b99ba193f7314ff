"""Checkpoints that older versions wrote are loaded, and training goes on as it did with those versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make
from paper import PAPER
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lather
from lather.linalg import side_of
from lather.runtime.checkpoint import VERSION

FILES = sorted(make.FOLDER.glob("*.pt"))
# What was written on another machine: products and decompositions are rounded in other ways by other processors and
# libraries, so bits may differ. Whatever is loaded wrongly is off by far more.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}
NEAR: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}  # for a solver that was removed, and is replaced by another


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
    torch.testing.assert_close(finish(name, saved, resumed=True), saved["after"], **NEAR if name == "qr-delayed" else CLOSE)


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
    assert versions == {f"v{number}" for number in range(1, VERSION + 1)}
    for version in versions:
        assert sum(path.stat().st_size for path in FILES if path.stem.startswith(f"{version}-")) < 300_000


# Version 1 cut dimensions that do not divide into nearly equal blocks.

SIDES = {1: [26, 25], 16: [32, 19]}  # of the dimension of size 51, by block_multiple


def sides(opt: lather.Shampoo) -> list[int]:
    (state,) = (entry for entry in opt.state.values() if "L0.1" in entry)
    return [side_of(value[None]) for key, value in state.items() if key.startswith("L0.")]


def test_a_new_optimizer_takes_over_the_older_blocks_and_options() -> None:
    saved = load(make.FOLDER / "v1-cut.pt")
    assert all("block_multiple" not in group for group in saved["optimizer"]["param_groups"])
    model, opt = make.build("cut")
    assert opt.param_groups[0]["block_multiple"] == 16
    opt.load_state_dict(saved["optimizer"])
    assert sides(opt) == SIDES[1]
    assert {name: opt.param_groups[0][name] for name in PAPER} == PAPER
    again = opt.state_dict()
    assert again["lather_version"] == VERSION and again["param_groups"][0]["block_multiple"] == 1
    for key, p in model.named_parameters():
        p.data = saved["model"][key].clone()
    _, other = make.build("cut")
    other.load_state_dict(again)
    assert sides(other) == SIDES[1]
    make.advance(model, opt, make.SAVED + 1, make.END)
    torch.testing.assert_close(make.values(model), saved["after"], **CLOSE)
    with pytest.raises(ValueError, match="block_multiple of param group 0 was changed from 1 to 16 after the first step"):
        opt.param_groups[0]["block_multiple"] = 16
        opt.step()


def test_blocks_are_taken_over_after_state_was_allocated() -> None:
    """By a state dict, or by torch's checkpoint code, which takes a step with zeros."""
    saved = load(make.FOLDER / "v1-cut.pt")["optimizer"]
    for allocate in (lambda model, opt: opt.state_dict(), get_optimizer_state_dict):
        model, opt = make.build("cut")
        allocate(model, opt)
        assert sides(opt) == SIDES[16]
        opt.load_state_dict(saved)
        assert sides(opt) == SIDES[1]


def test_an_optimizer_that_has_started_refuses_other_blocks() -> None:
    saved = load(make.FOLDER / "v1-cut.pt")["optimizer"]
    model, _ = make.build("cut")
    options: dict[str, Any] = {"max_preconditioner_dim": 40, "graft": "adam"}
    opt = lather.Shampoo(list(model.named_parameters()), **options)
    make.advance(model, opt, 1, 1)
    before = {key: value.clone() for p in model.parameters() for key, value in opt.state[p].items()}
    with pytest.raises(
        ValueError, match=r"saved with block_multiple=1 but .* block_multiple=16.*construct it with block_multiple=1"
    ):
        opt.load_state_dict(saved)
    assert sides(opt) == SIDES[16] and opt.param_groups[0]["block_multiple"] == 16
    torch.testing.assert_close({k: v for p in model.parameters() for k, v in opt.state[p].items()}, before, rtol=0, atol=0)
    make.advance(model, opt, 2, 2)
    model, _ = make.build("cut")
    opt = lather.Shampoo(list(model.named_parameters()), block_multiple=1, **options)
    make.advance(model, opt, 1, 1)
    opt.load_state_dict(saved)
    assert sides(opt) == SIDES[1] and all(entry["step"] == make.SAVED for entry in opt.state.values())


@pytest.mark.parametrize("path", [path for path in FILES if path.stem.endswith("-shampoo")], ids=lambda path: path.stem)
def test_a_new_optimizer_takes_over_adams_moments(path: Path) -> None:
    """Which older versions kept by default. One that has taken steps has none, and refuses."""
    saved = load(path)["optimizer"]
    model, opt = make.build("shampoo")
    assert opt.param_groups[0]["graft"] == "auto" and saved["param_groups"][0]["graft"] == "adam"
    make.advance(model, opt, 1, 1)
    assert "v.0" not in opt.state[model.weight]
    with pytest.raises(ValueError, match=r"saved with graft='adam' but .* graft='adafactor'.*construct it with graft='adam'"):
        opt.load_state_dict(saved)
    make.advance(model, opt, 2, 2)
    model, opt = make.build("shampoo")
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["graft"] == "adam" and "v.0" in opt.state[model.weight]


@pytest.mark.parametrize("name", ["max_preconditioner_dim", "root_dtype", "graft"])
def test_no_other_structure_is_taken_over(name: str) -> None:
    model, _ = make.build("cut")
    options: dict[str, Any] = {"max_preconditioner_dim": 40} | {
        name: {"max_preconditioner_dim": 20, "root_dtype": "bfloat16", "graft": "sgd"}[name]
    }
    opt = lather.Shampoo(list(model.named_parameters()), **options)
    with pytest.raises(ValueError, match=f"{name}=.*construct it with {name}="):
        opt.load_state_dict(load(make.FOLDER / "v1-cut.pt")["optimizer"])
