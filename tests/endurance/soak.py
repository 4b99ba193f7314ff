"""A hundred thousand steps, with everything in between that may leave memory behind. Its size must stay flat.

python -m endurance.soak [--steps 100000]        # in tests/
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import sys
import time
import warnings

import torch
from torch import nn

import lather

OPTIONS = [
    {},
    {"preconditioner": "kl", "refresh": "staggered"},
    {"preconditioner": "soap", "graft": None, "root": "track"},
    {"preconditioner": "spectral", "momentum": 0.9},
    {"refresh_delay": 2, "factors": "packed", "root": "newton"},
    {"averaging": "gpa"},
]
ALLOWED = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def live(model: nn.Module, opt: lather.Shampoo, steps: int) -> lather.Shampoo:
    """Steps, and now and then a save, a load, a copy, a plan, a record, a changed option, a missing or bad gradient."""
    for step in range(1, steps + 1):
        for i, p in enumerate(model.parameters()):
            p.grad = None if (i + step) % 13 == 0 else torch.randn_like(p)
        if step % 101 == 0:
            next(model.parameters()).grad = torch.full_like(next(model.parameters()), torch.nan)
        if step % 50 == 0:
            opt.arm()
        opt.step()
        if step % 50 == 0:
            opt.metrics(gather=True)
        if step % 97 == 0:
            file = io.BytesIO()
            torch.save(opt.state_dict(), file)
            file.seek(0)
            opt.load_state_dict(torch.load(file, weights_only=True))
        if step % 211 == 0:
            copy.deepcopy((model, opt))
            str(opt.plan())
        if step % 307 == 0:
            opt.param_groups[0]["precondition_frequency"] = 3 + step % 5  # above refresh_delay
        if step % 401 == 0:
            opt.eval()
            opt.train()
    return opt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps // len(OPTIONS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lather.NumericalWarning)
    grown = []
    for options in OPTIONS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        opt = lather.Shampoo(model.named_parameters(), lr=1e-3, precondition_frequency=3, **options)
        began, sizes = time.perf_counter(), []
        for _ in range(4):
            live(model, opt, steps // 4)
            gc.collect()
            sizes.append(resident())
        grown.append(sizes[-1] - sizes[0])
        print(f"{options}: {steps} steps in {time.perf_counter() - began:.0f} s, {grown[-1] / 1024:+.0f} KiB", flush=True)
    print(f"{steps * len(OPTIONS)} steps, {max(grown) / 1024:+.0f} KiB at most after the first quarter")
    return int(max(grown) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
