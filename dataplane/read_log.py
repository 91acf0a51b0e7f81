"""What the calls of one prefetch have done with its slots so far, for who cannot wait for its end (M1).

A prefetch makes many calls of the store. When one of them blocks, those before it have come back: what they
read is whole, and what no call was handed yet will not be written once the log is closed. Only the slots of
the call that is out, and of calls that left memory in doubt, may still change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.object_store import MEMORY_IN_DOUBT
from dataplane.stage_batch import PoolPages, StageBatch
from dataplane.transfer import BoolArray
from dataplane.transfer_limits import TransferCancelled


@dataclass(frozen=True, slots=True)
class ReadSoFar:
    """Pages of a prefetch, bool (pages of the call,), for each pool.

    Attributes:
        read: their bytes are in their slots, and no call may write there any more.
        written: a call may still write to their slots.
    """

    read: dict[str, BoolArray]
    written: dict[str, BoolArray]


class ReadLog:
    """The prefetch's thread writes it, the caller's closes it."""

    def __init__(self, pools: Iterable[str], pages: int) -> None:
        """Take the pools that have slots, and how many pages the call has."""
        self._lock = threading.Lock()
        self._closed = False
        self._read = {name: np.zeros(pages, np.bool_) for name in pools}
        self._written = {name: np.zeros(pages, np.bool_) for name in pools}

    def begin(self, members: Sequence[PoolPages]) -> None:
        """Note that a call is about to get the slots of these pages.

        Raises:
            TransferCancelled: the log is closed, so no further call may begin.
        """
        with self._lock:
            if self._closed:
                raise TransferCancelled("the transfer was given up while a call of the store was blocked")
            for member in members:
                self._written[member.pool.name][member.pages] = True

    def end(self, batch: StageBatch, codes: np.ndarray, doubtful: np.ndarray) -> None:
        """Note that it came back; one that raises leaves all of its slots in doubt.

        Args:
            batch: what it moved.
            codes: what became of each object.
            doubtful: bool, objects that an earlier try of the call left in doubt.
        """
        doubtful = doubtful | np.isin(codes, MEMORY_IN_DOUBT)
        with self._lock:
            for (member, outcome), (_, doubt) in zip(
                batch.by_shard(codes), batch.by_shard(doubtful), strict=True
            ):
                settled = ~doubt.any(axis=(1, 2))
                self._written[member.pool.name][member.pages[settled]] = False
                self._read[member.pool.name][member.pages] = settled & (outcome == 0).all(axis=(1, 2))

    def close(self) -> ReadSoFar:
        """Let no further call begin; return what the calls have done. Again: the same."""
        with self._lock:
            self._closed = True
            return ReadSoFar(
                {n: mask.copy() for n, mask in self._read.items()},
                {n: mask.copy() for n, mask in self._written.items()},
            )
