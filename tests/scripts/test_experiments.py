"""The experiments run, go on where they were cut, and the page of results is what the logs say. Their numbers are not tested."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from experiments import data, harness, log, nets, recipes, report, tasks

pytestmark = pytest.mark.scripts

NAMES = ("wikitext", "resnet", "vit", "ablations")
EXPERIMENTS = {name: importlib.import_module(f"experiments.{name}").EXPERIMENT for name in (*NAMES, "text", "nanogpt")}


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
    """Logs of all experiments that have been run, beside pages to fill."""
    before, root = torch.get_float32_matmul_precision(), tmp_path_factory.mktemp("root")
    folder = root / "experiments" / "results"
    for page in ("docs/results.md", "experiments/results/README.md"):
        (root / page).parent.mkdir(parents=True)
        (root / page).write_text((report.ROOT / page).read_text())
    (root / "README.md").write_text("# lather\n<!-- results --><!-- end of results -->\n")
    torch.set_num_threads(1)

    def do(name: str, *argv: object) -> None:
        run(name, folder / f"{name}.jsonl", *argv)

    do("wikitext", "--runs", "adamw", "eigh@4", "--lr", 4e-3, 8e-3, "--steps", 12)
    do("wikitext", "--runs", "adamw", "eigh@4", "--best", "--steps", 12, "--seeds", 1)
    do("wikitext", "--runs", "eigh@4", "--best", "--steps", 8, "--looks", 4)
    do("wikitext", "--runs", "muon", "shampoo", "--lr", 8e-3, "--steps", 12, "--shared")
    do("resnet", "--runs", "sgd", "shampoo@1", "--lr", 0.1, "--epochs", 2, 1)
    do("vit", "--runs", "adamw", "muon", "--lr", 1e-3, "--epochs", 1)
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
    assert {(f.run.optimizer, f.run.length) for f in runs} == {(o, n) for o in ("sgd", "shampoo@1") for n in (2, 1)}
    assert [f.end["options"]["precondition_frequency"] for f in runs if f.run.optimizer != "sgd"] == [1, 1]


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
    assert ", 1e+30: diverged |" in report.every_run(tmp_path)

    def explode(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(harness, "train", explode)
        assert len(run("wikitext", path, *flags, "--seeds", 1, status=1)) == 2
    assert "out of memory" in path.read_text() and "Failed" in report.every_run(tmp_path)
    assert len(run("wikitext", path, *flags, "--seeds", 1)) == 4
    assert "Failed" not in report.every_run(tmp_path)


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
    task.backward(1)
    norm, before = task.model.norm, {name: x.clone() for name, x in task.model.state_dict().items()}
    with task.settled():
        x = torch.cat([x for x, _ in task.held["train"]])
        with torch.autocast("cpu", torch.bfloat16):
            seen = task.model.stem(x).float()
        torch.testing.assert_close(norm.running_mean, seen.mean((0, 2, 3)), atol=2e-2, rtol=2e-2)
    assert all(map(torch.equal, before.values(), task.model.state_dict().values())) and norm.momentum == 0.1


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """60 files of 100 bytes, one of them twice, one that is empty and one of another kind."""
    for i in range(60):
        file = tmp_path / "texts" / str(i % 3) / f"{i}.h"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([i] * 100))
    (tmp_path / "texts" / "copy.h").write_bytes(file.read_bytes())
    (tmp_path / "texts" / "empty.h").touch()
    (tmp_path / "texts" / "other.txt").write_bytes(b"x" * 1000)
    return tmp_path / "texts"


def test_files_are_read_once_wherever_they_are(folder: pathlib.Path) -> None:
    text = data.folders([folder], ["*.h"])
    assert text.about["files"] == 58 and text.about["valid_files"] == 2 and text.about["bytes"] == 5800
    assert sorted(torch.cat([text.train, text.valid]).tolist()) == sorted(100 * [*range(60)])
    assert text.train.view(58, 100).unique(dim=1).shape == (58, 1)  # files are whole
    assert text.train[::100].tolist() != sorted(text.train[::100].tolist())
    moved = folder.rename(folder.with_name("moved"))
    assert data.folders([moved, moved], ["*.h", "1*"]).about == text.about
    (moved / "0" / "0.h").write_bytes(b"0" * 100)
    assert data.folders([moved], ["*.h"]).about["sha256"] != text.about["sha256"]
    with pytest.raises(ValueError, match="1 different files match"):
        data.folders([moved], ["other.txt"])


def test_validation_has_enough_and_no_more(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "EVERY", 2)
    monkeypatch.setattr(data, "ENOUGH", 950)
    about = data.folders([folder], ["*.h"]).about
    assert (about["valid_files"], about["valid_bytes"], about["files"]) == (10, 950, 50)


def test_every_byte_is_seen_once() -> None:
    task = tasks.tiny_text()
    task.text = task.text._replace(train=torch.arange(16 * 4 * 13 + 1, dtype=torch.int16))
    seen = {}
    for seed in (0, 1):
        task.begin(seed)
        seen[seed] = [task.batch(step) for step in range(1, 14)]
    for batches in seen.values():
        inputs, targets = (torch.cat([batch[i] for batch in batches]).flatten() for i in range(2))
        assert targets.sort().values.equal(torch.arange(1, 16 * 4 * 13 + 1)) and targets.equal(inputs + 1)
    assert not seen[0][0][0].equal(seen[1][0][0])


def text(folder: pathlib.Path, path: pathlib.Path, *argv: object) -> list[log.Finished]:
    sizes = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "4"]
    flags = ["--data", str(folder), "--glob", "*.h", *sizes, "--runs", "adamw", "shampoo", "--lr", "1e-3", "--log", str(path)]
    assert harness.main(EXPERIMENTS["text"], [*flags, *map(str, argv)]) == 0
    return log.read(path)


def test_text_of_a_folder_is_trained_on_as_far_as_it_goes(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "text.jsonl"
    runs = text(folder, path, "--looks", 3)
    assert [f.run.length for f in runs] == [5799 // 16 // 4] * 2 == [90, 90]
    assert runs[0].end["bytes"] == 5800 and runs[0].end["width"] == 16 and len(runs[0].end["sha256"]) == 64
    assert len(text(folder, path, "--best", "--steps", 12)) == 4
    with pytest.raises(SystemExit, match="needs 6,401 bytes, each once, and there are 5,800: 601 are missing"):
        text(folder, path, "--steps", 100)
    with pytest.raises(SystemExit, match="runs with width 16, and this is 32"):
        text(folder, path, "--width", 32, "--seeds", 1)
    with pytest.raises(SystemExit, match="validation 200; give more files"):
        text(folder, tmp_path / "other", "--context", 200)


def shard(path: pathlib.Path, tokens: Sequence[int], magic: int = 20240520, number: int | None = None) -> None:
    header = [magic, 1, len(tokens) if number is None else number, *[0] * 253]
    path.write_bytes(array("i", header).tobytes() + array("H", tokens).tobytes())


@pytest.fixture
def shards(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two shards of 300 tokens to train on, and one for validation."""
    for number in range(2):
        shard(tmp_path / f"fineweb_train_{number:06d}.bin", [(300 * number + i) % 97 for i in range(300)])
    shard(tmp_path / "fineweb_val_000000.bin", [i % 97 for i in range(150)])
    return tmp_path


