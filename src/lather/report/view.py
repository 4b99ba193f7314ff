"""A page of plots from the log of a run: ``lather view run.jsonl``. One HTML file that needs nothing else.

Every line of the log is a record: ``{"step": 100, "time": 12.3, "loss": 2.31, "metrics": {"embedding": {"cosine": 0.4}}}``.
Metrics are by kind of parameter, or by parameter. All other numbers belong to the run as a whole.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

MOST_STEPS = 1000  # on the page
MOST_VALUES, FEWEST_STEPS = 100_000, 50  # of metrics on the page: with many parameters, these are shown at fewer steps
ALARMS = ("skipped", "failed")  # metrics that should stay 0
EXAMPLE = '{"step": 1, "loss": 2.3}'

Record = dict[str, Any]


@dataclass
class Log:
    """What is known after one pass. Records stay text until it is clear which ones the page shows."""

    lines: dict[int, tuple[float, bytes]] = field(default_factory=dict)  # by step: seconds of earlier sessions, and the record
    seconds: float = 0.0  # of all sessions
    peaks: dict[tuple[str, str], float] = field(default_factory=dict)  # by metric and key, over all records


def view(path: Path, out: Path | None = None) -> str:
    """Write the page to ``out``, by default next to the log, and say so."""
    text = page(path)
    out = out or path.with_suffix(".html")
    if out.resolve() == path.resolve():
        raise ValueError(f"{out} is the log itself; choose another name for the page with --out")
    size = out.write_bytes(text.encode(errors="replace"))
    return f"wrote {out} ({math.ceil(size / 1000):,} kB); open it in a browser"


def page(path: Path) -> str:
    log = read(path)
    title = html.escape(path.name)
    content = json.dumps(data(log), separators=(",", ":"), allow_nan=False)
    content = content.replace("<", "\\u003c")  # no name can end the script
    template = files("lather.report").joinpath("view.html").read_text("utf-8")
    return template.replace("<!--title-->", title).replace("<!--data-->", content)


def read(path: Path) -> Log:
    """A run that is resumed repeats steps, and its records replace all from there on. A last line that was cut off is left out."""
    log, before, last = Log(), 0.0, 0.0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):  # the job was killed while it wrote
                    break
                start = line[:60].decode(errors="replace").strip()
                raise ValueError(f"{path}, line {number} is not JSON: {start!r}") from None
            if problem := _problem(record):
                raise ValueError(f"{path}, line {number}: {problem}")
            seconds = _number(record.get("time")) or 0.0
            if seconds < last:  # a new session
                before, last = before + last, 0.0
            last = max(last, seconds)
            step = record["step"]
            if log.lines and step < next(reversed(log.lines)):  # resumed, or started again
                log.lines = {s: kept for s, kept in log.lines.items() if s < step}
                log.peaks = log.peaks if log.lines else {}
            log.lines[step] = before, line
            for key, values in (record.get("metrics") or {}).items():
                for metric, value in values.items():
                    log.peaks[metric, key] = max(log.peaks.get((metric, key), 0.0), _number(value) or 0.0)
    if not log.lines:
        raise ValueError(f"{path} has no records; each line must be one, such as {EXAMPLE}")
    log.seconds = before + last
    return log


def data(log: Log) -> dict[str, Any]:
    """What the page shows: columns over the chosen steps."""
    steps = thin(sorted(log.lines), MOST_STEPS)
    at = thin(range(len(steps)), max(FEWEST_STEPS, MOST_VALUES // max(1, len(log.peaks))))
    row = {i: j for j, i in enumerate(at)}
    keys = list(dict.fromkeys(key for _, key in log.peaks))
    place = {key: i for i, key in enumerate(keys)}
    run: dict[str, list[float | None]] = {}
    metrics: dict[str, dict[int, list[float | None]]] = {metric: {} for metric, _ in log.peaks}
    times: list[float | None] = [None] * len(steps)
    for i, step in enumerate(steps):
        before, line = log.lines[step]
        record: Record = json.loads(line)
        for name, value in record.items():
            if name == "time" and (seconds := _number(value)) is not None:
                times[i] = round(before + seconds, 1)
            elif name not in ("step", "time", "metrics") and isinstance(value, (int, float)):
                run.setdefault(name, [None] * len(steps))[i] = _number(value, digits=6)
        for key, values in (record.get("metrics") or {}).items() if i in row else ():
            for metric, value in values.items():
                metrics[metric].setdefault(place[key], [None] * len(at))[row[i]] = _number(value, digits=3)
    return {
        "records": len(log.lines),
        "steps": steps,
        "at": at,  # which of them have metrics
        "times": times,
        "seconds": log.seconds,
        "alarms": [(metric, place[key], peak) for (metric, key), peak in log.peaks.items() if metric in ALARMS and peak > 0],
        "keys": keys,
        "run": _columns(run),
        "metrics": [(metric, _columns(series)) for metric, series in metrics.items()],
    }


def _columns(series: Mapping[Any, list[float | None]]) -> list[tuple[Any, Any]]:
    """Pairs of a name and its column. One number stands for a column of equal ones."""
    return [(name, values[0] if len(set(values)) == 1 else values) for name, values in series.items()]


def thin(steps: Sequence[int], most: int) -> list[int]:
    """At most this many, evenly chosen, with the first and the last.

    >>> thin(range(0, 100, 10), 4)
    [0, 30, 60, 90]
    """
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _problem(record: Any) -> str | None:
    """Why this is not a record."""
    if not isinstance(record, dict):
        return f"a record must be an object such as {EXAMPLE}"
    if type(step := record.get("step")) is not int or step < 0:
        return f"the step of a record must be a whole number, not {step!r}"
    metrics = record.get("metrics") or {}
    if not isinstance(metrics, dict):
        return "metrics must be an object: metrics by name, by kind of parameter"
    for key, values in metrics.items():
        if not isinstance(values, dict):
            return f"the metrics of {key!r} must be an object: numbers by name"
        for metric, value in values.items():
            if not (value is None or isinstance(value, (int, float))):
                return f"{metric} of {key!r} must be a number or null, not {value!r}"
    return None


def _number(value: Any, digits: int = 9) -> float | None:
    """A finite number with few digits, or None."""
    if not isinstance(value, (int, float)) or abs(value) > 1e300 or value != value:
        return None
    if value == int(value) and abs(value) < 1e9:
        return int(value)
    return float(f"{value:.{digits}g}")
