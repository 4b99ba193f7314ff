"""A byte-level transformer of any size on any folder of text, each byte seen once: AdamW, Muon, SOAP, KL-Shampoo and Shampoo.

    python -m experiments.text --data DIR --glob '*.h' '*.cuh' --lr 1e-3 --bracket    # each at the best learning rate
    python -m experiments.text --data DIR --glob '*.h' '*.cuh' --best --seeds 1 2     # then two seeds more at it
    python -m experiments.text --data DIR --glob '*.h' '*.cuh' --best --steps 850     # a shorter schedule

    --data DIR ...      folders; several may be given
    --glob PATTERN ...  of the names of files, in all folders below; all files if there is none
    --layers 12 --width 768 --heads 12 --context 1024 --batch 32

Equal files count once. Every 50th file is held out for validation, until that is 1 MiB. The others are cut into windows, which a
seed shuffles. A run has as many steps as that gives, or --steps. The default sizes are GPT-2's (86.2M parameters with 256
tokens). The schedule is that of experiments.tasks.Bytes, and the optimizers are those of experiments.recipes.for_transformers.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from experiments import harness, tasks
from experiments.recipes import for_transformers, powers

SIZES = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "batch": 32}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", nargs="+", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--glob", nargs="+", action="extend", metavar="PATTERN")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)


EXPERIMENT = harness.Experiment(
    name="text",
    doc=__doc__,
    task=tasks.text,
    tiny=tasks.tiny_text,
    unit="steps",
    lengths=(),
    recipes=for_transformers(powers(5e-4, 4)),  # 5e-4 to 4e-3
    base="shampoo",
    score="bits",
    arguments=arguments,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT, sys.argv[1:]))