def nanogpt(folder: pathlib.Path, *argv: object) -> list[log.Finished]:
    sizes = ["--layers", 1, "--width", 16, "--heads", 2, "--context", 16, "--batch", 4, "--part", 2, "--vocab", 97]
    flags = ["--data", folder, *sizes, "--runs", "adamw", "shampoo", "--lr", 4e-3, "--log", folder / "log.jsonl", *argv]
    assert harness.main(EXPERIMENTS["nanogpt"], [*map(str, flags)]) == 0
    return log.read(folder / "log.jsonl")


def test_token_files_are_read_in_order(shards: pathlib.Path) -> None:
    read = data.shards(shards)
    task = tasks.Tokens(read, layers=1, width=16, heads=2, vocab=97, context=16, batch=4, part=2)
    assert task.most == 8  # four of 64 tokens in each shard, and one more to predict
    for step in range(1, 9):
        first = 300 * ((step - 1) // 4) + 64 * ((step - 1) % 4)
        x, y = task.batch(step)
        assert x.flatten().tolist() == [i % 97 for i in range(first, first + 64)] and y.equal((x + 1) % 97)
    assert len(task.held) == 4 and task.settings["valid_tokens"] == 128
    assert torch.cat([y for _, y in task.held]).flatten().tolist() == [i % 97 for i in range(1, 129)]


def test_parts_of_a_batch_add_up() -> None:
    task = tasks.tiny_tokens()
    task.begin(0)
    loss = task.backward(1)
    found = [p.grad.clone() for p in task.model.parameters()]
    task.model.zero_grad()
    task.part = task.size
    torch.testing.assert_close(loss, task.backward(1))
    torch.testing.assert_close(found, [p.grad for p in task.model.parameters()], atol=1e-3, rtol=2e-2)


def test_steps_and_seconds_to_the_goal_are_in_the_log(shards: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.Tokens, "looks", lambda self, length: length)
    monkeypatch.setattr(tasks.Tokens, "goal", ("valid_loss", 4.54))
    for finished in nanogpt(shards, "--steps", 8):
        first = next(look for look in finished.looks if look["valid_loss"] <= 4.54)
        assert finished.end["goal_step"] == first["step"] > 1 and finished.end["goal_seconds"] == pytest.approx(
            first["seconds"], abs=1e-5
        )
    monkeypatch.setattr(tasks.Tokens, "goal", ("valid_loss", 0.1))
    assert nanogpt(shards, "--steps", 2)[-1].end["goal_step"] is None


def test_schedule_of_tokens() -> None:
    task = tasks.tiny_tokens()
    rates = [task.rate(step, 1000) for step in (1, 10, 20, 300, 301, 651, 1000)]
    assert rates == pytest.approx([0.05, 0.5, 1, 1, 1, 0.5, 1 / 700])
    assert task.rate(1000, 1000, constant=True) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fineweb_train_000001.bin", {"magic": 20240801}, "begins with 20240801, 1, and a file of tokens with 20240520, 1"),
        ("fineweb_train_000001.bin", {"number": 200}, "says that it has 200 tokens, but its size is that of 10"),
        ("fineweb_val_000000.bin", {}, "33 tokens are needed for validation, and there are 10"),
        ("fineweb_val_000000.bin", {"tokens": [97] * 150}, "a token 97, and a vocabulary of 97"),
    ],
)
def test_wrong_token_files_are_named(shards: pathlib.Path, name: str, arguments: dict[str, Any], message: str) -> None:
    shard(shards / name, **{"tokens": range(10)} | arguments)
    with pytest.raises(SystemExit, match=message):
        nanogpt(shards, "--steps", 1)


