"""Tables and plots of the logs, into docs/results.md and docs/images.

    python -m experiments.report              # prints the tables
    python -m experiments.report --write      # replaces those of the page, between its markers, and draws the plots

The page has a pair of markers for every experiment; what has no log yet has nothing between them. The best learning rate is, of
those with the most seeds, that with the lowest mean end; means and deviations are over all seeds at it, and curves are means.
Seconds are steps times the mean of the steps after the first look, so that no one's compilation counts; where all runs shared the
device, of a short run in times.jsonl.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.report import Column, column, table
from experiments import ablations, log
from experiments.log import Finished, Row
from lather import demo

DOCS = pathlib.Path(__file__).parent.parent / "docs"
COLORS = ("#7a7a7a", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#0072b2", "#004466", "#8c6d31", "#5e3c99")


class Group(NamedTuple):
    """The seeds of an optimizer at one learning rate and length."""

    optimizer: str
    length: int
    lr: float
    runs: list[Finished]  # those that did not diverge
    seeds: str  # how many that are

    def steps(self) -> list[int]:
        """Those at which all seeds were looked at."""
        common = set.intersection(*({look["step"] for look in finished.looks} for finished in self.runs))
        return sorted(common)

    def values(self, name: str) -> Tensor:
        """[seeds, looks]"""
        steps = set(self.steps())
        rows = [[look[name] for look in finished.looks if look["step"] in steps] for finished in self.runs]
        return torch.tensor(rows, dtype=torch.float64)

    def curve(self, name: str) -> list[float]:
        return self.values(name).mean(0).tolist()

    def last(self, name: str) -> list[float]:
        return self.values(name)[:, -1].tolist()

    def train_loss(self) -> float:
        """The mean over the last sixth of the steps, or the last look if that is more. Looks have means since the one before."""
        means = []
        for finished in self.runs:
            last, parts = finished.looks[-1]["step"], list[tuple[int, float]]()
            for before, look in pairwise([{"step": 0}, *finished.looks]):
                if 6 * before["step"] >= 5 * last or look["step"] == last:
                    parts.append((look["step"] - before["step"], look["train_loss"]))
            means.append(sum(steps * loss for steps, loss in parts) / sum(steps for steps, _ in parts))
        return statistics.fmean(means)

    def end(self, name: str) -> float | None:
        """The mean of something that is measured once in a run. Times are of runs that had the device for themselves."""
        runs = [f for f in self.runs if name != "ms" or not f.end.get("shared")]
        known = [finished.end[name] for finished in runs if finished.end[name] is not None]
        return statistics.fmean(known) if known else None

    def first(self, name: str, target: float) -> int | None:
        """The first step at which the mean is as low as that."""
        looks = zip(self.steps(), self.curve(name), strict=True)
        return next((step for step, value in looks if value <= target), None)


class Kind(NamedTuple):
    """How the runs of an experiment are shown."""

    score: str  # the lower, the better
    shown: Callable[[float], float]
    decimals: int
    word: str
    reference: str  # whose end the others are to reach


BITS = Kind("bits", float, 3, "bits per byte", "adamw")
KINDS = {
    "wikitext": BITS,
    "resnet": Kind("valid_error", lambda error: 100 * (1 - error), 2, "validation accuracy %", "sgd"),
    "vit": Kind("valid_error", lambda error: 100 * (1 - error), 2, "validation accuracy %", "adamw"),
    "ablations": BITS,
}


# Choosing.


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def best(runs: Sequence[Finished], score: str) -> list[Group]:
    """Each optimizer and length at its best learning rate."""
    groups = []
    for optimizer, length in ordered(runs):
        same = [f for f in runs if (f.run.optimizer, f.run.length) == (optimizer, length)]
        lr = log.best_rate(same, score)
        if lr is not None:
            seeds = [f for f in same if f.run.lr == lr]
            sound = [f for f in seeds if not f.diverged]
            number = f"{len(sound)}" + f" of {len(seeds)}" * (len(sound) < len(seeds))
            groups.append(Group(optimizer, length, lr, sound, number))
    return groups


def reference(groups: Sequence[Group], kind: Kind) -> Group | None:
    """The longest runs of the optimizer whose end the others are to reach."""
    same = [group for group in groups if group.optimizer == kind.reference]
    return max(same, key=lambda group: group.length, default=None)


def target(groups: Sequence[Group], kind: Kind) -> float | None:
    """Where the reference ended."""
    group = reference(groups, kind)
    return None if group is None else group.curve(kind.score)[-1]


def ordered(runs: Sequence[Finished]) -> list[tuple[str, int]]:
    """Optimizers in the order of the log, and of each its lengths, the longest first."""
    pairs = {(f.run.optimizer, f.run.length) for f in runs}
    names = unique(f.run.optimizer for f in runs)
    return sorted(pairs, key=lambda pair: (names.index(pair[0]), -pair[1]))


def title(optimizer: str, length: int, runs: Sequence[Finished]) -> str:
    """The optimizer's name, with the length if there are several."""
    lengths = unique(f.run.length for f in runs)
    return optimizer if len(lengths) == 1 else f"{optimizer}, {length} {runs[0].run.unit}"


