"""Kinds of parameters of a model: by what the model and its modules say, then by shapes, then by names.

``docs/routing.md`` has the table of kinds. ``tests/presets/test_routing_table.py`` has the kind of each parameter of many
architectures. A kind is found for one place of a parameter: a module and a name in it. A tied parameter has several places, and
the kinds of all of them.
"""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .runtime.parameters import WRAPPERS
from .settings import is_preconditioned

Options = Mapping[str, Any]

KINDS: dict[str, Options] = {  # a parameter of several kinds has the options of the first
    "position": {"preconditioner": None, "weight_decay": 0.0},
    "embedding": {"preconditioner": None},
    "head": {"preconditioner": None},
    "router": {"preconditioner": None},
    "depthwise": {"preconditioner": None},
    "norm": {"weight_decay": 0.0},
    "bias": {"weight_decay": 0.0},
    "fused": {},  # and a split
    "experts": {"batch_dims": 1},
}
OF_MATRICES = ("fused", "experts")
PARAMETRIZED = re.compile(r"(?<![^.])parametrizations\.(\w+)\.original\d*$")
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)

POSITIONS = re.compile(
    r"(^|_)(pos|wpe|ape|positions?|positional|rpb)(_(?!proj)|$)|(^|_)rel(ative)?_\w*(pos|bias|table|dist|height|width)"
)
RELATIVE = re.compile(r"(^|_)(rel|relative|distance)(_(?!proj)|$)")  # of tables only
QUERIES = re.compile(r"^(latents?(_query|_\dd)?|queries|prompts?|probe)$|^quer(y|ies)_(embed|pos|feat|tokens?)")
TOKENS = re.compile(r"^(?!.*embed).*tokens?$")  # of plain parameters only: an embedding that is called `token` holds words
EMBEDDINGS = re.compile(r"(^|_)(emb|embeds?|embeddings?|embedding_table|wte|w_e|codebooks?|codevectors)$")
HEADS = re.compile(r"(^|_)lm_heads?$|^(embed_out|unembed|unembedding|w_u)$")
INPUTS = re.compile(r"^embed_(tokens|in)$")  # names that matter only without a model, whose modules tell more
LIKELY_HEADS = re.compile(r"(^|_)(heads?|logits)$|^(decoder|classifier|generator|output(_layer|_projection)?)$")
EXPERTS = re.compile(r"(^|_)experts?(_|$)|(^|_)moe$")
QKV = re.compile(r"^(w?qkv|to_qkv|c_attn|qkv_proj)$")  # queries, then keys, then values; `query_key_value` interleaves them

NUM_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
NUM_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


@dataclass(frozen=True, eq=False)
class _Place:
    """A parameter where a module has it. ``above`` is this module and those around it, the nearest first."""

    name: str  # in the whole model, without what wrappers and parametrizations add
    param: Tensor
    above: list[nn.Module]
    is_magnitude: bool  # of a weight normalisation

    @property
    def module(self) -> nn.Module:
        return self.above[0]

    @cached_property
    def words(self) -> list[str]:
        """The parts of the name that are not numbers."""
        return [word for word in self.name.lower().split(".") if not word.isdecimal()] or [""]

    @property
    def leaf(self) -> str:
        return self.words[-1]

    @property
    def word(self) -> str:
        """The part of the name that tells most."""
        return _word_of(self.words)

    @property
    def order(self) -> int:
        return sum(size > 1 for size in self.param.shape)

    @property
    def is_bare(self) -> bool:
        """Whether the parameter has a name of its own, instead of being the weight of a layer."""
        return self.leaf not in ("", "weight") and not isinstance(self.module, (nn.Linear, _ConvNd))

    @property
    def is_table(self) -> bool:
        known = isinstance(self.module, (nn.Embedding, nn.EmbeddingBag))
        return known or (self.leaf == "weight" and self.param.dim() == 2 and type(self.module).__name__.endswith("Embedding"))


def _word_of(words: list[str]) -> str:
    return words[-2] if words[-1] == "weight" and len(words) > 1 else words[-1]


