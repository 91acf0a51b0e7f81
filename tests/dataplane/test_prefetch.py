"""Prefetch: the read decides; fresh KV never meets an unread sidecar; what is lost is reported once."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane import prefetch as prefetch_module
from dataplane.object_store import ObjectBuffers, StoreClosed, StoreCode, StoreUnavailable
from dataplane.page_mover import NO_SLOT
from dataplane.prefetch import Prefetch
from dataplane.transfer import RankPools
from metadata.errors import InvalidInput
from metadata.object_keys import parse
from metadata.page_runs import runs_to_mask
from metadata.pools import BlockGroups, TrailingPages
from tests.dataplane.mover_world import (
    NS,
    SLOTS,
    World,
    all_slots,
    hashes_of,
    lengths_allowed,
    page_hash,
    pool_sets,
    promise_of,
    world_of,
)
from tests.dataplane.prefetch_pools import (
    KV_BLOCKS,
    KV_INDEXER,
    KV_SWA,
    pool,
    reported,
    store_everything,
)

MANY = settings(max_examples=80, deadline=None)
BLAMED = {
    StoreCode.MISSING: "gone",
    StoreCode.UNCONFIRMED: "gone",
    StoreCode.SIZE_MISMATCH: "size_mismatch",
    StoreCode.CHECKSUM: "checksum",
    StoreCode.TRANSFER_FAILED: "timeout",
    StoreCode.LEASE_LOST: "timeout",
}
OURS_OF_ONE = [StoreCode.NOT_REGISTERED, StoreCode.INVALID, StoreCode.NO_SPACE]
OURS = [*OURS_OF_ONE, StoreCode.UNAVAILABLE]
"""`UNAVAILABLE` is what all objects of a call get, when the master is away."""
STRENGTH = ["timeout", "gone", "checksum", "size_mismatch"]


@st.composite
def prefetches(draw):
    pool_set = draw(pool_sets())
    pages = draw(st.integers(1, 10))
    chunk = draw(st.sampled_from([2, 3, 256]))
    return pool_set, pages, chunk, draw(st.randoms(use_true_random=False))


def plant_faults(world: World, pages: int, dice, *, ours: bool = True) -> None:
    """Real faults in the store, and codes that a transport gives."""
    rate = dice.choice([0.02, 0.1, 0.3])
    for name in world.names:
        for page in range(pages):
            if dice.random() > rate:
                continue
            shard = dice.choice(world.shards(name))
            key = dice.choice(world.keys(name, page, shard))
            fault = dice.choice(["removed", "size", "damaged", "code"])
            if fault == "removed":
                world.real.remove([key])
            elif fault == "size":
                world.real.remove([key])
                right = {part.bytes for part in world.specs[name].parts}
                world.put_raw(key, b"x" * dice.choice([size for size in (1, 2, 500) if size not in right]))
            elif fault == "damaged":
                world.damage(name, page, shard)
            else:
                codes = [StoreCode.TRANSFER_FAILED, StoreCode.LEASE_LOST, *(OURS_OF_ONE if ours else [])]
                world.store.on_get[key] = dice.choice(codes)


def readable_pages(world: World, pages: int, slots: dict[str, np.ndarray]) -> dict[str, set[int]]:
    """By asking the real store object by object, into memory of the test's own: what can be read at all."""
    room = np.zeros(2000, np.uint8)
    world.real.register(int(room.ctypes.data), room.size)
    found: dict[str, set[int]] = {}
    for name in slots:
        found[name] = set()
        sizes = [p.bytes for p in world.specs[name].parts] * len(world.shards(name))
        for page in np.flatnonzero(slots[name][:pages] != NO_SLOT).tolist():
            keys = world.keys(name, page)
            good = not any(k in world.store.on_get for k in keys)
            for key, size in zip(keys, sizes, strict=True):
                buffers = ObjectBuffers(np.array([room.ctypes.data], np.uint64), np.array([size]))
                good = good and not world.real.get([key], buffers).any()
            if good:
                found[name].add(page)
    world.real.unregister(int(room.ctypes.data))
    return found


