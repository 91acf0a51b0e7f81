"""Which pages are stored, on all shards: the claims that a lookup reads (Redis, DESIGN section 4).

A page's value is one generation byte and one bit per pool variant, set when every shard of that variant is
stored. A lookup is an MGET of those values, so its cost does not grow with ranks. Shard bitmaps of incomplete
pools live in a companion key that only commit, missing and explain touch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from metadata import redis_keys
from metadata.hit_policy import Restorable, dead_end, restorable
from metadata.pools import HitPolicy
from metadata.redis_server import RedisServer, ScriptCall
from metadata.shard_bitmap import shard_bitmap, shards_in

CHUNKS: Final = (64, 256, 1024, 4096)
PAGES_PER_SCRIPT: Final = 512
_VALUE_BYTES: Final = 9

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Lifetimes.

    Attributes:
        companion_seconds: of a shard bitmap, and of the generation of a page without claims.
        note_seconds: of the note that a cleared claim leaves for explain.
    """

    companion_seconds: int = 3600
    note_seconds: int = 3600


@dataclass(frozen=True, slots=True)
class Found:
    """What the index holds of a row of pages.

    Attributes:
        restorable: which lengths the gating pools allow.
        presence: per pool, over the queried pages; pages beyond `pages_read` count as absent.
        generations: one byte a queried page, to fence a later `missing`.
        pages_read: how many pages were read before no longer length was possible.
    """

    restorable: Restorable
    presence: Mapping[str, BoolArray]
    generations: bytes
    pages_read: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages of one pool variant that a rank has stored.

    Attributes:
        pool: name, for the answer.
        bit: the variant's bit.
        shard_count: shards of the variant.
        shards: the shards that were stored.
        pages: bool over the call's pages.
        guarded: whether the pool waits for the anchor (O2).
    """

    pool: str
    bit: int
    shard_count: int
    shards: tuple[int, ...]
    pages: BoolArray
    guarded: bool


@dataclass(frozen=True, slots=True)
class AnchorShards:
    """Shards of an anchor's variant that the committing rank owns."""

    bit: int
    shard_count: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did.

    Attributes:
        committed: pages with at least one pool accepted.
        complete: pages whose named pools now have all shards.
        rejected: (page, pool) that waited for an anchor that is not stored.
    """

    committed: int
    complete: int
    rejected: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Lost:
    """Pages of one pool variant that could not be read.

    Attributes:
        bit: the variant's bit.
        shard_count: shards of the variant.
        shards: the shards that failed.
        pages: bool over the call's pages.
        reason: as the note will say it (`gone`, `size_mismatch`, `timeout`, `checksum`, ...).
    """

    bit: int
    shard_count: int
    shards: tuple[int, ...]
    pages: BoolArray
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Why and when a claim was cleared."""

    reason: str
    at: int
    shards: list[int]