def kinds_of(model: nn.Module) -> dict[int, dict[str, Options]]:
    """The kinds of each parameter, by its ``id``, and the options of each kind."""
    places = list(_places(model))
    found: dict[int, dict[str, Options]] = {id(place.param): {} for place in places}
    for place in places:
        for kind, is_kind in RECOGNISED.items():
            if is_kind(place) and (kind == "norm" or not place.is_magnitude):
                found[id(place.param)].setdefault(kind, {**KINDS[kind], **_more(kind, place)})
    for kind, weight in _told_by(model):
        if id(weight) in found:
            found[id(weight)][kind] = KINDS[kind]
    for place in _heads(places, found):
        found[id(place.param)]["head"] = KINDS["head"]
    return found


def _places(model: nn.Module) -> Iterator[_Place]:
    modules = dict(model.named_modules())
    for prefix, module in modules.items():
        for leaf, param in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}".removeprefix(".")
            is_magnitude = name.endswith(".original0") and sum(size > 1 for size in param.shape) < 2
            if re.search(r"_[gv]$", leaf) and hasattr(module, leaf[:-1] + "g") and hasattr(module, leaf[:-1] + "v"):
                name, is_magnitude = name[:-2], leaf.endswith("g")  # of the older `nn.utils.weight_norm`
            if leaf.endswith("_orig") and (hasattr(module, leaf[:-4] + "mask") or hasattr(module, leaf[:-4] + "u")):
                name = name.removesuffix("_orig")  # of `nn.utils.prune` and the older `nn.utils.spectral_norm`
            name = PARAMETRIZED.sub(r"\1", name)
            around = name.split(".")[:-1]  # the module that has the parameter, or would have it without a parametrization
            above = [modules[".".join(around[:i])] for i in range(len(around), -1, -1)]
            yield _Place(WRAPPERS.sub("", name), param, above, is_magnitude)


