"""The registry on every kind of Redis: incarnations, leases, late pools, limits, who has what."""

import asyncio
import re
import time

import pytest

from metadata import redis_keys, registry, registry_reader
from metadata.errors import (
    InvalidInput,
    PoolChanged,
    StaleIncarnation,
    UnknownEngine,
    UnknownNamespace,
    UnknownRank,
)
from metadata.namespace import Namespace
from metadata.pools import AllPages, Part, PoolSpec, RankPool, TrailingPages
from metadata.registered import Registration
from metadata.registry import Registry

NS = Namespace("tenant", "model", "r1", 64)
RANK = "dp0-pp0-cp0-tp0"


def pool(name="kv", size=100, shards=(0,), count=1, policy=None) -> RankPool:
    return RankPool(
        PoolSpec(
            name=name,
            parts=(Part("page", "uint8", size),),
            shard_count=count,
            hit_policy=policy or AllPages(),
            indices_from=None,
            object_layout="page_first",
        ),
        tuple(shards),
    )


def who(engine="e", rank=RANK, incarnation="i1", pools=None, namespace=NS) -> Registration:
    return Registration(engine, rank, incarnation, namespace, tuple(pools or [pool()]))


@pytest.fixture
def book(redis_server) -> Registry:
    return Registry(redis_server, lease_seconds=30)


async def members(book: Registry, namespace=NS) -> dict[str, set[str]]:
    view = await book.namespace(namespace.tenant, namespace.namespace_id, fresh=True)
    found = await book.members(view)
    return {view.variants[i].spec.name: engines for i, engines in found.items()}


async def test_the_first_registration_is_new_and_gives_bits(book):
    done = await book.register(who(pools=[pool(), pool("swa", policy=TrailingPages(2))]))
    assert (done.new, done.epoch, done.namespace_id) == (True, 1, NS.namespace_id)
    assert [p.bit for p in done.pools.values()] == [0, 1]
    assert {p.engines for p in done.pools.values()} == {1}


async def test_the_same_again_is_a_renewal_and_a_late_pool_raises_the_epoch(book):
    await book.register(who())
    again = await book.register(who())
    assert (again.new, again.epoch) == (False, 1)
    late = await book.register(who(pools=[pool(), pool("draft")]))
    assert (late.new, late.epoch) == (False, 2)
    assert late.pools["draft"].bit == 1
    assert {p.spec.name for p in (await book.rank("tenant", "e", RANK)).pools} == {"kv", "draft"}


async def test_a_changed_pool_is_refused_field_by_field_and_nothing_is_half_registered(redis_stack, book):
    await book.register(who())
    before = redis_stack.keys("*")
    with pytest.raises(PoolChanged) as caught:
        await book.register(who(pools=[pool(size=200), pool("draft")]))
    assert any(e.field.startswith("pools[0]") for e in caught.value.errors)
    assert redis_stack.keys("*") == before
    view = await book.namespace("tenant", NS.namespace_id, fresh=True)
    assert {v.spec.name for v in view.variants.values()} == {"kv"}


async def test_a_pool_left_out_within_one_incarnation_is_refused(book):
    await book.register(who(pools=[pool(), pool("swa")]))
    with pytest.raises(PoolChanged, match="not listed"):
        await book.register(who())


async def test_a_newer_incarnation_replaces_the_older_which_is_refused_everywhere(book):
    await book.register(who())
    done = await book.register(who(incarnation="i2", pools=[pool(size=200)]))
    assert (done.new, done.epoch) == (True, 2)
    with pytest.raises(StaleIncarnation):
        await book.register(who())
    with pytest.raises(StaleIncarnation):
        await book.heartbeat("tenant", "e", RANK, "i1", 1)
    with pytest.raises(StaleIncarnation):
        await book.remove("tenant", "e", RANK, "i1")
    assert await book.heartbeat("tenant", "e", RANK, "i2", 2) == 30


async def test_a_heartbeat_of_nobody_or_of_an_older_epoch_says_register_again(book):
    with pytest.raises(UnknownRank):
        await book.heartbeat("tenant", "e", RANK, "i1", 1)
    await book.register(who())
    await book.register(who(pools=[pool(), pool("draft")]))
    with pytest.raises(UnknownRank):
        await book.heartbeat("tenant", "e", RANK, "i1", 1)


async def test_a_removed_incarnation_cannot_come_back(book):
    await book.register(who())
    for _ in range(2):
        await book.remove("tenant", "e", RANK)
    with pytest.raises(StaleIncarnation):
        await book.register(who())
    assert (await book.register(who(incarnation="i2"))).new


