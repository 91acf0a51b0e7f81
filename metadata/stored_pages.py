"""What a rank says of pages: stored (commit) and gone (missing), by pool name and shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from metadata.errors import FieldError, InvalidInput, UnknownPool, UnknownRank
from metadata.hit_counters import CountedPages, HitCounters, Source
from metadata.page_claims import AnchorShards, Claim, Committed, Lost
from metadata.page_index import PageIndex
from metadata.page_runs import PageSet, runs_to_mask
from metadata.pools import RankPool, anchor_pools
from metadata.quota_rules import Amount
from metadata.quotas import TenantQuotas
from metadata.registered import NamespaceView, RankRecord
from metadata.registry import Registry

EVICTED: Final = "evicted"
"""The one reason that needs no reader: the store itself says that the bytes are gone."""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages and shards of one pool.

    Attributes:
        pages: `"all"` or inclusive runs of indices into the call's page hashes.
        shards: shards of the variant.
        reason: for missing pages, what the reader saw.
        pool_id: the variant that was written or read; None means the one that the rank registered last.
    """

    pages: PageSet
    shards: tuple[int, ...]
    reason: str = ""
    pool_id: str | None = None


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Commits and reports over one registry and one index."""

    registry: Registry
    index: PageIndex
    counters: HitCounters
    quotas: TenantQuotas | None = None

    async def commit(
        self,
        tenant: str,
        namespace_id: str,
        who: tuple[str, str],
        page_hashes: Sequence[bytes],
        stored: Mapping[str, PoolPages],
    ) -> Committed:
        """Claim what a rank has stored and confirmed (O2); idempotent.

        Args:
            tenant: the caller's.
            namespace_id: the namespace.
            who: engine id and rank.
            page_hashes: pages of the call.
            stored: by pool name.

        Raises:
            UnknownNamespace, UnknownEngine, UnknownRank: register first.
            UnknownPool: the rank did not register it.
            InvalidInput: a shard that the rank does not own, a pool without bytes, or pages outside the call.
            QuotaExceeded: the tenant would claim more than it may; nothing is claimed.
        """
        view, record = await self._rank(tenant, namespace_id, who, stored)
        specs = record.specs
        anchors = anchor_pools(specs)
        claims: list[Claim] = []
        any_pool, size = np.zeros(len(page_hashes), np.bool_), 0
        for name, item in stored.items():
            pool = _own_pool(record, name, item, "stored")
            mask = runs_to_mask(item.pages, len(page_hashes), field=f"stored.{name}.pages")
            bit, count = view.variants[pool.spec.pool_id].bit, pool.spec.shard_count
            claims.append(Claim(name, bit, count, item.shards, mask, guarded=name not in anchors))
            any_pool |= mask
            size += int(mask.sum()) * pool.spec.bytes_per_page * len(item.shards)
        if self.quotas is not None:
            await self.quotas.admit(tenant, Amount(int(any_pool.sum()), size))
        return await self.index.commit(
            # Looked up one by one from here on, which a list does three times faster than one run of bytes.
            namespace_id,
            list(page_hashes),
            claims,
            _anchor_shards(view, record, anchors),
        )

    async def missing(
        self,
        tenant: str,
        namespace_id: str,
        who: tuple[str, str],
        page_hashes: Sequence[bytes],
        missing: Mapping[str, PoolPages],
        *,
        generations: bytes | None,
    ) -> tuple[int, int]:
        """Clear the claims of what a rank could not read (T2).

        Args:
            tenant: the caller's.
            namespace_id: the namespace.
            who: engine id and rank.
            page_hashes: pages of the call.
            missing: by pool name.
            generations: one byte a page as the lookup gave them; None clears whatever is claimed.

        Returns:
            Claims cleared, and pages left alone because their generation was another.

        Raises:
            UnknownNamespace, UnknownEngine, UnknownRank: register first.
            UnknownPool: the rank did not register it.
            InvalidInput: a shard that the rank does not own, a pool without bytes, or pages outside the call.
        """
        view, record = await self._rank(tenant, namespace_id, who, missing)
        lost: list[Lost] = []
        any_pool = np.zeros(len(page_hashes), np.bool_)
        counts: dict[str, int] = {}
        for name, item in missing.items():
            pool = _own_pool(record, name, item, "missing")
            mask = runs_to_mask(item.pages, len(page_hashes), field=f"missing.{name}.pages")
            bit, count = view.variants[pool.spec.pool_id].bit, pool.spec.shard_count
            lost.append(Lost(bit, count, item.shards, mask, item.reason))
            if item.reason != EVICTED:  # nobody was promised what the store evicts
                any_pool |= mask
                counts[name] = int(mask.sum())
        answer = await self.index.clear(namespace_id, list(page_hashes), lost, generations)
        if counts:
            source = Source(tenant, namespace_id, view.identity.model, record.engine_id)
            self.counters.count(CountedPages(source, "lost_pages", {"": int(any_pool.sum()), **counts}))
        return answer

    async def _rank(
        self, tenant: str, namespace_id: str, who: tuple[str, str], pools: Mapping[str, PoolPages]
    ) -> tuple[NamespaceView, RankRecord]:
        view = await self.registry.namespace(tenant, namespace_id)
        record = await self.registry.rank(tenant, *who)
        known = all(_is_variant(record.pool(name), item) for name, item in pools.items())
        if not known or record.namespace_id != namespace_id:
            record = await self.registry.rank(tenant, *who, fresh=True)
        if record.namespace_id != namespace_id:
            detail = f"is registered in namespace {record.namespace_id}"
            raise InvalidInput("the rank is elsewhere", [FieldError("rank", "other_namespace", detail)])
        if any(p.spec.pool_id not in view.variants for p in record.pools):
            view = await self.registry.namespace(tenant, namespace_id, fresh=True)
            if any(p.spec.pool_id not in view.variants for p in record.pools):  # purged since it registered
                raise UnknownRank(f"rank {record.rank!r} of engine {record.engine_id!r} must register again")
        return view, record


def _is_variant(pool: RankPool | None, item: PoolPages) -> bool:
    return pool is not None and item.pool_id in {None, pool.spec.pool_id}


def _own_pool(record: RankRecord, name: str, item: PoolPages, field: str) -> RankPool:
    pool = record.pool(name)
    if pool is None:
        detail = f"rank {record.rank!r} of engine {record.engine_id!r} did not register pool {name!r}"
        raise UnknownPool(detail, [FieldError(f"{field}.{name}", "unknown_pool", detail)])
    if pool.spec.logical:
        raise InvalidInput(
            "the pool has no bytes", [FieldError(f"{field}.{name}", "logical", "is logical and never stored")]
        )
    if not _is_variant(pool, item):
        # Said by an earlier life of the rank: true of another variant, and of no page of this one.
        detail = f"is {item.pool_id}, the rank registered {pool.spec.pool_id} since; register again"
        raise InvalidInput(
            "another variant", [FieldError(f"{field}.{name}.pool_id", "other_variant", detail)]
        )
    # Whoever needs room in a store evicts what anybody wrote, and is the only one to know.
    allowed = range(pool.spec.shard_count) if item.reason == EVICTED else pool.owned_shards
    foreign = sorted(set(item.shards) - set(allowed))
    if foreign or not item.shards:
        detail = f"has {foreign or 'no shard'}, the rank owns {list(pool.owned_shards)}"
        raise InvalidInput("shards of others", [FieldError(f"{field}.{name}.shards", "not_owned", detail)])
    return pool


def _anchor_shards(view: NamespaceView, record: RankRecord, anchors: Sequence[str]) -> list[AnchorShards]:
    """Return the anchor's shards that this rank owns; its sidecars wait for them (O2)."""
    owned = [p for p in record.pools if p.spec.name in anchors and p.owned_shards]
    return [
        AnchorShards(view.variants[p.spec.pool_id].bit, p.spec.shard_count, p.owned_shards) for p in owned
    ]
