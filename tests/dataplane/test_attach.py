"""Joining and leaving: what fails half-way leaves nothing behind; no write goes under foreign names."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from api.settings import Settings, StoreSettings
from caketin.embedded_redis import EmbeddedRedis
from dataplane import attach
from dataplane.attach import IdentityMismatch, attached
from dataplane.bound_pool import BoundPool
from dataplane.child_process import free_port
from dataplane.control_client import (
    ControlClient,
    ControlPlaneAway,
    ControlRefused,
    ControlSettings,
    ModelIdentity,
    RankIdentity,
)
from dataplane.file_store import FileStore
from dataplane.host_memory import HostMemory
from dataplane.host_pool import PageBuffer, Region, page_first
from dataplane.object_store import (
    ObjectBuffers,
    RegistrationFailed,
    StoreClosed,
    StoreCode,
    StoreError,
    StoreUnavailable,
)
from metadata.namespace import Namespace, fingerprint
from metadata.object_keys import manifest_key, parse_manifest
from metadata.pools import Part, PoolSpec, RankPool, TrailingPages
from tests.servers import PATIENT, Stack, serving

MODEL = ModelIdentity("attach", "r", 4, namespace_salt="a secret")
KV = PoolSpec("kv", (Part("k", "uint8", 8),), 2)
SWA = PoolSpec("swa", (Part("page", "uint8", 5),), hit_policy=TrailingPages(1))


class Rank:
    """A rank of an engine of its own, with two shards of kv and one of swa."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.me = RankIdentity(f"e-{uuid.uuid4().hex[:8]}", "dp0-pp0-cp0-tp0", uuid.uuid4().hex)
        self.client = ControlClient(ControlSettings(url, call_seconds=5), self.me)
        self.memory = [HostMemory(KV, 4), HostMemory(KV, 4), HostMemory(SWA, 4)]
        self.pools = [
            BoundPool(RankPool(KV, (0, 1)), (self.memory[0].pool, self.memory[1].pool)),
            BoundPool(RankPool(SWA, (0,)), (self.memory[2].pool,)),
        ]

    def is_registered(self) -> bool:
        found = httpx.get(f"{self.url}/v1/engines/{self.me.engine_id}", trust_env=False)
        return found.status_code == 200


class Opened:
    """Notes what is done to the store that `attached` opens; verbs in `failing` raise."""

    def __init__(self, store: FileStore) -> None:
        self.store = store
        self.log: list[tuple[str, int]] = []
        self.failing: dict[str, Exception] = {}

    def __getattr__(self, name: str):
        return getattr(self.store, name)

    def register(self, address: int, length: int) -> None:
        self.store.register(address, length)
        self.log.append(("register", address))

    def unregister(self, address: int) -> None:
        self.store.unregister(address)
        self.log.append(("unregister", address))

    def put_bytes(self, key: str, data: bytes) -> None:
        if "put_bytes" in self.failing:
            raise self.failing["put_bytes"]
        self.store.put_bytes(key, data)

    def close(self) -> None:
        self.store.close()
        self.log.append(("close", 0))


@pytest.fixture
def rank(stack: Stack) -> Iterator[Rank]:
    found = Rank(stack.url)
    with contextlib.closing(found.client):
        yield found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    found: list[Opened] = []
    real = attach.open_store

    def noting(*told):
        found.append(Opened(real(*told)))
        return found[-1]

    monkeypatch.setattr(attach, "open_store", noting)
    return found


def assert_nothing_is_left(rank: Rank, opened: list[Opened]) -> None:
    assert not rank.is_registered()
    for one in opened:
        registered = [a for verb, a in one.log if verb == "register"]
        assert one.log == [
            *(("register", a) for a in registered),
            *(("unregister", a) for a in reversed(registered)),
            ("close", 0),
        ]
        with pytest.raises(StoreClosed):
            one.store.exists(["k"])


