"""Names of everything caketin keeps in Redis.

The part in braces decides the slot on a cluster, so that one script finds all its keys on one node. It holds
only printable characters: raw hash bytes inside braces may contain `}` and split a page from its companion.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Final

SCHEMA_VERSION: Final = "1"
SCHEMA: Final = "ct:schema"
OPEN_JOBS: Final = "ct:jobs"
NAMESPACES: Final = "ct:namespaces"
"""All namespaces, for the sweep."""

COUNTING: Final = "ct:{hits}:processes"
"""Processes that count: process -> number and time of its last flush, and its interval."""

COUNTING_GAPS: Final = "ct:{hits}:gaps"
"""The same of processes that went silent without a goodbye."""

BUCKETS: Final = 64


def bucket(page_hash: bytes) -> int:
    """Return which of the 64 buckets (cluster slots) of its namespace a page lives in."""
    return page_hash[0] % BUCKETS


def page_prefix(namespace_id: str) -> tuple[bytes, bytes]:
    """Return what stands before and after the two digits of the bucket in a page's key."""
    return f"ct:{{{namespace_id}:".encode(), b"}:p:"


def _page_family(namespace_id: str, kind: str, page_hashes: Sequence[bytes]) -> list[bytes]:
    prefixes = _prefixes(namespace_id, kind)
    return [prefixes[h[0]] + h for h in page_hashes]


@functools.lru_cache(maxsize=256)
def _prefixes(namespace_id: str, kind: str) -> list[bytes]:
    """Return what stands before the hash, by its first byte."""
    return [f"ct:{{{namespace_id}:{b % BUCKETS:02d}}}:{kind}:".encode() for b in range(256)]


def pages(namespace_id: str, page_hashes: Sequence[bytes]) -> list[bytes]:
    """Return the key of each page's value: one generation byte, then one bit a pool variant."""
    return _page_family(namespace_id, "p", page_hashes)


def companions(namespace_id: str, page_hashes: Sequence[bytes]) -> list[bytes]:
    """Return the key of each page's shard bitmaps while some pool of the page is incomplete."""
    return _page_family(namespace_id, "s", page_hashes)


def notes(namespace_id: str, page_hashes: Sequence[bytes]) -> list[bytes]:
    """Return the key of each page's notes: why and when a claim was cleared."""
    return _page_family(namespace_id, "n", page_hashes)


def claims(namespace_id: str, in_bucket: int) -> bytes:
    """Return the key of a bucket's counter of complete pages: bit -> pages."""
    return f"ct:{{{namespace_id}:{in_bucket:02d}}}:claims".encode()


def namespace(namespace_id: str) -> str:
    """Return the key of a namespace's identity."""
    return f"ct:{{{namespace_id}}}:identity"


def variants(namespace_id: str) -> str:
    """Return the key of a namespace's pool variants: pool id -> bit and description."""
    return f"ct:{{{namespace_id}}}:variants"


def shards(namespace_id: str) -> str:
    """Return the key of the shards that some rank registered: pool id -> bitmap."""
    return f"ct:{{{namespace_id}}}:shards"


def members(namespace_id: str) -> str:
    """Return the key of a namespace's registered ranks: `engine/rank` by the end of their lease."""
    return f"ct:{{{namespace_id}}}:members"


def member_pools(namespace_id: str) -> str:
    """Return the key of those ranks' pools: `engine/rank` -> incarnation and pool ids."""
    return f"ct:{{{namespace_id}}}:member-pools"


def namespaces(tenant: str) -> str:
    """Return the key of a tenant's namespace ids, in the order of their letters."""
    return f"ct:namespaces:{_digest(tenant)}"


def engines(tenant: str) -> str:
    """Return the key of a tenant's engine ids, in the order of their letters."""
    return f"ct:engines:{_digest(tenant)}"


def ranks(tenant: str, engine_id: str) -> str:
    """Return the key of an engine's ranks: rank -> record."""
    return f"ct:{{{_digest(tenant)}:{engine_id}}}:ranks"


def retired(tenant: str, engine_id: str) -> str:
    """Return the key of the incarnations that a newer one has replaced."""
    return f"ct:{{{_digest(tenant)}:{engine_id}}}:retired"


def hits(step: int, start: int) -> str:
    """Return the key of the hit counters of one time bucket.

    All counters share one slot, so that a flush is one step over all of them.
    """
    return f"ct:{{hits}}:{step}:{start}"


def counted_request(tenant: str, request_id: str) -> bytes:
    """Return the key that remembers that a lookup was counted; raw and short, for there may be many."""
    named = hashlib.sha256(f"{_digest(tenant)} {request_id}".encode()).digest()
    return b"ct:{hits}:r:" + named[:16]


def namespace_keys_pattern(namespace_id: str) -> str:
    """Return the pattern that all keys of a namespace's pages match, and no other key."""
    return f"ct:{{{namespace_id}:*"


def job(job_id: str) -> str:
    """Return the key of a job's state."""
    return f"ct:job:{job_id}"


def job_lease(job_id: str) -> str:
    """Return the key that exists while a process works on a job."""
    return f"ct:job:{job_id}:lease"


def _digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:16]
