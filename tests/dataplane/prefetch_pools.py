"""Small pool sets, and what was reported of them: what the tests of prefetches share."""

from __future__ import annotations

import numpy as np

from dataplane.object_store import StoreCode
from metadata.page_runs import runs_to_mask
from metadata.pools import AllPages, BlockGroups, Part, PoolSpec, RankPool, TrailingPages
from tests.dataplane.mover_world import PoolShape, World, page_hash


def pool(name, policy=None, *, parts=("page",), count=1, owned=(0,), indices_from=None) -> PoolShape:
    spec = PoolSpec(
        name, tuple(Part(p, "uint8", 8) for p in parts), count, policy or AllPages(), indices_from
    )
    return PoolShape(RankPool(spec, tuple(owned)))


KV_SWA = [pool("kv", parts=("k", "v"), count=2, owned=(0, 1)), pool("swa", TrailingPages(2))]
KV_INDEXER = [pool("kv"), pool("indexer", indices_from="kv")]
KV_BLOCKS = [pool("kv"), pool("blocks", BlockGroups(2, 2))]


def store_everything(world: World, pages: int) -> None:
    for name in world.names:
        for page in range(pages):
            world.store_page(name, page)


def lose_a_lease_once(world: World) -> None:
    """The first read of the first page fails for its lease, the second does not."""
    key = world.keys("kv", 0)[0]
    world.store.on_get[key] = StoreCode.LEASE_LOST
    plain = world.store.get

    def once(keys, buffers):
        codes = plain(keys, buffers)
        world.store.on_get.pop(key, None)
        return codes

    world.store.get = once


def reported(world: World) -> dict[tuple[str, int, int], list[str]]:
    number = {page_hash(p): p for p in range(64)}
    found: dict[tuple[str, int, int], list[str]] = {}
    for hashes, _, missing in world.claims.reports:
        for name, said in missing.items():
            mask = runs_to_mask(said.pages, len(hashes))
            for at in np.flatnonzero(mask).tolist():
                for shard in said.shards:
                    found.setdefault((name, number[hashes[at]], shard), []).append(said.reason)
    return found
