"""Train one small network on scikit-learn's digits with lather, AdamW and SGD at the same budget; a table and a plot.

Everything except the optimizer is the same: images, initial weights, batches, number of steps, and the shape of the schedule.
Learning rates come from one grid, by the steps to a target on a validation split of the training images; test images are not used
for that. lather has AdamW's weight decay, and its own defaults otherwise.
"""

import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .monitor import Monitor
from .optimizer import Shampoo
from .report.plan import table
from .report.view import view

BATCH = 64
NUM_TRAIN, NUM_VALID = 1500, 300  # of 1797 images; validation is the end of the training images, test is the rest
LOOK_EVERY = 5  # steps between two looks at loss and accuracy
TARGET_LOSS, TARGET_ACCURACY = 0.05, 0.97
GRID = tuple(0.0005 * 2**k for k in range(11))
SWEEP_SEED = 1000  # added to the seed, so that the sweep has other initial weights and batches

OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "lather": lambda model, lr: Shampoo(model, lr=lr, weight_decay=0.01),
    "AdamW": lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01),
    "SGD": lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
}
LEARNING_RATES = {"lather": 0.016, "AdamW": 0.016, "SGD": 0.064}  # the best of `python -m lather demo --sweep`
COLORS = {"lather": "#0072b2", "AdamW": "#d55e00", "SGD": "#7a7a7a"}


class MissingExtra(Exception):
    """A package that only the demo needs is not installed."""


class Split(NamedTuple):
    images: Tensor  # [n, 1, 8, 8]
    labels: Tensor  # [n]


class Job(NamedTuple):
    optimizer: str
    lr: float
    seed: int
    epochs: int
    log: Path | None = None  # where a monitor writes


class Look(NamedTuple):
    step: int
    loss: float  # on all training images
    held_accuracy: float  # on the held-out images


class Run(NamedTuple):
    looks: list[Look]
    step_ms: float  # forward, backward and optimizer; looks not counted
    state_bytes: int

    def first(self, reached: Callable[[Look], bool]) -> int | None:
        return next((look.step for look in self.looks if reached(look)), None)


class Column(NamedTuple):
    title: str
    decimals: int
    value: Callable[[Run], float | None]


TO_ACCURACY = Column(
    f"steps to {TARGET_ACCURACY:.0%}", 0, lambda run: run.first(lambda look: look.held_accuracy >= TARGET_ACCURACY)
)
COLUMNS = (
    Column("train loss", 5, lambda run: run.looks[-1].loss),
    Column("test accuracy %", 2, lambda run: 100 * run.looks[-1].held_accuracy),
    Column(f"steps to loss {TARGET_LOSS:g}", 0, lambda run: run.first(lambda look: look.loss <= TARGET_LOSS)),
    TO_ACCURACY,
    Column("ms per step", 2, lambda run: run.step_ms),
    Column("state MiB", 2, lambda run: run.state_bytes / 2**20),
)


def demo(seed: int, epochs: int, repeats: int, out: Path, monitor: bool = False) -> str:
    """Train with each optimizer ``repeats`` times, write ``out/demo.png`` and return the table.

    ``monitor``: also write ``out/run.html``, a page about lather's first run, which takes longer for it.
    """
    require("sklearn.datasets", "matplotlib.figure")
    out.mkdir(parents=True, exist_ok=True)
    training, test = load_digits()
    runs, rows = {}, [["optimizer", "lr", *(column.title for column in COLUMNS)]]
    for name, lr in LEARNING_RATES.items():
        logs = [out / "run.jsonl" if monitor and name == "lather" and i == 0 else None for i in range(repeats)]
        jobs = [Job(name, lr, seed + i, epochs, log) for i, log in enumerate(logs)]
        runs[name] = train_all(jobs, training, test)
        rows.append([name, f"{lr:g}", *(spread(map(column.value, runs[name]), column.decimals) for column in COLUMNS)])
    plot(runs, out / "demo.png")
    size = f"{NUM_TRAIN} training and {len(test.labels)} test images, {epochs} epochs, looked at every {LOOK_EVERY} steps"
    mean = f"; mean ± standard deviation over {repeats} seeds" if repeats > 1 else ""
    lines = [*table(rows, align=">"), "", size + mean, f"plot: {out / 'demo.png'}"]
    return "\n".join([*lines, f"lather's first run: {view(out / 'run.jsonl')}"] if monitor else lines)


def sweep(seed: int, epochs: int, repeats: int) -> str:
    """Steps of each optimizer to the target on validation images, at each learning rate; the fewest of a column are starred."""
    require("sklearn.datasets")
    training, validation = split_validation(load_digits()[0])
    columns = [["lr", *(f"{lr:g}" for lr in GRID)]]
    for name in OPTIMIZERS:
        jobs = [Job(name, lr, seed + SWEEP_SEED + i, epochs) for lr in GRID for i in range(repeats)]
        steps = [TO_ACCURACY.value(run) or math.inf for run in train_all(jobs, training, validation)]
        means = [statistics.fmean(steps[i : i + repeats]) for i in range(0, len(steps), repeats)]
        columns.append([f"{name}  ", *(f"{x:.1f} " + " *"[x == min(means) < math.inf] for x in means)])
    title = f"{TO_ACCURACY.title} of validation images within {epochs} epochs, mean over {repeats} seeds (* fewest)"
    return "\n".join([title, "", *table(list(zip(*columns, strict=True)), align=">")])


def require(*modules: str) -> None:
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"the demo needs scikit-learn and matplotlib ({error}); run: pip install scikit-learn matplotlib"
        ) from error


