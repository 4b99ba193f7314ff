"""The command line, and a demo that is as short as it can be."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lather import __version__
from lather.cli import main


def cells(text: str) -> list[list[str]]:
    """The rows of the table, header first."""
    return [re.split(r"\s{2,}", line) for line in text.split("\n\n")[0].splitlines()]


def run_demo(capsys: pytest.CaptureFixture[str], out: Path, *flags: str) -> tuple[list[list[str]], str, str]:
    assert main(["demo", "--epochs", "1", "--repeats", "1", "--out", str(out), *flags]) == 0
    printed = capsys.readouterr()
    return cells(printed.out), printed.out, printed.err


def without_times(table: list[list[str]]) -> list[list[str]]:
    column = table[0].index("ms per step")
    return [row[:column] + row[column + 1 :] for row in table]


def test_demo_shows_three_rows_and_a_plot_and_a_monitor_makes_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And the same numbers twice, whether it is watched or not."""
    table, _, progress = run_demo(capsys, tmp_path / "new" / "folder")
    assert [row[0] for row in table] == ["optimizer", "lather", "AdamW", "SGD"]
    assert len({len(row) for row in table}) == 1
    assert [line.split()[0] for line in progress.splitlines()] == ["lather", "AdamW", "SGD"]
    assert (tmp_path / "new" / "folder" / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    again, printed, _ = run_demo(capsys, tmp_path, "--monitor")
    assert without_times(again) == without_times(table)
    assert "run.html" in printed
    assert "0.weight" in (tmp_path / "run.html").read_text()


def test_seed_decides_weights_and_batches() -> None:
    from lather import demo

    weights = [next(demo.make_model(seed).parameters()) for seed in (0, 0, 1)]
    orders = [next(demo.batches(demo.Job("lather", 1e-3, seed, 1), 100)) for seed in (0, 0, 1)]
    for same, again, other in (weights, orders):
        assert same.equal(again)
        assert not same.equal(other)


def test_sweep_stars_the_best_of_each_column(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from lather import demo

    monkeypatch.setattr(demo, "GRID", (1e-6, 0.032))
    monkeypatch.setattr(demo, "TARGET_ACCURACY", 0.2)
    assert main(["demo", "--sweep", "--epochs", "1", "--repeats", "1"]) == 0
    header, *rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert header.split() == ["lr", "lather", "AdamW", "SGD"]
    assert [row.split()[0] for row in rows] == ["1e-06", "0.032"]
    assert [row.count("*") for row in rows] == [0, 3]


def test_learning_rates_are_from_inside_the_common_grid() -> None:
    from lather import demo

    assert set(demo.LEARNING_RATES) == set(demo.OPTIMIZERS) == set(demo.COLORS)
    assert all(lr in demo.GRID[1:-1] for lr in demo.LEARNING_RATES.values())


def test_test_images_are_in_no_split_of_the_sweep() -> None:
    from lather import demo

    training, test = demo.load_digits()
    part, validation = demo.split_validation(training)
    assert [len(split.labels) for split in (part, validation, test)] == [1200, 300, 297]
    seen = {image.numpy().tobytes() for split in (part, validation) for image in split.images}
    assert not any(image.numpy().tobytes() in seen for image in test.images)


@pytest.mark.parametrize("module", ["sklearn", "matplotlib"])
def test_missing_extra_says_what_to_install(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "run: pip install scikit-learn matplotlib" in capsys.readouterr().err  # the same from a checkout and from the index


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required"),
        ("train", "invalid choice"),
        ("demo --epochs 0", "--epochs: '0' is not a whole number of at least 1"),
        ("demo --epochs many", "'many' is not a whole number"),
        ("demo --repeats 0", "--repeats"),
        ("demo --seed -1", "--seed: '-1' is not a whole number of at least 0"),
        ("plan", "MODEL"),
        ("plan gpt2 --ranks 8,0", "--ranks: '0' is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_exit_with_a_message(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["plan", "w"], "'w'"),
        (["plan", "w=2,w=3"], "'w=3'"),
        (["plan", "w=64*32"], "'64*32'"),
        (["plan", "w=64x32", "--max-preconditioner-dim", "0"], "max_preconditioner_dim=0"),
        (["plan", "w=64x32", "--max-preconditioner-dim", "x"], "max_preconditioner_dim='x'"),
        (["demo", "--out", __file__], "exists"),
    ],
)
def test_what_cannot_be_done_exits_with_a_message(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    assert message in capsys.readouterr().err


def test_plan_prints_the_report_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["plan", "w=64x32,b=64", "--max-preconditioner-dim", "32"]
    assert main(shapes) == 0
    assert "2 of 32 x 32" in capsys.readouterr().out
    assert main([*shapes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["blocks"]) for row in report["params"]] == [("w", 2), ("b", 1)]


def test_plan_shows_what_smaller_state_saves(capsys: pytest.CaptureFixture[str]) -> None:
    def memory(*options: str) -> dict[str, int]:
        assert main(["plan", "w=64x64", "--json", *options]) == 0
        found: dict[str, int] = json.loads(capsys.readouterr().out)["memory"]
        return found

    plain, small = memory("--factors", "full"), memory("--factors", "packed", "--root-dtype", "bfloat16")
    assert (plain["factors"], small["factors"]) == (2 * 64 * 64 * 4, 64 * 65 * 4)
    assert (plain["roots"], small["roots"]) == (2 * 64 * 64 * 4, 64 * 65 * 2)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"lather {__version__}\n"
