"""Which pages are stored, on all shards: the claims that a lookup reads (Redis, DESIGN section 4).

A page's value is one generation byte and one bit per pool variant, set when every shard of that variant is
stored. A lookup is an MGET of those values, so its cost does not grow with ranks. Shard bitmaps of incomplete
pools live in a companion key that only commit, missing and explain touch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from metadata import page_wire, redis_keys
from metadata.hit_policy import Restorable, dead_end, restorable
from metadata.page_claims import (
    AnchorShards,
    BoolArray,
    Claim,
    CommitPart,
    Committed,
    Lost,
    Note,
)
from metadata.page_wire import Bytes
from metadata.pools import HitPolicy
from metadata.redis_node import Command
from metadata.redis_server import RedisServer, ScriptCall, pairs
from metadata.shard_bitmap import shard_bitmap, shards_in

CHUNKS: Final = (64, 256, 1024, 4096)
PAGES_PER_SCRIPT: Final = 512
SCRIPTS_PER_WAVE: Final = 8
SICK_REASONS: Final = frozenset({"timeout"})
"""Why bytes could not be read although the store goes on saying that they exist (T2's negative entry). What
the store itself calls gone is really written again by the next put, and may be claimed at once."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Lifetimes.

    Attributes:
        companion_seconds: of a shard bitmap, and of the generation of a page without claims.
        note_seconds: of the note that a cleared claim leaves for explain.
        negative_seconds: of a negative entry; 0 for none.
    """

    companion_seconds: int = 3600
    note_seconds: int = 3600
    negative_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Losses:
    """Why pools of one page are absent.

    Attributes:
        notes: bit -> what the last cleared claim left.
        stored: bit -> bitmap of the shards that are stored while the pool is incomplete.
    """

    notes: Mapping[bytes, bytes]
    stored: Mapping[bytes, bytes]

    def of(self, bit: int) -> tuple[Note | None, list[int]]:
        """Return the note on a pool, and the shards of it that are stored."""
        field = b"%d" % bit
        note = None
        if (raw := self.notes.get(field)) is not None:
            reason, when, shards = raw.split(b" ", 2)
            note = Note(reason.decode(), int(when), shards_in(shards))
        return note, shards_in(self.stored.get(field, b""))


@dataclass(frozen=True, slots=True)
class Found:
    """What the index holds of a row of pages.

    Attributes:
        restorable: which lengths the gating pools allow.
        presence: per pool, over the `pages_read` leading pages; those after them count as absent.
        generations: one byte a queried page, to fence a later `missing`.
        pages_read: how many pages were read before no longer length was possible.
        first_losses: what is known of the first page's absent pools; None where there is no page.
    """

    restorable: Restorable
    presence: Mapping[str, BoolArray]
    generations: bytes
    pages_read: int
    first_losses: Losses | None = None


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
        hashes = page_wire.hash_rows(page_hashes)
        total = len(hashes)
        values = np.zeros((total, page_wire.VALUE_BYTES), np.uint8)
        # Most prompts that end early end at their first page: why comes along, not by a call of its own.
        beside = _loss_commands(namespace_id, page_hashes[0]) if total else []
        answers: list[Any] = []
        presence = _presence(values[:0], pools)
        read = 0
        for size in _chunk_sizes(total):
            part, answered = await self._values(namespace_id, hashes[read : read + size], beside)
            values[read : read + size] = part
            answers, beside = answers or answered, []
            read += size
            presence = _presence(values[:read], pools)
            # A dead end holds whatever comes after it, so what was not read need not be looked at.
            if read < total and dead_end(presence, policies, queried_pages=total) is not None:
                break
        prefix = None
        if prefix_hashes:
            before, _ = await self._values(namespace_id, page_wire.hash_rows(prefix_hashes))
            prefix = _presence(before, pools)
        result = restorable(presence, policies, first_page=first_page, prefix_presence=prefix)
        result = replace(result, queried_pages=total)
        losses = Losses(*map(pairs, answers)) if answers else None
        return Found(result, presence, values[:, 0].tobytes(), read, losses)

    async def _values(
        self, namespace_id: str, hashes: Bytes, beside: Sequence[Command] = ()
    ) -> tuple[Bytes, list[Any]]:
        """Return the pages' values as rows: one MGET, or on a cluster one a bucket; and other answers."""
        if not self._redis.by_slot:
            mget = Command((), b"", page_wire.mget(namespace_id, hashes))
            found, *others = await self._redis.send([mget, *beside])
            return page_wire.value_rows(found), others
        rows = np.zeros((len(hashes), page_wire.VALUE_BYTES), np.uint8)
        groups = list(page_wire.by_bucket(hashes))
        keys = [redis_keys.claims(namespace_id, int(hashes[g[0], 0]) % redis_keys.BUCKETS) for g in groups]
        commands = [
            Command((), key, page_wire.mget(namespace_id, hashes[g]))
            for key, g in zip(keys, groups, strict=True)
        ]
        answers = await self._redis.send([*commands, *beside])
        for group, found in zip(groups, answers, strict=False):
            rows[group] = page_wire.value_rows(found)
        return rows, answers[len(groups) :]

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
        parts: list[CommitPart] = []
        for pages, members in _by_signature([c.pages for c in claims]):
            named = [claims[m] for m in members]
            waits_for = anchors if any(c.guarded for c in named) else ()
            parts += [CommitPart(cut, named, waits_for) for cut in self._parts(page_hashes, pages)]
        done = Committed(0, 0, [])
        while parts:
            again: list[CommitPart] = []
            for part, answer in zip(parts, await self._commit(namespace_id, page_hashes, parts), strict=True):
                done = part.add(done, answer)
                if answer[4]:
                    again.append(part.with_notes(answer[4]))
            parts = again
        return Committed(done.committed, done.complete, sorted(done.rejected))

    async def _commit(
        self, namespace_id: str, page_hashes: Sequence[bytes], parts: Sequence[CommitPart]
    ) -> list[Any]:
        """Run the scripts of a commit; Redis works on the first of many while the others are written here."""
        waves: list[asyncio.Task[list[Any]]] = []
        for at in range(0, len(parts), SCRIPTS_PER_WAVE):
            wave = parts[at : at + SCRIPTS_PER_WAVE]
            calls = [self._commit_call(namespace_id, page_hashes, part) for part in wave]
            waves.append(asyncio.create_task(self._redis.run_all(calls)))
            await asyncio.sleep(0)
        answers: list[Any] = []
        # All are waited for, so that none is still at it when the caller is told that one failed.
        for found in await asyncio.gather(*waves, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            answers += found
        return answers

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
        negative_ms = int(self._settings.negative_seconds * 1000)
        for pages, members in _by_signature([item.pages for item in lost]):
            named = [lost[m] for m in members]
            plan = msgspec.msgpack.encode(
                {
                    "claims": [
                        (c.bit, c.shard_count, 3 + i, c.reason, c.reason in SICK_REASONS)
                        for i, c in enumerate(named)
                    ],
                    "fenced": generations is not None,
                    "forget_ms": max(self._settings.companion_seconds * 1000, negative_ms),
                    "note_ms": max(self._settings.note_seconds * 1000, negative_ms),
                    "negative_ms": negative_ms,
                }
            )
            bitmaps = [shard_bitmap(c.shards, c.shard_count) for c in named]
            for part in self._parts(page_hashes, pages):
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
        for counts in await self._redis.commands([("HGETALL", key) for key in keys]):
            sums.update({int(bit): int(pages) for bit, pages in pairs(counts).items()})
        return dict(sums)

    async def note(self, namespace_id: str, page_hash: bytes, bit: int) -> tuple[Note | None, list[int]]:
        """Return the note on a page's pool, and the shards of it that are stored while it is incomplete."""
        answers = await self._redis.send(_loss_commands(namespace_id, page_hash))
        return Losses(*map(pairs, answers)).of(bit)

    def _commit_call(self, namespace_id: str, page_hashes: Sequence[bytes], part: CommitPart) -> ScriptCall:
        hashes = [page_hashes[i] for i in part.pages]
        families = (redis_keys.pages, redis_keys.companions, redis_keys.notes)[: part.kinds]
        keys = [key for family in families for key in family(namespace_id, hashes)]
        keys.append(redis_keys.claims(namespace_id, redis_keys.bucket(hashes[0])))
        return ScriptCall("commit_pages", keys, part.plan(self._settings.companion_seconds * 1000))

    def _parts(self, page_hashes: Sequence[bytes], pages: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Cut pages into what one script takes: on a cluster, pages of one bucket."""
        groups: list[NDArray[np.int64]] = [pages]
        if self._redis.by_slot:
            hashes = page_wire.hash_rows([page_hashes[i] for i in pages])
            groups = [pages[group] for group in page_wire.by_bucket(hashes)]
        for group in groups:
            for start in range(0, len(group), PAGES_PER_SCRIPT):
                yield group[start : start + PAGES_PER_SCRIPT]


def _loss_commands(namespace_id: str, page_hash: bytes) -> list[Command]:
    """Return the commands whose answers are the `Losses` of a page."""
    (note,) = redis_keys.notes(namespace_id, [page_hash])
    (companion,) = redis_keys.companions(namespace_id, [page_hash])
    return [Command(("HGETALL", key), key) for key in (note, companion)]


def _chunk_sizes(total: int) -> Iterator[int]:
    left, step = total, 0
    while left > 0:
        size = min(left, CHUNKS[min(step, len(CHUNKS) - 1)])
        yield size
        left -= size
        step += 1


def _presence(rows: NDArray[np.uint8], pools: Mapping[str, tuple[int, HitPolicy]]) -> dict[str, BoolArray]:
    return {name: (rows[:, 1 + (bit >> 3)] & (1 << (bit & 7))) != 0 for name, (bit, _) in pools.items()}


def _by_signature(masks: Sequence[BoolArray]) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
    """Group pages by which of `masks` they are in, so that one plan serves each group."""
    if not masks:
        return
    # A bit a mask: a namespace has no more variants than that, and integers sort fast.
    signatures = np.zeros(len(masks[0]), np.uint64)
    for m, mask in enumerate(masks):
        signatures |= mask.astype(np.uint64) << np.uint64(m)
    for signature in np.unique(signatures).tolist():
        members = [m for m in range(len(masks)) if signature >> m & 1]
        if members:
            yield np.flatnonzero(signatures == signature), members
