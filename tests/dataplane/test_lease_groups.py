"""Under memory pressure Mooncake keeps and evicts a page as one, by the group that its objects are put in."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.mooncake_native import MooncakeSettings
from dataplane.mooncake_node import MooncakeCluster
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectBuffers
from metadata.codec import PageHashes
from metadata.object_keys import flat_object_keys, group_ids

HERE, WHY_NOT = MooncakeStore.available()
pytestmark = pytest.mark.skipif(not HERE, reason=WHY_NOT)

NS = "0123456789abcdef"
POOLS = 3
SIZE = 256 << 10
PAGES, LEASED = 40, 15


@pytest.fixture
def store() -> Iterator[MooncakeStore]:
    with MooncakeCluster(64 << 20, lease_seconds=60) as cluster:
        found = MooncakeStore(MooncakeSettings(master=cluster.master, master_http=cluster.master_http))
        yield found
        found.close()


def put_pages(store: MooncakeStore, memory: np.ndarray, pages: int, *, grouped: bool) -> list[str]:
    """Put pages of three pools, pool after pool; return the keys in that order."""
    hashes = PageHashes(secrets.token_bytes(32 * pages))
    keys = [k for pool in range(POOLS) for k in flat_object_keys(NS, hashes, [f"/{pool:08x}.0/page"])]
    addresses = np.full(len(keys), memory.ctypes.data, np.uint64)
    groups = group_ids(NS, hashes) * POOLS if grouped else None
    store.put(keys, ObjectBuffers(addresses, np.full(len(keys), SIZE)), groups)
    return keys


@pytest.mark.parametrize("grouped", [True, False])
def test_a_lease_of_one_object_keeps_the_page_if_and_only_if_it_is_grouped(store, grouped):
    memory = np.ones(SIZE, np.uint8)
    store.register(int(memory.ctypes.data), memory.nbytes)
    keys = put_pages(store, memory, PAGES, grouped=grouped)
    assert store.exists(keys[:LEASED]).all()
    for _ in range(12):  # three times what fits
        put_pages(store, memory, 10, grouped=grouped)
    there = store.exists(keys, renew=False).reshape(POOLS, PAGES)
    assert there[0, :LEASED].all()
    assert there[:, :LEASED].all() == grouped
    if grouped:
        assert (there.all(axis=0) == there.any(axis=0)).all()
