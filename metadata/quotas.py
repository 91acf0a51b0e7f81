"""Keeps each tenant's claims within its quota, off the path of a commit.

What a tenant has claimed is added up over its namespaces from the index's counters of complete pages, at most
once a second in each process. A commit is judged by the last sum, so a tenant may go over by what it commits
within that time. Claims of pages that the store has evicted count until a reader or the sweep clears them.
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
"""A sum is taken anew for the first commit after that time, which does not wait for it."""
STALE_SECONDS: Final = 10.0
"""A commit waits rather than be judged by an older sum."""
MAX_TENANTS: Final = 4_096

QuotaOf: TypeAlias = Callable[[str], Quota]


@dataclass(slots=True)
class _Sum:
    """What a tenant had claimed, and when; `taking` is the sum that is being taken."""

    amount: Amount | None = None
    at: float = float("-inf")
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
            # The sum may be from before a purge: look again before a refusal, once a second at most.
            problem = quota.excess(await self.claimed(tenant, within=FRESH_SECONDS), more)
        if problem is not None:
            raise QuotaExceeded(problem)

    async def claimed(self, tenant: str, *, within: float = STALE_SECONDS) -> Amount:
        """Return what a tenant has claimed, as of at most `within` seconds ago.

        Raises:
            RedisUnavailable: the claims cannot be counted.
        """
        if tenant not in self._sums and len(self._sums) >= MAX_TENANTS:
            self._forget()
        found = self._sums.setdefault(tenant, _Sum())
        age = time.monotonic() - found.at
        if age >= FRESH_SECONDS and found.taking is None:
            found.taking = asyncio.create_task(self._take(tenant, found))
            # Where nobody waits for the sum, nobody is there to learn that Redis was away.
            found.taking.add_done_callback(lambda task: task.cancelled() or task.exception())
        if found.amount is not None and age < within:
            return found.amount
        # A caller that gives up must not end the count for those who wait with it.
        return await asyncio.shield(found.taking) if found.taking is not None else Amount()

    async def _take(self, tenant: str, found: _Sum) -> Amount:
        try:
            found.amount = await self._count(tenant)
            found.at = time.monotonic()
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
            if found.taking is None and now - found.at > STALE_SECONDS:
                del self._sums[tenant]
