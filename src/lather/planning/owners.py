"""A balanced assignment of costs to bins: blocks to ranks, and refreshes to the steps of a period."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

# What moving a byte costs, in FLOPs of float32. A block's elements are read and written many times in a step, and its
# direction is sent to everyone. The number is of the order of what accelerators and their links do.
FLOPS_PER_BYTE = 1024


def load(numel: int, flops: float) -> int:
    """The cost of a step in FLOPs, for a block of ``numel`` elements: its own ``flops``, and the bytes of its direction.

    A whole number, so that sums do not depend on their order and ties are exact.
    """
    return int(flops) + 4 * numel * FLOPS_PER_BYTE


def greedy(
    costs: Sequence[float],
    bins: int,
    prefer: Callable[[int], Iterable[int]] = lambda item: (),
    only: Callable[[int], Collection[int]] = lambda item: (),
) -> list[int]:
    """Longest processing time first: the bin of every item, the next largest always to the least loaded bin.

    Items of equal cost may change places without changing any load, so they go to bins that they prefer as far as that
    is possible. An item with ``only`` goes to the least loaded of those. Deterministic; ties go to lower numbers.

    >>> greedy([3, 1, 2, 2], 2)
    [0, 0, 1, 1]
    >>> greedy([1, 1], 2, prefer=lambda item: [1 - item])
    [1, 0]
    """
    loads = _Loads(bins)
    chosen = [0] * len(costs)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for cost, alike in groupby(order, key=lambda i: costs[i]):
        free = []
        for item in alike:
            if allowed := only(item):
                chosen[item] = min(allowed, key=lambda b: (loads.of[b], b))
                loads.add(chosen[item], cost)
            else:
                free.append(item)
        for item, index in _match(free, *loads.shares(cost, len(free)), prefer):
            chosen[item] = index
            loads.add(index, cost)
    return chosen


def stagger(costs: Sequence[float], bins: int, kinds: Sequence[Any]) -> list[int]:
    """The bin of every item, as even as :func:`greedy` to within a fifth, with items of one kind in as few bins as that allows.

    >>> stagger([2, 2, 1, 1, 1, 1], 4, ["a", "a", "b", "b", "b", "b"])
    [0, 1, 2, 2, 3, 3]
    """
    even, chosen = greedy(costs, bins), [0] * len(costs)
    seen, total = 0.0, sum(costs) or 1.0
    for i in sorted(range(len(costs)), key=lambda i: (kinds[i], i)):
        chosen[i] = min(bins - 1, int(bins * (seen + costs[i] / 2) / total))
        seen += costs[i]
    as_many = len(set(chosen)) == len(set(even))
    return chosen if as_many and _worst(chosen, costs) <= 1.2 * _worst(even, costs) else even


def _worst(chosen: Sequence[int], costs: Sequence[float]) -> float:
    loads = dict.fromkeys(chosen, 0.0)
    for index, cost in zip(chosen, costs, strict=True):
        loads[index] += cost
    return max(loads.values(), default=0.0)


class _Loads:
    """What bins carry, and which carry least."""

    def __init__(self, bins: int) -> None:
        self.of: list[float] = [0] * bins
        self._heap: list[tuple[float, int]] = [(0, index) for index in range(bins)]

    def add(self, index: int, cost: float) -> None:
        self.of[index] += cost
        heapq.heappush(self._heap, (self.of[index], index))

    def shares(self, cost: float, count: int) -> tuple[list[int], list[int]]:
        """Where ``count`` items of a cost go: bins that get one each time they are listed, and bins that tie for the rest."""
        heap, extra = self._heap, [0.0] * len(self.of)
        listed: list[int] = []
        least = 0.0
        while count > len(listed):
            tied: list[int] = []
            while heap and (not tied or heap[0][0] == least):
                load, index = heapq.heappop(heap)
                if load == self.of[index] + extra[index] and index not in tied[-1:]:  # else it is out of date
                    least = load
                    tied.append(index)
            full = count - len(listed) >= len(tied)
            for index in tied:
                extra[index] += cost if full else 0
                heapq.heappush(heap, (self.of[index] + extra[index], index))
            if not full:
                return listed, tied
            listed += tied
        return listed, []


def _match(
    items: Sequence[int], listed: Sequence[int], tied: Sequence[int], prefer: Callable[[int], Iterable[int]]
) -> Iterator[tuple[int, int]]:
    """Give items to bins, first to those they prefer, then in order."""
    places, spare = Counter(listed), dict.fromkeys(tied)
    spares, left = len(items) - len(listed), []
    for item in items:
        index = next((b for b in prefer(item) if places[b] or (spares and b in spare)), None)
        if index is None:
            left.append(item)
            continue
        if places[index]:
            places[index] -= 1
        else:
            del spare[index]
            spares -= 1
        yield item, index
    rest = []
    for index in listed:
        if places[index]:
            places[index] -= 1
            rest.append(index)
    yield from zip(left, [*rest, *spare], strict=False)


def imbalance(loads: Sequence[float]) -> float:
    """``C(N) = max / mean``.

    >>> imbalance([3, 1])
    1.5
    """
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
