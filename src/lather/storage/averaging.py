"""Averaging instead of momentum, where a parameter is stored: Schedule-Free, and generalised primal averaging (GPA).

There are three sequences. ``z`` takes the steps, ``x`` is an average of ``z``, and gradients are taken at ``y`` in between:

    y = (1 - b) z + b x;    z <- z - lr P(y);    x <- (1 - c) x + c z

Parameters hold ``y`` in train mode and ``x`` in eval mode. The *share* ``c`` is constant (``"gpa"``), or a step's share of the
weights of all steps that the parameter has taken (``"schedule_free"``), which makes ``x`` the weighted mean of all ``z``.

[Note: what is kept] Two of the three determine the third. One is ``y``, the parameter. The state has the one that is
farther from it: ``z`` if ``b >= 1/2``, else ``x``. The third is then ``y`` and at most twice a difference, so rounding is not
magnified. In terms of differences a step is ``z' = z - d``, ``y' = z' + (1 - c) (y - z + b d)``, with ``d = lr P``.

A parameter of fewer bits than the state cannot be ``y``: most moves of an average are below its resolution, and would be
lost in every step. It is ``y`` rounded, and the state has ``y`` too.

In eval mode the state always has ``y``, so that :meth:`Shampoo.train` restores it bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..linalg import from_host
from ..settings import Averaging, Settings
from .step import Number, Rate, Tensors
from .tensors import local
from .update import decayed

Views = dict[str, Tensor]


class Averages:
    """All parameters of a run that are averaged: how much of a step goes into the average, and what parameters hold."""

    def __init__(self, groups: Sequence[int], settings: Sequence[Settings], params: Sequence[Tensor], views: Sequence[Views]):
        """``groups`` has the param group of every parameter; ``views`` its state, to which ``weight_sum`` is added."""
        self._settings, self._params, self._views = settings, params, views
        self.members: dict[int, list[int]] = {}  # by param group
        for i, g in enumerate(groups):
            if settings[g].averaging is not None:
                self.members.setdefault(g, []).append(i)
        self._sums: dict[int, Tensor] = {}  # weights of all steps so far, by param group

    def make_sums(self, lrs: Mapping[int, Any]) -> None:
        """Sums of weights, which are state: on the host, unless reading the learning rate would make the host wait."""
        for g, members in self.members.items():
            if _options(self._settings[g]).kind == "schedule_free":
                device = lrs[g].device if isinstance(lrs[g], Tensor) else torch.device("cpu")
                self._sums[g] = torch.zeros(len(members), dtype=exact_dtype(device), device=device)
                for i, value in zip(members, self._sums[g].unbind(), strict=True):
                    self._views[i]["weight_sum"] = value

    def shares(
        self, steps: Sequence[int], grads: Tensors, settings: Sequence[Settings], groups: Sequence[Mapping[str, Any]]
    ) -> dict[int, Number]:
        """How much of the point that a step leads to goes into the average, for every parameter that is averaged."""
        found: dict[int, Number] = {}
        for g, members in self.members.items():
            options = _options(settings[g])
            if g in self._sums:
                now, active = [steps[i] for i in members], [i in grads for i in members]
                found |= zip(members, shares_(self._sums[g], now, active, options, groups[g]["top_lr"]), strict=True)
            else:
                found |= dict.fromkeys(members, 1 - options.decay)
        return found

    def switch(self, g: int, steps: Sequence[int], *, train: bool) -> None:
        """From the points at which gradients are taken to their average, or back."""
        for i in self.members.get(g, ()):
            if not train:
                self._note(i, steps[i])
                self._make_room(i, g, train=False)
            self._hold(i, g, steps[i], train=train)
            if train:
                self._make_room(i, g, train=True)

    def complete(self, steps: Sequence[int], training: Mapping[int, bool]) -> list[Views]:
        """The state with ``y`` also where it is the parameter itself. Loaded, it tells in either mode what parameters are."""
        found = [dict(views) for views in self._views]
        for g, members in self.members.items():
            for i in members:
                if training[g]:
                    self._note(i, steps[i])
                found[i].setdefault("y", self._params[i].detach().clone())
        return found

    def publish(self, state: dict[Tensor, Any]) -> None:
        """Give ``opt.state`` a ``y`` in any mode, because torch looks there for keys: in train mode the parameter itself."""
        for members in self.members.values():
            for i in members:
                state[self._params[i]]["y"] = self._views[i].get("y", self._params[i])

    def before_load(self, training: Mapping[int, bool]) -> None:
        for g, members in self.members.items():
            for i in members:
                self._make_room(i, g, train=training[g])

    def after_load(self, steps: Sequence[int], training: Mapping[int, bool]) -> list[int]:
        """Let parameters hold what their mode calls for; returns those that are ``y`` and have to be loaded themselves."""
        own = []
        for g, members in self.members.items():
            for i in members:
                self._hold(i, g, steps[i], train=training[g])
                if "y" not in self._views[i] and steps[i] > 0:
                    own.append(i)
        return own

    def _note(self, i: int, step: int) -> None:
        """In train mode: take over what was done to a parameter since its last step, where it is not ``y``."""
        p, y = self._params[i], self._views[i].get("y")
        if y is not None and step > 0:
            unrounded_(local(y), local(p), p.dtype)

    def _make_room(self, i: int, g: int, *, train: bool) -> None:
        """For ``y``, where the parameter is not it."""
        p, views = self._params[i], self._views[i]
        if train and not is_rounded(p.dtype, self._settings[g]):
            views.pop("y", None)
        elif "y" not in views:
            views["y"] = p.detach().clone()

    def _hold(self, i: int, g: int, step: int, *, train: bool) -> None:
        """Let a parameter hold what the mode calls for. Before its first step a parameter is its own average."""
        views, options = self._views[i], _options(self._settings[g])
        if step > 0 and "y" in views:
            y, other = local(views["y"]), local(views[kept(options)])
            local(self._params[i]).copy_(y if train else average(y, other, options))


def settle(group: dict[str, Any], *, train: bool) -> None:
    """Keep what a param group holds for averaging, its largest learning rate and its mode, or drop both."""
    if group["averaging"] is not None:
        group.setdefault("top_lr", 0.0)
        group.setdefault("train_mode", train)
    else:
        group.pop("top_lr", None)
        group.pop("train_mode", None)


def is_training(group: Mapping[str, Any]) -> bool:
    """Whether its parameters hold ``y``."""
    return bool(group.get("train_mode", True))


def _options(settings: Settings) -> Averaging:
    assert settings.averaging is not None
    return settings.averaging


def kept(options: Averaging) -> str:
    """What the state has besides ``y``."""
    return "z" if options.beta >= 0.5 else "x"


def is_rounded(dtype: torch.dtype, settings: Settings) -> bool:
    """Whether parameters of this dtype are not ``y`` but ``y`` rounded."""
    return settings.averaging is not None and _wide(dtype, settings) != dtype


def state_of(dtype: torch.dtype, settings: Settings) -> dict[str, torch.dtype]:
    """The state that is shaped like a parameter of this dtype, in train mode: role -> dtype."""
    if settings.averaging is None:
        return {"momentum": settings.hyper.state_dtype} if settings.momentum > 0 else {}
    roles = [kept(settings.averaging)] + (["y"] if is_rounded(dtype, settings) else [])
    return dict.fromkeys(roles, _wide(dtype, settings))


def _wide(dtype: torch.dtype, settings: Settings) -> torch.dtype:
    """Never fewer bits than the parameter has."""
    return torch.promote_types(dtype, settings.hyper.state_dtype)


# The mathematics.


def exact_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def shares_(
    sums: Tensor, steps: Sequence[int], active: Sequence[bool], options: Averaging, top: Number
) -> list[float] | list[Tensor]:
    """``c`` of ``"schedule_free"`` for parameters at these steps. Adds the weights of active ones to ``sums``.

    ``c_t = w_t / (w_1 + ... + w_t)`` with ``w_t = top^p t^r``. ``top`` is the largest learning rate of all steps so far, and
    ``p, r = averaging_powers``. While all rates were 0 nothing has moved, and ``c`` is 0.
    """
    p, r = options.powers
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


def average_(y: Tensor, other: Tensor, p: Tensor, settings: Settings, rate: Rate, share: Number) -> None:
    """A step with averaging: decay, and a move by ``d = lr P``, in place on ``y`` and what is kept with it. Elements without a
    finite direction stay.

    ``share`` is a number or has one for every element. It is subtracted from 1 before it is rounded to the dtype of ``y``, so
    that both give the same bits.
    """
    options = _options(settings)
    go, p = decayed(y, p, rate)
    d = p * rate.lr
    b, c, rest = options.beta, _like(share, y), _like(1 - share, y)
    if kept(options) == "z":
        new = other - d
        moved = new + (y - other + d * b) * rest
    else:
        way = y - other  # (1 - b) (z - x)
        new = other + (way / (1 - b) - d) * c
        moved = new + (way - d * (1 - b)) * rest
    torch.where(go, new, other, out=other)
    torch.where(go, moved, y, out=y)


def average(y: Tensor, other: Tensor, options: Averaging) -> Tensor:
    """``x``, from ``y`` and what is kept with it."""
    return other + (y - other) / options.beta if kept(options) == "z" else other


def unrounded_(y: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """``y`` of parameters that are ``y`` rounded to this dtype. Those that somebody has changed since count as they are."""
    return torch.where(y.to(dtype) == w, y, w, out=y)


def _like(share: Number, y: Tensor) -> Number:
    return share.to(y.dtype) if isinstance(share, Tensor) else share
