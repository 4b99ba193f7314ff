"""The tuner: budgets are kept, nothing of the model changes, and the frontier is one. Times are never tested."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lather
from lather import cli
from lather.report import trials
from lather.report.choice import Budgets, Row, distance, mark_frontier, recommend
from lather.report.models import gpt2, load, on_meta
from lather.report.timing import Bench, Line, Times, largest_share, line_through
from lather.report.tune import parse_bytes, parse_fraction

USUAL: dict[str, Any] = {"max_preconditioner_dim": 1024, "precondition_frequency": 10, "root_dtype": "float32"}
USUAL |= {"factors": "full", "root": "auto", "refresh": "together"}


def rows(count: int = 60) -> list[Row]:
    chance, found = random.Random(0), []
    for _ in range(count):
        options = USUAL | {"precondition_frequency": chance.choice([1, 10, 100]), "factors": chance.choice(["full", "packed"])}
        options |= {"max_preconditioner_dim": chance.choice([512, 1024]), "root_dtype": chance.choice(["float32", "bfloat16"])}
        mean = chance.choice([1.0, 2.0, 3.0])
        timed = chance.random() < 0.9
        found.append(Row(options, chance.choice([10, 20, 30]), *((mean, mean + chance.choice([0, 5])) if timed else (None, None))))
    return found


# Choices.


def test_the_frontier_is_what_nothing_beats() -> None:
    marked = mark_frontier(rows())
    timed = [row for row in marked if row.mean_ms is not None]

    def beats(a: Row, b: Row) -> bool:
        return a.costs() != b.costs() and all(x <= y for x, y in zip(a.costs(), b.costs(), strict=True))

    for row in timed:
        assert row.on_frontier == (not any(beats(other, row) for other in timed))
    assert 0 < sum(row.on_frontier for row in timed) < len(timed) and not any(r.on_frontier for r in marked if r.mean_ms is None)


@pytest.mark.parametrize("memory", [10, 25, None])
@pytest.mark.parametrize("step_ms", [3.5, 12.0, None])
@pytest.mark.parametrize("overhead", [0.5, 1.0, None])
def test_the_recommendation_keeps_budgets_and_is_nearest(memory: int | None, step_ms: float | None, overhead: float | None) -> None:
    budgets = Budgets(memory, step_ms, overhead, pass_ms=2.0)

    def keeps(row: Row) -> bool:
        if row.mean_ms is None or row.largest_ms is None:
            return False
        return (
            (memory is None or row.memory_bytes <= memory)
            and (step_ms is None or 2.0 + row.largest_ms <= step_ms)
            and (overhead is None or row.mean_ms <= 2.0 * overhead)
        )

    best, good = recommend(rows(), budgets, USUAL), [row for row in rows() if keeps(row)]
    assert bool(good) == (budgets.excess(best) <= 1)
    if good:
        assert keeps(best) and distance(best.options, USUAL) == min(distance(row.options, USUAL) for row in good)


def test_what_is_given_up_first() -> None:
    """Free things first, then rounding, then the age of roots, then blocks."""
    order = [{"refresh": "staggered"}, {"factors": "packed"}, {"root_dtype": "bfloat16"}, {"precondition_frequency": 20}]
    far = [distance(USUAL | changes, USUAL) for changes in ({}, *order, {"max_preconditioner_dim": 512})]
    assert far == sorted(far) and len(set(far)) == len(far)


def test_if_nothing_was_timed_memory_decides() -> None:
    few = [Row(USUAL | {"factors": kind}, size) for kind, size in (("full", 300), ("packed", 200))]
    assert recommend(few, Budgets(memory=100, step_ms=1.0), USUAL) is few[1]


def test_lines_do_not_fall() -> None:
    for (low, high), floor in product([(1.0, 2.0), (2.0, 1.0), (0.1, 9.0)], [0.0, 0.5, 3.0]):
        for far in (0.05, 0.2):  # or both are the same
            line = line_through([(0.05, low), (far, high)], floor)
            assert line.constant >= floor and line.work >= 0 and line.at(1) >= line.at(0.01) > 0


def test_the_largest_share_is_that_of_a_block_if_there_are_few() -> None:
    opt = lather.Shampoo([nn.Parameter(torch.randn(8, 8)) for _ in range(4)])
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.randn(8, 8)
    opt.step()
    assert [largest_share(opt._session.run.plan, n) for n in (1, 2, 4, 100)] == [1.0, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("text", ["40", "40 gb", "0.5TiB", 7])
def test_sizes(text: Any) -> None:
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("read", "wrong"), [(parse_bytes, ("", "GB", "-1GB", "0GB", "4 apples")), (parse_fraction, ("ten", "0%", -1))]
)
def test_wrong_sizes(read: Any, wrong: Any) -> None:
    for text in wrong:
        with pytest.raises(ValueError, match="such as"):
            read(text)


# The search, with times that are made up.


class Made:
    """Refreshes that grow with blocks. Rounded roots and packed factors cost a little, and one solver is the fastest."""

    FASTEST, FAILS = "newton", 4096

    def __init__(self, opt: lather.Shampoo, device: torch.device) -> None:
        self.measured: list[dict[str, Any]] = []

    def measure(self, opt: lather.Shampoo) -> Times:
        group = opt.param_groups[0]
        self.measured.append(dict(group))
        if group["max_preconditioner_dim"] == self.FAILS:
            raise torch.OutOfMemoryError
        slower = 1.0 if group["root"] == self.FASTEST else 1.5
        plain = 4.0 + 0.1 * (group["factors"] == "packed") + 0.1 * (group["root_dtype"] == "bfloat16")
        work = slower * group["max_preconditioner_dim"] / 16
        return Times(Line(plain, work), plain + work, Line(plain + 0.2, work), Line(plain + 0.5, work), lambda n: 1.2 / n)

    def run(self, opt: lather.Shampoo, refresh: str, frequency: int) -> tuple[float, float]:
        times = self.measure(opt)
        return 1.01 * times.mean(refresh, frequency), 1.01 * times.largest(refresh, frequency)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "Bench", Made)


def layers() -> nn.Module:
    """Two of the layers of GPT-2, whose shapes are those of all."""
    return on_meta(partial(gpt2, layers=2))


def evaluated(report: lather.TuneReport, model: nn.Module) -> dict[str, Any]:
    """The options of the optimizer that the line to paste makes."""
    opt = eval(report.line, {"lather": lather, "model": model})
    group = opt.param_groups[0]
    return {name: group[name] for name in USUAL} | {"root_dtype": group["root_dtype"] or "float32"}


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("name", "budgets"),
    [
        ("layers", {}),
        ("resnet50", {}),
        ("layers", {"memory": "40GB", "step_ms": 70, "overhead": "10%"}),
        ("layers", {"memory": "900MiB", "step_ms": 100, "forward_backward": 60}),
        ("layers", {"overhead": 0.2, "forward_backward": 60, "memory": "1MB"}),
        ("layers", {"step_ms": 5}),
    ],
)
def test_recommendations(name: str, budgets: dict[str, Any]) -> None:
    model = layers() if name == "layers" else load(name)
    assert isinstance(model, nn.Module)
    report = lather.tune(model, device="cpu", **budgets)
    best = report.recommended
    assert evaluated(report, model) == best.options
    ms = budgets.get("forward_backward", 0)
    if report.fits:
        assert best.mean_ms is not None and best.largest_ms is not None and report.run_ms is not None
        base = ms or (70 / 1.1 if "overhead" in budgets else 0.0)
        assert base + best.largest_ms <= budgets.get("step_ms", float("inf"))
        assert best.mean_ms <= (parse_fraction(budgets.get("overhead")) or float("inf")) * (base or float("inf"))
        assert best.memory_bytes <= (parse_bytes(budgets.get("memory")) or float("inf"))
        assert "Recommended:" in str(report)
    else:
        assert "No options keep" in str(report) and "Nearest:" in str(report)
    if not budgets:
        assert report.fits and report.line == "lather.Shampoo(model)"
    assert any(row.note == "out of memory" for row in report.rows) == ("1MB" not in budgets.values())
    assert json.loads(json.dumps(report.to_dict()))["line"] == report.line
    assert report.line in str(report) and all(row.on_frontier for row in report.frontier)


@pytest.mark.usefixtures("made")
def test_what_is_searched() -> None:
    model = layers()
    found = [row.options for row in lather.tune(model, device="cpu").rows]
    assert {o["max_preconditioner_dim"] for o in found} == {512, 1024, 2048, 4096}
    assert {o["root"] for o in found} == {"auto", "newton"} and {o["refresh"] for o in found} == {"together", "staggered"}
    assert {(o["factors"], o["root_dtype"]) for o in found} == set(product(("auto", "packed"), ("float32", "bfloat16")))
    saving = [o for o in found if o["factors"] == "packed"]
    assert {o["root"] for o in saving} == {"newton"}  # the fastest


@pytest.mark.usefixtures("made")
def test_what_is_given_is_not_searched() -> None:
    given = {
        "max_preconditioner_dim": 2048,
        "root": "eigh",
        "precondition_frequency": 20,
        "refresh": "staggered",
        "factors": "packed",
    }
    report = lather.tune(layers(), device="cpu", lr=0.5, preset="from_adamw", **given)
    for name, value in given.items():
        assert {row.options[name] for row in report.rows} == {value}
    assert len(report.rows) == 2  # of root_dtype
    assert report.line.startswith("lather.from_adamw(model, lr=0.5, max_preconditioner_dim=2048")


@pytest.mark.usefixtures("made")
def test_what_a_method_cannot_do_is_left_out() -> None:
    """A solver without bases, for a method that needs them; and packed factors where they have no effect."""
    report = lather.tune(load("gpt2-tiny"), device="cpu", preset="soap")
    assert {row.options["root"] for row in report.rows} == {"auto"}
    with pytest.raises(ValueError, match="nothing to tune"):
        lather.tune(load("gpt2-tiny"), device="cpu", preset="muon")
    with pytest.raises(ValueError, match="nothing to tune"):
        lather.tune({"bias": (8,)}, device="cpu")


@pytest.mark.usefixtures("made")
def test_what_does_not_fit_is_not_tried() -> None:
    report, budget = lather.tune(layers(), device="cpu", memory="800MiB"), 800 * 2**20
    over = [row for row in report.rows if row.memory_bytes > budget]
    assert over and all(row.mean_ms is None and "needs" in row.note for row in over)
    assert report.fits and report.recommended.memory_bytes <= budget


def test_what_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Made):
        def measure(self, opt: lather.Shampoo) -> Times:
            if opt.param_groups[0]["factors"] == "packed":
                raise RuntimeError("no such kernel\nand more")
            return super().measure(opt)

    monkeypatch.setattr(trials, "Bench", Fails)
    report = lather.tune(load("gpt2-tiny"), device="cpu")
    notes = {row.note for row in report.rows if row.options["factors"] == "packed"}
    assert notes == {"failed: no such kernel"} and "failed: no such kernel" in str(report) and report.fits


@pytest.mark.usefixtures("made")
def test_without_time_only_the_usual_is_timed() -> None:
    report = lather.tune(layers(), device="cpu", seconds=0)
    timed = [row for row in report.rows if row.mean_ms is not None]
    assert {row.options["max_preconditioner_dim"] for row in timed} == {1024}
    assert "Some options were not timed. Give the search more seconds." in str(report) and "packed" not in str(report)


def test_a_run_that_exceeds_a_budget_changes_the_recommendation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slower(Made):
        def run(self, opt: lather.Shampoo, refresh: str, frequency: int) -> tuple[float, float]:
            return (100.0, 100.0) if frequency == 10 and refresh == "together" else (1.0, 1.0)

    monkeypatch.setattr(trials, "Bench", Slower)
    report = lather.tune(load("gpt2-tiny"), device="cpu", overhead=0.5, forward_backward=60)
    assert report.fits and report.run_ms == (1.0, 1.0)
    assert (report.recommended.options["refresh"], report.recommended.options["precondition_frequency"]) == ("staggered", 10)


@pytest.mark.usefixtures("made")
def test_ranks_on_paper() -> None:
    report = lather.tune(layers(), device="cpu", ranks=(1, 8), shard="fsdp", memory="500MB")
    one, eight = report.ranks
    assert not report.fits and not one["fits"] and eight["fits"]
    assert eight["memory_bytes"] < one["memory_bytes"] and eight["mean_ms"] < one["mean_ms"]
    assert "communication is not in them" in str(report)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"overhead": "10%"}, "give its milliseconds as forward_backward"),
        ({"overhead": "ten"}, "'10%' or 0.1"),
        ({"memory": "much"}, "'40GB'"),
        ({"step_ms": -1}, "step_ms=-1"),
        ({"forward_backward": "fast"}, "forward_backward='fast'"),
        ({"device": "warp"}, "device='warp'"),
        ({"device": "meta"}, "device='meta'"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"seconds": -1.0}, "seconds=-1.0"),
        ({"preset": "from_adm"}, "did you mean 'from_adam'"),
        ({"graft": "adm"}, "graft='adm'"),
    ],
)
def test_mistakes(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lather.tune(load("gpt2-tiny"), **{"device": "cpu"} | given)


def test_a_wrong_layout_is_found_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.Trials, "search", lambda *_: pytest.fail("it was searched"))
    with pytest.raises(ValueError, match="shard='tp=2' does not divide 3 ranks"):
        lather.tune(load("gpt2-tiny"), device="cpu", ranks=[3], shard="tp=2")


@pytest.mark.usefixtures("made")
def test_a_search_that_ends_early_says_so() -> None:
    report = lather.tune(load("gpt2-tiny"), device="cpu", step_ms=0.001, seconds=0)
    assert {row.note for row in report.rows} == {"", trials.LATE}
    assert "Some options were not timed. Give the search more seconds." in str(report)
    assert "more seconds" not in str(lather.tune(load("gpt2-tiny"), device="cpu"))


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trials.Trials, "search", interrupted)
    assert cli.main(["tune", "gpt2-tiny", "--device", "cpu"]) == 130
    assert "lather: stopped" in capsys.readouterr().err


def test_the_progress_bar(made: None, capsys: pytest.CaptureFixture[str]) -> None:
    lather.tune(layers(), device="cpu", progress=True)
    bar = capsys.readouterr().err
    assert "[###" in bar and "max_preconditioner_dim=2048" in bar and bar.endswith("\r\033[K")
    lather.tune(load("gpt2-tiny"), device="cpu")
    assert capsys.readouterr().err == ""


# For real.


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4), nn.Linear(4, 4).requires_grad_(False)
    )


def test_the_model_stays_as_it_was() -> None:
    model, x = net(), torch.randn(8, 12)
    model(x).square().mean().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    params, grads = list(model.parameters()), [p.grad for p in model.parameters()]
    numbers = [None if grad is None else grad.clone() for grad in grads]
    rng = torch.get_rng_state()
    report = lather.tune(model, forward_backward=lambda: model(x).square().mean().backward(), overhead=100.0)
    assert report.rows and report.budgets.pass_ms > 0
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for p, grad, number in zip(params, grads, numbers, strict=True):
        assert p.grad is grad and (grad is None or number is None or torch.equal(grad, number))
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("options", [{"refresh_delay": 6, "preset": "from_sgd", "momentum": 0.9}, {"preset": "soap"}])
def test_real_steps(options: dict[str, Any]) -> None:
    report = lather.tune(net(), **options)
    assert all(0 < row.mean_ms <= row.largest_ms for row in report.rows if row.mean_ms and row.largest_ms)
    assert report.recommended.mean_ms and report.run_ms and report.fits
    if "refresh_delay" in options:
        assert min(row.options["precondition_frequency"] for row in report.rows) == 10


@pytest.mark.parametrize("refresh", ["together", "staggered"])
def test_what_a_run_times_was_done_twice_before(refresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a refresh compiles kernels the first time, and is captured in a graph the second time."""
    opt, frequency, done = lather.Shampoo(net()), 4, list[tuple[bool, ...]]()
    bench, step = Bench(opt, torch.device("cpu")), Bench._step

    def roots() -> dict[int, torch.Tensor]:
        banks = opt._session.run.banks if done else ()
        return {block.param: root.clone() for bank in banks for block, role, root in bank.views() if role == "X0"}

    def watched(self: Bench, opt: lather.Shampoo) -> float:
        before, ms = roots(), step(self, opt)
        after = roots()
        done.append(tuple(not torch.equal(x, after[name]) for name, x in before.items()))
        return ms

    monkeypatch.setattr(Bench, "_step", watched)
    bench.run(opt, refresh, frequency)
    timed = max(1, -(-30 // frequency)) * frequency
    assert any(map(any, done[-timed:]))
    assert all(done[:-timed].count(refreshed) >= 2 for refreshed in set(done[-timed:]))


def test_stand_ins_are_like_the_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Linear(8, 4, dtype=torch.bfloat16)).to(memory_format=torch.channels_last)
    bench = Bench(lather.Shampoo(model), torch.device("cpu"))
    for (name, p), (other, q) in zip(sorted(model.named_parameters()), sorted(bench._params.items()), strict=True):
        assert (name, p.shape, p.dtype, p.stride()) == (other, q.shape, q.dtype, q.stride()) and p is not q


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny_net.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(8, 4)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    budgets = ["--memory", "40GB", "--step-ms", "70000", "--overhead", "10%", "--device", "cpu"]
    assert cli.main(["tune", "tiny_net:make", *budgets, "--ranks", "2", "--lr", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "lather.Shampoo(model, lr=0.1)" in text and "budgets: memory" in text and "Estimates" in text
    assert cli.main(["tune", "w=8x8,b=8", "--json", "--precondition-frequency", "5", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"]["options"]["precondition_frequency"] == 5
    assert cli.main(["tune", "w=8x8", "--overhead", "10%"]) == 2
    assert "--forward-backward-ms" in capsys.readouterr().err
    assert cli.main(["tune", "w=8x8", "--block-size", "64"]) == 2
    assert "did you mean --max-preconditioner-dim?" in capsys.readouterr().err
