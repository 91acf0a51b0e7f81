"""The backend's own answers, by its own calls: what SGLang's controller cannot be made to ask."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs

from caketin.sglang import CaketinStorage
from dataplane.control_plane import ControlPlaneAway
from dataplane.engines import sglang_facts
from dataplane.messages.control import PoolQuery
from dataplane.object_store import StoreCode
from metadata.codec import PageHashes
from metadata.errors import InvalidInput
from tests.sglang.engines import PATIENCE, Engine, EngineSettings, until
from tests.sglang.gate import gate_to
from tests.sglang.stored import Stored

pytestmark = pytest.mark.sglang

PAGE = 16


@pytest.fixture
def sglang():
    override = get_context().override_server_args(page_size=PAGE)
    override.install()
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_rank=0):
        yield
    override.restore()


def config(plane, **given):
    place = {
        **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1},
        **{"is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True},
        **{"model_name": None, "extra_config": plane.extra()},
    }
    return HiCacheStorageConfig(**(place | given))


def mha_host(pages=8, layout="page_first", heads=2, layers=2, width=8):
    device = MHATokenToKVPool(
        size=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=width,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE,
        layout,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        host_token_capacity=pages * PAGE,
    )


def mla_host(pages=8, layout="page_first"):
    device = MLATokenToKVPool(
        size=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE,
        layout,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        target_layer_num=device.layer_num,
        host_token_capacity=pages * PAGE,
    )


class Attached:
    """A backend with host pools, as the controller attaches it."""

    def __init__(self, settings, **pools):
        self.pools = pools
        self.backend = CaketinStorage(settings, {})
        self.backend.register_mem_pool_host(pools["kv"])

    def __enter__(self):
        for name, host in self.pools.items():
            self.backend.register_mem_host_pool_v2(host, PoolName(name))
        self.backend.on_host_pools_registered()
        assert self.backend._link.joined is not None
        return self.backend

    def __exit__(self, *_exc):
        self.backend.close()


def keys(count, tag="k"):
    import hashlib

    return [hashlib.sha256(f"{tag}{i}".encode()).hexdigest() for i in range(count)]


def rows(*pages):
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def fill(host, seed=1):
    made = torch.Generator().manual_seed(seed)
    flat = host.kv_buffer.view(torch.uint8).reshape(-1)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=made))


def test_sidecars_are_not_published_before_their_anchor(plane, sglang):
    kv, swa = mha_host(), mha_host(heads=1)
    with Attached(config(plane), kv=kv, swa=swa) as backend:
        wanted = keys(4)
        window = PoolTransfer(PoolName.SWA, keys=wanted[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        put = PoolTransfer(PoolName.SWA, host_indices=rows(0, 1), keys=wanted[-2:])
        assert backend.batch_set_v2([put]) == {"swa": [True, True]}
        assert backend.batch_exists(wanted) == 0
        assert backend.batch_exists_v2(wanted, [window]).kv_hit_pages == 0
        assert backend.batch_set_v1(wanted, rows(0, 1, 2, 3)) == [True] * 4
        assert backend.flush(PATIENCE)
        found = backend.batch_exists_v2(wanted, [window])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
        assert found.extra_pool_hit_pages == {"kv": 4, "swa": 4}


def test_the_window_is_the_call_s(file_plane, sglang):
    kv, swa = mha_host(), mha_host(heads=1)
    with Attached(config(file_plane), kv=kv, swa=swa) as backend:
        wanted = keys(6)
        put = PoolTransfer(PoolName.SWA, host_indices=rows(0, 1, 2), keys=[wanted[1], wanted[2], wanted[5]])
        assert backend.batch_set_v2([put])["swa"] == [True] * 3
        assert all(backend.batch_set_v1(wanted, rows(0, 1, 2, 3, 4, 5)))
        assert backend.flush(PATIENCE)
        for pages, lengths in ((1, [2, 3, 6]), (2, [3]), (3, [])):
            placeholders = ["__placeholder__"] * pages
            window = PoolTransfer(PoolName.SWA, keys=placeholders, hit_policy=PoolHitPolicy.TRAILING_PAGES)
            assert backend.batch_exists_v2(wanted, [window]).restorable_prefix_pages == lengths


def test_a_window_that_is_gone_is_not_promised_and_the_next_shorter_length_is(plane, sglang):
    """Its page is there, and the index says that the window is too: the lookup looks for itself."""
    kv, swa = mha_host(), mha_host(heads=1)
    with Attached(config(plane), kv=kv, swa=swa) as backend:
        wanted = keys(6)
        put = PoolTransfer(PoolName.SWA, host_indices=rows(0, 1), keys=[wanted[2], wanted[5]])
        assert backend.batch_set_v2([put])["swa"] == [True] * 2
        assert all(backend.batch_set_v1(wanted, rows(0, 1, 2, 3, 4, 5)))
        assert backend.flush(PATIENCE)
        window = PoolTransfer(PoolName.SWA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert backend.batch_exists_v2(wanted, [window]).restorable_prefix_pages == [3, 6]
        joined = backend._link.joined
        # One of the window's objects, not its first.
        gone = joined.pools.bound["swa"].keys(joined.namespace_id, [bytes.fromhex(wanted[5])])[1]
        assert joined.store.remove([gone]) == 1
        found = backend.batch_exists_v2(wanted, [window])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
        assert found.extra_pool_hit_pages == {"kv": 3, "swa": 3}
        # The claim is cleared: the index says so itself now.
        answer = backend._link.client.lookup(
            joined.namespace_id,
            PageHashes.from_hex(wanted),
            pools={"swa": PoolQuery(window_pages=1)},
            purpose="probe",
        )
        assert answer.restorable == [(3, 3)]


def test_a_page_that_is_gone_is_not_promised_and_loses_its_claim(plane, sglang):
    with Attached(config(plane), kv=mha_host()) as backend:
        wanted = keys(5)
        assert all(backend.batch_set_v1(wanted, rows(0, 1, 2, 3, 4)))
        assert backend.flush(PATIENCE)
        joined = backend._link.joined
        for last, ahead in ((4, True), (2, False)):
            first = joined.pools.bound["kv"].keys(joined.namespace_id, [bytes.fromhex(wanted[last])])[0]
            assert joined.store.remove([first]) == 1
            # Asked ahead of the index's answer or after it.
            backend._lookup._hit_lately = ahead
            found = backend.batch_exists_v2(wanted, [])
            assert (found.kv_hit_pages, found.restorable_prefix_pages[-1]) == (last, last)
            answer = backend._link.client.lookup(
                joined.namespace_id, PageHashes.from_hex(wanted), pools={}, purpose="probe"
            )
            assert answer.hit_pages == last


def test_every_pool_and_page_that_is_asked_for_gets_a_boolean(file_plane, sglang):
    kv, swa = mha_host(), mha_host(heads=1)
    with Attached(config(file_plane), kv=kv, swa=swa) as backend:
        wanted = keys(2)
        strange = [
            PoolTransfer(PoolName.SWA, host_indices=rows(0, 1), keys=wanted),
            PoolTransfer(PoolName.MAMBA, host_indices=rows(0), keys=wanted[:1]),
            PoolTransfer(PoolName.INDEXER, keys=wanted),
        ]
        answer = backend.batch_get_v2(strange)
        assert answer == {"swa": [False, False], "mamba": [False], "indexer": [False, False]}
        assert all(type(b) is bool for bs in answer.values() for b in bs)
        assert backend.batch_set_v2(strange[1:]) == {"mamba": [False], "indexer": [False, False]}
        assert backend.batch_get_v1(wanted, rows(0)) == [False, False]
        assert backend.batch_get_v1(wanted, rows(0, 99)) == [False, False]
        assert backend.batch_set_v1(["no hash", wanted[0]], rows(0, 1)) == [False, False]
        assert backend.batch_exists(["no hash"]) == 0


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(("first", "second"), [([1], [0, 1]), ([1, 0], [0, 1]), ([1, 2], [0, 1])])
def test_a_page_that_is_not_stored_is_told_of_that_page_whatever_the_pools_lists_are(
    file_plane, sglang, monkeypatch, first, second, lost
):
    hosts = {"kv": mha_host(), "mamba": mha_host(heads=1), "swa": mha_host(heads=1)}
    with Attached(config(file_plane), **hosts) as backend:
        wanted = keys(3)
        store, pools = backend._link.joined.store, backend._link.joined.pools
        full = pools.bound["swa"].keys(pools.namespace_id, [bytes.fromhex(wanted[lost])])
        put = store.put

        def without_room(names, buffers, groups=None):
            codes = put(names, buffers, groups)
            refused = [i for i, name in enumerate(names) if name in full]
            store.remove([names[i] for i in refused])
            codes[refused] = StoreCode.NO_SPACE
            return codes

        monkeypatch.setattr(store, "put", without_room)
        answer = backend.batch_set_v2(
            [
                PoolTransfer(PoolName(name), host_indices=rows(*range(len(at))), keys=[wanted[i] for i in at])
                for name, at in (("mamba", first), ("swa", second))
            ]
        )
        assert answer == {"mamba": [True] * len(first), "swa": [i != lost for i in second]}
        assert all(backend.batch_set_v1(wanted, rows(0, 1, 2)))
        assert backend.flush(PATIENCE)
        window = PoolTransfer(PoolName.SWA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert backend.batch_exists_v2(wanted, [window]).restorable_prefix_pages == [2 - lost]


def test_a_backend_that_is_not_attached_answers_like_a_miss(file_plane, sglang):
    settings = config(file_plane)
    settings.extra_config = file_plane.extra(control_url="http://127.0.0.1:9", attach_seconds=0.2)
    backend = CaketinStorage(settings, {})
    kv = mha_host()
    backend.register_mem_pool_host(kv)
    backend.register_mem_host_pool_v2(kv, PoolName.KV)
    backend.on_host_pools_registered()
    try:
        wanted = keys(2)
        assert backend.batch_exists_v2(wanted, []).kv_hit_pages == 0
        assert backend.batch_get_v1(wanted, rows(0, 1)) == [False, False]
        assert backend.batch_set_v1(wanted, rows(0, 1)) == [False, False]
        with pytest.raises(ControlPlaneAway, match="not attached"):
            backend.clear()
    finally:
        backend.close()
        backend.close()


def test_replicas_of_one_engine_have_places_of_their_own(file_plane, sglang):
    """`--dp-size` without DP attention: SGLang's storage config says 0 for all of them."""
    import httpx

    extra = file_plane.extra()
    with (
        Attached(config(file_plane, extra_config=extra), kv=mha_host()) as first,
        get_parallel().override(dp_rank=1),
        Attached(config(file_plane, extra_config=extra), kv=mha_host()) as second,
    ):
        first._link.client.heartbeat(first._link._epoch)  # its place was not taken
        answer = httpx.get(f"{file_plane.url}/v1/engines/{extra['engine_id']}", trust_env=False).json()
        assert sorted(r["rank"] for r in answer["ranks"]) == ["dp0-pp0-cp0-tp0", "dp1-pp0-cp0-tp0"]
        wanted = keys(2)
        assert all(second.batch_set_v1(wanted, rows(0, 1)))
        assert second.flush(PATIENCE)
        assert first.batch_exists(wanted) == 2


