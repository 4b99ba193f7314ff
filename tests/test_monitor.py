"""The monitor: when it records, what it writes and where."""

from __future__ import annotations

import copy
import json
import math
import pickle
from types import SimpleNamespace as Fake

import pytest
import torch
from torch import nn

import lather
from lather.report.view import page


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    return model, lather.Shampoo(model, lr=0.1, **options)


def train(model, opt, steps, monitor=None):
    for _ in range(steps):
        opt.zero_grad()
        loss = model(torch.ones(3, 8)).square().mean()
        loss.backward()
        if monitor:
            monitor.note(loss=loss)
        opt.step()


def test_it_records_the_first_step_and_then_every_so_many():
    model, opt = make()
    records = []
    monitor = lather.Monitor(opt, every=5, to=records.append)
    train(model, opt, 12, monitor)
    assert [record["step"] for record in records] == [1, 4, 9]
    assert all(record["metrics"].keys() == {"weights", "norm", "bias"} for record in records)
    assert all(record["lr"] == 0.1 and record["loss"] > 0 and record["time"] >= 0 for record in records)
    assert monitor.record is records[-1]
    monitor.close()
    train(model, opt, 8)
    assert len(records) == 3


def test_it_looks_at_roots_when_they_are_oldest():
    model, opt = make(precondition_frequency=5, refresh_warmup=0.0)
    records = []
    lather.Monitor(opt, every=10, to=records.append)
    train(model, opt, 30)
    assert [record["metrics"]["weights"]["age"] for record in records[1:]] == [4.0, 4.0, 4.0]


def test_training_is_the_same_with_a_monitor():
    (model, opt), (other, plain) = make(), make()
    lather.Monitor(opt, every=3, to=lambda record: None)
    train(model, opt, 12)
    train(other, plain, 12)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    path = tmp_path / "run.jsonl"
    model, opt = make()
    lather.Monitor(opt, every=5, to=path, by="parameter")
    train(model, opt, 10)
    saved = opt.state_dict()
    with path.open("a") as file:
        file.write('{"step": 15, "lr"')  # the job was killed while it wrote
    model, opt = make()
    opt.load_state_dict(saved)
    lather.Monitor(opt, every=5, to=str(path), by="parameter")
    train(model, opt, 10)
    records = list(map(json.loads, path.read_text().splitlines()))
    assert [record["step"] for record in records] == [1, 4, 9, 11, 14, 19]
    assert list(records[0]["metrics"]) == ["0.weight", "2.weight", "1.weight", "1.bias", "0.bias", "2.bias"]
    assert "run.jsonl" in page(path)


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path):
    model, opt = make(start_preconditioning_step=100)
    lather.Monitor(opt, to=tmp_path / "run.jsonl")
    train(model, opt, 1)
    record = json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert record["metrics"]["weights"]["condition"] is None and record["metrics"]["weights"]["update"] > 0


def test_tensorboard_and_weights_and_biases_get_names_and_finite_numbers():
    model, opt = make(start_preconditioning_step=100)
    scalars, logs = {}, []
    board = Fake(add_scalar=lambda name, value, step: scalars.__setitem__((name, step), value))
    run = Fake(log=lambda values, commit: logs.append((values, commit)))
    lather.Monitor(opt, to=[board, run])
    train(model, opt, 1)
    assert logs[0][1] is False and {(name, 1): value for name, value in logs[0][0].items()} == scalars
    assert ("lather/weights/update", 1) in scalars and ("lather/weights/condition", 1) not in scalars
    assert all(math.isfinite(value) for value in scalars.values())


def test_a_learning_rate_and_a_note_may_be_tensors():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(4, 4))
    opt = lather.Shampoo([p], lr=torch.tensor(0.25))
    records = []
    monitor = lather.Monitor(opt, to=records.append)
    p.grad = torch.randn(4, 4)
    monitor.note(loss=torch.tensor(2.0), epoch=3)
    opt.step()
    assert [records[0][name] for name in ("lr", "loss", "epoch")] == [0.25, 2.0, 3.0]


