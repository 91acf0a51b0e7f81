"""From a request's bytes to a model, and from a model to an answer's bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec
from pydantic import ValidationError

from api.schemas.problems import MAX_ERRORS
from api.schemas.wire import MSGPACK_CONTEXT, Body
from metadata.codec import decode_json, decode_msgpack, shown
from metadata.errors import FieldError, InvalidInput

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
_MSGPACK_NAMES: Final = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})

M = TypeVar("M", bound=Body)

# What pydantic calls a fault, in the words of the contract. Codes of our own validators pass as they are.
CODES: Final = {
    "extra_forbidden": "unknown_field",
    "missing": "missing",
    "union_tag_not_found": "missing",
    "union_tag_invalid": "unknown",
    "literal_error": "unknown",
    "greater_than": "out_of_range",
    "greater_than_equal": "out_of_range",
    "less_than": "out_of_range",
    "less_than_equal": "out_of_range",
    "int_parsing_size": "out_of_range",
    "string_pattern_mismatch": "bad_format",
    "string_too_short": "too_short",
    "string_too_long": "too_long",
    "string_unicode": "bad_text",
    "too_short": "too_few",
    "too_long": "too_many",
}


def decode_request(body: bytes, content_type: str | None, model: type[M]) -> M:
    """Return the request that a body means.

    Args:
        body: the bytes as they came.
        content_type: the header's value; None means JSON.
        model: what to read; `model.takes_msgpack` says whether msgpack is taken.

    Raises:
        InvalidInput: `errors` has one entry a fault, at most `MAX_ERRORS`.
        TooManyPages: for a list of more pages than one call takes.
    """
    media_type = _media_type(content_type)
    if media_type == JSON:
        return validate(decode_json(body), model)
    if media_type == MSGPACK and model.takes_msgpack:
        return validate(decode_msgpack(body), model, msgpack=True)
    taken = f"{JSON} or {MSGPACK}" if model.takes_msgpack else JSON
    detail = f"the call takes {taken}"
    raise InvalidInput("the body cannot be read", [FieldError("Content-Type", "unsupported", detail)])


def validate(value: object, model: type[M], *, msgpack: bool = False) -> M:
    """Return the model of plain values.

    Args:
        value: what a body decodes to.
        model: what to read.
        msgpack: whether the values came as msgpack, where the big fields are binary strings.

    Raises:
        InvalidInput: `errors` has one entry a fault, at most `MAX_ERRORS`.
        TooManyPages: for a list of more pages than one call takes.
    """
    if not isinstance(value, dict):
        raise InvalidInput("the body cannot be read", [FieldError("", "wrong_type", "must be an object")])
    try:
        return model.model_validate(value, context=MSGPACK_CONTEXT if msgpack else None)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[:MAX_ERRORS]
        raise InvalidInput("the body breaks a rule", [_field_error(dict(e), value) for e in found]) from None


def encode_response(
    model: Body, accept: str | None = None, content_type: str | None = None
) -> tuple[bytes, str]:
    """Return the bytes of an answer and their media type.

    msgpack where the call gives it and `accept` names it, or where `accept` names neither form and the
    request came as msgpack. JSON in all other cases.

    Args:
        model: the answer.
        accept: the request's `Accept` header.
        content_type: the request's `Content-Type` header.
    """
    if model.takes_msgpack and _wants_msgpack(accept, content_type):
        return msgspec.msgpack.encode(model.model_dump()), MSGPACK
    return model.__pydantic_serializer__.to_json(model), JSON


def _wants_msgpack(accept: str | None, content_type: str | None) -> bool:
    named = {_media_type(entry) for entry in (accept or "").split(",") if entry.strip()}
    if named & {JSON, MSGPACK}:
        return MSGPACK in named
    return content_type is not None and _media_type(content_type) == MSGPACK


def _media_type(header: str | None) -> str:
    """Return the media type of a header value without its parameters, lower case."""
    name = (header or JSON).split(";", 1)[0].strip().lower()
    return MSGPACK if name in _MSGPACK_NAMES else name


def _field_error(found: dict[str, Any], body: dict[str, Any]) -> FieldError:
    kind, context = found["type"], found.get("ctx", {})
    field = _path(found["loc"], body) + context.get("at", "")
    if kind.startswith("union_tag_"):
        field += ".kind"
    code = CODES.get(kind, "wrong_type" if kind.endswith(("_type", "_parsing")) else kind)
    return FieldError(field, code, found["msg"])


def _path(loc: Iterable[int | str], body: object) -> str:
    """Return the place as the caller wrote it: `pools[2].hit_policy.window_pages`.

    Pydantic puts the tag of a union (`trailing_pages`) into the place; no such key is in the body.
    """
    path = ""
    steps = [step for step in loc if step != "[key]"]
    at: Any = body
    for i, step in enumerate(steps):
        if isinstance(step, int):
            path += f"[{step}]"
            at = at[step] if isinstance(at, list) and step < len(at) else None
            continue
        known = isinstance(at, dict) and step in at
        if not known and i < len(steps) - 1:
            continue
        path += f".{shown(step)}"
        at = at[step] if known else None
    return path.removeprefix(".")
