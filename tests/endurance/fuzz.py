"""Random lives of an optimizer against their twins, each from a seed. What fails is cut down to what is needed to fail.

python -m endurance.fuzz --seeds 2000                        # in tests/: one process
python -m endurance.fuzz --seeds 100 --layouts ddp2 fsdp2    # and on several ranks
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distributed import cases
from distributed.cases import Case, Options
from distributed.harness import Pools
from torch.distributed.checkpoint.api import CheckpointException
from trajectory_cases import GRAFTS, METHODS, VARIANTS

from .life import BAD_OPTIONS, GRADIENTS, QUIET, Action, Life, live, that_matters

LIVE: dict[str, Sequence[Any]] = {
    "lr": (0.0, 1e-3, 0.03),
    "betas": ((0.9, 0.95), (0.0, 0.9), (0.5, 1.0)),
    "eps": (None, 1e-2),
    "precondition_frequency": (1, 2, 5),
    "weight_decay": (0.0, 0.3),
    "maximize": (True, False),
    "refresh": ("staggered", "together"),
    "refresh_warmup": (0.0, 0.2),
    "communication_dtype": ("bfloat16", None),
}
ARGUMENTS: dict[str, Sequence[Any]] = {
    "step": GRADIENTS,
    "put": [(name, value) for name, values in LIVE.items() for value in values],
    "add": [(7, 6), (9,), (2, 3, 4)],
    "freeze": range(6),
    "move": (torch.bfloat16, torch.float32, torch.float64),
    "refused_option": BAD_OPTIONS,
}
NAMES = tuple(dict.fromkeys([*ARGUMENTS, *QUIET, "thaw"]))


@dataclass(frozen=True)
class Story:
    case: Case
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.case.options} {self.case.dtype}", *(f"    {name}({argument})" for name, argument in self.actions)]
        )


def story(seed: int) -> Story:
    dice = random.Random(seed)
    method = dice.choice(list(METHODS))
    preconditioner = {"preconditioner": METHODS[method].get("preconditioner", "shampoo")}
    options: Options = {"max_preconditioner_dim": 8, "precondition_frequency": dice.choice([1, 3])}
    options |= METHODS[method] if dice.random() < 0.5 else preconditioner | {"graft": dice.choice(GRAFTS)}
    for variant in dice.sample(VARIANTS[method], dice.randrange(3)):
        options |= variant
    length = dice.randrange(4, 30)
    names = [dice.choice(NAMES) if dice.random() < 0.5 else "step" for _ in range(length)]
    actions = tuple((name, dice.choice(ARGUMENTS.get(name, [None]))) for name in names)
    options |= {"master_weights": True} if dice.random() < 0.3 else {}
    return Story(Case(options, dtype=dice.choice([torch.float32, torch.bfloat16]), model="few"), actions)


def is_valid(story: Story) -> bool:
    """Options that do not go together are refused when the optimizer is made."""
    try:
        Life("one", story.case, Path())
    except ValueError:
        return False
    return True


# One process: parameters and state. Several: parameters, and the twin has one process.


def alone(story: Story) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life = Life("one", story.case, Path(folder)).play(story.actions)
        twin = Life("one", story.case, Path(folder)).play(that_matters(story.actions))
        cases.assert_same(life.weights() | life.state(), twin.weights() | twin.state())


def together(layout: str, pools: Pools, story: Story) -> None:
    if not layout.startswith("ddp"):  # shards are not moved
        story = Story(story.case, tuple(action for action in story.actions if action[0] != "move"))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = Life("one", story.case, Path(folder)).play(that_matters(story.actions))
        stored = pools[cases.LAYOUTS[layout].world].run(live, layout, story.case, story.actions, Path(folder))
        cases.assert_same(cases.assemble(stored, twin.shapes), twin.weights())


def failure(play: Callable[[Story], None], story: Story) -> str | None:
    """The kind of failure and the line where it happened, to tell one from another."""
    try:
        play(story)
    except (Exception, CheckpointException) as error:  # that of torch is no Exception
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:300]} [{Path(where.filename).name}:{where.lineno}]"
    return None


def shortest(play: Callable[[Story], None], story: Story) -> Story:
    """Leave out actions, from the last to the first, as long as it fails."""
    for i in reversed(range(len(story.actions))):
        shorter = Story(story.case, story.actions[:i] + story.actions[i + 1 :])
        if failure(play, shorter):
            story = shorter
    return story


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--layouts", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    pools, found = Pools(), Counter[str]()
    ways: list[Callable[[Story], None]] = [lambda s, name=name: together(name, pools, s) for name in args.layouts] or [alone]
    tried = 0
    for seed in range(args.first, args.first + args.seeds):
        chosen = story(seed)
        if not is_valid(chosen):
            continue
        tried += 1
        for play in ways:
            if problem := failure(play, chosen):
                found[problem[:100]] += 1
                if found[problem[:100]] == 1:
                    small = shortest(play, chosen)
                    print(f"seed {seed}: {problem}\n{small}\nnow: {failure(play, small)}\n", flush=True)
    pools.close()
    print(f"{tried} lives, {sum(found.values())} failures of {len(found)} kinds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