async def test_engines_that_leave_are_no_members_any_more(book):
    for engine in ("a", "b", "c"):
        for tp in range(2):
            await book.register(who(engine, f"dp0-pp0-cp0-tp{tp}", pools=[pool(), pool(f"own-{engine}")]))
    assert await members(book) == {"kv": {"a", "b", "c"}, "own-a": {"a"}, "own-b": {"b"}, "own-c": {"c"}}
    await book.remove("tenant", "a", "dp0-pp0-cp0-tp0")
    assert (await members(book))["kv"] == {"a", "b", "c"}, "a's other rank is there"
    await book.remove("tenant", "a", "dp0-pp0-cp0-tp1")
    await book.remove("tenant", "b")
    assert await members(book) == {"kv": {"c"}, "own-a": set(), "own-b": set(), "own-c": {"c"}}
    assert await book.engines("tenant") == ["c"]
    assert (await book.register(who("c", "dp0-pp0-cp0-tp2"))).pools["kv"].engines == 1


async def test_a_rank_that_moves_to_another_namespace_leaves_the_first(book):
    other = Namespace("tenant", "model", "r2", 64)
    await book.register(who())
    await book.register(who(incarnation="i2", namespace=other))
    assert (await members(book))["kv"] == set()
    assert (await members(book, other))["kv"] == {"e"}


async def test_removing_an_old_life_does_not_take_the_new_one_off_the_list(redis_server, book):
    """The list is another slot, so leaving is a second step: a new life may register between the two."""
    await book.register(who())
    removed = [RANK.encode(), NS.namespace_id.encode(), b"i1"]
    await book.register(who(incarnation="i2"))
    await book._leave("e", removed)
    assert (await members(book))["kv"] == {"e"}


async def expire(redis_stack, book, engine="e", rank=RANK, ago=5) -> None:
    """Let a lease have ended some time ago, by a lease of negative length."""
    record = await book.rank("tenant", engine, rank, fresh=True)
    book.lease_seconds, kept = -ago, book.lease_seconds
    await book.heartbeat("tenant", engine, rank, record.incarnation, record.epoch)
    book.lease_seconds = kept


async def test_an_expired_rank_is_shown_with_its_lease_and_does_not_count(redis_stack, book):
    await book.register(who("gone"))
    await book.register(who("here"))
    await expire(redis_stack, book, "gone")
    assert (await members(book))["kv"] == {"here"}
    (record,) = await book.engine("tenant", "gone")
    assert record.lease_until < time.time()
    assert (await book.register(who("here"))).pools["kv"].engines == 1
    await book.heartbeat("tenant", "gone", RANK, "i1", 1)
    assert (await members(book))["kv"] == {"gone", "here"}, "a heartbeat brings it back"


async def test_a_rank_without_a_word_for_a_day_is_dropped_when_another_registers(redis_stack, book):
    await book.register(who())
    await expire(redis_stack, book, ago=registry.RETIRED_SECONDS - 10)
    await book.register(who(rank="dp0-pp0-cp0-tp1"))
    assert len(await book.engine("tenant", "e")) == 2
    key = redis_keys.ranks("tenant", "e")
    record = redis_stack.ask(key, "HGET", key, RANK)
    old = str(int(time.time()) - registry.RETIRED_SECONDS - 5).encode()
    redis_stack.ask(key, "HSET", key, RANK, re.sub(rb'("lease_until":)[0-9.e+]+', rb"\g<1>" + old, record))
    await book.register(who(rank="dp0-pp0-cp0-tp2"))
    assert [r.rank for r in await book.engine("tenant", "e")] == ["dp0-pp0-cp0-tp1", "dp0-pp0-cp0-tp2"]


async def test_an_engine_without_a_word_ends_by_itself_a_day_after_its_lease(redis_stack, book):
    await book.register(who())
    for key in (redis_keys.ranks("tenant", "e"), redis_keys.retired("tenant", "e")):
        ttl = redis_stack.ask(key, "TTL", key)
        assert ttl == -2 or registry.RETIRED_SECONDS < ttl <= registry.RETIRED_SECONDS + 30
    redis_stack.ask(redis_keys.ranks("tenant", "e"), "DEL", redis_keys.ranks("tenant", "e"))
    assert (await book.engines_piece("tenant")).items == []
    assert await book.engines("tenant") == [], "and its id leaves the list when somebody looks"


async def test_retired_incarnations_are_bounded_and_the_newest_stay(redis_stack, book, monkeypatch):
    monkeypatch.setattr(registry, "MAX_RETIRED", 5)
    for i in range(12):
        await book.register(who(incarnation=f"i{i:02d}"))
    key = redis_keys.retired("tenant", "e")
    left = redis_stack.ask(key, "ZRANGE", key, 0, -1)
    assert len(left) == 5
    assert f"{RANK}/i10".encode() in left
    with pytest.raises(StaleIncarnation):
        await book.register(who(incarnation="i10"))


async def test_of_two_lives_that_register_at_once_one_wins_and_the_other_is_refused_or_replaced(book):
    for attempt in range(10):
        lives = [f"i{attempt}-{k}" for k in range(6)]
        done = await asyncio.gather(
            *(book.register(who(incarnation=life)) for life in lives), return_exceptions=True
        )
        assert all(not isinstance(d, Exception) or isinstance(d, StaleIncarnation) for d in done)
        winner = (await book.rank("tenant", "e", RANK, fresh=True)).incarnation
        assert winner in lives
        for life in lives:
            if life != winner and not isinstance(done[lives.index(life)], Exception):
                with pytest.raises(StaleIncarnation):
                    await book.register(who(incarnation=life))
    assert (await members(book))["kv"] == {"e"}


