"""When roots are refreshed. The schedule lives in Python, so a step never has to ask the device."""

from __future__ import annotations


def is_due(t: int, start: float, frequency: int, offset: int | None) -> bool:
    """Refreshed together (no offset): at ``start`` and at later multiples of ``frequency``.

    Staggered: from ``start`` on, whenever ``t % frequency == offset``.

    >>> [t for t in range(1, 13) if is_due(t, 3, 5, None)], [t for t in range(1, 13) if is_due(t, 3, 5, 1)]
    ([3, 5, 10], [6, 11])
    """
    if offset is None:
        return t == start or (t > start and t % frequency == 0)
    return t >= start and t % frequency == offset
