"""What every process runs: a tiny model in a real trainer, undisturbed, or stopped and resumed in a new model."""

from __future__ import annotations

import io
import logging
import os
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import torch
import transformers
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lather
from lather.integrations import accelerate as with_accelerate
from lather.integrations import lightning as with_lightning
from lather.integrations import transformers as with_transformers

for library in ("lightning.pytorch", "lightning.fabric", "transformers"):
    logging.getLogger(library).setLevel(logging.ERROR)
Weights = dict[str, Tensor]

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "precondition_frequency": 2, "max_preconditioner_dim": 8}
STEPS, MIDDLE = 8, 4
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def parts_warned() -> Iterator[list[str]]:
    """The warnings of states that lack the blocks of other ranks."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(each.message) for each in caught if "consolidate_state_dict()" in str(each.message)]


def weights_of(model: nn.Module) -> Weights:
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in model.named_parameters()}


# transformers' Trainer.

TEXT = torch.arange(48 * 6).reshape(48, 6) * 7 % 31


class Stop(transformers.TrainerCallback):
    """Ends a run after its first checkpoint, as if it had been killed."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_epoch_stop = True


def language_model(seed: int, *, lora: bool = False) -> Any:
    torch.manual_seed(seed)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 31}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    if not lora:
        return model
    base = Path(os.environ["LATHER_BASE"])  # adapters are saved without the model they belong to: it is the same in all runs
    model.load_state_dict(torch.load(base, weights_only=True))
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))


def trainer(folder: Path, model: Any, saving: dict[str, Any], options: dict[str, Any], callbacks: list[Any]) -> Any:
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    quiet = {name: value for name, value in quiet.items() if name not in saving}
    how = {"max_steps": STEPS, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "warmup_steps": 2}
    data = [{"input_ids": row, "labels": row} for row in TEXT]
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **quiet, **how, **saving),
        train_dataset=data[: 16 * WORLD],
        eval_dataset=data[40:],
        data_collator=transformers.default_data_collator,
        optimizer_cls_and_kwargs=(with_transformers.OptimizerFactory, {**OPTIONS, **options}),
        callbacks=callbacks,
    )


def train_transformers(folder: Path, saving: dict[str, Any], options: dict[str, Any], lora: bool = False) -> dict[str, Any]:
    """Weights of an undisturbed run and of one that was stopped and resumed, the steps saved, and warnings."""
    if lora:
        os.environ["LATHER_BASE"] = str(folder / "base.pt")
        if os.environ.get("RANK", "0") == "0":
            torch.save(language_model(0).state_dict(), folder / "base.new")
            (folder / "base.new").rename(folder / "base.pt")
        wait_for(folder / "base.pt")
    with parts_warned() as warned:
        whole = trainer(folder / "whole", language_model(1, lora=lora), {**saving, "save_strategy": "no"}, options, [])
        whole.train()
        callbacks = [with_transformers.Callback(), Stop()]
        trainer(folder / "run", language_model(1, lora=lora), saving, options, callbacks).train()
        (saved,) = (folder / "run").glob("checkpoint-*")
        again = trainer(folder / "again", language_model(2, lora=lora), saving, options, [with_transformers.Callback()])
        again.train(resume_from_checkpoint=str(saved))
    names = [type(unwrapped(each)).__name__ for each in (whole.optimizer, again.optimizer)]
    return {
        "whole": weights_of(whole.model),
        "again": weights_of(again.model),
        "saved": saved.name,
        "warned": warned,
        "names": names,
    }


def unwrapped(optimizer: Any) -> Any:
    return with_accelerate.unwrapped(optimizer)


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(path)


def log_transformers(folder: Path) -> list[dict[str, Any]]:
    """What Trainer logged."""
    callback = with_transformers.Callback(every=3, to=folder / "run.jsonl")
    logging = {"save_strategy": "no", "logging_strategy": "steps", "logging_steps": 2}
    runner = trainer(folder, language_model(1), logging, {}, [callback])
    runner.train()
    return list(runner.state.log_history)


def transformers_without_callback(folder: Path) -> list[str]:
    with parts_warned() as warned:
        trainer(folder / "run", language_model(1), {"save_strategy": "steps", "save_steps": 3}, {}, [Stop()]).train()
    return warned


# accelerate.

INPUTS = torch.arange(32 * 6).reshape(32, 6) * 5 % 13 / 13.0 - 0.5


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) - x.square().cumsum(1)[:, :3]).square().mean()


