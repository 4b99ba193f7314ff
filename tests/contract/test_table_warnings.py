"""Parameters without a model: what looks like a table or a head is warned of, once."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lather


def of(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def found(params: Any, make: Any = lather.Shampoo, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(params, **options)
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


GPT2 = [of(50257, 768), of(1024, 768), *(of(*s) for _ in range(3) for s in ((2304, 768), (768, 768), (3072, 768), (768, 3072)))]
LLAMA = [of(32000, 4096), *(of(*s) for _ in range(3) for s in ((11008, 4096), (4096, 11008))), of(32000, 4096)]
TABLES: dict[str, Any] = {
    "by shape": GPT2,
    "table and head": LLAMA,
    "groups": [{"params": GPT2[1:]}, {"params": GPT2[:1], "weight_decay": 0.0}],
    "many classes": [of(21841, 768), of(768, 768)],
    "by name": [("model.embed_tokens.weight", of(40, 8)), ("model.layers.0.mlp.up_proj.weight", of(24, 8))],
    "by another name": [("_orig_mod.transformer.wte.weight", of(40, 8)), ("transformer.h.0.mlp.weight", of(24, 8))],
    "a plain parameter": [("token_embedding", of(40, 8))],
    "a head with a bias": [("lm_head.weight", of(40, 8)), ("lm_head.bias", of(40))],
}
OTHERS: dict[str, Any] = {
    "wide layers": [of(16384, 2048) for _ in range(18)],  # of Gemma
    "fused gates": [of(57344, 8192) for _ in range(3)],
    "one wide layer": [of(8192, 2048), of(2048, 8192)],
    "flat inputs": [of(512, 12288)],
    "a small model": [of(40, 2), of(4096, 64)],
    "convolutions": [of(8192, 64, 3, 3)],
    "vectors": [of(50257)],
    "a linear layer called so": [("embed.weight", of(64, 3)), ("embed.bias", of(64))],
    "a layer of a network called so": [("time_embed.0.weight", of(512, 128)), ("patch_embed.proj.weight", of(64, 48))],
    "frozen": [of(50257, 768).requires_grad_(False), of(768, 768)],
    "adapters": [("base.wte.lora_embedding_A.default", of(4, 50257)), ("h.0.attn.lora_A.default.weight", of(4, 768))],
}


@pytest.mark.parametrize("make", [lather.Shampoo, lather.from_adamw, lather.muon, lather.soap, lather.distributed_shampoo])
@pytest.mark.parametrize("case", TABLES)
def test_tables(case, make):
    (message,) = found(TABLES[case], make)
    assert "lather.route(model)" in message and "pass the model" in message and "OptimizerFactory" in message
    if isinstance(TABLES[case][0], tuple):
        assert TABLES[case][0][0] in message


@pytest.mark.parametrize("make", [lather.Shampoo, lather.from_adamw, lather.muon])
@pytest.mark.parametrize("case", OTHERS)
def test_other_parameters(case, make):
    assert not found(OTHERS[case], make)


def test_who_chose_is_not_warned():
    model = nn.ModuleDict({"words": nn.Embedding(9000, 8), "layer": nn.Linear(8, 8)})
    assert len(found(model.parameters())) == len(found(model.named_parameters())) == 1
    assert not found(model)
    assert not found(model, lather.muon)
    assert not found(lather.route(model))
    assert not found(lather.route(model, kinds=None))  # all alike, on request
    assert not found(lather.route(model.named_parameters(), [("words", {"lr": 0.1})]))
    assert not found(model.parameters(), preconditioner=None)
    assert not found(model.parameters(), start_preconditioning_step=math.inf)
    groups = [{"params": [model["words"].weight], "preconditioner": None}, {"params": list(model["layer"].parameters())}]
    assert not found(groups)
