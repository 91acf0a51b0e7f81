"""What may happen between two calls on one page, order by order: fencing, hand-over, negative entries."""

import asyncio
import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest

from metadata import redis_keys
from metadata.page_claims import AnchorShards, Claim, Lost
from metadata.page_index import IndexSettings, PageIndex
from metadata.pools import AllPages
from metadata.redis_server import RedisServer

NS = "9f86d081884c7d65"
PAGE = [hashlib.sha256(b"page").digest()]
KV, SWA = 0, 9
ONE = np.ones(1, np.bool_)
NO_WINDOW = IndexSettings(negative_seconds=0)
GATES = {"kv": (KV, AllPages())}


def claim(shards=(0,), count=1, pool="kv", bit=KV, guarded=False) -> Claim:
    return Claim(pool, bit, count, tuple(shards), ONE, guarded)


def lost(shards=(0,), count=1, bit=KV, reason="gone") -> Lost:
    return Lost(bit, count, tuple(shards), ONE, reason)


class Desk:
    """Short words for what ranks do to the one page."""

    def __init__(self, redis: RedisServer, settings: IndexSettings = NO_WINDOW) -> None:
        self.index = PageIndex(redis, settings)

    async def commit(self, *claims: Claim, anchors: tuple[AnchorShards, ...] = ()):
        return await self.index.commit(NS, PAGE, claims, anchors)

    async def generation(self) -> bytes:
        return (await self.index.find(NS, PAGE, GATES)).generations

    async def missing(self, *items: Lost, generation: bytes | None = None):
        return await self.index.clear(NS, PAGE, items, generation)

    async def hit(self) -> bool:
        return (await self.index.find(NS, PAGE, GATES)).restorable.hit_pages == 1

    async def claimed(self) -> int:
        return (await self.index.claimed_pages(NS)).get(KV, 0)


@pytest.fixture
def desk(redis_server) -> Desk:
    return Desk(redis_server)


async def test_of_two_readers_that_fail_on_one_generation_only_the_first_clears(desk):
    await desk.commit(claim())
    seen = await desk.generation()
    assert await desk.missing(lost(), generation=seen) == (1, 0)
    assert await desk.missing(lost(), generation=seen) == (0, 1)
    assert await desk.claimed() == 0


async def test_lookup_missing_commit_late_missing_leaves_the_new_claim(desk):
    await desk.commit(claim())
    first, second = await desk.generation(), await desk.generation()
    await desk.missing(lost(), generation=first)
    await desk.commit(claim())
    assert await desk.missing(lost(), generation=second) == (0, 1)
    assert await desk.hit()


async def test_a_lookup_after_the_new_claim_can_clear_it_again(desk):
    for _ in range(3):
        await desk.commit(claim())
        assert await desk.missing(lost(), generation=await desk.generation()) == (1, 0)
        assert not await desk.hit()


async def test_a_commit_alone_does_not_change_the_generation(desk):
    before = await desk.generation()
    await desk.commit(claim([0], 2))
    await desk.commit(claim([1], 2))
    await desk.commit(claim([1], 2))
    assert await desk.generation() == before


async def test_a_generation_never_comes_back_to_zero(desk):
    seen = []
    for _ in range(300):
        await desk.commit(claim())
        await desk.missing(lost())
        seen.append((await desk.generation())[0])
    assert seen == [1 + i % 255 for i in range(300)]


@pytest.mark.parametrize("order", list(itertools.permutations(["last", "gone", "other"])))
async def test_the_last_shards_commit_meets_a_missing_of_the_first_in_any_order(desk, order):
    """0 and 1 of 4 shards are there; `last` brings 2 and 3, `gone` takes 0, `other` brings 0 again."""
    await desk.commit(claim([0, 1], 4))
    stored = {0, 1}
    for step in order:
        if step == "last":
            await desk.commit(claim([2, 3], 4))
            stored |= {2, 3}
        elif step == "gone":
            await desk.missing(lost([0], 4))
            stored -= {0}
        else:
            await desk.commit(claim([0], 4))
            stored |= {0}
        whole = stored == {0, 1, 2, 3}
        assert await desk.hit() == whole
        assert await desk.claimed() == whole
        _, incomplete = await desk.index.note(NS, PAGE[0], KV)
        assert incomplete == ([] if whole else sorted(stored)), "either the bit or the companion"


