"""How much memory a hit rate takes: the hits of an LRU of every size at once, from one pass over a trace.

A page's stack distance is the number of different pages used since its last use, itself included (Mattson et
al., 1970): an LRU of that many pages or more still has it. A request uses its deepest page first and its
first page last, so that no page is evicted before those that follow it and are worth nothing without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class HitCurve:
    """Hits of an LRU by its size.

    Attributes:
        asked_pages: pages that the measured requests asked for.
        distinct_pages: different pages of the whole trace; a larger cache has no more hits.
        hits: int64; `hits[n]` pages were found by a cache of n pages, as prefixes.
    """

    asked_pages: int
    distinct_pages: int
    hits: NDArray[np.int64]

    def hit_rate(self, pages: int) -> float:
        """Return the hit rate of a cache of so many pages, 0 to 1."""
        at = max(0, min(pages, len(self.hits) - 1))
        return float(self.hits[at]) / self.asked_pages if self.asked_pages else 0.0

    def pages_for(self, hit_rate: float) -> int | None:
        """Return the pages of the smallest cache with this hit rate; None where no size has it."""
        # A rate that was divided once is not exact: a millionth of a page is no page.
        enough = np.flatnonzero(self.hits >= hit_rate * self.asked_pages - 1e-6)
        return int(enough[0]) if enough.size else None


def hit_curve(requests: Sequence[Sequence[int]], warmup: float = 0.5) -> HitCurve:
    """Return the hits of every size of cache.

    Args:
        requests: page ids of each request in order; an equal id means an equal prefix up to there.
        warmup: share of the requests, 0 to 1, that only fill the cache.
    """
    stack = _Stack(sum(map(len, requests)))
    first = int(len(requests) * warmup)
    found: list[int] = []
    asked = 0
    for index, pages in enumerate(requests):
        if index >= first:
            asked += len(pages)
            found += _prefix_distances(stack, pages)
        for page in reversed(pages):
            stack.use(page)
    counts = np.bincount(np.array(found, np.int64), minlength=stack.distinct + 1)
    return HitCurve(asked, stack.distinct, np.cumsum(counts, dtype=np.int64))


def _prefix_distances(stack: _Stack, pages: Iterable[int]) -> list[int]:
    """Return for each page of the known prefix the size of cache from which on the prefix reaches it."""
    found: list[int] = []
    largest = 0
    for page in pages:
        distance = stack.distance(page)
        if distance is None:
            break
        largest = max(largest, distance)
        found.append(largest)
    return found


class _Stack:
    """The LRU stack: a binary indexed tree over the times of use, with a one at each page's last use."""

    def __init__(self, uses: int) -> None:
        self._tree = [0] * (uses + 1)
        self._last: dict[int, int] = {}
        self._now = 0

    @property
    def distinct(self) -> int:
        """Different pages so far."""
        return len(self._last)

    def distance(self, page: int) -> int | None:
        """Return the page's stack distance, 1 for the youngest; None for one that was never used."""
        at = self._last.get(page)
        if at is None:
            return None
        older = 0
        at -= 1
        while at:
            older += self._tree[at]
            at &= at - 1
        return len(self._last) - older

    def use(self, page: int) -> None:
        """Make the page the youngest."""
        before = self._last.get(page)
        if before is not None:
            self._add(before, -1)
        self._now += 1
        self._last[page] = self._now
        self._add(self._now, 1)

    def _add(self, at: int, count: int) -> None:
        tree, size = self._tree, len(self._tree)
        while at < size:
            tree[at] += count
            at += at & -at
