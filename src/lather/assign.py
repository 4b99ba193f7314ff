"""What a block costs, and a balanced assignment of costs to bins.

The same greedy rule gives blocks to ranks and, within a period, refreshes to steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from .blocks import Block
from .roots import RootSolver

# What moving a byte costs, counted in FLOPs of float32: a block's elements are read and written many times in a step, and
# its direction is sent to everyone. Of the order of what accelerators and their links do.
FLOPS_PER_BYTE = 1024


def step_flops(block: Block) -> float:
    """Matrix products of one step: a Gram matrix and a mode product for every full mode."""
    numel = math.prod(block.shape)
    return sum(4.0 * numel * (d if mode == "full" else 1) for d, mode in zip(block.shape, block.modes, strict=False))


def refresh_flops(block: Block, solver: Callable[[int], RootSolver]) -> float:
    """Root work of one refresh, given the solver for each size."""
    sides = zip(block.shape, block.modes, strict=False)  # an elementwise block has no modes
    return sum(solver(d).flops(d) if mode == "full" else float(d) for d, mode in sides)


def load(block: Block, refresh: float, frequency: int) -> int:
    """A block's cost on a step, in FLOPs: its share of the root work, its products, and the bytes of its direction.

    A whole number, so that sums do not depend on their order and ties are exact.
    """
    return int(refresh / frequency + step_flops(block)) + 4 * math.prod(block.shape) * FLOPS_PER_BYTE


def greedy(
    costs: Sequence[float],
    bins: int,
    prefer: Callable[[int], Iterable[int]] = lambda item: (),
    only: Callable[[int], Collection[int]] = lambda item: (),
) -> list[int]:
    """Longest processing time first: the bin of every item, the next largest always to the least loaded bin.

    Ties go to a bin that the item prefers, else to the lowest; an item with ``only`` goes to the least loaded of those.
    Items of equal cost keep their order.

    >>> greedy([3, 1, 2, 2], 2)
    [0, 0, 1, 1]
    >>> greedy([1, 1], 2, prefer=lambda item: [1 - item])
    [1, 0]
    """
    loads: list[float] = [0] * bins
    heap = [(load, index) for index, load in enumerate(loads)]
    chosen = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        while heap[0][0] != loads[heap[0][1]]:  # an entry from before that bin was given more
            heapq.heappop(heap)
        least, index = heap[0]
        if allowed := only(item):
            index = min(allowed, key=lambda b: (loads[b], b))
        else:
            index = next((b for b in prefer(item) if loads[b] == least), index)
        chosen[item] = index
        loads[index] += costs[item]
        heapq.heappush(heap, (loads[index], index))
    return chosen


def imbalance(loads: Sequence[float]) -> float:
    """``C(N) = max / mean``.

    >>> imbalance([3, 1])
    1.5
    """
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
