"""``lather view``: what is read from the log of a run, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from lather import cli
from lather.report import view

NASTY = '</script><b title="x">&\ud800'


def record(step: int, loss: float | None = 1.0, **more: object) -> dict[str, object]:
    metrics = {"default": {"condition": 1e5 + step, "update": 1e-3, "failed": 0}, "embedding": {"update": None}}
    return {"step": step, "time": step / 10, "lr": 0.01, "loss": loss, "metrics": metrics, **more}


@pytest.fixture
def log(tmp_path):
    def write(*records: object, name: str = "run.jsonl", end: str = "\n") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records) + end)
        return path

    return write


def shown(path: Path) -> dict[str, object]:
    """What the script of the page gets to read, with its columns by name."""
    content = re.search(r'<script type="application/json" id="data">(.*?)</script>', view.page(path), flags=re.S)
    assert content
    data = json.loads(content[1])
    metrics = {metric: {data["keys"][key]: values for key, values in series} for metric, series in data["metrics"]}
    return data | {"run": dict(data["run"]), "metrics": metrics}


def test_columns(log):
    data = shown(log(record(1, 3.0), record(2, 2.0), record(4, None, note="text is not plotted", tokens=7)))
    assert data["steps"] == [1, 2, 4] and data["times"] == [0.1, 0.2, 0.4]
    assert data["run"] == {"loss": [3.0, 2.0, None], "lr": 0.01, "tokens": [None, None, 7]}
    assert data["metrics"]["condition"] == {"default": [100_001, 100_002, 100_004]}
    assert data["metrics"]["update"] == {"default": 0.001, "embedding": None}
    assert data["keys"] == ["default", "embedding"] and data["alarms"] == []


def test_numbers_that_are_not_finite_are_gaps(log):
    assert shown(log('{"step": 1, "loss": NaN, "a": -Infinity, "b": 1e999, "c": 1' + 400 * "0" + ', "d": 1}'))["run"] == {
        **dict.fromkeys(("loss", "a", "b", "c")),
        "d": 1,
    }


def test_a_resumed_run_replaces_the_steps_that_it_repeats(log):
    """And its clock starts again."""
    data = shown(log(record(10, 3.0), record(20, 2.0), record(30, 9.0), record(20, 1.5, time=0.5), record(40, 1.0, time=2.0)))
    assert data["steps"] == [10, 20, 40] and data["records"] == 3
    assert data["run"]["loss"] == [3.0, 1.5, 1.0]
    assert data["times"] == [1.0, 3.5, 5.0] and data["seconds"] == 5.0


def test_a_run_that_starts_again_replaces_all(log):
    bad = record(20, 9.0, metrics={"old": {"skipped": 3}})
    data = shown(log(record(10, 3.0), bad, record(1, 4.0, metrics={"new": {"skipped": 0}})))
    assert data["steps"] == [1] and data["keys"] == ["new"] and not data["alarms"]


def test_a_last_line_that_was_cut_off_is_ignored(log):
    whole = json.dumps(record(2, 2.0, note="ä"), ensure_ascii=False)
    for cut in range(len(whole)):
        assert shown(log(record(1), whole[:cut], end=""))["steps"] == [1]
    assert shown(log(record(1), whole, end=""))["steps"] == [1, 2]
    path = log(record(1))
    path.write_bytes(path.read_bytes() + '{"note": "ä'.encode()[:-1])
    assert shown(path)["steps"] == [1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 3, "lo', 'line 3 is not JSON: \'{"step": 3'),
        ("[1, 2]", "line 3: a record must be an object"),
        ('{"loss": 1.0}', "line 3: the step of a record must be a whole number, not None"),
        ('{"step": 1.5}', "whole number, not 1.5"),
        ('{"step": true}', "whole number, not True"),
        ('{"step": 3, "metrics": [1]}', "line 3: metrics must be an object"),
        ('{"step": 3, "metrics": {"default": 1}}', "line 3: the metrics of 'default' must be an object"),
        ('{"step": 3, "metrics": {"default": {"age": "old"}}}', "line 3: age of 'default' must be a number or null, not 'old'"),
        (10_000 * "[", "line 3 is not JSON"),
    ],
)
def test_a_bad_line_is_named(line, message, log, capsys):
    path = log(record(1), "", line, record(4))
    assert cli.main(["view", str(path)]) == 2
    told = capsys.readouterr().err
    assert message in told and str(path) in told and len(told.splitlines()) == 1
    assert not path.with_suffix(".html").exists()


def test_files_that_cannot_be_used(log, tmp_path, capsys):
    good = log(record(1))
    for arguments, message in (
        ([tmp_path / "none.jsonl"], "none.jsonl: No such file"),
        ([tmp_path], "Is a directory"),
        ([log(name="empty.jsonl", end="")], "empty.jsonl has no records"),
        ([log('{"step": 1, "lo', name="cut.jsonl", end="")], "cut.jsonl has no records"),
        ([good, "--out", tmp_path / "no" / "run.html"], "run.html: No such file"),
        ([good, "--out", tmp_path], "Is a directory"),
        ([good, "--out", good], "is the log itself"),
    ):
        assert cli.main(["view", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    assert json.loads(good.read_text())["step"] == 1


def test_the_command_line_writes_a_page(log, tmp_path, capsys):
    path = log(record(1), record(2))
    assert cli.main(["view", str(path)]) == 0
    page = tmp_path / "run.html"
    assert f"wrote {page}" in capsys.readouterr().out
    assert page.read_text("utf-8") == view.page(path)
    assert cli.main(["view", str(path), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_bytes() == page.read_bytes()


class Tags(HTMLParser):
    """The tags of a page and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))


