"""Back up: KV first, only what is confirmed is claimed, and `transfers_done` only at the true end."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.control_plane import ControlRefused
from dataplane.messages import control
from dataplane.object_store import StoreCode, StoreUnavailable
from dataplane.page_mover import NO_SLOT
from metadata.codec import PageHashes
from metadata.errors import InvalidInput
from metadata.object_keys import parse
from metadata.pools import AllPages, Part, PoolSpec, RankPool, TrailingPages
from tests.dataplane.mover_world import (
    PoolShape,
    World,
    all_slots,
    hashes_of,
    page_hash,
    pool_sets,
    promise_of,
    slots_for,
    world_of,
)

MANY = settings(max_examples=60, deadline=None)
PUT_FAULTS = [StoreCode.NO_SPACE, StoreCode.TRANSFER_FAILED, StoreCode.UNAVAILABLE, StoreCode.NOT_REGISTERED]

KV_SWA = [
    PoolShape(RankPool(PoolSpec("kv", (Part("k", "uint8", 8), Part("v", "uint8", 8)), 2), (0, 1))),
    PoolShape(RankPool(PoolSpec("swa", (Part("page", "uint8", 5),), hit_policy=TrailingPages(1)), (0,))),
]
DERIVED = [
    PoolShape(RankPool(PoolSpec("kv", (), logical=True), (0,))),
    PoolShape(RankPool(PoolSpec("c4", (Part("page", "uint8", 9),), indices_from="kv"), (0,))),
    PoolShape(RankPool(PoolSpec("swa", (Part("page", "uint8", 5),), hit_policy=TrailingPages(1)), (0,))),
]


def stage_of(world: World, key: str) -> int:
    pool_id = parse(key).pool_id
    name = next(n for n in world.names if world.specs[n].pool_id == pool_id)
    return next(i for i, stage in enumerate(world.stages) if name in stage)


def watch_order(world: World, pages: int) -> None:
    """O1, at every put: all objects of earlier stages of the page are in the store and were confirmed."""
    number = {page_hash(p): p for p in range(pages)}

    def before_put(keys):
        for key in keys:
            page = number[parse(key).page_hash]
            for stage in world.stages[: stage_of(world, key)]:
                for name in stage:
                    for shard in world.shards(name):
                        assert world.complete(name, page, shard), f"{key} is put before {name} is stored"
                    assert set(world.keys(name, page)) <= world.store.confirmed, f"{key} before confirmation"

    world.store.before_put = before_put


def watch_claims(world: World) -> None:
    """O2 and O3, at every commit: what is named is in the store, of the right size, and was confirmed."""

    def check(named):
        number = {page_hash(p): p for p in range(64)}
        for pool, page, shard in named:
            assert world.complete(pool, number[page], shard), f"{pool} {number[page]} is claimed, not stored"
            assert set(world.keys(pool, number[page], shard)) <= world.store.confirmed

    world.claims.check = check


def confirmed_shards(world: World, slots: dict[str, np.ndarray]) -> set[tuple[str, bytes, int]]:
    return {
        (name, page_hash(page), shard)
        for name, at in slots.items()
        for page in np.flatnonzero(at != NO_SLOT).tolist()
        for shard in world.shards(name)
        if set(world.keys(name, page, shard)) <= world.store.confirmed
    }


def complete_shards(world: World, pages: int) -> set[tuple[str, bytes, int]]:
    return {
        (name, page_hash(page), shard)
        for name in world.names
        for page in range(pages)
        for shard in world.shards(name)
        if world.complete(name, page, shard)
    }


@st.composite
def faulty_back_ups(draw):
    pool_set = draw(pool_sets())
    pages = draw(st.integers(1, 9))
    chunk = draw(st.sampled_from([2, 3, 256]))
    with_bytes = [s.pool.spec.name for s in pool_set if not s.pool.spec.logical and s.pool.owned_shards]
    slots = draw(slots_for(with_bytes, pages))
    seed = draw(st.randoms(use_true_random=False))
    return pool_set, pages, chunk, slots, seed


def plant_faults(world: World, pages: int, dice, *, wrong_sizes: bool = True) -> None:
    for name in world.names:
        for page in range(pages):
            for key in world.keys(name, page):
                roll = dice.random()
                if roll < 0.06:
                    world.store.on_put[key] = dice.choice(PUT_FAULTS)
                elif roll < 0.12:
                    world.store.unwritten.add(key)
                elif roll < 0.18 and wrong_sizes:
                    world.put_raw(key, b"x" * 1000)


@MANY
@given(faulty_back_ups())
def test_no_object_of_a_later_stage_is_put_before_all_earlier_ones_of_its_page_are_confirmed(case):
    pool_set, pages, chunk, slots, dice = case
    with world_of(pool_set, chunk) as world:
        plant_faults(world, pages, dice)
        watch_order(world, pages)
        world.fill(slots)
        world.mover.back_up(hashes_of(pages), slots)


@MANY
@given(faulty_back_ups())
def test_at_the_end_every_later_object_in_the_store_has_all_its_earlier_ones(case):
    pool_set, pages, chunk, slots, dice = case
    with world_of(pool_set, chunk) as world:
        plant_faults(world, pages, dice, wrong_sizes=False)
        world.fill(slots)
        world.mover.back_up(hashes_of(pages), slots)
        for number, stage in enumerate(world.stages):
            for name in stage:
                for page in range(pages):
                    if (world.real.sizes(world.keys(name, page)) >= 0).any():
                        for earlier in (n for s in world.stages[:number] for n in s):
                            assert all(world.complete(earlier, page, s) for s in world.shards(earlier))


@MANY
@given(faulty_back_ups())
def test_claims_are_exactly_the_confirmed_shards_of_what_was_asked(case):
    pool_set, pages, chunk, slots, dice = case
    with world_of(pool_set, chunk) as world:
        plant_faults(world, pages, dice)
        watch_claims(world)
        world.fill(slots)
        done = world.mover.back_up(hashes_of(pages), slots)
        assert world.claims.claimed == confirmed_shards(world, slots)
        assert world.claims.claimed <= complete_shards(world, pages)
        for name, at in slots.items():
            whole = [
                at[p] != NO_SLOT
                and all((name, page_hash(p), s) in world.claims.claimed for s in world.shards(name))
                for p in range(pages)
            ]
            assert done.stored[name].tolist() == whole


@MANY
@given(faulty_back_ups())
def test_claims_are_exactly_what_a_fresh_store_holds(case):
    pool_set, pages, chunk, slots, dice = case
    with world_of(pool_set, chunk) as world:
        plant_faults(world, pages, dice, wrong_sizes=False)
        world.fill(slots)
        world.mover.back_up(hashes_of(pages), slots)
        assert world.claims.claimed == complete_shards(world, pages)


@MANY
@given(faulty_back_ups())
def test_transfers_done_says_whether_every_asked_page_is_stored_and_claimed(case):
    pool_set, pages, chunk, slots, dice = case
    with world_of(pool_set, chunk) as world:
        if dice.random() < 0.7:
            plant_faults(world, pages, dice)
        if dice.random() < 0.3:
            world.claims.reject = lambda page, _pool: page[0] < 40
        world.fill(slots)
        done = world.mover.back_up(hashes_of(pages), slots)
        asked = {
            (name, page_hash(page), shard)
            for name, at in slots.items()
            for page in np.flatnonzero(at != NO_SLOT).tolist()
            for shard in world.shards(name)
        }
        assert done.transfers_done == (asked <= world.claims.claimed)


@MANY
@given(faulty_back_ups(), st.sampled_from(["put", "confirm", "remove"]), st.integers(0, 6))
def test_a_store_that_raises_in_the_middle_loses_no_confirmed_page_and_claims_no_other(case, verb, when):
    pool_set, pages, chunk, slots, dice = case
    with world_of(pool_set, chunk) as world:
        plant_faults(world, pages, dice)
        watch_claims(world)
        raised = []

        def raising(called, number):
            if (called, number) == (verb, when):
                raised.append(True)
                raise StoreUnavailable("the test says so")

        world.store.raising = raising
        world.fill(slots)
        done = world.mover.back_up(hashes_of(pages), slots)
        assert world.claims.claimed == confirmed_shards(world, slots)
        if raised:
            assert isinstance(done.error, StoreUnavailable)
            assert not done.transfers_done
        else:
            assert done.error is None


@MANY
@given(faulty_back_ups(), st.lists(st.booleans(), max_size=12))
def test_claims_that_a_control_plane_missed_come_with_a_later_commit_or_as_an_error(case, away):
    pool_set, pages, chunk, slots, dice = case
    with world_of(pool_set, chunk) as world:
        plant_faults(world, pages, dice)
        watch_claims(world)
        world.claims.away = lambda _verb, number: number < len(away) and away[number]
        world.fill(slots)
        done = world.mover.back_up(hashes_of(pages), slots)
        if done.error is None:
            assert world.claims.claimed == confirmed_shards(world, slots)
        else:
            assert done.error.code == "control_plane_away"
            assert not done.transfers_done
            assert away
        assert world.claims.claimed <= confirmed_shards(world, slots)


@MANY
@given(faulty_back_ups())
def test_backing_up_again_after_every_fault_is_gone_completes_it(case):
    pool_set, pages, chunk, slots, dice = case
    with world_of(pool_set, chunk) as world:
        plant_faults(world, pages, dice)
        world.fill(slots)
        world.mover.back_up(hashes_of(pages), slots)
        world.store.on_put, world.store.unwritten = {}, set()
        everything = all_slots(world.names, pages)
        world.fill(everything)
        done = world.mover.back_up(hashes_of(pages), everything)
        assert done.transfers_done
        assert done.committed == pages
        assert done.bytes == pages * sum(
            len(world.shards(n)) * world.specs[n].bytes_per_page for n in world.names
        )


def test_a_failed_anchor_keeps_its_page_s_sidecar_out_and_lets_other_pages_go_on():
    with world_of(KV_SWA) as world:
        world.store.on_put[world.keys("kv", 1)[3]] = StoreCode.TRANSFER_FAILED
        slots = all_slots(world.names, 3)
        world.fill(slots)
        done = world.mover.back_up(hashes_of(3), slots)
        assert done.stored["kv"].tolist() == done.stored["swa"].tolist() == [True, False, True]
        assert world.sizes("swa", 1, 0) == [-1]
        assert world.sizes("kv", 1, 0) == [8, 8]
        assert ("kv", page_hash(1), 0) in world.claims.claimed
        assert ("kv", page_hash(1), 1) not in world.claims.claimed
        assert not done.transfers_done


def test_a_failed_derived_pool_keeps_the_sidecar_of_a_logical_anchor_out():
    with world_of(DERIVED) as world:
        world.store.unwritten.add(world.keys("c4", 0)[0])
        slots = all_slots(world.names, 2)
        world.fill(slots)
        done = world.mover.back_up(hashes_of(2), slots)
        assert done.stored["swa"].tolist() == [False, True]
        assert world.sizes("swa", 0, 0) == [-1]


def test_a_sidecar_alone_is_stored_only_where_its_anchor_came_with_an_earlier_call():
    with world_of(KV_SWA) as world:
        kv = all_slots(["kv"], 3)
        kv["kv"][1] = NO_SLOT
        world.fill(kv)
        assert world.mover.back_up(hashes_of(3), kv).transfers_done
        swa = all_slots(["swa"], 3)
        world.fill(swa)
        done = world.mover.back_up(hashes_of(3), swa)
        assert done.stored["swa"].tolist() == [True, False, True]
        assert world.sizes("swa", 1, 0) == [-1]


def test_a_put_that_succeeds_and_leaves_nothing_is_not_claimed():
    with world_of(KV_SWA) as world:
        slots = all_slots(world.names, 2)
        world.fill(slots)
        world.store.unwritten |= set(world.keys("swa", 0))
        done = world.mover.back_up(hashes_of(2), slots)
        assert done.stored["swa"].tolist() == [False, True]
        assert ("swa", page_hash(0), 0) not in world.claims.claimed


def test_an_object_of_another_size_is_removed_by_its_key_and_written_again_before_its_claim():
    with world_of(KV_SWA) as world:
        slots = all_slots(world.names, 2)
        world.fill(slots)
        key = world.keys("kv", 1)[2]
        world.put_raw(key, b"another size")
        watch_claims(world)
        watch_order(world, 2)
        assert world.mover.back_up(hashes_of(2), slots).transfers_done
        assert world.store.calls("remove") == [("remove", [key], None)]
        raw = world.real.get_bytes(key)
        assert raw is not None
        assert len(raw) == 8


def test_every_pool_of_a_chunk_is_put_before_its_one_commit():
    with world_of(KV_SWA, chunk=2) as world:
        slots = all_slots(world.names, 5)
        world.fill(slots)
        put: set[str] = set()
        claims = []

        def check(named):
            claims.append(sorted({(pool, page) for pool, page, _ in named}))
            for pool, page in claims[-1]:
                at = next(i for i in range(5) if page_hash(i) == page)
                assert set(world.keys(pool, at)) <= put

        world.store.before_put = put.update
        world.claims.check = check
        world.mover.back_up(hashes_of(5), slots)
        chunks = [(0, 1), (2, 3), (4,)]
        assert claims == [sorted((n, page_hash(i)) for n in ("kv", "swa") for i in c) for c in chunks]


def test_bytes_of_one_chunk_move_at_a_time_and_beside_them_the_next_is_made_ready():
    with world_of(KV_SWA, chunk=1) as world:
        slots = all_slots(world.names, 3)
        world.fill(slots)
        moving, most, asked = 0, 0, threading.Event()
        put, exists = world.store.put, world.store.exists

        def counted_put(keys, buffers, groups=None):
            nonlocal moving, most
            moving += 1
            most = max(most, moving)
            if set(keys) & set(world.keys("kv", 0)):
                assert asked.wait(10), "the next chunk waits for this one"
            codes = put(keys, buffers, groups)
            moving -= 1
            return codes

        def noted_exists(keys):
            if set(keys) & set(world.keys("kv", 1)):
                asked.set()
            return exists(keys)

        world.store.put, world.store.exists = counted_put, noted_exists
        assert world.mover.back_up(hashes_of(3), slots).transfers_done
        assert most == 1


def test_after_a_put_that_raises_no_other_chunk_is_put():
    """Field report 11: each try on a dead segment costs a time-out, and the next chunk is ready by then."""
    with world_of(KV_SWA, chunk=1) as world:
        slots = all_slots(world.names, 3)
        world.fill(slots)
        asked, exists = threading.Event(), world.store.exists

        def noted_exists(keys):
            if set(keys) & set(world.keys("kv", 1)):
                asked.set()
            return exists(keys)

        def dead(_keys):
            assert asked.wait(10), "the next chunk is not made ready"
            raise StoreUnavailable("the node is gone")

        world.store.exists, world.store.before_put = noted_exists, dead
        done = world.mover.back_up(hashes_of(3), slots)
        assert isinstance(done.error, StoreUnavailable)
        assert len(world.store.calls("put")) == 1


def test_a_chunk_that_fails_while_it_is_made_ready_does_not_cut_the_one_that_moves():
    with world_of(KV_SWA, chunk=1) as world:
        slots = all_slots(world.names, 3)
        world.fill(slots)
        failed, exists = threading.Event(), world.store.exists

        def failing_exists(keys):
            if set(keys) & set(world.keys("kv", 1)):
                failed.set()
                raise StoreUnavailable("the master is gone")
            return exists(keys)

        def patient(_keys):
            assert failed.wait(10), "the next chunk is not made ready"

        world.store.exists, world.store.before_put = failing_exists, patient
        done = world.mover.back_up(hashes_of(3), slots)
        assert isinstance(done.error, StoreUnavailable)
        assert {name: at.tolist() for name, at in done.stored.items()} == {
            "kv": [True, False, False],
            "swa": [True, False, False],
        }
        assert done.committed == 1


def test_a_commit_that_is_refused_for_good_ends_the_transfer():
    with world_of(KV_SWA, chunk=1) as world:
        slots = all_slots(world.names, 3)
        world.fill(slots)

        def refuse(_verb, _number):
            raise ControlRefused("an older life", [], refusal="stale_incarnation", status=409)

        world.claims.away = refuse
        done = world.mover.back_up(hashes_of(3), slots)
        assert isinstance(done.error, ControlRefused)
        assert not done.transfers_done
        assert len(world.claims.commits) == 1
        assert done.stored["kv"].tolist() in ([True, False, False], [True, True, False])


def test_a_redis_that_is_away_for_one_commit_costs_no_claim():
    with world_of(KV_SWA, chunk=1) as world:
        slots = all_slots(world.names, 3)
        world.fill(slots)

        def away_once(_verb, number):
            if number == 0:
                raise ControlRefused("Redis is away", [], refusal="redis_unavailable", status=503)
            return False

        world.claims.away = away_once
        done = world.mover.back_up(hashes_of(3), slots)
        assert done.error is None
        assert done.transfers_done
        assert done.committed == 3


def test_a_commit_answered_for_pages_that_were_not_in_it_counts_as_no_answer():
    with world_of(KV_SWA) as world:
        slots = all_slots(world.names, 1)
        world.fill(slots)
        plain = world.claims.commit

        def elsewhere(ns, hashes, stored):
            result = plain(ns, hashes, stored)
            wrong = control.Rejection(page=7, pool="kv", code="anchor_missing")
            return control.CommitResult(committed=0, complete=0, rejected=[*result.rejected, wrong])

        world.claims.commit = elsewhere
        done = world.mover.back_up(hashes_of(1), slots)
        assert done.error is not None
        assert not done.transfers_done


def test_rejected_pages_are_named_and_not_counted_as_committed():
    with world_of(KV_SWA, chunk=2) as world:
        slots = all_slots(world.names, 4)
        world.fill(slots)
        world.claims.reject = lambda page, pool: pool == "swa" and page == page_hash(3)
        done = world.mover.back_up(hashes_of(4), slots)
        assert done.rejected == [control.Rejection(page=3, pool="swa", code="anchor_missing")]
        assert done.committed == 4
        assert not done.transfers_done


def test_an_exception_of_the_caller_s_own_still_leaves_the_confirmed_pages_claimed():
    with world_of(KV_SWA, chunk=1) as world:
        slots = all_slots(world.names, 2)
        world.fill(slots)

        def progress(name, _pages):
            if name == "swa":
                raise KeyError(name)

        with pytest.raises(KeyError):
            world.mover.back_up(hashes_of(2), slots, progress)
        assert world.claims.claimed == complete_shards(world, 2)


def test_progress_adds_up_to_what_is_stored():
    with world_of(KV_SWA, chunk=2) as world:
        slots = all_slots(world.names, 5)
        world.fill(slots)
        world.store.on_put[world.keys("kv", 4)[0]] = StoreCode.NO_SPACE
        seen: dict[str, int] = {}
        done = world.mover.back_up(
            hashes_of(5), slots, lambda n, pages: seen.update({n: seen.get(n, 0) + pages})
        )
        assert seen == {n: int(m.sum()) for n, m in done.stored.items()} == {"kv": 4, "swa": 4}


BAD_SLOTS = {
    "too few": (np.arange(2), "bad_shape"),
    "two dimensions": (np.zeros((3, 1), np.int64), "bad_shape"),
    "floats": (np.zeros(3), "not_integer"),
    "past the end": (np.array([0, 24, 1]), "out_of_range"),
    "below none": (np.array([0, -2, 1]), "out_of_range"),
    "one slot for two pages": (np.array([4, 1, 4]), "duplicate"),
}


@pytest.mark.parametrize("case", BAD_SLOTS)
@pytest.mark.parametrize("call", ["back_up", "prefetch"])
def test_slots_that_do_not_fit_are_refused_before_a_byte_moves(case, call):
    slots, code = BAD_SLOTS[case]
    with world_of(KV_SWA) as world:
        given_slots = {"kv": slots, "swa": np.arange(3)}
        with pytest.raises(InvalidInput) as refused:
            if call == "back_up":
                world.mover.back_up(hashes_of(3), given_slots)
            else:
                world.mover.prefetch(hashes_of(3), promise_of(world, {3}, 3), given_slots)
        assert [e.code for e in refused.value.errors] == [code]
        assert refused.value.errors[0].field.startswith("slots.kv")
        assert world.store.log == []


@pytest.mark.parametrize("name", ["nobody", "kv"])
def test_slots_of_a_pool_without_bytes_here_are_refused(name):
    with world_of(DERIVED) as world, pytest.raises(InvalidInput) as refused:
        world.mover.back_up(hashes_of(2), {name: np.arange(2)})
    assert refused.value.errors[0].code == "unknown_pool"


def test_more_pages_than_a_call_of_the_control_plane_takes_are_refused():
    with world_of(KV_SWA) as world, pytest.raises(InvalidInput) as refused:
        world.mover.back_up(PageHashes(hashlib.sha256(b"").digest() * 65_537), {})
    assert refused.value.errors[0].code == "too_many"


def test_nothing_asked_for_is_done_without_a_call():
    with world_of(KV_SWA) as world:
        done = world.mover.back_up(hashes_of(3), {})
        assert done.transfers_done
        assert (done.committed, done.bytes, world.store.log, world.claims.commits) == (0, 0, [], [])
        assert world.mover.back_up(PageHashes(), all_slots(world.names, 0)).transfers_done


def test_a_rank_without_a_shard_of_the_anchor_stores_its_sidecar_at_once():
    other_stage = RankPool(PoolSpec("kv", (Part("k", "uint8", 8),), 2, AllPages()), ())
    with world_of([PoolShape(other_stage), KV_SWA[1]]) as world:
        slots = all_slots(["swa"], 2)
        world.fill(slots)
        assert world.mover.back_up(hashes_of(2), slots).transfers_done


def test_what_is_there_is_claimed_and_not_moved_again():
    with world_of(KV_SWA) as world:
        slots = all_slots(world.names, 4)
        world.fill(slots)
        assert world.mover.back_up(hashes_of(4), slots).transfers_done
        world.store.log.clear()
        again = world.mover.back_up(hashes_of(4), slots)
        assert again.transfers_done
        assert not world.store.calls("put")
        world.real.remove(world.keys("kv", 2))
        assert world.mover.back_up(hashes_of(4), slots).transfers_done
        assert {k for _, keys, _ in world.store.calls("put") for k in keys} == set(world.keys("kv", 2))
