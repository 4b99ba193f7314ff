"""The transformer that benchmarks and experiments train, and its loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = [y.view(batch, length, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)]
        mixed = scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens [batch, length] to logits: GPT-2, or with `tied=False, bias=False` the byte-level model."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int, *, tied=True, bias=True):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, vocab, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return linear(self.norm(h), self.token.weight if self.head is None else self.head.weight)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy in nats; the model runs in bfloat16."""
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = model(x)
    return cross_entropy(logits.float().flatten(0, -2), y.flatten())
