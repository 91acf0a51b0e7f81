"""What is said of pages, as values: stored, lost, taken, refused. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from metadata.shard_bitmap import shard_bitmap

BoolArray = NDArray[np.bool_]


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


RejectionCode = Literal["anchor_missing", "negative_entry"]


class Rejected(NamedTuple):
    """A pool of a page that the index did not take, and why.

    `anchor_missing`: its anchor is not stored (O2). `negative_entry`: its claim was cleared a moment ago
    because the bytes could not be read (T2); the same commit is taken some seconds later.
    """

    page: int
    pool: str
    code: RejectionCode


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did.

    Attributes:
        committed: pages with at least one pool accepted.
        complete: pages whose named pools now have all shards.
        rejected: what was not taken, by page and pool.
    """

    committed: int
    complete: int
    rejected: list[Rejected]


@dataclass(frozen=True, slots=True)
class Lost:
    """Pages of one pool variant that could not be read.

    Attributes:
        bit: the variant's bit.
        shard_count: shards of the variant.
        shards: the shards that failed.
        pages: bool over the call's pages.
        reason: as the note will say it (`gone`, `size_mismatch`, `timeout`, `checksum`, `evicted`).
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


@dataclass(frozen=True, slots=True)
class CommitPart:
    """What one run of `commit_pages` claims: pages that all have the same claims.

    Attributes:
        pages: indices into the call's pages.
        claims: of each of them.
        anchors: what a guarded claim waits for.
        notes: whether the keys of the pages' notes go along.
    """

    pages: NDArray[np.int64]
    claims: Sequence[Claim]
    anchors: Sequence[AnchorShards]
    notes: bool = False

    @property
    def kinds(self) -> int:
        """Kinds of keys that the script needs: pages; companions where shards are counted; notes."""
        if self.notes:
            return 3
        return 2 if self.anchors or any(c.shard_count > 1 for c in self.claims) else 1

    def plan(self, companion_ms: int) -> list[bytes]:
        """Return the script's arguments."""
        whole = [c for c in self.claims if len(c.shards) == c.shard_count]
        partial = [c for c in self.claims if len(c.shards) < c.shard_count]
        sharded: list[Claim | AnchorShards] = [*partial, *self.anchors]
        places = range(2, 2 + len(sharded))
        plan = {
            "kinds": self.kinds,
            "bits": [c.bit for c in whole],
            "partial": [(c.bit, c.shard_count, at) for c, at in zip(partial, places, strict=False)],
            "anchors": [(a.bit, at) for a, at in zip(self.anchors, places[len(partial) :], strict=True)],
            "guarded": {c.bit: True for c in self.claims if c.guarded},
            "sharded": any(c.shard_count > 1 for c in whole),
            "companion_ms": companion_ms,
        }
        return [msgspec.msgpack.encode(plan), *(shard_bitmap(c.shards, c.shard_count) for c in sharded)]

    def add(self, done: Committed, answer: Sequence[Any]) -> Committed:
        """Return what is done with this part's answer on top."""
        names = {c.bit: c.pool for c in self.claims}
        flat = answer[3]
        sick = {(int(self.pages[i]), names[b]) for i, b in zip(flat[::2], flat[1::2], strict=True)}
        waiting = {(int(self.pages[i]), c.pool) for i in answer[2] for c in self.claims if c.guarded} - sick
        rejected = [
            *(Rejected(page, pool, "negative_entry") for page, pool in sick),
            *(Rejected(page, pool, "anchor_missing") for page, pool in waiting),
        ]
        return Committed(done.committed + answer[0], done.complete + answer[1], [*done.rejected, *rejected])

    def with_notes(self, places: Sequence[int]) -> CommitPart:
        """Return the part for those of its pages that need a look at their notes."""
        return replace(self, pages=self.pages[places], notes=True)
