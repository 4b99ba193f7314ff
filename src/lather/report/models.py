"""Parameter shapes of well-known models, generated from their hyperparameters.

For plans and benchmarks that need the shapes of a model and nothing else of it. Shapes are those of the published
models, weights stored as ``(outputs, inputs)``; names are ours, the same for the same part of every transformer. What
has no parameters (rotary embeddings) or takes no gradient (running statistics) is left out; a tied head is not listed
twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

Shapes = dict[str, tuple[int, ...]]


def num_params(shapes: Shapes) -> int:
    """Scalars in all parameters together.

    >>> num_params({"weight": (3, 2), "bias": (3,)})
    9
    """
    return sum(math.prod(shape) for shape in shapes.values())


def _affine(name: str, *shape: int) -> Shapes:
    """A weight, and a bias for its first dimension: a linear layer, a convolution or, with one dimension, a norm."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _layer(name: str, width: int) -> Shapes:
    """A pre-norm transformer layer with biases, fused qkv and an MLP four times as wide."""
    return {
        **_affine(f"{name}.ln_1", width),
        **_affine(f"{name}.attn.qkv", 3 * width, width),
        **_affine(f"{name}.attn.proj", width, width),
        **_affine(f"{name}.ln_2", width),
        **_affine(f"{name}.mlp.up", 4 * width, width),
        **_affine(f"{name}.mlp.down", width, 4 * width),
    }


def gpt2(layers: int = 12, width: int = 768, vocab: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2, by default the one of 124M, with a tied head.

    >>> gpt2()["h.11.attn.qkv.weight"]
    (2304, 768)
    """
    shapes: Shapes = {"wte": (vocab, width), "wpe": (context, width)}
    for i in range(layers):
        shapes |= _layer(f"h.{i}", width)
    return shapes | _affine("ln_f", width)


def vit(layers: int = 12, width: int = 768, patch: int = 16, image: int = 224, classes: int = 1000) -> Shapes:
    """A vision transformer with a class token and learned positions, by default ViT-B/16.

    >>> shapes = vit()
    >>> shapes["patch.weight"], shapes["position"]
    ((768, 3, 16, 16), (1, 197, 768))
    """
    tokens = 1 + (image // patch) ** 2
    shapes: Shapes = {"class_token": (1, 1, width), "position": (1, tokens, width)}
    shapes |= _affine("patch", width, 3, patch, patch)
    for i in range(layers):
        shapes |= _layer(f"h.{i}", width)
    return shapes | _affine("ln_f", width) | _affine("head", classes, width)


def _llama_layer(name: str, width: int, kv_width: int, mlp: int) -> Shapes:
    return {
        f"{name}.ln_1.weight": (width,),
        f"{name}.attn.q.weight": (width, width),
        f"{name}.attn.k.weight": (kv_width, width),
        f"{name}.attn.v.weight": (kv_width, width),
        f"{name}.attn.proj.weight": (width, width),
        f"{name}.ln_2.weight": (width,),
        f"{name}.mlp.gate.weight": (mlp, width),
        f"{name}.mlp.up.weight": (mlp, width),
        f"{name}.mlp.down.weight": (width, mlp),
    }


def llama(layers: int, width: int, mlp: int, heads: int = 32, kv_heads: int = 8, vocab: int = 128256, tied: bool = False) -> Shapes:
    """A Llama: no biases, separate q, k and v, ``heads / kv_heads`` query heads to a key head, a gated MLP.

    >>> llama(layers=1, width=64, mlp=96, heads=4, kv_heads=2, vocab=10)["h.0.attn.k.weight"]
    (32, 64)
    """
    shapes: Shapes = {"wte": (vocab, width)}
    for i in range(layers):
        shapes |= _llama_layer(f"h.{i}", width, width // heads * kv_heads, mlp)
    head: Shapes = {} if tied else {"head.weight": (vocab, width)}
    return shapes | {"ln_f.weight": (width,)} | head


def _conv_norm(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, **_affine(f"{name}.bn", shape[0])}


def _bottleneck(name: str, inputs: int, width: int, project: bool) -> Shapes:
    """1x1 down to ``width``, 3x3, 1x1 up to four times that, and a 1x1 projection of the shortcut where asked for."""
    return {
        **_conv_norm(f"{name}.conv1", width, inputs, 1, 1),
        **_conv_norm(f"{name}.conv2", width, width, 3, 3),
        **_conv_norm(f"{name}.conv3", 4 * width, width, 1, 1),
        **(_conv_norm(f"{name}.downsample", 4 * width, inputs, 1, 1) if project else {}),
    }


def resnet50(classes: int = 1000) -> Shapes:
    """ResNet-50 for ImageNet.

    >>> resnet50()["layer4.2.conv2.weight"]
    (512, 512, 3, 3)
    """
    shapes, inputs = _conv_norm("conv1", 64, 3, 7, 7), 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            shapes |= _bottleneck(f"layer{stage}.{block}", inputs, width, project=block == 0)
            inputs = 4 * width
    return shapes | _affine("fc", classes, inputs)


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "vit-b-16": vit,
    "gpt2": gpt2,
    "gpt2-tiny": partial(gpt2, layers=4, width=128, vocab=512, context=64),  # for a CPU
    "llama-953m": partial(llama, layers=16, width=2048, mlp=5632, kv_heads=32, vocab=32000),  # as many keys as queries
    "llama-1b": partial(llama, layers=16, width=2048, mlp=8192, tied=True),  # Llama 3.2
    "llama-8b": partial(llama, layers=32, width=4096, mlp=14336),  # Llama 3
    "llama-70b": partial(llama, layers=80, width=8192, mlp=28672, heads=64),  # Llama 3
}