def random_promise(world: World, pages: int, dice):
    """Any set of lengths: what a lookup promises need not be true any more."""
    lengths = {n for n in range(1, pages + 1) if dice.random() < 0.7}
    return promise_of(world, lengths, pages, covered={n: dice.randint(0, pages) for n in blocks_of(world)})


def blocks_of(world: World) -> list[str]:
    return [n for n in world.names if isinstance(world.specs[n].hit_policy, BlockGroups)]


def random_slots(world: World, pages: int, hit: int, dice) -> dict[str, np.ndarray]:
    """Slots wherever the promise needs them, and by chance elsewhere."""
    found = {}
    for name in world.names:
        at = np.array(dice.sample(range(SLOTS), pages), dtype=np.int64)
        policy = world.specs[name].hit_policy
        for page in range(pages):
            needed = page < hit
            if isinstance(policy, TrailingPages):
                needed = hit - policy.window_pages <= page < hit
            if isinstance(policy, BlockGroups):
                needed = False
            if not needed and dice.random() < 0.2:
                at[page] = NO_SLOT
        found[name] = at
    return found


def failed_objects(world: World) -> dict[tuple[str, int, int], str]:
    """From the calls that the store got: shards whose object could not be read, with the strongest reason."""
    by_id = {world.specs[n].pool_id: n for n in world.names}
    number = {page_hash(p): p for p in range(64)}
    found: dict[tuple[str, int, int], str] = {}

    def note(key: str, reason: str) -> None:
        named = parse(key)
        where = by_id[named.pool_id], number[named.page_hash], named.shard
        found[where] = max(found.get(where, reason), reason, key=STRENGTH.index)

    last: dict[str, int] = {}
    for _, keys, codes in world.store.calls("get"):
        last |= dict(zip(keys, codes.tolist(), strict=True))
    for key, code in last.items():
        if code in BLAMED:
            note(key, BLAMED[StoreCode(code)])
    for _, keys, there in world.store.calls("exists"):
        for key, found_it in zip(keys, there.tolist(), strict=True):
            if not found_it:
                note(key, "gone")
    return found


@MANY
@given(prefetches())
def test_the_longest_promised_length_that_can_be_read_is_restored_and_its_bytes_are_right(case):
    pool_set, pages, chunk, dice = case
    with world_of(pool_set, chunk) as world:
        store_everything(world, pages)
        promise = random_promise(world, pages, dice)
        slots = random_slots(world, pages, promise.hit_pages, dice)
        plant_faults(world, pages, dice)
        readable = readable_pages(world, pages, slots)
        promised = set(np.flatnonzero(runs_to_mask(promise.restorable, pages + 1)).tolist())
        expected = max(lengths_allowed(world, readable, pages) & promised, default=0)
        world.wipe()
        done = world.mover.prefetch(hashes_of(pages), promise, slots)
        assert done.pages == expected
        assert done.transfers_done == (0 < expected == promise.hit_pages)
        for name, policy in ((n, world.specs[n].hit_policy) for n in world.names):
            needed = set(range(expected))
            if isinstance(policy, TrailingPages):
                needed = set(range(max(0, expected - policy.window_pages), expected))
            read = set(np.flatnonzero(done.read[name]).tolist())
            assert read <= set(range(expected))
            assert isinstance(policy, BlockGroups) or needed <= read
            for page in read:
                assert world.intact(name, page, int(slots[name][page]))