def test_attention_groups_are_told_apart_by_sglang_s_storage_config(file_plane, sglang):
    with get_parallel().override(tp_size=2, moe_tp_size=2, attn_tp_size=1, attn_dp_size=2, dp_rank=1):
        for group in (0, 1):
            backend = CaketinStorage(config(file_plane, dp_rank=group), {})
            assert backend._place.name == f"dp{group}-pp0-cp0-tp0"


@pytest.mark.parametrize(
    "wrong",
    [
        {"control_url": "127.0.0.1:7411"},
        {"control_url": "ftp://x"},
        {"token": "two words"},
        {"call_second": 1},
    ],
)
def test_settings_that_cannot_be_used_are_refused_where_sglang_can_undo_it(file_plane, sglang, wrong):
    """It closes a backend whose construction fails; a later failure leaves its threads, and no second try."""
    with pytest.raises(InvalidInput):
        CaketinStorage(config(file_plane, extra_config=file_plane.extra() | wrong), {})


def test_followers_answer_all_and_leave_no_length_out(file_plane, sglang):
    kv, swa = mha_host(), mha_host(heads=1)
    with Attached(config(file_plane, tp_rank=1, tp_size=2), kv=kv, swa=swa) as backend:
        window = PoolTransfer(PoolName.SWA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = backend.batch_exists_v2(keys(5), [window])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, None)
        assert found.extra_pool_hit_pages == {"kv": 5, "swa": 5}


