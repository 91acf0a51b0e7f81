"""Behind bounce buffers the deadline holds, and memory under a call that hangs is used by nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataplane.bounce_store import BounceStore, StoreOverdue
from dataplane.file_store import FileStore
from dataplane.object_store import ObjectBuffers, StoreClosed, StoreCode, StoreError
from tests.dataplane.conftest import Arena, object_key

NS = "0123456789abcdef"
CALL_SECONDS = 0.3
SLACK = 5.0
KEYS = [object_key(NS, i) for i in range(3)]
SIZE = 1000


class HangingStore(FileStore):
    """A file store whose next gets and puts hang once their memory was handed over, until let go."""

    hang = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.let_go = threading.Event()

    def get(self, keys: list[str], buffers: ObjectBuffers) -> np.ndarray:
        if self.hang:
            self.let_go.wait(60)
        return super().get(keys, buffers)

    def put(self, keys: list[str], buffers: ObjectBuffers, groups: list[str] | None = None) -> np.ndarray:
        if self.hang:
            self.let_go.wait(60)
        return super().put(keys, buffers, groups)


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[HangingStore]:
    store = HangingStore(tmp_path / "store")
    yield store
    store.let_go.set()


@pytest.fixture
def store(inner: HangingStore) -> Iterator[BounceStore]:
    bounced = BounceStore(inner, call_seconds=CALL_SECONDS, lanes=2, lane_bytes=4 * SIZE, grace_seconds=0.2)
    yield bounced
    inner.let_go.set()
    bounced.close()


@pytest.fixture
def arena(store: BounceStore) -> Arena:
    return Arena(store, 1 << 16)


def until(true) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_call_that_hangs_ends_at_its_deadline_and_never_writes_into_the_callers_memory(
    inner: HangingStore, store: BounceStore, arena: Arena
):
    assert not store.put(KEYS, arena.holding([b"x" * SIZE] * 3)).any()
    inner.hang = True
    room = arena.room([SIZE] * 3)
    started = time.monotonic()
    with pytest.raises(StoreOverdue, match="did not return"):
        store.get(KEYS, room)
    assert time.monotonic() - started < CALL_SECONDS + SLACK
    assert store.quarantined == 1
    inner.hang = False
    inner.let_go.set()
    until(lambda: store.quarantined == 0)
    assert arena.bytes_of(room) == [b"\xee" * SIZE] * 3
    assert not store.get(KEYS, room).any()
    assert arena.bytes_of(room) == [b"x" * SIZE] * 3


def test_the_lane_of_a_call_that_hangs_is_used_by_nobody_until_it_came_back(
    inner: HangingStore, store: BounceStore, arena: Arena
):
    kept = arena.holding([b"a" * SIZE])
    inner.hang = True
    with pytest.raises(StoreOverdue):
        store.put(KEYS[:1], kept)
    inner.hang = False
    other = arena.holding([b"b" * SIZE])
    for i in range(10):  # over the other lane, one after the other
        assert not store.put([object_key(NS, 10 + i)], other).any()
    inner.let_go.set()
    until(lambda: store.quarantined == 0)
    room = arena.room([SIZE])
    assert not store.get(KEYS[:1], room).any()
    assert arena.bytes_of(room) == [b"a" * SIZE]


def test_when_all_lanes_hang_a_call_fails_in_time_and_later_calls_work_again(
    inner: HangingStore, store: BounceStore, arena: Arena
):
    kept = arena.holding([b"a" * SIZE])
    inner.hang = True
    for _ in range(2):
        with pytest.raises(StoreOverdue):
            store.put(KEYS[:1], kept)
    started = time.monotonic()
    with pytest.raises(StoreOverdue, match="all 2 bounce lanes"):
        store.exists(KEYS)
    assert time.monotonic() - started < CALL_SECONDS + SLACK
    inner.hang = False
    inner.let_go.set()
    until(lambda: store.quarantined == 0)
    assert store.exists(KEYS).tolist() == [True, False, False]


def test_a_lane_rests_for_a_grace_period_after_its_call_came_back(inner: HangingStore, store: BounceStore):
    arena = Arena(store, 1 << 16)
    inner.hang = True
    with pytest.raises(StoreOverdue):
        store.put(KEYS[:1], arena.holding([b"a" * SIZE]))
    came_back = time.monotonic()
    inner.let_go.set()
    until(lambda: store.quarantined == 0)
    assert time.monotonic() - came_back >= 0.2


def test_an_object_larger_than_a_lane_is_refused_and_a_larger_batch_goes_in_pieces(
    store: BounceStore, arena: Arena
):
    with pytest.raises(StoreError, match="give lanes more bytes"):
        store.put(KEYS[:1], arena.holding([b"x" * (4 * SIZE + 1)]))
    keys = [object_key(NS, i) for i in range(20)]
    objects = [bytes([i]) * SIZE for i in range(20)]
    assert not store.put(keys, arena.holding(objects)).any()
    room = arena.room([SIZE] * 20)
    assert not store.get(keys, room).any()
    assert arena.bytes_of(room) == objects


def test_memory_that_is_not_registered_is_refused_and_a_closed_store_too(store: BounceStore, arena: Arena):
    stray = np.zeros(SIZE, np.uint8)
    buffers = ObjectBuffers(np.array([stray.ctypes.data], np.uint64), np.array([SIZE]))
    assert store.put(KEYS[:1], buffers).tolist() == [StoreCode.NOT_REGISTERED]
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        store.exists(KEYS)
