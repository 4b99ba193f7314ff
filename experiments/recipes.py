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
    told: bool = False  # whether `make` takes the number of steps too

    def why_not(self) -> str | None:
        """What lather, or a torch that is too old, says against it, if it does."""
        options = {name: value for name, value in self.options.items() if name not in ("rules", "kinds")}
        try:
            self.make(nn.ModuleDict({"layers": nn.Linear(2, 2), "head": nn.Linear(2, 2)}), 1e-3, **options)
        except (AttributeError, TypeError, ValueError) as error:
            return str(error)
        return None

    def varied(self, options: Mapping[str, Any], factors: tuple[float, ...] = (1.0,)) -> Recipe:
        """With other options, and the grid times some factors."""
        rates = tuple(rate * factor for rate in self.rates for factor in factors)
        return self._replace(options={**self.options, **options}, rates=rates)


def powers(first: float, count: int) -> tuple[float, ...]:
    """A grid of factors of two."""
    return tuple(first * 2**k for k in range(count))


def adamw(model: nn.Module, lr: float, **options: Any) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=lr, fused=True, **options)]


def sgd(model: nn.Module, lr: float, **options: Any) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=lr, fused=True, **options)]


def given(make: Callable[..., torch.optim.Optimizer]) -> Make:
    """``make(model)``, with options for kinds and rules for names if there are any; ``kinds=None`` treats all parameters alike."""

    def optimizers(model: nn.Module, lr: float, rules: Any = (), kinds: Any = NOTHING, **options: Any) -> Optimizers:
        return [make(lather.route(model, rules, kinds=kinds), lr=lr, **options)]

    return optimizers


shampoo, from_adamw, from_sgd = given(lather.Shampoo), given(lather.from_adamw), given(lather.from_sgd)


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


# The settings of the paper, whatever lather's defaults are.
PAPER: dict[str, Any] = {"exponent": None, "damping": "absolute", "eps": 1e-12, "refresh_warmup": 0.0, "beta3": None}
BETAS = {"betas": (0.9, 0.95)}
DECAY = {"weight_decay": 0.1}


def for_transformers(rates: tuple[float, ...]) -> dict[str, Recipe]:
    """Weight decay is 0.1 for everyone, and AdamW's betas are (0.9, 0.95), also those of the AdamW beside Muon.

    ``shampoo`` is lather given the model, with nothing else set; ``kl`` and ``soap`` are its other methods, without a graft for
    SOAP, as its authors have it. ``paper`` has the settings of the paper.
    """
    ours = Recipe(shampoo, DECAY, rates)
    return {
        "adamw": Recipe(adamw, BETAS | DECAY, rates),
        "muon": Recipe(muon, BETAS | DECAY, rates),
        "lather-muon": Recipe(lather_muon, BETAS | DECAY, rates),
        "soap": ours.varied({"preconditioner": "soap", "graft": None}),
        "kl": ours.varied({"preconditioner": "kl"}),
        "shampoo": ours,
        "from_adamw": Recipe(from_adamw, DECAY, rates),
        "paper": ours.varied(BETAS | PAPER),
    }