def test_a_page_is_a_hit_only_when_both_shards_are_there(file_plane, sglang):
    extra = file_plane.extra()
    places = [config(file_plane, tp_rank=r, tp_size=2, extra_config=extra) for r in (0, 1)]
    with Attached(places[0], kv=mha_host()) as first, Attached(places[1], kv=mha_host()) as second:
        wanted = keys(3)
        assert all(first.batch_set_v1(wanted, rows(0, 1, 2)))
        assert first.flush(PATIENCE)
        assert first.batch_exists(wanted) == 0
        assert all(second.batch_set_v1(wanted[:2], rows(0, 1)))
        assert second.flush(PATIENCE)
        assert first.batch_exists(wanted) == 2


def test_a_rank_that_does_not_write_kv_reads_it(file_plane, sglang):
    extra = file_plane.extra()
    places = [config(file_plane, tp_rank=r, tp_size=2, is_mla_model=True, extra_config=extra) for r in (0, 1)]
    hosts = mla_host(), mla_host()
    fill(hosts[0])
    with Attached(places[0], kv=hosts[0]) as writer, Attached(places[1], kv=hosts[1]) as other:
        wanted = keys(3)
        assert all(writer.batch_set_v1(wanted, rows(0, 1, 2)))
        assert writer.flush(PATIENCE)
        assert writer.batch_exists(wanted) == 3
        assert other.batch_get_v1(wanted, rows(2, 1, 0)) == [True] * 3
        written, read = (h.kv_buffer.view(torch.uint8) for h in hosts)  # as numbers, some are NaN
        assert torch.equal(read[0:PAGE], written[2 * PAGE : 3 * PAGE])