# Tables.


def made(name: str, runs: Sequence[Finished]) -> str:
    """Where, when and with what the runs were made."""
    parts = [
        ", ".join(unique(f.end["device"] for f in runs)),
        "torch " + ", ".join(unique(f.end["versions"]["torch"] for f in runs)),
        " to ".join(unique([min(f.end["date"] for f in runs), max(f.end["date"] for f in runs)])),
    ]
    return f"{'; '.join(parts)}. {len(runs)} runs ([log](../experiments/results/{name}.jsonl))."


def rates_table(runs: Sequence[Finished], kind: Kind) -> str:
    """The end of the first seed at every learning rate, the best of a row in bold."""
    rates, rows = sorted(unique(f.run.lr for f in runs)), []
    for optimizer, length in ordered(runs):
        same = [f for f in runs if (f.run.optimizer, f.run.length) == (optimizer, length)]
        lr, seed = log.best_rate(same, kind.score), min(f.run.seed for f in same)
        row: Row = {"optimizer": title(optimizer, length, runs)}
        for f in same:
            if f.run.seed == seed:
                text = "diverged" if f.diverged else f"{kind.shown(f.looks[-1][kind.score]):.{kind.decimals}f}"
                row[f"{f.run.lr:g}"] = f"**{text}**" if f.run.lr == lr else text
        rows.append(row)
    columns = [column("optimizer", "optimizer"), *((f"{lr:g}", blank(f"{lr:g}")) for lr in rates)]
    return table(columns, rows)


def blank(key: str) -> Callable[[Row], str]:
    return lambda row: row.get(key, "")


COSTS = [
    column("ms per step", "ms", ".1f"),
    column("seconds", "seconds", ".1f"),
    column("state MiB", "state_mib", ".0f"),
    column("peak in steps MiB", "step_peak_mib", ".0f"),
    column("peak MiB", "peak_mib", ".0f"),
]


def costs(group: Group) -> Row:
    row = {name: group.end(name) for name in ("ms", "state_mib", "step_peak_mib", "peak_mib")}
    return row | {"seconds": None if row["ms"] is None else row["ms"] * group.steps()[-1] / 1e3}


def best_row(group: Group, kind: Kind, runs: Sequence[Finished]) -> Row:
    row: Row = {"optimizer": title(group.optimizer, group.length, runs), "lr": group.lr, "seeds": group.seeds}
    row["end"] = demo.spread(map(kind.shown, group.last(kind.score)), kind.decimals)
    return row | costs(group)


def race(group: Group, kind: Kind, other: Group | None) -> Row:
    """When the other's end was reached, in steps and seconds, and which part of all of the other's that is."""
    step = None if other is None else group.first(kind.score, other.curve(kind.score)[-1])
    if other is None or step is None:
        return {}
    row = {"reached": f"{step} ({step / other.steps()[-1]:.0%})", "reached_seconds": "n/a"}
    ms, all_seconds = group.end("ms"), costs(other)["seconds"]
    if ms is not None and all_seconds is not None:
        row["reached_seconds"] = f"{step * ms / 1e3:.1f} ({step * ms / 1e3 / all_seconds:.0%})"
    return row


