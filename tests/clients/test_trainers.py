"""Stopped and resumed in a real trainer, a run is as if nothing had happened: with one process, and with two."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import Pool

from .entry import call

Worlds = dict[int, Pool]

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": False}
SAVING: dict[str, dict[str, Any]] = {
    "steps": {"save_strategy": "steps", "save_steps": 3},
    "epoch": {"save_strategy": "epoch"},
    "best": {"save_strategy": "best", **EVALUATED},
    "steps and evaluations": {"save_strategy": "steps", "save_steps": 2, **EVALUATED},
}
FIRST = {"steps": 3, "epoch": 4, "best": 2, "steps and evaluations": 2}  # the step of the first checkpoint
AVERAGED = {"averaging": "schedule_free", "betas": (0.0, 0.95)}
both = pytest.mark.parametrize("world", [1, 2], ids=["one process", "two processes"])


def difference(results: list[dict[str, Any]], name: str = "again") -> float:
    """The largest difference of a weight from the undisturbed run, over all ranks."""
    pairs = [(mine[name][key], results[0]["whole"][key]) for mine in results for key in mine["whole"]]
    assert pairs and all(mine.isfinite().all() for mine, _ in pairs)
    return max(float((mine - whole).abs().max()) for mine, whole in pairs)


def rows(*rows: tuple[Any, int]) -> pytest.MarkDecorator:
    """What, and the number of processes. Where there is one, nothing is gathered, whenever it is."""
    ids = [f"{what}-{'two processes' if world == 2 else 'one process'}" for what, world in rows]
    return pytest.mark.parametrize(("what", "world"), rows, ids=ids)


@rows(("steps", 1), *((saving, 2) for saving in SAVING))
def test_transformers(worlds: Worlds, tmp_path: Path, world: int, what: str) -> None:
    results = worlds[world].run(call, "train_transformers", tmp_path, SAVING[what], {})
    assert difference(results) == 0.0
    for result in results:
        assert result["names"] == ["Shampoo", "Shampoo"]
        assert result["saved"] == f"checkpoint-{FIRST[what]}"
        assert not result["warned"]


@rows(("steps and evaluations", 1), ("best", 2))
def test_transformers_averages(worlds: Worlds, tmp_path: Path, world: int, what: str) -> None:
    """Trainer evaluates the average, and saves in that mode."""
    results = worlds[world].run(call, "train_transformers", tmp_path, SAVING[what], AVERAGED)
    assert difference(results) == 0.0
    assert not any(result["warned"] for result in results)


def test_peft(worlds: Worlds, tmp_path: Path) -> None:
    results = worlds[2].run(call, "train_transformers", tmp_path, SAVING["steps"], {}, True)
    assert any("lora_A" in name for name in results[0]["whole"])
    assert difference(results) == 0.0
    assert not any(result["warned"] for result in results)


def test_transformers_without_our_callback(worlds: Worlds, tmp_path: Path) -> None:
    """Trainer asks rank 0 alone."""
    first, second = worlds[2].run(call, "transformers_without_callback", tmp_path)
    assert len(first) == 1 and "lather.integrations.transformers.Callback()" in first[0]
    assert not second


@both
def test_accelerate(worlds: Worlds, tmp_path: Path, world: int) -> None:
    results = worlds[world].run(call, "train_accelerate", tmp_path)
    assert difference(results) == difference(results, "run") == 0.0
    assert not any(result["warned"] for result in results)


def test_accelerate_without_our_hook(worlds: Worlds, tmp_path: Path) -> None:
    """It asks every rank."""
    for result in worlds[2].run(call, "train_accelerate", tmp_path, False):
        assert len(result["warned"]) == 1 and "lather.integrations.accelerate.register(accelerator)" in result["warned"][0]


@both
def test_lightning(worlds: Worlds, tmp_path: Path, world: int) -> None:
    """It consolidates by itself."""
    results = worlds[world].run(call, "train_lightning", tmp_path)
    assert difference(results) == 0.0
    assert not any(result["warned"] for result in results)


def test_lightning_with_fsdp2_and_one_file(worlds: Worlds, tmp_path: Path) -> None:
    """It needs the hook that docs/lightning.md shows."""
    results = worlds[2].run(call, "train_lightning", tmp_path, True)
    assert difference(results) == 0.0
    assert (tmp_path / "middle.ckpt").is_file() and not any(result["warned"] for result in results)


# Metrics.


def recorded(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "run.jsonl").read_text().splitlines()]


@both
def test_transformers_logs_metrics(worlds: Worlds, tmp_path: Path, world: int) -> None:
    for logs in worlds[world].run(call, "log_transformers", tmp_path):
        assert [log["step"] for log in logs if "lather/weights/condition" in log] == [2, 6, 8]  # of the steps 2, 5 and 8
        assert all("loss" in log for log in logs if "lather/weights/condition" in log)
    assert recorded(tmp_path) == [1, 2, 5, 8]


@both
def test_lightning_logs_metrics(worlds: Worlds, tmp_path: Path, world: int) -> None:
    worlds[world].run(call, "log_lightning", tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["lather/weights/condition"]] == [1, 2, 5, 8] == recorded(tmp_path)


# The examples: a second run goes on from the first checkpoint, if the later ones are gone.


def remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path)


FORGET = {
    "train_trainer.py": lambda run: remove(run / "checkpoint-40", run / "checkpoint-60"),
    "train_lightning.py": lambda run: shutil.copy(run / "epoch=0.ckpt", run / "last.ckpt"),
    "train_accelerate.py": lambda run: remove(run / "epoch-2", run / "epoch-3"),
}


@rows(("train_lightning.py", 1), ("train_accelerate.py", 1), *((script, 2) for script in FORGET))
def test_examples(worlds: Worlds, tmp_path: Path, world: int, what: str) -> None:
    first = worlds[world].run(call, "run_example", tmp_path, what)
    FORGET[what](tmp_path / what.replace("train_", "run-").removesuffix(".py"))
    second = worlds[world].run(call, "run_example", tmp_path, what)
    assert "resuming" not in first[0]["printed"] and "resuming" in second[0]["printed"]
    for result in (*first, *second):
        assert not result["warned"]
        for name, weight in first[0]["weights"].items():
            assert torch.equal(result["weights"][name], weight), name
