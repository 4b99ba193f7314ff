"""The benchmarks run, and what they write down is consistent. Their numbers are not tested."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lather.report.models import MODELS, gpt2, load, shapes_of
from lather.roots import SOLVERS, Eigh, Minimax, Newton

pytestmark = pytest.mark.scripts

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("machine", "common", "models", "report", "step", "train", "solvers", "fastest", "scale")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules, with models of next to nothing; precision is put back as it was."""
    before = torch.get_float32_matmul_precision()
    monkeypatch.syspath_prepend(FOLDER)
    modules = {name: importlib.import_module(name) for name in SCRIPTS}
    tiny = {"layers": 1, "width": 16, "vocab": 32, "context": 8}
    monkeypatch.setitem(MODELS, "gpt2-tiny", partial(gpt2, **tiny))
    small = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(4, 8, 3, bias=False), "fc": torch.nn.Linear(8, 4, bias=False)})
    monkeypatch.setitem(MODELS, "resnet50", lambda: small)
    transformer = modules["train"].transformer
    monkeypatch.setitem(modules["train"].WORKLOADS, "gpt2-tiny", partial(transformer, **tiny, heads=2, batch=2))
    yield modules
    torch.set_float32_matmul_precision(before)
    for name in SCRIPTS:
        sys.modules.pop(name)


def run(script: ModuleType, out: Path, *argv: object, status: int = 0) -> tuple[dict[str, Any], str]:
    """What a script wrote, as data and as Markdown."""
    target = out / "result.json"
    assert script.main([*map(str, argv), "--out", str(target)]) == status
    return json.loads(target.read_text()), target.with_suffix(".md").read_text()


