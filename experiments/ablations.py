"""One option of lather at a time, on the byte-level transformer: what it does to the loss, to the time and to memory.

    python -m experiments.ablations --data DIR                              # all of them
    python -m experiments.ablations --data DIR --only '/(default|eps)'      # some

The task and everything that is not varied are those of `shampoo@10` in experiments.wikitext, at the learning rate LR; variations
that change the length of a step have a grid of their own around what it should be.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from experiments import harness, tasks, wikitext
from experiments.recipes import Recipe

LR = 2e-3
BASE = wikitext.SHAMPOO._replace(rates=(LR,))

# Option: its values, without the default.
FACTORS: dict[str, tuple[Any, ...]] = {
    "precondition_frequency": (1, 50, 100),
    "max_preconditioner_dim": (128, 256, 512, 2048),
    "exponent": (0.5,),  # the default is 1/4 for matrices
    "exponent_multiplier": (1.82,),
    "start_preconditioning_step": (1, 50, 100, 250),
    "eps": (1e-14, 1e-10, 1e-8, 1e-6),
    "root": ("eigh", "newton", "minimax", "qr", "track(iterations=1)", "track"),
    "refresh_warmup": (0.02, 0.1, 0.5),
    "refresh": ("staggered",),
    "refresh_delay": (2,),
    "precision": ("float32",),
    "root_dtype": ("bfloat16", "float16"),
    "weight_decay_mode": ("corrected",),
    "precondition_1d": (True,),
    "graft_eps": (1e-10, 1e-6),
}
DIAGONAL = {"preconditioner": None}
# What takes more than one option, by name.
OTHERS: dict[str, dict[str, Any]] = {
    **{f"relative eps={eps:g}": {"damping": "relative", "eps": eps} for eps in (1e-10, 1e-8, 1e-6, 1e-4)},
    **{f"beta1={b:g}": {"betas": (b, 0.95)} for b in (0.8, 0.95)},
    **{f"beta2={b:g}": {"betas": (0.9, b)} for b in (0.9, 0.98, 0.99, 0.999)},
    # Nesterov's form of the filter, and the factors alone with another memory than the graft's.
    "beta3=0.81": {"beta3": 0.81},
    **{f"beta2={b:g}, graft's 0.95": {"betas": (0.9, b), "graft_beta2": 0.95} for b in (0.9, 0.98, 0.99)},
    "averaging=gpa": {"averaging": "gpa"},
    "averaging=schedule_free": {"averaging": "schedule_free", "betas": (0.0, 0.95)},
    "embeddings diagonal": {"rules": [["^(token|position)", DIAGONAL]]},
    "head diagonal": {"rules": [["^head", DIAGONAL]]},
    "embeddings and head diagonal": {"rules": [["^(token|position|head)", DIAGONAL]]},
    "norms not decayed": {"rules": [["norm", {"weight_decay": 0.0}]]},
    "qkv apart": {"rules": [["qkv", {"split": 3}]]},
}
# Other lengths of a step, so other learning rates: factors of LR. Directions without a graft are about as long as those of Muon
# before its scale, those of SGD are as long as the gradient, and those of Adagrad shrink with the number of steps.
GRAFTS: dict[str, tuple[Any, tuple[float, ...]]] = {
    "graft=rmsprop": ("rmsprop", (1.0,)),
    "graft=adagrad": ("adagrad", (4.0, 16.0)),
    "graft=sgd": ("sgd", (256.0, 1024.0, 4096.0)),
    "graft=None": (None, (4.0, 16.0, 64.0)),
}


def variations() -> Iterator[tuple[str, Recipe]]:
    yield "default", BASE
    for option, values in FACTORS.items():
        yield from ((f"{option}={value}", BASE.varied({option: value})) for value in values)
    yield from ((name, BASE.varied(options)) for name, options in OTHERS.items())
    yield from ((name, BASE.varied({"graft": graft}, factors)) for name, (graft, factors) in GRAFTS.items())


EXPERIMENT = harness.Experiment(
    name="ablations",
    doc=__doc__,
    task=tasks.bytes_task,
    tiny=tasks.tiny_bytes,
    unit="steps",
    lengths=(1500,),
    recipes=dict(variations()),
    base=BASE,
    score="bits",
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
