"""The integrations by themselves: when they gather, and what the factory makes."""

from __future__ import annotations

from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch
from torch import nn

import lather
from lather import presets
from lather.integrations import accelerate, lightning, transformers
from lather.integrations.transformers import Callback, OptimizerFactory

# The factory.


def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 16), nn.LayerNorm(16))


def test_trainer_takes_it_for_a_factory():
    from transformers.trainer_optimizer import is_optimizer_factory

    assert is_optimizer_factory(OptimizerFactory) and not is_optimizer_factory(lather.Shampoo)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_preset_is_routed(preset):
    opt = OptimizerFactory()(model(), preset=preset, lr=0.25)
    assert type(opt) is lather.Shampoo
    assert opt.param_groups[0]["lr"] == 0.25
    rows = {row.name: (row.method, row.rule) for row in opt.plan().params}
    assert rows["0.weight"] == ("adam" if preset not in ("from_sgd", "from_adagrad") else preset[5:], "kind: embedding")


def test_rules_and_kinds_reach_the_routing():
    rules = [(r"^1\.weight", {"preconditioner": None})]
    opt = OptimizerFactory()(model(), rules=rules, kinds={"embedding": {"lr": 0.5}}, lr=0.1)
    rows = {row.name: (row.method, row.rule) for row in opt.plan().params}
    assert rows["1.weight"] == ("adam", r"rule 1: ^1\.weight") and rows["0.weight"] == ("shampoo", "kind: embedding")


def test_a_preset_that_does_not_exist():
    with pytest.raises(ValueError, match="there is no preset 'from_sdg'; did you mean 'from_sgd'"):
        OptimizerFactory()(model(), preset="from_sdg")
    with pytest.raises(ValueError, match="there are 'Shampoo', 'distributed_shampoo'"):
        OptimizerFactory()(model(), preset="route")


# When the callback gathers.

Events = list[tuple[str, dict[str, bool]]]
SAVE, EVALUATE, NEITHER = {"should_save": True}, {"should_evaluate": True}, dict[str, bool]()


@pytest.mark.parametrize(
    ("strategy", "event", "control", "gathers"),
    [
        ("steps", "on_step_end", SAVE, True),
        ("epoch", "on_epoch_end", SAVE, True),
        ("no", "on_step_end", SAVE, True),  # set by a callback of the user's
        ("steps", "on_step_end", EVALUATE, False),
        ("best", "on_step_end", EVALUATE, True),
        ("best", "on_epoch_end", EVALUATE, True),
        ("best", "on_step_end", NEITHER, False),
        ("best", "on_evaluate", NEITHER, True),
        ("steps", "on_evaluate", SAVE, True),
        ("steps", "on_evaluate", NEITHER, False),
        ("steps", "on_step_end", NEITHER, False),
    ],
)
def test_the_callback_gathers_before_it_may_save(strategy, event, control, gathers, monkeypatch):
    assert called(monkeypatch, event, strategy, control) == (["opt"] if gathers else [])
    assert called(monkeypatch, event, strategy, control, save_only_model=True) == []


def called(monkeypatch: Any, event: str, strategy: str, control: Any, optimizer: Any = "opt", save_only_model: bool = False) -> Any:
    seen: list[Any] = []
    monkeypatch.setattr(transformers, "gather", seen.append)
    control = Fake(**{"should_save": False, "should_evaluate": False} | control)
    args = Fake(save_strategy=strategy, save_only_model=save_only_model)
    getattr(Callback(), event)(args, Fake(), control, optimizer=optimizer, metrics={})
    return seen


def plugin(kind: str) -> Any:
    return Fake(fsdp_plugin=Fake(state_dict_type=Fake(name=kind)))


def test_with_fsdp_only_a_full_state_is_gathered(monkeypatch):
    full, sharded = (Fake(accelerator_state=plugin(kind)) for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"))
    assert called(monkeypatch, "on_step_end", "steps", SAVE, full) == [full]
    assert called(monkeypatch, "on_step_end", "steps", SAVE, sharded) == []


# accelerate.


class Accelerator:
    def __init__(self, state: Any, optimizers: list[Any]) -> None:
        self.state, self._optimizers, self.hooks = state, optimizers, []

    def register_save_state_pre_hook(self, hook: Any) -> str:
        self.hooks.append(hook)
        return "handle"


@pytest.mark.parametrize(("state", "gathers"), [(Fake(), True), (plugin("SHARDED_STATE_DICT"), False)])
def test_registering_gathers_what_has_been_prepared_since(state, gathers, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(accelerate, "gather", seen.append)
    accelerator = Accelerator(state, [])
    assert accelerate.register(accelerator) == "handle"
    accelerator._optimizers += ["a", "b"]
    accelerator.hooks[0]([], [], "folder")
    assert seen == (["a", "b"] if gathers else [])


def test_a_full_state_dict_of_fsdp_is_refused():
    with pytest.raises(ValueError, match="SHARDED_STATE_DICT"):
        accelerate.register(Accelerator(plugin("FULL_STATE_DICT"), []))


def test_one_process_and_other_optimizers_need_no_gathering():
    ours, other = lather.Shampoo(model()), torch.optim.SGD(model().parameters())
    for opt in (ours, Fake(optimizer=ours), other, Fake(optimizer=other), None):
        accelerate.gather(opt)
    assert ours._session.consolidated is None
    assert accelerate.unwrapped(Fake(optimizer=Fake(optimizer=ours))) is ours


# Several optimizers in Lightning, as a GAN has.


def test_names_in_lightning_tell_optimizers_apart():
    first, other, second = lather.Shampoo(model()), torch.optim.SGD(model().parameters()), lather.Shampoo(model())
    logged: list[tuple[set[str], int]] = []
    logger = Fake(log_metrics=lambda numbers, step: logged.append(({name.rpartition("/")[0] for name in numbers}, step)))
    runner, callback = Fake(optimizers=[first, other, second], loggers=[logger]), lightning.Callback(every=2)
    callback.on_train_start(runner, None)
    for opt in (first, second):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        opt.step()
        callback.on_train_batch_end(runner, None)
    kinds = ("weights", "embedding", "norm", "bias")
    assert logged == [({f"lather/{i}/{kind}" for kind in kinds}, 1) for i in (0, 1)]


def test_one_file_for_several_optimizers_is_refused(tmp_path):
    runner = Fake(optimizers=[lather.Shampoo(model()), lather.Shampoo(model())], loggers=[])
    with pytest.raises(ValueError, match="would mix the records of 2 lather optimizers; leave it out"):
        lightning.Callback(to=tmp_path / "run.jsonl").on_train_start(runner, None)
