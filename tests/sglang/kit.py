"""SGLang's own L3 test kit, as its wheel ships it, over any storage backend.

The wheel has the kit's fixtures, its steps and two of its assertions, but no test that calls them. The
scenarios here are made of those steps and nothing else. The kit only knows the backend `file`; where a
scenario is to run over caketin, SGLang's server arguments are changed on their way in.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.sglang import cpu_ops

cpu_ops.install()

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.test.kits.unified_radix_cache import mixins  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig, supports_hicache  # noqa: E402
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import (  # noqa: E402
    ExtraPoolFullComponent,
    aux_storage_key_transfers,
)

from tests.sglang.engines import PATIENCE, PatientSteps  # noqa: E402

KIT_CONFIGS = {c.label: c for c in CONFIGS if supports_hicache(c)}

Backend = Callable[[str], dict[str, Any]] | None
"""The extra config of a backend that is loaded by its name, for a folder of the kit; None: `file`."""


class Kit(PatientSteps):
    """The kit's steps for one pool set and one backend; `play` runs a scenario and cleans up."""

    def __init__(self, config: CacheConfig, backend: Backend = None) -> None:
        super().__init__()
        self.cfg = config
        self._backend = backend
        self._caches: list[Any] = []

    def runTest(self) -> None:  # noqa: N802
        """Nothing: scenarios are played one by one."""

    def play(self, scenario: Callable[[Kit], None]) -> None:
        """Play a scenario.

        Raises:
            unittest.SkipTest: the kit says that it is not for this pool set.
        """
        try:
            scenario(self)
        finally:
            self.doCleanups()

    def _init_hicache(self, cache: Any, **told: Any) -> None:
        """As the kit's; Mamba's states have a copy kernel for the CPU in one layout only."""
        made = ServerArgs

        def changed(**arguments: Any) -> ServerArgs:
            if self.cfg.has_mamba:
                arguments |= {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
            if self._backend is not None and arguments.get("hicache_storage_backend"):
                extra = json.loads(arguments["hicache_storage_backend_extra_config"] or "{}")
                extra |= self._backend(told["storage_dir"])
                arguments |= {
                    "hicache_storage_backend": "dynamic",
                    "hicache_storage_backend_extra_config": json.dumps(extra),
                }
            return made(**arguments)

        with mock.patch.object(mixins, "ServerArgs", changed):
            super()._init_hicache(cache, **told)
        self._caches.append(cache)
        self.addCleanup(self._close_backend, cache)

    @staticmethod
    def _close_backend(cache: Any) -> None:
        backend = cache.cache_controller.storage_backend
        if backend is not None:
            backend.close()

    def _flush_l3_backups(self, cache: Any, timeout: float = PATIENCE) -> None:
        super()._flush_l3_backups(cache, timeout)
        self._claimed()

    def _buffer_backup_and_wait(self, cache: Any, node: Any) -> None:
        super()._buffer_backup_and_wait(cache, node)
        self._claimed()

    def _drain_buffer_writes(self, cache: Any) -> None:
        super()._drain_buffer_writes(cache)
        self._claimed()

    def _claimed(self) -> None:
        """Wait for the claims: another engine is asked within the same millisecond here, and nowhere else."""
        for cache in self._caches:
            flush = getattr(cache.cache_controller.storage_backend, "flush", lambda _: True)
            assert flush(PATIENCE)

    # Shorthands for what the scenarios share.

    @property
    def window_pages(self) -> int:
        return -(-(self.cfg.sliding_window_size or 0) // self.cfg.page_size)

    def pages_of(self, cache: Any, tokens: list[int]) -> list[str]:
        return self._all_page_hashes(cache, match_prefix(cache, tokens).last_device_node)


def handle(name: str) -> CacheRequestHandle:
    return CacheRequestHandle(name, 0)


def what_is_produced_is_consumed(kit: Kit) -> None:
    """A producer tree writes a prompt to L3; a consumer tree prefetches, loads back and has its bytes."""
    tokens = kit._buffer_swa_seq()
    folder = kit._make_storage_dir()
    expected = kit._l3_produce(folder, tokens, marker=5)
    consumer, allocator, requests = kit._l3_consumer(folder)
    kit._consume_prefetch(consumer, tokens, handle("consumer"))
    match = match_prefix(consumer, tokens)
    kit.assertEqual(match.device_prefix_len + match.host_hit_length, len(tokens))
    kit._load_back_through_admission(consumer, requests, tokens)
    kit._finish_pending_loads(consumer)
    found = match_prefix(consumer, tokens)
    kit.assertEqual(found.device_prefix_len, len(tokens))
    got = kit._snapshot_full_kv(allocator, consumer.path_device_indices(found.last_device_node))
    for a, b in zip(got, expected, strict=True):
        kit.assertTrue(torch.equal(a, b))
    kit._release_ongoing_load_back_locks(consumer)
    consumer.sanity_check()


def nothing_is_consumed_from_an_empty_store(kit: Kit) -> None:
    """The negative control."""
    tokens = kit._buffer_swa_seq()
    consumer, _, _ = kit._l3_consumer(kit._make_storage_dir())
    free = kit._host_avail_sizes(consumer)
    kit._consume_prefetch(consumer, tokens, handle("nothing"))
    match = match_prefix(consumer, tokens)
    kit.assertEqual(match.device_prefix_len + match.host_hit_length, 0)
    kit.assertEqual(kit._host_avail_sizes(consumer), free)


def the_store_says_how_much_there_is(kit: Kit) -> None:
    """The kit's own truth about the store: the longest prefix, alone and with what the window needs."""
    tokens = kit._buffer_swa_seq()
    folder = kit._make_storage_dir()
    producer, allocator, requests = kit._l3_consumer(folder)
    kit._insert(producer, allocator, requests, tokens)
    leaf = match_prefix(producer, tokens).last_device_node
    hashes = kit.pages_of(producer, tokens)
    kit.assertEqual(kit._storage_exists_count(producer, hashes), 0)
    kit._backup_node(producer, leaf)
    kit._write_path_to_l3(producer, leaf)
    kit._flush_l3_backups(producer)
    kit.assertEqual(kit._storage_exists_count(producer, hashes), len(hashes))
    transfers = aux_storage_key_transfers(producer, leaf)
    kit.assertEqual(kit._storage_exists_count(producer, hashes, transfers), len(hashes))
    longer = [*hashes, "0" * 64]
    kit.assertEqual(kit._storage_exists_count(producer, longer), len(hashes))


def the_host_is_only_a_buffer(kit: Kit) -> None:
    """The same in the mode where pages pass through the host only."""
    tokens = kit._buffer_swa_seq()
    folder = kit._make_storage_dir()
    _, expected = kit._produce_buffer_l3(folder, tokens, marker=9)
    consumer, allocator, _ = kit._build_buffer_hicache_fixture(folder)
    free = kit._host_avail_sizes(consumer)
    kit._consume_prefetch(consumer, tokens, handle("buffered"))
    found = match_prefix(consumer, tokens)
    kit.assertEqual(found.device_prefix_len, len(tokens))
    got = kit._snapshot_full_kv(allocator, consumer.path_device_indices(found.last_device_node))
    for a, b in zip(got, expected, strict=True):
        kit.assertTrue(torch.equal(a, b))
    kit.assertEqual(kit._host_avail_sizes(consumer), free)
    kit._drain_buffer_writes(consumer)
    consumer.sanity_check()


def salted_prompts_do_not_meet(kit: Kit) -> None:
    """A prompt with a cache salt is another prompt: its pages are found with the salt and not without."""
    tokens = kit._buffer_swa_seq()
    folder = kit._make_storage_dir()
    kit._produce_buffer_l3(folder, tokens, marker=4, cache_salt="tenant")
    consumer, _, _ = kit._build_buffer_hicache_fixture(folder)
    kit._consume_prefetch(consumer, tokens, handle("without"))
    kit.assertEqual(match_prefix(consumer, tokens).device_prefix_len, 0)
    request = handle("with")
    consumer.prefetch_from_storage(
        request, consumer.root_node_handle(), array("q", tokens), None, None, cache_salt="tenant"
    )
    kit._pump_hicache_until(
        consumer,
        lambda: consumer.check_prefetch_progress(request) and consumer.buffer_pipeline.has_staged(request),
        "the salted prompt was not staged",
    )
    spliced = kit._consume_staged_prefetch(consumer, request, cache_salt="tenant")
    kit.assertEqual(int(spliced.numel()), len(tokens))


def a_head_that_a_sibling_published_is_trimmed(kit: Kit) -> None:
    """The kit's own assertion."""
    folder = kit._make_storage_dir()
    kit._assert_sibling_head_is_trimmed(folder, kit._buffer_swa_seq(), window_sized=False)


def a_head_is_trimmed_below_a_window(kit: Kit) -> None:
    """The kit's own assertion, where the fresh KV is shorter than the window."""
    tokens = kit._make_seq(1, kit.window_pages)
    kit._assert_sibling_head_is_trimmed(kit._make_storage_dir(), tokens, window_sized=True)


def live_full_pages_under_tombstones_are_reused(kit: Kit) -> None:
    """The kit's own assertion: only the window is fetched, for KV is on the device already."""
    _masked(kit, live_tail=0)


def live_full_pages_with_a_live_tail_are_reused(kit: Kit) -> None:
    """The kit's own assertion, with a part of the window left on the device."""
    _masked(kit, live_tail=kit.cfg.page_size)


def _masked(kit: Kit, live_tail: int) -> None:
    tokens = kit._buffer_swa_seq()
    folder = kit._make_storage_dir()
    kit._produce_buffer_l3(folder, tokens, marker=9)
    kit._assert_masked_full_is_reused(folder, tokens, live_tail)


def ranks_agree_on_a_window_that_all_have(kit: Kit) -> None:
    """The kit's steps for several ranks: where all have the window, it is adopted."""
    _tp_synced(kit, drop=False)


def ranks_agree_on_no_window_where_one_lacks_it(kit: Kit) -> None:
    """The kit's steps for several ranks: where another rank lacks the window, this one drops it too."""
    _tp_synced(kit, drop=True)


def _tp_synced(kit: Kit, *, drop: bool) -> None:
    folder, tokens = kit._setup_swa_tp_prefetch()
    consumer, _, _ = kit._l3_consumer(folder)
    kit._patch_tp_prefetch_sync(consumer, drop_swa=drop)
    kit._consume_prefetch(consumer, tokens, handle("synced"))
    kit.assertEqual(kit._swa_host_on_path(consumer, tokens), not drop)


def a_pool_of_its_own_travels_with_the_anchor(kit: Kit) -> None:
    """The kit's component with another pool (`draft`): all its pages are stored, in their own transfers."""
    tokens = kit._make_seq(1, 4)
    folder = kit._make_storage_dir()
    override = {ComponentType.FULL: ExtraPoolFullComponent}
    cache, allocator, requests = build_fixture(kit.cfg, component_registry_override=override)
    kit._init_buffer_hicache(cache, folder)
    controller = cache.cache_controller
    with mock.patch.object(controller, "write_storage", wraps=controller.write_storage) as writes:
        kit._insert(cache, allocator, requests, tokens)
        kit._buffer_backup_and_wait(cache, match_prefix(cache, tokens).last_device_node)
    kv, extra = kit._writes_by_pool(writes, PoolName.DRAFT)
    hashes = kit.pages_of(cache, tokens)
    kit.assertEqual({h for keys in extra for h in keys}, set(hashes))
    kit.assertEqual({h for keys in kv for h in keys}, set(hashes))
    kit.assertEqual(kit._storage_exists_count(cache, hashes), len(hashes))


def _any(_: CacheConfig) -> bool:
    return True


def _no_mamba(config: CacheConfig) -> bool:
    """The kit's requests are mocks where the host is only a buffer; Mamba needs real ones there."""
    return not config.has_mamba


def _window(config: CacheConfig) -> bool:
    return config.has_swa


def _wide_window(config: CacheConfig) -> bool:
    return config.has_swa and (config.sliding_window_size or 0) > config.page_size


def _full_only(config: CacheConfig) -> bool:
    return not (config.has_swa or config.has_mamba)


SCENARIOS: dict[Callable[[Kit], None], Callable[[CacheConfig], bool]] = {
    what_is_produced_is_consumed: _any,
    nothing_is_consumed_from_an_empty_store: _any,
    the_store_says_how_much_there_is: _any,
    the_host_is_only_a_buffer: _no_mamba,
    salted_prompts_do_not_meet: _no_mamba,
    a_head_that_a_sibling_published_is_trimmed: _no_mamba,
    a_head_is_trimmed_below_a_window: _wide_window,
    live_full_pages_under_tombstones_are_reused: _window,
    live_full_pages_with_a_live_tail_are_reused: _wide_window,
    ranks_agree_on_a_window_that_all_have: _window,
    ranks_agree_on_no_window_where_one_lacks_it: _window,
    a_pool_of_its_own_travels_with_the_anchor: _full_only,
}
"""Each scenario and the pool sets that the kit has it for."""
