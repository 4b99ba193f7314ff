"""Optimizers by name. A recipe makes them from a model, a learning rate and options, and has a grid of learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import lather
from lather.routing import NOTHING

Optimizers = list[torch.optim.Optimizer]  # all of them step, each on parameters of its own
Make = Callable[..., Optimizers]  # (model, lr, **options)


class Recipe(NamedTuple):
    make: Make
    options: Mapping[str, Any]
    rates: tuple[float, ...]
    constant: bool = False  # no schedule but the warm-up

    def why_not(self) -> str | None:
        """What lather, or a torch that is too old, says against it, if it does."""
        options = {name: value for name, value in self.options.items() if name not in ("rules", "kinds")}
        try:
            self.make(nn.ModuleDict({"layers": nn.Linear(2, 2), "head": nn.Linear(2, 2)}), 1e-3, **options)
        except (AttributeError, TypeError, ValueError) as error:
            return str(error)
        return None

    def varied(self, options: Mapping[str, Any], factors: tuple[float, ...] = (1.0,)) -> Recipe:
        """Other options beside, and the grid times some factors."""
        rates = tuple(rate * factor for rate in self.rates for factor in factors)
        return self._replace(options={**self.options, **options}, rates=rates)


def powers(first: float, count: int) -> tuple[float, ...]:
    """A grid of factors of two."""
    return tuple(first * 2**k for k in range(count))


def adamw(model: nn.Module, lr: float, decay_norms: bool = True, **options: Any) -> Optimizers:
    vectors = [p for p in model.parameters() if p.dim() < 2 and not decay_norms]
    others = [p for p in model.parameters() if p.dim() >= 2 or decay_norms]
    groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, fused=True, **options)]


def sgd(model: nn.Module, lr: float, **options: Any) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=lr, fused=True, **options)]


ALIKE = {"kinds": None}  # options with which lather treats all parameters alike


def shampoo(model: nn.Module, lr: float, rules: Any = (), kinds: Any = NOTHING, **options: Any) -> Optimizers:
    """``lather.Shampoo(model)``, or with rules for parameters, other options for kinds, or with ``kinds=None`` all alike."""
    return [lather.Shampoo(lather.route(model, rules, kinds=kinds), lr=lr, **options)]


def from_sgd(model: nn.Module, lr: float, kinds: Any = NOTHING, **options: Any) -> Optimizers:
    return [lather.from_sgd(lather.route(model, kinds=kinds), lr=lr, **options)]


def hidden(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The matrices of the layers, and everything else: embeddings, heads, norms."""
    inside = {name: p for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2}
    return inside, {name: p for name, p in model.named_parameters() if name not in inside}


def muon(model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float) -> Optimizers:
    """torch's, with AdamW's update size, so that one learning rate is for both."""
    matrices, others = hidden(model)
    return [
        torch.optim.Muon(matrices.items(), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others.items(), lr=lr, fused=True, betas=betas, weight_decay=weight_decay),
    ]


def lather_muon(model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, **options: Any) -> Optimizers:
    """The same by lather."""
    matrices, others = ({"params": list(part.items())} for part in hidden(model))
    scale, adam = {"adjust_lr_fn": "match_rms_adamw"}, {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    groups = [matrices, others | {"preconditioner": None}]
    return [lather.muon(groups, lr=lr, weight_decay=weight_decay, adamw=adam, **scale | options)]
