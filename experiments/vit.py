"""A small vision transformer on CIFAR-10: AdamW, Muon, SOAP, KL-Shampoo and Shampoo.

    python -m experiments.vit --data PATH --lr 1e-3 --bracket      # each at the best learning rate, 30 epochs
    python -m experiments.vit --data PATH --best --seeds 1 2       # then two seeds more at it

PATH is cifar10_full_60k_lossy.npz or its folder. 6 layers, width 256, 4 heads, patches of 4 x 4: 4.8M parameters.
Batches, augmentation and schedule are those of experiments.tasks.Images, gradients are clipped to 1.0. The optimizers are those of
experiments.recipes.for_transformers.
"""

from __future__ import annotations

import sys

from experiments import harness, tasks
from experiments.recipes import for_transformers, powers

RECIPES = for_transformers(powers(5e-4, 4))  # 5e-4 to 4e-3
EXPERIMENT = harness.Experiment(
    name="vit",
    doc=__doc__,
    task=tasks.vit,
    tiny=tasks.tiny_vit,
    unit="epochs",
    lengths=(30,),
    recipes=RECIPES,
    base="shampoo",
    score="valid_error",
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