def best_table(groups: Sequence[Group], kind: Kind, runs: Sequence[Finished], middle: Sequence[Column] = ()) -> str:
    other = reference(groups, kind)
    name = f"{kind.reference}'s end"
    columns = [
        column("optimizer", "optimizer"),
        column("lr", "lr", "g"),
        column("seeds", "seeds"),
        *middle,
        column(kind.word, "end"),
        (f"steps to {name}", lambda row: row.get("reached", "-")),
        (f"seconds to {name}", lambda row: row.get("reached_seconds", "-")),
        *COSTS,
    ]
    return table(columns, [best_row(g, kind, runs) | race(g, kind, other) | {"group": g} for g in groups])


def reaching(groups: Sequence[Group], kind: Kind, runs: Sequence[Finished]) -> list[str]:
    """What the columns of the race mean."""
    if (other := reference(groups, kind)) is None:
        return []
    end = f"{kind.shown(other.curve(kind.score)[-1]):.{kind.decimals}f}"
    return [
        f"`{other.optimizer}`'s end is {end}, that of its {other.length} {runs[0].run.unit}. Steps and seconds to it are those of "
        "the first look at which the mean is as good, with their part of all its steps and seconds; a dash: not reached."
    ]


def edges(runs: Sequence[Finished], kind: Kind) -> list[str]:
    """Who should be given other learning rates."""
    edge, once = list[str](), list[str]()
    for optimizer, length in ordered(runs):
        same = [f for f in runs if (f.run.optimizer, f.run.length) == (optimizer, length)]
        if log.beyond(same, kind.score) is not None:
            tried = len({f.run.lr for f in log.first_seed(same)})
            (edge if tried > 1 else once).append(f"`{title(optimizer, length, runs)}`")
    notes = {"Best at the edge of its grid, so perhaps better beyond": edge, "Tried at one learning rate only": once}
    return [f"{note}: {'; '.join(found)}." for note, found in notes.items() if found]


def checkpoints(row: Row) -> str:
    """The mean score at six steps of equal distance."""
    curve = row["group"].curve("bits")
    return " ".join(f"{curve[len(curve) * k // 6 - 1]:.3f}" for k in range(1, 7))


def percent(name: str) -> Callable[[Row], str]:
    return lambda row: demo.spread((100 * (1 - x) for x in row["group"].last(name)), 2)


def gap(row: Row) -> str:
    """How much more of the training images is right than of the others, in percent."""
    ends = zip(row["group"].last("valid_error"), row["group"].last("train_error"), strict=True)
    return demo.spread((100 * (valid - train) for valid, train in ends), 2)


def losses(name: str) -> Callable[[Row], str]:
    return lambda row: demo.spread(row["group"].last(name), 4)


def bytes_section(name: str, runs: Sequence[Finished]) -> list[str]:
    kind, groups = KINDS[name], best(runs, KINDS[name].score)
    curve = ("at six steps of equal distance", checkpoints)
    return [
        "Validation bits per byte at the end, by learning rate:",
        rates_table(runs, kind),
        *edges(runs, kind),
        "At the best:",
        best_table(groups, kind, runs, [curve]),
        *reaching(groups, kind, runs),
        f"![bits per byte by step, and by second of those that had the device alone](images/{name}.png)",
    ]


def images_section(name: str, runs: Sequence[Finished]) -> list[str]:
    kind, groups = KINDS[name], best(runs, KINDS[name].score)
    middle = [
        ("training loss", losses("plain_train_loss")),
        ("validation loss", losses("valid_loss")),
        ("training accuracy %", percent("train_error")),
        ("gap", gap),
    ]
    return [
        "Validation accuracy in percent at the end, by learning rate:",
        rates_table(runs, kind),
        *edges(runs, kind),
        "At the best; training figures are of images without augmentation, and the gap is training less validation accuracy:",
        best_table(groups, kind, runs, middle),
        *reaching(groups, kind, runs),
        f"![training and validation by epoch](images/{name}.png)",
    ]


def over(group: Group, groups: Sequence[Group], kind: Kind) -> float | None:
    """The mean of how much more a variation has than the default with the same seed; one of `kinds=None`, than that alone."""
    base = "kinds=None" if group.optimizer.startswith("kinds=None,") else "default"
    same = [g for g in groups if (g.optimizer, g.length) == (base, group.length) and g is not group]
    ends = {f.run.seed: f.looks[-1][kind.score] for g in same for f in g.runs}
    more = [f.looks[-1][kind.score] - ends[f.run.seed] for f in group.runs if f.run.seed in ends]
    return statistics.fmean(more) if more else None


