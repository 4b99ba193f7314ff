"""Tables and plots of the logs: docs/results.md, docs/images, the README's table, and every run in experiments/results/README.md.

    python -m experiments.report              # prints the sections of docs/results.md
    python -m experiments.report --write      # replaces what is between the markers of the pages, and draws the plots

A task without a log has no section. The best learning rate is, of those with the most seeds, the one with the best mean end. Means
and deviations are over all seeds at it. Milliseconds are those of the steps after the first look, of runs that had the device
alone: of these runs if there are any, or else the fastest of this optimizer in times.jsonl.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.report import column, table
from experiments import log
from experiments.log import Finished, Row
from lather import demo

ROOT = pathlib.Path(__file__).parent.parent
COLORS = {  # the same in all plots; variants such as `kl@10` have those of their optimizer
    **{"adamw": "#7a7a7a", "sgd": "#7a7a7a", "muon": "#d55e00", "shampoo": "#0072b2", "paper": "#009e73", "kl": "#cc79a7"},
    **{"soap": "#e69f00", "from_adamw": "#56b4e9", "lather-muon": "#000000"},
}
LINES = 6  # in a plot, at most


class Measure(NamedTuple):
    score: str  # in the log; the lower, the better
    shown: Callable[[float], float]
    decimals: int
    word: str


BITS = Measure("bits", float, 3, "bits per byte")
NATS = Measure("valid_loss", float, 3, "validation loss")
ACCURACY = Measure("valid_error", lambda error: 100 * (1 - error), 2, "accuracy %")
MEASURES = {"wikitext": BITS, "ablations": BITS, "text": BITS, "nanogpt": NATS, "vit": ACCURACY, "resnet": ACCURACY}
MEASURES |= {f"ideas-{task}": MEASURES[task] for task in ("wikitext", "vit", "text")}


class Section(NamedTuple):
    task: str  # and the name of its log
    title: str
    about: str
    rows: tuple[str, ...]  # optimizers, in this order, as far as the log has them
    rival: str  # whose end the others are to reach
    lengths: tuple[int, ...] = ()  # all if there are none

    @property
    def image(self) -> str:
        return "-".join([self.task, *map(str, self.lengths[:1])])

    @property
    def measure(self) -> Measure:
        return MEASURES[self.task]


TRANSFORMERS = ("adamw", "muon", "soap", "kl", "paper", "shampoo", "shampoo@1", "from_adamw")
CIFAR = "CIFAR-10 from a copy that was compressed with loss, so accuracies cannot be compared with those of others."
SECTIONS = (
    Section(
        "text",
        "Text at GPT-2's size",
        "A byte-level transformer (12 layers, width 768) on C and C++ headers, in batches of 32 x 1024. Each byte is seen once.",
        TRANSFORMERS,
        "muon",
    ),
    Section(
        "wikitext",
        "WikiText-2, 330 steps",
        "A byte-level transformer of 10.9M parameters. 330 steps see as many bytes as the text has.",
        TRANSFORMERS,
        "muon",
        (330,),
    ),
    Section(
        "wikitext",
        "WikiText-2, 1500 steps",
        "The same model. 1500 steps see the text four and a half times.",
        TRANSFORMERS,
        "muon",
        (1500, 900, 825),
    ),
    Section("vit", "Vision transformer", f"4.8M parameters, 30 epochs. {CIFAR}", TRANSFORMERS, "muon"),
    Section("resnet", "ResNet-18", f"30 epochs, and 20. {CIFAR}", ("sgd", "shampoo", "shampoo@1"), "sgd"),
)


# Choosing.


class Group(NamedTuple):
    """The seeds of an optimizer at one learning rate and length."""

    optimizer: str
    length: int
    lr: float
    runs: list[Finished]  # those that did not diverge
    seeds: str  # how many that are

    def steps(self) -> list[int]:
        """The steps of the seed with the fewest looks."""
        return min(([look["step"] for look in finished.looks] for finished in self.runs), key=len)

    def values(self, name: str) -> Tensor:
        """[seeds, steps]"""
        rows = [[value_at(step, finished.looks, name) for step in self.steps()] for finished in self.runs]
        return torch.tensor(rows, dtype=torch.float64)

    def end(self, measure: Measure) -> str:
        return demo.spread(map(measure.shown, self.values(measure.score)[:, -1].tolist()), measure.decimals)

    def mean_end(self, measure: Measure) -> float:
        return float(self.values(measure.score)[:, -1].mean())

    def ms(self) -> float | None:
        alone = [finished.end["ms"] for finished in self.runs if not finished.end.get("shared")]
        return statistics.fmean(alone) if alone else None

    def first(self, measure: Measure, target: float) -> int | None:
        """The first step at which the mean is as low as that."""
        looks = zip(self.steps(), self.values(measure.score).mean(0).tolist(), strict=True)
        return next((step for step, value in looks if value <= target), None)


def value_at(step: int, looks: Sequence[Row], name: str) -> float:
    """A value of a run at a step, on the line between two looks.

    >>> value_at(5, [{"step": 4, "bits": 3.0}, {"step": 8, "bits": 1.0}], "bits")
    2.5
    """
    before = max((look for look in looks if look["step"] <= step), key=lambda look: look["step"], default=looks[0])
    after = min((look for look in looks if look["step"] >= step), key=lambda look: look["step"], default=looks[-1])
    part = (step - before["step"]) / max(1, after["step"] - before["step"])
    return float(before[name] + min(1.0, max(0.0, part)) * (after[name] - before[name]))


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def group(optimizer: str, length: int, lr: float, runs: Sequence[Finished]) -> Group:
    same = [f for f in runs if (f.run.optimizer, f.run.length, f.run.lr) == (optimizer, length, lr)]
    sound = [f for f in same if not f.diverged]
    return Group(optimizer, length, lr, sound, f"{len(sound)}" + f" of {len(same)}" * (len(sound) < len(same)))


def best(section: Section, runs: Sequence[Finished]) -> list[Group]:
    """The optimizers of a section, each length of them at its best learning rate, the longest first. ``kl@10`` has the defaults
    of an earlier day, and stands in where there are no runs of ``kl``."""
    groups = list[Group]()
    for optimizer in section.rows:
        later = {g.length for g in groups if f"{g.optimizer}@10" == optimizer}
        own = [f for f in runs if f.run.optimizer == optimizer and f.run.length not in later]
        for length in sorted({f.run.length for f in own} & set(section.lengths or (f.run.length for f in own)), reverse=True):
            lr = log.best_rate([f for f in own if f.run.length == length], section.measure.score)
            if lr is not None:
                groups.append(group(optimizer, length, lr, runs))
    return groups


def rival(section: Section, groups: Sequence[Group]) -> Group | None:
    """The longest runs of the optimizer whose end the others are to reach."""
    return max((g for g in groups if g.optimizer == section.rival), key=lambda g: g.length, default=None)


def timed(path: pathlib.Path) -> list[Finished]:
    """The runs of a log. Where all seeds shared the device, with the time of the fastest run in times.jsonl that did not."""
    alone = [f for f in log.attempts(path.with_name("times.jsonl")) if not f.end.get("shared")]
    slowest_first = sorted(alone, key=lambda f: -f.end["ms"])
    times = {(f.run.task, f.run.optimizer): {"ms": f.end["ms"], "shared": False} for f in slowest_first}
    runs = log.read(path)
    known = {f.run._replace(seed=0) for f in runs if not f.end.get("shared")}
    return [
        f if f.run._replace(seed=0) in known else f._replace(end=f.end | times.get((f.run.task, f.run.optimizer), {})) for f in runs
    ]


# One section for each task.


def title(one: Group, groups: Sequence[Group]) -> str:
    """The optimizer's name, with the length if it is not the longest."""
    shorter = one.length < max(g.length for g in groups)
    return f"{one.optimizer}, {one.length} {one.runs[0].run.unit}" if shorter else one.optimizer


