"""Names of everything caketin keeps in Redis.

The part in braces decides the slot on a cluster, so that one script finds all its keys on one node. It holds
only printable characters: raw hash bytes inside braces may contain `}` and split a page from its companion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

SCHEMA_VERSION: Final = "1"
SCHEMA: Final = "ct:schema"
NAMESPACES: Final = "ct:namespaces"
BUCKETS: Final = 64


def bucket(page_hash: bytes) -> int:
    """Return which of the 64 buckets (cluster slots) of its namespace a page lives in."""
    return page_hash[0] % BUCKETS


def _page_family(namespace_id: str, kind: str, page_hashes: Sequence[bytes]) -> list[bytes]:
    prefixes = [f"ct:{{{namespace_id}:{b:02d}}}:{kind}:".encode() for b in range(BUCKETS)]
    return [prefixes[h[0] % BUCKETS] + h for h in page_hashes]


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


def members(namespace_id: str, pool_id: str) -> str:
    """Return the key of the set of engines that registered a pool variant."""
    return f"ct:{{{namespace_id}}}:members:{pool_id}"


def engines(tenant: str) -> str:
    """Return the key of the set of a tenant's engine ids."""
    return f"ct:engines:{_digest(tenant)}"


def ranks(tenant: str, engine_id: str) -> str:
    """Return the key of an engine's ranks: rank -> record."""
    return f"ct:{{{_digest(tenant)}:{engine_id}}}:ranks"


def retired(tenant: str, engine_id: str) -> str:
    """Return the key of the incarnations that a newer one has replaced."""
    return f"ct:{{{_digest(tenant)}:{engine_id}}}:retired"


def hits(step: int, start: int) -> str:
    """Return the key of the hit counters of one time bucket."""
    return f"ct:hits:{step}:{start}"


def counted_request(tenant: str, request_id: str) -> str:
    """Return the key that remembers that a lookup was counted."""
    return f"ct:counted:{_digest(tenant)}:{hashlib.sha256(request_id.encode()).hexdigest()[:32]}"


def _digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:16]