def rows_of(text: str) -> list[list[str]]:
    """The cells of all tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = [i - 1 for i, line in enumerate(lines) if line.startswith("| ---")]
    return [line.strip("| ").split(" | ") for i, line in enumerate(lines) if i not in heads and i - 1 not in heads]


def check_record(data: dict[str, Any], text: str, out: Path) -> None:
    assert data["versions"]["torch"] == torch.__version__ and data["versions"]["lather"]
    assert data["command"].startswith(f"python benchmarks/{data['kind']}.py") and str(out) not in data["command"]
    assert all(x in text for x in (data["command"], data["date"], data["device"], *data["notes"]))


def test_step(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    models, options = ("gpt2-tiny", "resnet50-channels-last"), '{"root": "newton", "precondition_frequency": 3}'
    flags = ("--frequency", 2, "--steps", 4, "--options", options)
    data, text = run(bench["step"], tmp_path, "--models", *models, *flags)
    check_record(data, text, tmp_path)
    rows = {(row["model"], row["optimizer"]): row for row in data["results"]}
    names = ["lather together", "lather staggered", "lather root=newton precondition_frequency=3, routed"]
    assert {name for _, name in rows} >= {"AdamW fused", *names}
    assert [row[:2] for row in rows_of(text)] == [list(key) for key in rows]
    for row, cells in zip(rows.values(), rows_of(text), strict=True):
        assert row["worst_ms"] == max(row["step_ms"]) >= row["mean_ms"] and f"{row['mean_ms']:.2f}" == cells[2]
    together, staggered, slower = (rows["gpt2-tiny", name] for name in names)
    routed = [rows["gpt2-tiny", f"{name}, routed"] for name in names[:2]]
    assert all(row["state_mib"] < together["state_mib"] for row in routed)
    assert [row["solvers"] for row in (together, *routed, slower)] == [["eigh"]] * 3 + [["newton"]]
    assert ("resnet50-channels-last", "lather together, routed") not in rows
    assert [len(row["step_ms"]) for row in (together, staggered, slower)] == [4, 4, 6]
    assert together["plain_ms"] and staggered["plain_ms"] is None and staggered["first_refresh_ms"]
    muon = rows["gpt2-tiny", "lather.muon, routed"]
    assert muon["state_mib"] < routed[0]["state_mib"] and muon["solvers"] != ["eigh"] and len(muon["step_ms"]) == 4
    if hasattr(torch.optim, "Muon"):
        assert ("gpt2-tiny", "Muon (2-D only)") in rows and "resnet50-channels-last, Muon" in data["notes"][0]


def test_step_profiles_plain_steps_and_refreshes(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    flags = ("--models", "resnet50", "--rows", "together", "staggered", "--frequency", 2, "--steps", 2, "--profile")
    data, text = run(bench["step"], tmp_path, *flags)
    together, staggered = data["results"]
    assert set(together["profile"]) == {"plain", "refresh"} and set(staggered["profile"]) == {"refresh"}
    assert all(table in text for table in together["profile"].values())


def test_channels_last_is_in_parameters_and_gradients(bench: dict[str, ModuleType]) -> None:
    params, sets = bench["step"].tensors("resnet50-channels-last")
    for x in (params["conv.weight"], *(grads[0] for grads in sets)):
        assert x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def test_schedule_of_an_optimizer_is_what_it_does(bench: dict[str, ModuleType]) -> None:
    common = bench["common"]
    for refresh in ("together", "staggered"):
        p = torch.nn.Parameter(torch.randn(4, 4))
        opt = common.shampoo([p], 3, {"refresh": refresh, "max_preconditioner_dim": 2, "start_preconditioning_step": 4})
        schedule, changed, before = common.Schedule.of(opt), [], None
        for _ in range(schedule.warmup + schedule.whole(4)):
            p.grad = torch.randn(4, 4)
            opt.step()
            roots = torch.cat([x.flatten() for key, x in opt.state[p].items() if key.startswith("X")])
            changed.append(before is not None and not roots.equal(before))
            before = roots
        predicted = [schedule.refreshes(t + 1) for t in range(len(changed))]
        assert len(changed) == 16 and changed.count(True) > 1
        assert changed[3:] == predicted[3:]  # staggered, 4 blocks in 3 steps leave none idle


def test_train(bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    flags = ("--frequencies", 2, 3, "--steps", 3, "--no-compile", "--options", '{"graft": "sgd"}')
    data, text = run(bench["train"], tmp_path, "--models", "gpt2-tiny", "resnet50", *flags)
    check_record(data, text, tmp_path)
    assert len(data["notes"]) == 1 and data["notes"][0].startswith("resnet50: skipped")
    first, *lather, again = data["results"]
    assert (first["optimizer"], again["optimizer"]) == ("AdamW fused", "AdamW fused, again")
    names = ["lather staggered", "lather together", "lather graft=sgd"]
    assert [(row["frequency"], row["optimizer"]) for row in lather] == [(f, name) for f in (2, 3) for name in names]
    assert [len(row["step_ms"]) for row in data["results"]] == [3, *3 * [4], *3 * [3], 3]
    assert len({row["loss"] for row in (first, again)}) == 1  # from the same weights, to the same end
    for row, cells in zip(data["results"], rows_of(text), strict=True):
        assert row["overhead_mean"] == row["mean_ms"] / first["mean_ms"] - 1
        assert cells[7] == f"{row['overhead_mean']:+.1%}"


def test_transformer_has_the_shapes_of_gpt2(bench: dict[str, ModuleType]) -> None:
    size = {name: x for name, x in bench["train"].WORKLOADS["gpt2"].keywords.items() if name != "batch"}
    with torch.device("meta"):
        model = bench["models"].Transformer(**size)
    assert sorted(tuple(p.shape) for p in model.parameters()) == sorted(shapes_of(load("gpt2")).values())


def test_solvers(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8, 16)
    factors = {f"w/L{i}": factor for i, factor in enumerate(x @ x.mT)}
    torch.save({"about": {}, "frequency": 10, "beta2": 0.95, "factors": factors}, tmp_path / "real.pt")
    flags = ("--sizes", 8, 12, "--spectra", 1e-2, 1e-8, "--factors", tmp_path / "real.pt")
    data, text = run(bench["solvers"], tmp_path, *flags)
    check_record(data, text, tmp_path)
    assert not data["notes"]
    synthetic = [row for row in data["results"] if row["source"] == "synthetic"]
    recorded = [row for row in data["results"] if row["source"] == "real"]
    assert len(synthetic) == 2 * 2 * 2 * len(SOLVERS) and len(recorded) == 2 * (1 + len(SOLVERS))
    assert len(rows_of(text)) == 2 * 2 * len(SOLVERS) + len(recorded)
    for row in data["results"]:
        assert row["error_median"] <= row["error_p95"] <= row["error_worst"]
        if row["solver"] == "eigh":
            assert row["error"] < 1e-3 and not row["failed"] and row["ms"] > 0
        elif row["solver"] == "previous root":
            assert row["error"] > 0.1


def test_fastest(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    flags = ("--models", "gpt2-tiny", "--sizes", 5, 6, "--exponents", "1/4", 0.455, "--counts", 1, 3)
    state = torch.get_rng_state()
    data, text = run(bench["fastest"], tmp_path, *flags)
    check_record(data, text, tmp_path)
    assert not data["notes"] and torch.equal(torch.get_rng_state(), state)
    model, rows = data["results"][:-8], data["results"][-8:]
    assert [(row["d"], row["matrices"]) for row in model] == [(8, 1), (16, 7), (32, 1), (48, 1), (64, 2)]
    assert [(row["d"], row["exponent"], row["matrices"]) for row in rows] == [
        (d, e, n) for d in (5, 6) for e in (0.25, 0.455) for n in (1, 3)
    ]
    for row, cells in zip(data["results"], rows_of(text), strict=True):
        assert list(row["ms"]) == (["minimax", "newton", "eigh"] if row["exponent"] == 0.25 else ["eigh"])
        assert row["ms"][row["fastest"]] == min(row["ms"].values()) and row["auto"] == "eigh"
        marked = [name for name, cell in zip(("minimax", "newton", "eigh"), cells[3:6], strict=True) if "**" in cell]
        assert marked == [row["fastest"]]


def test_fastest_leaves_out_what_fails(bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root that is not ok, and a solver that does not run."""
    monkeypatch.setattr(bench["fastest"], "candidates", lambda e: (Newton(iterations=1), Minimax(), Eigh()))
    monkeypatch.setattr(Minimax, "_root", Mock(side_effect=RuntimeError("no compiler")))
    data, text = run(bench["fastest"], tmp_path, "--sizes", 8, "--counts", 2, status=1)
    (row,) = data["results"]
    assert row["ms"]["newton"] is None and "minimax" not in row["ms"] and row["fastest"] == "eigh"
    assert data["notes"] == ["minimax, size 8, exponent 0.25, 2 matrices failed: RuntimeError: no compiler"]
    assert "fails" in rows_of(text)[0]


