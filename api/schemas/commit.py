"""Commit and missing: what a rank has stored, and what it found gone."""

from __future__ import annotations

from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from api.schemas.wire import (
    Body,
    Count,
    EngineId,
    Generation,
    HashList,
    PageSetField,
    PoolId,
    PoolName,
    RankName,
    ShardList,
)
from metadata.errors import FieldError, InvalidInput
from metadata.page_runs import runs_to_mask
from metadata.pools import MAX_POOL_VARIANTS

LossReason: TypeAlias = Literal["gone", "size_mismatch", "timeout", "checksum", "evicted"]


class StoredPool(Body):
    """Pages of one pool whose objects are confirmed, on these shards.

    `pool_id` says of which variant; left out, of the one that the rank has registered last.
    """

    pages: PageSetField
    shards: ShardList
    pool_id: PoolId | None = None


class MissingPool(Body):
    """Pages of one pool that could not be read, or that the store evicted, on these shards.

    Only of what was evicted a rank may name shards that it does not own.
    """

    pages: PageSetField
    shards: ShardList
    reason: LossReason
    size_seen: Count | None = None
    pool_id: PoolId | None = None


class CommitRequest(Body):
    """`POST /v1/namespaces/{ns}/commit`."""

    takes_msgpack: ClassVar[bool] = True

    engine_id: EngineId
    rank: RankName
    page_hashes: HashList
    stored: dict[PoolName, StoredPool] = Field(min_length=1, max_length=MAX_POOL_VARIANTS)

    @model_validator(mode="after")
    def _pages_lie_in_the_call(self) -> Self:
        _check_pages("stored", self.stored, len(self.page_hashes))
        return self


class Rejection(Body):
    """A page of a pool that the index did not take."""

    page: Count
    pool: str
    code: str


class CommitResult(Body):
    """Answer to a commit; `complete` counts pages whose named pools now have all shards."""

    takes_msgpack: ClassVar[bool] = True

    committed: Count
    complete: Count
    rejected: list[Rejection]


class MissingRequest(Body):
    """`POST /v1/namespaces/{ns}/missing`."""

    takes_msgpack: ClassVar[bool] = True

    engine_id: EngineId
    rank: RankName
    page_hashes: HashList
    generation: Generation | None = None
    missing: dict[PoolName, MissingPool] = Field(min_length=1, max_length=MAX_POOL_VARIANTS)

    @model_validator(mode="after")
    def _pages_lie_in_the_call(self) -> Self:
        pages = len(self.page_hashes)
        if self.generation is not None and len(self.generation) != pages:
            detail = f"has {len(self.generation)} bytes, the call has {pages} pages"
            raise InvalidInput(
                "one generation a page is needed", [FieldError("generation", "bad_length", detail)]
            )
        _check_pages("missing", self.missing, pages)
        return self


class MissingResult(Body):
    """Answer to missing: claims cleared, and claims left alone since a newer generation holds."""

    takes_msgpack: ClassVar[bool] = True

    cleared: Count
    stale: Count


def _check_pages(field: str, pools: dict[str, StoredPool] | dict[str, MissingPool], pages: int) -> None:
    errors: list[FieldError] = []
    for name, pool in pools.items():
        try:
            runs_to_mask(pool.pages, pages, field=f"{field}.{name}.pages")
        except InvalidInput as error:
            errors.extend(error.errors)
    if errors:
        raise InvalidInput("the page sets do not fit the call", errors)