@pytest.mark.parametrize("name", [PoolName.DRAFT, PoolName.DRAFT_SWA, PoolName.AUXILIARY_SWA])
def test_an_mha_pool_on_a_replicated_target_is_refused_with_sglang_s_limit(file_plane, sglang, name):
    """Each rank has its own heads; taken for what all have, a rank would be given another's bytes."""
    settings = config(file_plane, tp_size=2, is_mla_model=True)
    backend = CaketinStorage(settings, {})
    backend.register_mem_pool_host(mla_host())
    backend.register_mem_host_pool_v2(mha_host(), name)
    with pytest.raises(InvalidInput, match=r"should_backup.*TP 1"):
        backend.on_host_pools_registered()
    backend.close()
    with Attached(config(file_plane, is_mla_model=True), kv=mla_host(), draft=mha_host()) as alone:
        assert set(alone._link.joined.owned) == {"kv", "draft"}


def test_a_late_draft_is_registered_and_stored(file_plane, sglang):
    kv, draft = mha_host(), mha_host(heads=1)
    fill(draft, 5)
    with Attached(config(file_plane), kv=kv) as backend:
        wanted = keys(2)
        transfer = PoolTransfer(
            PoolName.DRAFT, host_indices=rows(0, 1), keys=wanted, indices_from_pool=PoolName.KV
        )
        assert backend.batch_exists_v2(wanted, [transfer]).kv_hit_pages == 0
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        until(lambda: "draft" in backend._link.joined.owned)
        assert backend.batch_set_v2([transfer]) == {"draft": [True, True]}
        assert all(backend.batch_set_v1(wanted, rows(0, 1)))
        assert backend.flush(PATIENCE)
        assert backend.batch_exists_v2(wanted, [transfer]).kv_hit_pages == 2


