"""Parameter shapes of well-known models, generated from their hyperparameters."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]


def gpt2(layers: int = 12, width: int = 768, vocab: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2 124M with a tied head."""
    shapes: Shapes = {"wte": (vocab, width), "wpe": (context, width)}
    for i in range(layers):
        shapes |= {
            f"h.{i}.ln_1.weight": (width,),
            f"h.{i}.ln_1.bias": (width,),
            f"h.{i}.attn.qkv.weight": (3 * width, width),
            f"h.{i}.attn.qkv.bias": (3 * width,),
            f"h.{i}.attn.proj.weight": (width, width),
            f"h.{i}.attn.proj.bias": (width,),
            f"h.{i}.ln_2.weight": (width,),
            f"h.{i}.ln_2.bias": (width,),
            f"h.{i}.mlp.up.weight": (4 * width, width),
            f"h.{i}.mlp.up.bias": (4 * width,),
            f"h.{i}.mlp.down.weight": (width, 4 * width),
            f"h.{i}.mlp.down.bias": (width,),
        }
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def resnet50(classes: int = 1000) -> Shapes:
    shapes: Shapes = {"conv1.weight": (64, 3, 7, 7), "bn1.weight": (64,), "bn1.bias": (64,)}
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            convs = {"conv1": (width, inputs, 1, 1), "conv2": (width, width, 3, 3), "conv3": (4 * width, width, 1, 1)}
            if block == 0:
                convs["downsample"] = (4 * width, inputs, 1, 1)
            for conv, shape in convs.items():
                shapes |= {f"{name}.{conv}.weight": shape}
                shapes |= {f"{name}.{conv}.bn.weight": shape[:1], f"{name}.{conv}.bn.bias": shape[:1]}
            inputs = 4 * width
    return shapes | {"fc.weight": (classes, inputs), "fc.bias": (classes,)}


def tiny() -> Shapes:
    """For a CPU."""
    return gpt2(layers=4, width=128, vocab=512, context=64)


MODELS = {"gpt2-124m": gpt2, "resnet50": resnet50, "gpt2-tiny": tiny}
