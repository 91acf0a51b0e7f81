"""Engines to test with: SGLang's real tree, controller and pools, small and on a CPU."""

from __future__ import annotations

import json
import time
import unittest
from array import array
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from tests.sglang import cpu_ops

cpu_ops.install()

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    CacheRequestHandle,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_cache.tree_core_registry import _TREE_CORE_REGISTRY  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402
from sglang.test.kits.unified_radix_cache import fixtures  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures  # noqa: E402

PATIENCE = 60.0
"""Seconds to wait for what comes at once on an idle machine."""
V4_PAGE = 256
V4_RATIOS = (0, 4, 128, 4)
_FULL, _SWA, _MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA

_small = {"page_size": 64, "kv_size": 1024, "max_context_len": 1024}
CONFIGS: dict[str, CacheConfig] = {
    "full": CacheConfig(components=(_FULL,), num_layers=3, **_small),
    "mla": CacheConfig(components=(_FULL,), num_layers=3, **_small),
    "swa": CacheConfig(
        components=(_FULL, _SWA),
        sliding_window_size=128,
        num_layers=6,
        full_attention_layer_ids=(1, 3),
        **{**_small, "kv_size": 4096, "max_context_len": 4096},
    ),
    "mamba": CacheConfig(
        components=(_FULL, _MAMBA),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
        num_layers=6,
        full_attention_layer_ids=(1, 3),
        **_small,
    ),
    "deepseek-v4": CacheConfig(
        components=(_FULL, _SWA),
        page_size=V4_PAGE,
        sliding_window_size=128,
        num_layers=len(V4_RATIOS),
        kv_size=V4_PAGE * 16,
        max_context_len=V4_PAGE * 16,
    ),
}


@dataclass(frozen=True)
class EngineSettings:
    """What kind of engine.

    Attributes:
        model: one of `CONFIGS`.
        io: SGLang's io backend and memory layout, as `direct/page_first_direct`.
        mode: SGLang's host memory mode, `cache` or `buffer_only`.
        core: SGLang's tree core, `python` or `rust`.
        backend: SGLang's storage backend.
        extra: its extra config.
        config: changes to the model.
        place: overrides of SGLang's parallel state.
        groups: process groups of a real collective, by the names of `CacheInitParams`.
        server: other server arguments, set after SGLang has checked them: there is no model to check.
        attached: whether to wait until caketin is attached, as slow as the machine may be just now.
    """

    model: str = "full"
    io: str = "direct/page_first_direct"
    mode: str = "cache"
    core: str = "python"
    backend: str = "dynamic"
    extra: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    place: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    attached: bool = True


