"""What may change between steps: how that is noticed, and what is refused once training has begun."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from ..options import STRUCTURAL
from ..storage.tensors import is_regular
from .census import Item, Ranks, grad_dtype
from .run import Built

Groups = Sequence[Mapping[str, Any]]


def sign(trainable: Iterable[Item], groups: Groups, world: Ranks) -> Any:
    """All that plan, banks and state depend on."""
    params = [
        (id(p), p.device, p.dtype, grad_dtype(p), p.shape, p.stride(), p.is_cuda and is_regular(p))
        for *_, p in trainable
    ]
    return params, _sign_options(groups), world


def glance(groups: Groups, world: Ranks) -> Any:
    """What shows on nearly every step that nothing changed that :func:`sign` would tell. Not for DTensors."""
    params = [p for group in groups for p in group["params"]]
    looks = (id, Tensor.data_ptr, Tensor.stride, attrgetter("requires_grad"))
    dtypes = [None if grad is None else grad.dtype for grad in map(attrgetter("grad"), params)]
    return [list(map(look, params)) for look in looks], dtypes, _sign_options(groups), world


def _sign_options(groups: Groups) -> Any:
    return [
        (
            group["betas"][0] > 0,
            group["momentum"] > 0,
            group["refresh_delay"] > 0,
            group["beta3"] in (None, group["betas"][0]),
            group["weight_decay_mode"] == "l2",
            group["on_nonfinite"],
            *(group[name] for name in (*STRUCTURAL, "root", "exponent", "exponent_multiplier", "communication_dtype")),
        )
        for group in groups
    ]


def structure(groups: Groups) -> list[tuple[Any, ...]]:
    """The options that decide which state there is."""
    return [tuple(group[name] for name in STRUCTURAL) for group in groups]


def is_replaced(built: Built, state: Mapping[Tensor, Mapping[str, Any]], thorough: bool) -> bool:
    """Whether tensors in the optimizer's state are not ours any more, as after ``state[k] = v.to(device)``.

    A step looks at one tensor of the first and the last parameter, saving and loading look at all.
    """
    some = slice(None) if thorough or not built.params else slice(None, None, max(1, len(built.params) - 1))
    for p, views in zip(built.params[some], built.views[some], strict=True):
        entry = state.get(p, {})
        if any(entry.get(k) is not views[k] for k in (views if thorough else ("step",))):
            return True
    return False


def refuse_moving(before: Ranks, now: Ranks) -> None:
    if before != now:
        raise RuntimeError(
            f"the optimizer began on ranks {list(before)} and now there are {list(now)}: its process group was "
            "destroyed or replaced; save its state before that, and load it into a new optimizer"
        )


def refuse_restructuring(before: Sequence[tuple[Any, ...]], now: Sequence[tuple[Any, ...]]) -> None:
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        for name, was, is_now in zip(STRUCTURAL, old, new, strict=True):
            if was != is_now:
                raise ValueError(
                    f"{name} of param group {number} was changed from {was!r} to {is_now!r} after the first step; it decides which "
                    "state there is, so build a new optimizer instead"
                )


def refuse_reshaping(built: Built, trainable: Iterable[Item]) -> None:
    planned = {id(p): spec for p, spec in zip(built.params, built.plan.specs, strict=True)}
    for *_, p in trainable:
        if id(p) in planned and planned[id(p)].shape != p.shape:
            spec = planned[id(p)]
            raise ValueError(
                f"parameter {spec.name} was of shape {spec.shape} and is now {tuple(p.shape)}; its state does not fit "
                "any more, so build a new optimizer"
            )
