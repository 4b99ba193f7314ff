"""Documents in step with the code: snippets run, options are all there, links lead somewhere."""

from __future__ import annotations

import inspect
import pathlib
import re

import pytest

import lather
from lather import cli, demo
from lather.options import ARGUMENTS, OPTIONS, markdown

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/README.md",
    ROOT / "experiments/README.md",
    ROOT / "experiments/results/README.md",
]


def test_readme_snippets_run(capsys):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(snippets) >= 3
    scope: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), scope)
    assert "embedding" in capsys.readouterr().out


def test_recipes_run(capsys):
    scope: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), flags=re.S):
        exec(compile(snippet, "recipes.md", "exec"), scope)
    out = capsys.readouterr().out
    assert "kind: embedding" in out and r"rule 1: qkv\.weight" in out
    assert re.search(r"qkv\.weight +192 x 64 +spectral +3 of 64 x 64", out)
    assert re.search(r"head\.weight +1000 x 64 +adam", out)


def test_options_page_is_current(capsys):
    assert cli.main(["options"]) == 0
    assert (ROOT / "docs/options.md").read_text() == capsys.readouterr().out == markdown() + "\n"


def test_signature_and_table_agree():
    signature = inspect.signature(lather.Shampoo.__init__).parameters
    flags = {"self", "params", "unknown", "foreach", "fused", "capturable", "differentiable", "amsgrad"}
    assert {name: p.default for name, p in signature.items() if name not in flags} == {
        name: option.default for name, option in OPTIONS.items()
    } | {name: default for name, (default, _) in ARGUMENTS.items()}


def test_readme_options_exist():
    table = (ROOT / "README.md").read_text().split("## Options")[1]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, flags=re.M) for name in re.findall(r"`(\w+)`", row)]
    assert names
    assert set(names) <= set(OPTIONS)


def test_readme_shows_the_demo_as_it_is():
    """The columns and learning rates of the table; its figures are those of the run that is shown."""
    shown = (ROOT / "README.md").read_text().split("<!-- demo -->")[1]
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