class PatientSteps(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """The kit's steps on a test case, as they need one; on a busy machine its 10 s are not enough."""

    def _flush_l3_backups(self, cache: Any, timeout: float = PATIENCE) -> None:
        super()._flush_l3_backups(cache, max(timeout, PATIENCE))

    def _run_prefetch_to_completion(self, cache: Any, req_id: Any, timeout: float = PATIENCE) -> None:
        super()._run_prefetch_to_completion(cache, req_id, max(timeout, PATIENCE))

    def _pump_hicache_until(self, cache: Any, cond: Any, msg: str, timeout: float = PATIENCE) -> None:
        super()._pump_hicache_until(cache, cond, msg, max(timeout, PATIENCE))

    def runTest(self) -> None:  # noqa: N802
        """Nothing: the steps are called one by one."""


class Engine:
    """One engine: device pools, host pools, tree, controller, storage backend. A context manager."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.config = replace(CONFIGS[settings.model], **settings.config)
        self.steps = PatientSteps()
        self.steps.cfg = self.config
        self._exit = ExitStack()

    def __enter__(self) -> Engine:
        self._exit.callback(self.steps.doCleanups)
        try:
            self._start()
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._exit.close()

    @property
    def controller(self) -> Any:
        return self.tree.cache_controller

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    @property
    def layout(self) -> tuple[str, str]:
        io, layout = self.settings.io.split("/")
        return io, layout

    def server_args(self) -> ServerArgs:
        io, layout = self.layout
        args = ServerArgs(
            model_path="dummy",
            page_size=self.config.page_size,
            hicache_io_backend=io,
            hicache_mem_layout=layout,
            hicache_ratio=2.0,
            hicache_write_policy="write_through",
            hicache_storage_backend=self.settings.backend,
            hicache_storage_backend_extra_config=self.attach_config(),
            hicache_storage_prefetch_policy="wait_complete",
            hicache_host_memory_mode=self.settings.mode,
        )
        args._mamba_cache_chunk_size = max(64, self.config.page_size)
        for name, value in self.settings.server.items():
            setattr(args, name, value)
        return args

    def attach_config(self) -> str:
        """The extra config as an operator gives it."""
        return json.dumps({"prefetch_threshold": 1, **self.settings.extra})

    def _start(self) -> None:
        place = {
            **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1},
            **{"attn_dp_rank": 0, "attn_tp_rank": 0, "attn_tp_size": 1, "attn_dcp_rank": 0},
            **self.settings.place,
        }
        build = self._builder()
        if build is None:
            with ExitStack() as patched:
                if self.settings.core == "rust":
                    # As production builds it: the kit's inspected core needs a Rust compiler.
                    patched.enter_context(
                        mock.patch.object(fixtures.mock.patch, "dict", lambda *_: ExitStack())
                    )
                    patched.enter_context(
                        mock.patch.object(fixtures, "UnifiedTreeCoreInspectionInterface", object)
                    )
                self.tree, self.allocator, self.requests = fixtures.build_fixture(
                    self.config, tree_core_backend=self.settings.core
                )
        else:
            build()
        for name, group in self.settings.groups.items():
            setattr(self.tree.cache_init_params, name, group)
            setattr(self.tree, name.replace("_cache_group", "_group"), group)
        args = self.server_args()
        set_global_server_args_for_scheduler(args)
        # Only now: publishing the arguments checks them against the topology.
        self._exit.enter_context(get_parallel().override(**place))
        self.tree.init_hicache(args, self.tree.cache_init_params)
        self.steps.addCleanup(fixtures.drop_hicache_atexit_pin, self.tree)
        self.steps.addCleanup(self.tree.release_host_resources)
        self.steps.addCleanup(self._close_backend)
        self.steps.addCleanup(self.controller._stop_storage_threads)
        # The kit's steps write by themselves; the Rust core is driven as in production.
        self.tree.write_through_threshold = 1 if self.settings.core == "rust" else 1 << 30
        self.tree.load_back_threshold = 0
        controller = self.controller
        if controller.enable_storage:
            controller.prefetch_capacity_limit = max(
                controller.prefetch_capacity_limit, controller.mem_pool_host.size
            )
        if self.settings.backend == "dynamic" and self.settings.attached:
            until(lambda: self.backend._link.joined is not None)

    def _builder(self) -> Callable[[], None] | None:
        """How the device pools are made; None: as the kit makes them."""
        return {"deepseek-v4": self._build_v4, "mla": self._build_mla}.get(self.settings.model)

    def _close_backend(self) -> None:
        if self.controller.storage_backend is not None:
            self.controller.storage_backend.close()

    def _build_mla(self) -> None:
        set_global_server_args_for_scheduler(self.server_args())
        c = self.config
        pool = MLATokenToKVPool(
            size=c.kv_size,
            page_size=c.page_size,
            dtype=torch.bfloat16,
            kv_lora_rank=64,
            qk_rope_head_dim=16,
            layer_num=c.num_layers,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = TokenToKVPoolAllocator(
            size=c.kv_size, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
        )
        self._build_tree()

    def _build_v4(self) -> None:
        set_global_server_args_for_scheduler(self.server_args())
        full = swa = self.config.kv_size
        pool = DeepSeekV4TokenToKVPool(
            max_num_reqs=4,
            swa_size=swa,
            c4_size=full // 4,
            c128_size=full // 128,
            c4_state_pool_size=16 * 8,
            c128_state_pool_size=256,
            page_size=V4_PAGE,
            swa_page_size=V4_PAGE,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=len(V4_RATIOS),
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=list(V4_RATIOS),
            sliding_window=128,
            full_size=full,
            start_layer=0,
            end_layer=len(V4_RATIOS),
        )
        self.allocator = SWATokenToKVPoolAllocator(
            size=full,
            size_swa=swa,
            page_size=V4_PAGE,
            dtype=torch.float8_e4m3fn,
            device="cpu",
            kvcache=pool,
            need_sort=False,
        )
        self._build_tree()

    def _build_tree(self) -> None:
        c = self.config
        self.requests = ReqToTokenPool(
            size=c.max_num_reqs, max_context_len=c.max_context_len, device="cpu", enable_memory_saver=False
        )
        params = CacheInitParams(
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=c.page_size,
            disable=False,
            sliding_window_size=c.sliding_window_size,
            tree_components=c.components,
        )
        inspected = {"python": fixtures.UnifiedTreeCoreInspector}
        with (
            envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override("python"),
            mock.patch.dict(_TREE_CORE_REGISTRY, inspected),
        ):
            self.tree = UnifiedRadixCache(params=params)
        self.tree.cache_init_params = params

    # What a test does with an engine.

    def tokens(self, pages: int, start: int = 1) -> list[int]:
        """A prompt of so many pages; where positions are pairs of tokens it takes one token more."""
        found = self.steps._make_seq(start, pages)
        return [*found, found[-1] + 1] if self.config.is_eagle else found

    def fill(self, seed: int) -> None:
        """Fill all device memory with bytes made from `seed`."""
        made = torch.Generator().manual_seed(seed)
        for tensor in self._device_tensors():
            flat = tensor.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=made))

    def compute(self, tokens: list[int]) -> list[torch.Tensor]:
        """Put a prompt into the tree as if it had been computed; return its device bytes."""
        self.steps._insert(self.tree, self.allocator, self.requests, tokens)
        return self.device_bytes(tokens)

    def back_up(self, tokens: list[int]) -> None:
        """Write a prompt's pages to L3 and wait until SGLang has its answer."""
        node = self._match(tokens).last_device_node
        if self.settings.core == "rust":
            self._write_through()
        elif self.settings.mode == "buffer_only":
            self.steps._buffer_backup_and_wait(self.tree, node)
        else:
            self.steps._backup_node(self.tree, node)
            self.steps._write_path_to_l3(self.tree, node)
            self.steps._flush_l3_backups(self.tree, timeout=60)

    def _write_through(self) -> None:
        """Wait until what SGLang writes by itself after an insert is in L3."""
        tree, controller = self.tree, self.controller
        tree.flush_pending_backups()
        self.steps._pump_hicache_until(
            tree,
            lambda: (
                not (
                    controller.ack_write_queue
                    or controller.write_queue
                    or tree.ongoing_write_through
                    or tree.ongoing_backup
                )
            ),
            "the write-through did not end",
            timeout=30,
        )

    def produce(self, tokens: list[int], seed: int = 7, *, claimed: bool = True) -> list[torch.Tensor]:
        """Compute and back up a prompt, and wait for its claims; return its device bytes."""
        self.fill(seed)
        made = self.compute(tokens)
        self.back_up(tokens)
        if claimed and self.settings.backend == "dynamic":
            assert self.backend.flush(PATIENCE), "the control plane did not take the claims"
        return made

    def prefetch(self, tokens: list[int], request: str = "r") -> int:
        """Prefetch a prompt from L3 and wait; return how many of its tokens are there then."""
        return self.end_prefetch(tokens, self.begin_prefetch(tokens, request))

    def begin_prefetch(self, tokens: list[int], request: str = "r") -> CacheRequestHandle:
        """Have SGLang prefetch a prompt from L3."""
        handle = CacheRequestHandle(request, 0)
        self.tree.prefetch_from_storage(handle, self.tree.root_node_handle(), array("q", tokens), None, None)
        return handle

    def end_prefetch(self, tokens: list[int], handle: CacheRequestHandle, seconds: float = 60) -> int:
        """Wait for a prefetch; return how many tokens of the prompt are there then."""
        self.steps._run_prefetch_to_completion(self.tree, handle, timeout=seconds)
        match = self._match(tokens)
        return int(match.device_prefix_len + match.host_hit_length)

    def load_back(self, tokens: list[int]) -> None:
        """Load what is on the host to the device."""
        match = self._match(tokens)
        if self.settings.mode == "buffer_only" or not match.host_hit_length:
            return
        request = self.steps._make_req(self.requests)
        self.steps._apply_match_to_req(request, match)
        self.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=request.best_match_node, host_hit_length=request.host_hit_length, req=request
            )
        )
        self.steps._finish_pending_loads(self.tree)

    def restored(self, tokens: list[int]) -> list[torch.Tensor]:
        """Prefetch and load back a prompt; return its device bytes."""
        self.prefetch(tokens)
        self.load_back(tokens)
        return self.device_bytes(tokens)

    def device_bytes(self, tokens: list[int]) -> list[torch.Tensor]:
        """Return all bytes that the tree holds on the device for a prompt: every pool's, windows' too."""
        node = self._match(tokens).last_device_node
        rows = self.tree.path_device_indices(node)
        if not len(rows):
            return []
        pool = self.allocator.get_kvcache()
        if self.settings.model == "deepseek-v4":
            return self._v4_bytes(pool, rows)
        full = getattr(pool, "full_kv_pool", pool)
        found = [b[rows] for b in _buffers(full)] + self._other_bytes(rows)
        if _SWA in self.config.components:
            window = self.allocator.full_to_swa_index_mapping[rows[-self.config.sliding_window_size :]]
            found += [b[window] for b in _buffers(pool.swa_kv_pool)]
        if _MAMBA in self.config.components:
            slot = fixtures.node_device_value(self.tree, node, _MAMBA).reshape(-1)
            found += [b[:, slot] for b in self._mamba_tensors()]
        return [t.clone().view(torch.uint8) for t in found]

    def _v4_bytes(self, pool: Any, rows: torch.Tensor) -> list[torch.Tensor]:
        pages = rows[::V4_PAGE] // V4_PAGE
        found = [b[pages] for b in _v4_buffers(pool)]
        window = self.allocator.full_to_swa_index_mapping[rows[-V4_PAGE:]][0] // V4_PAGE
        found += [b[window] for b in pool.swa_kv_pool.kv_buffer]
        return [t.clone().view(torch.uint8) for t in found]

    def _match(self, tokens: list[int]) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def _device_tensors(self) -> list[torch.Tensor]:
        pool = self.allocator.get_kvcache()
        if self.settings.model == "deepseek-v4":
            return [*_v4_buffers(pool), *pool.swa_kv_pool.kv_buffer]
        found = _buffers(getattr(pool, "full_kv_pool", pool)) + self._other_tensors()
        if _SWA in self.config.components:
            found = found + _buffers(pool.swa_kv_pool)
        if _MAMBA in self.config.components:
            found = found + self._mamba_tensors()
        return found

    def _other_tensors(self) -> list[torch.Tensor]:
        """Device memory of pools that only some engines have."""
        return []

    def _other_bytes(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """What these pools hold for the tokens at `rows`."""
        return []

    def _mamba_tensors(self) -> list[torch.Tensor]:
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.temporal, *cache.conv]

    # What must hold after every test.

    def host_slots_used(self) -> dict[str, int]:
        """Slots taken in each host pool."""
        used = {}
        for entry in self.controller.mem_pool_host.entries:
            # A pool that shares another's slots cannot say.
            with suppress(NotImplementedError):
                used[str(entry.name)] = entry.host_pool.size - entry.host_pool.available_size()
        return used

    def assert_at_rest(self, *, holds: bool) -> None:
        """Check that nothing is left of a transfer: threads alive, nothing under way, no lock, slots back.

        Args:
            holds: whether the tree may hold pages on the host; else every slot must be free.
        """
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            self.tree.check_hicache_events()
            if not (self.tree.ongoing_prefetch or self.tree.ongoing_backup):
                break
            time.sleep(0.01)
        controller = self.controller
        threads = ("prefetch_thread", "prefetch_io_aux_thread", "prefetch_sync_thread", "backup_thread")
        assert [t for t in threads if not getattr(controller, t).is_alive()] == []
        assert not self.tree.ongoing_prefetch
        assert not self.tree.ongoing_backup
        assert controller.prefetch_tokens_occupied == 0
        for queue in (controller.prefetch_queue, controller.backup_queue, controller.prefetch_buffer):
            assert queue.empty()
        assert self._host_locks() == []
        if not holds:
            assert set(self.host_slots_used().values()) == {0}

    def _host_locks(self) -> list[Any]:
        core = self.tree.tree_core
        if self.settings.core == "rust":
            return []
        nodes, locked = [self.tree.root_node_handle()], []
        while nodes:
            node = nodes.pop()
            nodes += list(fixtures.node_children(self.tree, node))
            if node != self.tree.root_node_handle():
                locked += [
                    (node, c) for c in self.config.components if core.get_component_host_lock_ref(node, c)
                ]
        return locked


def _buffers(pool: Any) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)


def _v4_buffers(pool: Any) -> list[torch.Tensor]:
    return [
        *pool.c4_kv_pool.kv_buffer,
        *pool.c4_indexer_kv_pool.index_k_with_scale_buffer,
        *pool.c128_kv_pool.kv_buffer,
    ]


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait until something has come to pass."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two engines hold the same bytes of a prompt."""
    return bool(a) and len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