@MANY
@given(prefetches())
def test_everything_that_could_not_be_read_is_reported_once_with_its_reason_shards_and_generation(case):
    pool_set, pages, chunk, dice = case
    with world_of(pool_set, chunk) as world:
        store_everything(world, pages)
        for page in range(pages):
            world.claims.generation[page_hash(page)] = dice.randint(0, 255)
        promise = promise_of(
            world, set(range(1, pages + 1)), pages, covered=dict.fromkeys(blocks_of(world), pages)
        )
        slots = random_slots(world, pages, pages, dice)
        plant_faults(world, pages, dice)
        done = world.mover.prefetch(hashes_of(pages), promise, slots)
        failed, told = failed_objects(world), reported(world)
        assert set(told) == set(failed)
        for where, reasons in told.items():
            # One report a page and pool: the strongest reason of its shards.
            strongest = max((r for w, r in failed.items() if w[:2] == where[:2]), key=STRENGTH.index)
            assert reasons == [strongest]
        assert {g for _, g, _ in world.claims.reports} <= {promise.generation}
        assert world.claims.stale == 0, "a page was in two reports: the second is fenced off"
        lost = {(n, p) for n, mask in done.lost.items() for p in np.flatnonzero(mask).tolist()}
        assert lost == {where[:2] for where in failed}
        assert not set(failed) & world.claims.claimed


@MANY
@given(prefetches(), st.sampled_from(OURS))
def test_faults_of_ours_clear_no_claim(case, code):
    pool_set, pages, chunk, dice = case
    with world_of(pool_set, chunk) as world:
        store_everything(world, pages)
        claimed = set(world.claims.claimed)
        for name in world.names:
            for key in world.keys(name, dice.randrange(pages)):
                world.store.on_get[key] = code
        promise = promise_of(world, set(range(1, pages + 1)), pages)
        done = world.mover.prefetch(hashes_of(pages), promise, all_slots(world.names, pages))
        assert world.claims.claimed == claimed
        assert world.claims.reports == []
        assert done.lost == {}


@MANY
@given(prefetches(), st.sampled_from(["get", "exists"]), st.integers(0, 5))
def test_a_store_that_raises_cuts_the_prefetch_to_what_was_read_and_clears_no_claim(case, verb, when):
    pool_set, pages, chunk, dice = case
    with world_of(pool_set, chunk) as world:
        store_everything(world, pages)
        claimed = set(world.claims.claimed)
        raised = []

        def raising(called, number):
            if called == verb and number >= when:
                raised.append(True)
                raise dice.choice([StoreUnavailable, StoreClosed])("the test says so")

        world.store.raising = raising
        slots = all_slots(world.names, pages)
        world.wipe()
        promise = promise_of(world, set(range(1, pages + 1)), pages)
        done = world.mover.prefetch(hashes_of(pages), promise, slots)
        assert world.claims.claimed == claimed
        assert done.transfers_done == (not raised)
        assert (done.error is not None) == bool(raised)
        in_place = {n: {p for p in range(pages) if world.intact(n, p, int(slots[n][p]))} for n in world.names}
        assert done.pages == max(lengths_allowed(world, in_place, pages), default=0)


@MANY
@given(prefetches())
def test_the_control_plane_being_away_during_the_report_changes_nothing_of_the_result(case):
    pool_set, pages, chunk, dice = case
    results = []
    state = dice.getstate()
    for away in (False, True):
        dice.setstate(state)
        with world_of(pool_set, chunk) as world:
            store_everything(world, pages)
            promise = random_promise(world, pages, dice)
            slots = random_slots(world, pages, promise.hit_pages, dice)
            plant_faults(world, pages, dice)
            if away:
                world.claims.away = lambda verb, _number: verb == "missing"
            done = world.mover.prefetch(hashes_of(pages), promise, slots)
            masks = [{n: m.tolist() for n, m in d.items()} for d in (done.read, done.lost)]
            results.append((done.pages, done.bytes, done.transfers_done, done.error, masks))
    assert results[0] == results[1]


@MANY
@given(prefetches())
def test_asking_again_after_each_report_ends_with_a_promise_that_is_kept(case):
    """A report leaves nothing that the next lookup would promise in vain."""
    pool_set, pages, chunk, dice = case
    with world_of(pool_set, chunk) as world:
        store_everything(world, pages)
        plant_faults(world, pages, dice, ours=False)
        slots = all_slots(world.names, pages)
        for _ in range(3 * pages):
            stored = {
                n: {
                    p
                    for p in range(pages)
                    if all((n, page_hash(p), s) in world.claims.claimed for s in world.shards(n))
                }
                for n in world.names
            }
            promise = promise_of(world, lengths_allowed(world, stored, pages), pages)
            done = world.mover.prefetch(hashes_of(pages), promise, slots)
            if done.pages == promise.hit_pages:
                break
        assert done.pages == promise.hit_pages
        readable = readable_pages(world, pages, slots)
        assert done.pages == max(lengths_allowed(world, readable, pages), default=0)


