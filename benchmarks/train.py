"""Time of whole training steps with fused AdamW and with lather: forward, backward and optimizer.

    python benchmarks/train.py [--models gpt2 resnet50] [--frequencies 10 50] [--monitor 100] [--options '{"root": "eigh"}' ...]

GPT-2 124M on 32 x 1024 random tokens, ResNet-50 (torchvision's) on 256 random images of 224 x 224 in channels_last; bf16
autocast. lather is given the model, so GPT-2's embeddings are left to Adam.

Model and loss are compiled once, and every optimizer starts from the same weights. Steps are timed by a synchronised
clock after every block was refreshed once; *free* is the mean of as many steps more without synchronising between them, as
training runs. Overhead is that over AdamW; AdamW is measured once more at the end, to show how steady the device is. Peak memory
is above weights and data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import common
import torch
from common import Results, Schedule
from machine import CUDA, DEVICE, Memory, now, solvers, state_mib
from models import Transformer, loss_of
from torch import Tensor, nn

import lather

Make = Callable[[nn.Module], torch.optim.Optimizer]
SETS = 4  # batches in rotation
OVERHEADS = ("mean", "median", "free")


class Workload(NamedTuple):
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]


def transformer(layers: int, width: int, heads: int, vocab: int, context: int, batch: int) -> Workload:
    model = Transformer(layers, width, heads, vocab, context).to(DEVICE)
    return Workload(model, [tuple(torch.randint(vocab, (2, batch, context), device=DEVICE)) for _ in range(SETS)])


def resnet50(batch: int = 256, size: int = 224) -> Workload:
    from torchvision.models import resnet50

    def draw() -> tuple[Tensor, Tensor]:
        images = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
        return images, torch.randint(1000, (batch,), device=DEVICE)

    return Workload(resnet50().to(DEVICE, memory_format=torch.channels_last), [draw() for _ in range(SETS)])


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt2": partial(transformer, layers=12, width=768, heads=12, vocab=50257, context=1024, batch=32),
    "gpt2-tiny": partial(transformer, layers=4, width=128, heads=4, vocab=512, context=64, batch=4),  # for a CPU
    "resnet50": resnet50,
}


def contenders(args: argparse.Namespace) -> Iterator[tuple[str, int | None, Make]]:
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return common.adamw(model.parameters(), lr=1e-4)

    def shampoo(frequency: int, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return common.shampoo(model, frequency, options)

    yield "AdamW fused", None, adamw
    for frequency in args.frequencies:
        for refresh in args.refresh:
            make = partial(shampoo, frequency, {"refresh": refresh})
            yield f"lather {refresh}", frequency, make
            if args.monitor:
                yield f"lather {refresh}, metrics every {args.monitor}", frequency, partial(watched, args.monitor, make)
        for options in args.options:
            yield common.spell(options), frequency, partial(shampoo, frequency, options)
    yield "AdamW fused, again", None, adamw


def watched(every: int, make: Make, model: nn.Module) -> torch.optim.Optimizer:
    opt = make(model)
    lather.Monitor(opt, every, to=lambda record: None)
    return opt


def measure(make: Make, model: nn.Module, batches: list, loss_fn: Callable[..., Tensor], steps: int) -> dict[str, Any]:
    memory = Memory()
    opt = make(model)
    schedule = Schedule.of(opt)
    steps = schedule.whole(steps)

    def train(t: int) -> Tensor:
        loss = loss_fn(model, *batches[t % SETS])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def timed(t: int) -> float:
        start = now()
        train(t)
        return now() - start

    warm = [timed(t) for t in range(schedule.warmup)]
    memory.peak()
    row = common.summary([timed(t) for t in range(steps)])
    peak, start = memory.peak(), now()
    for t in range(steps):
        loss = train(t)
    free = (now() - start) / steps
    row |= {"free_ms": free, "warmup_ms": warm, "first_refresh_ms": schedule.first(warm), "loss": loss.item()}
    return row | {"state_mib": state_mib(opt), "peak_mib": peak, "solvers": solvers(opt)}


def race(name: str, args: argparse.Namespace, results: Results) -> None:
    """All optimizers on one workload."""
    torch.manual_seed(0)
    model, batches = WORKLOADS[name]()
    loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    initial = {key: x.clone() for key, x in model.state_dict().items()}
    for x, y in batches:  # compiles
        loss(model, x, y).backward()
        model.zero_grad()
    base = None
    for optimizer, frequency, make in contenders(args):
        with results.attempt(f"{name}, {optimizer}"):
            model.load_state_dict(initial)
            row = measure(make, model, batches, loss, args.steps)
            base = row if optimizer == "AdamW fused" else base
            over = {f"overhead_{kind}": row[f"{kind}_ms"] / base[f"{kind}_ms"] - 1 for kind in OVERHEADS} if base else {}
            results.add(model=name, optimizer=optimizer, frequency=frequency, **row, **over)


def main(argv: list[str]) -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["gpt2", "resnet50"] if CUDA else ["gpt2-tiny"])
    parser.add_argument("--frequencies", nargs="+", type=int, default=[10, 50] if CUDA else [5, 10])
    parser.add_argument("--refresh", nargs="*", choices=("staggered", "together"), default=["staggered", "together"])
    parser.add_argument("--steps", type=int, default=100 if CUDA else 10, help="timed, rounded up to whole periods")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=CUDA)
    parser.add_argument("--monitor", type=int, metavar="N", help="also with a lather.Monitor that records every N steps")
    common.add_options(parser)
    args = parser.parse_args(argv)
    results = Results("train", args, argv, steps=args.steps, compiled=args.compile)
    for name in args.models:
        with results.attempt(name):
            try:
                race(name, args, results)
            except ImportError as error:
                results.note(f"{name}: skipped, {error}")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
