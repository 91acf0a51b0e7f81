"""The mover with everything real: memory, both stores, the control plane over HTTP."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from api.settings import Settings, StoreSettings
from caketin.embedded_redis import EmbeddedRedis
from dataplane.attach import Attached, attached
from dataplane.bound_pool import BoundPool
from dataplane.child_process import free_port
from dataplane.control_client import ControlClient, ControlSettings, ModelIdentity, RankIdentity
from dataplane.host_memory import HostMemory
from dataplane.mooncake_node import MooncakeCluster
from dataplane.page_mover import PageMover
from metadata.codec import PageHashes
from metadata.errors import InvalidInput
from metadata.object_keys import object_keys, suffixes
from metadata.pools import AllPages, Part, PoolSpec, RankPool, TrailingPages
from tests.dataplane.mover_world import hashes_of, true_bytes
from tests.servers import PATIENT, serving

SPECS = [
    PoolSpec("kv", (), logical=True),
    PoolSpec("c4", (Part("page", "uint8", 4096),), indices_from="kv"),
    PoolSpec(
        "indexer",
        (Part("k", "uint8", 96), Part("v", "uint8", 48)),
        indices_from="kv",
        object_layout="layer_first",
    ),
    PoolSpec("swa", (Part("page", "uint8", 999),), 2, TrailingPages(2)),
]
OWNED = {"kv": (0,), "c4": (0,), "indexer": (0,), "swa": (0, 1)}
PAGES = 8


class Engine:
    """One engine of one rank on a running control plane."""

    def __init__(self, url: str, joined: contextlib.ExitStack, model: str) -> None:
        self.url = url
        me = RankIdentity(f"e-{uuid.uuid4().hex[:8]}", "dp0-pp0-cp0-tp0", uuid.uuid4().hex)
        self.client = joined.enter_context(
            contextlib.closing(ControlClient(ControlSettings(url, call_seconds=5), me))
        )
        self.memory = {
            s.name: [
                HostMemory(s, 16, layers=3 if s.object_layout == "layer_first" else 1) for _ in OWNED[s.name]
            ]
            for s in SPECS
            if not s.logical
        }
        pools = [
            BoundPool(RankPool(s, OWNED[s.name]), tuple(m.pool for m in self.memory.get(s.name, ())))
            for s in SPECS
        ]
        self.me: Attached = joined.enter_context(attached(self.client, ModelIdentity(model, "r", 4), pools))
        self.slots = {n: np.arange(PAGES)[::-1].copy() for n in self.memory}

    def pieces(self, hashes: PageHashes, page: int) -> Iterator[tuple[list[np.ndarray], bytes]]:
        """Memory and true bytes of every object of a page."""
        for spec in (s for s in SPECS if not s.logical):
            for shard, memory in zip(OWNED[spec.name], self.memory[spec.name], strict=True):
                for part in spec.parts:
                    slot = int(self.slots[spec.name][page])
                    raw = true_bytes(hashes[page], spec.name, shard, part.part, part.bytes)
                    yield memory.fragments(slot, part.part), raw

    def fill(self, hashes: PageHashes) -> None:
        for page in range(len(hashes)):
            for memory, raw in self.pieces(hashes, page):
                at = 0
                for piece in memory:
                    piece[:] = np.frombuffer(raw[at : at + piece.size], np.uint8)
                    at += piece.size

    def intact(self, hashes: PageHashes, page: int) -> bool:
        return all(b"".join(p.tobytes() for p in memory) == raw for memory, raw in self.pieces(hashes, page))

    def keys(self, hashes: PageHashes, name: str, page: int, shard: int = 0) -> list[str]:
        spec = next(s for s in SPECS if s.name == name)
        return object_keys(self.me.namespace_id, [hashes[page]], suffixes(spec, [shard]))[0]

    def back_up(self, hashes: PageHashes):
        self.fill(hashes)
        return self.me.mover.back_up(hashes, self.slots)

    def look_up(self, hashes: PageHashes):
        return self.client.lookup(self.me.namespace_id, hashes)

    def prefetch(self, hashes: PageHashes):
        return self.me.mover.prefetch(hashes, self.look_up(hashes), self.slots)


@pytest.fixture(params=["file", "mooncake"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Settings]:
    if request.param == "mooncake":
        cluster: MooncakeCluster = request.getfixturevalue("mooncake_cluster")
        store = StoreSettings(kind="mooncake", master=cluster.master, protocol="tcp")
    else:
        store = StoreSettings(kind="file", path=str(tmp_path / "store"))
    server = EmbeddedRedis.start(tmp_path / "redis", appendonly=False)
    yield Settings(redis_url=server.url, port=free_port(), store=store, **PATIENT)
    server.stop()


@pytest.fixture
def engines(settings: Settings) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one model."""
    model = uuid.uuid4().hex
    with serving(settings) as url, contextlib.ExitStack() as joined:
        yield Engine(url, joined, model), Engine(url, joined, model)


def test_what_one_engine_backed_up_another_restores_to_the_byte(engines: tuple[Engine, Engine]):
    writer, reader = engines
    hashes = hashes_of(PAGES)
    assert not reader.prefetch(hashes).transfers_done
    done = writer.back_up(hashes)
    assert done.transfers_done
    assert (done.committed, done.rejected) == (PAGES, [])
    read = reader.prefetch(hashes)
    assert read.transfers_done
    assert read.pages == PAGES
    assert np.flatnonzero(read.read["swa"]).tolist() == [PAGES - 2, PAGES - 1]
    assert all(reader.intact(hashes, p) for p in (PAGES - 2, PAGES - 1))


