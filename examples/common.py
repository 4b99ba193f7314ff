"""What the scripts for torchrun share: a small byte-level language model, its text, and the flags and printing of a run.

The text is the source of Python's standard library, so there is nothing to download. A step's batch depends on the step
alone, and every rank takes its share of it: any number of ranks sees the same data and follows the same gradients.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import lather

HEADS = 4


# The run.


def make_parser(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--optimizer", choices=("lather", "adamw"), default="lather")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=24, help="windows of text per step, over all ranks")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--print-every", type=int, default=20)
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write metrics here, for `lather view FILE`")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here, and resume if there is something")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--stop-after", type=int, metavar="K", help="save and leave after step K, as if interrupted")
    parser.add_argument("--save-final", type=Path, metavar="FILE", help="write the full parameters at the end")
    parser.add_argument("--double", action="store_true", help="compute in float64, to compare runs closely")
    parser.add_argument("--print-pids", action="store_true")
    return parser


def start(args: argparse.Namespace) -> torch.device:
    """Join the other processes of this torchrun: nccl if there are GPUs, else gloo."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if args.print_pids:
        print(f"rank {dist.get_rank()} pid {os.getpid()}", flush=True)
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.manual_seed(0)  # the same initial weights on every rank
    return device


def finish() -> None:
    """Leave together. The pause lets gloo's threads drop their tensors: torch aborts if Python ends first (pytorch#190489)."""
    dist.barrier()
    time.sleep(0.5)
    dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(
    args: argparse.Namespace,
    model: nn.Module,
    opt: torch.optim.Optimizer,
    done: int,
    save: Callable[..., None],
    rank: int,
    ranks: int,
) -> None:
    """Take the steps after ``done``; this rank is one of so many that split every batch."""
    text, held_out = load_text(args)
    report = Report(args, model, held_out, rank, ranks)
    report.begin(done)
    last = min(args.steps, args.stop_after or args.steps)
    monitor = lather.Monitor(opt, args.print_every, to=args.metrics) if args.metrics else None
    for step in range(done + 1, last + 1):
        set_lr(opt, args, step)
        loss = share_of_loss(model, global_batch(text, step, args), rank, ranks)
        loss.backward()
        if monitor:
            monitor.note(loss=loss)
        opt.step()
        opt.zero_grad()
        report.step(step, loss)
        if args.checkpoint and (step % args.save_every == 0 or step == last):
            save(args.checkpoint, model, opt, step)


class Report:
    """Prints the loss of the whole batch, the loss on held-out text and the speed since the line before."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, held_out: Tensor, rank: int, ranks: int) -> None:
        self.args, self.model, self.held_out, self.rank, self.ranks = args, model, held_out, rank, ranks
        self.since, self.clock = 0, 0.0

    def begin(self, step: int) -> None:
        say(f"step {step:5d}  held-out {self.held_out_loss():.4f}")
        self.since, self.clock = step, time.perf_counter()

    def step(self, step: int, loss: Tensor) -> None:
        if step % self.args.print_every and step != self.args.steps:
            return
        mean = mean_over_ranks(loss)
        tokens = (step - self.since) * self.args.batch * self.args.context
        speed = tokens / (time.perf_counter() - self.clock)
        say(f"step {step:5d}  loss {mean:.4f}  held-out {self.held_out_loss():.4f}  {speed:,.0f} tokens/s")
        self.since, self.clock = step, time.perf_counter()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return mean_over_ranks(share_of_loss(self.model, self.held_out, self.rank, self.ranks))


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# The optimizer.


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    recipe = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    state_dtype = "float64" if args.double else "float32"
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.named_parameters(), foreach=False, **recipe)
    opt = lather.Shampoo(model, precondition_frequency=10, state_dtype=state_dtype, **recipe)
    say(str(opt.plan()).split("\n\n")[-1])  # the totals; the paragraphs before list parameters and banks
    return opt


def set_lr(opt: torch.optim.Optimizer, args: argparse.Namespace, step: int) -> None:
    """Linear warm-up over a tenth of the steps, then a cosine to a tenth; from the step alone, so nothing to save."""
    warm = max(1, args.steps // 10)
    cosine = 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / max(1, args.steps - warm))
    for group in opt.param_groups:
        group["lr"] = args.lr * min(1.0, step / warm) * (0.1 + 0.9 * cosine)


# Text.


def load_text(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Bytes to train on, and 64 windows of the last tenth, which training never sees."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    starts = torch.linspace(cut, len(text) - args.context - 1, 64).long()
    return text[:cut], windows(text, starts, args.context)


def global_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
    return windows(text, starts, args.context)


def windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()


def share_of_loss(model: nn.Module, batch: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's part of the mean loss over the batch, times the number of ranks.

    The mean over ranks is then that loss, also when the batch does not divide evenly, and the mean of the gradients,
    which DDP and FSDP2 take, is its gradient.
    """
    mine = batch.tensor_split(ranks)[rank].to(next(model.parameters()).device)
    return model(mine) * ranks / batch[:, 1:].numel()


# The model.


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // HEADS

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        # -1 heads: under tensor parallelism the projections return this rank's heads only.
        parts = [part(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.attention_inputs()]
        mixed = scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.feed_forward(self.norm2(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))

    def attention_inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, args.width), nn.Embedding(args.context, args.width)
        self.layers = nn.ModuleList(layer(args.width) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, 256)
        for weight in (self.token.weight, self.position.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The cross entropy of each byte given those before it, summed over windows of text ``[n, context + 1]``."""
        x, y = text[:, :-1], text[:, 1:]
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten(), reduction="sum")
