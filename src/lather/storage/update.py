"""Elementwise work where a parameter is stored: coupled decay, decoupled decay, momentum and the step itself."""

from typing import Any

import torch
from torch import Tensor

from ..options import is_on_host
from ..settings import Settings
from .step import Number, Rate


def number(x: Number) -> Number:
    """A number on the host if that takes no synchronisation. A tensor on an accelerator stays one."""
    if not isinstance(x, Tensor):
        return x
    return x.reshape(1).tolist()[0] if is_on_host(x) else x.reshape(())


def first_peak(lr: Number) -> Number:
    """The learning rate that a group begins with. A copy, because a scheduler may change a tensor in place."""
    value = number(lr)
    return value.clone() if isinstance(value, Tensor) else value


def rate_of(group: dict[str, Any], settings: Settings) -> Rate:
    """The rate of a step. Also updates ``peak_lr``, the largest learning rate so far, and ``top_lr``, the largest of a step."""
    lr = number(group["lr"])
    group["peak_lr"] = peak = _larger(lr, number(group["peak_lr"]))
    if settings.averaging is not None and settings.averaging.kind == "schedule_free":
        group["top_lr"] = _larger(lr, number(group["top_lr"]))
    return Rate(lr, _decay(lr, peak, settings))


def is_rate(lr: Tensor) -> Tensor:
    """Whether a learning rate on the device is valid. Blocks skip a step with one that is not."""
    return (lr >= 0) & (lr < torch.inf)  # false for NaN


def _larger(lr: Number, peak: Number) -> Number:
    if isinstance(lr, Tensor):
        peak = peak.to(lr.device) if isinstance(peak, Tensor) else peak
        return torch.where((lr > peak) & (lr < torch.inf), lr, peak)  # an invalid rate counts for nothing
    return peak.clamp(min=lr) if isinstance(peak, Tensor) else max(lr, peak)


def _decay(lr: Number, peak: Number, settings: Settings) -> Number:
    wd, mode = settings.weight_decay, settings.decay_mode
    if mode == "decoupled" or wd == 0:
        return float(wd)
    if mode == "l2":
        return 0.0
    share = lr if mode == "corrected" else 1.0
    if isinstance(peak, Tensor):
        return torch.where(peak > 0, wd * share / peak, wd)
    return float(wd * share / peak) if peak > 0 else float(wd)  # all learning rates so far were 0, and so is this step


def prepare_gradient(grad: Tensor, w: Tensor | None, settings: Settings) -> Tensor:
    """Apply ``maximize`` and coupled decay, which needs the parameters, in place on a copy of the gradient."""
    if settings.maximize:
        grad.neg_()
    if w is not None and settings.weight_decay != 0:
        grad.add_(w * settings.weight_decay)
    return grad


def update_(w: Tensor, p: Tensor, m: Tensor | None, settings: Settings, rate: Rate) -> None:
    """Decay, momentum and the step, in place on ``w`` and ``m``. Elements that would not stay finite do not change: most have
    no finite direction. Momentum that is not finite starts anew, at zero.

    ``P <- P + c W``; ``M <- mu M + (1 - dampening) P``; ``P <- (1 - dampening) P + mu M`` (Nesterov) or ``M``;
    ``W <- W - lr P``.
    """
    p = decayed(w, p, rate)
    new = None
    if m is not None:
        mu, damped = settings.momentum, p * (1 - settings.dampening)
        new = m.nan_to_num_(0.0, 0.0, 0.0) * mu + damped
        p = damped + new * mu if settings.nesterov else new
    moved = w - p * rate.lr
    go = moved - moved == 0  # finite; this takes two passes, and isfinite() four
    if m is not None and new is not None:
        torch.where(go, new.to(m.dtype), m, out=m)
    torch.where(go, moved, w, out=w)


def decayed(w: Tensor, p: Tensor, rate: Rate) -> Tensor:
    """The direction with decay."""
    return p + w * rate.decay if isinstance(rate.decay, Tensor) or rate.decay != 0 else p
