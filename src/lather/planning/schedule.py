"""When roots are refreshed. The schedule lives in Python, so a step never has to ask the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def period(t: int, group: Mapping[str, Any]) -> int:
    """Steps between refreshes around step ``t``: ``precondition_frequency``, or while that is more than the part
    ``refresh_warmup`` of ``t``, the largest power of two that is not.

    >>> [period(t, {"precondition_frequency": 10, "refresh_warmup": 0.1}) for t in (1, 19, 20, 40, 159, 160)]
    [1, 1, 2, 4, 8, 10]
    """
    frequency: int = group["precondition_frequency"]
    if not group["refresh_warmup"]:
        return frequency
    return min(frequency, 1 << max(0, int(t * group["refresh_warmup"]).bit_length() - 1))


def first_step(group: Mapping[str, Any]) -> float:
    """The first step that is preconditioned. Of a SOAP that is warmed up not the very first: in bases made of one gradient that
    gradient is diagonal, and all the rest of the moment would be zero."""
    start = group["start_preconditioning_step"]
    if start is not None:
        return float(start)
    return 2.0 if group["preconditioner"] == "soap" and group["refresh_warmup"] else float(period(1, group))


def is_due(t: int, group: Mapping[str, Any], offset: int | None) -> bool:
    """Refreshed together (no offset): at the first step that is preconditioned and at later multiples of the period.

    Staggered: from that step on, whenever ``t`` leaves the rest ``offset``.

    >>> group = {"precondition_frequency": 5, "refresh_warmup": 0.0, "start_preconditioning_step": 3}
    >>> [t for t in range(1, 13) if is_due(t, group, None)], [t for t in range(1, 13) if is_due(t, group, 1)]
    ([3, 5, 10], [6, 11])
    """
    every, start = period(t, group), first_step(group)
    if offset is None:
        return t == start or (t > start and t % every == 0)
    return t >= start and t % every == offset % every
