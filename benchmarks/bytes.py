"""Train a byte-level transformer on WikiText-2 text and report validation bits per byte; needs a GPU and the data.

    python benchmarks/bytes.py --data DIR [--runs adamw newton eigh] [--seeds 0 1] [--out benchmarks/results]

DIR holds train.txt.xz and valid.txt.xz. 6 layers, width 384, 6 heads, context 256, no biases in linear layers, untied head:
10.9M parameters. Batch 128, 1500 steps, warm-up 100, cosine to 5%, weight decay 0.1, betas (0.9, 0.95), gradients clipped to
1.0, bf16 autocast, learning rate 2e-3. Validation is the mean over 10 fixed batches, every 250 steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import lzma
import math
import pathlib
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import lather

WIDTH, LAYERS, HEADS, CONTEXT, BATCH, STEPS = 384, 6, 6, 256, 128, 1500
RUNS = {
    "adamw": None,
    "eigh": {"root": "eigh"},
    "newton": {"root": "newton"},
    "higher_order": {"root": "higher_order"},
    "qr": {"root": "qr"},
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = [y.view(batch, length, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)]
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, x):
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def load(path: pathlib.Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(lzma.open(path).read()), dtype=torch.uint8).cuda()


def draw(data, generator):
    start = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=generator).cuda()
    window = data[start[:, None] + torch.arange(CONTEXT + 1, device="cuda")].long()
    return window[:, :-1], window[:, 1:]


def loss_of(model, x, y):
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(x)
    return cross_entropy(logits.float().flatten(0, 1), y.flatten())


def train(options, train_data, valid_data, seed, lr) -> dict:
    torch.manual_seed(seed)
    model = Model().cuda()
    recipe = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if options is None:
        opt = torch.optim.AdamW(model.parameters(), fused=True, **recipe)
    else:
        opt = lather.Shampoo(model.named_parameters(), **recipe, **options)
    generator = torch.Generator().manual_seed(seed)
    held = [draw(valid_data, torch.Generator().manual_seed(1000 + i)) for i in range(10)]
    curve, begin = [], time.perf_counter()
    for step in range(1, STEPS + 1):
        cosine = 0.5 + 0.5 * math.cos(math.pi * max(0, step - 100) / (STEPS - 100))
        opt.param_groups[0]["lr"] = lr * min(1, step / 100) * (0.05 + 0.95 * cosine)
        loss_of(model, *draw(train_data, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step % 250 == 0:
            with torch.no_grad():
                nats = torch.stack([loss_of(model, *batch) for batch in held]).mean().item()
            curve.append(round(nats / math.log(2), 4))
    return {"bits_per_byte": curve, "wall_s": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["adamw", "newton", "eigh"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    train_data, valid_data = (load(args.data / f"{split}.txt.xz") for split in ("train", "valid"))
    report = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lather": lather.__version__,
        "lr": args.lr,
        "results": {},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.runs:
        for seed in args.seeds:
            row = train(RUNS[name], train_data, valid_data, seed, args.lr)
            report["results"][f"{name}/seed {seed}"] = row
            print(name, seed, row, flush=True)
            (args.out / f"bytes-{report['date']}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
