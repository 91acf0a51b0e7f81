"""The page index against a real server: O2, H4, T2, and the Redis layout of DESIGN section 4."""

import asyncio
import hashlib

import numpy as np
import pytest

from metadata import redis_keys
from metadata.errors import CaketinError
from metadata.page_claims import AnchorShards, Claim, Lost
from metadata.page_index import PAGES_PER_SCRIPT, SCRIPTS_PER_WAVE, IndexSettings, PageIndex
from metadata.pools import AllPages, TrailingPages
from metadata.redis_server import RedisServer

NS = "9f86d081884c7d65"
KV, SWA = 0, 9


def hashes(n: int, start: int = 0) -> list[bytes]:
    return [hashlib.sha256(str(i).encode()).digest() for i in range(start, start + n)]


def claim(pool: str, bit: int, pages, n: int, shards=(0,), shard_count=1, guarded=False) -> Claim:
    mask = np.zeros(n, bool)
    mask[list(pages)] = True
    return Claim(pool, bit, shard_count, tuple(shards), mask, guarded)


def lost(bit: int, pages, n: int, shards=(0,), shard_count=1, reason="gone") -> Lost:
    mask = np.zeros(n, bool)
    mask[list(pages)] = True
    return Lost(bit, shard_count, tuple(shards), mask, reason)


NO_WINDOW = IndexSettings(negative_seconds=0)
"""Without negative entries, where a test is about what a commit after a loss does."""

GATES = {"kv": (KV, AllPages()), "swa": (SWA, TrailingPages(2))}


async def test_a_committed_prefix_is_restorable_where_every_pool_allows_the_same_length(
    redis_server: RedisServer,
):
    index, pages = PageIndex(redis_server), hashes(6)
    done = await index.commit(NS, pages, [claim("kv", KV, range(6), 6), claim("swa", SWA, [1, 2, 4], 6)], [])
    assert (done.committed, done.complete, done.rejected) == (6, 6, [])
    found = await index.find(NS, pages, GATES)
    assert found.restorable.runs == ((3, 3),)
    assert found.restorable.pools == {"kv": 6, "swa": 3}
    assert found.generations == bytes(6)


async def test_a_pool_is_present_only_when_every_shard_is_stored(redis_server: RedisServer):
    index, pages = PageIndex(redis_server), hashes(3)
    gates = {"kv": (KV, AllPages())}
    for shard in (2, 0, 0):
        done = await index.commit(NS, pages, [claim("kv", KV, range(3), 3, [shard], 3)], [])
        assert (done.committed, done.complete) == (3, 0)
        assert (await index.find(NS, pages, gates)).restorable.hit_pages == 0
    assert (await index.note(NS, pages[0], KV))[1] == [0, 2]
    done = await index.commit(NS, pages, [claim("kv", KV, range(3), 3, [1], 3)], [])
    assert (done.committed, done.complete) == (3, 3)
    assert (await index.find(NS, pages, gates)).restorable.hit_pages == 3
    assert (await index.note(NS, pages[0], KV))[1] == []


async def test_a_sidecar_commit_without_its_anchor_is_rejected_page_by_page(redis_server: RedisServer):
    index, pages = PageIndex(redis_server), hashes(4)
    anchor = [AnchorShards(KV, 2, (1,))]
    await index.commit(NS, pages, [claim("kv", KV, [0], 4, [1], 2)], anchor)
    done = await index.commit(
        NS,
        pages,
        [claim("kv", KV, [2], 4, [1], 2), claim("swa", SWA, range(4), 4, guarded=True)],
        anchor,
    )
    assert done.rejected == [(1, "swa", "anchor_missing"), (3, "swa", "anchor_missing")]
    assert done.committed == 2
    found = await index.find(NS, pages, {"swa": (SWA, TrailingPages(1))})
    assert found.presence["swa"].tolist() == [True, False, True, False]


async def test_a_rank_without_an_anchor_shard_may_commit_its_sidecar_any_time(redis_server: RedisServer):
    index, pages = PageIndex(redis_server), hashes(1)
    await index.commit(NS, pages, [claim("swa", SWA, [0], 1, guarded=True)], [])
    assert (await index.find(NS, pages, GATES)).restorable.hit_pages == 0
    await index.commit(NS, pages, [claim("kv", KV, [0], 1)], [])
    assert (await index.find(NS, pages, GATES)).restorable.hit_pages == 1


