"""When roots are refreshed. The schedule is computed on the host, so a step never has to ask the device."""

from __future__ import annotations

from collections.abc import Sequence

from ..settings import Settings


def period(t: int, settings: Settings) -> int:
    """Steps between refreshes around step ``t``.

    It is ``precondition_frequency``. While that is more than the fraction ``refresh_warmup`` of ``t``, it is the largest power
    of two that is not.
    """
    if not settings.warmup:
        return settings.frequency
    return min(settings.frequency, 1 << max(0, int(t * settings.warmup).bit_length() - 1))


def is_due(t: int, settings: Settings, offset: int | None = None) -> bool:
    """Whether a block is refreshed in its step ``t``.

    Together (no offset): at the first refresh and at later multiples of the period. Staggered: from the first refresh on,
    whenever ``t`` leaves the remainder ``offset``.
    """
    every, first = period(t, settings), settings.first_refresh
    if offset is None:
        return t == first or (t > first and t % every == 0)
    return t >= first and t % every == offset % every


def due_slots(
    slots: Sequence[int],
    steps: Sequence[int],
    active: Sequence[bool],
    settings: Settings,
    offsets: Sequence[int] | None,
    delay: int = 0,
) -> list[int]:
    """The slots to refresh now. ``steps``, ``active`` and ``offsets`` are by slot; with a ``delay``, those that were due so many
    steps ago."""
    t = steps[slots[0]]
    if offsets is None and steps.count(t) == len(steps) and not is_due(t - delay, settings):
        return []
    return [slot for slot in slots if active[slot] and is_due(steps[slot] - delay, settings, offsets[slot] if offsets else None)]


def started_slots(steps: Sequence[int], settings: Settings) -> list[bool]:
    """The slots that have reached ``start_preconditioning_step``.

    Its default says only when roots are first refreshed. So raising the frequency later does not take roots away. Before that
    step blocks follow the graft. If there is none, a method that can do without its first refresh starts at once.
    """
    method = settings.method
    at_once = method is not None and method.refreshes and not method.waits and not settings.grafted
    return [at_once or settings.start is None or t >= settings.start for t in steps]