def test_scale(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """Every layout, on ranks that are not there. The plan's bytes are those that are counted."""
    data, text = run(bench["scale"], tmp_path, "--tiny")
    check_record(data, text, tmp_path)
    assert not data["notes"] and not torch.distributed.is_initialized()
    rows = {(row["layout"], row["ranks"]): row for row in data["results"]}
    assert list(rows) == [(layout, n) for layout in ("fsdp", "hsdp", "tp", "ddp") for n in (2, 4)]
    numel = sum(math.prod(shape) for shape in shapes_of(load("gpt2-tiny")).values())
    parts = {"fsdp": (2, 4), "hsdp": (2, 2), "tp": (2, 4), "ddp": (1, 1)}
    for (layout, n), row in rows.items():
        assert row["received"] == row["plan_received"] > 0 and row["sent"] > 0 and row["vote"] == 32
        assert row["wire_ms"] == pytest.approx(max(row["received"], row["sent"]) / {2: 450e6, 4: 50e6}[n])
        assert row["own_blocks"] <= row["blocks"] and row["work_flop"] * n == pytest.approx(row["c_n"] * row["work_all_flop"])
        assert row["weights_mib"] * 2**18 >= numel / parts[layout][n // 4] and row["health"] == {}
    cells = rows_of(text)
    assert len(cells) == 2 * len(rows) and [line[12] for line in cells[len(rows) :]] == ["yes"] * len(rows)
    image = tmp_path / "scale.png"
    assert bench["scale"].main(["--plot", str(tmp_path / "result.json"), "--image", str(image)]) == 0
    assert image.stat().st_size > 10_000


def test_scale_begins_nothing_that_may_end_too_late(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    data, text = run(bench["scale"], tmp_path, "--tiny", "--layouts", "ddp", "--budget", 0)
    assert data["results"] == [] and "no time was left for gpt2-tiny, ddp, 2 ranks; gpt2-tiny, ddp, 4 ranks" in text


def test_scale_says_what_does_not_fit(bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is in the tables all the same."""
    monkeypatch.setattr(bench["scale"], "room_mib", lambda: 0.0)
    data, text = run(bench["scale"], tmp_path, "--tiny", "--layouts", "fsdp")
    assert not data["notes"] and [row[9] for row in rows_of(text)[:2]] == ["does not fit"] * 2
    assert all(row["c_n"] >= 1 and "mean_ms" not in row for row in data["results"])


def test_report_writes_the_same_elsewhere_and_refuses_strangers(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run(bench["step"], tmp_path, "--models", "gpt2-tiny", "--rows", "adamw", "--steps", 1)
    assert bench["report"].main([str(tmp_path / "result.json"), "--out", str(tmp_path / "there")]) == 0
    assert (tmp_path / "there" / "result.md").read_text() == text
    (tmp_path / "old.json").write_text('{"results": {}}')
    with pytest.raises(SystemExit):
        bench["report"].main([str(tmp_path / "old.json")])
    assert "old.json" in capsys.readouterr().err


def test_a_failing_row_is_noted_and_the_rest_goes_on(
    bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench["common"], "adamw", explode)
    flags = ("--models", "gpt2-tiny", "--frequency", 2, "--steps", 2, "--rows", "adamw", "together")
    data, text = run(bench["step"], tmp_path, *flags, status=1)
    assert data["notes"] == ["gpt2-tiny, AdamW fused failed: RuntimeError: out of memory"]
    assert [cells[1] for cells in rows_of(text)] == ["lather together"] and data["notes"][0] in text
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "argv", "message"),
    [
        ("step", ["--options", '{"root": "nil"}'], "nil"),
        ("train", ["--options", "{"], "{"),
        ("solvers", ["--solvers", "nil"], "not a root solver"),
        ("fastest", ["--exponents", "half"], "half"),
        ("scale", ["--ranks", "12"], "12 is not a multiple"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(
    script: str, argv: list[str], message: str, bench: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench[script].main(argv)
    assert message in capsys.readouterr().err
