"""What is trained: a model that keeps its place in memory from run to run, batches, a schedule and an evaluation.

Data, batches and augmentation live on the device, and the model is compiled once for all runs of a process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from benchmarks.machine import CUDA, DEVICE
from benchmarks.models import Transformer, loss_of
from experiments import data, nets

Batch = tuple[Tensor, Tensor]


def schedule(step: int, steps: int, warmup: int, floor: float) -> float:
    """The learning rate as a part of the largest: linear to it, then a cosine to ``floor``; steps count from 1."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / (steps - warmup))
    return min(1, step / max(1, warmup)) * (floor + (1 - floor) * cosine)


class Task(ABC):
    settings: dict[str, Any]  # for the log
    clip: float | None  # the largest norm of the gradient
    warmup: int  # one of so many steps
    floor: float  # where the cosine ends
    model: nn.Module

    def begin(self, seed: int) -> None:
        """Initial weights and the stream of batches of a seed. The compiled model takes over the weights of a new one."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self.make_model().state_dict())
        self.model.train()
        self.generator = torch.Generator(DEVICE).manual_seed(seed)

    def compile(self, mode: str | None) -> None:
        """Compile training and evaluation, and run each once, so that no run pays for it."""
        if CUDA:
            self.loss_of = torch.compile(self.loss_of, dynamic=False, mode=mode)
            self.score = torch.compile(self.score, dynamic=False)
        self.begin(0)
        self.loss(self.batch(1)).backward()
        self.model.zero_grad()
        self.evaluate()

    def loss(self, batch: Batch) -> Tensor:
        return self.loss_of(self.model, *batch)

    # Plain functions of the model and a batch, replaced by compiled ones.
    loss_of: Callable[..., Tensor]
    score: Callable[..., Any]

    @abstractmethod
    def make_model(self) -> nn.Module: ...

    @abstractmethod
    def steps(self, length: int) -> int: ...

    @abstractmethod
    def looks(self, length: int) -> int:
        """How often a run is evaluated, at equal distances."""

    def rate(self, step: int, steps: int, constant: bool = False) -> float:
        """The learning rate as a part of the largest; constant after the warm-up, or by the cosine."""
        return schedule(step, steps, steps // self.warmup, 1.0 if constant else self.floor)

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Batches are asked for in order, from step 1."""

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Losses of data that are held still, in evaluation mode."""
        self.model.eval()
        row = self.losses()
        self.model.train()
        return row

    @abstractmethod
    def losses(self) -> dict[str, float]: ...

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Around an evaluation of weights that were not trained with, such as averages: what the model measured of others is
        measured anew, and then put back."""
        yield


@final
class Bytes(Task):
    """A byte-level transformer on text: 6 layers, width 384, 6 heads, context 256, no biases, untied head, 10.9M parameters.

    Batches of 128, a fifteenth of the steps warm-up, cosine to 5%, gradients clipped to 1.0, bf16 autocast. Validation is the
    mean over 10 fixed batches, in bits per byte.
    """

    clip, warmup, floor = 1.0, 15, 0.05

    def __init__(self, text: data.Text, layers=6, width=384, heads=6, context=256, batch=128):
        self.text, self.size = text, batch
        self.shape = {"layers": layers, "width": width, "heads": heads, "context": context}
        self.settings = self.shape | {"batch": batch, "warmup": "1/15", "floor": self.floor, "clip": self.clip}
        self.loss_of = self.score = loss_of
        self.model = self.make_model().to(DEVICE)
        generators = [torch.Generator().manual_seed(1000 + i) for i in range(10)]
        self.held = [self.window(text.valid, self.starts(text.valid, g).to(DEVICE)) for g in generators]

    def make_model(self) -> nn.Module:
        return Transformer(vocab=256, tied=False, bias=False, **self.shape)

    def steps(self, length: int) -> int:
        return length

    def looks(self, length: int) -> int:
        return min(length, 30)

    def starts(self, text: Tensor, generator: torch.Generator) -> Tensor:
        last = len(text) - self.shape["context"] - 1
        return torch.randint(0, last, (self.size,), generator=generator, device=generator.device)

    def window(self, text: Tensor, starts: Tensor) -> Batch:
        window = text[starts[:, None] + torch.arange(self.shape["context"] + 1, device=DEVICE)].long()
        return window[:, :-1], window[:, 1:]

    def batch(self, step: int) -> Batch:
        return self.window(self.text.train, self.starts(self.text.train, self.generator))

    def losses(self) -> dict[str, float]:
        nats = torch.stack([self.score(self.model, *batch) for batch in self.held]).mean().item()
        return {"valid_loss": nats, "bits": nats / math.log(2)}


