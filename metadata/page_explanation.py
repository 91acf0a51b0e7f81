"""Why is a page not there? Tells the state of every pool of some pages, with the note of a loss (Redis)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from metadata import redis_keys
from metadata.redis_server import RedisServer, pairs
from metadata.registered import Variant
from metadata.shard_bitmap import shards_in

_REASONS: Final = {"size_mismatch": "size_mismatch", "evicted": "evicted"}
"""Note -> reason of a miss; every other note says that the bytes were lost."""


def miss_reason(note: str) -> str:
    """Return the contract's reason for what a note says."""
    return _REASONS.get(note, "lost")


@dataclass(frozen=True, slots=True)
class ExplainedPool:
    """One pool of one page.

    Attributes:
        state: `stored` on all shards, `incomplete` on some, `absent` on none.
        missing_shards: the shards that are not stored.
        lost: (reason, seconds since) of the last claim that was cleared, or None.
    """

    state: Literal["stored", "incomplete", "absent"]
    missing_shards: list[int]
    lost: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class ExplainedPage:
    """One page of the call, with its pools by name."""

    page: int
    pools: dict[str, ExplainedPool]


@dataclass(frozen=True, slots=True)
class PageExplainer:
    """Reads values, companions and notes of pages: three commands a page, so callers bound the pages."""

    redis: RedisServer

    async def explain(
        self,
        namespace_id: str,
        page_hashes: Sequence[bytes],
        variants: Mapping[str, Variant],
        *,
        first_page: int = 0,
    ) -> list[ExplainedPage]:
        """Return the state of every pool of every page.

        Args:
            namespace_id: the namespace.
            page_hashes: the pages.
            variants: pool name -> variant.
            first_page: what the first of them is called in the answer.
        """
        if not page_hashes:
            return []
        values = [("GET", key) for key in redis_keys.pages(namespace_id, page_hashes)]
        companions = [("HGETALL", key) for key in redis_keys.companions(namespace_id, page_hashes)]
        notes = [("HGETALL", key) for key in redis_keys.notes(namespace_id, page_hashes)]
        answers = await self.redis.commands([*values, *companions, *notes])
        now, count = int(time.time()), len(page_hashes)
        found: list[ExplainedPage] = []
        for i, value in enumerate(answers[:count]):
            stored, lost = pairs(answers[count + i]), pairs(answers[2 * count + i])
            pools = {name: _explained(value or b"", stored, lost, v, now) for name, v in variants.items()}
            found.append(ExplainedPage(first_page + i, pools))
        return found


def _explained(
    value: bytes, stored: Mapping[bytes, bytes], lost: Mapping[bytes, bytes], variant: Variant, now: int
) -> ExplainedPool:
    field = str(variant.bit).encode()
    note = _lost(lost.get(field), now)
    at = 1 + (variant.bit >> 3)
    if at < len(value) and value[at] >> (variant.bit & 7) & 1:
        return ExplainedPool("stored", [], note)
    there = set(shards_in(stored.get(field, b"")))
    missing = sorted(set(range(variant.spec.shard_count)) - there)
    return ExplainedPool("incomplete" if there else "absent", missing, note)


def _lost(note: Any, now: int) -> tuple[str, int] | None:
    if note is None:
        return None
    reason, at, _ = note.split(b" ", 2)
    return miss_reason(reason.decode()), max(0, now - int(at))
