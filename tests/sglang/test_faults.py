"""What SGLang sees when something is away, slow, gone or damaged: a miss, and afterwards nothing is left.

Every case ends with `assert_at_rest`: threads alive, nothing under way, no host lock, host slots back.
"""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest
import redis
import torch

from dataplane.control_plane import ControlPlaneAway
from dataplane.object_store import ObjectBuffers
from tests.sglang.engines import Engine, EngineSettings, same, until
from tests.sglang.gate import gate_to
from tests.sglang.stored import Stored

pytestmark = pytest.mark.sglang

PAGES = 6


def engine(extra, **settings):
    return Engine(EngineSettings(extra=extra, **settings))


def attached(one) -> bool:
    return one.backend._link.joined is not None


def written(plane, model="full"):
    """Have an engine write a prompt; return an extra config of its model, the prompt, and its bytes."""
    extra = plane.extra()
    with engine(extra, model=model) as one:
        tokens = one.tokens(PAGES)
        reader = extra["engine_id"] + "-reader"
        return {**extra, "engine_id": reader}, tokens, one.produce(tokens)


def test_an_engine_starts_without_a_control_plane_and_attaches_when_it_comes_smoke(file_plane):
    with gate_to(file_plane.url) as gate:
        gate.close()
        extra = file_plane.extra(control_url=gate.url, attach_seconds=0.5)
        with engine(extra, attached=False) as one:
            assert not attached(one)
            tokens = one.tokens(PAGES)
            one.produce(tokens)
            assert one.prefetch(one.tokens(PAGES, start=5000)) == 0
            one.assert_at_rest(holds=True)
            gate.open()
            until(lambda: attached(one))
            fresh = one.tokens(PAGES, start=9000)
            made = one.produce(fresh)
            with engine({**extra, "engine_id": "other"}) as two:
                assert same(two.restored(fresh), made)
                two.assert_at_rest(holds=True)


def test_what_is_written_while_the_control_plane_is_down_is_claimed_when_it_is_back(file_plane):
    with gate_to(file_plane.url) as gate:
        extra = file_plane.extra(control_url=gate.url, call_seconds=0.2)
        with engine(extra) as one:
            tokens = one.tokens(PAGES)
            gate.close()
            made = one.produce(tokens, claimed=False)
            one.assert_at_rest(holds=True)
            gate.open()
            until(lambda: Stored(one, tokens).lookup().hit_pages == PAGES)
        with engine({**extra, "engine_id": "other"}) as two:
            assert same(two.restored(tokens), made)
            two.assert_at_rest(holds=True)


@pytest.mark.parametrize("fault", ["close", "jam"])
@pytest.mark.parametrize("model", ["full", "deepseek-v4"])
def test_lookups_are_misses_while_the_control_plane_is_away_and_hits_afterwards(file_plane, fault, model):
    extra, tokens, made = written(file_plane, model)
    with (
        gate_to(file_plane.url) as gate,
        engine({**extra, "control_url": gate.url, "call_seconds": 0.3}, model=model) as one,
    ):
        getattr(gate, fault)()
        for request in "abcd":
            assert one.prefetch(tokens, request) == 0
        one.assert_at_rest(holds=False)
        gate.open()
        until(lambda: not one.backend._link._circuit.is_open)
        # On a busy machine an answer may still come after its deadline, which is a miss.
        until(lambda: one.prefetch(tokens) == PAGES * one.config.page_size)
        assert same(one.restored(tokens), made)
        one.assert_at_rest(holds=True)


def test_a_control_call_never_takes_longer_than_its_deadline(file_plane):
    extra, tokens, _ = written(file_plane)
    with (
        gate_to(file_plane.url) as gate,
        engine({**extra, "control_url": gate.url, "call_seconds": 0.3}) as one,
    ):
        gate.jam()
        start = time.monotonic()
        result = one.backend.batch_exists_v2([h.hex() for h in Stored(one, tokens).hashes], [], None)
        assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {})
        assert 0.25 < time.monotonic() - start < 5
        one.assert_at_rest(holds=False)


def test_a_slow_control_plane_within_the_deadline_is_no_miss(file_plane):
    extra, tokens, made = written(file_plane)
    with (
        gate_to(file_plane.url) as gate,
        engine({**extra, "control_url": gate.url, "call_seconds": 3.0}) as one,
    ):
        gate.slow(0.2)
        assert same(one.restored(tokens), made)
        one.assert_at_rest(holds=True)