def score_images(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[loss, part of the images that is right]"""
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = model(x)
    right = (logits.argmax(1) == y).float().mean()
    return torch.stack([cross_entropy(logits.float(), y), right])


@final
class Images(Task):
    """A network on images: random crops after padding by 4, random flips, batches of 512, bf16 autocast, channels_last.

    A tenth of the steps warm-up, cosine to zero. Images that do not fill a batch sit the epoch out. Training loss and accuracy
    are also of the first images as they are, half as many as there are for validation, in evaluation mode.
    """

    warmup, floor = 10, 0.0

    def __init__(self, images: data.Images, make: Callable[[], nn.Module], clip=None, batch=512, looks=1):
        self.make, self.clip, self.size, self.per_epoch = make, clip, batch, looks
        self.settings = {"batch": batch, "warmup": "1/10", "floor": self.floor, "clip": clip}
        if CUDA:
            torch.backends.cudnn.benchmark = True
        self.mean, self.deviation = (torch.tensor(values, device=DEVICE).view(3, 1, 1) for values in data.PIXELS)
        self.padded, self.labels = pad(images.train.images, (4, 4, 4, 4)), images.train.labels
        number = len(images.valid.labels) // 2
        first = data.Split(images.train.images[:number], images.train.labels[:number])
        self.held = {"train": self.batches(first), "valid": self.batches(images.valid)}
        self.loss_of, self.score = loss_of, score_images
        self.model = self.make_model().to(DEVICE, memory_format=torch.channels_last)

    def make_model(self) -> nn.Module:
        return self.make()

    def batches(self, split: data.Split) -> list[Batch]:
        size = min(1000, len(split.labels))
        parts = zip(split.images.split(size), split.labels.split(size), strict=True)
        return [(self.prepared(x), y) for x, y in parts if len(y) == size]

    def prepared(self, x: Tensor) -> Tensor:
        return ((x / 255 - self.mean) / self.deviation).to(memory_format=torch.channels_last)

    @property
    def epoch(self) -> int:
        """Steps in one."""
        return len(self.labels) // self.size

    def steps(self, length: int) -> int:
        return length * self.epoch

    def looks(self, length: int) -> int:
        return length * self.per_epoch

    def random(self, high: int) -> Tensor:
        return torch.randint(high, (self.size,), generator=self.generator, device=DEVICE)

    def batch(self, step: int) -> Batch:
        place = (step - 1) % self.epoch
        if place == 0:
            self.order = torch.randperm(len(self.labels), generator=self.generator, device=DEVICE)
        chosen = self.order[place * self.size :][: self.size]
        side = torch.arange(self.padded.shape[-1] - 8, device=DEVICE)
        rows, columns = self.random(9)[:, None] + side, self.random(9)[:, None] + side
        columns = torch.where(self.random(2).bool()[:, None], columns, columns.flip(1))
        channels = torch.arange(3, device=DEVICE)[:, None, None]
        x = self.padded[chosen[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None, :]]
        return self.prepared(x), self.labels[chosen]

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Batch norms have the mean statistics of the training images that are evaluated."""
        norms = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm2d)]
        before = [(norm.momentum, {name: x.clone() for name, x in norm.named_buffers()}) for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
        try:
            with torch.no_grad():
                for x, y in self.held["train"] if norms else ():
                    score_images(self.model, x, y)
            yield
        finally:
            for norm, (momentum, buffers) in zip(norms, before, strict=True):
                norm.momentum = momentum
                norm.load_state_dict(buffers, strict=False)

    def losses(self) -> dict[str, float]:
        row = {}
        for split, batches in self.held.items():
            loss, right = torch.stack([self.score(self.model, *batch) for batch in batches]).mean(0).tolist()
            row |= {f"{split}_loss": loss, f"{split}_error": 1 - right}
        row["plain_train_loss"] = row.pop("train_loss")
        return row


# The tasks by name, from data or, tiny, for a CPU.


def bytes_task(folder: Any) -> Task:
    return Bytes(data.wikitext(folder))


def tiny_bytes() -> Task:
    return Bytes(data.made_up_text(), layers=1, width=16, heads=2, context=16, batch=4)


def resnet_task(path: Any) -> Task:
    return Images(data.cifar10(path), nets.ResNet18)


def tiny_resnet() -> Task:
    return Images(data.made_up_images(), lambda: nets.ResNet18(width=4), batch=16)


def vit_task(path: Any) -> Task:
    return Images(data.cifar10(path), nets.VisionTransformer, clip=1.0)


def tiny_vit() -> Task:
    images = data.made_up_images()
    return Images(images, lambda: nets.VisionTransformer(side=8, layers=1, width=16, heads=2), 1.0, batch=16)
