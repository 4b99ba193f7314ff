"""Train a byte-level transformer on WikiText-2 text and report validation bits per byte; needs the data, and a GPU unless --tiny.

    python benchmarks/bytes.py --data DIR [--runs adamw auto@10 eigh@1] [--lr 2e-3 4e-3] [--seeds 0 1]

A run is `adamw`, or a root solver and the steps between refreshes: `qr@1`, `newton(iterations=20)@50`. DIR holds train.txt.xz
and valid.txt.xz. 6 layers, width 384, 6 heads, context 256, no biases in linear layers, untied head: 10.9M parameters. Batch 128,
1500 steps, a fifteenth of them warm-up, cosine to 5%, weight decay 0.1, betas (0.9, 0.95), gradients clipped to 1.0, bf16 autocast.
Validation is the mean over 10 fixed batches, at six steps of equal distance; the time includes it.
"""

from __future__ import annotations

import itertools
import lzma
import math
import pathlib
import sys
from typing import Any

import common
import torch
from common import DEVICE, Results
from models import Transformer, loss_of
from torch import Tensor, nn

import lather

FULL = {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 128}
TINY = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch": 8}
CHECKS = 6
Options = dict[str, Any] | None  # None is AdamW


def read_run(text: str) -> tuple[str, Options]:
    if text == "adamw":
        return text, None
    root, at, frequency = text.rpartition("@")
    options = {"root": root, "precondition_frequency": int(frequency)} if at else {"root": text}
    return text, common.checked(options)


def load(path: pathlib.Path) -> Tensor:
    return torch.frombuffer(bytearray(lzma.open(path).read()), dtype=torch.uint8).to(DEVICE)


def draw(data: Tensor, size: dict[str, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    start = torch.randint(0, len(data) - size["context"] - 1, (size["batch"],), generator=generator).to(DEVICE)
    window = data[start[:, None] + torch.arange(size["context"] + 1, device=DEVICE)].long()
    return window[:, :-1], window[:, 1:]


def make_model(size: dict[str, int]) -> Transformer:
    shape = {name: size[name] for name in ("layers", "width", "heads", "context")}
    return Transformer(vocab=256, tied=False, bias=False, **shape).to(DEVICE)


def make_optimizer(model: nn.Module, options: Options, lr: float) -> torch.optim.Optimizer:
    recipe = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if options is None:
        return common.adamw(model.parameters(), **recipe)
    return lather.Shampoo(model.named_parameters(), **recipe | options)


def rate(step: int, steps: int) -> float:
    """The learning rate as a part of the largest."""
    warmup = steps // 15
    cosine = 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / (steps - warmup))
    return min(1, step / max(1, warmup)) * (0.05 + 0.95 * cosine)


def train(options: Options, data: dict[str, Tensor], size: dict[str, int], steps: int, seed: int, lr: float) -> dict:
    torch.manual_seed(seed)
    model = make_model(size)
    opt = make_optimizer(model, options, lr)
    generator = torch.Generator().manual_seed(seed)
    held = [draw(data["valid"], size, torch.Generator().manual_seed(1000 + i)) for i in range(10)]
    curve, begin = [], common.now()
    for step in range(1, steps + 1):
        opt.param_groups[0]["lr"] = lr * rate(step, steps)
        loss_of(model, *draw(data["train"], size, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step * CHECKS // steps > (step - 1) * CHECKS // steps:
            with torch.no_grad():
                nats = torch.stack([loss_of(model, *batch) for batch in held]).mean().item()
            curve.append(round(nats / math.log(2), 4))
            print(f"step {step}: {curve[-1]}", file=sys.stderr, flush=True)
    wall = (common.now() - begin) / 1e3
    return {"bits_per_byte": curve, "wall_s": round(wall, 1), "state_mib": common.state_mib(opt)}


def main(argv: list[str]) -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    default = [read_run("adamw"), read_run("auto@10")]
    parser.add_argument(
        "--runs", nargs="*", type=common.argument(read_run), default=default, metavar="adamw|ROOT@FREQUENCY"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lr", nargs="+", type=float, default=[2e-3])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can train")
    common.add_options(parser)
    args = parser.parse_args(argv)
    size = TINY if args.tiny else FULL
    results = Results("bytes", args, argv, steps=args.steps, **size)
    data = {split: load(args.data / f"{split}.txt.xz") for split in ("train", "valid")}
    runs = args.runs + [(common.spell(options), options) for options in args.options]
    for (name, options), lr, seed in itertools.product(runs, args.lr, args.seeds):
        with results.attempt(f"{name}, lr {lr:g}, seed {seed}"):
            row = train(options, data, size, args.steps, seed, lr)
            results.add(run=name, options=options, lr=lr, seed=seed, **row)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
