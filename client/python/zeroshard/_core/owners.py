"""Divides what optimizers on the ranks step among the ranks.

The cost of a parameter is its number of elements: the bytes that its owner moves are proportional
to it, and so are the f32 copies that it holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Returns the rank of each cost, the same on every rank.

    The largest cost comes first, and each goes to the rank with the smallest sum so far: the lowest
    one of several. The largest sum of a rank is at most 4/3 of the smallest possible one (Graham,
    "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    sums = [(0, rank) for rank in range(ranks)]
    found = [0] * len(costs)
    for position in sorted(range(len(costs)), key=lambda position: -costs[position]):
        total, rank = sums[0]
        found[position] = rank
        heapq.heapreplace(sums, (total + costs[position], rank))
    return found
