"""SGLang's host pools as pools of caketin: geometry read from the buffers, the rest from one table.

A host pool tells where the buffers of a page lie (`get_page_buffer_meta`). Two pages are enough to know where
all lie. What it does not tell is how a prefix depends on the pool and which ranks hold the same bytes: that
is in the table by name, and follows from how the model is sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from dataplane.bound_pool import BoundPool
from dataplane.host_pool import Fragment, HostPart, HostPool, Region
from metadata.errors import FieldError, InvalidInput
from metadata.pools import (
    ANCHOR,
    OBJECT_LAYOUTS,
    AllPages,
    HitPolicy,
    Part,
    PoolSpec,
    RankPool,
    TrailingPages,
)

_SHARES_KV_PAGES: Final = frozenset(
    {"indexer", "draft", "draft_indexer"}
    | {f"deepseek_v4_{n}" for n in ("c1", "c2", "c4", "c128")}
    | {f"deepseek_v4_{n}_{part}" for n in ("c1", "c2", "c4") for part in ("indexer", "indexer_scale")}
    | {"deepseek_v4_c4_rope", "deepseek_v4_c128_rope"}
)
"""Pools whose pages are the anchor's: they need every page of a prefix."""

_SHARES_SWA_PAGES: Final = frozenset(
    {"draft_swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state", "deepseek_v4_c128_state"}
)
_WINDOWED: Final = _SHARES_SWA_PAGES | {"swa", "auxiliary_swa"}
"""Pools that need a sliding window's pages. Each lookup says how many; the registration's is for others."""

_MAX_DTYPE: Final = 64


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands.

    Attributes:
        tp_rank: within the attention group under DP attention.
        tp_size: of that group.
        pp_rank: pipeline stage.
        pp_size: number of stages.
        cp_rank: context-parallel rank; all of them hold the same bytes.
        dp_rank: which attention group, or which replica.
        replicated: whether all TP ranks hold the same KV (MLA, DeepSeek V4).
        writer: whether this rank writes what is replicated.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    dp_rank: int
    replicated: bool
    writer: bool

    @property
    def name(self) -> str:
        """The rank's name for the control plane."""
        return f"dp{self.dp_rank}-pp{self.pp_rank}-cp{self.cp_rank}-tp{self.tp_rank}"

    @property
    def leads(self) -> bool:
        """Whether this rank asks for its prefetch group; the others agree with it."""
        return self.tp_rank == 0 and self.pp_rank == 0 and self.cp_rank == 0


@dataclass(frozen=True)
class EnginePool:
    """One of the engine's pools.

    Attributes:
        bound: all that this rank holds of it, for reading.
        registered: what it owns, which is what it writes.
        page_size: indices that a page has in the engine's `host_indices`.
    """

    bound: BoundPool
    registered: RankPool
    page_size: int


