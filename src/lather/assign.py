"""What a block costs, and a balanced assignment of costs to bins.

The same greedy rule gives blocks to ranks and, within a period, refreshes to steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from .blocks import Block
from .roots import RootSolver


def step_flops(block: Block) -> float:
    """Matrix products of one step: a Gram matrix and a mode product for every full mode."""
    numel = math.prod(block.shape)
    return sum(4.0 * numel * (d if mode == "full" else 1) for d, mode in zip(block.shape, block.modes, strict=False))


def refresh_flops(block: Block, solver: Callable[[int], RootSolver]) -> float:
    """Root work of one refresh, given the solver for each size."""
    sides = zip(block.shape, block.modes, strict=False)  # an elementwise block has no modes
    return sum(solver(d).flops(d) if mode == "full" else float(d) for d, mode in sides)


def greedy(costs: Sequence[float], bins: int) -> list[int]:
    """Longest processing time first: the bin of every item, the next largest always to the least loaded bin.

    Deterministic: ties go to the earlier item and to the lower bin.

    >>> greedy([3, 1, 2, 2], 2)
    [0, 0, 1, 1]
    """
    heap = [(0.0, index) for index in range(bins)]
    chosen = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, index = heapq.heappop(heap)
        chosen[item] = index
        heapq.heappush(heap, (load + costs[item], index))
    return chosen
