"""GPT-2 124M on FineWeb's tokens to a validation loss of 3.28, as in the public NanoGPT benchmark. It was not run here.

    python -m experiments.nanogpt --data DIR --steps 3500 --lr 1e-3 --bracket

    --data DIR    the token files: *train*.bin and *val*.bin, as modded-nanogpt and llm.c make them
    --part 32     windows in a part of a batch; gradients of parts are added
    --layers 12 --width 768 --heads 12 --vocab 50304 --context 1024 --batch 512

Tokens, batches of 524,288 tokens, the order of the data, validation and goal are those of the benchmark
(https://github.com/KellerJordan/modded-nanogpt). The model is not: it is GPT-2 with learned positions, GELU, layer norms and a tied
head (benchmarks.models.Transformer). So steps can be compared between optimizers here, but not with the benchmark's own table.
The schedule is that of experiments.tasks.Tokens, and the optimizers are those of experiments.recipes.for_transformers. The end of a
run in the log says when the goal was first seen to be reached: goal_step and goal_seconds. It runs in one process on one device.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from experiments import harness, tasks
from experiments.recipes import for_transformers, powers

SIZES = {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "context": 1024, "batch": 512, "part": 32}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=pathlib.Path, metavar="DIR")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)


EXPERIMENT = harness.Experiment(
    name="nanogpt",
    doc=__doc__,
    task=tasks.nanogpt,
    tiny=tasks.tiny_tokens,
    unit="steps",
    lengths=(3500,),
    recipes=for_transformers(powers(5e-4, 4)),  # 5e-4 to 4e-3
    base="shampoo",
    score="valid_loss",
    arguments=arguments,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
