"""Averaging instead of momentum, where a parameter is stored: Schedule-Free, and generalised primal averaging (GPA).

There are three sequences. ``z`` takes the steps, ``x`` is an average of ``z``, and gradients are taken at ``y`` in between:

    y = (1 - b) z + b x;    z <- z - lr P(y);    x <- (1 - c) x + c z

Parameters hold ``y`` in train mode and ``x`` in eval mode. The *share* ``c`` is constant (``"gpa"``), or the weight of a step
over the weights of all steps that the parameter has taken (``"schedule_free"``). Then ``x`` is the weighted mean of all ``z``.

[Note: what is kept] Two of the three determine the third. One is ``y``, the parameter. The state has the one that is
farther from ``y``: ``z`` if ``b >= 1/2``, else ``x``. The third is then ``y`` plus at most twice a difference, so rounding is not
magnified. In terms of differences a step is ``z' = z - d``, ``y' = z' + (1 - c) (y - z + b d)``, with ``d = lr P``.

A parameter of fewer bits than the state cannot be ``y``, because most moves of an average are below its resolution and would
be lost. It is ``y`` rounded, and the state has ``y`` too. In eval mode the state always has ``y``, so that
:meth:`Shampoo.train` restores it bit for bit.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..linalg import exact_dtype, from_host
from ..settings import Averaging, Settings
from .step import Number, Rate, Tensors
from .tensors import local
from .update import decayed

Views = dict[str, Tensor]  # the state of one parameter
Groups = Sequence[Mapping[str, Any]]  # param groups


@final
class Averages:
    """The parameters of a run that are averaged: how much of a step goes into the average, and what parameters hold."""

    def __init__(
        self, groups: Sequence[int], settings: Sequence[Settings], params: Sequence[Tensor], views: Sequence[Views], lrs: list[Any]
    ) -> None:
        """``groups`` has the param group of every parameter, ``views`` its state, and ``lrs`` the rate of every param group."""
        self._settings, self._params, self._views = settings, params, views
        self.members = {i: g for i, g in enumerate(groups) if settings[g].averaging is not None}  # parameter -> param group
        self._sums: dict[int, tuple[list[int], Tensor]] = {}  # by param group: its members, and the weights of all their steps
        self._next: dict[int, Tensor] = {}  # these weights with those of the step that is under way
        for g in sorted(set(self.members.values())):
            if _options(settings[g]).kind == "schedule_free":
                members = [i for i in self.members if self.members[i] == g]
                # The sums are state. They are on the host, unless reading the learning rate would make the host wait.
                device = lrs[g].device if isinstance(lrs[g], Tensor) else torch.device("cpu")
                self._sums[g] = members, torch.zeros(len(members), dtype=exact_dtype(device), device=device)
                for i, value in zip(members, self._sums[g][1].unbind(), strict=True):
                    views[i]["weight_sum"] = value

    def shares(self, steps: Sequence[int], grads: Tensors, settings: Sequence[Settings], groups: Groups) -> dict[int, Number]:
        """How much of the point that a step leads to goes into the average, for every parameter that is averaged."""
        found: dict[int, Number] = {i: 1 - _options(settings[g]).decay for i, g in self.members.items()}
        for g, (members, sums) in self._sums.items():
            now, active = [steps[i] for i in members], [i in grads for i in members]
            self._next[g] = sums.clone()
            found |= zip(members, shares_(self._next[g], now, active, _options(settings[g]), groups[g]["top_lr"]), strict=True)
        return found

    def end(self) -> None:
        """Keep the sums of a step that is done."""
        for g, sums in self._next.items():
            self._sums[g][1].copy_(sums)
        self._next.clear()

    def switch(self, numbers: Collection[int], steps: Sequence[int], *, train: bool) -> None:
        """In some param groups, from the points at which gradients are taken to their average, or back."""
        for i, g in self.members.items():
            if g in numbers and train:
                self._hold(i, steps[i], train=True)
                self._make_room(i, train=True)
            elif g in numbers:
                self._note(i, steps[i])
                self._make_room(i, train=False)
                self._hold(i, steps[i], train=False)

    def complete(self, steps: Sequence[int], groups: Groups) -> list[Views]:
        """The state with ``y``, also if it is the parameter itself. A checkpoint then says in either mode what parameters are."""
        found = [dict(views) for views in self._views]
        for i, g in self.members.items():
            if is_training(groups[g]):
                self._note(i, steps[i])
            found[i].setdefault("y", self._params[i].detach().clone())
        return found

    def publish(self, state: dict[Tensor, Any]) -> None:
        """Give ``opt.state`` a ``y`` in both modes, because torch looks there for keys. In train mode it is the parameter."""
        for i in self.members:
            state[self._params[i]]["y"] = self._views[i].get("y", self._params[i])

    def before_load(self, groups: Groups) -> None:
        for i, g in self.members.items():
            self._make_room(i, train=is_training(groups[g]))

    def after_load(self, steps: Sequence[int], groups: Groups) -> list[int]:
        """Let parameters hold what their mode calls for. Returns those that are ``y`` themselves and have to be loaded."""
        for i, g in self.members.items():
            self._hold(i, steps[i], train=is_training(groups[g]))
        return [i for i in self.members if "y" not in self._views[i] and steps[i] > 0]

    def _note(self, i: int, step: int) -> None:
        """In train mode: take over what the user did to a parameter since its last step, if the parameter is ``y`` rounded."""
        p, y = self._params[i], self._views[i].get("y")
        if y is not None and step > 0:
            unrounded_(local(y), local(p), p.dtype)

    def _make_room(self, i: int, *, train: bool) -> None:
        """For ``y``, unless the parameter is ``y``."""
        p, views = self._params[i], self._views[i]
        if train and not is_rounded(p.dtype, self._settings[self.members[i]]):
            views.pop("y", None)
        elif "y" not in views:
            views["y"] = p.detach().clone()

    def _hold(self, i: int, step: int, *, train: bool) -> None:
        """Let a parameter hold what the mode calls for. Before its first step a parameter is its own average."""
        views, options = self._views[i], _options(self._settings[self.members[i]])
        if step > 0 and "y" in views:
            y, other = local(views["y"]), local(views[kept(options)])
            local(self._params[i]).copy_(y if train else average(y, other, options))


def settle(group: dict[str, Any], *, train: bool) -> None:
    """Give a param group what averaging keeps there, its largest learning rate and its mode, or remove both."""
    if group["averaging"] is not None:
        group.setdefault("top_lr", 0.0)
        group.setdefault("train_mode", train)
    else:
        group.pop("top_lr", None)
        group.pop("train_mode", None)


def is_training(group: Mapping[str, Any]) -> bool:
    """Whether the parameters of a param group hold ``y``."""
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
        found = {"momentum": settings.hyper.state_dtype} if settings.momentum > 0 else {}
        wide = torch.promote_types(dtype, torch.float32)
        return found | ({"master": wide} if settings.master_weights and wide != dtype else {})
    roles = [kept(settings.averaging)] + (["y"] if is_rounded(dtype, settings) else [])
    return dict.fromkeys(roles, _wide(dtype, settings))


def _wide(dtype: torch.dtype, settings: Settings) -> torch.dtype:
    """The dtype of averages, which never has fewer bits than the parameter, nor than float32 if that is kept of parameters."""
    wide = torch.promote_types(dtype, settings.hyper.state_dtype)
    return torch.promote_types(wide, torch.float32) if settings.master_weights else wide


# The mathematics.


def shares_(
    sums: Tensor, steps: Sequence[int], active: Sequence[bool], options: Averaging, top: Number
) -> list[float] | list[Tensor]:
    """``c`` of ``"schedule_free"`` for parameters at these steps. Adds the weights of active ones to ``sums``.

    ``c_t = w_t / (w_1 + ... + w_t)`` with ``w_t = top^p t^r``. ``top`` is the largest learning rate of all steps so far, and
    ``p, r = averaging_powers``. As long as all rates were 0 nothing has moved, and ``c`` is 0.
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
    """A step with averaging: decay, and a move by ``d = lr P``, in place on ``y`` and what is kept with it.

    Elements that would not stay finite stay as they are. What is kept, where it is not finite, starts anew at ``y``. ``share``
    is one number, or one for every element. It is subtracted from 1 before it is rounded to the dtype of ``y``, so that both give
    the same bits.
    """
    options = _options(settings)
    torch.where(other - other == 0, other, y, out=other)
    d = decayed(y, p, rate) * rate.lr
    b, c, rest = options.beta, share, 1 - share
    if isinstance(c, Tensor) and isinstance(rest, Tensor):
        c, rest = c.to(y.dtype), rest.to(y.dtype)
    if kept(options) == "z":
        new = other - d
        moved = new + (y - other + d * b) * rest
    else:
        way = y - other  # (1 - b) (z - x)
        new = other + (way / (1 - b) - d) * c
        moved = new + (way - d * (1 - b)) * rest
    go = moved - moved == 0  # finite, and then what is new is finite too
    torch.where(go, new, other, out=other)
    torch.where(go, moved, y, out=y)


def average(y: Tensor, other: Tensor, options: Averaging) -> Tensor:
    """``x``, from ``y`` and what is kept with it. Where that is not finite, it is ``y``."""
    x = other + (y - other) / options.beta if kept(options) == "z" else other
    return torch.where(other - other == 0, x, y)


def unrounded_(y: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """``y`` of parameters that are ``y`` rounded to this dtype. Parameters that were changed since are taken as they are."""
    return torch.where(y.to(dtype) == w, y, w, out=y)