async def test_missing_clears_the_claim_raises_the_generation_and_leaves_a_note(redis_server: RedisServer):
    index, pages = PageIndex(redis_server), hashes(3)
    await index.commit(NS, pages, [claim("kv", KV, range(3), 3)], [])
    before = await index.find(NS, pages, {"kv": (KV, AllPages())})
    cleared, stale = await index.clear(NS, pages, [lost(KV, [1], 3)], before.generations)
    assert (cleared, stale) == (1, 0)
    after = await index.find(NS, pages, {"kv": (KV, AllPages())})
    assert after.restorable.hit_pages == 1
    assert after.generations == bytes([0, 1, 0])
    note, _ = await index.note(NS, pages[1], KV)
    assert note is not None
    assert (note.reason, note.shards) == ("gone", [0])
    assert await index.claimed_pages(NS) == {KV: 2}


async def test_a_late_report_cannot_clear_a_newer_claim(redis_server: RedisServer):
    index, pages = PageIndex(redis_server, NO_WINDOW), hashes(1)
    gates = {"kv": (KV, AllPages())}
    await index.commit(NS, pages, [claim("kv", KV, [0], 1)], [])
    old = (await index.find(NS, pages, gates)).generations
    await index.clear(NS, pages, [lost(KV, [0], 1)], old)
    await index.commit(NS, pages, [claim("kv", KV, [0], 1)], [])
    assert await index.clear(NS, pages, [lost(KV, [0], 1)], old) == (0, 1)
    assert (await index.find(NS, pages, gates)).restorable.hit_pages == 1
    assert await index.clear(NS, pages, [lost(KV, [0], 1)], None) == (1, 0)


async def test_losing_one_shard_keeps_the_others_so_that_its_return_completes_the_page(
    redis_server: RedisServer,
):
    index, pages = PageIndex(redis_server, NO_WINDOW), hashes(1)
    gates = {"kv": (KV, AllPages())}
    shards = range(11)
    await index.commit(NS, pages, [claim("kv", KV, [0], 1, shards, 11)], [])
    assert await index.clear(NS, pages, [lost(KV, [0], 1, [10], 11)], b"\0") == (1, 0)
    assert (await index.note(NS, pages[0], KV))[1] == list(range(10))
    assert await index.clear(NS, pages, [lost(KV, [0], 1, [3], 11)], b"\1") == (1, 0)
    assert (await index.find(NS, pages, gates)).restorable.hit_pages == 0
    done = await index.commit(NS, pages, [claim("kv", KV, [0], 1, [3, 10], 11)], [])
    assert done.complete == 1
    assert (await index.find(NS, pages, gates)).restorable.hit_pages == 1


async def test_clearing_what_was_never_claimed_changes_nothing(redis_stack, redis_server: RedisServer):
    index, pages = PageIndex(redis_server), hashes(2)
    assert await index.clear(NS, pages, [lost(KV, [0, 1], 2)], None) == (0, 0)
    assert redis_stack.keys("*") == [b"ct:schema"]


async def test_a_page_that_lost_its_last_claim_keeps_its_generation_for_a_while_only(
    redis_stack, redis_server: RedisServer
):
    index, pages = PageIndex(redis_server, IndexSettings(companion_seconds=60, negative_seconds=0)), hashes(1)
    (key,) = redis_keys.pages(NS, pages)
    await index.commit(NS, pages, [claim("kv", KV, [0], 1)], [])
    assert redis_stack.ask(key, "PTTL", key) == -1
    await index.clear(NS, pages, [lost(KV, [0], 1)], None)
    assert 0 < redis_stack.ask(key, "PTTL", key) <= 60_000
    await index.commit(NS, pages, [claim("kv", KV, [0], 1)], [])
    assert redis_stack.ask(key, "PTTL", key) == -1


