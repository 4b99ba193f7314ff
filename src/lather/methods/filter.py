"""The exponential filter of the gradient."""

from torch import Tensor

from ..linalg import bias_correction, ema_, per_slot
from .base import Context, Hyper, Stack, State

FILTER_ROLES, FILTER_SUMS = {"m": "filtered gradient"}, "m"  # as those of a transform


def init_filter(stack: Stack, hyper: Hyper) -> State:
    return {"m": stack.zeros(*stack.shape, dtype=hyper.filter_dtype)}


def filter_gradient(state: State, grad: Tensor, ctx: Context) -> Tensor:
    """``g_bar = beta3 m + (1 - beta3) g`` with the old ``m``, then ``m <- beta1 m + (1 - beta1) g``.

    With ``beta3 == beta1`` ``g_bar`` is the new ``m``. Without a filter (``beta1 == 0``) it is ``g``.
    """
    beta1, beta3 = ctx.hyper.beta1, ctx.hyper.beta3
    if beta1 == 0:
        return grad
    old = None if beta3 == beta1 else state["m"].to(grad.dtype).lerp(grad, 1 - beta3)
    new = ema_(state["m"], grad, ctx.alive * (1 - beta1))
    g_bar = new if old is None else old
    return g_bar / per_slot(filter_correction(ctx), g_bar) if ctx.hyper.bias_correction else g_bar


def refiltered(state: State, grad: Tensor, ctx: Context) -> Tensor:
    """What :func:`filter_gradient` gave for this gradient, after it has changed the state."""
    beta1, beta3 = ctx.hyper.beta1, ctx.hyper.beta3
    if beta1 == 0:
        return grad
    m = state["m"].to(grad.dtype)
    g_bar = m if beta3 == beta1 else (m - (1 - beta1) * grad) * (beta3 / beta1) + (1 - beta3) * grad
    return g_bar / per_slot(filter_correction(ctx), g_bar)


def filter_correction(ctx: Context) -> float | Tensor:
    """What the filtered gradient is divided by: ``1 - beta3 beta1^(t-1)``."""
    beta1, beta3 = ctx.hyper.beta1, ctx.hyper.beta3
    if beta1 == 0 or not ctx.hyper.bias_correction:
        return 1.0
    return bias_correction(ctx.steps, beta1, ctx.alive, first=beta3)
