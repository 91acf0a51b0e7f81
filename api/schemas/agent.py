"""The agent's calls, as the control plane documents them; the agent itself is in the data plane."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.engines import PoolRegistration
from api.schemas.lookup import PoolQuery
from api.schemas.namespaces import NamespaceBody
from api.schemas.problems import Problem
from api.schemas.wire import Body, Count, EngineId, HashList, Incarnation, PoolName, RankName, Runs
from metadata.pools import MAX_POOL_VARIANTS

PageHash = Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")]


class AgentPool(PoolRegistration):
    """A pool and how many pages of it the host tier is to hold."""

    capacity_pages: Count


class SessionRequest(Body):
    """`POST /v1/sessions`."""

    engine_id: EngineId
    rank: RankName
    incarnation: Incarnation
    namespace: NamespaceBody
    pools: list[AgentPool] = Field(max_length=MAX_POOL_VARIANTS)


class MappedPart(Body):
    """Where a part lies within a slot; `bytes` of one page."""

    part: str
    offset: Count
    bytes: Count


class MappedPool(Body):
    """The file to map; a logical pool has slots but neither file nor bytes."""

    path: str | None
    length: Count
    slots: Count
    page_stride: Count
    parts: list[MappedPart]


class SessionResult(Body):
    """A session ends with its connection, or after `idle_seconds` without a word."""

    session_id: str
    namespace_id: str
    idle_seconds: Count
    pools: dict[str, MappedPool]


class MatchRequest(Body):
    """`POST /v1/sessions/{id}/match`; `parent_hash`: the page before, null at the start of a sequence."""

    page_hashes: HashList
    lock: bool = True
    parent_hash: PageHash | None = None


class MatchResult(Body):
    """What is resident on this host; `token` names the lock, null without one."""

    pages: Count
    restorable: Runs
    slots: dict[str, list[Count]]
    token: str | None


class SlotsRequest(Body):
    """`POST /v1/sessions/{id}/slots`; `pools` null: all of the session."""

    page_hashes: HashList
    parent_hash: PageHash | None = None
    pools: list[PoolName] | None = None


class SlotsResult(Body):
    """Slots to fill; the pages in `resident` are there already in every pool that was asked for.

    `resident_by_pool` says it pool by pool. What is resident must not be written.
    """

    token: str
    slots: dict[str, list[Count]]
    resident: Runs
    resident_by_pool: dict[str, Runs]


class SlotCount(Body):
    """Slots of a pool when there were not enough."""

    asked: Count
    free: Count
    locked: Count


class NoSlotsProblem(Problem):
    """The problem `no_slots`, with the counts of each pool."""

    pools: dict[str, SlotCount]


class PublishRequest(Body):
    """`POST /v1/sessions/{id}/publish`: the engine has filled the slots."""

    token: str
    backup: bool = True


class PublishResult(Body):
    """Pages that became resident, and the backup that was started."""

    published: Count
    transfer_id: str | None


class TransferRequest(Body):
    """`POST /v1/sessions/{id}/transfers`; `pools` as in a lookup.

    `parent_hash`: the page before the first one, needed by a prefetch with a `first_page`.
    """

    kind: Literal["backup", "prefetch"]
    page_hashes: HashList
    first_page: Count = 0
    pools: dict[PoolName, PoolQuery] | None = None
    policy: Literal["wait_complete", "best_effort", "timeout"] = "wait_complete"
    deadline_ms: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    lock: bool = True
    parent_hash: PageHash | None = None


class TransferAccepted(Body):
    """Answer (202) to a transfer."""

    transfer_id: str


class Transfer(Body):
    """`GET /v1/transfers/{id}`; `transfers_done` is true only if every stage finished."""

    state: Literal["queued", "running", "done", "cancelled", "failed"]
    pages_done: dict[str, Count]
    transfers_done: bool
    restorable: Runs
    slots: dict[str, list[Count]]
    token: str | None
    error: str | None


class PoolStatus(Body):
    """Slots of one pool of the host tier."""

    slots: Count
    free: Count
    resident: Count
    locked: Count
    quarantined: Count


class TransferCounts(Body):
    """Transfers now, and ended since the agent started."""

    queued: Count
    running: Count
    done: Count
    cancelled: Count
    failed: Count


class StoreStatus(Body):
    """Health of the store."""

    kind: str
    healthy: bool
    detail: str


class AgentStatus(Body):
    """`GET /v1/status`."""

    sessions: Count
    pools: dict[str, PoolStatus]
    transfers: TransferCounts
    store: StoreStatus