def test_names_cannot_break_the_page(log, tmp_path):
    plain = Tags(view.page(log(record(1))))
    name = '<b>&"<!--data--><!--title-->.jsonl'
    path = log(record(1, metrics={NASTY: {NASTY: 1.0}}, **{NASTY: 2.0}), name=name)
    page = view.page(path)
    assert Tags(page).seen == plain.seen
    assert unescape(re.findall("<h1>(.*)</h1>", page)[0]) == name
    assert unescape(re.findall("<title>(.*)</title>", page)[0]) == f"{name} - lather"
    data = shown(path)
    assert data["keys"] == [NASTY] and data["run"][NASTY] == 2 and data["metrics"] == {NASTY: {NASTY: 1}}
    view.view(path, tmp_path / "page.html")
    assert NASTY[-1] not in (tmp_path / "page.html").read_text("utf-8")


def test_the_page_loads_nothing(log):
    page = view.page(log(record(1)))
    assert "://" not in page and "@import" not in page and "url(" not in page
    assert "default-src 'none'" in page
    for tag, attributes in Tags(page).seen:
        assert tag not in ("link", "img", "iframe") and not attributes.keys() & {"src", "href"}


@pytest.mark.parametrize("only", [{}, {"loss": 1.0}, {"metrics": {}}, {"metrics": None}, {"metrics": {"default": {}}}])
def test_little_is_enough(only, log):
    data = shown(log({"step": 0, **only}))
    assert data["steps"] == [0] and data["metrics"] == {} and data["run"].keys() == only.keys() & {"loss"}


def test_long_runs_are_thinned(log):
    data = shown(log(*(record(3 * i, float(i)) for i in range(5000))))
    steps = data["steps"]
    assert len(steps) == view.MOST_STEPS and steps[0] == 0 and steps[-1] == 3 * 4999 and steps == sorted(set(steps))
    assert data["run"]["loss"] == [step / 3 for step in steps] and data["records"] == 5000
    assert max(b - a for a, b in pairwise(steps)) <= 18


def test_many_parameters_are_thinned_more_than_the_run(log):
    names = [f"layers.{i}.weight" for i in range(300)]
    values = {"update": 1.0, "cosine": 0.1, "graft_ratio": 2.0, "rank": 0.5, "condition": 1e3}
    path = log(*(record(i, metrics={name: {each: v + i for each, v in values.items()} for name in names}) for i in range(300)))
    data = shown(path)
    assert len(data["steps"]) == 300
    assert len(data["at"]) == view.MOST_VALUES // 1500 and data["at"][0] == 0 and data["at"][-1] == 299
    assert all(len(column) == len(data["at"]) for series in data["metrics"].values() for column in series.values())
    assert len(view.page(path)) < 1_000_000


def test_alarms_survive_thinning(log):
    """One failed refresh in a long run, at a step that is not shown."""
    records = [record(i) for i in range(3000)]
    records[1] = record(1, metrics={"default": {"failed": 2, "skipped": 0}})
    data = shown(log(*records))
    assert 1 not in data["steps"] and data["alarms"] == [["failed", 0, 2]]
