"""Records what the optimizer computes, and compares two recordings bit for bit: for refactorings, which must not change it.

    python tests/trajectories.py record before.json
    python tests/trajectories.py compare before.json after.json

Both recordings must come from the same machine. Only the public interface is used, so this file also runs with an older
checkout: ``PYTHONPATH=older/src python tests/trajectories.py record before.json``. It takes some three minutes.

A case is a model, an optimizer and what happens to them in 13 steps. Gradients depend on the parameter's name and the step
alone. A recording has a hash of the parameters after every step and of each kind of state after the last, errors and warnings.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from distributed import cases, saving
from distributed.harness import Pools
from trajectory_cases import ABSOLUTE, FIRST, GPA, MOMENTUM, STAGGERED, Case, Options, alone

import lather

Result = dict[str, str]  # where, such as "step 3" or "state L0" -> hash of what is there, or the text of an error

STEPS = 13
noise = cache(cases.noise)


# Hashes.


def digest(named: Iterable[tuple[str, Any]]) -> str:
    """Of names, dtypes, shapes and bits; of a sharded tensor, of this rank's part."""
    sha = hashlib.sha256()
    for name, value in named:
        tensor = cases.local(torch.as_tensor(value)).cpu()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:20]


def state_of(opt: torch.optim.Optimizer) -> Result:
    """A hash for every kind of state, such as ``momentum`` or ``L0``."""
    kinds = defaultdict(list)
    for number, entry in sorted(opt.state_dict()["state"].items()):
        for key in sorted(entry):
            kinds[key.partition(".")[0]].append((f"{number} {key}", entry[key]))
    return {f"state {kind}": digest(found) for kind, found in sorted(kinds.items())}


# One process.


class Run:
    """A model and its optimizer; ``result`` grows with every step."""

    def __init__(self, case: Case, result: Result) -> None:
        self.case, self.result, self.model = case, result, case.model()
        for name, p in self.model.named_parameters():
            p.data = case.form((0.1 * noise(name, 0, p.shape)).to(case.dtype))
        self.opt = self.optimizer()

    def optimizer(self) -> Any:
        return getattr(lather, self.case.make)(self.case.give(self.model), **copy.deepcopy(self.case.options))

    def keep(self, where: str) -> None:
        self.result[where] = digest(self.model.named_parameters())

    def advance(self, step: int) -> None:
        """With a learning rate that rises and falls, in place if it is a tensor."""
        for when in (step, *(() if step % 2 else (0,))):
            self.case.before.get(when, lambda run: None)(self)
        for group in self.opt.param_groups:
            group["lr"] *= (1 + 0.3 * abs(step - 7)) / (1 + 0.3 * abs(step - 6))
        for number, (name, p) in enumerate(self.model.named_parameters()):
            grad = self.case.grad(number, step, noise(name, step, p.shape).clone().to(p.dtype))
            p.grad = grad if p.requires_grad else None
        self.opt.step()


@contextmanager
def errors_in(result: Result, where: str) -> Iterator[None]:
    """An error is a result too."""
    try:
        yield
    except Exception as error:
        result[f"error {where}"] = f"{type(error).__name__}: {error}"


def train(case: Case) -> Result:
    result: Result = {}
    with warnings.catch_warnings(record=True) as caught, errors_in(result, "of the run"):
        warnings.simplefilter("always")
        run = Run(case, result)
        for step in range(1, STEPS + 1):
            with errors_in(result, f"of step {step}"):
                run.advance(step)
            run.keep(f"step {step}")
        result |= state_of(run.opt)
    found = [str(warning.message) for warning in caught if warning.category is lather.NumericalWarning]
    return result | {f"warning {i}": text for i, text in enumerate(found)}


# Several ranks.


def R(options: Options | None = None, **unusual: Any) -> cases.Case:
    options = options or {}
    damped = options.get("preconditioner", "shampoo") in ("shampoo", "kl", "soap")
    return cases.Case(FIRST | (ABSOLUTE if damped else {}) | options, **unusual)


