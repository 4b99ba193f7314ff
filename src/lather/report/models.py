"""Parameter shapes of well-known models, for plans and benchmarks.

Shapes are those of the published models, with weights as ``(outputs, inputs)``. Names are ours, the same for all transformers.
A tied head is not listed twice.
"""

import math
from collections.abc import Callable
from functools import partial

Shapes = dict[str, tuple[int, ...]]


def num_params(shapes: Shapes) -> int:
    """Number of scalars in all parameters together."""
    return sum(math.prod(shape) for shape in shapes.values())


def _weights(shapes: Shapes) -> Shapes:
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _affine(shapes: Shapes) -> Shapes:
    """A weight and a bias for each: linear layers, convolutions and, with one dimension, norms."""
    return {f"{name}.{part}": s for name, shape in shapes.items() for part, s in (("weight", shape), ("bias", shape[:1]))}


def _repeat(layers: int, layer: Shapes) -> Shapes:
    return {f"h.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}


def _layer(width: int) -> Shapes:
    """A pre-norm transformer layer with biases, fused qkv and an MLP four times as wide."""
    attention: Shapes = {"ln_1": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    return _affine(attention | {"ln_2": (width,), "mlp.up": (4 * width, width), "mlp.down": (width, 4 * width)})


def gpt2(layers: int = 12, width: int = 768, vocab: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2, by default with 124M parameters. The head is tied."""
    tables: Shapes = {"wte": (vocab, width), "wpe": (context, width)}
    return tables | _repeat(layers, _layer(width)) | _affine({"ln_f": (width,)})


def vit(layers: int = 12, width: int = 768, patch: int = 16, image: int = 224, classes: int = 1000) -> Shapes:
    """A vision transformer with a class token and learned positions, by default ViT-B/16."""
    tokens: Shapes = {"class_token": (1, 1, width), "position": (1, 1 + (image // patch) ** 2, width)}
    first, last = _affine({"patch": (width, 3, patch, patch)}), _affine({"ln_f": (width,), "head": (classes, width)})
    return tokens | first | _repeat(layers, _layer(width)) | last


def llama(layers: int, width: int, mlp: int, heads: int = 32, kv_heads: int = 8, vocab: int = 128256, tied: bool = False) -> Shapes:
    """A Llama: no biases, separate q, k and v, grouped queries, a gated MLP."""
    square, kv, up = (width, width), (width // heads * kv_heads, width), (mlp, width)
    attention: Shapes = {"ln_1": (width,), "attn.q": square, "attn.k": kv, "attn.v": kv, "attn.proj": square}
    layer = _weights(attention | {"ln_2": (width,), "mlp.gate": up, "mlp.up": up, "mlp.down": (width, mlp)})
    head: Shapes = {} if tied else {"head": (vocab, width)}
    return {"wte": (vocab, width)} | _repeat(layers, layer) | _weights({"ln_f": (width,)} | head)


def resnet50(classes: int = 1000) -> Shapes:
    """ResNet-50 for ImageNet: bottlenecks of 1x1, 3x3 and 1x1, with a 1x1 projection of the first shortcut of a stage."""
    convs, inputs = {"conv1": (64, 3, 7, 7)}, 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            convs |= {f"{name}.conv1": (width, inputs, 1, 1), f"{name}.conv2": (width, width, 3, 3)}
            convs |= {f"{name}.conv3": (4 * width, width, 1, 1)}
            convs |= {f"{name}.downsample": (4 * width, inputs, 1, 1)} if block == 0 else {}
            inputs = 4 * width
    shapes: Shapes = {}
    for name, shape in convs.items():
        shapes |= _weights({name: shape}) | _affine({f"{name}.bn": shape[:1]})
    return shapes | _affine({"fc": (classes, inputs)})


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "vit-b-16": vit,
    "gpt2": gpt2,
    "gpt2-tiny": partial(gpt2, layers=4, width=128, vocab=512, context=64),  # for a CPU
    "llama-953m": partial(llama, layers=16, width=2048, mlp=5632, kv_heads=32, vocab=32000),  # no grouped queries
    "llama-1b": partial(llama, layers=16, width=2048, mlp=8192, tied=True),  # Llama 3.2
    "llama-8b": partial(llama, layers=32, width=4096, mlp=14336),  # Llama 3
    "llama-70b": partial(llama, layers=80, width=8192, mlp=28672, heads=64),  # Llama 3
}