def test_what_is_gone_is_a_shorter_prefix_now_and_no_promise_the_next_time(engines):
    """Field reports 1, 9 and 12."""
    writer, reader = engines
    hashes = hashes_of(PAGES)
    writer.back_up(hashes)
    writer.me.store.remove(writer.keys(hashes, "swa", 6, shard=1))
    writer.me.store.remove(writer.keys(hashes, "indexer", 5)[1:])
    assert reader.look_up(hashes).hit_pages == PAGES, "the index is a claim"
    read = reader.prefetch(hashes)
    assert (read.pages, read.transfers_done) == (5, False)
    assert all(reader.intact(hashes, p) for p in (3, 4))
    again = reader.look_up(hashes)
    assert again.hit_pages == 5
    assert again.miss is not None
    assert (again.miss.page, again.miss.pool, again.miss.reason) == (5, "indexer", "lost")
    assert writer.back_up(hashes).transfers_done
    assert reader.prefetch(hashes).pages == PAGES


def test_pools_of_one_page_lost_for_two_reasons_are_both_cleared(engines):
    """Two reports would share a generation, and the second would be fenced off by the first."""
    writer, reader = engines
    hashes = hashes_of(PAGES)
    writer.back_up(hashes)
    (c4,), (k, _) = writer.keys(hashes, "c4", 2), writer.keys(hashes, "indexer", 2)
    writer.me.store.remove([c4, k])
    writer.me.store.put_bytes(k, b"another size")
    assert reader.prefetch(hashes).pages == 2
    state = reader.client.lookup(reader.me.namespace_id, hashes)
    assert state.pools["c4"] == 2
    assert reader.prefetch(hashes).pages == 2
    assert writer.back_up(hashes).transfers_done
    assert reader.prefetch(hashes).pages == PAGES


def test_a_control_plane_that_went_away_loses_claims_only_until_the_call_is_made_again(settings: Settings):
    hashes = hashes_of(PAGES)
    with contextlib.ExitStack() as joined:
        with serving(settings) as url:
            engine = Engine(url, joined, uuid.uuid4().hex)
        done = engine.back_up(hashes)
        assert done.error is not None
        assert not done.transfers_done
        assert all(mask.all() for mask in done.stored.values())
        with serving(settings):
            assert engine.look_up(hashes).hit_pages == 0
            assert engine.back_up(hashes).transfers_done
            promise = engine.look_up(hashes)
        engine.me.store.remove(engine.keys(hashes, "c4", 4))
        read = engine.me.mover.prefetch(hashes, promise, engine.slots)
        assert (read.pages, read.error) == (4, None)
        assert all(engine.intact(hashes, p) for p in (2, 3))


def test_threads_move_other_pages_through_one_mover_at_once(engines: tuple[Engine, Engine]):
    engine, _ = engines
    chains = [PageHashes.of([bytes([c]) * 31 + bytes([p]) for p in range(2)]) for c in range(8)]
    engine.slots = {}

    def one(chain: int) -> int:
        hashes = chains[chain]
        slots = {n: np.array([2 * chain, 2 * chain + 1]) for n in engine.memory}
        assert engine.me.mover.back_up(hashes, slots).transfers_done
        promise = engine.look_up(hashes)
        for memories in engine.memory.values():
            for memory in memories:
                for part in memory.pool.parts:
                    for column in memory.columns(part.part):
                        column[slots["c4"]] = 0xEE
        return engine.me.mover.prefetch(hashes, promise, slots).pages

    for memories in engine.memory.values():
        for memory in memories:
            for part in memory.pool.parts:
                for column in memory.columns(part.part):
                    column[:] = np.arange(16, dtype=np.uint8)[:, None]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(8))) == [2] * 8
    for memory in engine.memory["c4"]:
        (column,) = memory.columns("page")
        assert (column == np.arange(16, dtype=np.uint8)[:, None]).all()


def test_pools_that_do_not_fit_together_make_no_mover():
    orphan = PoolSpec("c4", (Part("page", "uint8", 8),), 1, AllPages(), indices_from="kv")
    bound = BoundPool(RankPool(orphan, (0,)), (HostMemory(orphan, 2).pool,))
    with pytest.raises(InvalidInput):
        PageMover(None, None, "0" * 16, [bound])  # type: ignore[arg-type]


def test_the_control_plane_s_numbers_tell_what_was_lost(engines: tuple[Engine, Engine]):
    writer, reader = engines
    hashes = hashes_of(PAGES)
    writer.back_up(hashes)
    writer.me.store.remove(writer.keys(hashes, "c4", 7))
    reader.prefetch(hashes)
    rates = httpx.get(
        f"{reader.url}/v1/hit-rates", params={"window": "10m", "step": "10", "by": "pool"}, trust_env=False
    ).json()
    lost = {
        row["labels"]["pool"]: sum(row["lost_pages"]) for row in rates["series"] if row["labels"].get("pool")
    }
    assert lost["c4"] == 1