def test_inside_the_block_the_memory_can_be_moved_and_afterwards_nothing_is_left(rank, opened):
    with attached(rank.client, MODEL, rank.pools) as joined:
        assert rank.is_registered()
        (one,) = opened
        assert [a for _, a in one.log] == [m.address for m in rank.memory]
        whole = ObjectBuffers(np.array([rank.memory[0].address], np.uint64), np.array([8]))
        key = rank.pools[0].keys(joined.namespace_id, [bytes(32)])[0]
        assert joined.store.put([key], whole).tolist() == [StoreCode.OK]
        assert joined.registration.lease_seconds == 30
    assert_nothing_is_left(rank, opened)


def test_regions_larger_than_the_store_registers_at_once_go_in_pieces_of_whole_pages(
    rank, opened, monkeypatch
):
    """Field report 30."""
    real = attach.open_store
    pages = [p.bytes_per_page for p in (rank.memory[0].pool, rank.memory[2].pool)]

    def limited(*told):
        store = real(*told)
        store.max_region_bytes = 2048
        return store

    monkeypatch.setattr(attach, "open_store", limited)
    with attached(rank.client, MODEL, rank.pools) as joined:
        registered = [a for verb, a in opened[0].log if verb == "register"]
        for memory, pool, shard in zip(rank.memory, (KV, KV, SWA), (0, 1, 0), strict=True):
            pieces = [a for a in registered if memory.address <= a < memory.address + memory.length]
            assert len(pieces) == 2, "4 KiB of memory in pieces of 2 KiB"
            key = f"ct1/{joined.namespace_id}/{shard:064x}/{pool.pool_id}.{shard}/x"
            for slot in range(4):
                table = memory.pool.buffers(np.array([slot]))
                one = ObjectBuffers(table.addresses[0], np.array(table.lengths[0]))
                assert joined.store.put([key], one).tolist() == [StoreCode.OK]
    assert pages == [8, 5]
    assert_nothing_is_left(rank, opened)


def test_the_store_says_what_the_keys_mean(rank):
    with attached(rank.client, MODEL, rank.pools) as joined:
        ns = joined.namespace_id
        for spec in (KV, SWA):
            raw = joined.store.get_bytes(manifest_key(ns, spec.pool_id))
            assert raw is not None
            said = parse_manifest(raw)
            assert said.namespace.namespace_id == ns
            assert said.namespace == Namespace("default", "attach", "r", 4, "plain", fingerprint("a secret"))
            assert (said.spec.pool_id, said.spec.parts) == (spec.pool_id, spec.parts)
            assert b"a secret" not in raw


def test_a_region_that_overlaps_another_undoes_those_before_it(rank, opened):
    inside = rank.memory[1].address + 64
    swa = page_first(SWA, 4, [PageBuffer("page", inside, 5)], [Region(inside, 64)])
    pools = [rank.pools[0], BoundPool(RankPool(SWA, (0,)), (swa,))]
    with pytest.raises(RegistrationFailed), attached(rank.client, MODEL, pools):
        raise AssertionError("must not be reached")
    assert [verb for verb, _ in opened[0].log] == ["register"] * 2 + ["unregister"] * 2 + ["close"]
    assert_nothing_is_left(rank, opened)


def test_a_manifest_that_cannot_be_written_undoes_everything(rank, opened, monkeypatch):
    real = attach.open_store

    def failing(*told):
        store = real(*told)
        store.failing["put_bytes"] = StoreError("the store is full")
        return store

    monkeypatch.setattr(attach, "open_store", failing)
    with pytest.raises(StoreError, match="full"), attached(rank.client, MODEL, rank.pools):
        raise AssertionError("must not be reached")
    assert [verb for verb, _ in opened[0].log] == ["register"] * 3 + ["unregister"] * 3 + ["close"]
    assert_nothing_is_left(rank, opened)


def test_an_exception_in_the_block_undoes_everything_and_comes_through(rank, opened):
    with pytest.raises(KeyError), attached(rank.client, MODEL, rank.pools):
        raise KeyError
    assert_nothing_is_left(rank, opened)


def test_a_rank_may_join_again_after_it_left(rank, opened):
    for _ in range(2):
        rank.client.me = replace(rank.me, incarnation=uuid.uuid4().hex)
        with attached(rank.client, MODEL, rank.pools):
            assert rank.is_registered()
    assert_nothing_is_left(rank, opened)


