"""Lookup: how much of a prompt is restorable, and why not more."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from api.schemas.wire import (
    Body,
    Count,
    EngineId,
    Generation,
    HashList,
    PageCount,
    PoolId,
    PoolName,
    RankName,
    Runs,
    Secret,
    TokenList,
)
from metadata.codec import MAX_PAGES, PageHashes
from metadata.errors import FieldError, InvalidInput
from metadata.pools import MAX_POOL_VARIANTS

Purpose: TypeAlias = Literal["prefetch", "route", "probe"]
MissReason: TypeAlias = Literal[
    "not_stored",
    "evicted",
    "lost",
    "size_mismatch",
    "shard_missing",
    "shard_unregistered",
    "window_incomplete",
    "anchor_missing",
    "below_min_pages",
    "degraded",
]
Salt = Annotated[Secret, Field(max_length=4096)]


class PoolQuery(Body):
    """What a lookup asks of one pool; left out, the registration says."""

    window_pages: Annotated[int, Field(ge=1, le=MAX_PAGES)] | None = None
    pool_id: PoolId | None = None


class LookupRequest(Body):
    """`POST /v1/namespaces/{ns}/lookup`."""

    takes_msgpack: ClassVar[bool] = True

    page_hashes: HashList | None = None
    token_ids: TokenList | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    first_page: Count = 0
    prefix_hashes: HashList = Field(default_factory=PageHashes)
    engine_id: EngineId | None = None
    rank: RankName | None = None
    pools: dict[PoolName, PoolQuery] | None = Field(None, max_length=MAX_POOL_VARIANTS)
    min_pages: Annotated[int, Field(ge=1, le=MAX_PAGES)] = 1
    purpose: Purpose = "prefetch"
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    explain: bool = False

    @model_validator(mode="after")
    def _one_way_to_name_the_pages(self) -> Self:
        if (self.page_hashes is None) == (self.token_ids is None):
            raise InvalidInput(
                "the pages are named once",
                [FieldError("page_hashes", "exactly_one", "give exactly one of page_hashes and token_ids")],
            )
        if len(self.prefix_hashes) > self.first_page:
            detail = f"has {len(self.prefix_hashes)} pages, only {self.first_page} lie before first_page"
            raise InvalidInput(
                "the prefix is too long", [FieldError("prefix_hashes", "out_of_range", detail)]
            )
        return self


class Miss(Body):
    """Why `hit_pages` is not `queried_pages`."""

    page: Count
    pool: str | None
    reason: MissReason
    shards: list[Count]
    age_seconds: Count | None


class MissNote(Body):
    """What was left when a claim was cleared."""

    reason: str
    age_seconds: Count


class PoolState(Body):
    """One pool of one page; `shards` are the missing ones."""

    state: Literal["stored", "incomplete", "absent"]
    shards: list[Count]
    note: MissNote | None


class ExplainedPage(Body):
    """One page of an explained lookup."""

    page: Count
    pools: dict[str, PoolState]


class LookupResult(Body):
    """Answer to a lookup. Lengths count pages of the call."""

    takes_msgpack: ClassVar[bool] = True

    queried_pages: PageCount
    hit_pages: PageCount
    hit_tokens: Count
    restorable: Runs
    pools: dict[str, PageCount]
    generation: Generation
    advisory: bool
    degraded: bool
    unchecked_window_pages: Count
    miss: Miss | None
    pages: Annotated[list[ExplainedPage] | None, Field(exclude_if=lambda pages: pages is None)] = None