def test_an_indexer_page_lost_between_lookup_and_read_shortens_the_prefix_to_it():
    """Field report 1: KV restored to page 4, the indexer only to 3; stale indexer data was used."""
    with world_of(KV_INDEXER) as world:
        store_everything(world, 5)
        world.real.remove(world.keys("indexer", 3))
        done = world.mover.prefetch(
            hashes_of(5), promise_of(world, {1, 2, 3, 4, 5}, 5), all_slots(world.names, 5)
        )
        assert done.pages == 3
        assert not done.transfers_done


def test_a_window_that_cannot_be_read_falls_back_to_the_longest_length_whose_window_can():
    """Field report 9: one SWA page short dropped a good KV prefix completely."""
    with world_of(KV_SWA) as world:
        store_everything(world, 8)
        world.real.remove(world.keys("swa", 7))
        world.real.remove(world.keys("swa", 4))
        done = world.mover.prefetch(
            hashes_of(8), promise_of(world, {2, 4, 5, 6, 8}, 8), all_slots(world.names, 8)
        )
        assert done.pages == 4
        assert reported(world) == {("swa", 7, 0): ["gone"], ("swa", 4, 0): ["gone"]}


def test_windows_are_read_only_after_every_page_that_all_lengths_need():
    with world_of(KV_SWA) as world:
        store_everything(world, 4)
        world.mover.prefetch(hashes_of(4), promise_of(world, {4}, 4), all_slots(world.names, 4))
        pools = [{parse(k).pool_id for k in keys} for _, keys, _ in world.store.calls("get")]
        assert pools == [{world.specs["kv"].pool_id}, {world.specs["swa"].pool_id}]
        assert [len(keys) for _, keys, _ in world.store.calls("get")] == [16, 2]


def test_nothing_is_read_beyond_the_first_chunk_that_lost_a_page():
    """Field report 11: each try on a dead segment costs a time-out."""
    with world_of(KV_SWA, chunk=2) as world:
        store_everything(world, 10)
        for page in range(10):
            for key in world.keys("kv", page):
                world.store.on_get[key] = StoreCode.TRANSFER_FAILED
        done = world.mover.prefetch(
            hashes_of(10), promise_of(world, set(range(1, 11)), 10), all_slots(world.names, 10)
        )
        assert done.pages == 0
        assert len(world.store.calls("get")) == 1


def test_shorter_windows_are_not_tried_for_ever_on_a_store_that_hangs():
    now = [0.0]
    with world_of(KV_SWA) as world:
        store_everything(world, 10)
        for page in range(10):
            for key in world.keys("swa", page):
                world.store.on_get[key] = StoreCode.TRANSFER_FAILED

        def slow(verb, _number):
            if verb == "get":
                now[0] += prefetch_module.FALL_BACK_SECONDS / 1.5

        world.store.raising = slow
        done = Prefetch(
            world.store,
            world.claims,
            RankPools(NS, world.bound),
            page_hashes=hashes_of(10),
            promise=promise_of(world, set(range(1, 11)), 10),
            slots=all_slots(world.names, 10),
            clock=lambda: now[0],
        ).run()
        assert done.pages == 0
        assert len(world.store.calls("get")) == 3


def test_two_reasons_on_one_page_travel_in_one_report():
    """The first report of a page raises its generation: a second one would be fenced off."""
    with world_of([pool("kv"), pool("a"), pool("b")]) as world:
        store_everything(world, 3)
        world.real.remove(world.keys("a", 1))
        world.real.remove(world.keys("b", 1))
        world.put_raw(world.keys("b", 1)[0], b"another size")
        world.mover.prefetch(hashes_of(3), promise_of(world, {3}, 3), all_slots(world.names, 3))
        assert len(world.claims.reports) == 1
        assert reported(world) == {("a", 1, 0): ["gone"], ("b", 1, 0): ["size_mismatch"]}
        assert world.claims.stale == 0