def test_a_rank_that_the_control_plane_has_forgotten_registers_again(own_plane):
    extra = own_plane.extra()
    with engine(extra) as one:
        redis.Redis.from_url(own_plane.redis_url).flushall()
        assert one.prefetch(one.tokens(PAGES, start=5000), "lost") == 0
        until(lambda: one.backend._link._join_at == float("inf"))
        tokens = one.tokens(PAGES)
        made = one.produce(tokens)
        one.assert_at_rest(holds=True)
        until(lambda: Stored(one, tokens).lookup().hit_pages == PAGES)
    with engine({**extra, "engine_id": "other"}) as two:
        assert same(two.restored(tokens), made)


def test_a_rank_whose_place_another_took_is_quiet(file_plane):
    extra, tokens, _ = written(file_plane)
    with engine(extra) as one, engine(extra) as newer:
        assert newer.prefetch(tokens) == PAGES * newer.config.page_size
        for request in "abc":
            assert one.prefetch(tokens, request) in {0, PAGES * one.config.page_size}
        one.assert_at_rest(holds=True)


def test_pages_that_are_gone_shorten_the_prefix_and_lose_their_claims(plane):
    extra, tokens, made = written(plane)
    with engine(extra) as one:
        stored = Stored(one, tokens)
        assert stored.lookup().hit_pages == PAGES
        stored.remove("kv", [3])
        one.fill(9)
        assert one.prefetch(tokens) == 3 * one.config.page_size
        one.load_back(tokens)
        whole = one.config.page_size * 3
        assert same(one.device_bytes(tokens), [b[:whole] for b in made])
        one.assert_at_rest(holds=True)
        found = stored.lookup()
        assert (found.hit_pages, found.miss.reason) == (3, "lost")


def test_a_part_that_is_gone_behind_the_first_is_noticed_by_the_read(plane):
    extra, tokens, _ = written(plane)
    with engine(extra) as one:
        stored = Stored(one, tokens)
        # The lookup leases the first object of a page; `v` of page 2 is its second.
        key = stored.keys("kv", [2])[1]
        assert key.endswith("/v")
        assert stored.joined.store.remove([key]) == 1
        assert one.prefetch(tokens) == 2 * one.config.page_size
        one.assert_at_rest(holds=True)
        assert stored.lookup().hit_pages == 2


@pytest.mark.parametrize(
    ("model", "pool", "pages"),
    [
        ("swa", "swa", [5]),
        ("mamba", "mamba", [5]),
        ("deepseek-v4", "swa", [5]),
        ("deepseek-v4", "deepseek_v4_c4_indexer", [2]),
        ("deepseek-v4", "deepseek_v4_c128", [0]),
        ("deepseek-v4", "deepseek_v4_c4_state", [5]),
    ],
)
def test_one_pool_short_never_gives_wrong_bytes(plane, model, pool, pages):
    extra, tokens, made = written(plane, model)
    with engine(extra, model=model) as one:
        stored = Stored(one, tokens)
        stored.remove(pool, pages)
        one.fill(9)
        got = one.prefetch(tokens)
        assert got <= pages[0] * one.config.page_size
        one.assert_at_rest(holds=bool(got))
        gating = {"swa": ["swa"], "mamba": ["mamba"]}.get(model, [pool])
        until(lambda: stored.lookup(gating).hit_pages <= pages[0])
        # What was lost is written again and then comes back whole.
    with engine({**extra, "engine_id": "third"}, model=model) as again:
        made = again.produce(tokens)
    with engine({**extra, "engine_id": "fourth"}, model=model) as last:
        assert same(last.restored(tokens), made)
        last.assert_at_rest(holds=True)


def test_a_flipped_byte_in_the_file_store_is_a_miss_smoke(file_plane):
    extra, tokens, _ = written(file_plane)
    with engine(extra) as one:
        stored = Stored(one, tokens)
        digest = stored.hashes[1].hex()
        files = [p for p in file_plane.folder.rglob("*") if p.is_file() and digest in str(p)]
        assert files
        for path in files:
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
        assert one.prefetch(tokens) == one.config.page_size
        one.assert_at_rest(holds=True)
        assert stored.lookup().hit_pages == 1


def test_a_flipped_byte_in_a_store_without_checksums_shows_in_the_device_bytes_smoke(mooncake_plane):
    """The negative control of all round trips: they can tell one byte."""
    extra, tokens, made = written(mooncake_plane)
    with engine(extra) as one:
        stored = Stored(one, tokens)
        key, bound = stored.keys("kv", [1])[0], stored.joined.pools.bound["kv"]
        host = one.controller.mem_pool_host.anchor_entry.host_pool
        address = int(host.kv_buffer.data_ptr())
        size = int(bound.object_sizes[0])
        place = ObjectBuffers(np.array([address], np.uint64), np.array([size]))
        assert stored.joined.store.get([key], place).tolist() == [0]
        host.kv_buffer.view(-1).view(dtype=torch.uint8)[size - 1] ^= 1
        stored.joined.store.remove([key])
        assert stored.joined.store.put([key], place).tolist() == [0]
        host.kv_buffer.zero_()
        restored = one.restored(tokens)
        differing = sum(int((a != b).sum()) for a, b in zip(restored, made, strict=True))
        assert differing == 1
        one.assert_at_rest(holds=True)