async def test_a_missing_that_was_fenced_before_the_last_shard_came_clears_what_is_there_now(desk):
    """The last shard's commit is no reason to doubt the report: the generation is the same."""
    await desk.commit(claim([0], 2))
    seen = await desk.generation()
    await desk.commit(claim([1], 2))
    assert await desk.missing(lost([0], 2), generation=seen) == (1, 0)
    assert (await desk.index.note(NS, PAGE[0], KV))[1] == [1]
    await desk.commit(claim([0], 2))
    assert await desk.hit()


async def test_a_companion_that_ended_forgets_shards_and_never_invents_one(redis_stack, desk):
    await desk.commit(claim([0], 2))
    (companion,) = redis_keys.companions(NS, PAGE)
    assert 3_500_000 < redis_stack.ask(companion, "PTTL", companion) <= 3_600_000
    redis_stack.ask(companion, "DEL", companion)
    done = await desk.commit(claim([1], 2))
    assert done.complete == 0
    assert not await desk.hit()
    assert (await desk.commit(claim([0], 2))).complete == 1


async def test_of_64_ranks_that_commit_at_once_exactly_one_completes_the_page(desk):
    done = await asyncio.gather(*(desk.commit(claim([s], 64)) for s in range(64)))
    assert Counter(d.complete for d in done) == {0: 63, 1: 1}
    assert await desk.hit()
    assert await desk.claimed() == 1


async def test_of_many_fenced_reports_at_once_exactly_one_clears(desk):
    await desk.commit(claim(range(8), 8))
    seen = await desk.generation()
    answers = await asyncio.gather(*(desk.missing(lost([s], 8), generation=seen) for s in range(8)))
    assert sorted(answers) == [(0, 1)] * 7 + [(1, 0)]
    assert await desk.claimed() == 0


