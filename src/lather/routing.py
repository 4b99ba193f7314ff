"""Param groups by parameter name and by kind of module."""

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .kinds import KINDS, OF_MATRICES, Options, kinds_of
from .options import OF_PRESETS, OPTIONS, hint
from .runtime.parameters import WRAPPERS

Rules = Sequence[tuple[str | re.Pattern[str], Options]]
Kinds = Mapping[str, Options | None]

NOTHING: Kinds = {}


@dataclass
class _Named:
    """A parameter with all its names: several if it is tied. ``plain`` are the names without those of torch's wrappers."""

    param: Tensor
    names: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    kinds: Mapping[str, Options] = field(default_factory=dict)

    def matches(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(name) for name in (*self.names, *self.plain))

    def options(self, given: Kinds) -> list[tuple[str, Options]]:
        """Labels and options of the parameter's kinds, in the order of kinds."""
        known = [(kind, given.get(kind, self.kinds[kind])) for kind in KINDS if kind in self.kinds]
        return [(f"kind: {kind}", options) for kind, options in known if options is not None]


def route(
    model: nn.Module | Iterable[tuple[str, Tensor]], rules: Rules = (), *, kinds: Kinds | None = NOTHING
) -> list[dict[str, Any]]:
    """Param groups for :class:`Shampoo` or a preset, from ordered rules ``(regular expression, options)``.

    The first rule that matches a parameter's name (``re.search``) sets its options. A rule without parameters raises an error.
    Parameters of a module that match no rule are grouped by kind. Embeddings, LM heads, positions, routers and depthwise
    convolutions have ``preconditioner=None``. Positions, norms and biases have ``weight_decay=0.0``. Stacked experts have
    ``batch_dims=1``, and fused queries, keys and values are split. ``kinds`` replaces the options of a kind, ``None`` as options
    ignores it, and ``kinds=None`` ignores all. All other parameters are the first group, without options of their own.
    ``docs/routing.md`` defines names and kinds exactly.

    >>> import torch, lather
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 24), torch.nn.LayerNorm(24))
    >>> opt = lather.from_adamw(lather.route(model, [(r"^1\\.weight", {"split": 3})]), lr=1.2e-3, weight_decay=0.1)
    >>> for row in opt.plan().params:
    ...     print(row.name, row.method, row.blocks, row.rule)
    1.weight shampoo 3 rule 1: ^1\\.weight
    0.weight adam 1 kind: embedding
    2.weight adam 1 kind: norm
    2.bias adam 1 kind: norm
    1.bias adam 1 kind: bias
    """
    found = _parameters(model)
    rules = list(rules)
    patterns = [_pattern(i, rule) for i, rule in enumerate(rules, 1)]
    labels = [f"rule {i}: {pattern.pattern}" for i, pattern in enumerate(patterns, 1)]
    given = _checked(kinds)
    order = ["no rule", *labels, *(f"kind: {kind}" for kind in KINDS)]
    groups: dict[tuple[int, str], dict[str, Any]] = {}  # a kind may have several, with different options
    for item in found:
        matching = [(label, rules[i][1]) for i, label in enumerate(labels) if item.matches(patterns[i])]
        label, options = (*matching, *item.options(given), ("no rule", {}))[0]
        group = groups.setdefault((order.index(label), str(options)), {"params": [], **options, "rule": label})
        group["params"].append((item.names[0], item.param))
    used = {group["rule"] for group in groups.values()}
    for i, label in enumerate(labels):
        if label not in used:
            raise ValueError(_unused(i, patterns, found))
    for kind in kinds or ():
        if given[kind] is not None and f"kind: {kind}" not in used:
            fix = "leave it out"
            fix += "" if isinstance(model, nn.Module) else ", or pass the model itself: names alone do not tell kinds"
            raise ValueError(f"kinds has options for {kind!r}, but the rules leave no parameter of that kind; {fix}")
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def has_no_matrices(group: Mapping[str, Any]) -> bool:
    """Whether a group was made for a kind that has no matrices of hidden layers."""
    return any(group.get("rule") == f"kind: {kind}" for kind in KINDS if kind not in OF_MATRICES)