def ablations_section(name: str, runs: Sequence[Finished]) -> list[str]:
    kind, groups = KINDS[name], best(runs, KINDS[name].score)
    rows = [best_row(g, kind, runs) | {"train": g.train_loss(), "over": over(g, groups, kind)} for g in groups]
    columns = [
        column("variation", "optimizer"),
        column("lr", "lr", "g"),
        column("seeds", "seeds"),
        column("bits per byte", "end"),
        column("over its default", "over", "+.3f"),
        column("training loss", "train", ".3f"),
        *COSTS,
    ]
    ended = {(group.optimizer, group.length) for group in groups}
    diverged = unique(f.run.optimizer for f in runs if (f.run.optimizer, f.run.length) not in ended)
    notes = [f"Diverged at every learning rate: {', '.join(diverged)}."] if diverged else []
    return [table(columns, rows), *notes, f"![bits per byte of every variation](images/{name}.png)"]


# Plots.


def figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no global state

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def style(groups: Sequence[Group], group: Group) -> dict[str, Any]:
    """A colour for each optimizer; broken lines for shorter runs."""
    names = unique(group.optimizer for group in groups)
    color = COLORS[names.index(group.optimizer) % len(COLORS)]
    longest = max(group.length for group in groups)
    return {"color": color, "linestyle": "-" if group.length == longest else "--"}


