"""Tables agree with the models they are named after."""

from __future__ import annotations

from collections import Counter

import pytest

from lather.report.models import MODELS, load, num_params, shapes_of

PUBLISHED = {  # name: (scalars, tensors); a name given twice would lose a tensor
    "resnet50": (25_557_032, 161),
    "vit-b-16": (86_567_656, 152),
    "gpt2": (124_439_808, 148),
    "llama-1b": (1_235_814_400, 146),
    "llama-8b": (8_030_261_248, 291),
    "llama-70b": (70_553_706_496, 723),
}
OURS = {"gpt2-tiny": (867_072, 52), "llama-953m": (953_223_168, 147)}
COUNTS = PUBLISHED | OURS


def test_every_model_has_its_counts_here():
    assert set(MODELS) == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    table = shapes_of(load(name))
    assert (num_params(table), len(table)) == COUNTS[name]


@pytest.mark.parametrize("name", MODELS)
def test_tables_take_no_memory(name):
    model = load(name)
    assert all(p.is_meta and p.requires_grad and p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet50", {4: 53, 2: 1, 1: 107}),  # 53 convolutions, each with a norm; fc
        ("vit-b-16", {4: 1, 3: 2, 2: 49, 1: 100}),  # four matrices a layer, and the head
        ("gpt2", {2: 50, 1: 98}),  # four matrices a layer, and two embeddings
        ("llama-1b", {2: 113, 1: 33}),  # seven matrices a layer, and one embedding, which is the head too
        ("llama-8b", {2: 226, 1: 65}),
        ("llama-70b", {2: 562, 1: 161}),
    ],
)
def test_tensors_of_each_order(name, expected):
    assert Counter(map(len, shapes_of(load(name)).values())) == expected


@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet50"])
def test_layers_are_alike(name):
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes_of(load(name)).items():
        if key.startswith("h."):
            _, index, part = key.split(".", 2)
            layers.setdefault(index, {})[part] = shape
    assert all(layer == layers["0"] for layer in layers.values())


def test_resnet50_widens_stage_by_stage():
    table = shapes_of(load("resnet50"))
    widths = [shape[0] for key, shape in table.items() if key.endswith("conv3.weight")]
    assert widths == [256] * 3 + [512] * 4 + [1024] * 6 + [2048] * 3
    projected = [key for key in table if key.endswith("downsample.0.weight")]
    assert projected == [f"layer{stage}.0.downsample.0.weight" for stage in (1, 2, 3, 4)]