def test_only_the_shard_that_failed_is_reported():
    with world_of(KV_SWA) as world:
        store_everything(world, 4)
        world.real.remove(world.keys("kv", 2, 1))
        world.mover.prefetch(hashes_of(4), promise_of(world, {4}, 4), all_slots(world.names, 4))
        assert reported(world) == {("kv", 2, 1): ["gone"]}
        assert ("kv", page_hash(2), 0) in world.claims.claimed


@pytest.mark.parametrize("size", [1, 7, 9, 500])
def test_an_object_of_another_size_is_a_miss_whatever_the_store_can_read_of_it(size):
    with world_of(KV_SWA) as world:
        store_everything(world, 2)
        key = world.keys("kv", 1, 0)[1]
        world.real.remove([key])
        world.put_raw(key, b"x" * size)
        done = world.mover.prefetch(hashes_of(2), promise_of(world, {1, 2}, 2), all_slots(world.names, 2))
        assert done.pages == 1
        assert reported(world) == {("kv", 1, 0): ["size_mismatch"]}


def test_a_damaged_object_is_removed_so_that_the_next_back_up_can_write_it():
    """A put keeps what exists: the damaged bytes would be confirmed and claimed again, for ever."""
    with world_of(KV_SWA) as world:
        store_everything(world, 2)
        key = world.damage("kv", 1, 1)
        slots = all_slots(world.names, 2)
        assert world.mover.prefetch(hashes_of(2), promise_of(world, {1, 2}, 2), slots).pages == 1
        assert reported(world) == {("kv", 1, 1): ["checksum"]}
        assert world.real.sizes([key]).tolist() == [-1]
        world.fill(slots)
        assert world.mover.back_up(hashes_of(2), slots).transfers_done
        world.wipe()
        assert world.mover.prefetch(hashes_of(2), promise_of(world, {1, 2}, 2), slots).pages == 2
        assert world.intact("kv", 1, int(slots["kv"][1]))


def test_damaged_objects_that_cannot_be_removed_change_nothing_of_the_result():
    with world_of(KV_SWA) as world:
        store_everything(world, 2)
        world.damage("kv", 1, 1)

        def raising(verb, _number):
            if verb == "remove":
                raise StoreUnavailable("the test says so")

        world.store.raising = raising
        done = world.mover.prefetch(hashes_of(2), promise_of(world, {1, 2}, 2), all_slots(world.names, 2))
        assert (done.pages, done.error) == (1, None)


def test_pools_that_gate_nothing_are_read_last_reported_when_lost_and_shorten_nothing():
    with world_of(KV_BLOCKS, chunk=2) as world:
        store_everything(world, 8)
        world.real.remove(world.keys("blocks", 2))
        promise = promise_of(world, set(range(1, 9)), 8, covered={"blocks": 8})
        slots = all_slots(world.names, 8)
        world.wipe()
        done = world.mover.prefetch(hashes_of(8), promise, slots)
        assert done.pages == 8
        assert done.transfers_done
        assert np.flatnonzero(done.read["blocks"]).tolist() == [0, 1, 3]
        assert all(world.intact("blocks", p, int(slots["blocks"][p])) for p in (0, 1, 3))
        assert reported(world) == {("blocks", 2, 0): ["gone"]}
        order = [{parse(k).pool_id for k in keys} for _, keys, _ in world.store.calls("get")]
        kv, blocks = ({world.specs[n].pool_id} for n in ("kv", "blocks"))
        assert order == [kv] * 4 + [blocks] * 2


