"""Sets of shards as bitmaps: shard s is bit s % 8 of byte s // 8, as the scripts read them. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def shard_bitmap(shards: Iterable[int], shard_count: int) -> bytes:
    """Return the bitmap of `shards`, `ceil(shard_count / 8)` bytes long.

    Raises:
        IndexError: a shard is not below `shard_count`.
    """
    bits = bytearray((shard_count + 7) // 8)
    for shard in shards:
        if not 0 <= shard < shard_count:
            raise IndexError(f"shard {shard} of {shard_count}")
        bits[shard >> 3] |= 1 << (shard & 7)
    return bytes(bits)


def shards_in(bitmap: bytes) -> list[int]:
    """Return the shards of a bitmap, ascending."""
    return [8 * i + k for i, byte in enumerate(bitmap) for k in range(8) if byte >> k & 1]


def has_shard(bitmap: bytes, shard: int) -> bool:
    """Return whether the bitmap names `shard`; beyond its end no shard is named."""
    return shard >> 3 < len(bitmap) and bool(bitmap[shard >> 3] >> (shard & 7) & 1)