def reach(one: Group, measure: Measure, other: Group | None) -> str:
    """After how many steps or epochs the other's end was reached, and which part of the other's steps that is."""
    step = None if other is None else one.first(measure, other.mean_end(measure))
    if other is None or step is None:
        return "-"
    units = step * one.length / one.steps()[-1]
    return f"{units:.0f} ({step / other.steps()[-1]:.0%})"


def section_table(section: Section, groups: Sequence[Group]) -> str:
    other, measure, unit = rival(section, groups), section.measure, groups[0].runs[0].run.unit
    columns = [
        column("optimizer", "optimizer"),
        column("best lr", "lr", "g"),
        column(measure.word, "end"),
        column("seeds", "seeds"),
        column(f"{unit} to {section.rival}'s end", "reach"),
        column("ms per step", "ms", ".1f"),
    ]
    rows = [
        {"optimizer": title(g, groups), "lr": g.lr, "end": g.end(measure), "seeds": g.seeds}
        | {"reach": reach(g, measure, other), "ms": g.ms()}
        for g in groups
    ]
    return table(columns, rows)


def plot(section: Section, groups: Sequence[Group], path: pathlib.Path) -> None:
    """Over steps or epochs, and over seconds; at most six lines, broken ones for shorter runs, dotted ones for variants."""
    from matplotlib.figure import Figure  # without pyplot: no global state

    measure, longest = section.measure, max(g.length for g in groups)
    chosen = sorted(groups, key=lambda g: ("@" in g.optimizer, g.length < longest))[:LINES]
    fig = Figure(figsize=(11, 4), dpi=150, layout="constrained")
    panels = fig.subplots(1, 2 if any(g.ms() is not None for g in chosen) else 1, sharey=True, squeeze=False)[0]
    curves = []
    for one in chosen:
        name, at, _ = one.optimizer.partition("@")
        style = ":" if at else "-" if one.length == longest else "--"
        line = {"color": COLORS.get(name, "#444444"), "linestyle": style, "label": title(one, groups)}
        values = one.values(measure.score).apply_(measure.shown)
        curves.append(values.mean(0).tolist())
        last, ms = one.steps()[-1], one.ms()
        demo.band(panels[0], [step * one.length / last for step in one.steps()], values, **line)
        if ms is not None:
            demo.band(panels[1], [step * ms / 1e3 for step in one.steps()], values, **line)
    ends, thirds = [curve[-1] for curve in curves], [curve[len(curve) // 3] for curve in curves]
    low, high = min(ends + thirds), max(ends + thirds)
    margin = 0.02 * (high - low) or 0.01
    for axes, label in zip(panels, (chosen[0].runs[0].run.unit, "seconds of training steps"), strict=False):
        demo.tidy(axes, label)
        if (other := rival(section, groups)) is not None:
            axes.axhline(measure.shown(other.mean_end(measure)), color="black", linewidth=0.8, linestyle=":")
    panels[0].set(ylabel=f"validation {measure.word.removeprefix('validation ')}", ylim=(low - margin, high + margin))
    fig.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside right center")
    fig.savefig(path)


def sections(results: pathlib.Path) -> dict[Section, list[Group]]:
    """Those that have runs."""
    found = {section: best(section, timed(results / f"{section.task}.jsonl")) for section in SECTIONS}
    return {section: groups for section, groups in found.items() if groups}


def tables(results: pathlib.Path) -> str:
    """What docs/results.md has of the logs."""
    parts = [""]
    for section, groups in sections(results).items():
        measure, other = section.measure, rival(section, groups)
        parts += [f"## {section.title}", section.about, section_table(section, groups)]
        if other is not None:
            parts.append(f"`{section.rival}`'s end is {measure.shown(other.mean_end(measure)):.{measure.decimals}f}.")
        parts.append(
            f"![{measure.word} over {other.runs[0].run.unit if other else 'steps'} and seconds](images/{section.image}.png)"
        )
    return "\n\n".join([*parts, ""])


def summary(results: pathlib.Path) -> str:
    """The README's table: the baseline, Muon and lather's defaults on every task that they were run on."""
    rows = []
    for section, groups in sections(results).items():
        longest = {g.optimizer: g for g in sorted(groups, key=lambda g: g.length)}
        if "shampoo" not in longest:
            continue
        row: Row = {name: one.end(section.measure) for name, one in longest.items()}
        row |= {"task": f"{section.title}: {section.measure.word}", "base": row.get("adamw", row.get("sgd"))}
        found, unit = reach(longest["shampoo"], section.measure, rival(section, groups)), groups[0].runs[0].run.unit
        row["reach"] = found.replace(" (", f" {unit} (")
        rows.append(row)
    last = "reaches Muon's final score (ResNet-18: SGD's) after"
    heads = {"task": "task", "base": "AdamW or SGD", "muon": "Muon", "shampoo": "lather", "reach": last}
    return f"\n{table([(head, blank(key)) for key, head in heads.items()], rows)}\n"


def blank(key: str) -> Callable[[Row], str]:
    return lambda row: row.get(key) or ""


# Every run, beside the logs.


def made(runs: Sequence[Finished]) -> str:
    """Where, when and with what runs were made."""
    dates = sorted({f.end["date"] for f in runs})
    parts = [
        f"{len(runs)} runs",
        ", ".join(unique(f.end["device"] for f in runs)),
        "torch " + ", ".join(unique(f.end["versions"]["torch"] for f in runs)),
        "builds " + ", ".join(unique(str(f.end["commit"]) for f in runs)),
        " to ".join(unique([dates[0], dates[-1]])),
    ]
    return f"{'; '.join(parts)}."


def ends(measure: Measure, runs: Sequence[Finished]) -> str:
    """The mean end at every learning rate and the number of seeds; the best is bold."""
    chosen, cells = log.best_rate(list(runs), measure.score), []
    for lr in sorted({f.run.lr for f in runs}):
        one = group(runs[0].run.optimizer, runs[0].run.length, lr, runs)
        text = f"{one.end(measure)} ({one.seeds})" if one.runs else "diverged"
        cells.append(f"{lr:g}: " + (f"**{text}**" if lr == chosen else text))
    return ", ".join(cells)


def runs_table(path: pathlib.Path) -> str:
    rows = []
    for (task, optimizer, length), found in by_optimizer(timed(path)):
        options = " or ".join(unique(json.dumps(f.end["options"]) for f in found))
        times = [f.end["ms"] for f in found if not f.end.get("shared")]
        row = {"task": task, "optimizer": optimizer, "length": f"{length} {found[0].run.unit}", "options": f"`{options}`"}
        rows.append(row | {"ends": ends(MEASURES[task], found), "ms": min(times, default=None)})
    heads = {
        "task": "task",
        "optimizer": "optimizer",
        "length": "length",
        "options": "options",
        "ends": "end by learning rate (seeds)",
    }
    return table([*(column(head, key) for key, head in heads.items()), column("ms alone", "ms", ".1f")], rows)


def by_optimizer(runs: Sequence[Finished]) -> list[tuple[tuple[str, str, int], list[Finished]]]:
    def key(f: Finished) -> tuple[str, str, int]:
        return f.run.task, f.run.optimizer, f.run.length

    order = unique(map(key, runs))
    return [(k, list(found)) for k, found in groupby(sorted(runs, key=lambda f: order.index(key(f))), key)]


def every_run(results: pathlib.Path) -> str:
    parts = [""]
    for path in sorted(results.glob("*.jsonl")):
        if runs := log.read(path):
            failed = log.failed(path)
            notes = [f"Failed and not repeated since: {', '.join(failed)}."] if failed else []
            parts += [f"### {path.name}", made(runs), runs_table(path), *notes]
    return "\n\n".join([*parts, ""])


# The pages.


def filled(page: str, name: str, text: str) -> str:
    """The page with a text between its markers of that name."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(start)
    _, also, after = rest.partition(end)
    if not (found and also):
        raise ValueError(f"the page has no place for {name}: {start} and {end}")
    return before + start + text + end + after


def pages(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Those that are made from the logs, as they should be. The README has a table where it has markers for one."""
    results, readme = root / "experiments" / "results", root / "README.md"
    made = {
        root / "docs" / "results.md": ("tables", tables(results)),
        results / "README.md": ("runs", every_run(results)),
        readme: ("results", summary(results)),
    }
    if "<!-- results -->" not in readme.read_text():
        made.pop(readme)
    return {path: filled(path.read_text(), *part) for path, part in made.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="folder of docs and experiments")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    results, images = args.root / "experiments" / "results", args.root / "docs" / "images"
    if not args.write:
        print(tables(results))
        return 0
    for path, text in pages(args.root).items():
        path.write_text(text)
    images.mkdir(exist_ok=True)
    for section, groups in sections(results).items():
        plot(section, groups, images / f"{section.image}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
