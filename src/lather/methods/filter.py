"""The exponential filter of the gradient."""

from __future__ import annotations

from torch import Tensor

from ..linalg import ema_, per_slot
from .base import Context, Stack, State


def init_filter(stack: Stack) -> State:
    return {"m": stack.zeros(*stack.shape)}


def filter_gradient(state: State, grad: Tensor, ctx: Context) -> Tensor:
    """``g_bar = beta3 m + (1 - beta3) g`` with the old ``m``, then ``m <- beta1 m + (1 - beta1) g``.

    With ``beta3 == beta1`` (the default) ``g_bar`` is the new ``m``. Bias correction divides by
    ``1 - beta3 beta1^(t-1)``. Without a filter (``beta1 == 0``) ``g_bar`` is ``g``.
    """
    beta1 = ctx.group["betas"][0]
    beta3 = beta1 if ctx.group["beta3"] is None else ctx.group["beta3"]
    if beta1 == 0:
        return grad
    old = None if beta3 == beta1 else state["m"].to(grad.dtype).lerp(grad, 1 - beta3)
    new = ema_(state["m"], grad, ctx.weight(beta1))
    g_bar = new if old is None else old
    if not ctx.group["bias_correction"]:
        return g_bar
    return g_bar / per_slot(filter_correction(ctx), g_bar)


def filter_correction(ctx: Context) -> float | Tensor:
    """What the filtered gradient is divided by."""
    beta1, beta3 = ctx.group["betas"][0], ctx.group["beta3"]
    if beta1 == 0 or not ctx.group["bias_correction"]:
        return 1.0
    beta3 = beta1 if beta3 is None else beta3
    return ctx.correction(lambda t: 1 - beta3 * beta1 ** (t - 1))
