"""Keeps each tenant's claims within its quota, off the path of most commits.

What a tenant has claimed is added up over its namespaces from the index's counters of complete pages, at most
once a second in each process: one commit a second waits for it, the others are judged by the last sum. So a
tenant may go over by what it commits within that second. Claims of pages that the store has evicted count
until a reader or the sweep clears them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from metadata.errors import QuotaExceeded
from metadata.page_index import PageIndex
from metadata.quota_rules import Amount, Quota
from metadata.registry import Registry

FRESH_SECONDS: Final = 1.0
"""How long a sum is used."""
COUNTING_SHARE: Final = 20
"""A sum is used for so many times as long as it took, so that many namespaces do not keep Redis counting."""
MAX_TENANTS: Final = 4_096

QuotaOf: TypeAlias = Callable[[str], Quota]


@dataclass(slots=True)
class _Sum:
    """What a tenant had claimed, until when that is used, and the sum that is being taken."""

    amount: Amount = field(default_factory=Amount)
    fresh_until: float = float("-inf")
    taking: asyncio.Task[Amount] | None = None


@dataclass(frozen=True)
class TenantQuotas:
    """Quotas over one registry and one index.

    Attributes:
        registry: whose namespaces are added up.
        index: whose counters.
        quota_of: bounds of a tenant; asked at each commit, so that they can change.
    """

    registry: Registry
    index: PageIndex
    quota_of: QuotaOf
    _sums: dict[str, _Sum] = field(default_factory=dict)

    async def admit(self, tenant: str, more: Amount) -> None:
        """Check that a commit fits.

        Args:
            tenant: whose it is.
            more: at most what it adds; pages that are claimed already count as if they were new.

        Raises:
            QuotaExceeded: it does not; nothing of it was done.
            RedisUnavailable: the claims cannot be counted.
        """
        quota = self.quota_of(tenant)
        if not quota.is_bound:
            return
        problem = quota.excess(await self.claimed(tenant), more)
        if problem is not None:
            raise QuotaExceeded(problem)

    async def claimed(self, tenant: str) -> Amount:
        """Return what a tenant had claimed a second ago or later.

        Raises:
            RedisUnavailable: the claims cannot be counted.
        """
        if tenant not in self._sums and len(self._sums) >= MAX_TENANTS:
            self._forget()
        found = self._sums.setdefault(tenant, _Sum())
        if time.monotonic() < found.fresh_until:
            return found.amount
        if found.taking is None:
            found.taking = asyncio.create_task(self._take(tenant, found))
            # Whoever waits may have left by the time that Redis turns out to be away.
            found.taking.add_done_callback(lambda task: task.cancelled() or task.exception())
        # A caller that leaves must not end the sum for those who wait with it.
        return await asyncio.shield(found.taking)

    async def _take(self, tenant: str, found: _Sum) -> Amount:
        started = time.monotonic()
        try:
            found.amount = await self._count(tenant)
            now = time.monotonic()
            found.fresh_until = now + max(FRESH_SECONDS, COUNTING_SHARE * (now - started))
        finally:
            found.taking = None
        return found.amount

    async def _count(self, tenant: str) -> Amount:
        total = Amount()
        for view in await self.registry.namespaces(tenant):
            claimed = await self.index.claimed_pages(view.namespace_id)
            pages, size = 0, 0
            for variant in view.variants.values():
                here = claimed.get(variant.bit, 0)
                pages = max(pages, here)
                size += here * variant.spec.bytes_per_page * variant.spec.shard_count
            total += Amount(pages, size)
        return total

    def _forget(self) -> None:
        now = time.monotonic()
        for tenant, found in list(self._sums.items()):
            if found.taking is None and found.fresh_until < now:
                del self._sums[tenant]
