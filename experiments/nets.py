"""The two networks for images of 32 x 32; the byte-level transformer is that of the benchmarks."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn
from torch.nn.functional import relu

from benchmarks.models import Layer


class Residual(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.around = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.around(x))


class ResNet18(nn.Module):
    """He et al.'s ResNet-18 for small images: a 3 x 3 stem and no pooling after it; 11.2M parameters at a width of 64."""

    def __init__(self, width: int = 64, classes: int = 10):
        super().__init__()
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        blocks = []
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            blocks += [Residual(inputs, outputs, 1 if i == 0 else 2), Residual(outputs, outputs, 1)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(relu(self.norm(self.stem(x)))).mean((2, 3)))


class VisionTransformer(nn.Module):
    """Patches as tokens, layers with norms before, the mean of the tokens to a linear head; 4.8M parameters as it stands."""

    def __init__(self, side: int = 32, patch: int = 4, layers: int = 6, width: int = 256, heads: int = 4, classes=10):
        super().__init__()
        self.patch, tokens = patch, (side // patch) ** 2
        self.embed, self.position = nn.Linear(3 * patch * patch, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width, heads, bias=False, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        for name, p in self.layers.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(patches(x, self.patch)) + self.position.weight
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h).mean(1))


def patches(x: Tensor, size: int) -> Tensor:
    """[n, 3, side, side] to [n, patches, 3 * size * size]."""
    n, channels, side, _ = x.shape
    cut = x.reshape(n, channels, side // size, size, side // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * size * size)
