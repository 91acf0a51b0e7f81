"""What a bounded file store evicts is told to the index, in few calls, and outlives a short outage of it."""

import hashlib

import pytest

from dataplane import eviction_report
from dataplane.control_plane import ControlPlaneAway
from dataplane.eviction_report import EvictionReport
from dataplane.file_space import EvictedShard
from dataplane.messages import control
from metadata.page_runs import runs_to_mask
from metadata.pools import Part, PoolSpec, RankPool

NS = "0123456789abcdef"
KV = PoolSpec("kv", (Part("page", "uint8", 64),), shard_count=2)
SWA = PoolSpec("swa", (Part("page", "uint8", 32),))
POOLS = [RankPool(KV, (0,)), RankPool(SWA, (0,))]


class Remembers:
    """A control plane that remembers which shards it was told of, and can be away."""

    def __init__(self) -> None:
        self.away = False
        self.calls = 0
        self.told: list[tuple[bytes, str, int]] = []

    def commit(self, *_args):
        raise AssertionError

    def missing(self, namespace_id, page_hashes, generation, missing):
        if self.away:
            raise ControlPlaneAway("away")
        self.calls += 1
        assert (namespace_id, generation) == (NS, None)
        for name, pool in missing.items():
            assert pool.reason == "evicted"
            for page in runs_to_mask(pool.pages, len(page_hashes)).nonzero()[0].tolist():
                self.told += [(page_hashes[page], name, shard) for shard in pool.shards]
        return control.MissingResult(cleared=0, stale=0)


def shard(page: int, pool: PoolSpec = KV, number: int = 0, namespace_id: str = NS) -> EvictedShard:
    return EvictedShard(namespace_id, hashlib.sha256(b"%d" % page).digest(), pool.pool_id, number)


def test_every_evicted_shard_is_told_once_those_of_other_ranks_too():
    world = Remembers()
    report = EvictionReport(world, NS, POOLS)
    gone = [shard(1), shard(2, number=1), shard(2), shard(3, SWA), shard(1, SWA)]
    report(gone)
    names = {KV.pool_id: "kv", SWA.pool_id: "swa"}
    assert sorted(world.told) == sorted((e.page_hash, names[e.pool_id], e.shard) for e in gone)
    assert (report.reported, report.dropped, report.foreign) == (5, 0, 0)


def test_what_is_of_others_is_left_to_its_readers():
    world = Remembers()
    report = EvictionReport(world, NS, POOLS)
    stranger = PoolSpec("mamba", (Part("page", "uint8", 8),))
    report([shard(1, namespace_id="f" * 16), shard(1, stranger)])
    assert (world.calls, report.foreign, report.reported) == (0, 2, 0)


def test_an_outage_delays_and_drops_only_the_oldest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eviction_report, "BACKLOG", 4)
    world = Remembers()
    report = EvictionReport(world, NS, POOLS)
    world.away = True
    report([shard(i) for i in range(3)])
    report([shard(i) for i in range(3, 6)])
    assert (report.reported, report.dropped) == (0, 2)
    world.away = False
    report([shard(6)])
    assert report.dropped == 3
    assert sorted(h for h, _, _ in world.told) == sorted(shard(i).page_hash for i in range(3, 7))


def test_many_pages_go_in_bounded_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eviction_report, "_PAGES_PER_CALL", 3)
    world = Remembers()
    EvictionReport(world, NS, POOLS)([shard(i) for i in range(8)])
    assert world.calls == 3
    assert len(set(world.told)) == 8
