"""Documents in step with the code: snippets run, options are all there, links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib
import re
import shlex
import sys
import types

import pytest

import lather
from lather import cli, demo
from lather.options import ARGUMENTS, OPTIONS, markdown
from lather.report.models import load

ROOT = pathlib.Path(__file__).parent.parent
SITE = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *SITE,
    ROOT / "benchmarks/README.md",
    ROOT / "experiments/README.md",
    ROOT / "experiments/results/README.md",
]

TESTED = ("python", "py", "sh", "text")  # by one process, by two ranks, as far as they exist, output
DIRECTIVES = ("{literalinclude}", "{toctree}", "{eval-rst}")


def fences(page: pathlib.Path) -> list[tuple[str, str]]:
    """The language and the text of every block of code."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), flags=re.S | re.M)


def snippets(page: pathlib.Path, language: str) -> list[str]:
    return [text for kind, text in fences(page) if kind == language]


def bare(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


SCRIPTS = [bare(path.read_text()) for path in (ROOT / "examples").glob("*.py")]


def to_run(page: pathlib.Path) -> list[str]:
    """Snippets that are not part of a script, which other tests run."""
    return [text for text in snippets(page, "python") if not any(bare(text) in script for script in SCRIPTS)]


RUN = [page for page in PAGES if to_run(page)]
SEEN = {  # what some pages print
    "README.md": [r"kind: embedding"],
    "routing.md": [r"kind: embedding", r"rule 1: qkv\\.weight", r"head\.weight +1000 x 64 +adam"],
    "recipes.md": [r"1\.weight +64 x 32 +spectral"],
    "diagnostics.md": [r"\{'1\.weight': \{'skipped': 1, 'failed': 0, 'restarted': 0\}\}"],
}


@pytest.mark.filterwarnings("ignore::lather.NumericalWarning")  # which the page of diagnostics shows
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_snippets_run(page, capsys, tmp_path, monkeypatch):
    """All of a page in order, in one scope. Those for several ranks, ``py``, are run by tests/distributed/test_pages.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "distributed_shampoo", metas_package())
    scope: dict[str, object] = {}
    for snippet in to_run(page):
        exec(compile(snippet, page.name, "exec"), scope)
    out = capsys.readouterr().out
    for pattern in SEEN.get(page.name, ()):
        assert re.search(pattern, out), out
    if page.name == "diagnostics.md":  # which shows some of what it prints
        shown = "".join(snippets(page, "text")).splitlines()
        assert shown and all(line in out for line in shown if "..." not in line)


def metas_package() -> types.ModuleType:
    """What a snippet takes from Meta's package: lather reads its config objects by the names of their classes."""
    found = types.ModuleType("distributed_shampoo")
    found.DistributedShampoo = lather.distributed_shampoo
    found.AdamPreconditionerConfig = dataclasses.make_dataclass("AdamPreconditionerConfig", ["beta2", "epsilon"])
    found.DDPDistributedConfig = dataclasses.make_dataclass("DDPDistributedConfig", [])
    return found


@pytest.mark.parametrize("page", SITE, ids=lambda page: page.name)
def test_nothing_on_the_site_goes_untested(page):
    """Code is in a language that some test runs, or included from a script that some test runs."""
    assert {kind.split()[0] for kind, _ in fences(page) if kind} <= {*TESTED, *DIRECTIVES}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for script in re.findall(r"\{literalinclude\} \.\./examples/(.*)", page.read_text()):
        assert f'"{script}"' in tests, script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page, capsys):
    for line in "".join(snippets(page, "sh")).splitlines():
        command, *arguments = shlex.split(line, comments=True) or [""]
        if arguments[:2] == ["-m", "lather"] and arguments[2] in ("tune", "view"):  # the one takes minutes, the other a file
            cli.make_parser().parse_args(arguments[2:])
        elif arguments[:2] == ["-m", "lather"]:
            assert cli.main(arguments[2:]) == 0, line
        if command == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), flags=re.M), line
        scripts = [ROOT / name for name in arguments if name.startswith("examples/")]
        for script in scripts:
            known = script.read_text() + (ROOT / "examples/common.py").read_text()
            flags = [flag for flag in arguments[arguments.index(str(script.relative_to(ROOT))) :] if flag.startswith("--")]
            assert all(f'"{flag}"' in known for flag in flags), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """Files of the repository, which the site names without a link."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    for name in re.findall(r"`((?:benchmarks|examples|experiments|tests)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_tables_of_group_and_block_sizes_are_those_of_the_plan():
    page, llama, gpt2 = (ROOT / "docs/speed.md").read_text(), load("llama-8b"), load("gpt2")
    groups = re.findall(r"^\| (\d+)(?: \(default\))? \| ([\d.]+) GiB \| ([\d.]+)(?: GiB)? \| ([\d.]+) TFLOP \|$", page, flags=re.M)
    blocks = re.findall(r"^\| (\d+) \|(?: [^|]*\|){2} (\d+) \| ([\d.]+) \|[ \d.]*\|$", page, flags=re.M)
    assert [int(n) for n, *_ in groups] == [1, 2, 8, 16, 64] and [int(n) for n, *_ in blocks] == [128, 256, 512, 1024, 2048, 4096]
    for n, state, received, work in groups:
        team = lather.plan(llama, device="cuda", ranks=64, num_trainers_per_group=int(n)).teams[0]
        assert [team.state_bytes_max / 2**30, team.outbound_bytes / 2**30] == pytest.approx(
            [float(state), float(received)], abs=0.051
        )
        assert float(work) == pytest.approx(team.work_max / 1e12, rel=0.01)
    for n, state, work in blocks:
        report = lather.plan(gpt2, device="cuda", max_preconditioner_dim=int(n))
        assert (int(state), float(work)) == (
            round(report.state_bytes / 2**20),
            pytest.approx(report.refresh_flops / 1e12, abs=0.051),
        )


def test_the_table_of_many_ranks_is_that_of_the_plan(capsys):
    """Its first line: many ranks take minutes."""
    page = (ROOT / "benchmarks/README.md").read_text()
    assert "`python -m lather plan llama-70b --ranks 8,64,512,4096 --shard fsdp`" in page
    assert cli.main(["plan", "llama-70b", "--ranks", "8", "--shard", "fsdp"]) == 0
    shown = [line.split() for line in page.splitlines()]
    assert all(line.split() in shown for line in capsys.readouterr().out.strip().splitlines()[-2:])


def test_the_site_has_every_page():
    entries: list[str] = []
    for kind, text in fences(ROOT / "docs/index.md"):
        if kind == "{toctree}":
            lines = [line for line in text.splitlines() if line and not line.startswith(":")]
            entries += [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    assert sorted([*entries, "index"]) == sorted(page.stem for page in SITE)


def test_troubleshooting_quotes_messages():
    """What it says in errors and warnings, as far as ``...``, is in the source."""
    symptoms = re.findall(r"^\| ((?:Error|Warning): .*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.M)
    quoted = [text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom)]
    known = [text for path in (ROOT / "src/lather").rglob("*.py") for text in literals(path)]
    assert len(quoted) > 20
    for text in quoted:
        parts = [re.escape(part.strip()) for part in text.split("...")]
        assert any(re.search(".*".join(parts), message, flags=re.S) for message in known), text


def literals(path: pathlib.Path) -> list[str]:
    """All strings of a source, without what an f-string fills in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    for name in lather.__all__:
        assert name == "__version__" or re.search(rf"^\.\. auto\w+:: {name}\b", page, flags=re.M), name


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 100