def _parameters(model: nn.Module | Iterable[tuple[str, Tensor]]) -> list[_Named]:
    """Every parameter once, in order."""
    pairs = _trainable(model) if isinstance(model, nn.Module) else list(model)
    found: dict[int, _Named] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            raise ValueError(
                f"rules need names, but there is a {type(pair).__name__} without one; pass the model, or "
                "model.named_parameters() instead of model.parameters()"
            )
        found.setdefault(id(pair[1]), _Named(pair[1])).names.append(pair[0])
    wrapped = all(WRAPPERS.sub("", name).startswith("module.") for name, _ in pairs)  # DDP: the whole model is its child
    for item in found.values():
        names = [WRAPPERS.sub("", name) for name in item.names]
        item.plain = [name.removeprefix("module.") for name in names] if wrapped else names
    for key, kinds in kinds_of(model).items() if isinstance(model, nn.Module) else ():
        if key in found:
            found[key].kinds = kinds
    return list(found.values())


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters by name, without integers, which nobody can train: adapters are added to weights of 4 or 8 bits."""
    pairs = model.named_parameters(remove_duplicate=False)
    return [(name, p) for name, p in pairs if p.is_floating_point() or p.is_complex()]


def _checked(kinds: Kinds | None) -> Kinds:
    for kind, options in (kinds or {}).items():
        if kind not in KINDS:
            raise ValueError(f"kinds has the unknown kind {kind!r}; there are {', '.join(map(repr, KINDS))}")
        if options is not None:
            _check_options(options, f"kind {kind!r}")
    return dict.fromkeys(KINDS) if kinds is None else kinds


def _pattern(number: int, rule: Any) -> re.Pattern[str]:
    """The regular expression of a rule, if the rule is well formed."""
    if not (isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], (str, re.Pattern))):
        raise ValueError(f"rule {number} is {rule!r}; it must be a pair such as ('experts', {{'batch_dims': 1}})")
    _check_options(rule[1], f"rule {number}")
    try:
        return re.compile(rule[0])
    except re.error as error:
        raise ValueError(f"rule {number} has {rule[0]!r}, which is not a regular expression: {error}") from error


def _check_options(options: Any, where: str) -> None:
    if not isinstance(options, Mapping):
        raise ValueError(f"{where} has {options!r} for options; they must be a mapping such as {{'lr': 1e-4}}")
    for name in options:
        if name not in OPTIONS and name not in OF_PRESETS:  # the optimizer refuses arguments of other presets
            raise ValueError(f"{where} has the unknown option {name!r}{hint(name)}")


def _unused(number: int, patterns: Sequence[re.Pattern[str]], found: Sequence[_Named]) -> str:
    """Why a rule has no parameter, and what to do."""
    rule = f"rule {number + 1}, {patterns[number].pattern!r},"
    if matched := [item for item in found if item.matches(patterns[number])]:
        takers = {next(i for i, pattern in enumerate(patterns) if item.matches(pattern)) for item in matched}
        before = ", ".join(f"rule {i + 1}" for i in sorted(takers))
        return f"{rule} has no effect: {before} comes first and takes every parameter that it matches; move it up"
    if not found:
        return f"{rule} matches no parameter: there are none at all"
    near = _nearest(patterns[number].pattern, [name for item in found for name in item.plain])
    return f"{rule} matches no parameter; the nearest names are " + ", ".join(map(repr, near))


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """The three names with a part that is closest to a pattern. Names that differ only in numbers count once."""
    text = re.sub(r"\\[a-zA-Z]|[\\^$*+?()\[\]{}|]", "", pattern)

    def likeness(part: str) -> float:
        return difflib.SequenceMatcher(None, part, text).ratio()

    def score(name: str) -> tuple[float, float]:
        parts = name.split(".")
        runs = (".".join(parts[i:j]) for i, j in itertools.combinations(range(len(parts) + 1), 2))
        return max(map(likeness, runs)), likeness(name)  # the whole name decides between equal parts such as "weight"

    families: dict[str, str] = {}
    for name in names:
        families.setdefault(re.sub(r"\d+", "0", name), name)
    return sorted(families.values(), key=score, reverse=True)[:3]