def test_of_pools_that_gate_nothing_only_promised_pages_are_read_and_slots_are_optional():
    with world_of(KV_BLOCKS) as world:
        store_everything(world, 8)
        promise = promise_of(world, {6}, 8, covered={"blocks": 4})
        slots = all_slots(world.names, 8)
        slots["blocks"][1] = NO_SLOT
        done = world.mover.prefetch(hashes_of(8), promise, slots)
        assert np.flatnonzero(done.read["blocks"]).tolist() == [0, 2, 3]
        assert world.mover.prefetch(hashes_of(8), promise, {"kv": slots["kv"]}).transfers_done


def test_a_shorter_length_is_no_choice_where_its_window_has_no_slots():
    with world_of(KV_SWA) as world:
        store_everything(world, 6)
        world.real.remove(world.keys("swa", 5))
        slots = all_slots(world.names, 6)
        slots["swa"][:4] = NO_SLOT
        promise = promise_of(world, set(range(1, 7)), 6)
        assert world.mover.prefetch(hashes_of(6), promise, slots).pages == 0
        slots["swa"][3] = 20
        assert world.mover.prefetch(hashes_of(6), promise, slots).pages == 5


@pytest.mark.parametrize(("name", "page"), [("kv", 0), ("kv", 4), ("swa", 3), ("swa", 4)])
def test_a_promised_page_without_a_slot_is_refused_before_a_byte_moves(name, page):
    with world_of(KV_SWA) as world:
        store_everything(world, 6)
        slots = all_slots(world.names, 6)
        slots[name][page] = NO_SLOT
        with pytest.raises(InvalidInput, match=re.escape(f"slots.{name}[{page}]")) as refused:
            world.mover.prefetch(hashes_of(6), promise_of(world, {5}, 6), slots)
        assert [e.code for e in refused.value.errors] == ["no_slot"]
        assert world.store.log == []
        assert world.claims.reports == []


@pytest.mark.parametrize(("name", "page"), [("kv", 5), ("swa", 2), ("swa", 5)])
def test_pages_that_the_promise_does_not_need_may_go_without_a_slot(name, page):
    with world_of(KV_SWA) as world:
        store_everything(world, 6)
        slots = all_slots(world.names, 6)
        slots[name][page] = NO_SLOT
        assert world.mover.prefetch(hashes_of(6), promise_of(world, {5}, 6), slots).pages == 5


def test_a_pool_that_gated_the_lookup_cannot_be_left_out():
    with world_of(KV_SWA) as world:
        store_everything(world, 3)
        with pytest.raises(InvalidInput) as refused:
            world.mover.prefetch(hashes_of(3), promise_of(world, {3}, 3), all_slots(["kv"], 3))
        assert [(e.field, e.code) for e in refused.value.errors] == [("slots.swa", "missing")]


def test_a_lookup_that_did_not_ask_for_a_pool_needs_no_slots_for_it():
    with world_of(KV_SWA) as world:
        store_everything(world, 3)
        promise = msgspec.structs.replace(promise_of(world, {3}, 3), pools={"kv": 3})
        done = world.mover.prefetch(hashes_of(3), promise, all_slots(["kv"], 3))
        assert done.transfers_done


def test_a_lookup_with_a_window_of_its_own_is_prefetched_with_that_window():
    with world_of(KV_SWA) as world:
        store_everything(world, 6)
        world.real.remove(world.keys("swa", 4))
        promise, slots = promise_of(world, {1, 2, 3, 4, 5, 6}, 6), all_slots(world.names, 6)
        assert world.mover.prefetch(hashes_of(6), promise, slots, windows={"swa": 1}).pages == 6
        assert world.mover.prefetch(hashes_of(6), promise, slots, windows={"swa": 3}).pages == 4
        for windows in ({"kv": 1}, {"swa": 0}, {"nobody": 1}):
            with pytest.raises(InvalidInput, match="windows"):
                world.mover.prefetch(hashes_of(6), promise, slots, windows=windows)


BAD_PROMISES = {
    "more hits than pages": {"hit_pages": 5, "restorable": [(1, 5)]},
    "other pages": {"queried_pages": 4},
    "a hit that is no length": {"hit_pages": 2},
    "no lengths": {"restorable": []},
    "length 0": {"restorable": [(0, 3)]},
    "lengths that descend": {"restorable": [(2, 2), (1, 3)]},
    "a run of nothing": {"restorable": [(2, 1), (3, 3)]},
    "a generation short": {"generation": b"\0\0"},
}


