"""Record the factors of real training, for measuring root solvers on what they will meet.

    python benchmarks/factors.py OUT.pt [--data FILE] [--frequency 10] [--beta2 0.95] [--width 128] [--layers 2]

Trains a byte-level transformer with lather on FILE (plain or .xz; without one, on generated text) on the GPU if there is one, and
keeps the bias-corrected factors of every refresh, as the solver is given them:

    {"about": {...}, "frequency": int, "beta2": float, "factors": {"layers.0.up.weight/L0.0": Tensor [refreshes, d, d], ...}}

`--factors` and `--refreshes` limit what is kept: the factors are spread evenly over all there are, the refreshes are consecutive
from step `--skip`. Early ones move the most. 24 refreshes of 12 factors of size 128 are 18 MiB.
"""

from __future__ import annotations

import argparse
import datetime
import lzma
import pathlib

import torch
from models import Transformer
from torch import nn
from torch.nn.functional import cross_entropy

import lather


def generated(size: int = 1 << 20) -> bytes:
    """Words of a made-up language by Zipf's law, in lines: enough structure for a small model to learn for a while."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (2000,), generator=generator).tolist()
    weights = 1 / torch.arange(1, 27).float()
    words = [bytes((97 + torch.multinomial(weights, n, True, generator=generator)).tolist()) for n in lengths]
    picks = torch.multinomial(1 / torch.arange(1, 2001).float(), size // 4, True, generator=generator).tolist()
    return b" ".join(words[i] + (b".\n" if k % 11 == 10 else b"") for k, i in enumerate(picks))[:size]


def load(path: pathlib.Path | None) -> torch.Tensor:
    if path is None:
        raw = generated()
    else:
        raw = path.read_bytes()
        raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def batches(data: torch.Tensor, args: argparse.Namespace, device: str):
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        start = torch.randint(0, len(data) - args.context - 1, (args.batch,), generator=generator)
        window = data[start[:, None] + torch.arange(args.context + 1)].long().to(device)
        yield window[:, :-1], window[:, 1:]


class Recorder:
    """Keeps copies of some of an optimizer's full factors, divided by `1 - beta2^t`."""

    def __init__(self, model: nn.Module, opt: lather.Shampoo, limit: int):
        self.named, self.opt, self.limit = dict(model.named_parameters()), opt, limit
        self.kept: dict[str, list[torch.Tensor]] = {}

    def names(self) -> list[str]:
        """All full factors there are, as parameter/role."""
        entries = {name: self.opt.state[p] for name, p in self.named.items()}
        return [f"{n}/{r}" for n, entry in entries.items() for r, x in entry.items() if r[0] == "L" and x.dim() == 2]

    def take(self, step: int) -> None:
        if not self.kept:
            names = self.names()
            count = min(self.limit, len(names))
            self.kept = {names[i * len(names) // count]: [] for i in range(count)}
        beta2 = self.opt.param_groups[0]["betas"][1]
        correction = 1 - beta2**step if beta2 < 1 else 1.0
        for name, copies in self.kept.items():
            param, role = name.split("/")
            copies.append((self.opt.state[self.named[param]][role] / correction).float().cpu())

    def factors(self) -> dict[str, torch.Tensor]:
        return {name: torch.stack(copies) for name, copies in self.kept.items()}


def record(args: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    heads = max(1, args.width // 64)
    model = Transformer(args.layers, args.width, heads, 256, args.context, tied=False, bias=False).to(device)
    opt = lather.Shampoo(
        model.named_parameters(),
        lr=args.lr,
        betas=(0.9, args.beta2),
        precondition_frequency=args.frequency,
        max_preconditioner_dim=args.block,
        root=args.root,
    )
    recorder, source = Recorder(model, opt, args.factors), batches(load(args.data), args, device)
    first = -(-max(args.skip, 1) // args.frequency) * args.frequency
    last = first + (args.refreshes - 1) * args.frequency
    for step in range(1, last + 1):
        x, y = next(source)
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step >= first and step % args.frequency == 0:
            recorder.take(step)
    options = {k: v for k, v in vars(args).items() if k not in ("out", "data")}
    about = options | {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "torch": str(torch.__version__),  # a plain string, so that weights_only can load it
        "lather": lather.__version__,
        "text": "generated" if args.data is None else args.data.name,
        "steps": [first, last],
        "loss": loss.item(),
    }
    return {"about": about, "frequency": args.frequency, "beta2": args.beta2, "factors": recorder.factors()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, help="text, plain or .xz; default: generated")
    parser.add_argument("--frequency", type=int, default=10)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--block", type=int, default=128, help="max_preconditioner_dim, the largest factor")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--root", default="auto", help="the solver to train with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="steps before the first refresh that is kept")
    parser.add_argument("--factors", type=int, default=12, help="factors to keep")
    parser.add_argument("--refreshes", type=int, default=24, help="refreshes to keep")
    args = parser.parse_args()
    recording = record(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(recording, args.out)
    shapes = {name: tuple(x.shape) for name, x in recording["factors"].items()}
    print(f"{args.out}: loss {recording['about']['loss']:.3f}, {shapes}")


if __name__ == "__main__":
    main()
