"""The agent's calls, for both of its ends: the engine that asks and the daemon that answers."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from dataplane.messages.control import (
    Count,
    EngineId,
    NamespaceMessage,
    PoolMessage,
    PoolName,
    PoolQuery,
    RankName,
    Runs,
)
from dataplane.messages.wire import Message, Request
from metadata.codec import PageHashes

PageHash: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]


class AgentPool(PoolMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A pool and how many pages of it the host tier is to hold."""

    capacity_pages: Count


class SessionRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/sessions`."""

    engine_id: EngineId
    rank: RankName
    incarnation: str
    namespace: NamespaceMessage
    pools: list[AgentPool]


class MappedPart(Message, frozen=True, kw_only=True):
    """Where a part lies within a slot; `bytes` of one page."""

    part: str
    offset: Count
    bytes: Count


class MappedPool(Message, frozen=True, kw_only=True):
    """The file to map; a logical pool has slots but neither file nor bytes."""

    path: str | None
    length: Count
    slots: Count
    page_stride: Count
    parts: list[MappedPart]


class SessionResult(Message, frozen=True, kw_only=True):
    """A session ends with its connection, or after `idle_seconds` without a word."""

    session_id: str
    namespace_id: str
    idle_seconds: Count
    pools: dict[str, MappedPool]


class MatchRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/sessions/{id}/match`; `parent_hash`: the page before, None at the start of a sequence."""

    page_hashes: PageHashes
    lock: bool = True
    parent_hash: PageHash | UnsetType | None = UNSET


class MatchResult(Message, frozen=True, kw_only=True):
    """What is resident on this host; `token` names the lock, None without one."""

    pages: Count
    restorable: Runs
    slots: dict[str, list[Count]]
    token: str | None


class SlotsRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/sessions/{id}/slots`; `pools` None: all of the session."""

    page_hashes: PageHashes
    parent_hash: PageHash | None = None
    pools: list[PoolName] | None = None


class SlotsResult(Message, frozen=True, kw_only=True):
    """Slots to fill; the pages in `resident` are there already in every pool that was asked for.

    `resident_by_pool` says it pool by pool: a page may have lost its window and kept the rest. What is
    resident must not be written.
    """

    token: str
    slots: dict[str, list[Count]]
    resident: Runs
    resident_by_pool: dict[str, Runs]


class PublishRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/sessions/{id}/publish`: the engine has filled the slots."""

    token: str
    backup: bool = True


class PublishResult(Message, frozen=True, kw_only=True):
    """Pages that became resident, and the backup that was started."""

    published: Count
    transfer_id: str | None


class TransferRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/sessions/{id}/transfers`; `pools` as in a lookup.

    `parent_hash`: the page before the first one, needed by a prefetch with a `first_page`.
    """

    kind: Literal["backup", "prefetch"]
    page_hashes: PageHashes
    first_page: Count = 0
    pools: dict[PoolName, PoolQuery] | None = None
    policy: Literal["wait_complete", "best_effort", "timeout"] = "wait_complete"
    deadline_ms: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None
    lock: bool = True
    parent_hash: PageHash | UnsetType | None = UNSET


class TransferAccepted(Message, frozen=True, kw_only=True):
    """Answer (202) to a transfer."""

    transfer_id: str


class Transfer(Message, frozen=True, kw_only=True):
    """`GET /v1/transfers/{id}`; `transfers_done` is true only if every stage finished."""

    state: Literal["queued", "running", "done", "cancelled", "failed"]
    pages_done: dict[str, Count]
    transfers_done: bool
    restorable: Runs
    slots: dict[str, list[Count]]
    token: str | None
    error: str | None


class PoolStatus(Message, frozen=True, kw_only=True):
    """Slots of one pool of the host tier."""

    slots: Count
    free: Count
    resident: Count
    locked: Count
    quarantined: Count


class TransferCounts(Message, frozen=True, kw_only=True):
    """Transfers now, and ended since the agent started."""

    queued: Count
    running: Count
    done: Count
    cancelled: Count
    failed: Count


class StoreStatus(Message, frozen=True, kw_only=True):
    """Health of the store."""

    kind: str
    healthy: bool
    detail: str


class AgentStatus(Message, frozen=True, kw_only=True):
    """`GET /v1/status`."""

    sessions: Count
    pools: dict[str, PoolStatus]
    transfers: TransferCounts
    store: StoreStatus