def engine_pool(
    name: str,
    host: Any,
    place: RankPlace,
    *,
    window_pages: int,
    logical_dtype: str | None,
    peers: Sequence[str],
) -> EnginePool:
    """Translate a host pool.

    Args:
        name: SGLang's name of the pool.
        host: its host pool.
        place: the rank's.
        window_pages: of the sliding window, as far as it is known at registration.
        logical_dtype: what SGLang calls the cache's element type; None where it is the buffers' own.
        peers: names of the pools that are registered with it.

    Raises:
        InvalidInput: a layout that cannot be moved, or a pool that SGLang will never back up completely.
    """
    if place.replicated and place.tp_size > 1 and isinstance(host, MHATokenToKVPoolHost):
        kind = "draft" if name.startswith("draft") else "pool"
        detail = (
            f"is an MHA {kind} on a target whose KV all {place.tp_size} TP ranks share: SGLang 0.5.23 backs "
            "it up on rank 0 only for every storage backend but its own mooncake one (HybridCacheController."
            "should_backup), so it can never hit. Run without the draft in HiCache, or at TP 1"
        )
        raise InvalidInput(
            "the pool can never be complete", [FieldError(name, "draft_not_backed_up", detail)]
        )
    sharded = not place.replicated or isinstance(host, MambaPoolHost)
    shards = place.pp_size * (place.tp_size if sharded else 1)
    shard = place.pp_rank * (place.tp_size if sharded else 1) + (place.tp_rank if sharded else 0)
    layout = str(host.layout)
    parts = _parts(name, host, layout)
    spec = PoolSpec(
        name=name,
        parts=tuple(Part(p.part, _dtype(host, p.part, logical_dtype), p.bytes) for p in parts),
        shard_count=shards,
        hit_policy=_policy(name, window_pages),
        indices_from=_source(name, peers),
        logical=not parts,
        object_layout=layout,
    )
    slots = max(1, int(host.size) // int(host.page_size))
    regions = _regions(host) if parts else ()
    memory = (HostPool(name, slots, parts, regions, layout),) if parts else ()
    size = sum(r.length for r in regions) or None
    owns = sharded or place.writer
    held = RankPool(spec, (shard,) if parts or owns else (), size)
    return EnginePool(
        bound=BoundPool(held, memory),
        registered=held if owns else RankPool(spec, (), size),
        page_size=int(host.page_size),
    )


def _policy(name: str, window_pages: int) -> HitPolicy:
    if name == "mamba":
        return TrailingPages(1)
    return TrailingPages(window_pages) if name in _WINDOWED else AllPages()


def _source(name: str, peers: Sequence[str]) -> str | None:
    if name in _SHARES_KV_PAGES:
        return ANCHOR
    return "swa" if name in _SHARES_SWA_PAGES and "swa" in peers else None


def _parts(name: str, host: Any, layout: str) -> tuple[HostPart, ...]:
    """Return where each part of a page lies; empty for an anchor that has indices only (P1)."""
    if layout not in OBJECT_LAYOUTS:
        detail = f"is {layout!r}; start the engine with --hicache-mem-layout page_first or page_first_direct"
        raise InvalidInput(f"pool {name!r} cannot be moved", [FieldError("layout", "unsupported", detail)])
    pages = max(1, int(host.size) // int(host.page_size))
    tables = [_page_table(name, host, page) for page in sorted({0, min(1, pages - 1), pages - 1})]
    if tables[0] is None:
        return ()
    first, last = tables[0], tables[-1] or []
    second = tables[min(1, len(tables) - 1)] or []
    fragments = []
    for (base, length), (after, _), (end, _) in zip(first, second, last, strict=True):
        stride = after - base if pages > 1 else length
        if end != base + stride * (pages - 1):
            detail = f"page {pages - 1} is at {end:#x}, not {stride} bytes a page after {base:#x}"
            raise InvalidInput(
                f"pool {name!r} is not evenly spaced", [FieldError("buffers", "uneven", detail)]
            )
        fragments.append(Fragment(base, stride, length))
    names = _part_names(host, layout, len(fragments))
    return tuple(
        HostPart(part, tuple(f for f, n in zip(fragments, itertools.cycle(names)) if n == part and f.length))
        for part in names
    )


def _page_table(name: str, host: Any, page: int) -> list[tuple[int, int]] | None:
    """Return address and length of each buffer of a page, in SGLang's order."""
    size = int(host.page_size)
    indices = torch.arange(page * size, (page + 1) * size, dtype=torch.int64)
    try:
        answer = host.get_page_buffer_meta(indices)
    except (ValueError, NotImplementedError) as error:
        detail = f"{error}; start the engine with --hicache-mem-layout page_first or page_first_direct"
        raise InvalidInput(
            f"pool {name!r} cannot be moved", [FieldError("layout", "unsupported", detail)]
        ) from error
    if answer is None:
        return None
    pointers, lengths = answer
    return [(int(p), int(n)) for p, n in zip(pointers, lengths, strict=True)]


def _part_names(host: Any, layout: str, buffers: int) -> list[str]:
    """Return the parts' names in the order of a page's buffers; a layer-first pool repeats them."""
    if isinstance(host, MHATokenToKVPoolHost):
        return ["k", "v"]
    if isinstance(host, MambaPoolHost):
        temporal = ["temporal"] if host.temporal_state_elem_size > 0 else []
        return [*temporal, *(f"conv_{i}" for i in range(len(host.conv_buffer)))]
    if layout == "layer_first" or buffers == 1:
        return ["page"]
    return [f"page_{i}" for i in range(buffers)]


def _dtype(host: Any, part: str, logical_dtype: str | None) -> str:
    """Return element type and shape of a page: the same number of bytes may mean other things.

    Half the layers with all heads (a pipeline stage) and all layers with half the heads (a TP rank) have one
    size; so have fp8_e4m3 and fp8_e5m2, both kept as uint8.
    """
    if isinstance(host, MHATokenToKVPoolHost):
        width = getattr(host, "v_head_dim", None) if part == "v" else None
        shape = [host.page_size, host.layer_num, host.head_num, width or host.head_dim]
        kind = host.dtype
    elif isinstance(host, MambaPoolHost):
        state = host.temporal_state_shape if part == "temporal" else host.conv_state_shapes[int(part[5:])]
        shape = [host.num_mamba_layers, *state]
        kind = host.temporal_dtype if part == "temporal" else host.conv_dtype
    else:
        row = next((int(getattr(host, n)) for n in _ROW_WIDTHS if getattr(host, n, None)), 0)
        shape = [host.page_size, host.layer_num, row]
        kind = getattr(host, "indexer_dtype", host.dtype)
    text = str(kind).removeprefix("torch.")
    if text == "uint8" and logical_dtype:
        text = f"{logical_dtype}/uint8"
    return f"{text}[{','.join(str(int(n)) for n in shape)}]"[:_MAX_DTYPE]


_ROW_WIDTHS: Final = (
    "kv_cache_dim",
    "indexer_page_stride_size",
    "item_bytes",
    "state_page_bytes",
    "head_dim",
)


def _regions(host: Any) -> tuple[Region, ...]:
    """Return the pool's tensors as memory to register, each once."""
    tensors = getattr(host, "get_hybrid_pool_buffer", lambda: [host.kv_buffer])()
    flat = [t for item in tensors for t in (item if isinstance(item, list | tuple) else (item,))]
    found = {int(t.data_ptr()): int(t.nbytes) for t in flat if t is not None and t.nbytes}
    return tuple(Region(address, length) for address, length in sorted(found.items()))
