"""A byte-level transformer on WikiText-2: AdamW, Muon, SOAP, KL-Shampoo, and Shampoo refreshed every 1, 10 and 50 steps.

    python -m experiments.wikitext --data DIR --bracket              # each at the learning rates of its grid, and on from there
    python -m experiments.wikitext --data DIR --best --seeds 1 2     # then two seeds more at the best
    python -m experiments.wikitext --data DIR --best --seeds 0 1 2 --steps 900    # and a schedule of 60% of the steps

DIR holds train.txt.xz and valid.txt.xz. The model and the schedule are those of experiments.tasks.Bytes. Everyone has weight
decay 0.1 and betas (0.9, 0.95). lather is given the model, so its norms do not decay, and embeddings and head are left to Adam;
"alike" is without that.
"""

from __future__ import annotations

import sys

from experiments import harness, tasks
from experiments.recipes import ALIKE, Recipe, adamw, lather_muon, muon, powers, shampoo

COMMON = {"betas": (0.9, 0.95), "weight_decay": 0.1}
RATES = powers(1e-3, 4)  # 1e-3 to 8e-3
SHAMPOO = Recipe(shampoo, COMMON, RATES)
SOAP = {"preconditioner": "soap", "graft": None, "root": "track"}  # no graft, as its authors have it

RECIPES = {
    "adamw": Recipe(adamw, COMMON, powers(5e-4, 4)),
    "adamw, norms not decayed": Recipe(adamw, COMMON | {"decay_norms": False}, powers(5e-4, 4)),
    "muon": Recipe(muon, COMMON, RATES),
    "lather-muon": Recipe(lather_muon, COMMON, RATES),
    "soap@10": SHAMPOO.varied({**SOAP, "precondition_frequency": 10}),
    "soap@10 alike": SHAMPOO.varied({**SOAP, "precondition_frequency": 10, **ALIKE}),
    "kl@10": SHAMPOO.varied({"preconditioner": "kl", "precondition_frequency": 10}),
    "shampoo@1": SHAMPOO.varied({"precondition_frequency": 1}),
    "shampoo@10": SHAMPOO.varied({"precondition_frequency": 10}),
    "shampoo@10 alike": SHAMPOO.varied({"precondition_frequency": 10, **ALIKE}),
    "shampoo@50": SHAMPOO.varied({"precondition_frequency": 50}),
}
EXPERIMENT = harness.Experiment(
    name="wikitext",
    doc=__doc__,
    task=tasks.bytes_task,
    tiny=tasks.tiny_bytes,
    unit="steps",
    lengths=(1500,),
    recipes=RECIPES,
    base=SHAMPOO,
    score="bits",
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
