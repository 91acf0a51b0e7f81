"""Least recently used first: the order in which slots of host memory may be given to other pages.

Each member has a stamp; a member that comes back gets a new one, so leaving and coming back cost one write a
slot and work on whole arrays. The oldest are found by sorting a sixteenth of the members at a time. That
order stays exact while it is used up: whoever comes in later is younger than all of it, and whoever left or
came back since does not carry the stamp that was sorted.

Pure: values in, values out.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SlotArray = NDArray[np.int64]

OUT: Final = np.iinfo(np.int64).max
"""Stamp of a slot that is no member."""

_SHARE: Final = 16
_AT_LEAST: Final = 1024


class AgeOrder:
    """The slots that may be evicted, by age.

    Attributes:
        stamps: int64, (capacity,); smaller is older, `OUT` is no member.
        members: how many slots are in the order.
    """

    __slots__ = ("_at", "_clock", "_queue", "_queue_stamps", "members", "stamps")

    def __init__(self, capacity: int) -> None:
        self.stamps = np.full(capacity, OUT, np.int64)
        self.members = 0
        self._clock = 0
        self._queue: SlotArray = np.empty(0, np.int64)
        self._queue_stamps = self._queue
        self._at = 0

    def enter(self, slots: SlotArray) -> None:
        """Put slots at the young end, the first as the youngest.

        A prefix is handed in from its first page on: its last page is then the first to go.

        Args:
            slots: distinct, none of them a member.
        """
        self._clock += slots.size
        self.stamps[slots] = np.arange(self._clock, self._clock - slots.size, -1)
        self.members += slots.size

    def leave(self, slots: SlotArray) -> None:
        """Take members out, wherever they stand.

        Args:
            slots: distinct, all of them members.
        """
        self.stamps[slots] = OUT
        self.members -= slots.size

    def take_oldest(self, count: int) -> SlotArray:
        """Take out up to `count` of the oldest members and return them, oldest first."""
        found: list[SlotArray] = []
        missing = min(count, self.members)
        while missing:
            if self._at == self._queue.size:
                self._sort_again(missing)
            end = self._at + max(missing, 64)
            ahead = self._queue[self._at : end]
            still = np.flatnonzero(self.stamps[ahead] == self._queue_stamps[self._at : end])[:missing]
            self._at += int(still[-1]) + 1 if still.size == missing else ahead.size
            picked = ahead[still]
            self.leave(picked)
            found.append(picked)
            missing -= picked.size
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _sort_again(self, at_least: int) -> None:
        members = np.flatnonzero(self.stamps != OUT)
        stamps = self.stamps[members]
        size = max(at_least, _AT_LEAST, members.size // _SHARE)
        if size < members.size:
            oldest = np.argpartition(stamps, size)[:size]
            members, stamps = members[oldest], stamps[oldest]
        order = np.argsort(stamps)
        self._queue, self._queue_stamps, self._at = members[order], stamps[order], 0
