"""A byte-level transformer on WikiText-2: AdamW, Muon, SOAP, KL-Shampoo and Shampoo.

    python -m experiments.wikitext --data DIR --bracket              # each at the learning rates of its grid, and on from there
    python -m experiments.wikitext --data DIR --best --seeds 1 2     # then two seeds more at the best
    python -m experiments.wikitext --data DIR --steps 330 --bracket  # as many bytes as the text has

DIR holds train.txt.xz and valid.txt.xz. The model and the schedule are those of experiments.tasks.Bytes, the optimizers those of
experiments.recipes.for_transformers.
"""

from __future__ import annotations

import sys

from experiments import harness, tasks
from experiments.recipes import for_transformers, powers

RECIPES = for_transformers(powers(1e-3, 4))  # 1e-3 to 8e-3
EXPERIMENT = harness.Experiment(
    name="wikitext",
    doc=__doc__,
    task=tasks.wikitext,
    tiny=tasks.tiny_bytes,
    unit="steps",
    lengths=(1500,),
    recipes=RECIPES,
    base="shampoo",
    score="bits",
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