def test_a_late_pool_that_cannot_be_moved_leaves_the_others_as_they_are(file_plane, sglang):
    with Attached(config(file_plane), kv=mha_host()) as backend:
        strange = mha_host(heads=1)
        strange.layout = "page_head"
        with pytest.raises(InvalidInput, match="page_first"):
            backend.register_mem_host_pool_v2(strange, PoolName.DRAFT)
        backend.register_mem_host_pool_v2(mha_host(heads=1), PoolName.SWA)
        until(lambda: "swa" in backend._link.joined.owned)
        assert "draft" not in backend._link.joined.owned


def test_a_late_draft_is_registered_once_the_control_plane_is_back(file_plane, sglang):
    with gate_to(file_plane.url) as gate:
        settings = config(file_plane, extra_config=file_plane.extra(control_url=gate.url))
        with Attached(settings, kv=mha_host()) as backend:
            gate.close()
            backend.register_mem_host_pool_v2(mha_host(heads=1), PoolName.DRAFT)
            until(lambda: backend._link.failure is not None)
            gate.open()
            until(lambda: "draft" in backend._link.joined.owned)


@pytest.mark.parametrize("layout", ["page_head", "page_unified"])
def test_a_layout_that_cannot_be_moved_is_refused_with_the_flag(file_plane, sglang, layout):
    kv = mha_host()
    kv.layout = layout
    backend = CaketinStorage(config(file_plane), {})
    backend.register_mem_pool_host(kv)
    with pytest.raises(InvalidInput, match="--hicache-mem-layout page_first"):
        backend.on_host_pools_registered()


def test_stats_tell_pages_and_bandwidth_once(file_plane, sglang):
    with Attached(config(file_plane), kv=mha_host()) as backend:
        wanted = keys(3)
        assert all(backend.batch_set_v1(wanted, rows(0, 1, 2)))
        assert backend.flush(PATIENCE)
        assert all(backend.batch_get_v1(wanted, rows(3, 4, 5)))
        stats = backend.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
        assert stats.backup_bandwidth[0] > 0 < stats.prefetch_bandwidth[0]
        assert backend.get_stats().backup_pgs == []


def test_a_window_in_mid_sequence_is_the_engine_s_to_vouch_for(file_plane, sglang):
    kv, swa = mha_host(), mha_host(heads=1)
    with Attached(config(file_plane), kv=kv, swa=swa) as backend:
        wanted = keys(6)
        put = PoolTransfer(PoolName.SWA, host_indices=rows(0), keys=wanted[4:5])
        assert backend.batch_set_v2([put])["swa"] == [True]
        assert all(backend.batch_set_v1(wanted, rows(0, 1, 2, 3, 4, 5)))
        assert backend.flush(PATIENCE)
        window = PoolTransfer(PoolName.SWA, keys=["x"] * 2, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        before = HiCacheStorageExtraInfo(prefix_keys=wanted[:4])
        assert backend.batch_exists_v2(wanted[4:], [window], before).restorable_prefix_pages == [1]


def test_the_lookup_counts_once_for_all_ranks(own_plane):
    import httpx

    with Engine(EngineSettings(extra=own_plane.extra(model="counted"))) as one:
        tokens = one.tokens(4)
        one.produce(tokens)
        assert one.prefetch(one.tokens(4, start=7000)) == 0
        Stored(one, tokens).lookup()

        def counted() -> int:
            answer = httpx.get(f"{own_plane.url}/v1/hit-rates?window=600&step=60", trust_env=False)
            return sum(sum(s["queried_pages"]) for s in answer.json()["series"] if "pool" not in s["labels"])

        until(lambda: counted() > 0)
        assert counted() == 4


def test_the_revision_is_the_server_s_or_a_fingerprint_of_the_weights(
    file_plane, sglang, tmp_path, monkeypatch
):
    """SGLang resolves the arguments of a real model beside a device only; here they are as given."""
    import httpx

    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100))
    wanted = keys(2)

    def attach(given=None, **server):
        extra = file_plane.extra(model="revised", revision=given)
        with monkeypatch.context() as patch:
            patch.setattr(sglang_facts, "get_server_args", lambda: ServerArgs(**server))
            with Attached(config(file_plane, extra_config=extra), kv=mha_host()) as backend:
                found = backend.batch_exists(wanted)
                assert all(backend.batch_set_v1(wanted, rows(0, 1)))
                assert backend.flush(PATIENCE)
                namespace = backend._link.joined.namespace_id
        answer = httpx.get(f"{file_plane.url}/v1/namespaces/{namespace}", trust_env=False).json()
        return answer["revision"], found

    local = {"model_path": str(tmp_path)}
    assert attach(given="mine", revision="0731", **local) == ("mine", 0)
    assert attach(revision="0731", **local) == ("0731", 0)
    first, _ = attach(**local)
    assert first.startswith("local-")
    assert attach(**local) == (first, 2)
    # Field report 6: other weights under the same name.
    weights.write_bytes(bytes(101))
    second, found = attach(**local)
    assert (second != first, found) == (True, 0)
    assert attach(model_path="dummy") == ("unversioned", 0)