def test_a_note_is_for_the_next_record_alone():
    model, opt = make()
    records = []
    monitor = lather.Monitor(opt, every=2, to=records.append)
    monitor.note(validation=0.5)
    train(model, opt, 4)
    assert [record.get("validation") for record in records] == [0.5, None]


@pytest.mark.parametrize("name", ["step", "time", "metrics"])
def test_a_note_does_not_replace_what_a_record_has(name):
    _, opt = make()
    with pytest.raises(ValueError, match=rf"note\({name}=...\) is not possible.*choose another name"):
        lather.Monitor(opt, to=print).note(loss=1.0, **{name: 3})


@pytest.mark.parametrize("value", ["low", None, torch.ones(3), [1.0]], ids=str)
def test_a_note_must_be_a_number(value):
    _, opt = make()
    with pytest.raises(ValueError, match=r"note\(loss=...\) takes a number or a tensor of one element, not"):
        lather.Monitor(opt, to=print).note(loss=value)


def test_the_steps_of_others_are_not_written():
    """Neither those that the user arms, nor those of another monitor."""
    model, opt = make()
    ours, theirs = [], []
    lather.Monitor(opt, every=5, to=ours.append)
    lather.Monitor(opt, every=4, to=theirs.append)
    for step in range(1, 13):
        if step == 6:
            opt.arm()
        train(model, opt, 1)
    assert [record["step"] for record in ours] == [1, 4, 9]
    assert [record["step"] for record in theirs] == [1, 3, 7, 11]


@pytest.mark.parametrize("text", ['{"precious": 1}', "a,b\n1,2\n", "\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "settings.json"
    path.write_text(text)
    _, opt = make()
    with pytest.raises(ValueError, match=r"settings\.json' is a file that no Monitor wrote; choose another name"):
        lather.Monitor(opt, to=path)
    assert path.read_text() == text


@pytest.mark.parametrize("half", ["{", '{"step": ', '{"step": 15, "lr"'])
def test_half_a_line_is_a_file_too(tmp_path, half):
    path = tmp_path / "run.jsonl"
    path.write_text(half)
    model, opt = make()
    lather.Monitor(opt, to=path)
    train(model, opt, 1)
    assert json.loads(path.read_text())["step"] == 1


def test_the_path_is_that_of_the_folder_at_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, opt = make()
    lather.Monitor(opt, to="run.jsonl")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    train(model, opt, 1)
    assert (tmp_path / "run.jsonl").read_text() and not (tmp_path / "other" / "run.jsonl").exists()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["copied", "pickled"])
def test_a_copy_of_the_optimizer_has_no_monitor(duplicate):
    model, opt = make()
    records = []
    lather.Monitor(opt, every=1, to=records.append)
    train(model, opt, 2)
    twin = duplicate(opt)
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    twin.step()
    assert len(records) == 2
    train(model, opt, 1)
    assert len(records) == 3


def test_a_step_without_gradients_is_not_recorded():
    model, opt = make()
    records = []
    lather.Monitor(opt, to=records.append)
    opt.step()
    assert not records
    train(model, opt, 1)
    assert len(records) == 1


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"every": 0}, ValueError, "every"),
        ({"every": 2.5}, ValueError, "every"),
        ({"by": "layer"}, ValueError, "by is 'layer'; it must be 'parameter' or 'kind'"),
        ({"to": 3}, TypeError, "to is a int; it must be a path, a TensorBoard SummaryWriter"),
        ({"to": "no/such/folder/run.jsonl"}, FileNotFoundError, "no/such/folder"),
    ],
)
def test_mistakes_show_at_once(given, error, message):
    _, opt = make()
    with pytest.raises(error, match=message):
        lather.Monitor(opt, **{"to": print} | given)
    assert not opt._optimizer_step_pre_hooks and not opt._optimizer_step_post_hooks


def test_other_optimizers_have_no_metrics():
    with pytest.raises(TypeError, match="needs an optimizer of lather's, not AdamW"):
        lather.Monitor(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))


def test_a_wrapped_optimizer():
    model, opt = make()
    records = []
    lather.Monitor(Fake(optimizer=opt), to=records.append)
    train(model, opt, 1)
    assert len(records) == 1
