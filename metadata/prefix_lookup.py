"""Answers "how much of this prompt is restorable?": which pools gate, what the index holds, why it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metadata.codec import MAX_PAGES
from metadata.errors import (
    FieldError,
    InvalidInput,
    RedisUnavailable,
    TooManyPages,
    UnknownEngine,
    UnknownRank,
)
from metadata.hit_counters import CountedLookup, HitCounters, Source
from metadata.hit_policy import Stop
from metadata.key_resolver import only_variant
from metadata.namespace import Namespace
from metadata.page_explanation import ExplainedPage, PageExplainer, miss_reason
from metadata.page_hash import page_hashes
from metadata.page_index import Found, PageIndex
from metadata.pools import ANCHOR, HitPolicy, PoolSpec, TrailingPages, anchor_pools, write_stages
from metadata.registered import NamespaceView, RankRecord, Variant
from metadata.registry import Registry

MAX_PLANS: Final = 4_096
EXPLAINED_PAGES: Final = 256
"""Most pages that one lookup explains; those around the page where the prefix ends."""


@dataclass(frozen=True, slots=True)
class PoolQuery:
    """What a lookup asks of one pool; None leaves it to the registration."""

    window_pages: int | None = None
    pool_id: str | None = None


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """A lookup.

    Attributes:
        page_hashes: pages asked for, in order; None where token ids are given.
        token_ids: tokens of the pages asked for, from `first_page` on; what fills no page is dropped.
        cache_salt: SGLang's per-request salt of the first page's hash.
        extra_key: SGLang's second one.
        first_page: pages of the sequence before them.
        prefix_hashes: pages right before `first_page`.
        engine_id: whose pools gate; None: the namespace's only variant of each name.
        rank: the asking rank of that engine, which must be registered; None does not say.
        pools: the sidecars that gate; None: all that are registered. The anchor always gates.
        min_pages: shorter prefixes are not worth a transfer.
        counted: whether it counts as a lookup (C1).
        request_id: counts once in ten minutes where given.
        explain: whether the answer tells the state of each page and pool, of at most `EXPLAINED_PAGES`.
    """

    page_hashes: Sequence[bytes] | None = None
    token_ids: Sequence[int] | NDArray[np.unsignedinteger[Any]] | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    first_page: int = 0
    prefix_hashes: Sequence[bytes] = ()
    engine_id: str | None = None
    rank: str | None = None
    pools: Mapping[str, PoolQuery] | None = None
    min_pages: int = 1
    counted: bool = True
    request_id: str | None = None
    explain: bool = False


@dataclass(frozen=True, slots=True)
class MissReason:
    """Why a prefix ends: the first page and pool that stopped it."""

    page: int
    pool: str | None
    reason: str
    shards: list[int] = field(default_factory=list)
    age_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The answer; lengths count pages of the call."""

    queried_pages: int
    restorable: list[tuple[int, int]]
    pools: dict[str, int]
    generations: bytes
    unchecked_window_pages: int
    miss: MissReason | None
    page_size: int
    degraded: bool = False
    explained: list[ExplainedPage] | None = None

    @property
    def hit_pages(self) -> int:
        """The longest restorable length, or 0."""
        return self.restorable[-1][1] if self.restorable else 0

    @property
    def hit_tokens(self) -> int:
        """Tokens of the longest restorable length."""
        return self.hit_pages * self.page_size

    @classmethod
    def degraded_miss(cls, query: LookupQuery) -> LookupAnswer:
        """Return the answer of a control plane that cannot reach its Redis: an honest miss, at once."""
        pages = len(query.page_hashes or ())
        return cls(pages, [], {}, b"", 0, MissReason(0, None, "degraded"), 0, degraded=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which pools gate a lookup, and what it was worked out from; as good as those still are.

    Attributes:
        view: the namespace.
        records: the engine's ranks, or None without an engine.
        variants: the variant of every pool that may gate, by name.
        gates: pool name -> (bit, policy), anchor first.
    """

    view: NamespaceView
    records: Sequence[RankRecord] | None
    variants: dict[str, Variant]
    gates: dict[str, tuple[int, HitPolicy]]


_PlanKey: TypeAlias = tuple[str, str | None, str | None, frozenset[tuple[str, PoolQuery]] | None]


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """Lookups over one registry and one index."""

    registry: Registry
    index: PageIndex
    counters: HitCounters
    explainer: PageExplainer
    _plans: dict[_PlanKey, _Plan] = field(default_factory=dict)

    async def lookup(self, tenant: str, namespace_id: str, query: LookupQuery) -> LookupAnswer:
        """Return which prefixes are restorable.

        Redis being away is an answer (`degraded`), not an error: an engine must never stall on this call.

        Raises:
            UnknownNamespace: nobody registered it, or it is another tenant's.
            UnknownEngine, UnknownRank: `engine_id`, or its `rank`, is not registered.
            UnknownPool: a pool is asked for that nobody of the namespace registered.
            AmbiguousVariant: a pool has several variants and nothing says which.
            InvalidInput: a window is given for a pool without one.
        """
        try:
            return await self._lookup(tenant, namespace_id, query)
        except RedisUnavailable:
            return LookupAnswer.degraded_miss(query)

    async def _lookup(self, tenant: str, namespace_id: str, query: LookupQuery) -> LookupAnswer:
        view = await self.registry.namespace(tenant, namespace_id)
        page_hashes = _page_hashes(view.identity, query)
        plan = await self._plan(tenant, view, query)
        variants = plan.variants
        found = await self.index.find(
            namespace_id,
            page_hashes,
            plan.gates,
            first_page=query.first_page,
            prefix_hashes=query.prefix_hashes,
        )
        runs = [(max(a, query.min_pages), b) for a, b in found.restorable.runs if b >= query.min_pages]
        miss = await self._miss(view.namespace_id, page_hashes, found, variants, runs)
        answer = LookupAnswer(
            queried_pages=len(page_hashes),
            restorable=runs,
            pools=found.restorable.pools,
            generations=found.generations,
            unchecked_window_pages=found.restorable.unchecked_window_pages,
            miss=miss,
            page_size=view.identity.page_size,
            explained=await self._explain(namespace_id, page_hashes, found, variants)
            if query.explain
            else None,
        )
        if query.counted:
            source = Source(tenant, view.namespace_id, view.identity.model, query.engine_id or "")
            why = (miss.pool or "", miss.reason) if miss is not None else None
            self.counters.count(
                CountedLookup(
                    source, answer.queried_pages, answer.hit_pages, answer.pools, why, query.request_id
                )
            )
        return answer

    async def _plan(self, tenant: str, view: NamespaceView, query: LookupQuery) -> _Plan:
        """Return which pools gate. The registry gives the same objects for a second, and so do the plans."""
        records = await self._records(tenant, query.engine_id, query.rank) if query.engine_id else None
        asked = None if query.pools is None else frozenset(query.pools.items())
        key = (view.namespace_id, query.engine_id, query.rank, asked)
        plan = self._plans.get(key)
        if plan is None or plan.view is not view or plan.records is not records:
            variants = await self._variants(tenant, view, records, query)
            plan = _Plan(view, records, variants, _gates(variants, query.pools))
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    async def _records(self, tenant: str, engine_id: str, rank: str | None) -> Sequence[RankRecord]:
        """Return the engine's ranks, read again where the asking one is not among them."""
        records = await self.registry.engine_cached(tenant, engine_id)
        if rank is None or any(r.rank == rank for r in records):
            return records
        records = await self.registry.engine(tenant, engine_id)
        if all(r.rank != rank for r in records):
            raise UnknownRank(f"rank {rank!r} of engine {engine_id!r} is not registered: register again")
        return records

    async def _variants(
        self, tenant: str, view: NamespaceView, records: Sequence[RankRecord] | None, query: LookupQuery
    ) -> dict[str, Variant]:
        """Return the variant of every pool that may gate, by name."""
        own = {} if records is None else await self._engine_specs(tenant, view, records, query.rank)
        asked = dict(query.pools or {})
        names = set(own) or {v.spec.name for v in view.variants.values()}
        chosen: dict[str, Variant] = {}
        for name in sorted(names | set(asked) | {ANCHOR}):
            wanted = asked.get(name, PoolQuery()).pool_id
            candidates = own.get(name) or view.by_name(name)
            if wanted is not None:
                candidates = [v for v in view.by_name(name) if v.spec.pool_id == wanted]
            chosen[name] = only_variant(view, name, candidates)
        return chosen

    async def _engine_specs(
        self, tenant: str, view: NamespaceView, records: Sequence[RankRecord], rank: str | None
    ) -> dict[str, list[Variant]]:
        """Return the engine's variants by name, over all its ranks: one answer serves them all (H4).

        Ranks without a lease are what an engine was before it came back with another geometry: they do not
        count while any rank lives. Where ranks disagree on a pool, the asking one's is meant.
        """
        here = [r for r in records if r.namespace_id == view.namespace_id]
        now = time.time()
        here = [r for r in here if r.lease_until > now or r.rank == rank] or here
        # Ranks share their specs, so that 512 of them do not mean thousands of pool ids to work out.
        distinct = {id(pool.spec): pool.spec for record in here for pool in record.pools}
        asking = {p.spec.name: p.spec for r in here if r.rank == rank for p in r.pools}
        specs = {
            spec.pool_id: spec for spec in (asking.get(found.name, found) for found in distinct.values())
        }
        if any(pool_id not in view.variants for pool_id in specs):
            view = await self.registry.namespace(tenant, view.namespace_id, fresh=True)
        found: dict[str, list[Variant]] = {}
        for pool_id, spec in specs.items():
            known = view.variants.get(pool_id)
            if known is None:  # purged while the engine was there: it must register again
                engine_id = records[0].engine_id
                raise UnknownEngine(
                    f"engine {engine_id!r} is not registered in the namespace: register again"
                )
            found.setdefault(spec.name, []).append(Variant(spec, known.bit, known.registered))
        return found

    async def _explain(
        self,
        namespace_id: str,
        page_hashes: Sequence[bytes],
        found: Found,
        variants: Mapping[str, Variant],
    ) -> list[ExplainedPage]:
        """Tell the state of the gating pools around the page where the prefix ends."""
        end = found.restorable.hit_pages
        first = max(0, min(end - EXPLAINED_PAGES // 2, len(page_hashes) - EXPLAINED_PAGES))
        gating = {name: variants[name] for name in found.presence}
        return await self.explainer.explain(
            namespace_id, page_hashes[first : first + EXPLAINED_PAGES], gating, first_page=first
        )

    async def _miss(
        self,
        namespace_id: str,
        page_hashes: Sequence[bytes],
        found: Found,
        variants: Mapping[str, Variant],
        runs: Sequence[tuple[int, int]],
    ) -> MissReason | None:
        if found.restorable.hit_pages > 0 and not runs:
            return MissReason(found.restorable.hit_pages, None, "below_min_pages")
        stop = found.restorable.stop
        if stop is None:
            return None
        variant = variants[stop.pool]
        if variant.missing_shards:
            return MissReason(stop.page, stop.pool, "shard_unregistered", variant.missing_shards)
        if stop.kind == "window_incomplete":
            return MissReason(stop.page, stop.pool, "window_incomplete")
        return await self._absence(namespace_id, page_hashes[stop.page], found, variant, stop)

    async def _absence(
        self, namespace_id: str, page_hash: bytes, found: Found, variant: Variant, stop: Stop
    ) -> MissReason:
        if stop.page == 0 and found.first_losses is not None:
            note, stored = found.first_losses.of(variant.bit)
        else:
            note, stored = await self.index.note(namespace_id, page_hash, variant.bit)
        if note is not None:
            age = max(0, int(time.time()) - note.at)
            return MissReason(stop.page, stop.pool, miss_reason(note.reason), note.shards, age)
        if stored:
            absent = sorted(set(range(variant.spec.shard_count)) - set(stored))
            return MissReason(stop.page, stop.pool, "shard_missing", absent)
        others = [mask for name, mask in found.presence.items() if name != stop.pool]
        if stop.pool == ANCHOR and any(bool(mask[stop.page]) for mask in others):
            return MissReason(stop.page, stop.pool, "anchor_missing")
        return MissReason(stop.page, stop.pool, "not_stored")


def _page_hashes(identity: Namespace, query: LookupQuery) -> Sequence[bytes]:
    if query.token_ids is None:
        return query.page_hashes or ()
    if query.first_page and not query.prefix_hashes:
        detail = "is needed with token_ids when first_page is not 0: its last page continues the hash chain"
        raise InvalidInput("the hash chain is broken", [FieldError("prefix_hashes", "missing", detail)])
    pages = len(query.token_ids) // identity.page_size
    if pages > MAX_PAGES:
        detail = f"has {pages} pages of {identity.page_size} tokens, one call takes {MAX_PAGES}"
        raise TooManyPages("split the call", [FieldError("token_ids", "too_many_pages", detail)])
    seeded = not query.first_page
    return page_hashes(
        query.token_ids,
        identity.page_size,
        hash_kind=identity.hash_kind,
        cache_salt=query.cache_salt if seeded else None,
        extra_key=query.extra_key if seeded else None,
        previous=None if seeded else query.prefix_hashes[-1],
    )


def _gates(
    variants: Mapping[str, Variant], asked: Mapping[str, PoolQuery] | None
) -> dict[str, tuple[int, HitPolicy]]:
    """Return the gating pools in the order in which a miss names them: anchor first (O1's order)."""
    specs: dict[str, PoolSpec] = {name: v.spec for name, v in variants.items()}
    wanted = set(specs) if asked is None else set(asked)
    wanted |= set(anchor_pools(specs))
    gates: dict[str, tuple[int, HitPolicy]] = {}
    for stage in write_stages(specs):
        for name in stage:
            if name in wanted:
                query = (asked or {}).get(name, PoolQuery())
                gates[name] = (variants[name].bit, _policy(name, specs[name].hit_policy, query))
    return gates


def _policy(name: str, registered: HitPolicy, query: PoolQuery) -> HitPolicy:
    if query.window_pages is None:
        return registered
    if not isinstance(registered, TrailingPages):
        detail = f"is given, but the pool is registered as {registered.kind}: leave it out"
        raise InvalidInput(
            "the pool has no window", [FieldError(f"pools.{name}.window_pages", "no_window", detail)]
        )
    return TrailingPages(query.window_pages)
