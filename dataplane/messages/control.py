"""The calls to the control plane.

Fields that a request always sends have no default or are sent with it; those that may be left out stand in
structs with `omit_defaults`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from dataplane.messages.wire import Message, Request
from metadata.codec import ENGINE_ID, MAX_INTEGER, POOL_NAME, RANK, PageHashes, TokenIds
from metadata.pools import AllPages, BlockGroups, HitPolicy, RankPool, TrailingPages

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
EngineId: TypeAlias = Annotated[str, Meta(pattern=rf"^{ENGINE_ID}\Z")]
RankName: TypeAlias = Annotated[str, Meta(pattern=rf"^{RANK}\Z")]
PoolName: TypeAlias = Annotated[str, Meta(pattern=rf"^{POOL_NAME}\Z")]
Run: TypeAlias = tuple[Count, Count]
Runs: TypeAlias = list[Run]
PageSet: TypeAlias = Literal["all"] | Runs


class AllPagesPolicy(Request, frozen=True, tag_field="kind", tag="all_pages"):
    """A prefix of n pages needs all n."""


class TrailingPagesPolicy(Request, frozen=True, kw_only=True, tag_field="kind", tag="trailing_pages"):
    """A prefix of n pages needs the last `window_pages` of them."""

    window_pages: Count


class BlockGroupsPolicy(Request, frozen=True, kw_only=True, tag_field="kind", tag="block_groups"):
    """Gates nothing; reports the pages that the leading complete groups cover."""

    block: Count
    group: Count


Policy: TypeAlias = AllPagesPolicy | TrailingPagesPolicy | BlockGroupsPolicy


def policy_message(policy: HitPolicy) -> Policy:
    """Return the domain's hit policy as a message."""
    match policy:
        case AllPages():
            return AllPagesPolicy()
        case TrailingPages(window):
            return TrailingPagesPolicy(window_pages=window)
        case BlockGroups(block, group):
            return BlockGroupsPolicy(block=block, group=group)


class PartMessage(Request, frozen=True, kw_only=True):
    """One buffer of a shard of a page."""

    part: str
    dtype: str
    bytes: Count


class PoolMessage(Request, frozen=True, kw_only=True, omit_defaults=True):
    """One pool as one rank holds it."""

    name: str
    logical: bool
    parts: list[PartMessage]
    shard_count: Count
    owned_shards: list[Count]
    hit_policy: Policy
    indices_from: str | None
    object_layout: str
    host_bytes: Count | None = None

    @classmethod
    def of(cls, pool: RankPool) -> PoolMessage:
        """Return the domain's pool as a message."""
        spec = pool.spec
        return cls(
            name=spec.name,
            logical=spec.logical,
            parts=[PartMessage(part=p.part, dtype=p.dtype, bytes=p.bytes) for p in spec.parts],
            shard_count=spec.shard_count,
            owned_shards=list(pool.owned_shards),
            hit_policy=policy_message(spec.hit_policy),
            indices_from=spec.indices_from,
            object_layout=spec.object_layout,
            host_bytes=pool.host_bytes,
        )


class NamespaceMessage(Request, frozen=True, kw_only=True):
    """What an engine's page hashes mean; the tenant comes from the token."""

    model: str
    revision: str
    page_size: Count
    hash_kind: str = "plain"
    namespace_salt: str | None = None


class RegisterRequest(Request, frozen=True, kw_only=True):
    """`PUT /v1/engines/{engine_id}/ranks/{rank}`."""

    incarnation: str
    namespace: NamespaceMessage
    pools: list[PoolMessage]
    min_pages: Count = 1
    labels: dict[str, str] = field(default_factory=dict)


class PoolGrant(Message, frozen=True, kw_only=True):
    """What a rank learns of one of its pools; `suffixes` in the order of its buffers."""

    pool_id: str
    bit: Count | None
    suffixes: list[str]
    engines: Count


class MooncakeAccess(Message, frozen=True, kw_only=True, tag_field="kind", tag="mooncake"):
    """How to reach the Mooncake store."""

    master: str
    metadata: str
    protocol: str
    devices: str
    key_prefix: str


class FileAccess(Message, frozen=True, kw_only=True, tag_field="kind", tag="file"):
    """Where the file store is."""

    path: str
    max_bytes: Count | None = None
    key_prefix: str


