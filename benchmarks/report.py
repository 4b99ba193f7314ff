"""Write the results of benchmarks as Markdown tables.

    python benchmarks/report.py bench_out/*.json [--out benchmarks/results]

One file for each JSON, of the same name. The benchmarks call this themselves and leave the table beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]  # its head, and the cell of a row


def column(head: str, key: str, form: str = "") -> Column:
    """The value under a key; n/a where there is none."""
    return head, lambda row: "n/a" if row.get(key) is None else format(row[key], form)


def ratio(head: str, over: str, under: str) -> Column:
    return head, lambda row: f"{row[over] / row[under]:.2f}"


MS = [column("mean ms", "mean_ms", ".2f"), column("median ms", "median_ms", ".2f"), column("worst ms", "worst_ms", ".2f")]
STEP = [
    column("model", "model"),
    column("optimizer", "optimizer"),
    *MS,
    column("plain ms", "plain_ms", ".2f"),
    ratio("worst / mean", "worst_ms", "mean_ms"),
    column("first refresh ms", "first_refresh_ms", ".0f"),
    column("kernels", "kernels"),
    column("state MiB", "state_mib", ".0f"),
    column("held MiB", "held_mib", ".0f"),
    column("peak MiB", "peak_mib", ".0f"),
    column("peak of all steps MiB", "peak_all_mib", ".0f"),
]
TRAIN = [
    column("model", "model"),
    column("optimizer", "optimizer"),
    column("frequency", "frequency"),
    *MS,
    column("free ms", "free_ms", ".2f"),
    column("overhead", "overhead_mean", "+.1%"),
    column("of the median", "overhead_median", "+.1%"),
    column("free", "overhead_free", "+.1%"),
    column("first refresh ms", "first_refresh_ms", ".0f"),
    column("state MiB", "state_mib", ".0f"),
    column("peak MiB", "peak_mib", ".0f"),
]
BYTES = [
    column("optimizer", "run"),
    column("lr", "lr", "g"),
    column("seed", "seed"),
    ("bits per byte", lambda row: " ".join(f"{x:.3f}" for x in row["bits_per_byte"])),
    column("wall s", "wall_s", ".1f"),
    column("state MiB", "state_mib", ".0f"),
]
RECORDED = [
    column("factors", "source"),
    column("every", "frequency"),
    column("beta2", "beta2"),
    column("number", "matrices"),
    column("d", "d"),
    column("exponent", "exponent"),
    column("solver", "solver"),
    column("error: median", "error_median", ".0e"),
    column("95%", "error_p95", ".0e"),
    column("worst", "error_worst", ".0e"),
    column("white: median", "white_median", ".0e"),
    column("worst", "white_worst", ".0e"),
    column("failed", "failed"),
    column("not finite", "nonfinite"),
    column("ms per matrix", "ms", ".3g"),
]


SCALE = [
    column("model", "model"),
    column("layout", "layout"),
    column("ranks", "ranks"),
    column("rank", "rank"),
    column("blocks", "own_blocks"),
    column("of all", "share", ".3%"),
    column("C(N)", "c_n", ".3f"),
    column("TFLOP", "work_tflop", ".3g"),
    column("over 1/N", "work_over", "+.1%"),
    ("mean ms", lambda row: f"{row['mean_ms']:.2f}" if row["fits"] else "does not fit"),
    column("1/N ms", "ideal_ms", ".2f"),
    column("plain ms", "plain_ms", ".2f"),
    column("host ms", "plain_host_ms", ".2f"),
    column("kernels ms", "kernels_ms", ".2f"),
    column("wire ms", "wire_ms", ".2f"),
]
SCALE_BYTES = [
    *SCALE[:3],
    column("weights GiB", "weights_gib", ".2f"),
    column("plan: state GiB", "plan_state_gib", ".2f"),
    column("buffers", "plan_buffers_gib", ".2f"),
    column("scratch", "plan_scratch_gib", ".2f"),
    column("together", "plan_gib", ".2f"),
    column("held GiB", "held_gib", ".2f"),
    column("peak GiB", "peak_gib", ".2f"),
    column("plan: received MB", "plan_received_mb", ".2f"),
    column("counted", "received_mb", ".2f"),
    ("equal", lambda row: "n/a" if "received" not in row else "yes" if row["received"] == row["plan_received"] else "**no**"),
    column("sent MB", "sent_mb", ".2f"),
    column("padding", "padding", ".1%"),
]


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    cells = [[head for head, _ in columns], ["---"] * len(columns), *([cell(r) for _, cell in columns] for r in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


# Each kind of result: its row as a line while the benchmark runs, and its tables.


def solver_tables(rows: Sequence[Row]) -> list[str]:
    synthetic = [row for row in rows if row["source"] == "synthetic"]
    recorded = [row for row in rows if row["source"] != "synthetic"]
    exponents = dict.fromkeys(row["exponent"] for row in synthetic)
    parts = [
        f"Exponent {e:g}, synthetic factors.\n\n" + by_spectrum([r for r in synthetic if r["exponent"] == e]) for e in exponents
    ]
    return parts + (["Recorded factors.\n\n" + table(RECORDED, recorded)] if recorded else [])


def by_spectrum(rows: Sequence[Row]) -> str:
    """A line for each solver and size, its errors side by side."""
    spectra = list(dict.fromkeys(row["spectrum"] for row in rows))
    merged: dict[tuple[int, str], Row] = {}
    for row in rows:
        line = merged.setdefault((row["d"], row["solver"]), {"d": row["d"], "solver": row["solver"], "all": []})
        line["all"].append(row)
        line[row["spectrum"]] = " / ".join(scientific(row[kind]) for kind in ("error", "white"))
    columns = [
        column("d", "d"),
        column("solver", "solver"),
        *(column(f"error / white at {s:.0e}", s) for s in spectra),
        ("failed", lambda line: str(sum(row["failed"] for row in line["all"]))),
        ("not finite", lambda line: str(sum(row["nonfinite"] for row in line["all"]))),
        ("ms per matrix", lambda line: spread([row["ms"] for row in line["all"]])),
        ("in a stack of", lambda line: spread([row["timed_matrices"] for row in line["all"]])),
    ]
    return table(columns, list(merged.values()))


def scientific(x: float | None) -> str:
    return "n/a" if x is None else f"{x:.0e}"


def spread(values: Sequence[float]) -> str:
    least, most = f"{min(values):.3g}", f"{max(values):.3g}"
    return least if least == most else f"{least} to {most}"


def step_tables(rows: Sequence[Row]) -> list[str]:
    profiles = [
        f"{row['model']}, {row['optimizer']}, a {kind} step:\n\n```\n{text}\n```"
        for row in rows
        for kind, text in row.get("profile", {}).items()
    ]
    return [table(STEP, rows), *profiles]


def fastest_tables(rows: Sequence[Row]) -> list[str]:
    """The fastest candidate of a row is bold."""
    names = dict.fromkeys(name for row in rows for name in row["ms"])
    columns = [
        column("d", "d"),
        column("exponent", "exponent", ".4g"),
        column("matrices", "matrices"),
        *((f"{name} ms", partial(candidate, name)) for name in names),
        column('root="auto"', "auto"),
    ]
    return [table(columns, rows)]


def candidate(name: str, row: Row) -> str:
    if name not in row["ms"]:
        return "n/a"
    text = "fails" if row["ms"][name] is None else f"{row['ms'][name]:.3g}"
    return f"**{text}**" if name == row["fastest"] else text


def scale_rows(rows: Sequence[Row]) -> list[Row]:
    """With what follows from them. *1/N* is from the fewest ranks of the model and layout, or the fewest that were timed."""
    found = []
    for row in rows:
        alike = [x for x in rows if (x["model"], x["layout"]) == (row["model"], row["layout"])]
        first, *_ = ordered = sorted(alike, key=lambda x: x["ranks"])
        timed = [x for x in ordered if x["fits"]][:1]
        more: Row = {f"{name}_gib": row[f"{name}_mib"] / 1024 for name in MEMORY if row.get(f"{name}_mib") is not None}
        more |= {f"{name}_mb": row[name] / 1e6 for name in ("plan_received", "received", "sent") if name in row}
        more["plan_gib"] = sum(more[f"plan_{kind}_gib"] for kind in ("state", "buffers", "scratch"))
        more |= {"work_tflop": row["work_flop"] / 1e12, "share": row["own_blocks"] / row["blocks"]}
        more["work_over"] = row["work_flop"] * row["ranks"] / (first["work_flop"] * first["ranks"]) - 1
        more["ideal_ms"] = timed[0]["mean_ms"] * timed[0]["ranks"] / row["ranks"] if timed and row["fits"] else None
        found.append(row | more)
    return found


def scale_tables(rows: Sequence[Row]) -> list[str]:
    rows = scale_rows(rows)
    return [table(SCALE, rows), "Memory is above weights and gradients, traffic per step.\n\n" + table(SCALE_BYTES, rows)]


MEMORY = ("weights", "plan_state", "plan_buffers", "plan_scratch", "held", "peak")
KINDS: dict[str, tuple[Sequence[str], Callable[[Sequence[Row]], list[str]]]] = {
    "step": (("model", "optimizer", "mean_ms", "plain_ms", "worst_ms", "peak_mib"), step_tables),
    "train": (("model", "optimizer", "frequency", "mean_ms", "worst_ms", "overhead_mean"), lambda rows: [table(TRAIN, rows)]),
    "solvers": (("source", "spectrum", "d", "exponent", "solver", "error", "failed", "ms"), solver_tables),
    "fastest": (("d", "exponent", "matrices", "fastest", "auto"), fastest_tables),
    "scale": (("model", "layout", "ranks", "c_n", "mean_ms", "kernels_ms", "wire_ms", "held_mib"), scale_tables),
    # Of the script that is experiments/wikitext.py now.
    "bytes": (("run", "lr", "seed", "bits_per_byte", "wall_s"), lambda rows: [table(BYTES, rows)]),
}


def line(kind: str, row: Row) -> str:
    """What to print of a row as soon as it is there."""
    values = [(key, row[key]) for key in KINDS[kind][0] if row.get(key) is not None]
    return ", ".join(
        f"{key} {x:.4g}" if isinstance(x, float) else f"{x}" if isinstance(x, str) else f"{key} {x}" for key, x in values
    )


def markdown(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    head = f"`{data['command']}`, {data['date']}, {data['device']}; {versions}."
    settings = ", ".join(f"{name} {value}" for name, value in data["settings"].items())
    parts = [f"# {data['kind']}", head, f"Settings: {settings}.", *KINDS[data["kind"]][1](data["results"])]
    parts += ["\n".join(f"- {note}" for note in data["notes"])] if data["notes"] else []
    return "\n\n".join(parts) + "\n"


def write(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The Markdown of a JSON file, into a folder."""
    data = json.loads(path.read_text())
    if data.get("kind") not in KINDS:
        raise ValueError(f"{path.name} is not a result of these benchmarks, or an old one: it has no kind")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / path.with_suffix(".md").name
    target.write_text(markdown(data))
    return target


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    for path in args.files:
        try:
            print(write(path, args.out))
        except ValueError as error:
            parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
