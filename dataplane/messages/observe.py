"""Calls that look at the control plane: engines, namespaces, jobs, hit rates, health."""

from __future__ import annotations

import msgspec

from dataplane.messages.control import Count, PartMessage, Policy
from dataplane.messages.wire import Message


class EngineSummary(Message, frozen=True, kw_only=True):
    """An engine in a list."""

    engine_id: str
    namespaces: list[str]
    ranks: list[str]


class EngineList(Message, frozen=True, kw_only=True):
    """`GET /v1/engines`."""

    engines: list[EngineSummary]
    next_cursor: str | None


class RankPoolView(Message, frozen=True, kw_only=True):
    """A pool of a registered rank."""

    name: str
    pool_id: str
    shard_count: Count
    owned_shards: list[Count]
    host_bytes: Count | None


class RankView(Message, frozen=True, kw_only=True):
    """A registered rank."""

    rank: str
    namespace_id: str
    incarnation: str
    epoch: Count
    lease_seconds_left: Count
    min_pages: Count
    labels: dict[str, str]
    pools: list[RankPoolView]


class EngineView(Message, frozen=True, kw_only=True):
    """`GET /v1/engines/{engine_id}`."""

    engine_id: str
    ranks: list[RankView]


class NamespaceSummary(Message, frozen=True, kw_only=True):
    """A namespace in a list."""

    namespace_id: str
    tenant: str
    model: str
    revision: str
    page_size: Count
    hash_kind: str
    salt_fingerprint: str | None
    engines: Count


class NamespaceList(Message, frozen=True, kw_only=True):
    """`GET /v1/namespaces`."""

    namespaces: list[NamespaceSummary]
    next_cursor: str | None


class PoolVariantView(Message, frozen=True, kw_only=True):
    """One pool variant of a namespace."""

    name: str
    pool_id: str
    bit: Count | None
    logical: bool
    parts: list[PartMessage]
    object_layout: str
    hit_policy: Policy
    indices_from: str | None
    shards_registered: Count
    shards_expected: Count
    engines: Count
    pages: Count
    bytes: Count


class NamespaceView(NamespaceSummary, frozen=True, kw_only=True):
    """`GET /v1/namespaces/{ns}`."""

    pools: list[PoolVariantView]
    pages: Count
    bytes: Count


class PurgeResult(Message, frozen=True, kw_only=True):
    """Answer (202) to `DELETE /v1/namespaces/{ns}`."""

    job_id: str


class Job(Message, frozen=True, kw_only=True):
    """`GET /v1/jobs/{job_id}`."""

    state: str
    done: Count
    total: Count
    error: str | None


class HitSeries(Message, frozen=True, kw_only=True):
    """One row: a value a bucket, oldest first."""

    labels: dict[str, str]
    queried_pages: list[Count]
    hit_pages: list[Count]
    read_pages: list[Count]
    lost_pages: list[Count]
    misses: dict[str, list[Count]]


class HitGap(Message, frozen=True, kw_only=True):
    """When the counts of a control-plane process that was killed are missing, Unix seconds."""

    start: Count
    end: Count


class HitRates(Message, frozen=True, kw_only=True):
    """`GET /v1/hit-rates`; buckets are multiples of `step`, UTC."""

    start: Count
    step: Count
    partial_last: bool
    series: list[HitSeries]
    gaps: list[HitGap] = msgspec.field(default_factory=list)


class Health(Message, frozen=True, kw_only=True):
    """`GET /healthz`: the process runs."""

    status: str


class Check(Message, frozen=True, kw_only=True):
    """One thing that must hold before the process takes work."""

    name: str
    ok: bool
    detail: str


class Readiness(Message, frozen=True, kw_only=True):
    """`GET /readyz`: 200 when ready, else 503, and what is wrong."""

    ready: bool
    checks: list[Check]