async def test_no_more_than_64_variants_however_many_register_at_once(book):
    """40 tasks with 3 pools each want 121 bits: whole registrations are refused, none is cut."""
    done = await asyncio.gather(
        *(
            book.register(who(f"e{i}", pools=[pool(), *(pool(f"p{i}-{k}") for k in range(3))]))
            for i in range(40)
        ),
        return_exceptions=True,
    )
    refused = [d for d in done if isinstance(d, Exception)]
    assert all(isinstance(d, InvalidInput) for d in refused)
    assert {e.code for d in refused for e in d.errors} == {"too_many_variants"}
    view = await book.namespace("tenant", NS.namespace_id, fresh=True)
    assert len(view.variants) == 1 + 3 * 21
    assert sorted(v.bit for v in view.variants.values()) == list(range(64))
    taken = [d for d in done if not isinstance(d, Exception)]
    assert len(taken) == 21
    for grant in taken:
        for registered in grant.pools.values():
            assert view.variants[registered.pool_id].bit == registered.bit
    assert len(await book.engines("tenant")) == 21, "a refused engine is not there"


async def test_ranks_that_register_at_once_agree_on_the_bits_and_on_the_shards(book):
    ranks = [
        who(
            rank=f"dp0-pp0-cp0-tp{s}", incarnation=f"i{s}", pools=[pool(shards=(s,), count=64), pool("mamba")]
        )
        for s in range(64)
    ]
    done = await asyncio.gather(*(book.register(r) for r in ranks))
    assert len({tuple((n, p.bit) for n, p in d.pools.items()) for d in done}) == 1
    view = await book.namespace("tenant", NS.namespace_id, fresh=True)
    assert all(not v.missing_shards for v in view.variants.values())
    assert len(await book.engine("tenant", "e")) == 64


async def test_shards_that_nobody_registered_are_known(book):
    await book.register(who(pools=[pool(shards=(0, 2), count=4)]))
    (variant,) = (await book.namespace("tenant", NS.namespace_id)).variants.values()
    assert variant.missing_shards == [1, 3]


async def test_a_namespace_of_another_tenant_is_unknown(book):
    await book.register(who())
    with pytest.raises(UnknownNamespace):
        await book.namespace("other", NS.namespace_id)
    assert await book.namespaces("other") == []
    assert (await book.namespaces_piece("other")).items == []
    assert await book.engines("other") == []
    with pytest.raises(UnknownEngine):
        await book.engine("other", "e")


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_lists_go_on_from_the_cursor_and_miss_nothing(book, limit):
    spaces = [Namespace("tenant", f"m{i}", "r", 64) for i in range(7)]
    for i, namespace in enumerate(spaces):
        await book.register(who(f"e{i}", namespace=namespace))
    engines: list[str] = []
    names: list[str] = []
    cursor = None
    while True:
        piece = await book.engines_piece("tenant", limit=limit, cursor=cursor)
        assert len(piece.items) <= limit
        engines += [engine for engine, ranks in piece.items if ranks[0].rank == RANK]
        cursor = piece.next_cursor
        if cursor is None:
            break
    while True:
        page = await book.namespaces_piece("tenant", limit=limit, cursor=cursor)
        names += [view.namespace_id for view in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert engines == await book.engines("tenant") == [f"e{i}" for i in range(7)]
    assert names == sorted(n.namespace_id for n in spaces)
    assert [v.namespace_id for v in await book.namespaces("tenant")] == names


async def test_a_cursor_of_something_that_left_goes_on_after_it(book):
    for engine in ("a", "b", "c"):
        await book.register(who(engine))
    first = await book.engines_piece("tenant", limit=2)
    await book.remove("tenant", "b")
    rest = await book.engines_piece("tenant", limit=2, cursor=first.next_cursor)
    assert [engine for engine, _ in rest.items] == ["c"]


async def test_cached_views_are_a_second_old_at_most_and_bounded(redis_server, book, monkeypatch):
    monkeypatch.setattr(registry_reader, "MAX_CACHED", 4)
    other = Registry(redis_server)
    for i in range(9):
        await book.register(who(f"e{i}"))
        await other.engine_cached("tenant", f"e{i}")
        await other.rank("tenant", f"e{i}", RANK)
    assert len(other._engines) <= 4
    assert len(other._ranks) <= 4
    assert len((await other.engine_cached("tenant", "e8"))[0].pools) == 1
    await book.register(who("e8", pools=[pool(), pool("late")]))
    assert len((await other.engine_cached("tenant", "e8"))[0].pools) == 1, "cached"
    await asyncio.sleep(registry_reader.VIEW_SECONDS + 0.05)
    assert len((await other.engine_cached("tenant", "e8"))[0].pools) == 2
