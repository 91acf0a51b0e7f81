"""Engines with pools that the common ones lack: DSA's indexer, Mamba beside MLA, drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.sglang import cpu_ops

cpu_ops.install()

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (  # noqa: E402
    build_hicache_draft_sidecars,
)
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.server_args import set_global_server_args_for_scheduler  # noqa: E402
from sglang.test.kits.unified_radix_cache import fixtures  # noqa: E402

from tests.sglang.engines import CONFIGS, Engine, EngineSettings, until  # noqa: E402

_MLA = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}

CONFIGS["dsa"] = CONFIGS["mla"]
CONFIGS["mamba-mla"] = CONFIGS["mamba"]
MODELS = ("dsa", "mamba-mla")


def dsa_pool(size: int, layers: int) -> DSATokenToKVPool:
    return DSATokenToKVPool(
        size=size,
        page_size=64,
        dtype=torch.bfloat16,
        layer_num=layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=_MLA["kv_lora_rank"] + _MLA["qk_rope_head_dim"],
        **_MLA,
    )


class DsaEngine(Engine):
    """MLA with the indexer of DeepSeek sparse attention, whose pages lie beside KV's."""

    def _builder(self) -> Callable[[], None]:
        return self._build_dsa

    def _build_dsa(self) -> None:
        set_global_server_args_for_scheduler(self.server_args())
        pool = dsa_pool(self.config.kv_size, self.config.num_layers)
        self.allocator = TokenToKVPoolAllocator(
            size=self.config.kv_size, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
        )
        self._build_tree()

    def _other_tensors(self) -> list[torch.Tensor]:
        return list(self.allocator.get_kvcache().index_k_with_scale_buffer)

    def _other_bytes(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [b[rows[::64] // 64] for b in self._other_tensors()]


class MambaMlaEngine(Engine):
    """Mamba states, one a rank, beside MLA's KV, which all ranks have alike (Kimi Linear and its like)."""

    def _start(self) -> None:
        latent = functools.partial(HybridLinearKVPool, use_mla=True, **_MLA)
        with mock.patch.object(fixtures, "HybridLinearKVPool", latent):
            super()._start()

    def fill(self, seed: int) -> None:
        """Fill device memory; KV with the same bytes for all small seeds, as ranks of an engine have it."""
        super().fill(seed)
        made = torch.Generator().manual_seed(seed // 16)
        for tensor in self.allocator.get_kvcache().full_kv_pool.kv_buffer:
            flat = tensor.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=made))


class DraftEngine(Engine):
    """An engine whose draft model's pools come after the attach, as SGLang's scheduler registers them."""

    draft: Any = None

    def _start(self) -> None:
        super()._start()
        self.draft = self._draft_pool()
        specs, entries = build_hicache_draft_sidecars(draft_device_pools=(self.draft,), tree_cache=self.tree)
        for spec, entry in zip(specs, entries, strict=True):
            self.tree.register_sidecar_pool(spec, entry)
        self.drafts = [str(s.pool_name) for s in specs]
        if self.settings.attached and self.settings.backend == "dynamic":
            until(lambda: set(self.drafts) <= set(self.backend._link.joined.owned))

    def _draft_pool(self) -> Any:
        c = self.config
        common = {"size": c.kv_size, "page_size": c.page_size, "dtype": c.dtype, "device": "cpu"}
        heads = {"head_num": c.head_num, "head_dim": c.head_dim}
        if self.settings.model == "swa":
            return SWAKVPool(
                size_swa=c.kv_size,
                swa_attention_layer_ids=[0],
                full_attention_layer_ids=[],
                **common,
                **heads,
            )
        if self.settings.model == "mla":
            return MLATokenToKVPool(layer_num=1, enable_memory_saver=False, **common, **_MLA)
        return MHATokenToKVPool(layer_num=1, enable_memory_saver=False, **common, **heads)

    def _draft_tensors(self) -> list[torch.Tensor]:
        if self.draft is None:
            return []
        pool = getattr(self.draft, "swa_kv_pool", None) or self.draft
        return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)

    def _other_tensors(self) -> list[torch.Tensor]:
        return self._draft_tensors()

    def _other_bytes(self, rows: torch.Tensor) -> list[torch.Tensor]:
        if self.settings.model == "swa":
            rows = self.allocator.full_to_swa_index_mapping[rows[-self.config.sliding_window_size :]]
        return [b[rows] for b in self._draft_tensors()]


class MhaDraftOnMlaEngine(DraftEngine):
    """A draft with heads of its own on a target whose KV all ranks share."""

    def _draft_pool(self) -> Any:
        c = self.config
        return MHATokenToKVPool(
            size=c.kv_size,
            page_size=c.page_size,
            dtype=c.dtype,
            head_num=c.head_num,
            head_dim=c.head_dim,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )


def engine_of(settings: EngineSettings) -> Engine:
    """Return an engine of the class that its model needs."""
    return {"dsa": DsaEngine, "mamba-mla": MambaMlaEngine}.get(settings.model, Engine)(settings)