def accelerated(seed: int) -> tuple[Accelerator, Any, Any, Any, Any]:
    accelerator, model = Accelerator(cpu=True), network(seed)
    opt = lather.from_adamw(model, **OPTIONS)
    data = DataLoader(TensorDataset(INPUTS), batch_size=4)
    return (accelerator, *accelerator.prepare(model, opt, data, torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.5)))


def advance(parts: tuple[Any, ...], steps: int) -> None:
    accelerator, model, opt, data, schedule = parts
    for _ in range(steps):
        (x,) = next(iter(data))
        accelerator.backward(loss_of(model, x))
        opt.step()
        schedule.step()
        opt.zero_grad()


def train_accelerate(folder: Path, saves: bool = True) -> dict[str, Any]:
    with parts_warned() as warned:
        whole, run = accelerated(1), accelerated(1)
        handle = with_accelerate.register(run[0]) if saves else None
        other = run[0].prepare(torch.optim.SGD(network(3).parameters(), lr=0.1))  # not ours; it is saved as ever
        advance(whole, STEPS)
        advance(run, MIDDLE)
        run[0].save_state(str(folder / "saved"))
        if handle is None:
            return {"warned": warned}
        advance(run, STEPS - MIDDLE)  # saving does not disturb
        again = accelerated(2)
        again[0].prepare(other.optimizer)
        again[0].load_state(str(folder / "saved"))
        advance(again, STEPS - MIDDLE)
        handle.remove()
    models = {"whole": whole[1], "run": run[1], "again": again[1]}
    return {name: weights_of(model) for name, model in models.items()} | {"warned": warned}


# Lightning.


class Module(pl.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = network(seed)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return loss_of(self.net, batch[0])

    def configure_optimizers(self) -> Any:
        opt = lather.from_adamw(self, **OPTIONS)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(opt, 3), "interval": "step"}}


class Sharded(Module):
    """By FSDP2, with checkpoints of one file. Lightning then asks every rank for its state, and writes that of rank 0."""

    def configure_model(self) -> None:
        for layer in (*self.net, self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["optimizer"].register_state_dict_pre_hook(lambda opt: opt.consolidate_state_dict())
        return found


def fit(model: Module, steps: int, callbacks: list[Any], path: str | None = None, logger: Any = False) -> Weights:
    quiet = {"logger": logger, "enable_progress_bar": False, "enable_model_summary": False}
    strategy: Any = "ddp" if WORLD > 1 else "auto"
    if isinstance(model, Sharded):
        strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1, save_distributed_checkpoint=False)
    how = {"accelerator": "cpu", "devices": WORLD, "strategy": strategy, "use_distributed_sampler": False}
    runner = pl.Trainer(
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **quiet,
        **how,
    )
    data = TensorDataset(INPUTS[: 4 * MIDDLE * WORLD])  # a checkpoint has no place in the data, so it is at the end of an epoch
    sampler = DistributedSampler(data, WORLD, int(os.environ.get("RANK", "0")), shuffle=False)
    runner.fit(model, DataLoader(data, batch_size=4, sampler=sampler), ckpt_path=path)
    return weights_of(model)


def train_lightning(folder: Path, sharded: bool = False) -> dict[str, Any]:
    make = Sharded if sharded else Module
    with parts_warned() as warned:
        whole = fit(make(1), STEPS, [])
        fit(make(1), MIDDLE, [ModelCheckpoint(folder, filename="middle", every_n_train_steps=MIDDLE)])
        again = fit(make(2), STEPS, [], str(folder / "middle.ckpt"))
    return {"whole": whole, "again": again, "warned": warned}


def log_lightning(folder: Path) -> None:
    logger = CSVLogger(folder, name="", version="")
    fit(Module(1), STEPS, [with_lightning.Callback(every=3, to=folder / "run.jsonl")], logger=logger)


# The examples.

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(folder: Path, script: str) -> dict[str, Any]:
    """Run a script in a folder. The weights that it ends with, what it prints, and warnings."""
    before, argv, printed = Path.cwd(), sys.argv, io.StringIO()
    os.chdir(folder)
    sys.argv = [script, str(WORLD)]  # the number of devices; only Lightning's reads it
    try:
        with parts_warned() as warned, redirect_stdout(printed):
            scope = runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        os.chdir(before)
        sys.argv = argv
    model = scope["trainer"].model if "trainer" in scope else scope["model"]
    return {"weights": weights_of(model), "printed": printed.getvalue(), "warned": warned}
