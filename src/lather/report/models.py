"""Models that need no memory: tables of well-known ones, a function of yours, or a folder with a config of transformers.

They are built on torch's meta device, where tensors have shapes and no numbers. That is all that routing and plans look at. The
tables are skeletons: they have the parameters of the published models, in modules of the right kind, and cannot be run. Their
weights are ``(outputs, inputs)``. Names are ours, the same for all transformers.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

Shapes = dict[str, tuple[int, ...]]


def load(text: str) -> nn.Module | Shapes:
    """The model that a text names: a table, ``module:function``, a folder with ``config.json``, or shapes such as ``w=64x32,b=64``.

    Raises ValueError for any other text.

    >>> load("w=64x32, b=64")
    {'w': (64, 32), 'b': (64,)}
    >>> num_params(shapes_of(load("gpt2")))
    124439808
    """
    if text in MODELS:
        return on_meta(MODELS[text])
    if "=" in text:
        return _read_shapes(text)
    if os.path.isdir(text):  # Path.is_dir raises if the name is too long
        return _of_folder(Path(text))
    module, colon, function = text.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        return _of_function(module, function)
    raise ValueError(
        f"there is no model {text!r}; give one of {', '.join(MODELS)}, a function that returns a model as module:function, a "
        "folder with a config.json of transformers, or shapes such as w=64x32,b=64"
    )


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def shapes_of(model: nn.Module | Mapping[str, Any]) -> Shapes:
    """A tied parameter is there once."""
    if isinstance(model, nn.Module):
        return {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {name: tuple(shape) for name, shape in model.items()}


def num_params(shapes: Shapes) -> int:
    """Number of scalars in all parameters together."""
    return sum(math.prod(shape) for shape in shapes.values())


# Sources.


def _read_shapes(text: str) -> Shapes:
    found: Shapes = {}
    for item in map(str.strip, text.split(",")):
        name, _, dims = item.partition("=")
        if not name or "=" not in item or name in found:
            raise ValueError(f"{item!r} is not a new name with a shape, such as w=64x32")
        sizes = [size.strip() for size in dims.split("x")]
        if not all(size.isdecimal() and len(size) < 19 for size in sizes):
            raise ValueError(f"{dims!r} is not a shape, such as 64x32")
        found[name] = tuple(map(int, sizes))
    return found


def _of_function(module: str, function: str) -> nn.Module:
    """What a function returns. One that cannot run on the meta device is run where it likes."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        build: Any = importlib.import_module(module)
        for part in function.split("."):
            build = getattr(build, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module}:{function} cannot be imported: {error}") from error
    try:
        try:
            model = on_meta(build)
        except Exception:
            model = build()
    except Exception as error:
        raise ValueError(f"{module}:{function} must build a model without arguments, but failed: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{module}:{function} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _of_folder(folder: Path) -> nn.Module:
    """A model of transformers, of the class and dtype that its config names, as ``from_pretrained`` makes it."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"the folder {str(folder)!r} has no config.json; give the folder of a model of transformers")
    try:
        import transformers
    except ImportError as error:
        raise ValueError("a config.json needs transformers; pip install transformers") from error
    try:
        names = json.loads(config_file.read_text()).get("architectures") or ["AutoModel"]
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, names[0], None)
        if kind is None:
            raise ValueError(f"transformers {transformers.__version__} has no class {names[0]}")
        build = partial(kind.from_config, config) if names == ["AutoModel"] else partial(kind, config)
        model = on_meta(build).to(getattr(config, "dtype", None) or torch.float32)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"the model of {str(config_file)!r} cannot be built: {error}") from error
    assert isinstance(model, nn.Module)
    return model


# Skeletons.


def _repeat(layers: int, layer: Callable[[], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(layer() for _ in range(layers))


def _attention(heads: int, **parts: nn.Module) -> nn.ModuleDict:
    attention = nn.ModuleDict(parts)
    attention.num_heads = heads  # type: ignore[assignment]  # routing asks for it
    return attention


def _layer(width: int) -> nn.ModuleDict:
    """A pre-norm transformer layer with biases, fused qkv and an MLP four times as wide."""
    fused, out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    attention = _attention(max(1, width // 64), qkv=fused, proj=out)
    mlp = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})
    return nn.ModuleDict({"ln_1": nn.LayerNorm(width), "attn": attention, "ln_2": nn.LayerNorm(width), "mlp": mlp})


def _head(width: int, vocab: int, table: nn.Embedding | None = None) -> nn.Linear:
    """A head, which may be tied to a table."""
    head = nn.Linear(width, vocab, bias=False)
    if table is not None:
        head.weight = table.weight
    return head


def gpt2(layers: int = 12, width: int = 768, vocab: int = 50257, context: int = 1024) -> nn.Module:
    """GPT-2, by default with 124M parameters. The head is tied."""
    tables = {"wte": nn.Embedding(vocab, width), "wpe": nn.Embedding(context, width)}
    last = {"ln_f": nn.LayerNorm(width), "head": _head(width, vocab, tables["wte"])}
    return nn.ModuleDict({**tables, "h": _repeat(layers, partial(_layer, width)), **last})


def vit(layers: int = 12, width: int = 768, patch: int = 16, image: int = 224, classes: int = 1000) -> nn.Module:
    """A vision transformer with a class token and learned positions, by default ViT-B/16."""
    last = {"ln_f": nn.LayerNorm(width), "head": nn.Linear(width, classes)}
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, patch, patch), "h": _repeat(layers, partial(_layer, width)), **last})
    model.class_token = nn.Parameter(torch.empty(1, 1, width))
    model.position = nn.Parameter(torch.empty(1, 1 + (image // patch) ** 2, width))
    return model


def llama(
    layers: int, width: int, mlp: int, heads: int = 32, kv_heads: int = 8, vocab: int = 128256, tied: bool = False
) -> nn.Module:
    """A Llama: no biases, separate q, k and v, grouped queries, a gated MLP."""

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False)

    def layer() -> nn.ModuleDict:
        kv = width // heads * kv_heads
        qkv = {"q": linear(width, width), "k": linear(width, kv), "v": linear(width, kv)}
        attention = _attention(heads, **qkv, proj=linear(width, width))
        gated = nn.ModuleDict({"gate": linear(width, mlp), "up": linear(width, mlp), "down": linear(mlp, width)})
        return nn.ModuleDict({"ln_1": nn.RMSNorm(width), "attn": attention, "ln_2": nn.RMSNorm(width), "mlp": gated})

    table = nn.Embedding(vocab, width)
    last = {"ln_f": nn.RMSNorm(width), "head": _head(width, vocab, table if tied else None)}
    return nn.ModuleDict({"wte": table, "h": _repeat(layers, layer), **last})


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50 for ImageNet: bottlenecks of 1x1, 3x3 and 1x1, with a 1x1 projection of the first shortcut of a stage."""

    def conv(inputs: int, outputs: int, side: int) -> nn.Conv2d:
        return nn.Conv2d(inputs, outputs, side, bias=False)

    def bottleneck(inputs: int, width: int) -> nn.ModuleDict:
        sizes = [(inputs, width, 1), (width, width, 3), (width, 4 * width, 1)]
        parts: dict[str, nn.Module] = {}
        for i, size in enumerate(sizes, start=1):
            parts |= {f"conv{i}": conv(*size), f"bn{i}": nn.BatchNorm2d(size[1])}
        if inputs != 4 * width:
            parts["downsample"] = nn.Sequential(conv(inputs, 4 * width, 1), nn.BatchNorm2d(4 * width))
        return nn.ModuleDict(parts)

    parts: dict[str, nn.Module] = {"conv1": conv(3, 64, 7), "bn1": nn.BatchNorm2d(64)}
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        first, inputs = inputs, 4 * width
        parts[f"layer{stage}"] = nn.ModuleList(bottleneck(first if i == 0 else inputs, width) for i in range(blocks))
    return nn.ModuleDict({**parts, "fc": nn.Linear(inputs, classes)})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "vit-b-16": vit,
    "gpt2": gpt2,
    "gpt2-tiny": partial(gpt2, layers=4, width=128, vocab=512, context=64),  # for a CPU
    "llama-953m": partial(llama, layers=16, width=2048, mlp=5632, kv_heads=32, vocab=32000),  # no grouped queries
    "llama-1b": partial(llama, layers=16, width=2048, mlp=8192, tied=True),  # Llama 3.2
    "llama-8b": partial(llama, layers=32, width=4096, mlp=14336),  # Llama 3
    "llama-70b": partial(llama, layers=80, width=8192, mlp=28672, heads=64),  # Llama 3
}
