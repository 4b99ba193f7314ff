"""The line of packages, and the house rules that can be read off the source."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import NamedTuple

import pytest

import lather
from lather.methods import METHODS

ROOT = pathlib.Path(lather.__file__).parent

# From bottom to top, with all files. A package imports only from those above it in this list, and freely inside itself.
LINE: dict[str, set[str]] = {
    "_version": set(),
    "kernels": {"copies", "dense", "moments", "packed", "schema", "step", "tiles"},
    "linalg": set(),
    "roots": {
        *("base", "coupled", "directions", "eigh", "firstorder", "higher_order", "minimax", "newton", "polar", "products"),
        *("spec", "track"),
    },
    "methods": {"base", "filter", "grafts", "kl", "shampoo", "soap", "spectral"},
    "options": set(),
    "settings": set(),
    "planning": {"blocks", "layouts", "messages", "owners", "plan", "schedule"},
    "storage": {"averaging", "buffers", "copies", "grids", "step", "tensors", "update"},
    "compute": {
        *("ahead", "background", "bank", "executor", "graphs", "kernel_executor", "refresh", "slices", "tables"),
        "torch_executor",
    },
    "runtime": {
        *("agreement", "checkpoint", "exchange", "health", "metrics", "parameters", "ranks", "run", "session"),
        "unit",
        "unit_plan",
    },
    "kinds": set(),
    "routing": set(),
    "optimizer": set(),
    "monitor": set(),
    "presets": {"distributed_shampoo", "from_torch", "meta", "muon", "soap"},
    "report": {"choice", "models", "plan", "timing", "trials", "tune", "view"},
    "integrations": {"accelerate", "lightning", "transformers"},
    "cli": set(),
    "demo": set(),
    "__init__": set(),
    "__main__": set(),
}
TOP = {"cli", "demo", "__init__", "__main__"}  # one place at the end of the line
# The one import against the order: `opt.plan()` makes a report. It is inside the function, and there for type checkers.
BACKWARDS = {("optimizer.py", "report", "if TYPE_CHECKING"), ("optimizer.py", "report", "def plan")}

FILES = sorted(ROOT.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: name_of(path))


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def level(package: str) -> int:
    return len(LINE) if package in TOP else list(LINE).index(package)


@cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


class Import(NamedTuple):
    module: str  # dotted; inside of lather, from there on
    ours: bool
    scope: str  # "", or what it is inside of


def imports_of(path: pathlib.Path) -> Iterator[Import]:
    def walk(node: ast.AST, scope: str) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef):
            scope = f"def {node.name}"
        elif isinstance(node, ast.If):
            scope = scope or f"if {ast.unparse(node.test)}"
        elif isinstance(node, ast.Import):
            yield from (absolute(alias.name, scope) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield absolute(str(node.module), scope)
        elif isinstance(node, ast.ImportFrom):
            parts = path.relative_to(ROOT).parts
            base = [*parts[: len(parts) - node.level], *(node.module or "").split(".")]
            for alias in node.names:
                yield Import(".".join(part for part in (*base, alias.name) if part), True, scope)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, scope)

    def absolute(module: str, scope: str) -> Import:
        first, _, rest = module.partition(".")
        return Import(rest or "__init__", True, scope) if first == "lather" else Import(module, False, scope)

    return walk(tree_of(path), "")


def target_of(found: Import) -> str:
    """The package of an import of ours; a name that is no package is one of `lather` itself."""
    first = found.module.partition(".")[0]
    return first if first in LINE else "__init__"


# The line.


def test_every_file_is_in_the_line():
    listed = {f"{package}.py" for package, files in LINE.items() if not files}
    listed |= {f"{package}/{name}.py" for package, files in LINE.items() if files for name in {*files, "__init__"}}
    assert {name_of(path) for path in FILES} == listed


@every_file
def test_imports_point_down_the_line(path):
    mine = package_of(path)
    ours = {(target_of(found), found.scope) for found in imports_of(path) if found.ours}
    backwards = {(to, scope) for to, scope in ours if to != mine and level(to) >= level(mine) and mine not in TOP}
    assert backwards == {(to, scope) for file, to, scope in BACKWARDS if file == name_of(path)}


def test_the_line_is_looked_at():
    """Some imports that are there, at every depth; or the test above would prove nothing."""
    edges = {(package_of(path), target_of(found)) for path in FILES for found in imports_of(path) if found.ours}
    assert {("options", "methods"), ("settings", "options"), ("settings", "methods"), ("compute", "kernels")} <= edges
    assert {("optimizer", "runtime"), ("runtime", "compute"), ("__init__", "optimizer"), ("cli", "report")} <= edges


@pytest.mark.parametrize("package", [package for package, files in LINE.items() if files])
def test_files_of_a_package_do_not_import_each_other_in_a_circle(package):
    edges: dict[str, set[str]] = {}
    for path in (ROOT / package).glob("*.py"):
        there = [found.module.split(".") for found in imports_of(path) if found.ours and target_of(found) == package]
        edges[path.stem] = {parts[1] for parts in there if len(parts) > 1 and parts[1] in LINE[package]} - {path.stem}
    while edges:
        free = [name for name, needs in edges.items() if not needs & edges.keys()]
        assert free, f"a circle among {sorted(edges)}"
        edges = {name: needs for name, needs in edges.items() if name not in free}


# What is imported from elsewhere.

TRITON = {f"kernels/{name}.py" for name in ("copies", "dense", "moments", "packed", "step", "tiles")}


@every_file
def test_the_core_imports_only_torch(path):
    """Triton is imported by kernels, and those when they are launched. The demo, configs and integrations need more."""
    name = name_of(path)
    others = {(found.module.partition(".")[0], found.scope) for found in imports_of(path) if not found.ours}
    others = {(module, scope) for module, scope in others if module not in {*sys.stdlib_module_names, "torch"}}
    if name in TRITON:
        assert others == {("triton", "")}
    elif name == "compute/ahead.py":
        assert others == {("triton", "def compile_kernels")}
    elif name == "compute/kernel_executor.py":
        assert others == {("triton", "def _type")}
    elif name == "storage/copies.py":
        assert others == {("triton", "def _triton")}
    elif name == "integrations/transformers.py":
        assert others == {("transformers", "")}
    elif name == "integrations/lightning.py":
        assert {module for module, _ in others} == {"lightning", "pytorch_lightning"}  # two names of one library
    elif name == "report/models.py":
        assert others == {("transformers", "def _of_folder")}
    elif name == "demo.py":
        assert {module for module, _ in others} == {"sklearn", "matplotlib"} and all(scope for _, scope in others)
    else:
        assert not others
    if not name.startswith("kernels/"):
        eager = {found.module for found in imports_of(path) if found.ours and not found.scope}
        assert not {module for module in eager if module.startswith("kernels.")} - schema_names()


def schema_names() -> set[str]:
    """What kernels have that does not need Triton."""
    found = {f"kernels.schema.{node.name}" for node in tree_of(ROOT / "kernels/schema.py").body if hasattr(node, "name")}
    facts = {f"kernels.{node.name}" for node in tree_of(ROOT / "kernels/__init__.py").body if hasattr(node, "name")}
    return {"kernels.schema.SMALLEST_NORM", *facts, *found}


def test_it_can_be_imported_without_anything_else():
    """Nor does it then import torch.distributed.tensor, which takes longer than lather."""
    missing = "import sys; sys.modules.update(dict.fromkeys(['triton', 'sklearn', 'matplotlib', 'transformers', 'accelerate']));"
    check = "import lather, lather.integrations.accelerate; assert 'torch.distributed.tensor' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", missing + check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@every_file
def test_collectives_stay_in_their_files(path):
    users = {"runtime/ranks.py", "runtime/session.py"}
    imported = any(found.module.startswith("torch.distributed") for found in imports_of(path) if not found.ours)
    assert imported == (name_of(path) in users)
    used = "torch.distributed" in ast.unparse(without_text(tree_of(path)))
    assert not used or name_of(path) in users


class _WithoutText(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(0) if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant(0)


def without_text(tree: ast.Module) -> ast.AST:
    return _WithoutText().visit(deepcopy(tree))


def test_the_textbook_twin_is_independent():
    """What is compared with it must not be compared with itself."""
    nodes = list(ast.walk(tree_of(pathlib.Path(__file__).with_name("reference.py"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in names and not any(name.partition(".")[0] == "lather" for name in names)


# Methods are named in one place.

NAMELESS = ("options.py", "settings.py", "planning/", "compute/", "runtime/", "report/")


def texts_of(tree: ast.Module) -> Iterator[str]:
    """String literals that are not docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def named_methods(tree: ast.Module) -> set[str]:
    return {name for text in texts_of(tree) for name in METHODS if re.search(rf"\b{name}\b", text)}


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith(NAMELESS)], ids=name_of)
def test_no_method_is_named(path):
    """A method tells its facts. Nothing that runs it asks which one it is. (`Shampoo` is the class of the optimizer.)"""
    assert not named_methods(tree_of(path))


