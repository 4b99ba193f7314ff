"""ResNet-18 on CIFAR-10: SGD with Nesterov momentum, and Shampoo grafted from it, for 30 epochs and for two thirds of them.

    python -m experiments.resnet --data PATH --lr 0.2 --bracket                     # each at the best learning rate, 30 epochs
    python -m experiments.resnet --data PATH --best --epochs 30 20 --seeds 0 1 2    # then three seeds of both at it

PATH is cifar10_full_60k_lossy.npz or its folder. Batches, augmentation and schedule are those of experiments.tasks.Images. Weight
decay 5e-4, momentum 0.9 for everyone; there is no label smoothing. lather is given the model, so its norms and biases do not decay.
"""

from __future__ import annotations

import sys

from experiments import harness, tasks
from experiments.recipes import Recipe, from_sgd, powers, sgd

COMMON = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
RATES = powers(0.1, 4)  # 0.1 to 0.8
RECIPES = {"sgd": Recipe(sgd, COMMON, RATES), "shampoo": Recipe(from_sgd, COMMON, RATES)}
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
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
