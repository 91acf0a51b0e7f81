"""How pages travel: hashes and token ids as one run of bytes each, and bodies decoded without mercy.

A lookup names thousands of pages. Both sides of a call keep them as one `bytes` object, so that nothing is
done page by page: a JSON body's 2,048 hex hashes become bytes with one `bytes.fromhex`, a msgpack body's
already are. The server's and the client's models of the calls share these types and nothing else.

Pure: values in, values out.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from metadata.errors import FieldError, InvalidInput
from metadata.msgpack_keys import repeated_key

HASH_BYTES: Final = 32
MAX_PAGES: Final = 65_536
"""Pages that one call may name."""
MAX_INTEGER: Final = 2**53 - 1
"""Integers above are not the same number in every JSON reader."""

ENGINE_ID: Final = r"[A-Za-z0-9._-]{1,128}"
RANK: Final = r"dp(0|[1-9][0-9]{0,4})-pp(0|[1-9][0-9]{0,4})-cp(0|[1-9][0-9]{0,4})-tp(0|[1-9][0-9]{0,4})"
POOL_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
"""Patterns without their ends: the regular expressions of pydantic and of Python spell those differently."""

_HEX_DIGITS: Final = 2 * HASH_BYTES
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_MAX_UINT32: Final = 2**32 - 1


class PageHashes(Sequence[bytes]):
    """The page hashes of one call: a sequence of 32-byte hashes over one run of bytes.

    Attributes:
        raw: the hashes one after the other, 32 bytes a page.
    """

    __slots__ = ("raw",)

    def __init__(self, raw: bytes = b"") -> None:
        if len(raw) % HASH_BYTES:
            raise _one(
                "",
                "bad_length",
                f"has {len(raw)} bytes, which is not a multiple of {HASH_BYTES} bytes a page",
            )
        self.raw = raw

    @classmethod
    def of(cls, pages: Iterable[bytes]) -> PageHashes:
        """Return the hashes of `pages` as one run.

        Raises:
            InvalidInput: where a hash does not have 32 bytes; the field is its index, `[3]`.
        """
        listed = list(pages)
        for i, page in enumerate(listed):
            if len(page) != HASH_BYTES:
                raise _one(f"[{i}]", "bad_hash", f"has {len(page)} bytes, a page hash has {HASH_BYTES}")
        return cls(b"".join(listed))

    @classmethod
    def from_hex(cls, digits: Sequence[object]) -> PageHashes:
        """Return the hashes written as 64 hex digits each, in lower or upper case.

        Raises:
            InvalidInput: names the first entry that is no such string; the field is its index, `[3]`.
        """
        try:
            # One joined decode is ten times as fast as one a page. The lengths are checked one by one since
            # 62 and 66 digits also add up, and the sum since fromhex skips blanks.
            if digits and set(map(len, digits)) != {_HEX_DIGITS}:  # type: ignore[arg-type]
                raise _bad_digits(digits)
            raw = bytes.fromhex("".join(digits))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise _bad_digits(digits) from None
        if len(raw) != HASH_BYTES * len(digits):
            raise _bad_digits(digits)
        return cls(raw)

    def to_hex(self) -> list[str]:
        """Return each hash as 64 lower-case hex digits."""
        return self.raw.hex(",", HASH_BYTES).split(",") if self.raw else []

    def __len__(self) -> int:
        return len(self.raw) // HASH_BYTES

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> PageHashes: ...
    def __getitem__(self, at: int | slice) -> bytes | PageHashes:
        where = range(len(self))[at]
        if isinstance(where, int):
            return self.raw[where * HASH_BYTES : (where + 1) * HASH_BYTES]
        if where.step == 1:
            return PageHashes(self.raw[where.start * HASH_BYTES : where.stop * HASH_BYTES])
        return PageHashes(b"".join(self[i] for i in where))

    def __iter__(self) -> Iterator[bytes]:
        raw = self.raw
        return (raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageHashes) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        first = f", first {self.raw[:4].hex()}..." if self.raw else ""
        return f"PageHashes({len(self)} pages{first})"


class TokenIds:
    """The token ids of one call.

    Attributes:
        values: shape (tokens,); uint32 where all ids fit, else uint64 (wide tokens, JSON only).
    """

    __slots__ = ("values",)

    def __init__(self, values: NDArray[np.uint32] | NDArray[np.uint64]) -> None:
        self.values = values

    @classmethod
    def of(cls, ids: Sequence[object]) -> TokenIds:
        """Return token ids given as integers from 0 to 2^53 - 1.

        Raises:
            InvalidInput: names the first entry that is no such integer; the field is its index, `[3]`.
        """
        # array takes True for 1, hence the types. Any other fault ends in OverflowError or TypeError.
        try:
            wide = np.frombuffer(array("Q", ids), dtype=np.uint64)  # type: ignore[type-var]
        except (TypeError, OverflowError):
            raise _bad_token(ids) from None
        if not set(map(type, ids)) <= {int} or (wide.size and int(wide.max()) > MAX_INTEGER):
            raise _bad_token(ids)
        if wide.size and int(wide.max()) > _MAX_UINT32:
            return cls(wide)
        return cls(wide.astype(np.uint32))

    @classmethod
    def from_bytes(cls, raw: bytes) -> TokenIds:
        """Return token ids packed as little-endian uint32.

        Raises:
            InvalidInput: for a length that is no multiple of 4.
        """
        if len(raw) % 4:
            raise _one("", "bad_length", f"has {len(raw)} bytes, which is not a multiple of 4 bytes a token")
        return cls(np.frombuffer(raw, dtype="<u4").astype(np.uint32, copy=False))

    def to_bytes(self) -> bytes:
        """Return the ids as little-endian uint32.

        Raises:
            InvalidInput: names the first id above 2^32 - 1: wide tokens travel as JSON only.
        """
        if self.values.dtype != np.uint32:
            at = int(np.argmax(self.values > _MAX_UINT32))
            raise _one(
                f"[{at}]", "out_of_range", f"is {self.values[at]}, msgpack takes ids to 2^32 - 1; send JSON"
            )
        return self.values.astype("<u4", copy=False).tobytes()

    def to_list(self) -> list[int]:
        """Return the ids as Python integers."""
        listed: list[int] = self.values.tolist()
        return listed

    def __len__(self) -> int:
        return self.values.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash(self.values.tobytes())

    def __repr__(self) -> str:
        return f"TokenIds({len(self)} tokens)"


def decode_json(body: bytes) -> object:
    """Return a JSON body as plain values.

    Raises:
        InvalidInput: for anything that is not exactly one JSON value in UTF-8, a key given twice, NaN and
            Infinity, half a surrogate pair, and nesting deeper than the interpreter's stack.
    """
    try:
        # json and not msgspec, which keeps the last of two equal keys without a word. 2,048 hashes cost
        # 0.18 ms here against 0.11 ms there.
        value = _STRICT_JSON.decode(body.decode("utf-8"))
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except InvalidInput:
        raise
    except RecursionError:
        raise _one("", "too_deep", "the body is nested too deep") from None
    except UnicodeError:
        raise _one("", "bad_json", "the body is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _one("", "bad_json", f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # an integer of more digits than Python converts
        raise _one("", "out_of_range", "the body has a number that is too long") from None
    return value


def decode_msgpack(body: bytes) -> object:
    """Return a msgpack body as plain values.

    Raises:
        InvalidInput: for anything that is not exactly one msgpack value, a key given twice, and nesting
            deeper than the interpreter's stack.
    """
    try:
        value = msgspec.msgpack.decode(body, strict=True)
        # Encoded again in the shortest form, the value is as long as a body in that form whose keys all
        # survived. Only where it is not must the keys be counted.
        if len(msgspec.msgpack.encode(value)) != len(body):
            key = repeated_key(body)
            if key is not None:
                raise _one(key, "duplicate_key", "the key is given twice in one map")
    except InvalidInput:
        raise
    except RecursionError:
        raise _one("", "too_deep", "the body is nested too deep") from None
    except (msgspec.MsgspecError, UnicodeError, TypeError, ValueError):
        raise _one("", "bad_msgpack", "the body is not msgpack") from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _one(key, "duplicate_key", "the key is given twice in one object")
            seen.add(key)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _one("", "bad_json", f"the body is not JSON: {name} is not a number")


_STRICT_JSON: Final = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def _bad_digits(digits: Sequence[object]) -> InvalidInput:
    """Return the error for the first entry that is not 64 hex digits."""
    for i, text in enumerate(digits):
        if not isinstance(text, str):
            return _one(f"[{i}]", "wrong_type", f"must be a string of {_HEX_DIGITS} hex digits")
        if len(text) != _HEX_DIGITS:
            return _one(
                f"[{i}]", "bad_hash", f"has {len(text)} characters, a page hash has {_HEX_DIGITS} hex digits"
            )
        if not set(text) <= _HEX:
            return _one(f"[{i}]", "bad_hash", "has characters that are not hex digits")
    raise AssertionError("every entry is a hash")


def _bad_token(ids: Sequence[object]) -> InvalidInput:
    """Return the error for the first entry that is not an integer from 0 to 2^53 - 1."""
    for i, value in enumerate(ids):
        if type(value) is not int:
            return _one(f"[{i}]", "wrong_type", "must be an integer")
        if not 0 <= value <= MAX_INTEGER:
            return _one(f"[{i}]", "out_of_range", "must be 0 to 2^53 - 1")
    raise AssertionError("every entry is a token id")


def _one(field: str, code: str, detail: str) -> InvalidInput:
    return InvalidInput("the body cannot be read", [FieldError(field, code, detail)])