def test_a_store_that_is_full_says_so_page_by_page_and_serves_only_what_it_has(mortal_plane, sglang):
    """64 MiB of store for 160 MiB of pages: Mooncake evicts what nobody leases, else it is full."""
    plane, _ = mortal_plane
    host = mha_host(pages=8, layers=64, width=512)  # 2 MiB a page
    fill(host)
    with Attached(config(plane), kv=host) as backend:
        prompts = [keys(8, tag=f"prompt{i}-") for i in range(10)]
        stored = []
        for prompt in prompts:
            stored.append(backend.batch_set_v1(prompt, rows(*range(8))))
            # Promised pages are leased, and a leased page is not evicted.
            assert backend.flush(PATIENCE)
            backend.batch_exists(prompt)
        assert all(type(b) is bool for bs in stored for b in bs)
        assert all(stored[0])
        assert not all(b for bs in stored for b in bs)
        before = host.kv_buffer.view(torch.uint8).clone()
        for prompt, said in zip(prompts, stored, strict=True):
            host.kv_buffer.zero_()
            read = backend.batch_get_v1(prompt, rows(*range(8)))
            got = host.kv_buffer.view(torch.uint8)
            for page in range(8):
                span = slice(page * PAGE, (page + 1) * PAGE)
                if read[page]:
                    assert said[page]
                    assert torch.equal(got[:, span], before[:, span])
            # What is not there is no hit, before the first gap neither.
            assert backend.batch_exists(prompt) <= [*read, False].index(False)


def test_while_mooncake_s_master_is_away_everything_is_a_miss_and_afterwards_it_stores_again(
    mortal_plane, sglang
):
    plane, cluster = mortal_plane
    host = mha_host()
    fill(host)
    with Attached(config(plane), kv=host) as backend:
        before, after = keys(4), keys(4, tag="after")
        assert all(backend.batch_set_v1(before, rows(0, 1, 2, 3)))
        assert backend.flush(PATIENCE)
        cluster._master.stop()
        assert backend.batch_get_v1(before, rows(4, 5, 6, 7)) == [False] * 4
        assert backend.batch_exists(before) == 0
        assert backend.batch_set_v1(after, rows(0, 1, 2, 3)) == [False] * 4
        cluster.restart_master()
        until(lambda: all(backend.batch_set_v1(after, rows(0, 1, 2, 3))), 60)
        assert backend.flush(PATIENCE)
        assert backend.batch_exists(after) == 4
        assert backend.batch_get_v1(after, rows(4, 5, 6, 7)) == [True] * 4
        bytes_of = host.kv_buffer.view(torch.uint8)
        assert torch.equal(bytes_of[:, : 4 * PAGE], bytes_of[:, 4 * PAGE :])
        # The new master knows nothing of what was stored before.
        assert backend.batch_get_v1(before, rows(0, 1, 2, 3)) == [False] * 4
