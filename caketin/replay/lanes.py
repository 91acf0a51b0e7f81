"""Threads that run transfers, each on page slots of its own, and what becomes of one that hangs.

A store call blocks until the store returns, a minute where a storage node has just died. Whoever waits for it
gets its answer at the deadline; the slots of the call stay out of use until it came back (M1).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from metadata.errors import CaketinError

T = TypeVar("T")
Slots: TypeAlias = NDArray[np.int64]
Work: TypeAlias = Callable[[Slots, threading.Event], T]
"""Is given the slots that it may use, and what is set once nobody waits for it any more."""


class TransferOverdue(CaketinError):
    """A transfer did not return until its deadline; its slots stay out of use until it does."""

    code = "transfer_overdue"


class NoLane(CaketinError):
    """Every lane's transfer hangs in the store: this one is not even tried."""

    code = "transfers_hang"


@dataclass
class _Job:
    work: Work[Any]
    ended: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class Lanes:
    """Lanes of one rank. `run` may be called from several threads."""

    def __init__(self, count: int, pages: int) -> None:
        """Make the lanes; lane i has the slots `i * pages` up to `(i + 1) * pages`, exclusive."""
        self._lock = threading.Lock()
        self._count = count
        self._idle: list[_Lane] = []
        for i in range(count):
            self._idle.append(_Lane(self, np.arange(i * pages, (i + 1) * pages, dtype=np.int64)))

    def run(self, work: Work[T], seconds: float) -> T:
        """Run `work` with a lane's slots and return its result.

        Raises:
            NoLane: none is free, so it was not run.
            TransferOverdue: it has not returned after `seconds`; it is told so and goes on without us.
        """
        with self._lock:
            if not self._idle:
                raise NoLane("all transfers hang in the store")
            lane = self._idle.pop()
        job = _Job(work)
        lane.jobs.put(job)
        if not job.ended.wait(seconds):
            job.abandoned.set()
            raise TransferOverdue(f"a transfer did not return within {seconds:g} s")
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    @property
    def busy(self) -> int:
        """Lanes whose work has not returned."""
        with self._lock:
            return self._count - len(self._idle)

    def put_back(self, lane: _Lane) -> None:
        """Take back a lane whose work has returned."""
        with self._lock:
            self._idle.append(lane)


class _Lane:
    def __init__(self, lanes: Lanes, slots: Slots) -> None:
        self.slots = slots
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        # A daemon, because a transfer that hangs must not hold the end of the process.
        threading.Thread(target=self._work, args=(lanes,), name="replay-lane", daemon=True).start()

    def _work(self, lanes: Lanes) -> None:
        while True:
            job = self.jobs.get()
            try:
                job.result = job.work(self.slots, job.abandoned)
            except BaseException as error:
                job.error = error
            lanes.put_back(self)
            job.ended.set()