def test_names_of_methods_would_be_found():
    assert set(METHODS) >= {"shampoo", "soap", "kl", "spectral"}
    code = '"""On soap."""\ndef f(x):\n    """On kl."""\n    return x == "spectral", f"not {x}, shampoo", "Shampoo", "klein"'
    assert named_methods(ast.parse(code)) == {"spectral", "shampoo"}


# Classes.

VALUES = {"NamedTuple", "Protocol", "IntEnum"}
SUBCLASSED = {"optimizer.Shampoo"}  # the public class, which users may derive from
CONCRETE_BASES = {"compute.slices.BankSlice"}  # a value that another extends


class Class(NamedTuple):
    bases: set[str]
    decorators: set[str]
    abstract: bool


def classes() -> dict[str, Class]:
    found = {}
    for path in FILES:
        if name_of(path) in TRITON:
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        nodes = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
        module = importlib.import_module(".".join(("lather", *parts))) if nodes else None
        for node in nodes:
            kind = getattr(module, node.name)
            decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
            bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
            abstract = inspect.isabstract(kind)
            bases |= {"Exception"} if issubclass(kind, Exception) else set()
            found[".".join((*parts, node.name))] = Class(bases, decorators, abstract)
    return found


def test_classes_are_at_the_top_level_of_their_files():
    """Where the tests below look."""
    for path in FILES:
        tree = tree_of(path)
        assert all(node in tree.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)), path