def _told_by(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tables and heads that modules name themselves, as those of transformers do."""
    for module in model.modules():
        for kind, method in (("embedding", "get_input_embeddings"), ("head", "get_output_embeddings")):
            try:
                layer = getattr(module, method)()
            except Exception:
                continue
            for some in layer if isinstance(layer, nn.ModuleList) else [layer]:
                weight = getattr(some, "weight", None)  # of a vision model it is a convolution, or a module without weight
                if isinstance(weight, Tensor) and weight.dim() == 2 and (kind == "head" or not isinstance(some, nn.Linear)):
                    yield kind, weight
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            yield from (("head", param) for param in module.parameters() if param.dim() > 1)


def _heads(places: list[_Place], found: Mapping[int, Mapping[str, Options]]) -> Iterator[_Place]:
    """Matrices with a name that only LM heads have, or shaped like the largest table of their width and either named like a
    head or the last linear layer."""
    sizes: dict[int, int] = {}
    for place in places:
        if place.param.dim() == 2 and "embedding" in (kinds := found[id(place.param)]) and "position" not in kinds:
            rows, width = place.param.shape
            sizes[width] = max(rows, sizes.get(width, 0))
    matrices = [place for place in places if place.param.dim() == 2 and not (place.is_table or place.is_magnitude)]
    last = [place for place in matrices if isinstance(place.module, nn.Linear)][-1:]
    for place in matrices:
        shapes = [place.param.shape, place.param.shape[::-1]][: 2 if place.is_bare else 1]
        fits = any(_is_about(rows, sizes.get(width, 0)) for rows, width in shapes)
        same = sizes.get(place.param.shape[1]) == place.param.shape[0]
        if HEADS.search(place.word) or (fits and LIKELY_HEADS.search(place.word)) or (same and place in last):
            yield place


def _is_about(rows: int, vocabulary: int) -> bool:
    """Whether a head has a row for each entry of a table, or all but a few, or is padded."""
    return 0.9 * vocabulary <= rows <= vocabulary + min(vocabulary, 1024)


def _is_position(place: _Place) -> bool:
    """A table of positions, or tokens that no text has, such as those of classes and masks. ``[1, n, d]`` is the same for all
    items of a batch."""
    if place.is_table:
        around = any(POSITIONS.search(word) for word in place.words[-3:-2])
        named = around or any(pattern.search(place.word) for pattern in (POSITIONS, RELATIVE, QUERIES))
        return named or "Position" in type(place.module).__name__
    if not place.is_bare or place.leaf.startswith("w_"):
        return False
    one_for_all = place.param.dim() > 2 and place.param.shape[0] == 1 and place.order > 1 and not _is_expert(place)
    return one_for_all or any(pattern.search(place.word) for pattern in (POSITIONS, QUERIES, TOKENS))


def _is_embedding(place: _Place) -> bool:
    return place.is_table or (place.is_bare and place.order > 1 and bool(EMBEDDINGS.search(place.leaf)))


def _is_router(place: _Place) -> bool:
    if _is_bias(place):
        return False
    gate, count = place.word in ("gate", "wg", "w_gate", "w_noise"), _first(place.module, NUM_EXPERTS)
    told = any("router" in word for word in place.words) or (gate and count in place.param.shape)
    classes = (type(module).__name__ for module in place.above[:2])  # a router may be a module with a linear layer
    beside = gate and any(hasattr(module, "experts") for module in place.above[1:4])
    return told or beside or any(re.search(r"(Router|Gating|MoE\w*Gate)$", name) for name in classes)


def _is_depthwise(place: _Place) -> bool:
    module = place.module
    return isinstance(module, _ConvNd) and place.leaf == "weight" and module.groups == module.in_channels > 1


def _is_norm(place: _Place) -> bool:
    named = re.search(r"norm(\d+d)?$", type(place.module).__name__, re.IGNORECASE)
    return isinstance(place.module, NORMS) or bool(named) or place.is_magnitude


def _is_bias(place: _Place) -> bool:
    """A vector, or vectors that are stacked; ``A_log`` are the rates of state spaces, and ``D`` what passes by them."""
    vector = place.param.dim() < 2 or (place.is_bare and place.order < 2)
    states = any(leaf.startswith("A_log") for leaf, _ in place.module.named_parameters(recurse=False))
    return vector or bool(re.search(r"bias(es)?$|^bias_", place.leaf) or (states and re.search(r"^(a_log|ds?$)", place.leaf)))


def _is_expert(place: _Place) -> bool:
    """``[experts, a, b]``, or in a module of experts that says how many there are, ``[experts * a, b]``."""
    if isinstance(place.module, (nn.Linear, _ConvNd)) or re.search(r"experts?\.\d+\.", place.name):
        return False
    count, size = _first(place.module, NUM_EXPERTS), place.param.shape
    inside = any(EXPERTS.search(word) for word in place.words)
    if place.param.dim() == 3:
        named = inside or re.search(r"(?i)(experts?|moe)$", type(place.module).__name__)
        return size[0] == count if count is not None else bool(named)
    return place.param.dim() == 2 and inside and count is not None and size[0] > count != size[1] and size[0] % count == 0


RECOGNISED: dict[str, Callable[[_Place], bool]] = {
    "position": _is_position,
    "embedding": _is_embedding,
    "router": _is_router,
    "depthwise": _is_depthwise,
    "norm": _is_norm,
    "bias": _is_bias,
    "fused": lambda place: bool(_split(place)),
    "experts": _is_expert,
}


def _more(kind: str, place: _Place) -> Options:
    """Options that depend on the parameter."""
    if kind in ("norm", "bias") and place.order > 1:
        return {"preconditioner": None}  # vectors that are stacked are no matrix
    if kind == "experts" and place.param.dim() == 2:
        return {"batch_dims": 0, "split": _first(place.module, NUM_EXPERTS)}
    return _split(place) if kind == "fused" else {}


def _split(place: _Place) -> Options:
    """How a parameter is made of several matrices: queries, keys and values, or gates and what they gate."""
    module, shape = place.module, place.param.shape
    if isinstance(module, nn.MultiheadAttention):
        return {"split": 3} if place.leaf == "in_proj_weight" else {}
    if place.leaf == "gate_up_proj" and len(shape) == 3 and getattr(module, "is_concatenated", False):
        return {"batch_dims": 1, "split": 2, "split_dim": 2 if getattr(module, "is_transposed", False) else 1}
    dim = 0 if isinstance(module, nn.Linear) else 1 if type(module).__name__ == "Conv1D" else None
    if dim is None or place.leaf != "weight":
        return {}
    along = {"split_dim": 1} if dim else {}
    if place.word == "gate_up_proj":
        return {"split": 2, **along} if shape[dim] % 2 == 0 else {}
    parts = _parts(place, shape[dim]) if QKV.search(place.word) else None
    return {"split": 3 if len(set(parts)) == 1 else parts, **along} if parts else {}


def _parts(place: _Place, size: int) -> tuple[int, int, int] | None:
    """Sizes of queries, keys and values, if a module around says how many heads there are and does not interleave them."""
    told = ((module, heads) for module in place.above if (heads := _first(module, NUM_HEADS, config=True)))
    attention, heads = next(told, (None, 0))
    if attention is None or getattr(attention, "head_first", False) or not getattr(attention, "multi_query", True):
        return None
    own = _first(attention, NUM_KEY_HEADS)
    if place.word == "qkv_proj" and own is None:  # of CodeGen and MiniMax, which interleave
        return None
    keys = own or _first(attention, NUM_KEY_HEADS, config=True) or heads
    width, rest = divmod(size, heads + 2 * keys)
    if rest or width != (_first(attention, ("head_dim",)) or width):
        return None
    return heads * width, keys * width, keys * width


def _first(module: nn.Module, names: tuple[str, ...], config: bool = False) -> int | None:
    """The first of some numbers that a module has, or else its config."""
    sources = (module, getattr(module, "config", None)) if config else (module,)
    found = (getattr(source, name, None) for source in sources for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


# Parameters without a model.

VOCABULARY = 8192  # the fewest rows of a table that is recognised by its shape


def warn_of_tables(groups: Iterable[Mapping[str, Any]]) -> None:
    """Warn once if a parameter of these groups, which come without a model, is preconditioned but looks like a table or a head."""
    named: list[tuple[str, Tensor]] = []
    treated: set[int] = set()
    for group in groups:
        named += zip(group.get("param_names") or [""] * len(group["params"]), group["params"], strict=True)
        if is_preconditioned(group):
            treated |= {id(p) for p in group["params"] if p.requires_grad}
    if found := next(((name, p) for name, p in _tables(named) if id(p) in treated), None):
        name, p = found
        warnings.warn(
            f"a parameter of shape {tuple(p.shape)}{name and ', ' + name + ','} looks like an embedding or an LM head, and it will "
            "be preconditioned. These train better without: pass the model instead of its parameters, or param groups from "
            "lather.route(model). For transformers' Trainer there is lather.integrations.transformers.OptimizerFactory",
            stacklevel=_levels(),
        )


def _tables(named: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Matrices with the name of a table or a head, or with the shape of one.

    A matrix that is called an embedding is a linear layer if it has a bias. Wide layers have the shape of tables too, but there
    are many of them with the same shape.
    """
    names, shapes = {name for name, _ in named}, Counter(p.shape for _, p in named)
    for name, p in named:
        if p.dim() != 2:
            continue
        word = _word_of(WRAPPERS.sub("", name.lower()).split("."))
        is_linear = f"{name.removesuffix('weight')}bias" in names
        is_called = HEADS.search(word) or INPUTS.search(word) or (EMBEDDINGS.search(word) and not is_linear)
        rows, columns = p.shape
        if is_called or (rows >= VOCABULARY and rows > 4 * columns and shapes[p.shape] <= 2):
            yield name, p


def _levels() -> int:
    """The ``stacklevel`` with which a warning of our caller points to the line that called lather."""
    package, frame, levels = __name__.partition(".")[0], sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, levels = frame.f_back, levels + 1
    return levels
