"""The read log: of every call of the store, what was read and what may still be written (M1)."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dataplane.object_store import MEMORY_IN_DOUBT, StoreCode, StoreUnavailable
from dataplane.read_log import ReadLog
from dataplane.transfer_limits import TransferCancelled
from tests.dataplane.mover_world import (
    all_slots,
    hashes_of,
    promise_of,
    world_of,
)
from tests.dataplane.prefetch_pools import (
    KV_INDEXER,
    KV_SWA,
    lose_a_lease_once,
    store_everything,
)


def pages_in(masks: dict[str, np.ndarray]) -> dict[str, list[int]]:
    return {name: np.flatnonzero(mask).tolist() for name, mask in masks.items()}


def test_while_a_call_is_blocked_the_log_says_what_was_read_and_what_may_still_be_written():
    with world_of(KV_SWA, chunk=2) as world:
        store_everything(world, 5)
        blocked, go_on = threading.Event(), threading.Event()

        def block(verb, number):
            if (verb, number) == ("get", 1):
                blocked.set()
                assert go_on.wait(20)

        world.store.raising = block
        slots, calls, results = all_slots(world.names, 5), ReadLog(world.names, 5), []
        world.wipe()
        promise = promise_of(world, {5}, 5)
        thread = threading.Thread(
            target=lambda: results.append(world.mover.prefetch(hashes_of(5), promise, slots, calls=calls))
        )
        thread.start()
        try:
            assert blocked.wait(20)
            so_far = calls.close()
        finally:
            go_on.set()
            thread.join(20)
        assert pages_in(so_far.read) == {"kv": [0, 1], "swa": []}
        assert pages_in(so_far.written) == {"kv": [2, 3], "swa": []}
        assert all(world.intact("kv", page, int(slots["kv"][page])) for page in (0, 1))
        (done,) = results
        assert (done.pages, type(done.error)) == (0, TransferCancelled)
        assert len(world.store.calls("get")) == 2, "no call begins once the log is closed"
        assert pages_in(calls.close().read) == {"kv": [0, 1, 2, 3], "swa": []}


@pytest.mark.parametrize("code", [*MEMORY_IN_DOUBT, StoreCode.MISSING, StoreCode.CHECKSUM])
def test_a_page_that_a_call_left_in_doubt_is_not_read_and_may_still_be_written(code):
    with world_of(KV_INDEXER) as world:
        store_everything(world, 3)
        world.store.on_get[world.keys("indexer", 1)[0]] = code
        calls = ReadLog(world.names, 3)
        world.mover.prefetch(hashes_of(3), promise_of(world, {3}, 3), all_slots(world.names, 3), calls=calls)
        doubt = [1] if code in MEMORY_IN_DOUBT else []
        assert pages_in(calls.close().written) == {"kv": [], "indexer": doubt}
        assert pages_in(calls.close().read) == {"kv": [0, 1, 2], "indexer": [0, 2]}


def test_a_page_that_was_read_at_the_second_try_stays_in_doubt():
    """The first try may still write to it, and no one can say what."""
    with world_of(KV_INDEXER) as world:
        store_everything(world, 2)
        lose_a_lease_once(world)
        calls = ReadLog(world.names, 2)
        world.mover.prefetch(hashes_of(2), promise_of(world, {2}, 2), all_slots(world.names, 2), calls=calls)
        assert pages_in(calls.close().written) == {"kv": [0], "indexer": []}
        assert pages_in(calls.close().read) == {"kv": [1], "indexer": [0, 1]}


def test_a_call_that_raises_leaves_all_of_its_slots_in_doubt():
    with world_of(KV_INDEXER, chunk=2) as world:
        store_everything(world, 4)

        def raising(verb, number):
            if (verb, number) == ("get", 2):
                raise StoreUnavailable("the master is gone")

        world.store.raising = raising
        calls = ReadLog(world.names, 4)
        world.mover.prefetch(hashes_of(4), promise_of(world, {4}, 4), all_slots(world.names, 4), calls=calls)
        so_far = calls.close()
        assert pages_in(so_far.written) == {"kv": [2, 3], "indexer": []}
        assert pages_in(so_far.read) == {"kv": [0, 1], "indexer": [0, 1]}