def test_every_class_is_abstract_or_final_or_a_value():
    fine = {
        name
        for name, kind in classes().items()
        if kind.abstract or kind.decorators & {"final", "dataclass"} or kind.bases & {*VALUES, "Exception"}
    }
    assert classes().keys() - fine == SUBCLASSED


def test_only_abstract_classes_have_subclasses():
    found = classes()
    inherited = {base.rpartition(".")[2] for kind in found.values() for base in kind.bases}
    concrete = {name for name, kind in found.items() if not kind.abstract}
    assert {name for name in concrete if name.rpartition(".")[2] in inherited} == CONCRETE_BASES
    assert not {name for name, kind in found.items() if kind.abstract and "final" in kind.decorators}


# Functions.

LONGEST = 60


@every_file
def test_functions_are_short(path):
    """Except constructors, whose options are a list, and kernels, which a compiler wants in one piece."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            jitted = any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
            lines = 1 + node.end_lineno - node.lineno
            assert jitted or lines <= LONGEST, f"{node.name} has {lines} lines"


# State.

WRITES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
CONTAINERS = {"dict", "list", "set", "defaultdict", "Counter", "deque", "OrderedDict"}
REGISTRIES = {("methods/__init__.py", "METHODS")}  # what users may add to


def written(node: ast.AST) -> ast.AST | None:
    """What a statement or expression writes into, if it does."""
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        return node.value if isinstance(node, ast.Subscript) else node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
        return node.func.value
    return node.target if isinstance(node, ast.AugAssign) else None


def constants_written(tree: ast.Module) -> set[str]:
    """Names in capitals that functions write into, and whatever they declare global."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = [node for function in functions for node in ast.walk(function)]
    names = {ast.unparse(target).rpartition(".")[2] for target in map(written, inside) if target is not None}
    declared = {name for node in inside if isinstance(node, ast.Global) for name in node.names}
    return {name for name in names if name.isidentifier() and name.isupper()} | declared


def lower_case_containers(tree: ast.Module) -> set[str]:
    """What is made as a list, dict or set at the top level of a file, under a name that is no constant's."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            value, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
            made = isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))
            called = isinstance(value, ast.Call) and ast.unparse(value.func).partition("[")[0] in CONTAINERS
            found |= {ast.unparse(target) for target in targets} if made or called else set()
    return {name for name in found if not name.isupper()} - {"__all__"}


@every_file
def test_nothing_at_the_top_level_of_a_file_changes(path):
    """Containers there have names in capitals, and no function writes to those. Only registries grow."""
    tree = tree_of(path)
    assert constants_written(tree) == {each for name, each in REGISTRIES if name == name_of(path)}
    assert not lower_case_containers(tree)


def test_writes_to_constants_would_be_found():
    code = "KNOWN = {}\nseen: set[int] = set()\ndef f(x):\n    KNOWN[x] = 1\n    LIST.append(x)\n    module.OTHER.update(x)"
    code += "\n    module.NUMBER = 1\n    here = {}\n    here[x] = KNOWN[x]\ndef g():\n    global total\n    total += 1"
    assert constants_written(ast.parse(code)) == {"KNOWN", "LIST", "OTHER", "NUMBER", "total"}
    assert lower_case_containers(ast.parse(code)) == {"seen"}
