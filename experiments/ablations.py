"""One option of lather at a time, on the byte-level transformer: what it does to the loss, to the time and to memory.

    python -m experiments.ablations --data DIR                              # all of them, the first ones first
    python -m experiments.ablations --data DIR --only '/(exponent|eps)'     # some

The task and everything that is not varied are those of `paper` in experiments.wikitext, which they are compared with, at the
learning rate LR, which is the best of AdamW's grid. Those that
experiments.wikitext has already, other frequencies and KL-Shampoo, are not run again (experiments.report).
Variations that change the length of a step have a grid of their own around what it should be.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from experiments import harness, tasks, wikitext
from experiments.recipes import Recipe

LR = 2e-3
BASE = wikitext.RECIPES["paper"]._replace(rates=(LR,))
ALIKE = {"kinds": None}

# By name. First what might become a default: when and how often roots are refreshed while factors move fast, the exponent,
# who is preconditioned, averages (AdamW's default for betas is the first of them), damping.
CANDIDATES: dict[str, dict[str, Any]] = {
    "refresh_warmup=0.1": {"refresh_warmup": 0.1},
    "refresh_warmup=0.1, every 50": {"refresh_warmup": 0.1, "precondition_frequency": 50},
    "start_preconditioning_step=1": {"start_preconditioning_step": 1},
    "beta3=0.81": {"beta3": 0.81},  # Nesterov's form of the filter
    "exponent=0.5": {"exponent": 0.5},  # 1/4 for matrices else
    **{f"exponent=0.5,eps={eps:g}": {"exponent": 0.5, "eps": eps} for eps in (1e-8, 1e-6)},
    "only embeddings diagonal": {"kinds": {"head": {}, "norm": {}}},
    "only head diagonal": {"kinds": {"embedding": {}, "norm": {}}},
    "only norms not decayed": {"kinds": {"embedding": {}, "head": {}}},
    "beta2=0.999": {"betas": (0.9, 0.999)},
    "beta2=0.95, graft's 0.999": {"betas": (0.9, 0.95), "graft_beta2": 0.999},
    "relative eps=1e-06": {"damping": "relative", "eps": 1e-6},
    "root=minimax(relative_eps=1e-6)": {"root": "minimax(relative_eps=1e-6)"},
}
# Option: its values.
FACTORS: dict[str, tuple[Any, ...]] = {
    "refresh": ("staggered",),
    "refresh_warmup": (0.5,),
    "start_preconditioning_step": (100,),
    "eps": (1e-8, 1e-6),
    "max_preconditioner_dim": (128, 256, 512, 2048),
    "root": ("newton", "track"),
    "precision": ("float32",),
    "root_dtype": ("bfloat16", "float16"),
    "refresh_delay": (2,),
    "precondition_1d": (True,),
    "weight_decay_mode": ("corrected",),
    "graft_eps": (1e-6,),
    "exponent_multiplier": (1.82,),
    "precondition_frequency": (100,),
}
# What takes more than one option, or a rule.
OTHERS: dict[str, dict[str, Any]] = {
    "all diagonal": {"preconditioner": None},  # AdamW whose norms do not decay
    "qkv apart": {"rules": [["qkv", {"split": 3}]]},
    **{f"beta2={b:g}": {"betas": (0.9, b)} for b in (0.9, 0.98, 0.99)},
    "beta2=0.98, graft's 0.95": {"betas": (0.9, 0.98), "graft_beta2": 0.95},
    **{f"relative eps={eps:g}": {"damping": "relative", "eps": eps} for eps in (1e-8, 1e-4)},
    "beta1=0.95": {"betas": (0.95, 0.95)},
    "averaging=gpa": {"averaging": "gpa"},
    **{f"preconditioner=kl,eps={eps:g}": {"preconditioner": "kl", "eps": eps} for eps in (1e-12, 1e-8, 1e-5)},
}
SCHEDULE_FREE = {"averaging": "schedule_free", "betas": (0.0, 0.95)}  # with no schedule but the warm-up
# Other lengths of a step, so other learning rates: factors of LR. Directions of SGD are as long as the gradient, those of Adagrad
# shrink with the number of steps.
# All parameters have them alike: embeddings by Adam would want its learning rate.
GRAFTS: dict[str | None, tuple[float, ...]] = {
    "rmsprop": (1.0,),
    "adagrad": (1.0, 4.0, 16.0),
    "sgd": (4.0, 16.0, 64.0, 256.0),
    None: (0.25, 1.0, 4.0, 16.0),
}
# The first of all, when a model's kinds were not told apart.
FIRST: list[dict[str, Any]] = [
    {},
    {"refresh_warmup": 0.1},
    {"eps": 1e-8},
    {"beta3": 0.81},
    {"root": "track"},
    {"max_preconditioner_dim": 2048},
    {"exponent": 0.5},
    {"exponent": 0.5, "root": "track"},
    *({"exponent": 0.5, "eps": eps} for eps in (1e-8, 1e-6)),
    *({"preconditioner": "kl", "eps": eps} for eps in (1e-6, 1e-5)),
]
SLOW = {"root=eigh": {"root": "eigh"}}  # several times as long as all others


def variations() -> Iterator[tuple[str, Recipe]]:
    yield "default", BASE
    single = {f"{option}={value}": {option: value} for option, values in FACTORS.items() for value in values}
    yield from ((name, BASE.varied(options)) for name, options in (CANDIDATES | single | OTHERS).items())
    yield "averaging=schedule_free", BASE.varied(SCHEDULE_FREE, (1.0, 2.0))._replace(constant=True)
    for graft, factors in GRAFTS.items():
        options = ALIKE | {"graft": graft}
        yield harness.spell(options), BASE.varied(options, factors)
    yield from ((name, BASE.varied(options)) for name, options in SLOW.items())
    for options in FIRST:
        yield harness.spell(ALIKE | options), BASE.varied(ALIKE | options)


EXPERIMENT = harness.Experiment(
    name="ablations",
    doc=__doc__,
    task=tasks.wikitext,
    tiny=tasks.tiny_bytes,
    unit="steps",
    lengths=(1500,),
    recipes=dict(variations()),
    base="default",
    score="bits",
    looks=6,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