class PageIndex:
    """Claims over pages."""

    def __init__(self, redis: RedisServer, settings: IndexSettings | None = None) -> None:
        self._redis = redis
        self._settings = settings or IndexSettings()

    async def find(
        self,
        namespace_id: str,
        page_hashes: Sequence[bytes],
        pools: Mapping[str, tuple[int, HitPolicy]],
        *,
        first_page: int = 0,
        prefix_hashes: Sequence[bytes] = (),
    ) -> Found:
        """Return which prefixes of `page_hashes` are restorable.

        Args:
            namespace_id: the namespace.
            page_hashes: pages of the call, in order.
            pools: gating pool name -> (bit, policy), the anchor first.
            first_page: number of pages of the sequence before the call's first.
            prefix_hashes: pages right before `first_page`, for windows that reach there.
        """
        policies = {name: policy for name, (_, policy) in pools.items()}
        keys = redis_keys.pages(namespace_id, page_hashes)
        total = len(keys)
        values = np.zeros((total, _VALUE_BYTES), np.uint8)
        read = 0
        for size in _chunk_sizes(total):
            values[read : read + size] = _as_rows(await self._redis.values(keys[read : read + size]))
            read += size
            if dead_end(_presence(values[:read], pools), policies, queried_pages=total) is not None:
                break
        presence = _presence(values, pools)
        prefix = None
        if prefix_hashes:
            rows = _as_rows(await self._redis.values(redis_keys.pages(namespace_id, prefix_hashes)))
            prefix = _presence(rows, pools)
        result = restorable(presence, policies, first_page=first_page, prefix_presence=prefix)
        return Found(result, presence, values[:, 0].tobytes(), read)

    async def commit(
        self,
        namespace_id: str,
        page_hashes: Sequence[bytes],
        claims: Sequence[Claim],
        anchors: Sequence[AnchorShards],
    ) -> Committed:
        """Claim what is stored; idempotent.

        Args:
            namespace_id: the namespace.
            page_hashes: pages of the call.
            claims: what is stored.
            anchors: what must be stored before a guarded claim counts; empty for a rank that owns no anchor.
        """
        calls: list[ScriptCall] = []
        at: list[tuple[NDArray[np.int64], list[str]]] = []
        for pages, members in _by_signature([c.pages for c in claims]):
            named = [claims[m] for m in members]
            guarded = [c.pool for c in named if c.guarded]
            plan = self._commit_plan(named, anchors if guarded else ())
            for part in _slices(pages):
                hashes = [page_hashes[i] for i in part]
                keys = [
                    *redis_keys.pages(namespace_id, hashes),
                    *redis_keys.companions(namespace_id, hashes),
                    redis_keys.claims(namespace_id, redis_keys.bucket(hashes[0])),
                ]
                calls.append(ScriptCall("commit_pages", keys, plan))
                at.append((part, guarded))
        committed, complete = 0, 0
        rejected: list[tuple[int, str]] = []
        for (part, guarded), answer in zip(at, await self._redis.run_all(calls), strict=True):
            committed += answer[0]
            complete += answer[1]
            rejected += [(int(part[i]), pool) for i in answer[2] for pool in guarded]
        return Committed(committed, complete, sorted(rejected))

    async def clear(
        self, namespace_id: str, page_hashes: Sequence[bytes], lost: Sequence[Lost], generations: bytes | None
    ) -> tuple[int, int]:
        """Clear claims of what could not be read.

        Args:
            namespace_id: the namespace.
            page_hashes: pages of the call.
            lost: what failed.
            generations: one byte a page as a lookup gave them; None clears whatever is claimed.

        Returns:
            Claims cleared, and pages left alone because their generation was another.
        """
        calls: list[ScriptCall] = []
        for pages, members in _by_signature([item.pages for item in lost]):
            named = [lost[m] for m in members]
            plan = msgspec.msgpack.encode(
                {
                    "claims": [(c.bit, c.shard_count, 3 + i, c.reason) for i, c in enumerate(named)],
                    "fenced": generations is not None,
                    "forget_ms": self._settings.companion_seconds * 1000,
                    "note_ms": self._settings.note_seconds * 1000,
                }
            )
            bitmaps = [shard_bitmap(c.shards, c.shard_count) for c in named]
            for part in _slices(pages):
                hashes = [page_hashes[i] for i in part]
                keys = [
                    *redis_keys.pages(namespace_id, hashes),
                    *redis_keys.companions(namespace_id, hashes),
                    *redis_keys.notes(namespace_id, hashes),
                    redis_keys.claims(namespace_id, redis_keys.bucket(hashes[0])),
                ]
                fence = bytes(generations[i] for i in part) if generations is not None else b""
                calls.append(ScriptCall("clear_claims", keys, [plan, fence, *bitmaps]))
        answers = await self._redis.run_all(calls)
        return sum(a[0] for a in answers), sum(a[1] for a in answers)

    async def claimed_pages(self, namespace_id: str) -> dict[int, int]:
        """Return how many pages each bit claims."""
        keys = [redis_keys.claims(namespace_id, b) for b in range(redis_keys.BUCKETS)]
        sums: Counter[int] = Counter()
        for counts in await self._redis.pipeline(lambda pipe: [pipe.hgetall(key) for key in keys]):
            sums.update({int(bit): int(pages) for bit, pages in counts.items()})
        return dict(sums)

    async def note(self, namespace_id: str, page_hash: bytes, bit: int) -> tuple[Note | None, list[int]]:
        """Return the note on a page's pool, and the shards of it that are stored while it is incomplete."""
        (note_key,) = redis_keys.notes(namespace_id, [page_hash])
        (companion,) = redis_keys.companions(namespace_id, [page_hash])

        def ask(pipe: Any) -> None:
            pipe.hget(note_key, str(bit))
            pipe.hget(companion, str(bit))

        raw, bitmap = await self._redis.pipeline(ask)
        note = None
        if raw is not None:
            reason, when, shards = raw.split(b" ", 2)
            note = Note(reason.decode(), int(when), shards_in(shards))
        return note, shards_in(bitmap or b"")

    def _commit_plan(self, claims: Sequence[Claim], anchors: Sequence[AnchorShards]) -> list[bytes]:
        """Return the arguments of `commit_pages` for pages that all have these claims."""
        whole = [c for c in claims if len(c.shards) == c.shard_count]
        partial = [c for c in claims if len(c.shards) < c.shard_count]
        sharded: list[Claim | AnchorShards] = [*partial, *anchors]
        places = range(2, 2 + len(sharded))
        plan = {
            "bits": [c.bit for c in whole],
            "partial": [(c.bit, c.shard_count, at) for c, at in zip(partial, places, strict=False)],
            "anchors": [(a.bit, at) for a, at in zip(anchors, places[len(partial) :], strict=True)],
            "guarded": {c.bit: True for c in claims if c.guarded},
            "sharded": any(c.shard_count > 1 for c in whole),
            "companion_ms": self._settings.companion_seconds * 1000,
        }
        return [msgspec.msgpack.encode(plan), *(shard_bitmap(c.shards, c.shard_count) for c in sharded)]


def _chunk_sizes(total: int) -> Iterator[int]:
    left, step = total, 0
    while left > 0:
        size = min(left, CHUNKS[min(step, len(CHUNKS) - 1)])
        yield size
        left -= size
        step += 1


def _as_rows(values: Sequence[bytes | None]) -> NDArray[np.uint8]:
    """Return the pages' values as rows of nine bytes, absent and short ones filled with zeros."""
    padded = b"".join([(v or b"").ljust(_VALUE_BYTES, b"\0") for v in values])
    return np.frombuffer(padded, np.uint8).reshape(len(values), _VALUE_BYTES)


def _presence(rows: NDArray[np.uint8], pools: Mapping[str, tuple[int, HitPolicy]]) -> dict[str, BoolArray]:
    return {name: (rows[:, 1 + (bit >> 3)] >> (bit & 7) & 1).astype(bool) for name, (bit, _) in pools.items()}


def _by_signature(masks: Sequence[BoolArray]) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
    """Group pages by which of `masks` they are in, so that one plan serves each group."""
    if not masks:
        return
    membership = np.packbits(np.stack(masks, axis=1), axis=1)
    patterns, inverse = np.unique(membership, axis=0, return_inverse=True)
    for k in range(len(patterns)):
        pages = np.flatnonzero(inverse.reshape(-1) == k)
        members = [m for m, mask in enumerate(masks) if mask[pages[0]]]
        if members:
            yield pages, members


def _slices(pages: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(pages), PAGES_PER_SCRIPT):
        yield pages[start : start + PAGES_PER_SCRIPT]
