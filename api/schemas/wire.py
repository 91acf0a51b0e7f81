"""Field types that the calls share: page hashes, token ids, page sets, names, and the base of all bodies.

The big fields (page hashes, token ids) are taken in one step each and never page by page.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import SerializationInfo, ValidationInfo

from metadata.codec import ENGINE_ID, MAX_INTEGER, MAX_PAGES, POOL_NAME, RANK, PageHashes, TokenIds
from metadata.errors import FieldError, InvalidInput, TooManyPages

MSGPACK_CONTEXT: Final = {"format": "msgpack"}
"""Validation context of a body that came as msgpack, where the big fields are binary strings."""
REVEAL_SECRETS: Final = {"reveal_secrets": True}
"""Serialization context that writes salts in the clear. For tests: nothing in a server dumps a request."""


class Body(BaseModel):
    """Base of every request and answer: unknown fields and values of another type are refused.

    Attributes:
        takes_msgpack: whether the call also takes and gives `application/msgpack`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)
    takes_msgpack: ClassVar[bool] = False


def wrong(at: str, code: str, detail: str) -> PydanticCustomError:
    """Return the error a validator raises; `at` is the place within the field, such as `[3]`, or empty."""
    return PydanticCustomError(code, "{detail}", {"at": at, "detail": detail})


def _raised(error: InvalidInput) -> PydanticCustomError:
    first = error.errors[0]
    return wrong(first.field, first.code, first.detail)


def _is_msgpack(info: ValidationInfo) -> bool:
    return info.context is MSGPACK_CONTEXT


def _page_hashes(value: object, info: ValidationInfo) -> PageHashes:
    try:
        match value:
            case PageHashes():
                hashes = value
            case bytes() if _is_msgpack(info):
                hashes = PageHashes(value)
            case list() if not _is_msgpack(info):
                hashes = PageHashes.from_hex(value)
            case _:
                form = (
                    "one binary string of 32 bytes a page" if _is_msgpack(info) else "a list of hex strings"
                )
                raise wrong("", "wrong_type", f"must be {form}")
    except InvalidInput as error:
        raise _raised(error) from None
    if len(hashes) > MAX_PAGES:
        detail = f"has {len(hashes)} pages, one call takes {MAX_PAGES}"
        raise TooManyPages("split the call", [FieldError(info.field_name or "", "too_many_pages", detail)])
    return hashes


def _token_ids(value: object, info: ValidationInfo) -> TokenIds:
    try:
        match value:
            case TokenIds():
                return value
            case bytes() if _is_msgpack(info):
                return TokenIds.from_bytes(value)
            case list() if not _is_msgpack(info):
                return TokenIds.of(value)
    except InvalidInput as error:
        raise _raised(error) from None
    form = "one binary string of little-endian uint32" if _is_msgpack(info) else "a list of integers"
    raise wrong("", "wrong_type", f"must be {form}")


def _generation(value: object, info: ValidationInfo) -> bytes:
    match value:
        case bytes():
            return value
        case str() if not _is_msgpack(info):
            with contextlib.suppress(binascii.Error):
                found = base64.b64decode(value.encode("utf-8", "replace"), validate=True)
                # Python overlooks padding beyond what is needed.
                if len(value) == -(-len(found) // 3) * 4:
                    return found
            raise wrong("", "bad_base64", "is not base64 with its padding")
    form = "one binary string of one byte a page" if _is_msgpack(info) else "a base64 string"
    raise wrong("", "wrong_type", f"must be {form}")


def _runs(value: object) -> list[tuple[int, int]]:
    if not isinstance(value, list):
        raise wrong("", "wrong_type", "must be a list of [first, last]")
    if len(value) > MAX_PAGES:
        raise wrong("", "too_many", f"has {len(value)} runs, one call takes {MAX_PAGES} pages")
    for i, run in enumerate(value):
        if not (isinstance(run, list | tuple) and len(run) == 2 and all(type(n) is int for n in run)):  # noqa: PLR2004
            raise wrong(f"[{i}]", "bad_run", "must be [first, last], two integers")
        if not 0 <= run[0] <= run[1] <= MAX_INTEGER:
            raise wrong(f"[{i}]", "bad_run", "must not be negative, nor its first after its last")
    return [(run[0], run[1]) for run in value]


def _page_set(value: object) -> PageSet:
    if value == "all":
        return "all"
    if isinstance(value, str):
        raise wrong("", "unknown", 'must be "all" or a list of [first, last]')
    return _runs(value)


def _secret(value: SecretStr, info: SerializationInfo) -> str:
    reveal = isinstance(info.context, dict) and info.context.get("reveal_secrets") is True
    return value.get_secret_value() if reveal else str(value)


def _opaque(validate: Callable[..., Any], schema: dict[str, Any]) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(validate), WithJsonSchema(schema)


_HASH_SCHEMA: Final = {"type": "string", "pattern": "^[0-9a-fA-F]{64}$"}
_RUNS_SCHEMA: Final = {
    "type": "array",
    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2},
}

HashList = Annotated[
    PageHashes,
    *_opaque(_page_hashes, {"type": "array", "items": _HASH_SCHEMA, "maxItems": MAX_PAGES}),
    PlainSerializer(PageHashes.to_hex, return_type=list[str], when_used="json"),
]
"""Page hashes as one `PageHashes`. JSON: hex strings; msgpack: 32 bytes a page."""

TokenList = Annotated[
    TokenIds,
    *_opaque(
        _token_ids, {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}}
    ),
    PlainSerializer(TokenIds.to_list, return_type=list[int], when_used="json"),
]
"""Token ids as one `TokenIds`. JSON: integers; msgpack: little-endian uint32."""

Generation = Annotated[
    bytes,
    *_opaque(_generation, {"type": "string", "contentEncoding": "base64"}),
    PlainSerializer(lambda value: base64.b64encode(value).decode(), return_type=str, when_used="json"),
]
"""One byte a page. JSON: base64; msgpack: a binary string."""

Runs = Annotated[list[tuple[int, int]], BeforeValidator(_runs), WithJsonSchema(_RUNS_SCHEMA)]
"""Inclusive runs `[first, last]`."""

PageSet: TypeAlias = Literal["all"] | list[tuple[int, int]]
PageSetField = Annotated[
    PageSet,
    BeforeValidator(_page_set),
    WithJsonSchema({"anyOf": [{"type": "string", "const": "all"}, _RUNS_SCHEMA]}),
]
"""`"all"` or inclusive runs of indices into the call's `page_hashes`."""

Secret = Annotated[SecretStr, PlainSerializer(_secret, return_type=str)]
"""Text that no log, repr or dump shows."""

Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
"""Any integer that JSON carries; the domain decides on its range and names the fault better."""
PageCount = Annotated[int, Field(ge=0, le=MAX_PAGES)]
EngineId = Annotated[str, Field(pattern=f"^{ENGINE_ID}$")]
RankName = Annotated[str, Field(pattern=f"^{RANK}$", examples=["dp0-pp0-cp0-tp3"])]
PoolName = Annotated[str, Field(pattern=f"^{POOL_NAME}$")]
PoolId = Annotated[str, Field(pattern="^[0-9a-f]{8}$")]
INCARNATION: Final = "^[A-Za-z0-9._-]{1,64}$"
Incarnation = Annotated[str, Field(pattern=INCARNATION)]
ShardList = Annotated[list[Annotated[int, Field(ge=0, lt=4096)]], Field(min_length=1, max_length=4096)]
Text = Annotated[str, Field(max_length=512)]
