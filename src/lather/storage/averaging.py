"""Averaging instead of momentum, elementwise where a parameter lives: Schedule-Free, and generalised primal averaging (GPA).

There are three sequences: ``z`` takes the steps, ``x`` is an average of it, and gradients are taken in between:

    y = (1 - b) z + b x;    z <- z - lr P(y);    x <- (1 - c) x + c z

Parameters hold ``y`` in train mode and ``x`` in eval mode. The *share* ``c`` is constant (``"gpa"``), or a step's share of the
weights of all steps that the parameter has taken (``"schedule_free"``), which makes ``x`` the weighted mean of all ``z``.

[Note: what is kept] Two of the three tell the third. One is ``y``, the parameter; beside it the state has the one that is
farther from it, ``z`` if ``b >= 1/2`` and else ``x``, so the third is ``y`` and at most twice a difference, and rounding is not
magnified. In terms of differences a step is ``z' = z - d``, ``y' = z' + (1 - c) (y - z + b d)``, with ``d = lr P``.

A parameter of fewer bits than the state cannot be ``y``: most moves of an average are below its resolution, and what is lost
in every step would be lost for good. It is ``y`` rounded, and the state has ``y`` too.

In eval mode the state has ``y`` in any case, so that :meth:`Shampoo.train` restores it bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..linalg import from_host
from ..options import averaging_beta, averaging_decay, state_dtype

Group = Mapping[str, Any]
Shares = Mapping[int, float | Tensor]  # by number of the parameter


def is_on(group: Group) -> bool:
    return group["averaging"] is not None


def is_training(group: Group) -> bool:
    """Whether its parameters hold ``y``."""
    return bool(group.get("train_mode", True))


def settle(group: dict[str, Any], *, train: bool) -> None:
    """What a param group holds beside options: its largest learning rate and its mode, or without averaging neither."""
    if is_on(group):
        group.setdefault("top_lr", 0.0)
        group.setdefault("train_mode", train)
    else:
        group.pop("top_lr", None)
        group.pop("train_mode", None)


def kept(group: Group) -> str:
    """What the state has beside ``y``."""
    return "z" if averaging_beta(group) >= 0.5 else "x"


def is_apart(dtype: torch.dtype, group: Group) -> bool:
    """Whether parameters of this dtype are not ``y`` but ``y`` rounded."""
    return is_on(group) and _wide(dtype, group) != dtype


def state_of(dtype: torch.dtype, group: Group) -> dict[str, torch.dtype]:
    """The state in train mode that is shaped like a parameter of this dtype: never of fewer bits than it."""
    roles = ([kept(group)] if is_on(group) else []) + (["y"] if is_apart(dtype, group) else [])
    return dict.fromkeys(roles, _wide(dtype, group))


def _wide(dtype: torch.dtype, group: Group) -> torch.dtype:
    return torch.promote_types(dtype, state_dtype(group))


# Shares.


def empty_sums(n: int, group: Group) -> Tensor:
    """Sums of weights: on the host, unless the learning rate is where reading it would make the host wait."""
    lr = group["lr"]
    device = lr.device if isinstance(lr, Tensor) else torch.device("cpu")
    return torch.zeros(n, dtype=exact_dtype(device), device=device)


def exact_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def constant_share(group: Group) -> float:
    """``c`` of ``"gpa"``."""
    return 1 - averaging_decay(group)


def shares_(sums: Tensor, steps: Sequence[int], active: Sequence[bool], group: Group) -> list[float] | list[Tensor]:
    """``c`` of ``"schedule_free"`` for parameters at these steps, whose weights are added to ``sums`` if they take part.

    ``c_t = w_t / (w_1 + ... + w_t)`` with ``w_t = top^p t^r``, ``top`` the largest learning rate of all steps so far and
    ``p, r = averaging_powers``. While all rates were 0 nothing has moved, and ``c`` is 0.
    """
    (p, r), top = group["averaging_powers"], group["top_lr"]
    top = top.reshape(()).to(sums.device, sums.dtype) if isinstance(top, Tensor) else top
    weights = from_host([float(max(t, 1)) ** r for t in steps], sums, sums.dtype) * top**p
    if all(active):
        sums += weights
        total = sums
    else:
        sums += weights * from_host(active, sums, sums.dtype)
        total = torch.where(from_host(active, sums, torch.bool), sums, sums + weights)
    found = torch.where(total > 0, weights / total, 0.0)
    return found.tolist() if sums.device.type == "cpu" else list(found.unbind())


# The rule.


def step_(y: Tensor, other: Tensor, d: Tensor, go: Tensor, share: float | Tensor, group: Group) -> None:
    """Move by ``d = lr P``, in place on ``y`` and what is kept beside it, where ``go`` is true.

    ``share`` is a number or has one for every element. It is subtracted from 1 before it is rounded to the dtype of ``y``, so
    that both ways give the same bits.
    """
    b, c, rest = averaging_beta(group), _like(share, y), _like(1 - share, y)
    if kept(group) == "z":
        new = other - d
        moved = new + (y - other + d * b) * rest
    else:
        way = y - other  # (1 - b) (z - x)
        new = other + (way / (1 - b) - d) * c
        moved = new + (way - d * (1 - b)) * rest
    torch.where(go, new, other, out=other)
    torch.where(go, moved, y, out=y)


def average(y: Tensor, other: Tensor, group: Group) -> Tensor:
    """``x``, from ``y`` and what is kept beside it."""
    return other + (y - other) / averaging_beta(group) if kept(group) == "z" else other


def unrounded_(y: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """``y`` of parameters that are ``y`` rounded to this dtype; those that somebody has changed since count as they are."""
    return torch.where(y.to(dtype) == w, y, w, out=y)


def _like(share: float | Tensor, y: Tensor) -> float | Tensor:
    return share.to(y.dtype) if isinstance(share, Tensor) else share
