"""The experiments run, go on where they were cut, and the page of results is what the logs say. Their numbers are not tested."""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from experiments import data, harness, log, nets, recipes, report, tasks

pytestmark = pytest.mark.scripts

NAMES = ("wikitext", "resnet", "vit", "ablations")
EXPERIMENTS = {name: importlib.import_module(f"experiments.{name}").EXPERIMENT for name in NAMES}


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def run(name: str, path: pathlib.Path, *argv: object, status: int = 0) -> list[log.Finished]:
    assert harness.main(EXPERIMENTS[name], ["--tiny", "--log", str(path), *map(str, argv)]) == status
    return log.read(path)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Logs of all four experiments."""
    before, folder = torch.get_float32_matmul_precision(), tmp_path_factory.mktemp("results")
    torch.set_num_threads(1)

    def do(name: str, *argv: object) -> None:
        run(name, folder / f"{name}.jsonl", *argv)

    do("wikitext", "--runs", "adamw", "eigh@4", "--lr", 4e-3, 8e-3, "--steps", 12)
    do("wikitext", "--runs", "adamw", "eigh@4", "--best", "--steps", 12, "--seeds", 1)
    do("wikitext", "--runs", "eigh@4", "--best", "--steps", 8, "--looks", 4)
    do("resnet", "--runs", "sgd", "shampoo@10", "--lr", 0.1, "--epochs", 2, 1)
    do("vit", "--runs", "adamw", "muon", "--lr", 1e-3, "--epochs", 1)
    do("wikitext", "--runs", "shampoo@10", "--lr", 2e-3, "--steps", 6, "--shared")
    do("ablations", "--only", "/(graft=sgd|qkv apart)/", "--steps", 6)
    torch.set_float32_matmul_precision(before)
    return folder


def test_looks_and_ends_are_complete(results: pathlib.Path) -> None:
    for name in NAMES:
        for run, looks, end in log.read(results / f"{name}.jsonl"):
            assert end["end"] == "complete" and looks[-1]["step"] == end["steps"] and end["ms"] > 0
            assert end["state_mib"] > 0 and end["versions"]["torch"] == torch.__version__ and end["device"]
            assert [look["seconds"] for look in looks] == sorted(look["seconds"] for look in looks)
            assert len(looks) == (4 if (name, run.length) == ("wikitext", 8) else run.length)
            assert all({"train_loss", "valid_loss"} <= set(look) for look in looks)
    runs = log.read(results / "resnet.jsonl")
    assert {(f.run.optimizer, f.run.length) for f in runs} == {(o, n) for o in ("sgd", "shampoo@10") for n in (2, 1)}
    assert [f.end["options"]["precondition_frequency"] for f in runs if f.run.optimizer != "sgd"] == [10, 10]


def test_a_second_call_runs_nothing_and_one_that_was_cut_goes_on(
    results: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flags = tmp_path / "log.jsonl", ("--runs", "adamw", "eigh@4", "--lr", 8e-3, "--steps", 12)
    lines = (results / "wikitext.jsonl").read_text().splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if '"wikitext/eigh@4/lr=0.008/seed=0/steps=12"' in line]
    whole, trained, train = log.read(results / "wikitext.jsonl"), [], harness.train
    monkeypatch.setattr(harness, "train", lambda *args: trained.append(args[1]) or train(*args))
    path.write_text("".join(lines))
    run("wikitext", path, *flags)
    assert not trained
    last = places[-1]  # the end of the run; the line before it is cut in the middle
    path.write_text("".join(lines[: last - 1]) + lines[last - 1][:40])
    (again,) = (f for f in run("wikitext", path, *flags) if f.run.key == trained[0].key)
    assert [x.key for x in trained] == ["wikitext/eigh@4/lr=0.008/seed=0/steps=12"]
    (first,) = (f for f in whole if f.run == again.run)
    assert len(again.looks) == 12 and again.looks[-1]["bits"] == first.looks[-1]["bits"]  # the same on a CPU


def test_list_only_best_and_budget(results: pathlib.Path, tmp_path: pathlib.Path, capsys) -> None:
    path = results / "wikitext.jsonl"
    flags = ("--steps", 12, "--runs", "adamw", "eigh@4", "--best")
    before = log.read(path)
    assert run("wikitext", path, *flags, "--seeds", 0, 7, "--list") == before
    shown = capsys.readouterr().out.splitlines()
    assert all("such as 0.016" in line for line in shown[1:3])
    assert shown[3:] == [
        f"{'done  ' * (seed == 0)}wikitext/{name}/lr=0.008/seed={seed}/steps=12" for name in ("adamw", "eigh@4") for seed in (0, 7)
    ]
    assert run("wikitext", path, *flags, "--seeds", 7, "--budget", 0) == before
    assert "2 runs are left" in capsys.readouterr().out
    run("wikitext", path, "--only", "eigh.*seed=1", "--runs", "adamw", "eigh@4", "--seeds", 0, 1, "--list")
    assert "4 runs" in capsys.readouterr().out  # the grid of Shampoo


def test_divergence_is_a_result_and_an_error_is_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, flags = tmp_path / "wikitext.jsonl", ("--runs", "adamw", "--lr", 1e-3, 1e30, "--steps", 12)
    _, lost = run("wikitext", path, *flags)
    assert lost.diverged and len(lost.looks) < 12 and lost.looks[-1]["bits"] is None
    assert "| diverged |" in report.section("wikitext", path)

    def explode(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(harness, "train", explode)
        assert len(run("wikitext", path, *flags, "--seeds", 1, status=1)) == 2
    assert "out of memory" in path.read_text() and "Failed" in report.section("wikitext", path)
    assert len(run("wikitext", path, *flags, "--seeds", 1)) == 4
    assert "Failed" not in report.section("wikitext", path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--runs", "nil"], "neither one of adamw"),
        (["--runs", "nil@3"], "not a root solver"),
        (["--options", '{"eps": -1}'], "eps"),
        (["--options", "{"], "invalid"),
        ([], "--data"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        harness.main(EXPERIMENTS["wikitext"], [*argv, *["--tiny"] * bool(argv)])
    assert message in capsys.readouterr().err


def test_every_recipe_is_accepted_for_its_model() -> None:
    for experiment in EXPERIMENTS.values():
        model = experiment.tiny().model
        for name, recipe in experiment.recipes.items():
            if name != "muon" or hasattr(torch.optim, "Muon"):
                assert recipe.why_not() is None, name
                optimizers = recipe.make(model, recipe.rates[0], **recipe.options)
                taken = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
                assert len(taken) == len({*taken}) == len(list(model.parameters()))


def test_optimizers_that_average_are_evaluated_in_their_own_mode() -> None:
    modes: list[str] = []

    class Averaging(torch.optim.SGD):
        def eval(self) -> None:
            modes.append("eval")

        def train(self) -> None:
            modes.append("train")

    task, recipe = tasks.tiny_bytes(), recipes.Recipe(lambda model, lr: [Averaging(model.parameters(), lr)], {}, (0.1,))
    harness.train(task, log.Run("wikitext", "averaging", 0.1, 0, 2, "steps"), recipe, lambda row: modes.append("look"))
    assert modes == ["eval", "train", "look"] * 2


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch is too old")
def test_both_muons_are_the_same(tmp_path: pathlib.Path) -> None:
    ends = run("wikitext", tmp_path / "log", "--runs", "muon", "lather-muon", "--lr", 8e-3, "--steps", 12)
    torches, ours = (f.looks[-1]["bits"] for f in ends)
    assert ours == pytest.approx(torches, rel=1e-3)


# Tasks and data.


def test_models_have_their_sizes() -> None:
    def count(model: torch.nn.Module) -> float:
        return round(sum(p.numel() for p in model.parameters()) / 1e6, 1)

    full = tasks.Bytes.make_model
    with torch.device("meta"):
        shape = {"layers": 6, "width": 384, "heads": 6, "context": 256}
        assert count(full(type("Shape", (), {"shape": shape}))) == 10.9
        assert count(nets.ResNet18()) == 11.2 and count(nets.VisionTransformer()) == 4.8


def test_a_seed_gives_the_same_weights_and_batches_and_another_does_not() -> None:
    for make in (tasks.tiny_bytes, tasks.tiny_resnet):
        task, seen = make(), []
        for seed in (3, 3, 4):
            task.begin(seed)
            with torch.no_grad():
                seen.append([*(x.clone() for x in task.model.state_dict().values()), *task.batch(1), *task.batch(2)])
            next(task.model.parameters()).data.zero_()
        assert all(map(torch.equal, seen[0], seen[1])) and not all(map(torch.equal, seen[0], seen[2]))


def test_batches_are_crops_of_the_padded_images() -> None:
    task = tasks.tiny_resnet()
    task.begin(0)
    images = data.made_up_images().train.images
    x, y = task.batch(1)
    assert x.is_contiguous(memory_format=torch.channels_last)
    crops = task.prepared(pad(images, (4, 4, 4, 4))).unfold(2, 8, 1).unfold(3, 8, 1)  # [n, 3, 9, 9, 8, 8]
    for image, label, chosen in zip(x, y, task.order, strict=False):
        found = [(crops[chosen].movedim(0, 2) == view).all(dim=(2, 3, 4)).any() for view in (image, image.flip(2))]
        assert any(found) and label == chosen % 10


def test_schedules_rise_and_fall() -> None:
    task = tasks.tiny_bytes()
    assert [task.rate(t, 1500) for t in (50, 100, 1500)] == [0.5, 1.0, pytest.approx(0.05)]
    assert [task.rate(t, 1500, constant=True) for t in (50, 100, 1500)] == [0.5, 1.0, 1.0]
    assert [round(tasks.schedule(t, 100, 10, 0.05), 3) for t in (1, 10, 55, 100)] == [0.1, 1.0, 0.525, 0.05]


def test_cifar_is_unpacked_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.tempfile, "gettempdir", lambda: str(tmp_path))
    pixels = torch.randint(0, 256, (2, 32, 32, 3))
    blocks = (pixels - 128).view(2, 4, 8, 4, 8, 3).transpose(2, 3).reshape(32, 192)
    coefficients = {f"c{j:03d}": blocks[:, j].numpy().astype(np.int8) for j in range(192)}
    labels = {"train_labels": np.array([3], np.uint8), "test_labels": np.array([7], np.uint8)}
    file = tmp_path / "cifar10_full_60k_lossy.npz"
    np.savez(file, basis=np.eye(192, dtype=np.float32), **coefficients, **labels)
    once = data.cifar10(tmp_path)
    assert once.train.images.equal(pixels.permute(0, 3, 1, 2).byte()) and once.train.labels.tolist() == [3, 7]
    monkeypatch.setattr(data, "unpack_cifar10", None)
    assert data.cifar10(file).train.images.equal(once.train.images)


def finished(lr: float, bits: float | None, seed: int = 0) -> log.Finished:
    run = log.Run("wikitext", "adamw", lr, seed, 4, "steps")
    ends = {"end": "complete" if bits is not None else "diverged"}
    return log.Finished(run, [{"step": 4, "bits": bits}], ends)


@pytest.mark.parametrize(
    ("ends", "rate"),
    [
        ({}, None),
        ({1.0: 2.0}, 2.0),
        ({1.0: 2.0, 2.0: 3.0}, 0.5),
        ({1.0: 2.0, 2.0: 1.0}, 4.0),
        ({1.0: 2.0, 2.0: 1.0, 4.0: None}, None),
        ({1.0: None, 2.0: None}, 0.5),
        ({1.0: 2.0, 2.0: None}, 0.5),
    ],
)
def test_the_next_learning_rate_is_beyond_an_edge(ends: dict[float, float | None], rate: float | None) -> None:
    runs = [finished(lr, bits) for lr, bits in ends.items()] + [finished(8.0, 0.0, seed=1)] * bool(ends)
    assert log.beyond(runs, "bits") == rate


def test_the_best_learning_rate_has_the_most_seeds_and_the_lowest_mean() -> None:
    runs = [finished(1.0, 1.0), finished(2.0, 1.5), finished(4.0, 0.5)]
    assert log.best_rate(runs, "bits") == 4.0
    runs += [finished(1.0, 3.0, seed=1), finished(2.0, 1.5, seed=1)]
    assert log.best_rate(runs, "bits") == 2.0
    assert log.beyond(runs, "bits") == 8.0  # where to look next is up to the first seed
    runs.append(finished(2.0, None, seed=2))
    assert log.best_rate(runs, "bits") == 1.0
    assert log.best_rate([f for f in runs if f.run.lr == 2.0], "bits") == 2.0


def test_bracket_goes_uphill_until_both_sides_are_worse(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(task: object, run: log.Run, recipe: object, write, looks: object) -> log.Row:
        write({"step": 4, "seconds": 1.0, "bits": abs(run.lr - 8e-3)})
        return {"end": "complete", "steps": 4, "ms": 1.0}

    monkeypatch.setattr(harness, "train", train)
    path, flags = tmp_path / "log", ("--runs", "adamw", "--lr", 2e-3)
    run("wikitext", path, *flags)
    run("wikitext", path, "--runs", "adamw", "--best", "--list")
    assert "beyond those that were tried, such as 0.004" in capsys.readouterr().out
    assert [f.run.lr for f in run("wikitext", path, *flags, "--bracket")] == [2e-3, 4e-3, 8e-3, 16e-3]
    capsys.readouterr()
    run("wikitext", path, "--runs", "adamw", "--best", "--list")
    assert "beyond" not in capsys.readouterr().out


def test_a_line_after_one_that_was_cut_is_not_lost(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    for number in range(3):
        log.append(path, {"number": number})
        if number == 1:
            path.write_bytes(path.read_bytes()[:-4])
    assert log._rows(path) == [{"number": 0}, {"number": 2}]


def test_every_image_is_augmented_anew_and_on_its_own() -> None:
    """Crops of one image, whose pixels say where they were: their offsets and flips, over epochs."""
    places = torch.arange(64).view(8, 8).expand(1, 3, 8, 8).byte() + 1
    split = data.Split(places.expand(64, 3, 8, 8).contiguous(), torch.zeros(64, dtype=torch.long))
    task = tasks.Images(data.Images(split, split), lambda: nets.ResNet18(width=4), batch=64)
    task.prepared = lambda x: x
    task.begin(0)
    epochs = []
    for step in range(1, 21):
        x = task.batch(step)[0][:, 0].int()
        flipped = [bool((row[row > 0].diff() < 0).any()) for row in x.amax(1)]
        offsets = [int(image.amax(1).nonzero()[0]) * 9 + int(image.amax(0).nonzero()[0]) for image in x]
        epochs.append(list(zip(offsets, flipped, strict=True)))
    assert all(len(set(epoch)) > 20 for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 20
    part = sum(flip for epoch in epochs for _, flip in epoch) / (20 * 64)
    assert 0.4 < part < 0.6


def test_averages_are_evaluated_with_norms_of_their_own() -> None:
    task = tasks.tiny_resnet()
    task.begin(0)
    task.loss(task.batch(1))
    norm, before = task.model.norm, {name: x.clone() for name, x in task.model.state_dict().items()}
    with task.settled():
        x = torch.cat([x for x, _ in task.held["train"]])
        with torch.autocast("cpu", torch.bfloat16):
            seen = task.model.stem(x).float()
        torch.testing.assert_close(norm.running_mean, seen.mean((0, 2, 3)), atol=2e-2, rtol=2e-2)
    assert all(map(torch.equal, before.values(), task.model.state_dict().values())) and norm.momentum == 0.1


# The page.


def test_page_is_what_the_logs_say() -> None:
    page = (report.DOCS / "results.md").read_text()
    assert report.filled(page, log.RESULTS) == page, "run python -m experiments.report --write"


def test_report_of_small_logs(results: pathlib.Path, tmp_path: pathlib.Path) -> None:
    page = tmp_path / "results.md"
    page.write_text((report.DOCS / "results.md").read_text())
    flags = ["--results", str(results), "--page", str(page), "--write"]
    assert report.main(flags) == 0
    text = page.read_text()
    assert report.filled(text, results) == text
    assert all((tmp_path / f"images/{name}.png").stat().st_size > 1000 and f"images/{name}.png" in text for name in NAMES)
    runs = log.read(results / "wikitext.jsonl")
    group = next(g for g in report.best(runs, "bits") if g.optimizer == "eigh@4")
    assert group.lr == 8e-3 and len(group.runs) == 2 and group.seeds == "2"
    ends = [f.looks[-1]["bits"] for f in group.runs]
    assert f"| {sum(ends) / 2:.3f} ± " in text and f"**{ends[0]:.3f}**" in text
    assert "| sgd, 2 epochs |" in text and "| qkv apart |" in text
    assert "| eigh@4, 8 steps |" in text and "that of its 12 steps" in text
    (default,) = (line for line in text.splitlines() if line.startswith("| default | 0."))
    (shampoo,) = (f.looks[-1]["bits"] for f in runs if f.run.optimizer == "shampoo@10")
    assert f"| {shampoo:.3f} | n/a |" in default and "| n/a | n/a |" in default  # it shared the device, so no times
    (apart,) = (f.looks[-1]["bits"] for f in log.read(results / "ablations.jsonl") if f.run.optimizer == "qkv apart")
    assert f"| {apart:.3f} | {apart - shampoo:+.3f} |" in text
    assert "at the edge of its grid" in text and "| adamw, 12 steps | 0.004 |" not in text
    target = report.target(report.best(runs, "bits"), report.KINDS["wikitext"])
    adamw = next(g for g in report.best(runs, "bits") if g.optimizer == "adamw")
    assert adamw.first("bits", target) == 12 and report.race(adamw, report.KINDS["wikitext"], adamw)["reached"] == "12 (100%)"
    step = group.first("bits", target)
    curve = dict(zip(group.steps(), group.curve("bits"), strict=True))
    assert step and curve[step] <= target and all(x > target for t, x in curve.items() if t < step)


def test_training_losses_are_of_the_last_sixth_however_often_one_looked() -> None:
    def group(*looks: tuple[int, float]) -> report.Group:
        rows = [{"step": step, "train_loss": loss} for step, loss in looks]
        return report.Group("adamw", 60, 0.1, [finished(0.1, 1.0)._replace(looks=rows)], "1")

    assert group((50, 9.0), (55, 2.0), (60, 1.0)).train_loss() == 1.5
    assert group((50, 9.0), (60, 1.5)).train_loss() == group((60, 1.5)).train_loss() == 1.5
    assert group((50, 9.0), (58, 2.0), (60, 1.0)).train_loss() == 1.8


def test_variations_are_compared_seed_by_seed() -> None:
    def group(name: str, ends: dict[int, float]) -> report.Group:
        return report.Group(name, 4, 0.1, [finished(0.1, bits, seed) for seed, bits in ends.items()], "")

    groups = [
        group("default", {0: 1.0, 1: 2.0, 2: 9.0}),
        group("kinds=None", {0: 1.5}),
        group("eps=1", {0: 1.25, 1: 2.5}),
        group("kinds=None,eps=1", {0: 1.25}),
        group("eps=2", {7: 1.0}),
    ]
    differences = [report.over(g, groups, report.BITS) for g in groups]
    assert differences == [None, 0.5, 0.375, -0.25, None]


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for wikitext"):
        report.filled("# Results", log.RESULTS)


def test_what_is_new_in_lather_is_left_out_where_it_is_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = recipes.Recipe(recipes.shampoo, {"preconditioner": "unheard-of"}, (1e-3,))
    experiment = EXPERIMENTS["wikitext"]._replace(recipes={"new": unknown, "adamw": experiment_adamw()})
    path = tmp_path / "log.jsonl"
    assert harness.main(experiment, ["--tiny", "--log", str(path), "--steps", "2"]) == 0
    assert "new is left out" in capsys.readouterr().out
    assert [json.loads(line)["run"].split("/")[1] for line in path.read_text().splitlines()] == ["adamw"] * 3


def experiment_adamw() -> recipes.Recipe:
    return EXPERIMENTS["wikitext"].recipes["adamw"]._replace(rates=(1e-3,))


def test_runs_that_shared_the_device_have_the_time_of_one_that_did_not(tmp_path: pathlib.Path) -> None:
    def write(name: str, optimizer: str, seed: int = 0, **end: object) -> None:
        run = log.Run("wikitext", optimizer, 2e-3, seed, 4, "steps")
        log.append(tmp_path / name, {"run": run.key, "attempt": "a", "step": 4, "bits": 1.0})
        log.append(tmp_path / name, {"run": run.key, "attempt": "a", "end": "complete"} | run._asdict() | end)

    write("wikitext.jsonl", "adamw", ms=50.0, shared=True)
    write("wikitext.jsonl", "muon", ms=50.0, shared=True)
    write("wikitext.jsonl", "shampoo@10", ms=10.0, shared=False)
    write("wikitext.jsonl", "shampoo@10", seed=1, ms=50.0, shared=True)
    for ms in (11.0, 9.0, 10.0):
        write("times.jsonl", "adamw", ms=ms, shared=False)
    write("times.jsonl", "muon", ms=9.0, shared=True)
    write("times.jsonl", "shampoo@10", ms=9.0, shared=False)
    groups = report.best(report.timed(tmp_path / "wikitext.jsonl"), "bits")
    assert {group.optimizer: group.end("ms") for group in groups} == {"adamw": 9.0, "muon": None, "shampoo@10": 10.0}
