"""What is trained: a model that keeps its place in memory from run to run, batches, a schedule and an evaluation.

Data, batches and augmentation live on the device, and the model is compiled once for all runs of a process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from argparse import Namespace
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
    most: int | None = None  # the longest run that the data are enough for
    goal: tuple[str, float] | None = None  # a value and where it is to get to
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
        self.backward(1)
        self.model.zero_grad()
        self.evaluate()

    def backward(self, step: int) -> Tensor:
        """Add the gradients of a step; its loss."""
        loss = self.loss_of(self.model, *self.batch(step))
        loss.backward()
        return loss.detach()

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


# The order of windows in training: from the bytes that a window may begin at, its length and that of a batch.
Order = Callable[[int, int, int, torch.Generator], Iterator[Tensor]]


def drawn(size: int, context: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows that begin anywhere, drawn independently, without end."""
    while True:
        yield torch.randint(0, size - context - 1, (batch,), generator=generator, device=generator.device)


def once(size: int, context: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows side by side, shuffled: every byte is predicted at most once."""
    starts = context * torch.randperm((size - 1) // context, generator=generator, device=generator.device)
    yield from starts[: len(starts) // batch * batch].view(-1, batch)


@final
class Bytes(Task):
    """A byte-level transformer on text, without biases and with a head of its own.

    As it stands it has 6 layers, width 384, 6 heads, context 256, 10.9M parameters, and batches of 128. A fifteenth of the steps
    warm-up, cosine to 5%, gradients clipped to 1.0, bf16 autocast. Validation is the mean over 10 fixed batches, in bits per byte.
    """

    clip, warmup, floor = 1.0, 15, 0.05

    def __init__(self, text: data.Text, order: Order = drawn, layers=6, width=384, heads=6, context=256, batch=128):
        self.text, self.order, self.size = text, order, batch
        self.shape = {"layers": layers, "width": width, "heads": heads, "context": context}
        self.settings = self.shape | {"batch": batch, "warmup": "1/15", "floor": self.floor, "clip": self.clip} | text.about
        if len(text.valid) < context + 2:
            raise ValueError(f"a window has {context + 1} bytes, and the text for validation {len(text.valid)}; give more files")
        if order is once:
            self.most = (len(text.train) - 1) // context // batch
        self.loss_of = self.score = loss_of
        self.model = self.make_model().to(DEVICE)
        generators = [torch.Generator().manual_seed(1000 + i) for i in range(10)]
        starts = [next(drawn(len(text.valid), context, batch, g)) for g in generators]
        self.held = [self.window(text.valid, start.to(DEVICE)) for start in starts]

    def make_model(self) -> nn.Module:
        return Transformer(vocab=256, tied=False, bias=False, **self.shape)

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.starts = self.order(len(self.text.train), self.shape["context"], self.size, self.generator)

    def steps(self, length: int) -> int:
        if self.most is not None and length > self.most:
            needed, have = length * self.size * self.shape["context"] + 1, len(self.text.train)
            missing = f"{needed - have:,} are missing"
            raise ValueError(f"--steps {length} needs {needed:,} bytes, each once, and there are {have:,}: {missing}")
        return length

    def looks(self, length: int) -> int:
        return min(length, 30)

    def window(self, text: Tensor, starts: Tensor) -> Batch:
        window = text[starts[:, None] + torch.arange(self.shape["context"] + 1, device=DEVICE)].long()
        return window[:, :-1], window[:, 1:]

    def batch(self, step: int) -> Batch:
        return self.window(self.text.train, next(self.starts))

    def losses(self) -> dict[str, float]:
        nats = torch.stack([self.score(self.model, *batch) for batch in self.held]).mean().item()
        return {"valid_loss": nats, "bits": nats / math.log(2)}


@final
class Tokens(Task):
    """GPT-2 on shards of tokens, read in order, each token once.

    As it stands it has 12 layers, width 768, 12 heads, a tied head and 124M parameters, and a step takes 512 x 1024 tokens in
    parts of 32 x 1024. A fiftieth of the steps warm-up, then constant, and linear to zero in the last 70%; bf16 autocast. The
    validation loss is in nats, over the first 10,485,760 tokens, every 125 steps.
    """

    clip, warmup, floor = 1.0, 50, 0.0
    goal = "valid_loss", 3.28

    def __init__(self, shards: data.Shards, layers=12, width=768, heads=12, vocab=50304, context=1024, batch=512, part=32):
        if batch % part:
            raise ValueError(f"--batch {batch} is not a multiple of --part {part}")
        self.shards, self.size, self.part, self.context = shards, batch, part, context
        self.shape = {"layers": layers, "width": width, "heads": heads, "vocab": vocab, "context": context}
        self.settings = self.shape | {"batch": batch, "warmup": "1/50", "floor": self.floor, "clip": self.clip}
        length = batch * context
        self.places = [(shard, start) for shard in shards.train for start in range(0, len(shard) - length, length)]
        self.most = len(self.places)
        windows = min(data.VALIDATED, len(shards.valid) - 1) // (part * context) * part
        if not windows:
            raise ValueError(f"{part * context + 1:,} tokens are needed for validation, and there are {len(shards.valid):,}")
        self.settings["valid_tokens"] = windows * context
        if (largest := int(shards.valid[: windows * context + 1].int().max())) >= vocab:
            raise ValueError(f"there is a token {largest}, and a vocabulary of {vocab}")
        self.held = self.parts(self.windows(shards.valid[: windows * context + 1]))
        self.loss_of = self.score = loss_of
        self.model = self.make_model().to(DEVICE)

    def make_model(self) -> nn.Module:
        return Transformer(**self.shape)

    def windows(self, tokens: Tensor) -> Batch:
        """From one more than a multiple of the context: inputs and targets, [windows, context]."""
        tokens = tokens.int().to(DEVICE).long()
        return tokens[:-1].view(-1, self.context), tokens[1:].view(-1, self.context)

    def parts(self, batch: Batch) -> list[Batch]:
        return list(zip(*(x.split(self.part) for x in batch), strict=True))

    def steps(self, length: int) -> int:
        if length > len(self.places):
            raise ValueError(f"--steps {length} needs more shards: there are tokens for {len(self.places)} steps, each once")
        return length

    def looks(self, length: int) -> int:
        return max(1, length // 125)

    def rate(self, step: int, steps: int, constant: bool = False) -> float:
        return min(1.0, step * self.warmup / steps, 1.0 if constant else (steps - step + 1) / (0.7 * steps))

    def batch(self, step: int) -> Batch:
        shard, start = self.places[step - 1]
        return self.windows(shard[start : start + self.size * self.context + 1])

    def backward(self, step: int) -> Tensor:
        parts, total = self.parts(self.batch(step)), torch.zeros((), device=DEVICE)
        for part in parts:
            loss = self.loss_of(self.model, *part) / len(parts)
            loss.backward()
            total += loss.detach()
        return total

    def losses(self) -> dict[str, float]:
        return {"valid_loss": torch.stack([self.score(self.model, *part) for part in self.held]).mean().item()}


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


# The tasks by name, from what the command line says or, tiny, for a CPU.


def wikitext(args: Namespace) -> Task:
    return Bytes(data.wikitext(args.data))


def tiny_bytes() -> Task:
    return Bytes(data.made_up_text(), layers=1, width=16, heads=2, context=16, batch=4)


def text(args: Namespace) -> Task:
    shape = {name: getattr(args, name) for name in ("layers", "width", "heads", "context", "batch")}
    return Bytes(data.folders(args.data, args.glob or ["*"]), once, **shape)


def tiny_text() -> Task:
    return Bytes(data.made_up_text(), once, layers=1, width=16, heads=2, context=16, batch=4)


def nanogpt(args: Namespace) -> Task:
    shape = {name: getattr(args, name) for name in ("layers", "width", "heads", "vocab", "context", "batch", "part")}
    return Tokens(data.shards(args.data), **shape)


def tiny_tokens() -> Task:
    return Tokens(data.made_up_tokens(), layers=1, width=16, heads=2, vocab=64, context=16, batch=4, part=2)


def resnet(args: Namespace) -> Task:
    return Images(data.cifar10(args.data), nets.ResNet18)


def tiny_resnet() -> Task:
    return Images(data.made_up_images(), lambda: nets.ResNet18(width=4), batch=16)


def vit(args: Namespace) -> Task:
    return Images(data.cifar10(args.data), nets.VisionTransformer, clip=1.0)


def tiny_vit() -> Task:
    images = data.made_up_images()
    return Images(images, lambda: nets.VisionTransformer(side=8, layers=1, width=16, heads=2), 1.0, batch=16)
