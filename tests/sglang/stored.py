"""Reaching into the store behind an engine's back: removing and changing what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane.engines.sglang import CaketinStorage
from metadata.codec import PageHashes
from metadata.namespace import HashKind
from metadata.page_hash import page_hashes


class Stored:
    """The objects of a prompt, as one engine names them."""

    def __init__(self, engine: Any, tokens: Sequence[int], hash_kind: HashKind = "plain") -> None:
        self._engine = engine
        self.hashes = PageHashes.of(page_hashes(list(tokens), engine.config.page_size, hash_kind=hash_kind))

    @property
    def backend(self) -> CaketinStorage:
        return self._engine.backend

    @property
    def joined(self) -> Any:
        link = self.backend._link
        assert link is not None
        assert link.joined is not None
        return link.joined

    def keys(self, pool: str, pages: Sequence[int] | None = None) -> list[str]:
        chosen = self.hashes if pages is None else [self.hashes[p] for p in pages]
        return self.joined.pools.bound[pool].keys(self.joined.namespace_id, chosen)

    def there(self, pool: str) -> list[bool]:
        """Which pages have all their objects."""
        bound = self.joined.pools.bound[pool]
        found = self.joined.store.exists(self.keys(pool))
        return [bool(x) for x in found.reshape(len(self.hashes), bound.objects_per_page).all(axis=1)]

    def remove(self, pool: str, pages: Sequence[int]) -> None:
        keys = self.keys(pool, pages)
        assert self.joined.store.remove(keys) == len(keys)

    def lookup(self, pools: Sequence[str] = (), purpose: str = "probe") -> Any:
        from dataplane.messages.control import PoolQuery

        return self.backend._link.client.lookup(
            self.joined.namespace_id, self.hashes, pools={p: PoolQuery() for p in pools}, purpose=purpose
        )
