"""The storage side: what happens elementwise where a parameter lives. Parameters never travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..options import state_dtype
from . import averaging


def number(x: float | Tensor) -> float | Tensor:
    """A host number where that costs no synchronisation; a tensor on an accelerator stays one."""
    if not isinstance(x, Tensor):
        return x
    return x.reshape(1).tolist()[0] if x.device.type == "cpu" else x.reshape(())


def first_peak(lr: float | Tensor) -> float | Tensor:
    """The learning rate that a group begins with, apart from what a scheduler does to it in place."""
    value = number(lr)
    return value.clone() if isinstance(value, Tensor) else value


def raise_peak(group: dict[str, Any]) -> None:
    """Keep ``peak_lr``, the largest learning rate the group has had, and ``top_lr``, the largest that it took a step with."""
    for name in ("peak_lr", "top_lr") if group["averaging"] == "schedule_free" else ("peak_lr",):
        group[name] = _larger(number(group["lr"]), number(group[name]))


def _larger(lr: float | Tensor, peak: float | Tensor) -> float | Tensor:
    if isinstance(lr, Tensor):
        return lr.clamp(min=peak.to(lr.device) if isinstance(peak, Tensor) else peak)
    return peak.clamp(min=lr) if isinstance(peak, Tensor) else max(lr, peak)


def state_of(dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The state that is shaped like a parameter of this dtype: role -> dtype."""
    return averaging.state_of(dtype, group) | ({"momentum": state_dtype(group)} if group["momentum"] > 0 else {})


def prepare_gradient(grad: Tensor, w: Tensor | None, group: Mapping[str, Any]) -> Tensor:
    """``maximize`` and coupled decay, which needs the parameters, in place on a copy of the gradient."""
    if group["maximize"]:
        grad.neg_()
    if w is not None and group["weight_decay"] != 0:
        grad.add_(w * group["weight_decay"])
    return grad


def decay(group: Mapping[str, Any]) -> float | Tensor:
    """``c`` in ``P <- P + c W``."""
    wd, mode = group["weight_decay"], group["weight_decay_mode"]
    if mode == "decoupled" or wd == 0:
        return float(wd)
    if mode == "l2":
        return 0.0
    peak = number(group["peak_lr"])
    share = number(group["lr"]) if mode == "corrected" else 1.0
    if isinstance(peak, Tensor):
        return torch.where(peak > 0, wd * share / peak, wd)
    return float(wd * share / peak) if peak > 0 else float(wd)  # every learning rate so far was 0, and so is this step


def update_(
    w: Tensor, p: Tensor, m: Tensor | None, group: Mapping[str, Any], share: float | Tensor | None = None
) -> None:
    """Decay, momentum and the step itself, in place on ``w`` and ``m``. Elements without a finite direction stay.

    ``P <- P + c W``; ``M <- mu M + (1 - dampening) P``; ``P <- (1 - dampening) P + mu M`` (Nesterov) or ``M``;
    ``W <- W - lr P``. With a ``share`` it is a step of :mod:`lather.averaging`, and ``m`` what that keeps.
    """
    go = p - p == 0  # finite, in two passes where isfinite() takes four
    c = decay(group)
    if isinstance(c, Tensor) or c != 0:
        p = p + w * c
    if share is not None and m is not None:
        averaging.step_(w, m, p * number(group["lr"]), go, share, group)
        return
    if m is not None:
        mu, damped = group["momentum"], p * (1 - group["dampening"])
        new = m * mu + damped
        p = damped + new * mu if group["nesterov"] else new
        torch.where(go, new.to(m.dtype), m, out=m)
    torch.where(go, w - p * number(group["lr"]), w, out=w)
