"""Small checkpoints of older versions, which newer ones must load, and what made them.

``python tests/checkpoints/make.py v1`` writes ``v1-shampoo.pt`` and so on beside this file. Each has the parameters and the
optimizer after 6 steps, and the parameters after 4 more. Do this once for every version of the format, with the code of that
version, and never again: a file that is written anew by newer code tests nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lather

FOLDER = Path(__file__).parent
SAVED, END = 6, 10  # steps
BASE: dict[str, Any] = {"lr": 0.05, "eps": 1e-4, "weight_decay": 0.1, "precondition_frequency": 2, "max_preconditioner_dim": 6}
DELAYED = {"refresh_delay": 1, "state_dtype": "bfloat16", "root_dtype": "float32"}


def plain() -> nn.Module:
    """The weight is cut into blocks, and the twins are in one bank."""
    shapes = {"weight": (9, 5), "twin": (5, 4), "twins": (5, 4), "conv": (3, 2, 2), "bias": (7,), "scale": ()}
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})


def wide() -> nn.Module:
    """51 does not divide: version 1 cuts it into 26 and 25, later ones into 32 and 19."""
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in {"wide": (51, 6), "bias": (5,)}.items()})


def layers() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 8, bias=False))


def shampoo(**options: Any) -> Callable[[nn.Module], lather.Shampoo]:
    return lambda model: lather.Shampoo(list(model.named_parameters()), **BASE | options)


def groups(model: nn.Module) -> lather.Shampoo:
    rules = [("weight", {"preconditioner": "kl"}), ("twin", {"lr": 0.02, "graft": "rmsprop"}), ("conv", {"large_dim": "diagonal"})]
    return lather.Shampoo(lather.route(model, rules), **BASE | {"lr": torch.tensor(0.05), "weight_decay_mode": "corrected"})


MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], lather.Shampoo]]] = {
    "shampoo": (plain, shampoo(momentum=0.9, nesterov=True, factors="packed", exponent={2: 0.3})),
    "qr-delayed": (plain, shampoo(root="track", **DELAYED)),
    "kl": (plain, shampoo(preconditioner="kl", weight_decay_mode="independent")),
    "soap": (plain, lambda model: lather.soap(list(model.parameters()), lr=0.02, precondition_frequency=2)),
    "averaging": (plain, shampoo(averaging="schedule_free", betas=(0.0, 0.95))),
    "muon": (layers, lambda model: lather.muon(model, lr=0.02, adamw={"lr": 0.01})),
    "sgd-staggered": (plain, shampoo(graft="sgd", betas=(0.0, 0.95), momentum=0.9, refresh="staggered")),
    "groups": (plain, groups),
    "cut": (wide, lambda model: lather.Shampoo(list(model.named_parameters()), lr=0.05, max_preconditioner_dim=40)),
}


def noise(name: str, step: int, p: Tensor) -> Tensor:
    """The same on every machine."""
    dice = random.Random(f"{name} {step}")
    return torch.tensor([dice.gauss(0.0, 1.0) for _ in range(p.numel())]).view(p.shape)


def build(name: str) -> tuple[nn.Module, lather.Shampoo]:
    """As it is before the first step."""
    model, optimizer = MAKERS[name][0](), MAKERS[name][1]
    for key, p in model.named_parameters():
        p.data = 0.3 * noise(key, 0, p)
    return model, optimizer(model)


def advance(model: nn.Module, opt: lather.Shampoo, first: int, last: int) -> None:
    """Take these steps, at a learning rate that rises and falls."""
    for step in range(first, last + 1):
        for group in opt.param_groups:
            group["lr"] = group["lr"] * (2 + abs(step - 5)) / (2 + abs(step - 4))  # groups may share a tensor
        for key, p in model.named_parameters():
            p.grad = noise(key, step, p)
        opt.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def write(version: str) -> None:
    torch.set_num_threads(1)
    for name in MAKERS:
        path = FOLDER / f"{version}-{name}.pt"
        if path.exists():
            sys.exit(f"{path.name} is there already, and must stay as it is")
        model, opt = build(name)
        advance(model, opt, 1, SAVED)
        torch.save({"model": values(model), "optimizer": opt.state_dict()}, path)
        saved = torch.load(path, weights_only=True)
        advance(model, opt, SAVED + 1, END)
        torch.save(saved | {"after": values(model)}, path)


if __name__ == "__main__":
    write(*sys.argv[1:])
