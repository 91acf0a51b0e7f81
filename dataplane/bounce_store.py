"""A store behind bounce buffers: calls with a deadline that holds, for they never see the caller's memory.

A store call blocks until the store returns, a minute where a storage node has just died, and until then its
memory belongs to the store (M1). Inside an engine that means that the engine waits. Here the store moves
bytes to and from memory of our own, in *lanes* of which each serves one call; the bytes are copied. A call
that is overdue fails for its caller, and its lane stays out of use until the call came back, and for a grace
period after that: a device may write for a moment after a time-out. The price is one copy of all bytes.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataplane.object_store import (
    ObjectBuffers,
    ObjectStore,
    RegisteredRegions,
    StoreClosed,
    StoreCode,
    StoreError,
    check_batch,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_SECONDS: Final = 5.0
_kept: list[_Lane] = []  # memory of calls that had not returned at the end: it must stay where it is


class StoreOverdue(StoreError):
    """A call did not return in time, or all lanes are out of use because earlier ones did not."""

    code = "store_overdue"


class BounceStore:
    """Implements `object_store.ObjectStore` over another store, which it owns.

    Every call ends within `call_seconds`, as `StoreOverdue` where the store has not returned by then.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        call_seconds: float,
        lanes: int = 4,
        lane_bytes: int = 64 << 20,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Take a store and register the lanes with it.

        Args:
            store: the store; `close` closes it.
            call_seconds: deadline of a call.
            lanes: calls that may run or hang at the same time.
            lane_bytes: memory of a lane, less where the store registers less at once; a larger object cannot
                be moved, a larger batch goes in pieces.
            grace_seconds: how long a lane rests after an overdue call came back.

        Raises:
            RegistrationFailed: the store refuses the lanes' memory.
        """
        self.kind = store.kind
        self.lease_seconds = store.lease_seconds
        self.max_region_bytes: int | None = None  # of the callers' memory, which no device ever sees
        self._store = store
        self._seconds = call_seconds
        if store.max_region_bytes is not None:
            lane_bytes = min(lane_bytes, store.max_region_bytes)
        self._lane_bytes = lane_bytes
        self._regions = RegisteredRegions()
        self._idle: queue.LifoQueue[_Lane] = queue.LifoQueue()
        self._lanes = [_Lane(lane_bytes, grace_seconds, self._idle) for _ in range(lanes)]
        self._closed = False
        for lane in self._lanes:
            store.register(lane.address, lane_bytes)
            self._idle.put(lane)

    @property
    def quarantined(self) -> int:
        """Lanes out of use because of an overdue call."""
        return sum(lane.quarantined for lane in self._lanes)

    def register(self, address: int, length: int) -> None:
        """See `ObjectStore.register`; the store itself is not told, since it never uses this memory."""
        self._regions.add(address, length)

    def unregister(self, address: int) -> None:
        """See `ObjectStore.unregister`."""
        self._regions.discard(address)

    def put(
        self, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str] | None = None
    ) -> NDArray[np.int8]:
        """See `ObjectStore.put`."""
        if groups is not None and len(groups) != len(keys):
            raise ValueError(f"{len(keys)} keys but {len(groups)} groups")

        def piece(lane: _Lane, rows: NDArray[np.intp], seconds: float) -> NDArray[np.int8]:
            inside = lane.places(buffers.sizes[rows])
            _copy(buffers[rows], inside, into_lane=True)
            some = None if groups is None else [groups[i] for i in rows.tolist()]
            return lane.call(lambda: self._store.put([keys[i] for i in rows.tolist()], inside, some), seconds)

        return self._move(keys, buffers, piece)

    def get(self, keys: Sequence[str], buffers: ObjectBuffers) -> NDArray[np.int8]:
        """See `ObjectStore.get`. The caller's memory is written by the caller's own thread."""

        def piece(lane: _Lane, rows: NDArray[np.intp], seconds: float) -> NDArray[np.int8]:
            inside = lane.places(buffers.sizes[rows])
            codes = lane.call(lambda: self._store.get([keys[i] for i in rows.tolist()], inside), seconds)
            good = np.flatnonzero(codes == StoreCode.OK)
            _copy(buffers[rows[good]], inside[good], into_lane=False)
            return codes

        return self._move(keys, buffers, piece)

    def confirm(self, keys: Sequence[str], sizes: NDArray[np.int64]) -> NDArray[np.int8]:
        """See `ObjectStore.confirm`."""
        return self._in_time(lambda: self._store.confirm(keys, sizes))

    def exists(self, keys: Sequence[str], *, renew: bool = True) -> NDArray[np.bool_]:
        """See `ObjectStore.exists`."""
        return self._in_time(lambda: self._store.exists(keys, renew=renew))

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """See `ObjectStore.sizes`."""
        return self._in_time(lambda: self._store.sizes(keys))

    def keys(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.keys`; a walk of any length, so without the deadline."""
        return self._store.keys(prefix)

    def remove(self, keys: Sequence[str]) -> int:
        """See `ObjectStore.remove`."""
        return self._in_time(lambda: self._store.remove(keys))

    def remove_prefix(self, prefix: str) -> int:
        """See `ObjectStore.remove_prefix`; without the deadline."""
        return self._store.remove_prefix(prefix)

    def put_bytes(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put_bytes`."""
        self._in_time(lambda: self._store.put_bytes(key, data))

    def get_bytes(self, key: str) -> bytes | None:
        """See `ObjectStore.get_bytes`."""
        return self._in_time(lambda: self._store.get_bytes(key))

    def close(self) -> None:
        """See `ObjectStore.close`. The memory of calls that hang stays until the process ends."""
        if self._closed:
            return
        self._closed = True
        _kept.extend(lane for lane in self._lanes if lane.quarantined)
        self._store.close()
        for lane in self._lanes:
            lane.end()

    def _move(
        self,
        keys: Sequence[str],
        buffers: ObjectBuffers,
        piece: Callable[[_Lane, NDArray[np.intp], float], NDArray[np.int8]],
    ) -> NDArray[np.int8]:
        check_batch(keys, buffers)
        if buffers.count and int(buffers.sizes.max()) > self._lane_bytes:
            raise StoreError(
                f"an object of {int(buffers.sizes.max())} bytes does not fit in a bounce lane of "
                f"{self._lane_bytes}: give lanes more bytes"
            )
        codes = np.full(len(keys), StoreCode.NOT_REGISTERED, dtype=np.int8)
        usable = np.flatnonzero(self._regions.covers(buffers))
        ends = time.monotonic() + self._seconds
        for rows in _pieces(usable, buffers.sizes, self._lane_bytes):
            with self._lane(ends) as lane:
                codes[rows] = piece(lane, rows, ends - time.monotonic())
        return codes

    def _in_time(self, call: Callable[[], T]) -> T:
        ends = time.monotonic() + self._seconds
        with self._lane(ends) as lane:
            return lane.call(call, ends - time.monotonic())

    @contextmanager
    def _lane(self, ends: float) -> Iterator[_Lane]:
        """Take a lane, and give it back unless its call hangs: that one comes back by itself."""
        if self._closed:
            raise StoreClosed(f"the {self.kind} store is closed")
        try:
            # Lanes that only serve others come back soon; those that hang do not.
            lane = self._idle.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            raise StoreOverdue(f"all {len(self._lanes)} bounce lanes are taken by calls that hang") from None
        overdue = False
        try:
            yield lane
        except StoreOverdue:
            overdue = True
            raise
        finally:
            if not overdue:
                self._idle.put(lane)


class _Lane:
    """A thread and the memory that its calls may use."""

    def __init__(self, size: int, grace_seconds: float, idle: queue.LifoQueue[_Lane]) -> None:
        self._map = mmap.mmap(-1, size)
        self._memory = np.frombuffer(self._map, np.uint8)
        self._grace = grace_seconds
        self._idle = idle
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.address = int(self._memory.ctypes.data)
        self.quarantined = False
        # A daemon, because a call that hangs must not hold the end of the process.
        threading.Thread(target=self._work, name="caketin-bounce", daemon=True).start()

    def places(self, sizes: NDArray[np.int64]) -> ObjectBuffers:
        """Return where objects of these sizes lie in this lane, one after the other."""
        starts = np.cumsum(sizes) - sizes
        return ObjectBuffers(starts.astype(np.uint64) + np.uint64(self.address), sizes)

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """Run a call of the store; an overdue one keeps the lane until it came back.

        Raises:
            StoreOverdue: it has not returned in time.
        """
        done: Future[T] = Future()
        self._jobs.put((work, done))
        ended, _ = wait([done], max(0.0, seconds))
        if not ended:
            self.quarantined = True
            done.add_done_callback(lambda _done: self._come_back())
            raise StoreOverdue(f"a call of the store did not return within {seconds:.3g} s")
        return done.result()

    def end(self) -> None:
        """Let the thread end once its call has returned."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            try:
                result = work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

    def _come_back(self) -> None:
        time.sleep(self._grace)
        self.quarantined = False
        self._idle.put(self)
        log.info("a store call that was overdue has returned; its bounce lane is used again")


def _pieces(rows: NDArray[np.intp], sizes: NDArray[np.int64], most: int) -> Iterator[NDArray[np.intp]]:
    """Cut rows into runs of at most `most` bytes."""
    ends = np.cumsum(sizes[rows])
    at = 0
    while at < len(rows):
        before = int(ends[at - 1]) if at else 0
        stop = int(np.searchsorted(ends, before + most, side="right"))
        yield rows[at:stop]
        at = stop


def _copy(outside: ObjectBuffers, inside: ObjectBuffers, *, into_lane: bool) -> None:
    for i in range(outside.count):
        at = int(inside.addresses[i])
        for address, length in zip(*outside.fragments(i), strict=True):
            target, source = (at, address) if into_lane else (address, at)
            ctypes.memmove(target, source, length)
            at += length