def load_digits() -> tuple[Split, Split]:
    """Training and test images, standardised. The split is the same for every seed: no sweep ever sees a test image."""
    from sklearn import datasets

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order].unsqueeze(1)
    images = (images - images[:NUM_TRAIN].mean()) / images[:NUM_TRAIN].std()
    labels = torch.from_numpy(digits.target).long()[order]
    return Split(images[:NUM_TRAIN], labels[:NUM_TRAIN]), Split(images[NUM_TRAIN:], labels[NUM_TRAIN:])


def split_validation(data: Split) -> tuple[Split, Split]:
    return Split(*(x[:-NUM_VALID] for x in data)), Split(*(x[-NUM_VALID:] for x in data))


def make_model(seed: int) -> nn.Module:
    """38,282 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convs = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()
        return nn.Sequential(*convs, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def train_all(jobs: Sequence[Job], training: Split, held_out: Split) -> list[Run]:
    """On one thread, because the order of a sum, and with it the result, depends on the number of threads."""
    tick = progress(jobs[0].optimizer, sum(num_steps(job, training) for job in jobs))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [train(job, training, held_out, tick) for job in jobs]
    finally:
        torch.set_num_threads(threads)


def train(job: Job, training: Split, held_out: Split, tick: Callable[[], None]) -> Run:
    model, total = make_model(job.seed), num_steps(job, training)
    optimizer = OPTIMIZERS[job.optimizer](model, job.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total))
    monitor = Monitor(optimizer, LOOK_EVERY, to=job.log, by="parameter") if job.log else None
    looks, seconds = [], 0.0
    for step, batch in enumerate(batches(job, len(training.labels)), start=1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(training.images[batch]), training.labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        if monitor:
            monitor.note(loss=loss)
        optimizer.step()
        seconds += time.perf_counter() - begin
        schedule.step()
        if step % LOOK_EVERY == 0 or step == total:
            looks.append(Look(step, evaluate(model, training)[0], evaluate(model, held_out)[1]))
        tick()
    state = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
    return Run(looks, 1e3 * seconds / total, sum(x.nbytes for x in state))


def num_steps(job: Job, training: Split) -> int:
    return job.epochs * (len(training.labels) // BATCH)


def batches(job: Job, num_images: int) -> Iterator[Tensor]:
    """Indices of full batches. The images that are left over sit out the epoch."""
    generator = torch.Generator().manual_seed(job.seed)
    for _ in range(job.epochs):
        order = torch.randperm(num_images, generator=generator)
        yield from order[: num_images // BATCH * BATCH].view(-1, BATCH).unbind()


def lr_factor(step: int, total: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine to zero.

    >>> [round(lr_factor(step, 100), 2) for step in (0, 4, 9, 55, 100)]
    [0.1, 0.5, 1.0, 0.5, 0.0]
    """
    warm = max(1, total // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, total - warm))


@torch.no_grad()
def evaluate(model: nn.Module, data: Split) -> tuple[float, float]:
    """Loss and accuracy."""
    logits = model(data.images)
    return cross_entropy(logits, data.labels).item(), (logits.argmax(1) == data.labels).float().mean().item()


def progress(name: str, total: int) -> Callable[[], None]:
    """A function to call after every step. It prints a bar on a terminal, elsewhere one line at the end."""
    done, begin, live = 0, time.perf_counter(), sys.stderr.isatty()

    def tick() -> None:
        nonlocal done
        done += 1
        percent = done * 100 // total
        if live and percent != (done - 1) * 100 // total:
            print(f"\r{name:<8}[{'#' * (done * 40 // total):<40}] {percent:3d}% ", end="", file=sys.stderr, flush=True)
        if done == total:
            print(f"{'' if live else f'{name:<8}'}{done} steps in {time.perf_counter() - begin:.1f} s", file=sys.stderr)

    return tick


def spread(values: Iterable[float | None], decimals: int) -> str:
    """Mean and standard deviation; a dash if a value is missing.

    >>> spread([1.0, 2.0, 3.0], 1), spread([2.0], 1), spread([1.0, None], 1)
    ('2.0 ± 1.0', '2.0', '-')
    """
    found = list(values)
    numbers = [x for x in found if x is not None]
    if len(numbers) < len(found):
        return "-"
    mean = f"{statistics.fmean(numbers):.{decimals}f}"
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{mean} ± {deviation:.{decimals}f}" if deviation else mean


def plot(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Training loss and test accuracy by step: means, with the range over the runs shaded."""
    from matplotlib.figure import Figure  # without pyplot: no global state, and the Agg canvas

    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for name, repeats in runs.items():
        looks = torch.tensor([[(look.loss, 100 * look.held_accuracy) for look in run.looks] for run in repeats])
        for axes, values in zip((loss, accuracy), looks.unbind(-1), strict=True):
            label = f"{name}, lr {LEARNING_RATES[name]:g}"
            band(axes, [look.step for look in repeats[0].looks], values, color=COLORS[name], label=label)
    loss.set(title="Training loss", yscale="log", ylabel="cross entropy, all training images")
    accuracy.set(title="Test accuracy", ylabel="% of test images")
    lowest = min(run.looks[-1].held_accuracy for repeats in runs.values() for run in repeats)
    accuracy.set_ylim(min(90.0, 100 * lowest - 5), 100)
    for axes in (loss, accuracy):
        tidy(axes, "step")
    accuracy.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def band(axes: Any, x: Sequence[float], values: Tensor, color: str, **line: Any) -> None:
    """The mean over the rows of ``values``, with their range shaded."""
    axes.fill_between(x, values.amin(0), values.amax(0), color=color, alpha=0.15, linewidth=0)
    axes.plot(x, values.mean(0), color=color, linewidth=1.8, **line)


def tidy(axes: Any, xlabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
