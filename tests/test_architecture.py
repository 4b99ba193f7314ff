"""Imports point one way, the core needs only torch, and collectives stay where they belong."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import lather

ROOT = pathlib.Path(lather.__file__).parent
LAYERS = [
    {"_version", "aside", "blocks", "kernels", "linalg", "schedule", "shapes", "reference"},
    {"roots"},
    {"options", "layout", "assign"},
    {"transforms", "plan", "rules", "averaging"},
    {"bank", "exchange", "fleet", "runs", "store", "tables"},
    {"agreement", "build", "census", "changes", "checkpoint", "health", "plan_report", "scale", "units"},
    {"optimizer", "routing"},
    {"__init__", "cli", "demo", "presets", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))


def module_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def lather_imports(path: pathlib.Path) -> set[str]:
    """Top-level names of the package that a file imports."""
    depth = len(path.relative_to(ROOT).parts)  # one dot for a file at the top
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return {name for name in found if name in LEVEL}


def test_every_module_has_a_layer():
    assert {module_of(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    mine = module_of(path)
    if len(path.relative_to(ROOT).parts) > 1:
        allowed = {name for name in LEVEL if LEVEL[name] < LEVEL[mine]}
    else:
        allowed = {name for name in LEVEL if LEVEL[name] <= LEVEL[mine]} - {mine}
    assert lather_imports(path) <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_imports_only_torch_and_the_standard_library(path):
    third_party = set()
    for node in ast.parse(path.read_text()).body:  # module level only
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        third_party |= {n.split(".")[0] for n in names} & {"numpy", "sklearn", "matplotlib", "scipy", "tqdm"}
    assert not third_party


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_collectives_stay_in_their_files(path):
    if module_of(path) not in {"layout", "exchange", "checkpoint", "optimizer"}:
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.S)
        assert "torch.distributed" not in code


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_reference_is_independent(path):
    if module_of(path) == "reference":
        assert not lather_imports(path)
    elif module_of(path) != "__init__":
        assert "reference" not in lather_imports(path)