def plot_bytes(name: str, runs: Sequence[Finished], path: pathlib.Path) -> None:
    groups = best(runs, "bits")
    fig = figure(13, 4.4)
    by_step, by_second = fig.subplots(1, 2)
    for group in groups:
        line = style(groups, group) | {"label": f"{title(group.optimizer, group.length, runs)}, lr {group.lr:g}"}
        demo.band(by_step, group.steps(), group.values("bits"), **line)
        if (ms := group.end("ms")) is not None:
            demo.band(by_second, [step * ms / 1e3 for step in group.steps()], group.values("bits"), **line)
    curves = [group.curve("bits") for group in groups]
    low, high = min(curve[-1] for curve in curves), max(curve[len(curve) // 3] for curve in curves)
    for axes, label in ((by_step, "step"), (by_second, "seconds of training steps")):
        demo.tidy(axes, label)
        axes.set(ylabel="validation bits per byte", ylim=(low - 0.02 * (high - low), high))
        if (goal := target(groups, KINDS[name])) is not None:
            axes.axhline(goal, color=COLORS[0], linewidth=0.8, linestyle=":")
    fig.legend(*by_step.get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside right center")
    fig.savefig(path)


def plot_images(name: str, runs: Sequence[Finished], path: pathlib.Path) -> None:
    groups = best(runs, "valid_error")
    fig = figure(17, 4.4)
    trained, held, accuracy = fig.subplots(1, 3)
    for group in groups:
        line = style(groups, group)
        label = f"{title(group.optimizer, group.length, runs)}, lr {group.lr:g}"
        epochs = [group.length * step / group.steps()[-1] for step in group.steps()]
        demo.band(trained, epochs, group.values("plain_train_loss"), **line)
        demo.band(held, epochs, group.values("valid_loss"), **line)
        demo.band(accuracy, epochs, 100 * (1 - group.values("valid_error")), **line, label=label)
    trained.set(ylabel="training loss, without augmentation", yscale="log")
    held.set(ylabel="validation loss", yscale="log")
    lows = [100 * (1 - group.curve("valid_error")[len(group.steps()) // 6]) for group in groups]
    accuracy.set(ylabel="validation accuracy %")
    accuracy.set_ylim(bottom=min(lows))
    if (goal := target(groups, KINDS[name])) is not None:
        accuracy.axhline(KINDS[name].shown(goal), color=COLORS[0], linewidth=0.8, linestyle=":")
    for axes in (trained, held, accuracy):
        demo.tidy(axes, "epoch")
    accuracy.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    fig.savefig(path)


def plot_ablations(name: str, runs: Sequence[Finished], path: pathlib.Path) -> None:
    """A dot for each seed of a variation, and a line where the default is; what is far worse is beyond the edge."""
    longest = max(f.run.length for f in runs)
    groups = best([f for f in runs if f.run.length == longest], "bits")[::-1]
    fig = figure(8, 1 + 0.2 * len(groups))
    axes = fig.subplots()
    for place, group in enumerate(groups):
        ends = group.last("bits")
        axes.plot(ends, [place] * len(ends), "o", color=COLORS[6], markersize=4)
        if group.optimizer == "default":
            axes.axvline(statistics.fmean(ends), color=COLORS[0], linewidth=1)
    axes.set_yticks(range(len(groups)), [group.optimizer for group in groups], fontsize="small")
    demo.tidy(axes, "validation bits per byte")
    ends = [statistics.fmean(group.last("bits")) for group in groups]
    low, middle = min(ends), statistics.median(ends)
    axes.set_xlim(low - 0.02, min(max(ends), middle + 0.1) + 0.02)
    fig.savefig(path)


SECTIONS: dict[str, tuple[Callable[..., list[str]], Callable[..., None]]] = {
    "wikitext": (bytes_section, plot_bytes),
    "resnet": (images_section, plot_images),
    "vit": (images_section, plot_images),
    "ablations": (ablations_section, plot_ablations),
}


# The page.


# Of ablations, by their names in the first experiment.
SAME = {
    "shampoo@10": "default",
    "shampoo@10 alike": "kinds=None",
    "shampoo@1": "precondition_frequency=1",
    "shampoo@50": "precondition_frequency=50",
    "kl@10": "preconditioner=kl",
}


def timed(path: pathlib.Path) -> list[Finished]:
    """The runs of a log. Where all seeds shared the device, with the time of the fastest of the short runs that did not, if
    times.jsonl has any."""
    alone = [f for f in log.attempts(path.with_name("times.jsonl")) if not f.end.get("shared")]
    fastest_last = sorted(alone, key=lambda f: -f.end["ms"])
    times = {(f.run.task, f.run.optimizer): {"ms": f.end["ms"], "shared": False} for f in fastest_last}
    runs = log.read(path)
    known = {f.run._replace(seed=0) for f in runs if not f.end.get("shared")}
    return [
        f if f.run._replace(seed=0) in known else f._replace(end=f.end | times.get((f.run.task, f.run.optimizer), {})) for f in runs
    ]


def compared(name: str, path: pathlib.Path) -> list[Finished]:
    """The runs of a log, and for ablations those that the first experiment has already: what they are compared with, and more."""
    runs = timed(path)
    if name != "ablations":
        return runs
    lengths, first = {f.run.length for f in runs}, timed(path.with_name("wikitext.jsonl"))
    same = [f for f in first if f.run.lr == ablations.LR and f.run.length in lengths and f.run.optimizer in SAME]
    same = [f._replace(run=f.run._replace(task=name, optimizer=SAME[f.run.optimizer])) for f in same]
    there = {f.run for f in same}
    return same + [f for f in runs if f.run not in there]


def section(name: str, path: pathlib.Path) -> str:
    """What stands between an experiment's markers."""
    runs, failed = compared(name, path), log.failed(path)
    notes = [f"Failed and not repeated since: {', '.join(failed)}."] if failed else []
    return "\n\n".join(["", made(name, log.read(path)), *SECTIONS[name][0](name, runs), *notes, ""]) if runs else "\n"


def filled(page: str, results: pathlib.Path) -> str:
    """The page with its sections as the logs have them now."""
    for name in SECTIONS:
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(start)
        _, also, after = rest.partition(end)
        if not (found and also):
            raise ValueError(f"the page has no place for {name}: {start} and {end}")
        page = before + start + section(name, results / f"{name}.jsonl") + end + after
    return page


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=log.RESULTS, help="folder of the logs")
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "results.md")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    if args.write:
        args.page.write_text(filled(args.page.read_text(), args.results))
        (args.page.parent / "images").mkdir(exist_ok=True)
    for name, (_, plot) in SECTIONS.items():
        runs = compared(name, args.results / f"{name}.jsonl")
        if runs and args.write:
            plot(name, runs, args.page.parent / "images" / f"{name}.png")
        elif runs:
            print(f"## {name}\n{section(name, args.results / f'{name}.jsonl')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
