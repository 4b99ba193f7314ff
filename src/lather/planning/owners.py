"""A balanced assignment of costs to bins: blocks to ranks, and refreshes to the steps of a period."""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, final

Preference = Callable[[int], Iterable[int]]  # the bins that an item prefers


def greedy(
    costs: Sequence[float], bins: int, prefer: Preference = lambda item: (), only: Sequence[Collection[int]] = ()
) -> list[int]:
    """The bin of every item, longest processing time first: the next largest item always goes to the least loaded bin.

    Swapping items of equal cost changes no load, so they go to bins that they prefer where possible. An item with ``only``
    goes to the least loaded of those. The result is deterministic: ties go to lower numbers.

    >>> greedy([3, 1, 2, 2], 2)
    [0, 0, 1, 1]
    >>> greedy([1, 1], 2, prefer=lambda item: [1 - item])
    [1, 0]
    """
    loads, chosen = _Loads(bins), [0] * len(costs)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for cost, items in groupby(order, key=lambda i: costs[i]):
        free = []
        for item in items:
            if only and only[item]:
                chosen[item] = min(only[item], key=lambda b: (loads.of[b], b))
                loads.add(chosen[item], cost)
            else:
                free.append(item)
        for item, index in _match(free, *loads.shares(cost, len(free)), prefer):
            chosen[item] = index
            loads.add(index, cost)
    return chosen


def stagger(costs: Sequence[float], bins: int, kinds: Sequence[Any]) -> list[int]:
    """The bin of every item, with items of one kind in few bins: items are laid end to end, kind by kind, and cut evenly.

    If that uses fewer bins than :func:`greedy`, or its largest load is more than a fifth larger, the answer is greedy's.

    >>> stagger([2, 2, 1, 1, 1, 1], 4, ["a", "a", "b", "b", "b", "b"])
    [0, 1, 2, 2, 3, 3]
    """
    even, chosen = greedy(costs, min(bins, len(costs))), [0] * len(costs)  # so no bin is used that greedy would not use
    seen, total = 0.0, sum(costs) or 1.0
    for i in sorted(range(len(costs)), key=lambda i: (kinds[i], i)):
        chosen[i] = min(bins - 1, int(bins * (seen + costs[i] / 2) / total))
        seen += costs[i]
    as_many = len(set(chosen)) == len(set(even))
    return chosen if as_many and _largest_load(chosen, costs) <= 1.2 * _largest_load(even, costs) else even


def _largest_load(chosen: Sequence[int], costs: Sequence[float]) -> float:
    loads = dict.fromkeys(chosen, 0.0)
    for index, cost in zip(chosen, costs, strict=True):
        loads[index] += cost
    return max(loads.values(), default=0.0)


@final
class _Loads:
    """The loads of bins, and which are least."""

    def __init__(self, bins: int) -> None:
        self.of: list[float] = [0] * bins
        self._heap: list[tuple[float, int]] = [(0, index) for index in range(bins)]

    def add(self, index: int, cost: float) -> None:
        self.of[index] += cost
        heapq.heappush(self._heap, (self.of[index], index))

    def shares(self, cost: float, count: int) -> tuple[list[int], list[int]]:
        """Where ``count`` items of one cost go. The first list has a bin for each item, except for a rest that is too small for all
        bins with the least load. The second list has these bins."""
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


def _match(items: Sequence[int], listed: Sequence[int], tied: Sequence[int], prefer: Preference) -> Iterator[tuple[int, int]]:
    """Give items to bins. Those that prefer few bins choose first, and take the one with most room, to leave room for others. Items
    whose preferred bins are full take what is left, in order."""
    places, spare = Counter(listed), dict.fromkeys(tied)
    spares, left = len(items) - len(listed), []
    preferred = {item: list(prefer(item)) for item in items}
    for item in sorted(items, key=lambda item: len(preferred[item])):
        found = [b for b in preferred[item] if places[b] or (spares and b in spare)]
        if not found:
            left.append(item)
            continue
        index = max(found, key=lambda b: places[b])
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
    """``C(N)``, the largest load over the mean."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
