"""Any history of registrations, commits, reports and lookups agrees with a plain model.

An engine of TP up to 64 x PP up to 8 registers rank by rank; ranks own one shard each of the pools they hold.
Steps of several tasks at once are part of the history: their order is unknown, what they lead to is not.
"""

import asyncio
import hashlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from metadata.hit_counters import HitCounters
from metadata.namespace import Namespace
from metadata.page_claims import AnchorShards, Claim, Lost
from metadata.page_index import IndexSettings, PageIndex
from metadata.pools import AllPages, Part, PoolSpec, RankPool, TrailingPages
from metadata.redis_server import RedisServer, RedisSettings
from metadata.registered import Registration
from metadata.registry import Registry
from tests.metadata.index_model import IndexModel, ModelPool

PAGES = 24
HASHES = [hashlib.sha256(str(i).encode()).digest() for i in range(PAGES)]
NS = Namespace("tenant", "model", "r1", 64)
page_sets = st.sets(st.integers(0, PAGES - 1), min_size=1, max_size=PAGES)
starts = st.integers(0, PAGES - 1)


def mask(pages) -> np.ndarray:
    found = np.zeros(PAGES, np.bool_)
    found[list(pages)] = True
    return found


class IndexStates(RuleBasedStateMachine):
    """Subclassed with a Redis."""

    stack = None
    loop = None

    @initialize(
        tp=st.sampled_from([1, 2, 5, 64]),
        pp=st.sampled_from([1, 2, 8]),
        window=st.integers(1, 4),
        salt=st.integers(0, 2**32),
    )
    def begin(self, tp, pp, window, salt):
        self.stack.flush()
        self.tp, self.pp = tp, pp
        self.model = IndexModel(
            [
                ModelPool("kv", tp * pp, AllPages()),
                ModelPool("swa", tp * pp, TrailingPages(window)),
                ModelPool("mamba", tp, TrailingPages(1)),
                ModelPool("indexer", 1, AllPages()),
            ],
            PAGES,
        )
        self.redis = RedisServer.connect(
            RedisSettings(self.stack.url, connect_seconds=20, command_seconds=30)
        )
        self.index = PageIndex(self.redis, IndexSettings(negative_seconds=0))
        self.book = Registry(self.redis)
        self.counters = HitCounters(self.redis)
        self.registered: dict[int, set[str]] = {}
        self.lookups = 0
        self.run(self.redis.prepare())

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    def teardown(self):
        if hasattr(self, "redis"):
            self.run(self.everything_agrees())
            self.run(self.redis.close())

    def shards_of(self, rank: int, pool: str) -> set[int]:
        count = self.model.pools[pool].shard_count
        return {rank} if count == self.tp * self.pp else {rank % count}

    def registration(self, rank: int, pools) -> Registration:
        owned = []
        for name in sorted(pools):
            p = self.model.pools[name]
            spec = PoolSpec(
                name=name,
                parts=(Part("page", "uint8", 64),),
                shard_count=p.shard_count,
                hit_policy=p.policy,
                indices_from=None,
                object_layout="page_first",
            )
            owned.append(RankPool(spec, tuple(sorted(self.shards_of(rank, name)))))
        return Registration(
            "e", f"dp0-pp{rank // self.tp}-cp0-tp{rank % self.tp}", f"i{rank}", NS, tuple(owned)
        )

    @rule(
        first=st.integers(0, 511),
        count=st.integers(1, 16),
        more=st.sets(st.sampled_from(["swa", "mamba", "indexer"])),
    )
    def ranks_register_at_once(self, first, count, more):
        ranks = {(first + i) % (self.tp * self.pp) for i in range(count)}
        wanted = {r: self.registered.get(r, set()) | {"kv"} | more for r in ranks}

        async def go():
            return await asyncio.gather(
                *(self.book.register(self.registration(r, pools)) for r, pools in wanted.items())
            )

        for (rank, pools), done in zip(wanted.items(), self.run(go()), strict=True):
            assert done.new == (rank not in self.registered)
            self.registered[rank] = pools
            for name in pools:
                known = self.model.pools[name]
                assert known.bit in {None, done.pools[name].bit}
                known.bit = done.pools[name].bit
                known.registered |= self.shards_of(rank, name)

    def claims(self, rank: int, stored) -> list[Claim]:
        return [
            Claim(
                name,
                self.model.pools[name].bit,
                self.model.pools[name].shard_count,
                tuple(sorted(shards)),
                mask(pages),
                guarded=name != "kv",
            )
            for name, (shards, pages) in stored.items()
        ]

    def anchors(self, rank: int) -> list[AnchorShards]:
        kv = self.model.pools["kv"]
        return [AnchorShards(kv.bit, kv.shard_count, tuple(self.shards_of(rank, "kv")))]

    @precondition(lambda self: self.registered)
    @rule(data=st.data(), which=st.integers(0, 511))
    def a_rank_commits(self, data, which):
        rank = sorted(self.registered)[which % len(self.registered)]
        names = data.draw(st.sets(st.sampled_from(sorted(self.registered[rank])), min_size=1))
        stored = {n: (self.shards_of(rank, n), data.draw(page_sets)) for n in sorted(names)}
        done = self.run(
            self.index.commit(NS.namespace_id, HASHES, self.claims(rank, stored), self.anchors(rank))
        )
        committed, complete, rejected = self.model.commit(range(PAGES), stored, self.shards_of(rank, "kv"))
        assert [(r.page, r.pool) for r in done.rejected] == rejected
        assert {r.code for r in done.rejected} <= {"anchor_missing"}
        # Pages with other claims go in other calls of the script; each counts a page once.
        assert done.committed == committed
        assert done.complete == complete

    @precondition(lambda self: self.registered)
    @rule(
        pages=page_sets,
        leave_out=st.sets(st.integers(0, 511), max_size=2),
        names=st.sets(st.sampled_from(["kv", "swa", "mamba", "indexer"]), min_size=1),
    )
    def all_ranks_commit_at_once(self, pages, leave_out, names):
        """Every registered rank but some commits the same pages: what the page ends as has no order."""
        ranks = [r for r in sorted(self.registered) if r not in leave_out][:64]
        stored = {
            r: {
                n: (self.shards_of(r, n), set(pages))
                for n in sorted(names | {"kv"})
                if n in self.registered[r]
            }
            for r in ranks
        }

        async def go():
            await asyncio.gather(
                *(
                    self.index.commit(NS.namespace_id, HASHES, self.claims(r, s), self.anchors(r))
                    for r, s in stored.items()
                )
            )

        self.run(go())
        for r, s in stored.items():
            self.model.commit(range(PAGES), s, self.shards_of(r, "kv"))

    @precondition(lambda self: self.registered)
    @rule(
        data=st.data(),
        pages=page_sets,
        which=st.integers(0, 511),
        fence=st.sampled_from(["none", "right", "wrong"]),
    )
    def a_rank_reports_missing(self, data, pages, which, fence):
        rank = sorted(self.registered)[which % len(self.registered)]
        names = data.draw(st.sets(st.sampled_from(sorted(self.registered[rank])), min_size=1))
        reason = data.draw(st.sampled_from(["gone", "timeout", "size_mismatch"]))
        items = {n: self.shards_of(rank, n) for n in names}
        told = bytes((p.generation + (fence == "wrong")) % 256 for p in self.model.pages)
        lost = [
            Lost(self.model.pools[n].bit, self.model.pools[n].shard_count, tuple(s), mask(pages), reason)
            for n, s in sorted(items.items())
        ]
        got = self.run(self.index.clear(NS.namespace_id, HASHES, lost, None if fence == "none" else told))
        want = [
            self.model.missing(page, items, None if fence == "none" else told[page]) for page in sorted(pages)
        ]
        assert got == (sum(c for c, _ in want), sum(s for _, s in want))

    @precondition(lambda self: self.registered)
    @rule(
        start=starts, length=st.integers(1, PAGES), only=st.sets(st.sampled_from(["swa", "mamba", "indexer"]))
    )
    def lookup(self, start, length, only):
        pages = list(range(start, min(PAGES, start + length)))
        gates = ["kv", *sorted(n for n in only if self.model.pools[n].bit is not None)]
        found = self.run(self.find(pages, gates))
        runs = [n for a, b in found.restorable.runs for n in range(a, b + 1)]
        assert runs == self.model.restorable(pages, gates)
        read = pages[: found.pages_read]
        assert list(found.generations[: len(read)]) == [self.model.pages[p].generation for p in read]

    def find(self, pages, gates):
        asked = {n: (self.model.pools[n].bit, self.model.pools[n].policy) for n in gates}
        return self.index.find(NS.namespace_id, [HASHES[p] for p in pages], asked)

    async def everything_agrees(self):
        if not self.registered:
            return
        claimed = await self.index.claimed_pages(NS.namespace_id)
        view = await self.book.namespace("tenant", NS.namespace_id, fresh=True)
        by_name = {v.spec.name: v for v in view.variants.values()}
        for name, expected in self.model.claimed().items():
            pool = self.model.pools[name]
            if pool.bit is None:
                continue
            assert claimed.get(pool.bit, 0) == expected
            assert set(by_name[name].missing_shards) == set(range(pool.shard_count)) - pool.registered
            notes = await asyncio.gather(*(self.index.note(NS.namespace_id, p, pool.bit) for p in HASHES))
            for i, (_, incomplete) in enumerate(notes):
                there = self.model.pages[i].shards.get(name, set())
                assert incomplete == ([] if self.model.whole(i, name) else sorted(there))
        assert len(await self.book.engine("tenant", "e")) == len(self.registered)


def drive(stack, examples: int, steps: int) -> None:
    """Run `examples` histories of `steps` steps."""
    loop = asyncio.new_event_loop()
    machine = type("Machine", (IndexStates,), {"stack": stack, "loop": loop})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        loop.close()


@pytest.mark.parametrize("redis_stack", ["valkey", "cluster"], indirect=True)
def test_short_histories_agree_with_the_model(redis_stack):
    drive(redis_stack, examples=15, steps=30)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("redis_stack", ["valkey", "cluster"], indirect=True)
@pytest.mark.parametrize("examples", [pytest.param(5, id="smoke"), pytest.param(200, id="long")])
def test_histories_of_10000_steps_agree_with_the_model(redis_stack, examples):
    drive(redis_stack, examples=examples, steps=50)
