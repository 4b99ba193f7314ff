"""Time of an optimizer step on the shapes of real models, beside torch's AdamW in the same run.

    python benchmarks/step.py [--models gpt2 resnet50] [--steps 30] [--frequency 10] [--out bench_out]

Synthetic gradients, four sets in rotation so that factors are not of rank one. A *plain* step refreshes nothing. State is
what the optimizer keeps; on CUDA, peak is the peak memory of the timed steps above parameters and gradients. Results are
written as JSON with versions and every step's time, and printed as a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import time

import torch

import lather
from lather.shapes import MODELS

LATHER = {
    "lather": {},
    "lather staggered": {"refresh": "staggered"},
}


def optimizers(frequency: int):
    def shampoo(options):
        return lambda params: lather.Shampoo(
            params, lr=1e-4, betas=(0.9, 0.95), precondition_frequency=frequency, max_preconditioner_dim=1024, **options
        )

    fused = torch.cuda.is_available()
    yield "AdamW fused" if fused else "AdamW", lambda params: torch.optim.AdamW(params, lr=1e-4, fused=fused)
    for name, options in LATHER.items():
        yield name, shampoo(options)


def measure(make, shapes, steps: int, warmup: int, device: str) -> dict:
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, device=device, generator=generator) * 0.02) for s in shapes.values()]
    sets = [[torch.randn(p.shape, device=device, generator=generator) * 0.01 for p in params] for _ in range(4)]
    opt = make(params)
    base = torch.cuda.memory_allocated() if device == "cuda" else 0
    times = []
    for step in range(warmup + steps):
        for p, grad in zip(params, sets[step % 4], strict=True):
            p.grad = grad
        if device == "cuda":
            torch.cuda.synchronize()
            if step == warmup:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        opt.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    state = sum(t.numel() * t.element_size() for entry in opt.state.values() for t in entry.values())
    peak = torch.cuda.max_memory_allocated() - base if device == "cuda" else None
    timed = times[warmup:]
    return {
        "mean_ms": statistics.mean(timed),
        "median_ms": statistics.median(timed),
        "worst_ms": max(timed),
        "first_steps_ms": times[:warmup],
        "step_ms": timed,
        "state_mib": state / 2**20,
        "peak_mib": None if peak is None else peak / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ["gpt2", "resnet50"] if torch.cuda.is_available() else ["gpt2-tiny"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=models)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--frequency", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench_out"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    report = {
        "date": datetime.date.today().isoformat(),
        "device": hardware,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "lather": lather.__version__,
        "frequency": args.frequency,
        "steps": args.steps,
        "results": {},
    }
    print(
        "| model | optimizer | mean ms | median ms | worst ms | state MiB | peak MiB |\n|---|---|---|---|---|---|---|"
    )
    for model in args.models:
        for name, make in optimizers(args.frequency):
            row = measure(make, MODELS[model](), args.steps, args.frequency + 2, device)
            report["results"][f"{model}/{name}"] = row
            peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
            cells = [f"{row[k]:.1f}" for k in ("mean_ms", "median_ms", "worst_ms")] + [f"{row['state_mib']:.0f}", peak]
            print(f"| {model} | {name} | " + " | ".join(cells) + " |", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"step-{report['date']}-{device}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
