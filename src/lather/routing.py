"""Param groups by parameter name and by kind of module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .options import OF_PRESETS, OPTIONS, hint

Options = Mapping[str, Any]
Rules = Sequence[tuple[str | re.Pattern[str], Options]]

KINDS: dict[str, Options] = {
    "embedding": {"preconditioner": None},
    "head": {"preconditioner": None},
    "norm": {"weight_decay": 0.0},
    "bias": {"weight_decay": 0.0},
}
NOTHING: Mapping[str, Options] = {}
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")  # of torch's, in names
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


@dataclass
class _Named:
    """A parameter with all its names, and the modules that it is part of: several if it is tied. ``plain`` are the names
    without what ``torch.compile`` and other wrappers put into them."""

    param: Tensor
    names: list[str]
    plain: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    head: bool = False


def route(
    model: nn.Module | Iterable[tuple[str, Tensor]], rules: Rules = (), *, kinds: Mapping[str, Options] | None = NOTHING
) -> list[dict[str, Any]]:
    """Param groups for :class:`Shampoo` or a preset, from ordered rules ``(regular expression, options)``.

    A parameter takes the options of the first rule that is found (``re.search``) in its name, or in one of its names if it is
    tied; what ``torch.compile``, DDP and activation checkpointing add to names does not count. A rule without any parameter is an error. What no rule takes goes by its kind, if ``model`` is a module:

    | kind | is | options |
    |---|---|---|
    | ``"embedding"`` | a weight of ``nn.Embedding`` or ``nn.EmbeddingBag``, tied to a head or not | ``preconditioner=None`` |
    | ``"head"`` | the weight of the last ``nn.Linear``, if shaped like an embedding; those of ``nn.AdaptiveLogSoftmaxWithLoss`` | ``preconditioner=None`` |
    | ``"norm"`` | a parameter of a normalisation of torch's, or of a class whose name ends in ``Norm`` | ``weight_decay=0.0`` |
    | ``"bias"`` | named ``...bias``, or with fewer than two dimensions | ``weight_decay=0.0`` |

    ``kinds`` replaces the options of those it names; ``kinds=None`` is no kinds at all. Everything else has the options of the
    optimizer and is the first group; then come rules and kinds in order. ``opt.plan()`` shows what took a parameter.

    >>> import torch, lather
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 24), torch.nn.LayerNorm(24))
    >>> opt = lather.from_adamw(lather.route(model, [(r"^1\\.weight", {"split": 3})]), lr=3e-4, weight_decay=0.1)
    >>> for row in opt.plan().params:
    ...     print(row.name, row.method, row.blocks, row.rule)
    1.weight shampoo 3 rule 1: ^1\\.weight
    0.weight adam 1 kind: embedding
    2.weight adam 1 kind: norm
    2.bias adam 1 kind: norm
    1.bias adam 1 kind: bias
    """  # noqa: E501
    found = _census(model)
    rules = _checked(list(rules))
    patterns = [re.compile(pattern) for pattern, _ in rules]
    options: dict[int | str | None, Options] = {None: {}}
    options |= {i: given for i, (_, given) in enumerate(rules)}
    options |= {kind: given for kind, given in _kinds(kinds).items() if isinstance(model, nn.Module)}
    parts: dict[int | str | None, list[tuple[str, Tensor]]] = {key: [] for key in options}
    for item in found:
        key = _first(patterns, item)
        parts[_kind(item, options) if key is None else key].append((item.names[0], item.param))
    for i in range(len(patterns)):
        if not parts[i]:
            raise ValueError(_unused(i, patterns, found))
    if missing := [kind for kind in kinds or () if not parts.get(kind)]:
        raise ValueError(
            f"kinds has options for {missing[0]!r}, but no parameter that is left by the rules is of that kind; leave it out"
            + ("" if isinstance(model, nn.Module) else ", or pass the model itself: names alone do not tell kinds")
        )
    return [{"params": part, **options[key], "rule": _label(key, patterns)} for key, part in parts.items() if part]


def is_kind(group: Mapping[str, Any]) -> bool:
    """Whether a group was made for a kind of parameters."""
    return str(group.get("rule", "")).startswith("kind: ")


def _label(key: int | str | None, patterns: Sequence[re.Pattern[str]]) -> str:
    if key is None:
        return "no rule"
    return f"rule {key + 1}: {patterns[key].pattern}" if isinstance(key, int) else f"kind: {key}"


def _census(model: nn.Module | Iterable[tuple[str, Tensor]]) -> list[_Named]:
    """Every parameter once, in order."""
    pairs = list(model.named_parameters(remove_duplicate=False)) if isinstance(model, nn.Module) else list(model)
    found: dict[int, _Named] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            raise ValueError(
                f"rules go by name, but there is a {type(pair).__name__} without one; pass the model, or "
                "model.named_parameters() instead of model.parameters()"
            )
        name, param = pair
        found.setdefault(id(param), _Named(param, [])).names.append(name)
    wrapped = all(WRAPPERS.sub("", name).startswith("module.") for name, _ in pairs)  # DDP's name for all of the model
    for item in found.values():
        names = [WRAPPERS.sub("", name) for name in item.names]
        item.plain = [name.removeprefix("module.") for name in names] if wrapped else names
    if isinstance(model, nn.Module):
        _look_at_modules(model, found)
    return list(found.values())


def _look_at_modules(model: nn.Module, found: Mapping[int, _Named]) -> None:
    linears = []
    for module in model.modules():
        for param in module.parameters(recurse=False):
            found[id(param)].owners.append(module)
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            for param in module.parameters():
                found[id(param)].head = True
        if isinstance(module, nn.Linear):
            linears.append(module)
    tables = {tuple(item.param.shape) for item in found.values() if _is_embedding(item)}
    if linears and tuple(linears[-1].weight.shape) in tables and id(linears[-1].weight) in found:
        found[id(linears[-1].weight)].head = True


def _is_embedding(item: _Named) -> bool:
    return any(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) for owner in item.owners)


def _is_head(item: _Named) -> bool:
    return item.head and item.param.dim() > 1


def _is_norm(item: _Named) -> bool:
    named = (re.search(r"norm(\d+d)?$", type(owner).__name__, re.IGNORECASE) for owner in item.owners)
    return any(isinstance(owner, NORMS) for owner in item.owners) or any(named)


def _is_bias(item: _Named) -> bool:
    return item.param.dim() < 2 or item.names[0].endswith("bias")


TESTS: dict[str, Callable[[_Named], bool]] = {"embedding": _is_embedding, "head": _is_head, "norm": _is_norm, "bias": _is_bias}


def _kind(item: _Named, known: Iterable[int | str | None]) -> str | None:
    """The first that it is of those that are known."""
    return next((kind for kind, test in TESTS.items() if kind in known and test(item)), None)


def _kinds(given: Mapping[str, Options] | None) -> dict[str, Options]:
    if given is None:
        return {}
    for kind, options in given.items():
        if kind not in KINDS:
            raise ValueError(f"kinds has the unknown kind {kind!r}; there are {', '.join(map(repr, KINDS))}")
        _check_options(options, f"kind {kind!r}")
    return KINDS | dict(given)


def _checked(rules: Rules) -> Rules:
    """The rules, if they are well formed."""
    for number, rule in enumerate(rules, 1):
        if not (isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], (str, re.Pattern))):
            raise ValueError(f"rule {number} is {rule!r}; it must be a pair such as ('experts', {{'batch_dims': 1}})")
        try:
            re.compile(rule[0])
        except re.error as error:
            raise ValueError(f"rule {number} has {rule[0]!r}, which is no regular expression: {error}") from error
        _check_options(rule[1], f"rule {number}")
    return rules


def _check_options(options: Any, where: str) -> None:
    if not isinstance(options, Mapping):
        raise ValueError(f"{where} has {options!r} for options; they must be a mapping such as {{'lr': 1e-4}}")
    for name in options:
        if name not in OPTIONS and name not in OF_PRESETS:  # whoever takes the groups refuses others' names
            raise ValueError(f"{where} has the unknown option {name!r}{hint(name)}")


def _matches(pattern: re.Pattern[str], item: _Named) -> bool:
    return any(pattern.search(name) for name in (*item.names, *item.plain))


def _first(patterns: Sequence[re.Pattern[str]], item: _Named) -> int | None:
    return next((i for i, pattern in enumerate(patterns) if _matches(pattern, item)), None)


def _unused(number: int, patterns: Sequence[re.Pattern[str]], found: Sequence[_Named]) -> str:
    """Why a rule has no parameter, and what to do."""
    rule = f"rule {number + 1}, {patterns[number].pattern!r},"
    if takers := {_first(patterns, item) for item in found if _matches(patterns[number], item)}:
        before = ", ".join(f"rule {i + 1}" for i in range(number) if i in takers)
        return f"{rule} has no effect: {before} comes first and takes all that it matches; put it before that"
    if not found:
        return f"{rule} matches no parameter: there are none at all"
    near = _nearest(patterns[number].pattern, [name for item in found for name in item.plain])
    return f"{rule} matches no parameter; the nearest names are " + ", ".join(map(repr, near))


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """The three names of which a part comes closest to a pattern; of those that differ in numbers only, the first."""
    matcher = difflib.SequenceMatcher(b=re.sub(r"\\[a-zA-Z]|[\\^$*+?()\[\]{}|]", "", pattern))

    def likeness(text: str) -> float:
        matcher.set_seq1(text)
        return matcher.ratio()

    def score(name: str) -> tuple[float, float]:
        parts = name.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        return max(map(likeness, runs)), likeness(name)  # many have a last part such as "weight" in common

    families: dict[str, str] = {}
    for name in names:
        families.setdefault(re.sub(r"\d+", "0", name), name)
    return sorted(families.values(), key=score, reverse=True)[:3]
