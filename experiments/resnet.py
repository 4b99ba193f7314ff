"""ResNet-18 on CIFAR-10: SGD with Nesterov momentum, and Shampoo grafted from it, for 30 epochs and for two thirds of them.

    python -m experiments.resnet --data PATH --lr 0.2 --bracket                     # each at the best learning rate, 30 epochs
    python -m experiments.resnet --data PATH --best --epochs 30 20 --seeds 0 1 2    # then three seeds of both at it
    python -m experiments.resnet --data PATH --runs adamw from_adamw                # AdamW, and Shampoo from it

    --width 64 --batch 512

PATH is cifar10_full_60k_lossy.npz or its folder. Augmentation and schedule are those of experiments.tasks.Images. SGD's weight decay
is 5e-4, its momentum 0.9; AdamW's weight decay is 0.05, and so is that of Shampoo from it. There is no label smoothing. lather is
given the model, so its norms and biases do not decay.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from experiments import harness, tasks
from experiments.recipes import Recipe, adamw, from_adamw, from_sgd, powers, sgd

SIZES = {"width": 64, "batch": 512}
COMMON = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
RATES = powers(0.1, 4)  # 0.1 to 0.8
FROM_ADAMW = Recipe(from_adamw, {"weight_decay": 0.05}, powers(1e-3, 4))  # 1e-3 to 8e-3
RECIPES = {
    "sgd": Recipe(sgd, COMMON, RATES),
    "shampoo": Recipe(from_sgd, COMMON, RATES),
    "adamw": FROM_ADAMW._replace(make=adamw),
    "from_adamw": FROM_ADAMW,
    "from_adamw+adam": FROM_ADAMW.varied({"graft": "adam"}),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=pathlib.Path, metavar="PATH")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)


EXPERIMENT = harness.Experiment(
    name="resnet",
    doc=__doc__,
    task=tasks.resnet,
    tiny=tasks.tiny_resnet,
    unit="epochs",
    lengths=(30,),
    recipes=RECIPES,
    base="shampoo",
    score="valid_error",
    arguments=arguments,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
