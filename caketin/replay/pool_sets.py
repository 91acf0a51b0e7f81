"""The pools of well-known kinds of model, at their true proportions and any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from metadata.errors import FieldError, InvalidInput
from metadata.pools import AllPages, Part, PoolSpec, RankPool, TrailingPages

MIN_PART_BYTES: Final = 16

# Bytes a page of 256 tokens: DeepSeek V4 Flash (43 layers: 2 sliding-window only, 21 c4, 20 c128).
_V4_BYTES: Final = {
    "deepseek_v4_c4": 786_240,
    "deepseek_v4_c4_indexer": 177_408,
    "deepseek_v4_c128": 34_560,
    "swa": 6_439_680,
}


def deepseek_v4(page_bytes: int) -> list[PoolSpec]:
    """Return DeepSeek V4's pools: a logical anchor, three compressed pools and the sliding window."""
    total = sum(_V4_BYTES.values())
    size = {n: max(MIN_PART_BYTES, b * page_bytes // total) for n, b in _V4_BYTES.items()}
    compressed = [
        PoolSpec(name, (Part("page", "uint8", size[name]),), indices_from="kv")
        for name in ("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")
    ]
    window = PoolSpec("swa", (Part("page", "uint8", size["swa"]),), hit_policy=TrailingPages(1))
    return [PoolSpec("kv", (), logical=True), *compressed, window]


def mha_swa(page_bytes: int) -> list[PoolSpec]:
    """Return the pools of a model with one full-attention layer in six; the others see four pages."""
    full = max(MIN_PART_BYTES, page_bytes // 12)
    window = max(MIN_PART_BYTES, page_bytes * 5 // 12)
    return [
        PoolSpec("kv", (Part("k", "bfloat16", full), Part("v", "bfloat16", full)), hit_policy=AllPages()),
        PoolSpec(
            "swa",
            (Part("k", "bfloat16", window), Part("v", "bfloat16", window)),
            hit_policy=TrailingPages(4),
        ),
    ]


POOL_SETS: Final[dict[str, Callable[[int], list[PoolSpec]]]] = {
    "deepseek-v4": deepseek_v4,
    "mha-swa": mha_swa,
}


def rank_pools(name: str, page_bytes: int) -> list[RankPool]:
    """Return the pools of a single rank.

    Args:
        name: one of `POOL_SETS`.
        page_bytes: bytes of a page over all pools, shared out in the model's proportions; a part has at least
            16.

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
    return [RankPool(spec, (0,)) for spec in POOL_SETS[name](page_bytes)]
