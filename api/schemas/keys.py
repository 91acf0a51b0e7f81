"""Suffix resolution: the object keys of pages."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from api.schemas.wire import Body, HashList, Integer, PoolId, PoolName, ShardList, Text
from metadata.errors import FieldError, InvalidInput
from metadata.pools import MAX_POOL_VARIANTS
from metadata.sglang_keys import SglangLayout, SglangPool


class PoolKeysQuery(Body):
    """Which variant and which shards; left out, the namespace's only variant and all of its shards."""

    pool_id: PoolId | None = None
    shards: ShardList | None = None


class SglangPoolBody(Body):
    """A pool of a stock SGLang engine, as far as its keys depend on it."""

    name: Text
    attention: Text | None = None
    conv_states: Integer = 0
    temporal: bool = True


class SglangLayoutBody(Body):
    """One rank of a stock SGLang engine: all that its keys depend on."""

    model: Text | None
    extra_backend_tag: Text | None = None
    tp_rank: Integer = 0
    tp_size: Integer = 1
    pp_rank: Integer = 0
    pp_size: Integer = 1
    attention: Text = "mha"
    pools: list[SglangPoolBody] = Field(min_length=1, max_length=MAX_POOL_VARIANTS)

    def to_layout(self) -> SglangLayout:
        """Return the layout as the domain knows it.

        Raises:
            InvalidInput: where a rule of the scheme is broken; the fields start at `layout`.
        """
        values = self.model_dump(exclude={"pools"})
        pools = tuple(SglangPool(**pool.model_dump()) for pool in self.pools)
        try:
            return SglangLayout(**values, pools=pools)
        except InvalidInput as error:
            raise InvalidInput(error.detail, [e.under("layout") for e in error.errors]) from None


class KeysRequest(Body):
    """`POST /v1/namespaces/{ns}/keys`."""

    takes_msgpack: ClassVar[bool] = True

    page_hashes: HashList
    pools: dict[PoolName, PoolKeysQuery] | None = Field(None, max_length=MAX_POOL_VARIANTS)
    scheme: Literal["caketin", "sglang"] = "caketin"
    layout: SglangLayoutBody | None = None

    @model_validator(mode="after")
    def _layout_goes_with_sglang(self) -> Self:
        if (self.scheme == "sglang") != (self.layout is not None):
            detail = "is needed with scheme sglang" if self.layout is None else "goes with scheme sglang only"
            raise InvalidInput("scheme and layout differ", [FieldError("layout", "scheme", detail)])
        return self


class PoolKeys(Body):
    """One list of keys a page: shards ascending, within a shard parts in order."""

    pool_id: PoolId | None
    keys: list[list[str]]


class KeysResult(Body):
    """Answer to suffix resolution."""

    takes_msgpack: ClassVar[bool] = True

    pools: dict[str, PoolKeys]
