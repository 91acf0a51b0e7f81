"""The pools of well-known kinds of model, at their true proportions and any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from metadata.errors import FieldError, InvalidInput
from metadata.pools import Part, PoolSpec, RankPool, TrailingPages

MIN_PART_BYTES: Final = 16
MAX_TP: Final = 64

# Bytes a page of 256 tokens: DeepSeek V4 Flash (43 layers: 2 sliding-window only, 21 c4, 20 c128).
_V4_BYTES: Final = {
    "deepseek_v4_c4": 786_240,
    "deepseek_v4_c4_indexer": 177_408,
    "deepseek_v4_c128": 34_560,
    "swa": 6_439_680,
}

# Bytes a page of 512 tokens, in the proportions of a model with one full-attention layer in four: K and V of
# two heads in 12 layers; the state of 36 linear-attention layers, which does not grow with the page.
_HYBRID_KV: Final = 6_291_456
_HYBRID_STATE: Final = {"temporal": 75_497_472, "conv_0": 1_769_472}


def deepseek_v4(page_bytes: int, _shards: int = 1) -> list[PoolSpec]:
    """Return DeepSeek V4's pools: a logical anchor, three compressed pools and the sliding window.

    Every rank holds the same bytes, so there is one shard at any TP size.
    """
    total = sum(_V4_BYTES.values())
    size = {n: max(MIN_PART_BYTES, b * page_bytes // total) for n, b in _V4_BYTES.items()}
    compressed = [
        PoolSpec(name, (Part("page", "uint8", size[name]),), indices_from="kv")
        for name in ("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")
    ]
    window = PoolSpec("swa", (Part("page", "uint8", size["swa"]),), hit_policy=TrailingPages(1))
    return [PoolSpec("kv", (), logical=True), *compressed, window]


def mha(page_bytes: int, shards: int = 1) -> list[PoolSpec]:
    """Return the pool of a model with full attention only, its heads shared out over the ranks."""
    return [PoolSpec("kv", _k_and_v(page_bytes // 2 // shards), shards)]


def mha_swa(page_bytes: int, shards: int = 1) -> list[PoolSpec]:
    """Return the pools of a model with one full-attention layer in six; the others see four pages."""
    window = _k_and_v(page_bytes * 5 // 12 // shards)
    return [
        PoolSpec("kv", _k_and_v(page_bytes // 12 // shards), shards),
        PoolSpec("swa", window, shards, hit_policy=TrailingPages(4)),
    ]


def mamba_hybrid(page_bytes: int, shards: int = 1) -> list[PoolSpec]:
    """Return the pools of a model with one full-attention layer in four; the others keep a state."""
    total = 2 * _HYBRID_KV + sum(_HYBRID_STATE.values())
    state = {n: max(MIN_PART_BYTES, b * page_bytes // total // shards) for n, b in _HYBRID_STATE.items()}
    parts = (
        Part("temporal", "float32", state["temporal"]),
        Part("conv_0", "bfloat16", state["conv_0"]),
    )
    return [
        PoolSpec("kv", _k_and_v(_HYBRID_KV * page_bytes // total // shards), shards),
        PoolSpec("mamba", parts, shards, hit_policy=TrailingPages(1)),
    ]


def _k_and_v(size: int) -> tuple[Part, Part]:
    each = max(MIN_PART_BYTES, size)
    return Part("k", "bfloat16", each), Part("v", "bfloat16", each)


POOL_SETS: Final[dict[str, Callable[[int, int], list[PoolSpec]]]] = {
    "deepseek-v4": deepseek_v4,
    "mha": mha,
    "mha-swa": mha_swa,
    "mamba-hybrid": mamba_hybrid,
}


def rank_pools(name: str, page_bytes: int, tp: int = 1, tp_rank: int = 0) -> list[RankPool]:
    """Return the pools of one rank.

    Args:
        name: one of `POOL_SETS`.
        page_bytes: bytes of a page over all pools and shards, shared out in the model's proportions; a part
            has at least 16.
        tp: ranks of the engine.
        tp_rank: which of them.

    Raises:
        InvalidInput: no such set, or a size that is none.
    """
    if name not in POOL_SETS:
        listed = ", ".join(POOL_SETS)
        detail = f"is {name!r}, use one of {listed}"
        raise InvalidInput("no such pool set", [FieldError("--pools", "unknown", detail)])
    if not MIN_PART_BYTES <= page_bytes <= 1 << 30:
        detail = f"is {page_bytes}, must be {MIN_PART_BYTES} to 2^30"
        raise InvalidInput("no such page", [FieldError("--page-bytes", "out_of_range", detail)])
    if not 1 <= tp <= MAX_TP:
        detail = f"is {tp}, must be 1 to {MAX_TP}"
        raise InvalidInput("no such engine", [FieldError("--tp", "out_of_range", detail)])
    specs = POOL_SETS[name](page_bytes, tp)
    return [RankPool(spec, (tp_rank if spec.shard_count > 1 else 0,)) for spec in specs]
