"""Messages as bytes: msgpack, which is what the client sends by default, and JSON.

Page hashes and token ids are one run of bytes in Python and in msgpack; only JSON spells them out.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from metadata.codec import PageHashes, TokenIds, decode_json
from metadata.errors import FieldError, InvalidInput
from metadata.page_hash import HASH_BYTES

Format: TypeAlias = Literal["json", "msgpack"]
MEDIA_TYPES: Final[dict[Format, str]] = {"json": "application/json", "msgpack": "application/msgpack"}

T = TypeVar("T")

# What msgspec says of a fault: the text, then " - at " and the place, `$.pools[2].name`. Before the text our
# own hooks put the place within a list.
_FAULT: Final = re.compile(
    r"(?P<at>(\[\d+\])?)(?P<detail>.*?)( - at (`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL
)
_MAX_DETAIL: Final = 256
_SECRETS: Final = frozenset({"namespace_salt", "cache_salt", "extra_key"})


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of answers: fields that a newer peer adds are skipped. Its text shows no secret."""

    def __repr__(self) -> str:
        shown = (
            f"{name}={'***' if name in _SECRETS and value is not None else repr(value)}"
            for name in self.__struct_fields__
            for value in [getattr(self, name)]
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Request(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of requests and what they hold: unknown fields are refused."""


def encode(message: Message, form: Format) -> bytes:
    """Return the message as bytes.

    Raises:
        InvalidInput: for token ids above 2^32 - 1 in msgpack; they travel as JSON only.
    """
    return _JSON.encode(message) if form == "json" else _MSGPACK.encode(message)


def decode(body: bytes, form: Format, model: type[T]) -> T:
    """Return the answer that a body means.

    Args:
        body: the bytes as they came.
        form: how they are written.
        model: a message, or a union of messages.

    Raises:
        InvalidInput: for a body that is not such a message; `errors` has the first fault and its field.
    """
    try:
        if form == "json":
            return msgspec.json.decode(body, type=model, dec_hook=_from_json)
        return msgspec.msgpack.decode(body, type=model, dec_hook=_from_msgpack)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise _invalid(error) from None


def decode_request(body: bytes, model: type[T]) -> T:
    """Return the request that a JSON body means; for the agent, which reads what others wrote.

    Raises:
        InvalidInput: for a body that is not such a message or gives a key twice; `errors` has the first
            fault and its field.
    """
    try:
        return msgspec.convert(decode_json(body), type=model, dec_hook=_from_json)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _invalid(error) from None


def _to_json(value: object) -> list[str] | list[int]:
    match value:
        case PageHashes():
            return value.to_hex()
        case TokenIds():
            return value.to_list()
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def _to_msgpack(value: object) -> bytes:
    match value:
        case PageHashes():
            return value.raw
        case TokenIds():
            return value.to_bytes()
    raise NotImplementedError(f"{type(value).__name__} has no msgpack form")


def _from_json(kind: type, value: Any) -> PageHashes | TokenIds:
    if not isinstance(value, list):
        raise TypeError("must be a list")
    try:
        return PageHashes.from_hex(value) if kind is PageHashes else TokenIds.of(value)
    except InvalidInput as error:
        raise _at(error) from None


def _from_msgpack(kind: type, value: Any) -> PageHashes | TokenIds:
    if not isinstance(value, bytes):
        raise TypeError(
            f"must be a binary string of {HASH_BYTES if kind is PageHashes else 4} bytes an entry"
        )
    try:
        return PageHashes(value) if kind is PageHashes else TokenIds.from_bytes(value)
    except InvalidInput as error:
        raise _at(error) from None


def _at(error: InvalidInput) -> ValueError:
    """Return the first fault as the error to which msgspec adds the place of the field."""
    return ValueError(f"{error.errors[0].field}{error.errors[0].detail}")


def _invalid(error: Exception) -> InvalidInput:
    if isinstance(error, RecursionError):
        return InvalidInput("the body cannot be read", [FieldError("", "too_deep", "it is nested too deep")])
    found = _FAULT.fullmatch(str(error))
    if found is None:  # cannot be: the pattern takes any text
        raise AssertionError(str(error))
    field = (found["path"] or "").removeprefix(".") + found["at"]
    detail = found["detail"][:_MAX_DETAIL].encode("utf-8", "backslashreplace").decode()
    return InvalidInput("the body cannot be read", [FieldError(field, "invalid", detail)])


_JSON: Final = msgspec.json.Encoder(enc_hook=_to_json)
_MSGPACK: Final = msgspec.msgpack.Encoder(enc_hook=_to_msgpack)