@pytest.mark.parametrize("case", BAD_PROMISES)
def test_a_promise_that_is_none_for_these_pages_is_refused(case):
    with world_of(KV_SWA) as world:
        store_everything(world, 3)
        promise = msgspec.structs.replace(promise_of(world, {1, 2, 3}, 3), **BAD_PROMISES[case])
        with pytest.raises(InvalidInput, match="promise"):
            world.mover.prefetch(hashes_of(3), promise, all_slots(world.names, 3))
        assert world.store.log == []


def test_a_report_without_a_generation_is_sent_without_one():
    with world_of(KV_SWA) as world:
        promise = msgspec.structs.replace(promise_of(world, {3}, 3), generation=b"")
        world.mover.prefetch(hashes_of(3), promise, all_slots(world.names, 3))
        assert [g for _, g, _ in world.claims.reports] == [None]


def test_a_miss_asks_the_store_nothing():
    with world_of(KV_SWA) as world:
        done = world.mover.prefetch(hashes_of(3), promise_of(world, set(), 3), {})
        assert (done.pages, done.transfers_done, done.lost, done.bytes) == (0, False, {}, 0)
        assert world.store.log == []


def test_an_exception_of_the_caller_s_own_still_reports_what_was_lost():
    with world_of(KV_SWA) as world:
        store_everything(world, 2)
        world.real.remove(world.keys("kv", 1, 1))

        def progress(_name, _pages):
            raise KeyError

        with pytest.raises(KeyError):
            world.mover.prefetch(hashes_of(2), promise_of(world, {2}, 2), all_slots(world.names, 2), progress)
        assert reported(world) == {("kv", 1, 1): ["gone"]}


def test_progress_adds_up_to_what_was_read():
    with world_of(KV_SWA, chunk=2) as world:
        store_everything(world, 5)
        seen: dict[str, int] = {}
        done = world.mover.prefetch(
            hashes_of(5),
            promise_of(world, {5}, 5),
            all_slots(world.names, 5),
            lambda n, pages: seen.update({n: seen.get(n, 0) + pages}),
        )
        assert seen == {"kv": 5, "swa": 2}
        assert done.bytes == 5 * 32 + 2 * 8


def test_a_master_that_goes_away_ends_the_prefetch_at_what_was_read_and_is_not_asked_again():
    with world_of(KV_INDEXER, chunk=2) as world:
        store_everything(world, 6)
        for name in world.names:
            for key in (k for page in (2, 3) for k in world.keys(name, page)):
                world.store.on_get[key] = StoreCode.UNAVAILABLE
        slots = all_slots(world.names, 6)
        world.wipe()
        done = world.mover.prefetch(hashes_of(6), promise_of(world, {2, 4, 6}, 6), slots)
        assert isinstance(done.error, StoreUnavailable)
        assert (done.pages, done.transfers_done, done.lost) == (2, False, {})
        assert all(world.intact(n, p, int(slots[n][p])) for n in world.names for p in range(2))
        asked = {key for _, keys, _ in world.store.calls("get") for key in keys}
        assert not asked & {key for name in world.names for key in world.keys(name, 4)}


def test_one_call_reads_no_more_bytes_than_its_bound_and_a_page_at_least(monkeypatch):
    page = sum(s.pool.spec.bytes_per_page for s in KV_INDEXER)
    for bound, pages in ((3 * page, 3), (1, 1)):
        monkeypatch.setattr("dataplane.prefetch.CHUNK_BYTES", bound)
        with world_of(KV_INDEXER) as world:
            store_everything(world, 7)
            slots = all_slots(world.names, 7)
            assert world.mover.prefetch(hashes_of(7), promise_of(world, {7}, 7), slots).pages == 7
            asked = [len({parse(key).page_hash for key in keys}) for _, keys, _ in world.store.calls("get")]
            assert max(asked) == pages