class RegisterResult(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to a registration: 201 new, 200 renewed."""

    namespace_id: str
    tenant: str | None = None
    epoch: Count
    lease_seconds: Count
    pools: dict[str, PoolGrant]
    store: MooncakeAccess | FileAccess


class HeartbeatRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/engines/{engine_id}/ranks/{rank}/heartbeat`."""

    incarnation: str
    epoch: Count


class HeartbeatResult(Message, frozen=True, kw_only=True):
    """The rank lives for another `lease_seconds`."""

    lease_seconds: Count


class PoolQuery(Request, frozen=True, kw_only=True, omit_defaults=True):
    """What a lookup asks of one pool; left out, the registration says."""

    window_pages: Count | None = None
    pool_id: str | None = None


class LookupRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/namespaces/{ns}/lookup`; exactly one of `page_hashes` and `token_ids`."""

    page_hashes: PageHashes | None = None
    token_ids: TokenIds | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    first_page: Count = 0
    prefix_hashes: PageHashes = PageHashes()
    engine_id: EngineId | None = None
    rank: RankName | None = None
    pools: dict[PoolName, PoolQuery] | None = None
    min_pages: Count = 1
    purpose: Literal["prefetch", "route", "probe"] = "prefetch"
    request_id: str | None = None
    explain: bool = False


class Miss(Message, frozen=True, kw_only=True):
    """Why `hit_pages` is not `queried_pages`."""

    page: Count
    pool: str | None
    reason: str
    shards: list[Count]
    age_seconds: Count | None


class MissNote(Message, frozen=True, kw_only=True):
    """What was left when a claim was cleared."""

    reason: str
    age_seconds: Count


class PoolState(Message, frozen=True, kw_only=True):
    """One pool of one page; `shards` are the missing ones."""

    state: str
    shards: list[Count]
    note: MissNote | None


class ExplainedPage(Message, frozen=True, kw_only=True):
    """One page of an explained lookup."""

    page: Count
    pools: dict[str, PoolState]


class LookupResult(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to a lookup. Lengths count pages of the call."""

    queried_pages: Count
    hit_pages: Count
    hit_tokens: Count
    restorable: Runs
    pools: dict[str, Count]
    generation: bytes
    advisory: bool
    degraded: bool
    unchecked_window_pages: Count
    miss: Miss | None
    pages: list[ExplainedPage] | None = None


class StoredPool(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Pages of one pool whose objects are confirmed, on these shards; `pool_id` says of which variant."""

    pages: PageSet
    shards: list[Count]
    pool_id: str | None = None


class CommitRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/namespaces/{ns}/commit`."""

    engine_id: EngineId
    rank: RankName
    page_hashes: PageHashes
    stored: dict[PoolName, StoredPool]


class Rejection(Message, frozen=True, kw_only=True):
    """A page of a pool that the index did not take."""

    page: Count
    pool: str
    code: str


class CommitResult(Message, frozen=True, kw_only=True):
    """Answer to a commit."""

    committed: Count
    complete: Count
    rejected: list[Rejection]


class MissingPool(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Pages of one pool that could not be read, on these shards."""

    pages: PageSet
    shards: list[Count]
    reason: Literal["gone", "size_mismatch", "timeout", "checksum", "evicted"]
    size_seen: Count | None = None
    pool_id: str | None = None


class MissingRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/namespaces/{ns}/missing`; `generation` as the lookup gave it, or None."""

    engine_id: EngineId
    rank: RankName
    page_hashes: PageHashes
    generation: bytes | None
    missing: dict[PoolName, MissingPool]


class MissingResult(Message, frozen=True, kw_only=True):
    """Answer to missing."""

    cleared: Count
    stale: Count


class PoolKeysQuery(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Which variant and which shards of a pool."""

    pool_id: str | None = None
    shards: list[Count] | None = None


class SglangPoolMessage(Request, frozen=True, kw_only=True):
    """A pool of a stock SGLang engine, as far as its keys depend on it."""

    name: str
    attention: str | None = None
    conv_states: Count = 0
    temporal: bool = True


class SglangLayoutMessage(Request, frozen=True, kw_only=True):
    """One rank of a stock SGLang engine: all that its keys depend on."""

    model: str | None
    extra_backend_tag: str | None = None
    tp_rank: Count = 0
    tp_size: Count = 1
    pp_rank: Count = 0
    pp_size: Count = 1
    attention: str = "mha"
    pools: list[SglangPoolMessage]


class KeysRequest(Request, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/namespaces/{ns}/keys`."""

    page_hashes: PageHashes
    pools: dict[PoolName, PoolKeysQuery] | None
    scheme: Literal["caketin", "sglang"] = "caketin"
    layout: SglangLayoutMessage | None = None


class PoolKeys(Message, frozen=True, kw_only=True):
    """One list of keys a page: shards ascending, within a shard parts in order."""

    pool_id: str | None
    keys: list[list[str]]


class KeysResult(Message, frozen=True, kw_only=True):
    """Answer to suffix resolution."""

    pools: dict[str, PoolKeys]


class ProblemError(Message, frozen=True, kw_only=True):
    """One thing wrong with one field."""

    field: str
    code: str
    detail: str


class SlotCount(Message, frozen=True, kw_only=True):
    """Slots of a pool when there were not enough."""

    asked: Count
    free: Count
    locked: Count


class Problem(Message, frozen=True, kw_only=True, omit_defaults=True):
    """An error answer (RFC 9457); `pools` comes with `no_slots` only."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: list[ProblemError]
    pools: dict[str, SlotCount] | None = None