async def test_commit_is_idempotent(redis_stack, redis_server: RedisServer):
    index, pages = PageIndex(redis_server), hashes(700)
    claims = [claim("kv", KV, range(700), 700), claim("swa", SWA, [5, 699], 700)]
    for _ in range(2):
        done = await index.commit(NS, pages, claims, [])
        assert (done.committed, done.complete) == (700, 700)
    assert len(redis_stack.keys("ct:{*}:p:*")) == 700
    assert await index.claimed_pages(NS) == {KV: 700, SWA: 2}


@pytest.mark.parametrize("hole", [0, 1, 63, 64, 65, 319, 320, 1343, 1344, 4999])
async def test_a_lookup_in_chunks_stops_at_the_hole_and_answers_as_one_read_would(
    redis_server: RedisServer, hole
):
    index, pages = PageIndex(redis_server), hashes(5000)
    await index.commit(NS, pages, [claim("kv", KV, [i for i in range(5000) if i != hole], 5000)], [])
    found = await index.find(NS, pages, {"kv": (KV, AllPages())})
    assert found.restorable.hit_pages == hole
    assert found.restorable.stop is not None
    assert found.restorable.stop.page == hole
    bounds = [64, 320, 1344, 5000]
    assert found.pages_read == next(b for b in bounds if hole < b), "no chunk after the one with the hole"


async def test_a_window_that_reaches_before_the_call_is_checked_over_prefix_hashes(redis_server: RedisServer):
    index, prefix, pages = PageIndex(redis_server), hashes(2), hashes(1, start=2)
    await index.commit(NS, pages, [claim("kv", KV, [0], 1), claim("swa", SWA, [0], 1)], [])
    found = await index.find(NS, pages, GATES, first_page=2)
    assert (found.restorable.hit_pages, found.restorable.unchecked_window_pages) == (1, 1)
    found = await index.find(NS, pages, GATES, first_page=2, prefix_hashes=prefix[1:])
    assert found.restorable.hit_pages == 0
    await index.commit(NS, prefix, [claim("swa", SWA, [1], 2)], [])
    found = await index.find(NS, pages, GATES, first_page=2, prefix_hashes=prefix[1:])
    assert (found.restorable.hit_pages, found.restorable.unchecked_window_pages) == (1, 0)


async def test_a_complete_page_costs_at_most_144_bytes_of_redis_memory(
    redis_stack, redis_server: RedisServer
):
    index, n = PageIndex(redis_server), 20_000

    def memory() -> int:
        used = 0
        for server in redis_stack.data:
            with server.plain() as plain:
                used += plain.info("memory")["used_memory_dataset"]
        return used

    pages = hashes(n)
    await index.commit(NS, pages[:1], [claim("kv", KV, [0], 1)], [])
    before = memory()
    await index.commit(NS, pages, [claim("kv", KV, range(n), n), claim("x", 63, range(n), n)], [])
    (key,) = redis_keys.pages(NS, pages[:1])
    assert redis_stack.ask(key, "MEMORY", "USAGE", key) <= 144
    assert (memory() - before) / n <= 144


async def test_a_wave_of_scripts_that_fails_is_told_when_the_others_have_ended(
    redis_stack, redis_server: RedisServer
):
    """Nothing of a call may go on behind the caller's back: it will repeat the call."""
    pages = hashes(3 * SCRIPTS_PER_WAVE * PAGES_PER_SCRIPT)
    bad = len(pages) // 2  # in the middle wave
    (key,) = redis_keys.companions(NS, [pages[bad]])
    redis_stack.ask(key, "SET", key, "not a hash")
    index = PageIndex(redis_server)
    half, whole = ([claim("kv", KV, range(len(pages)), len(pages), shards, 2)] for shards in ([0], [0, 1]))
    before = asyncio.all_tasks()
    with pytest.raises(CaketinError):
        await index.commit(NS, pages, half, [])
    assert asyncio.all_tasks() == before
    for at in (0, len(pages) - 1):
        (other,) = redis_keys.companions(NS, [pages[at]])
        assert redis_stack.ask(other, "EXISTS", other), "the other waves were served"
    redis_stack.ask(key, "DEL", key)
    done = await index.commit(NS, pages, whole, [])
    assert done.complete == len(pages)
    assert (await index.find(NS, pages, {"kv": (KV, AllPages())})).restorable.hit_pages == len(pages)
