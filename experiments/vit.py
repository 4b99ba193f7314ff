"""A small vision transformer on CIFAR-10: AdamW, Muon, SOAP, KL-Shampoo, and Shampoo refreshed every 10 and 50 steps.

    python -m experiments.vit --data PATH --lr 1e-3 --bracket      # each at the best learning rate, 30 epochs
    python -m experiments.vit --data PATH --best --seeds 1 2       # then two seeds more at it

PATH is cifar10_full_60k_lossy.npz or its folder. 6 layers, width 256, 4 heads, patches of 4 x 4: 4.8M parameters.
Batches, augmentation and schedule are those of experiments.tasks.Images, gradients are clipped to 1.0. Weight decay 0.1 and betas
(0.9, 0.95) for everyone; lather is given the model, so its norms and biases do not decay.
"""

from __future__ import annotations

import sys

from experiments import harness, tasks
from experiments.recipes import Recipe, adamw, muon, powers, shampoo
from experiments.wikitext import COMMON, SOAP

RATES = powers(5e-4, 4)  # 5e-4 to 4e-3
SHAMPOO = Recipe(shampoo, COMMON, RATES)

RECIPES = {
    "adamw": Recipe(adamw, COMMON, RATES),
    "muon": Recipe(muon, COMMON, powers(1e-3, 4)),
    "soap@10": SHAMPOO.varied({**SOAP, "precondition_frequency": 10}),
    "kl@10": SHAMPOO.varied({"preconditioner": "kl", "precondition_frequency": 10}),
    "shampoo@10": SHAMPOO.varied({"precondition_frequency": 10}),
    "shampoo@50": SHAMPOO.varied({"precondition_frequency": 50}),
}
EXPERIMENT = harness.Experiment(
    name="vit",
    doc=__doc__,
    task=tasks.vit_task,
    tiny=tasks.tiny_vit,
    unit="epochs",
    lengths=(30,),
    recipes=RECIPES,
    base=SHAMPOO,
    score="valid_error",
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