class TestNegativeEntry:
    """After bytes timed out, their claim does not come back for a moment."""

    @pytest.fixture
    def desk(self, redis_server) -> Desk:
        return Desk(redis_server, IndexSettings(negative_seconds=600))

    async def test_a_commit_within_the_window_is_rejected_and_a_lookup_says_miss(self, desk):
        await desk.commit(claim())
        await desk.missing(lost(reason="timeout"), generation=b"\0")
        for _ in range(2):
            done = await desk.commit(claim())
            assert done.rejected == [(0, "kv", "negative_entry")]
            assert (done.committed, done.complete) == (0, 0)
            assert not await desk.hit()
        assert await desk.claimed() == 0

    @pytest.mark.parametrize("reason", ["gone", "size_mismatch", "checksum", "evicted"])
    async def test_where_the_object_is_away_its_successor_is_welcome_at_once(self, desk, reason):
        await desk.commit(claim())
        await desk.missing(lost(reason=reason))
        assert (await desk.commit(claim())).complete == 1
        assert await desk.hit()

    async def test_it_ends_after_its_seconds(self, redis_server):
        desk = Desk(redis_server, IndexSettings(negative_seconds=0.3))
        await desk.commit(claim())
        await desk.missing(lost(reason="timeout"))
        assert (await desk.commit(claim())).rejected
        await asyncio.sleep(0.35)
        assert (await desk.commit(claim())).complete == 1
        assert await desk.hit()

    async def test_it_holds_the_shards_that_failed_and_no_others(self, desk):
        await desk.commit(claim(range(4), 4))
        await desk.missing(lost([2], 4, reason="timeout"))
        assert (await desk.commit(claim([2], 4))).rejected == [(0, "kv", "negative_entry")]
        assert (await desk.commit(claim([3], 4))).rejected == []
        assert (await desk.commit(claim([2, 3], 4))).rejected == [(0, "kv", "negative_entry")]
        assert (await desk.commit(claim(range(4), 4))).rejected == [(0, "kv", "negative_entry")]

    async def test_shards_that_fail_one_after_the_other_are_all_held(self, desk):
        await desk.commit(claim(range(4), 4))
        await desk.missing(lost([2], 4, reason="timeout"))
        await desk.missing(lost([0], 4, reason="timeout"))
        for shard in (0, 2):
            assert (await desk.commit(claim([shard], 4))).rejected == [(0, "kv", "negative_entry")]
        assert (await desk.commit(claim([1], 4))).rejected == []

    async def test_it_holds_one_pool_and_not_the_pages_others(self, desk):
        both = (claim(), claim(pool="swa", bit=SWA))
        await desk.commit(*both)
        await desk.missing(lost(bit=SWA, reason="timeout"))
        done = await desk.commit(*both)
        assert done.rejected == [(0, "swa", "negative_entry")]
        assert (done.committed, done.complete) == (1, 0)
        assert await desk.hit()

    async def test_a_sidecar_does_not_slip_in_behind_an_anchor_that_is_held(self, desk):
        await desk.commit(claim())
        await desk.missing(lost(reason="timeout"))
        sidecar = claim(pool="swa", bit=SWA, guarded=True)
        done = await desk.commit(claim(), sidecar, anchors=(AnchorShards(KV, 1, (0,)),))
        assert done.rejected == [(0, "kv", "negative_entry"), (0, "swa", "anchor_missing")]
        assert done.committed == 0

    async def test_an_anchor_with_shards_is_held_the_same_way(self, desk):
        anchor = AnchorShards(KV, 2, (1,))
        await desk.commit(claim([0], 2))
        await desk.commit(claim([1], 2), anchors=(anchor,))
        await desk.missing(lost([1], 2, reason="timeout"))
        sidecar = claim(pool="swa", bit=SWA, guarded=True)
        done = await desk.commit(claim([1], 2), sidecar, anchors=(anchor,))
        assert done.rejected == [(0, "kv", "negative_entry"), (0, "swa", "anchor_missing")]

    async def test_a_page_that_never_failed_beside_one_that_did(self, redis_server):
        desk = Desk(redis_server, IndexSettings(negative_seconds=600))
        pages = [hashlib.sha256(str(i).encode()).digest() for i in range(300)]
        every = np.ones(300, np.bool_)
        third = np.arange(300) % 3 == 0
        whole = Claim("kv", KV, 1, (0,), every, guarded=False)
        await desk.index.commit(NS, pages, [whole], [])
        await desk.index.clear(NS, pages, [Lost(KV, 1, (0,), third, "timeout")], None)
        done = await desk.index.commit(NS, pages, [whole], [])
        assert done.rejected == [(i, "kv", "negative_entry") for i in range(0, 300, 3)]
        assert (done.committed, done.complete) == (200, 200)
        assert await desk.claimed() == 200

    async def test_the_note_that_explains_the_miss_is_as_before(self, desk):
        await desk.commit(claim(range(4), 4))
        await desk.missing(lost([2], 4, reason="timeout"))
        note, stored = await desk.index.note(NS, PAGE[0], KV)
        assert note is not None
        assert (note.reason, note.shards, stored) == ("timeout", [2], [0, 1, 3])

    async def test_what_was_not_claimed_leaves_no_negative_entry(self, desk):
        await desk.missing(lost(reason="timeout"))
        assert (await desk.commit(claim())).complete == 1

    async def test_by_default_it_lasts_five_seconds(self):
        assert IndexSettings().negative_seconds == 5.0
