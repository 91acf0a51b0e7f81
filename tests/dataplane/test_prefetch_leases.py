"""Prefetch: what is promised is checked and leased before the first read, and stays so (T3)."""

from __future__ import annotations

from dataplane.prefetch import Prefetch
from dataplane.transfer import RankPools
from metadata.object_keys import parse
from metadata.pools import Part, PoolSpec, RankPool, TrailingPages
from tests.dataplane.mover_world import (
    NS,
    PoolShape,
    all_slots,
    hashes_of,
    page_hash,
    promise_of,
    world_of,
)
from tests.dataplane.prefetch_pools import (
    KV_INDEXER,
    KV_SWA,
    lose_a_lease_once,
    pool,
    reported,
    store_everything,
)


def test_a_lease_that_ran_out_during_a_read_is_read_again_once():
    with world_of(KV_INDEXER) as world:
        store_everything(world, 2)
        lose_a_lease_once(world)
        slots = all_slots(world.names, 2)
        world.wipe()
        done = world.mover.prefetch(hashes_of(2), promise_of(world, {2}, 2), slots)
        assert done.transfers_done
        assert world.claims.reports == []
        assert world.intact("kv", 0, int(slots["kv"][0]))


def test_one_object_of_every_promised_page_is_checked_and_leased_before_the_first_read():
    with world_of(KV_SWA) as world:
        store_everything(world, 6)
        world.mover.prefetch(hashes_of(6), promise_of(world, {5}, 6), all_slots(world.names, 6))
        verb, keys, _ = world.store.log[0]
        assert verb == "exists"
        assert keys == [world.keys("kv", p)[0] for p in range(5)] + [
            key for p in (3, 4) for key in world.keys("swa", p)
        ]
        assert len(world.store.calls("exists")) == 1


def test_a_window_that_went_though_its_group_stays_is_found_before_the_first_read_and_the_next_is_leased():
    """Groups are a hint: in a full segment windows were seen to go while the rest of the page stayed."""
    with world_of(KV_SWA) as world:
        store_everything(world, 6)
        world.real.remove(world.keys("swa", 5))
        done = world.mover.prefetch(
            hashes_of(6), promise_of(world, set(range(1, 7)), 6), all_slots(world.names, 6)
        )
        assert (done.leased_pages, done.pages) == (5, 5)
        (first, second), reads = world.store.calls("exists"), world.store.calls("get")
        assert first[1][-2:] == [k for p in (4, 5) for k in world.keys("swa", p)][-2:]
        assert second[1] == [k for p in (3, 4) for k in world.keys("swa", p)]
        assert not any(world.keys("swa", 5)[0] in keys for _, keys, _ in reads)
        assert reported(world) == {("swa", 5, 0): ["gone"]}


def test_a_rank_with_windows_only_leases_the_window():
    shapes = [
        PoolShape(RankPool(PoolSpec("kv", (Part("k", "uint8", 8),), 2), ())),
        pool("mamba", TrailingPages(1)),
    ]
    with world_of(shapes) as world:
        store_everything(world, 4)
        done = world.mover.prefetch(hashes_of(4), promise_of(world, {4}, 4), all_slots(["mamba"], 4))
        assert done.transfers_done
        assert world.store.log[0][:2] == ("exists", world.keys("mamba", 3))


def test_a_page_that_the_lease_check_does_not_find_is_reported_and_not_read():
    with world_of(KV_SWA) as world:
        store_everything(world, 4)
        world.real.remove(world.keys("kv", 2))
        done = world.mover.prefetch(
            hashes_of(4), promise_of(world, {1, 2, 3, 4}, 4), all_slots(world.names, 4)
        )
        assert done.pages == 2
        read = {parse(k).page_hash for _, keys, _ in world.store.calls("get") for k in keys}
        assert read == {page_hash(0), page_hash(1)}
        assert reported(world) == {("kv", 2, 0): ["gone"]}


def test_leases_are_renewed_while_a_long_transfer_runs():
    now = [0.0]
    with world_of(KV_SWA, chunk=1) as world:
        store_everything(world, 9)
        world.store.lease_seconds = 9.0

        def slow(verb, _number):
            if verb == "get":
                now[0] += 1.0

        world.store.raising = slow
        done = Prefetch(
            world.store,
            world.claims,
            RankPools(NS, world.bound),
            page_hashes=hashes_of(9),
            promise=promise_of(world, {9}, 9),
            slots=all_slots(world.names, 9),
            clock=lambda: now[0],
        ).run()
        assert done.transfers_done
        verbs = [verb for verb, _, _ in world.store.log]
        assert "".join(v[0] for v in verbs) == "e" + "gggeggg" + "eggge" + "gg"
        kept = {
            *(world.keys("kv", p)[0] for p in range(9)),
            *(k for p in (7, 8) for k in world.keys("swa", p)),
        }
        assert all(set(keys) == kept for _, keys, _ in world.store.calls("exists"))


def test_a_page_found_gone_at_a_renewal_is_reported_once():
    with world_of(KV_SWA, chunk=1) as world:
        store_everything(world, 4)
        world.store.lease_seconds = 0.0

        def evict(verb, number):
            if (verb, number) == ("get", 1):
                world.real.remove(world.keys("kv", 3))

        world.store.raising = evict
        done = world.mover.prefetch(
            hashes_of(4), promise_of(world, {1, 2, 3, 4}, 4), all_slots(world.names, 4)
        )
        assert done.pages == 3
        assert {where[:2] for where in reported(world)} == {("kv", 3)}
        assert len(world.claims.reports) == 1
