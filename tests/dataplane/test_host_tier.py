"""Rules of the host tier that deserve a sentence each; histories are in test_host_tier_states.py."""

import hashlib

import numpy as np
import pytest

from dataplane.host_answers import NoSlots, UnknownSession, UnknownToken
from dataplane.host_tier import NO_SLOT, HostTier
from metadata.codec import PageHashes
from metadata.errors import InvalidInput, UnknownPool
from metadata.pools import BlockGroups, Part, PoolSpec, TrailingPages

PARTS = (Part("page", "uint8", 64),)
H = [hashlib.sha256(b"%d" % i).digest() for i in range(64)]
KV = PoolSpec("kv", PARTS)
SWA = PoolSpec("swa", PARTS, hit_policy=TrailingPages(2))
MAMBA = PoolSpec("mamba", PARTS, hit_policy=TrailingPages(1))
C128 = PoolSpec("c128", PARTS, indices_from="kv")


def tier_of(*specs, slots=8, **more) -> HostTier:
    owners = [s.name for s in specs if s.indices_from is None]
    tier = HostTier(list(specs), {name: more.get(name, slots) for name in owners})
    tier.open_session("a")
    tier.open_session("b")
    return tier


def insert(tier, hashes, session="a", **more):
    return tier.publish(tier.reserve(session, hashes, **more).token)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Every tier of a test is sane when the test ends."""
    made = []
    init = HostTier.__init__

    def remember(self, *args):
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(HostTier, "__init__", remember)
    yield
    assert [tier.sanity_check() for tier in made] == [[]] * len(made)


def test_an_empty_tier_answers_a_miss():
    tier = tier_of(KV, SWA)
    assert tier.match(H[:3]).pages == 0
    assert tier.match([]).pages == 0
    assert tier.lock("a", H[:3]).token is None
    assert tier.pin(H[:3]).token is None
    assert tier.evict("kv", 3).page_hashes == []
    assert tier.pages == 0


def test_hashes_may_come_as_one_run_of_bytes():
    tier = tier_of(KV)
    insert(tier, PageHashes(b"".join(H[:3])))
    assert tier.match(PageHashes(b"".join(H[:4]))).slots["kv"].tolist() == [0, 1, 2, NO_SLOT]


def test_a_lock_holds_all_of_kv_the_window_of_swa_and_the_last_mamba_page():
    tier = tier_of(KV, SWA, MAMBA)
    insert(tier, H[:5])
    held = tier.lock("a", H[:5])
    assert {name: int((row != NO_SLOT).sum()) for name, row in held.slots.items()} == {
        "kv": 5,
        "swa": 2,
        "mamba": 1,
    }
    assert {name: c.locked for name, c in tier.status().items()} == {"kv": 5, "swa": 2, "mamba": 1}
    tier.release(held.token)
    assert {c.locked for c in tier.status().values()} == {0}
    with pytest.raises(UnknownToken):
        tier.release(held.token)


def test_a_window_skips_a_tombstone_and_reaches_no_further_back():
    tier = tier_of(KV, SWA)
    every = np.ones(4, np.bool_)
    insert(tier, H[:4], pools={"kv": every, "swa": np.array([1, 1, 0, 1], np.bool_)})
    held = tier.lock("a", H[:4], length=4)
    assert np.flatnonzero(held.slots["swa"] != NO_SLOT).tolist() == [3]
    # The tombstone is revived; the release leaves it alone.
    insert(tier, H[:4], pools=["swa"])
    tier.release(held.token)
    assert tier.status()["swa"].locked == 0


def test_a_lock_reaches_the_pages_before_the_call():
    tier = tier_of(KV, SWA)
    insert(tier, H[:5])
    held = tier.lock("a", H[4:5], parent=H[3])
    assert {name: c.locked for name, c in tier.status().items()} == {"kv": 5, "swa": 2}
    tier.release(held.token)


def test_a_window_before_the_call_is_checked_against_what_is_resident():
    tier = tier_of(KV, SWA)
    insert(tier, H[3:6], parent=H[2])
    assert tier.match(H[4:6], parent=H[3]).restorable.runs == ((1, 2),)
    assert tier.match(H[3:6], parent=H[2]).restorable.runs == ((2, 3),)
    assert tier.match(H[3:6], parent=H[60]).restorable.runs == ((2, 3),)


def test_who_publishes_second_gives_its_slots_back_and_keeps_its_branch():
    tier = tier_of(KV, slots=10)
    first, second = tier.reserve("a", H[:4]), tier.reserve("b", H[:3] + H[10:12])
    assert not set(first.slots["kv"].tolist()) & set(second.slots["kv"].tolist())
    tier.publish(first.token)
    done = tier.publish(second.token)
    assert done.given_back["kv"].tolist() == [True, True, True, False, False]
    assert done.published["kv"].tolist() == [False, False, False, True, True]
    assert done.slots["kv"][:3].tolist() == first.slots["kv"][:3].tolist()
    assert done.pages == 5
    assert tier.match(H[:4]).pages == 4
    assert tier.match(H[:3] + H[10:12]).pages == 5
    assert tier.status()["kv"].free == 4


def test_what_a_writer_was_told_is_resident_stays_until_it_publishes():
    tier = tier_of(KV, slots=4)
    insert(tier, H[:2])
    got = tier.reserve("b", H[:4])
    assert got.resident["kv"].tolist() == [True, True, False, False]
    assert tier.evict("kv", 4).page_hashes == []
    tier.publish(got.token)
    assert tier.match(H[:4]).pages == 4
    # The last page of the sequence goes first.
    assert tier.evict("kv", 3).page_hashes == [H[3], H[2], H[1]]


def test_a_copy_with_more_pools_replaces_one_that_nothing_holds():
    tier = tier_of(KV, C128)
    insert(tier, H[:2], pools=["kv"])
    assert tier.match(H[:2]).pages == 0
    assert tier.match(H[:2], pools=["kv"]).pages == 2
    held = tier.lock("a", H[:1], length=1)
    done = insert(tier, H[:2], "b")
    assert done.given_back["c128"].tolist() == [True, False]
    assert tier.match(H[:2]).slots["c128"].tolist()[0] == NO_SLOT
    tier.release(held.token)
    insert(tier, H[:2], "b")
    assert tier.match(H[:2]).pages == 2
    assert tier.status()["kv"].resident == 2


def test_too_few_slots_change_nothing_and_say_the_numbers():
    tier = tier_of(KV, SWA, kv=6, swa=3)
    insert(tier, H[:3])
    held = tier.lock("a", H[:3])
    before = tier.status()
    with pytest.raises(NoSlots) as refused:
        tier.reserve("b", H[10:13])
    short = refused.value.pools
    assert list(short) == ["swa"]
    assert (short["swa"].asked, short["swa"].free, short["swa"].locked) == (3, 1, 2)
    assert tier.status() == before
    tier.release(held.token)
    got = tier.reserve("b", H[10:13])
    assert [(e.pool, len(e.page_hashes)) for e in got.evicted] == [("swa", 3)]
    tier.cancel(got.token)


def test_slots_that_the_store_writes_are_quarantined_until_the_call_is_back():
    tier = tier_of(KV, slots=4)
    got = tier.reserve("a", H[:3])
    tier.hand_to_store(got.token)
    tier.hand_to_store(got.token)
    ended = tier.end_session("a")
    assert ended.quarantined == (got.token,)
    assert tier.status()["kv"].quarantined == 3
    with pytest.raises(NoSlots):
        tier.reserve("b", H[:2])
    with pytest.raises(UnknownToken):
        tier.publish(got.token)
    assert not tier.store_returned(got.token)
    assert tier.store_returned(got.token)
    assert tier.status()["kv"].free == 4


def test_slots_that_the_store_writes_cannot_be_published():
    tier = tier_of(KV)
    got = tier.reserve("a", H[:2])
    tier.hand_to_store(got.token)
    with pytest.raises(InvalidInput, match="still written"):
        tier.publish(got.token)
    assert not tier.store_returned(got.token)
    assert tier.publish(got.token).pages == 2
    with pytest.raises(UnknownToken):
        tier.store_returned(got.token)


def test_a_prefetch_that_read_nothing_leaves_nothing():
    tier = tier_of(KV)
    got = tier.reserve("a", H[:2], fresh=True)
    assert tier.publish(got.token, {"kv": np.zeros(2, np.bool_)}).pages == 0
    assert tier.pages == 0
    tier.release(tier.reserve("a", H[:2]).token)
    assert tier.status()["kv"].free == 8


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.lock("c", H[:1]),
        lambda t: t.reserve("c", H[:1]),
        lambda t: t.pin(H[:1], session="c"),
        lambda t: t.end_session("c"),
    ],
)
def test_a_session_that_was_not_opened_gets_nothing(call):
    tier = tier_of(KV)
    insert(tier, H[:1])
    with pytest.raises(UnknownSession):
        call(tier)
    assert tier.sessions == ("a", "b")


def test_a_session_that_dies_leaves_nothing_but_the_pins_of_others():
    tier = tier_of(KV, slots=6)
    insert(tier, H[:2])
    tier.lock("a", H[:2])
    tier.pin(H[:1], session="a")
    other = tier.pin(H[:1])
    tier.reserve("a", H[10:13])
    ended = tier.end_session("a")
    assert len(ended.locks) == 2
    assert ended.freed == {"kv": 3}
    assert tier.status()["kv"].locked == 1
    assert tier.evict("kv", 6).page_hashes == [H[1]]
    tier.release(other.token)
    assert tier.evict("kv", 6).page_hashes == [H[0]]
    assert tier.pages == 0


def test_a_page_may_come_before_its_parent_does():
    tier = tier_of(KV)
    insert(tier, H[1:3], parent=H[0])
    assert tier.match(H[:3]).pages == 0
    insert(tier, H[:1])
    assert tier.match(H[:3]).pages == 3
    assert tier.lock("a", H[2:3], parent=H[1]).token
    assert tier.status()["kv"].locked == 3


@pytest.mark.parametrize(
    ("call", "field", "code"),
    [
        (lambda t: t.match([b"short"]), "page_hashes[0]", "bad_hash"),
        (lambda t: t.match(H[:2], parent=b"short"), "parent", "bad_hash"),
        (lambda t: t.lock("a", [H[0], H[1], H[0]]), "page_hashes[2]", "duplicate"),
        (lambda t: t.reserve("a", H[5:7], parent=H[6]), "page_hashes[1]", "duplicate"),
        (lambda t: t.lock("a", H[:2], length=3), "length", "out_of_range"),
        (lambda t: t.lock("a", H[:2], length=-1), "length", "out_of_range"),
        (lambda t: t.evict("kv", -1), "count", "out_of_range"),
        (lambda t: t.reserve("a", []), "page_hashes", "empty"),
        (lambda t: t.reserve("a", H[1:2]), "page_hashes[0]", "other_parent"),
        (lambda t: t.reserve("a", [H[0], H[9], H[1]]), "page_hashes[2]", "other_parent"),
        (lambda t: t.lock("a", H[2:4], parent=H[0]), "page_hashes[0]", "other_parent"),
        (lambda t: t.pin(H[:2], pools={"kv": np.ones(3, np.bool_)}), "pools.kv", "bad_mask"),
        (lambda t: t.reserve("a", H[:2], pools={"kv": np.ones(2, np.int8)}), "pools.kv", "bad_mask"),
        (lambda t: t.open_session("a"), "session", "duplicate"),
        (lambda t: t.reserve("a", H[:2], pools=[]), "pools", "empty"),
    ],
)
def test_bad_input_is_refused_with_its_place_and_changes_nothing(call, field, code):
    tier = tier_of(KV)
    insert(tier, H[:4])
    before = tier.status()
    with pytest.raises(InvalidInput) as refused:
        call(tier)
    assert [(e.field, e.code) for e in refused.value.errors] == [(field, code)]
    assert tier.status() == before


def test_a_chain_that_bites_its_tail_is_refused():
    tier = tier_of(KV)
    insert(tier, H[1:3], parent=H[0])
    with pytest.raises(InvalidInput) as refused:
        tier.reserve("a", [H[5], H[0]], parent=H[2])
    assert refused.value.errors[0].field == "page_hashes[1]"
    insert(tier, [H[5], H[6]], parent=H[2])


def test_a_chain_that_contradicts_what_was_published_since_is_refused_and_can_be_cancelled():
    tier = tier_of(KV)
    late = tier.reserve("b", [H[9], H[1]])
    insert(tier, H[:2])
    with pytest.raises(InvalidInput, match="no chain"):
        tier.publish(late.token)
    assert tier.cancel(late.token)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.match(H[:1], pools=["c4"]),
        lambda t: t.reserve("a", H[:1], pools=["c4"]),
        lambda t: t.evict("c4", 1),
        lambda t: t.translation("c4"),
    ],
)
def test_an_unknown_pool_is_refused(call):
    with pytest.raises(UnknownPool, match="no pool 'c4'"):
        call(tier_of(KV))


@pytest.mark.parametrize(
    ("slots", "field", "code"),
    [
        ({}, "slots.kv", "missing"),
        ({"kv": 0}, "slots.kv", "out_of_range"),
        ({"kv": 4, "x": 4}, "slots.x", "unknown_pool"),
        ({"kv": 4, "c128": 5}, "slots.c128", "mismatch"),
    ],
)
def test_slots_that_do_not_fit_the_pools_are_refused(slots, field, code):
    with pytest.raises(InvalidInput) as refused:
        HostTier([KV, C128], slots)
    assert [(e.field, e.code) for e in refused.value.errors] == [(field, code)]


def test_a_derived_pool_may_name_its_sources_slots():
    assert HostTier([C128, KV], {"kv": 4, "c128": 4}).status()["kv"].slots == 4


def test_the_table_translates_full_slots_to_window_slots_and_cannot_be_written():
    tier = tier_of(KV, SWA, kv=4, swa=2)
    insert(tier, H[:4], pools={"kv": np.ones(4, np.bool_), "swa": np.array([0, 0, 1, 1], np.bool_)})
    table = tier.translation("swa")
    found = tier.match(H[:4])
    assert table[found.slots["kv"]].tolist() == found.slots["swa"].tolist() == [-1, -1, 0, 1]
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 3
    tier.evict("swa", 1)
    assert (table >= 0).sum() == 1
    tier.evict("kv", 4)
    assert table.tolist() == [-1] * 4


def test_a_pool_that_gates_nothing_stands_on_its_own():
    draft = PoolSpec("draft", PARTS, hit_policy=BlockGroups(1, 2))
    tier = tier_of(KV, draft)
    insert(tier, H[:3], pools=["kv"])
    assert tier.match(H[:3]).pages == 3


def test_eviction_stays_exact_over_many_pages_that_come_and_go():
    tier = tier_of(KV, slots=5000)
    hashes = [hashlib.sha256(b"many %d" % i).digest() for i in range(5000)]
    for start in range(0, 5000, 500):
        insert(tier, hashes[start : start + 500])
    expected = [h for start in range(0, 5000, 500) for h in hashes[start : start + 500][::-1]]
    assert tier.evict("kv", 700).page_hashes == expected[:700]
    held = tier.lock("a", hashes[1000:1500])
    tier.release(held.token)
    expected = [h for h in expected[700:] if h not in set(hashes[1000:1500])] + hashes[1000:1500][::-1]
    gone = [h for _ in range(5) for h in tier.evict("kv", 860).page_hashes]
    assert gone == expected
    assert tier.pages == 0


def test_a_million_pages_fit_in_a_gigabyte():
    import gc
    import tracemalloc

    pages = 20_000
    gc.collect()
    tracemalloc.start()
    tier = tier_of(KV, C128, SWA, slots=pages)
    for start in range(0, pages, 1000):
        insert(tier, [hashlib.sha256(b"m %d" % i).digest() for i in range(start, start + 1000)])
    gc.collect()
    heap = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert tier.status()["kv"].resident == pages
    assert heap / pages < 600


def test_a_pin_holds_the_pages_of_its_masks_and_a_reservation_may_be_nobodys():
    tier = tier_of(KV, SWA)
    tier.publish(tier.reserve(None, H[:3]).token)
    pins = tier.pin(H[:3], pools={"kv": np.array([1, 0, 1], np.bool_), "swa": np.zeros(3, np.bool_)})
    assert pins.slots["kv"].tolist() == [0, NO_SLOT, 2]
    assert {name: c.locked for name, c in tier.status().items()} == {"kv": 2, "swa": 0}
    tier.release(pins.token)
