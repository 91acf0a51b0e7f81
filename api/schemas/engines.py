"""Engines and their ranks: registration, heartbeat, and what is registered."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from api.schemas.namespaces import NamespaceBody
from api.schemas.pools import AllPagesBody, HitPolicyBody, PartBody
from api.schemas.wire import Body, Count, EngineId, Incarnation, Integer, PageCount, PoolId, RankName, Text
from metadata.errors import FieldError, InvalidInput
from metadata.pools import (
    MAX_PARTS,
    MAX_POOL_VARIANTS,
    MAX_SHARDS,
    Part,
    PoolSpec,
    RankPool,
    validate_pool_set,
)

LabelKey = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_./-]{0,62}$")]
LabelValue = Annotated[str, Field(max_length=256)]


class PoolRegistration(Body):
    """One pool as one rank holds it."""

    name: Text
    logical: bool = False
    parts: list[PartBody] = Field(default_factory=list, max_length=MAX_PARTS)
    shard_count: Integer = 1
    owned_shards: list[Integer] = Field(default_factory=lambda: [0], max_length=MAX_SHARDS)
    hit_policy: HitPolicyBody = Field(default_factory=AllPagesBody)
    indices_from: Text | None = None
    object_layout: Text = "page_first"
    host_bytes: Count | None = None

    def to_rank_pool(self) -> RankPool:
        """Return the pool as the domain knows it.

        Raises:
            InvalidInput: where a rule of pools is broken; fields are relative to this pool.
        """
        spec = PoolSpec(
            name=self.name,
            parts=tuple(Part(p.part, p.dtype, p.bytes) for p in self.parts),
            shard_count=self.shard_count,
            hit_policy=self.hit_policy.to_policy(),
            indices_from=self.indices_from,
            logical=self.logical,
            object_layout=self.object_layout,
        )
        return RankPool(spec, tuple(self.owned_shards), self.host_bytes)


class RegisterRequest(Body):
    """`PUT /v1/engines/{engine_id}/ranks/{rank}`."""

    incarnation: Incarnation
    namespace: NamespaceBody
    pools: list[PoolRegistration] = Field(max_length=MAX_POOL_VARIANTS)
    min_pages: Annotated[int, Field(ge=1, le=65_536)] = 1
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)

    def to_rank_pools(self) -> list[RankPool]:
        """Return the pools as the domain knows them, checked one by one and against each other.

        Raises:
            InvalidInput: with every fault; the fields start at `pools`.
        """
        pools: list[RankPool] = []
        errors: list[FieldError] = []
        for i, pool in enumerate(self.pools):
            try:
                pools.append(pool.to_rank_pool())
            except InvalidInput as error:
                errors.extend(e.under(f"pools[{i}]") for e in error.errors)
        if errors:
            raise InvalidInput("the pools cannot be registered", errors)
        validate_pool_set(pools)
        return pools


class PoolGrant(Body):
    """What a rank learns of one of its pools."""

    pool_id: PoolId
    bit: Annotated[int, Field(ge=0, lt=64)] | None = Field(
        description="The variant's bit in the index; null for a pool without bytes."
    )
    suffixes: list[str] = Field(description="This rank's key suffixes, in the order of its buffers.")
    engines: Count = Field(description="Engines of the namespace that share the variant.")


class MooncakeAccess(Body):
    """How to reach the Mooncake store."""

    kind: Literal["mooncake"] = "mooncake"
    master: str
    metadata: str
    protocol: Literal["rdma", "tcp"]
    devices: str = ""
    key_prefix: str


class FileAccess(Body):
    """Where the file store is; the folder is one of the control plane's host."""

    kind: Literal["file"] = "file"
    path: str
    max_bytes: Count | None = Field(
        default=None, description="Size bound that all ranks keep; left out where there is none."
    )
    key_prefix: str


StoreAccess: TypeAlias = Annotated[MooncakeAccess | FileAccess, Field(discriminator="kind")]


class RegisterResult(Body):
    """Answer to a registration: 201 new, 200 renewed.

    `tenant` is the token's: with it the rank can work out the namespace id for itself.
    """

    namespace_id: str
    tenant: Annotated[str | None, Field(exclude_if=lambda tenant: tenant is None)] = None
    epoch: Count
    lease_seconds: Count
    pools: dict[str, PoolGrant]
    store: StoreAccess


class HeartbeatRequest(Body):
    """`POST /v1/engines/{engine_id}/ranks/{rank}/heartbeat`."""

    incarnation: Incarnation
    epoch: Count


class HeartbeatResult(Body):
    """The rank lives for another `lease_seconds`."""

    lease_seconds: Count


class EngineSummary(Body):
    """An engine in a list."""

    engine_id: EngineId
    namespaces: list[str]
    ranks: list[RankName]


class EngineList(Body):
    """`GET /v1/engines`."""

    engines: list[EngineSummary]
    next_cursor: str | None


class RankPoolView(Body):
    """A pool of a registered rank."""

    name: str
    pool_id: PoolId
    shard_count: Count
    owned_shards: list[Count]
    host_bytes: Count | None


class RankView(Body):
    """A registered rank."""

    rank: RankName
    namespace_id: str
    incarnation: str
    epoch: Count
    lease_seconds_left: Count
    min_pages: PageCount
    labels: dict[str, str]
    pools: list[RankPoolView]


class EngineView(Body):
    """`GET /v1/engines/{engine_id}`."""

    engine_id: EngineId
    ranks: list[RankView]
