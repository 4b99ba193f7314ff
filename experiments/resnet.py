"""ResNet-18 on CIFAR-10: SGD with Nesterov momentum, and Shampoo grafted from it, for 30 epochs and for two thirds of them.

    python -m experiments.resnet --data PATH --lr 0.2 --bracket                     # each at the best learning rate, 30 epochs
    python -m experiments.resnet --data PATH --best --epochs 30 20 --seeds 0 1 2    # then three seeds of both at it

PATH is cifar10_full_60k_lossy.npz or its folder. Batches, augmentation and schedule are those of experiments.tasks.Images. Weight
decay 5e-4, momentum 0.9 for everyone; there is no label smoothing. lather is given the model, so its norms and biases do not decay;
"alike" is without that, and "preconditioned decay" makes decay a part of the gradient.
"""

from __future__ import annotations

import sys

from experiments import harness, tasks
from experiments.recipes import ALIKE, Recipe, from_sgd, powers, sgd

COMMON = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
RATES = powers(0.1, 4)  # 0.1 to 0.8
SHAMPOO = Recipe(from_sgd, COMMON, RATES)

OLD = {"betas": (0.0, 0.999)}  # the default before these experiments

RECIPES = {
    "sgd": Recipe(sgd, COMMON, RATES),
    "shampoo@1": SHAMPOO.varied({"precondition_frequency": 1}),
    "shampoo@10": SHAMPOO.varied({"precondition_frequency": 10}),
    "shampoo@50": SHAMPOO.varied({"precondition_frequency": 50}),
    "shampoo@1 alike": SHAMPOO.varied({"precondition_frequency": 1, **ALIKE}),
    "shampoo@10 alike": SHAMPOO.varied({"precondition_frequency": 10, **ALIKE}),
    "shampoo@10, beta2=0.999": SHAMPOO.varied({"precondition_frequency": 10, **OLD}),
    "shampoo@1 alike, beta2=0.999": SHAMPOO.varied({"precondition_frequency": 1, **ALIKE, **OLD}),
    "shampoo@10 alike, beta2=0.999": SHAMPOO.varied({"precondition_frequency": 10, **ALIKE, **OLD}),
    "shampoo@10 alike, beta2=0.999, preconditioned decay": SHAMPOO.varied(
        {"precondition_frequency": 10, **ALIKE, **OLD, "weight_decay_mode": "l2"}
    ),
}
EXPERIMENT = harness.Experiment(
    name="resnet",
    doc=__doc__,
    task=tasks.resnet_task,
    tiny=tasks.tiny_resnet,
    unit="epochs",
    lengths=(30,),
    recipes=RECIPES,
    base=SHAMPOO,
    score="valid_error",
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
