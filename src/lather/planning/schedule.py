"""When roots are refreshed. The schedule is computed on the host, so a step never has to ask the device."""

import math
from collections.abc import Sequence

from ..settings import Settings

Ints = Sequence[int]


def period(t: int, settings: Settings) -> int:
    """Steps between refreshes at step ``t``: the frequency or, early on, the largest power of two up to ``refresh_warmup * t``."""
    if not settings.warmup:
        return settings.frequency
    return min(settings.frequency, 1 << max(0, int(t * settings.warmup).bit_length() - 1))


def is_due(t: int, settings: Settings, offset: int | None = None) -> bool:
    """Whether a block is refreshed in its step ``t``.

    Without an offset (``refresh="together"``) it is, in the step of the first refresh and later in every multiple of the period.
    With one it is, from the first refresh on, in every step that is ``offset`` modulo the period.
    """
    every, first = period(t, settings), settings.first_refresh
    if offset is None:
        return t == first or (t > first and t % every == 0)
    return t >= first and t % every == offset % every


def age(t: int, settings: Settings, offset: int | None = None) -> float:
    """Steps since the refresh whose root a block uses in its step ``t``. Minus infinity if there was none."""
    last = t - settings.hyper.refresh_delay
    return next((float(t - s) for s in range(last, 0, -1) if is_due(s, settings, offset)), -math.inf)


def due_slots(
    slots: Ints, steps: Ints, active: Sequence[bool], settings: Settings, offsets: Ints | None, delay: int = 0
) -> list[int]:
    """The slots to refresh now or, with a ``delay``, those that were due that many steps ago. Lists are by slot."""
    t = steps[slots[0]]
    if offsets is None and steps.count(t) == len(steps) and not is_due(t - delay, settings):
        return []
    return [slot for slot in slots if active[slot] and is_due(steps[slot] - delay, settings, offsets[slot] if offsets else None)]


def started_slots(steps: Sequence[int], settings: Settings) -> list[bool]:
    """Whether each slot has reached ``start_preconditioning_step``.

    By default all have: a slot uses its root as soon as it has one. Before that step blocks follow the graft. Without a graft,
    a method that can do without its first refresh starts at once.
    """
    method = settings.method
    at_once = method is not None and method.refreshes and not method.waits and not settings.grafted
    return [at_once or settings.start is None or t >= settings.start for t in steps]