def test_a_refused_registration_opens_nothing(rank, opened):
    newer = ControlClient(ControlSettings(rank.url, call_seconds=5), replace(rank.me, incarnation="b" * 32))
    with contextlib.closing(newer):
        rank.client.register(MODEL, [p.pool for p in rank.pools])
        newer.register(MODEL, [p.pool for p in rank.pools])
        with pytest.raises(ControlRefused) as refused, attached(rank.client, MODEL, rank.pools):
            raise AssertionError("must not be reached")
        assert refused.value.refusal == "stale_incarnation"
        assert opened == []
        assert rank.is_registered(), "the newer life's registration is not ours to remove"


LIES = {
    "another tenant": {"tenant": "somebody else"},
    "no tenant": {"tenant": None},
    "another namespace": {"namespace_id": "0" * 16},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_namespace_that_is_not_ours_is_refused_before_anything_is_opened(rank, opened, monkeypatch, lie):
    honest = rank.client.register
    monkeypatch.setattr(rank.client, "register", lambda *a: msgspec.structs.replace(honest(*a), **LIES[lie]))
    with pytest.raises(IdentityMismatch) as refused, attached(rank.client, MODEL, rank.pools):
        raise AssertionError("must not be reached")
    assert refused.value.errors[0].field in {"tenant", "namespace_id"}
    assert opened == []
    assert not rank.is_registered()


@pytest.mark.parametrize("field", ["pool_id", "suffixes", "pool", "key_prefix"])
def test_keys_that_the_control_plane_builds_otherwise_are_refused(rank, opened, monkeypatch, field):
    """Field report 25: exists-key and put-key built by two functions that drifted apart."""
    honest = rank.client.register

    def lying(*a):
        found = honest(*a)
        grant = found.pools["kv"]
        match field:
            case "pool_id":
                pools = {**found.pools, "kv": msgspec.structs.replace(grant, pool_id="0" * 8)}
            case "suffixes":
                turned = msgspec.structs.replace(grant, suffixes=grant.suffixes[::-1])
                pools = {**found.pools, "kv": turned}
            case "pool":
                pools = {"swa": found.pools["swa"]}
            case _:
                pools = found.pools
                store = msgspec.structs.replace(found.store, key_prefix="ct1/")
                found = msgspec.structs.replace(found, store=store)
        return msgspec.structs.replace(found, pools=pools)

    monkeypatch.setattr(rank.client, "register", lying)
    with pytest.raises(IdentityMismatch), attached(rank.client, MODEL, rank.pools):
        raise AssertionError("must not be reached")
    assert opened == []
    assert not rank.is_registered()


@pytest.fixture
def own_settings(tmp_path: Path) -> Iterator[Settings]:
    server = EmbeddedRedis.start(tmp_path / "redis", appendonly=False)
    store = StoreSettings(kind="file", path=str(tmp_path / "store"))
    yield Settings(redis_url=server.url, port=free_port(), store=store, **PATIENT)
    server.stop()


def test_a_store_that_cannot_be_opened_removes_the_rank_again(own_settings: Settings):
    folder = Path(own_settings.store.path)
    folder.mkdir()
    (folder / "somebody's file").write_text("not a store")
    with serving(own_settings) as url:
        rank = Rank(url)
        with contextlib.closing(rank.client):
            with pytest.raises(StoreUnavailable), attached(rank.client, MODEL, rank.pools):
                raise AssertionError("must not be reached")
            assert not rank.is_registered()


def test_a_control_plane_that_is_gone_keeps_nobody_from_leaving(own_settings: Settings, opened):
    with contextlib.ExitStack() as server:
        rank = Rank(server.enter_context(serving(own_settings)))
        with contextlib.closing(rank.client), attached(rank.client, MODEL, rank.pools):
            server.close()
            with pytest.raises(ControlPlaneAway):
                rank.client.heartbeat(1)
    assert [verb for verb, _ in opened[0].log] == ["register"] * 3 + ["unregister"] * 3 + ["close"]