@pytest.mark.timeout(240)
def test_a_storage_node_that_dies_is_a_miss_at_the_deadline_of_bounce_buffers_or_when_mooncake_gives_up(
    mortal_plane,
):
    """Mooncake blocks a minute on the dead node: both engines wait at the same time."""
    plane, cluster = mortal_plane
    extra, tokens, _ = written(plane)
    bounced = {**extra, "engine_id": "bounced", "store": {"bounce_mib": 4, "call_seconds": 2.0}}
    with engine(extra) as patient, engine(bounced) as quick:
        assert type(quick.backend._link.joined.store).__name__ == "BounceStore"
        cluster.kill_node()
        waiting = patient.begin_prefetch(tokens)
        start = time.monotonic()
        assert quick.end_prefetch(tokens, quick.begin_prefetch(tokens)) == 0
        took = time.monotonic() - start
        quick.assert_at_rest(holds=False)
        assert patient.end_prefetch(tokens, waiting, seconds=150) == 0
        blocked = time.monotonic() - start
        patient.assert_at_rest(holds=False)
        assert took < blocked


def test_detach_and_attach_again_twice(plane):
    extra, tokens, made = written(plane)
    with engine(extra) as one:
        for _ in range(2):
            ok, text = one.tree.detach_storage_backend()
            assert ok, text
            assert one.backend is None
            ok, text = one.tree.attach_storage_backend("dynamic", one.attach_config())
            assert ok, text
            assert attached(one)
        assert same(one.restored(tokens), made)
        one.assert_at_rest(holds=True)


def test_close_leaves_nothing(file_plane):
    import threading

    extra, tokens, _ = written(file_plane)
    with engine(extra) as one:
        one.produce(one.tokens(PAGES, start=5000))
        assert one.prefetch(tokens)
        assert {t.name[:12] for t in threading.enumerate()} >= {
            "caketin-link",
            "caketin-clai",
            "caketin-leas",
        }
        backend, link = one.backend, one.backend._link
        ok, _ = one.tree.detach_storage_backend()
        assert ok
        backend.close()
        assert not link._thread.is_alive()
        until(lambda: not [t.name for t in threading.enumerate() if t.name.startswith("caketin-")], 10)
        assert link.joined is None
        # Nor is the rank registered, the store open or its memory registered with it.
        answer = httpx.get(f"{file_plane.url}/v1/engines/{extra['engine_id']}", trust_env=False)
        assert answer.status_code == 404
        assert (link._attachment._store, link._attachment._regions) == (None, {})
        assert backend.batch_exists([h.hex() for h in []]) == 0


def test_a_clear_that_was_not_made_is_not_said_to_be(file_plane):
    extra, tokens, made = written(file_plane)
    with (
        gate_to(file_plane.url) as gate,
        engine({**extra, "control_url": gate.url, "call_seconds": 0.3, "attach_seconds": 0.3}) as one,
    ):
        gate.close()
        assert one.tree.clear_storage_backend() is False
        assert one.backend.batch_exists([]) == 0
        gate.open()
        until(lambda: one.prefetch(tokens) == PAGES * one.config.page_size)
        assert same(one.restored(tokens), made)
    away = {**extra, "control_url": "http://127.0.0.1:9", "attach_seconds": 0.3}
    with engine(away, attached=False) as two:
        assert two.tree.clear_storage_backend() is False


def test_a_clear_that_goes_on_is_a_clear(file_plane, monkeypatch):
    """Told that it failed, SGLang would still believe that the pages are stored, and back none of them up."""
    extra, tokens, _ = written(file_plane)
    with engine(extra) as one:
        client, silent = one.backend._link.client, iter(range(2))
        asked = client.job

        def job(job_id):
            if next(silent, None) is not None:
                raise ControlPlaneAway("away")
            return asked(job_id)

        monkeypatch.setattr(client, "job", job)
        assert one.tree.clear_storage_backend() is True
        assert next(silent, None) is None
        assert not any(Stored(one, tokens).there("kv"))


def test_clear_removes_this_namespace_and_no_other(plane):
    mine, tokens, _ = written(plane)
    others, _, _ = written(plane)
    with engine(mine) as one, engine(others) as two:
        one.backend.clear()
        until(lambda: attached(one) and one.backend._link._join_at == float("inf"))
        assert one.prefetch(tokens) == 0
        assert not any(Stored(one, tokens).there("kv"))
        assert two.prefetch(tokens) == PAGES * two.config.page_size
        one.assert_at_rest(holds=False)