def test_options_page_is_current(capsys):
    assert cli.main(["options"]) == 0
    assert (ROOT / "docs/options.md").read_text() == capsys.readouterr().out == markdown() + "\n"


def test_signature_and_table_agree():
    signature = inspect.signature(lather.Shampoo.__init__).parameters
    flags = {"self", "params", "unknown", "foreach", "fused", "capturable", "differentiable", "amsgrad"}
    assert {name: p.default for name, p in signature.items() if name not in flags} == {
        name: option.default for name, option in OPTIONS.items()
    } | {name: default for name, (default, _) in ARGUMENTS.items()}


def test_options_to_know_exist():
    table = (ROOT / "docs/choose.md").read_text().split("## Options to know")[1].split("## ")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, flags=re.M) for name in re.findall(r"`(\w+)`", row)]
    assert names
    assert set(names) <= set(OPTIONS)


def test_the_demo_is_shown_as_it_is():
    """The columns and learning rates of the table; its figures are those of the run that is shown."""
    shown = (ROOT / "docs/start.md").read_text().split("<!-- demo -->")[1]
    for column in demo.COLUMNS:
        assert column.title in shown
    for name, lr in demo.LEARNING_RATES.items():
        assert re.search(rf"^{name} +{lr:g} ", shown, flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def anchors(page: pathlib.Path) -> list[str]:
    """The names of a page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_public_names_are_documented():
    for name in lather.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(lather, name)), name


def test_changelog_has_the_version():
    assert f"## {lather.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_tests_every_python():
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    tested = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/test.yml").read_text())[1]
    assert claimed == re.findall(r'"(.*?)"', tested) and claimed