RANKS: dict[str, cases.Case] = {
    "plain": R(),
    "all at once": R(STAGGERED | MOMENTUM | {"weight_decay": 0.1}, gaps=True, groups=True),
    "delayed": R(STAGGERED | {"refresh_delay": 2, "factors": "packed"}),
    "kl": R({"preconditioner": "kl", "communication_dtype": "bfloat16"}, gaps=True),
    "soap": R({"preconditioner": "soap", "graft": None, "root": "track", "stages": 2} | MOMENTUM, spoilt=True),
    "spectral": R({"preconditioner": "spectral", "graft": None, "polar_scale": "original", "weight_decay": 0.1}),
    "elementwise": R({"preconditioner": None, "momentum": 0.9}, gaps=True),
    "int8": R({"communication_dtype": "int8", "stages": 2}, dtype=torch.bfloat16),
    "local": R(STAGGERED | MOMENTUM | {"blocks": "local", "graft": "sgd"}, gaps=True),
    "trainers, 1": R(MOMENTUM | {"num_trainers_per_group": 1}),
    "trainers, 2": R(STAGGERED | {"num_trainers_per_group": 2}),
    "schedule free": R({"averaging": "schedule_free", "weight_decay": 0.1}, gaps=True, evaluated=True),
    "gpa": R(GPA | {"communication_dtype": "int8"}, dtype=torch.bfloat16, evaluated=True),
}
LAYOUTS = ("ddp2", "ddp3", "ddp4", "fsdp2", "fsdp3", "tp0x2", "tp1x2", "mixed4", "hsdp22", "fsdp_tp22")
MOVES = [("ddp2", "ddp2"), ("ddp3", "fsdp2"), ("fsdp3", "fsdp3"), ("hsdp22", "fsdp_tp22"), ("tp0x2", "ddp3")]
WAYS = {"file": (saving.consolidate, saving.resume_file, ()), "dcp": (saving.save, saving.resume, (saving.Way(),))}


def on_a_rank(layout: str, case: cases.Case) -> Result:
    """What this rank stores, after every step."""
    result = {}
    with cases.expected_warnings(case):
        run = cases.Run(layout, case)
        for step in range(1, case.steps + 1):
            run.advance(step, step)
            result[f"step {step}"] = digest(run.model.named_parameters())
    return result | state_of(run.opt)


def in_the_end(function: Callable[..., cases.Stored], layout: str, case: cases.Case, *args: Any) -> Result:
    with cases.expected_warnings(case):
        return {"end": digest((name, part) for name, (_, part) in function(layout, case, *args).items())}


def together(pools: Pools) -> Iterator[tuple[str, Result]]:
    """The results of cases of several ranks."""

    def run(layout: str, function: Callable[..., Any], *args: Any) -> Result:
        outcomes = pools[cases.LAYOUTS[layout].world].attempt(function, *args)
        parts = [o.value or {"error": f"{o.error}: {o.message}"} for o in outcomes]
        return {f"rank {i} {where}": value for i, part in enumerate(parts) for where, value in part.items()}

    for layout in LAYOUTS:
        for name, case in RANKS.items():
            yield f"{layout}: {name}", run(layout, on_a_rank, layout, case)
        yield f"{layout}: one lacks a gradient", run(layout, cases.step_without_a_gradient, layout, "up.weight")
    for way, (save, load, how) in WAYS.items():
        for name, (old, new) in ((name, move) for name in ("delayed", "soap", "gpa") for move in MOVES):
            with tempfile.TemporaryDirectory() as folder:
                args = replace(RANKS[name], steps=STEPS), Path(folder, "saved"), *how
                saved, loaded = run(old, in_the_end, save, old, *args), run(new, in_the_end, load, new, *args)
                yield f"{way}: {name}, {old} to {new}", {f"saved, {k}": v for k, v in saved.items()} | loaded


# Recordings.


def record(path: str) -> None:
    if os.environ.get("OMP_NUM_THREADS") != "1":  # torch reads it when it is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, lather of {Path(lather.__file__).parent}", flush=True)
    results: dict[str, Result] = {}
    pools = Pools()
    for part in (((name, train(case)) for name, case in alone()), together(pools)):
        began, before = time.perf_counter(), len(results)
        for name, result in part:
            assert name not in results, f"two cases are called {name}"
            results[name] = result
        print(f"{len(results) - before} cases in {time.perf_counter() - began:.0f} s", flush=True)
    pools.close()
    Path(path).write_text(json.dumps(results, indent=1))
    errors = sum(any("error" in where for where in result) for result in results.values())
    print(f"{len(results)} cases, {errors} of them with an error, are in {path}")


def compare(old_path: str, new_path: str) -> int:
    """The number of cases that differ in a bit; each is shown with the first places where it does. Texts may be reworded."""
    old, new = (json.loads(Path(path).read_text()) for path in (old_path, new_path))
    different, reworded = 0, set[str]()
    for name in old | new:
        a, b = old.get(name, {}), new.get(name, {})
        places = [where for where in a | b if a.get(where) != b.get(where)]
        texts = {where for where in places if where in a and where in b and ("warning" in where or "error" in where)}
        reworded |= {f"    old: {a[where]}\n    new: {b[where]}" for where in texts}
        if bits := [where for where in places if where not in texts]:
            different += 1
            print(f"{name}\n    {len(bits)} of {len(a | b)} differ: {', '.join(bits[:6])}")
            print(f"    old: {a.get(bits[0])}\n    new: {b.get(bits[0])}")
    print("\n".join(["messages that are worded differently:", *sorted(reworded)] if reworded else []))
    print(f"{len(old | new)} cases, {different} different")
    return different


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", path]:
            record(path)
        case ["compare", old_path, new_path]:
            sys.exit(compare(old_path, new_path) > 0)
        case _:
            sys.exit(__doc__)