def test_missing_token_files_and_steps_are_named(shards: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match="there are tokens for 8 steps"):
        nanogpt(shards, "--steps", 9)
    with pytest.raises(SystemExit, match="not a multiple of --part 3"):
        nanogpt(shards, "--steps", 1, "--part", 3)
    (shards / "fineweb_train_000000.bin").write_bytes(b"short")
    with pytest.raises(SystemExit, match="less than the header"):
        nanogpt(shards, "--steps", 1)
    (shards / "fineweb_val_000000.bin").unlink()
    for file in shards.glob("*train*"):
        file.unlink()
    with pytest.raises(SystemExit, match=r"has 0 files \*train\*.bin and 0 files"):
        nanogpt(shards, "--steps", 1)


# The pages.


def test_pages_are_what_the_logs_say() -> None:
    for path, text in report.pages(report.ROOT).items():
        assert path.read_text() == text, "run python -m experiments.report --write"


SMALL = tuple(
    section._replace(rows=(*section.rows, "eigh@4"), lengths=(12, 8) if section.lengths else ()) for section in report.SECTIONS
)


def test_report_of_small_logs(results: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SECTIONS", SMALL[1:])
    root = results.parent.parent
    assert report.main(["--root", str(root), "--write"]) == 0
    assert all(path.read_text() == text for path, text in report.pages(root).items())
    page, runs = (root / "docs/results.md").read_text(), (root / "experiments/results/README.md").read_text()
    for name in ("wikitext-12", "vit", "resnet"):
        assert (root / f"docs/images/{name}.png").stat().st_size > 1000 and f"images/{name}.png" in page
    section = SMALL[1]
    groups = {report.title(g, [g]): g for g in report.best(section, report.timed(results / "wikitext.jsonl")) if g.length == 12}
    assert list(groups) == ["adamw", "muon", "shampoo", "eigh@4"]
    assert groups["eigh@4"].lr == 8e-3 and groups["eigh@4"].seeds == "2" and groups["muon"].ms() is None  # it shared the device
    ends = [f.looks[-1]["bits"] for f in groups["eigh@4"].runs]
    assert f"| eigh@4 | 0.008 | {sum(ends) / 2:.3f} ± " in page and "| eigh@4, 8 steps | 0.008 |" in page
    assert "| sgd, 1 epochs |" in page and "| ablations | qkv apart | 6 steps |" in runs
    (end,) = (f.looks[-1]["bits"] for f in groups["muon"].runs)
    assert f"`muon`'s end is {end:.3f}." in page and report.reach(groups["muon"], report.BITS, groups["muon"]) == "12 (100%)"
    step = groups["adamw"].first(report.BITS, end)
    curve = dict(zip(groups["adamw"].steps(), groups["adamw"].values("bits").mean(0).tolist(), strict=True))
    assert step is None or (curve[step] <= end and all(x > end for t, x in curve.items() if t < step))
    shampoo = groups["shampoo"].end(report.BITS)
    assert f"| {groups['adamw'].end(report.BITS)} | {end:.3f} | {shampoo} | " in (root / "README.md").read_text()


def test_a_task_without_a_log_has_no_section(results: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert report.tables(tmp_path) == "\n\n" and report.every_run(tmp_path) == "\n\n"
    (tmp_path / "vit.jsonl").write_text((results / "vit.jsonl").read_text())
    assert re.findall(r"^## (.*)$", report.tables(tmp_path), re.MULTILINE) == ["Vision transformer"]


def test_plots_have_six_lines_at_most(tmp_path: pathlib.Path) -> None:
    def group(name: str, length: int) -> report.Group:
        run = log.Run("wikitext", name, 0.1, 0, length, "steps")
        looks = [{"step": step, "bits": 1 / step} for step in range(1, length + 1)]
        return report.Group(name, length, 0.1, [log.Finished(run, looks, {"end": "complete", "ms": 1.0})], "1")

    groups = [group(name, length) for name in ("adamw", "muon", "soap@10", "paper", "shampoo") for length in (8, 6)]
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.demo, "band", lambda axes, x, values, **line: lines.append(line["label"]))
        report.plot(SMALL[1], groups, tmp_path / "plot.png")
    first = ["adamw", "muon", "paper", "shampoo", "adamw, 6 steps", "muon, 6 steps"]
    assert lines == [name for name in first for _ in range(2)]


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for tables"):
        report.filled("# Results", "tables", "")


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
    write("wikitext.jsonl", "shampoo", ms=10.0, shared=False)
    write("wikitext.jsonl", "shampoo", seed=1, ms=50.0, shared=True)
    for ms in (11.0, 9.0, 10.0):
        write("times.jsonl", "adamw", ms=ms, shared=False)
    write("times.jsonl", "muon", ms=9.0, shared=True)
    write("times.jsonl", "shampoo", ms=9.0, shared=False)
    section = report.SECTIONS[1]._replace(lengths=())
    groups = report.best(section, report.timed(tmp_path / "wikitext.jsonl"))
    assert {group.optimizer: group.ms() for group in groups} == {"adamw": 9.0, "muon": None, "shampoo": 10.0}
