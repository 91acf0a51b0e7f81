"""How pages travel: hashes and token ids as one run of bytes each, and bodies decoded without mercy.

A lookup names thousands of pages. Both sides of a call keep them as one `bytes` object, so that nothing is
done page by page: a JSON body's 2,048 hex hashes become bytes with one `bytes.fromhex`, a msgpack body's
already are. The server's and the client's models of the calls share these types and nothing else.

Pure: values in, values out.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from metadata import page_hash
from metadata.errors import FieldError, InvalidInput
from metadata.msgpack_keys import repeated_key
from metadata.page_hash import HASH_BYTES, HEX_DIGITS
from metadata.pools import NAME_PATTERN

MAX_PAGES: Final = 65_536
"""Pages that one call may name."""
MAX_INTEGER: Final = 2**53 - 1
"""Integers above are not the same number in every JSON reader."""

MAX_KEYS: Final = 16_384
"""Keys of one body, over all its objects; the largest registration has 13,000."""

ENGINE_ID: Final = r"[A-Za-z0-9._-]{1,128}"
RANK: Final = r"dp(0|[1-9][0-9]{0,4})-pp(0|[1-9][0-9]{0,4})-cp(0|[1-9][0-9]{0,4})-tp(0|[1-9][0-9]{0,4})"
POOL_NAME: Final = NAME_PATTERN
"""Patterns without their ends: the regular expressions of pydantic and of Python spell those differently."""

_MAX_SHOWN: Final = 64
_MAX_UINT32: Final = 2**32 - 1


class PageHashes(Sequence[bytes]):
    """The page hashes of one call: a sequence of 32-byte hashes over one run of bytes.

    Attributes:
        raw: the hashes one after the other, 32 bytes a page.
    """

    __slots__ = ("raw",)

    def __init__(self, raw: bytes = b"") -> None:
        if len(raw) % HASH_BYTES:
            detail = f"the hashes end after {len(raw)} bytes, {HASH_BYTES} a page are needed"
            raise _one(f"[{len(raw) // HASH_BYTES}]", "bad_hash", detail)
        self.raw = raw

    @classmethod
    def of(cls, pages: Sequence[bytes]) -> PageHashes:
        """Return the hashes of `pages` as one run.

        Raises:
            InvalidInput: where a hash does not have 32 bytes; the field is its index, `[3]`.
        """
        return pages if isinstance(pages, cls) else cls(page_hash.join(pages, field=""))

    @classmethod
    def from_hex(cls, digits: Sequence[Any]) -> PageHashes:
        """Return the hashes written as 64 hex digits each, in lower or upper case.

        Raises:
            InvalidInput: names the entries that are no such string; the field is the index, `[3]`.
        """
        # All at once; only where that fails is each looked at. `fromhex` skips blanks, and 62 and 66 digits
        # add up too: hence both lengths.
        try:
            if set(map(len, digits)) <= {HEX_DIGITS}:
                raw = bytes.fromhex("".join(digits))
                if len(raw) == HASH_BYTES * len(digits):
                    return cls(raw)
        except (TypeError, ValueError):
            pass
        return cls.of(page_hash.from_hex(digits, field=""))

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

    def take(self, at: NDArray[np.int64]) -> PageHashes:
        """Return the hashes at these places, int64 (n,), in their order; faster than one by one.

        Raises:
            IndexError: for a place that is not there.
        """
        rows = np.frombuffer(self.raw, np.uint8).reshape(-1, HASH_BYTES)
        return PageHashes(rows[at].tobytes())

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
        value = json.JSONDecoder(object_pairs_hook=_Keys().unique, parse_constant=_refuse_constant).decode(
            body.decode("utf-8")
        )
        if b"\\" in body:  # only an escape can write half a surrogate pair
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
                raise _one(shown(key), "duplicate_key", "the key is given twice in one map")
        _check_key_count(_count_keys(value))
    except InvalidInput:
        raise
    except RecursionError:
        raise _one("", "too_deep", "the body is nested too deep") from None
    except (msgspec.MsgspecError, UnicodeError, TypeError, ValueError):
        raise _one("", "bad_msgpack", "the body is not msgpack") from None
    return value


def shown(name: str) -> str:
    """Return a name that a caller made up, short and without half surrogate pairs: fit for an answer."""
    return name[:_MAX_SHOWN].encode("utf-8", "backslashreplace").decode()


class _Keys:
    """The keys of one JSON body, over all its objects."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object's pairs as a dict, each key once."""
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            key = next(key for key, count in counts.items() if count > 1)
            raise _one(shown(key), "duplicate_key", "the key is given twice in one object")
        self.seen += len(pairs)
        _check_key_count(self.seen)
        return value


def _check_key_count(keys: int) -> None:
    # A model says something of every key it does not know: a million of them would take it ten seconds.
    if keys > MAX_KEYS:
        raise _one("", "too_many_keys", f"the body has more than {MAX_KEYS} keys over all its objects")


def _count_keys(value: object) -> int:
    """Return the number of keys over all maps, those of maps in lists of lists left out: no call has them."""
    count, todo = 0, [value]
    while todo:
        at = todo.pop()
        if isinstance(at, dict):
            count += len(at)
            todo.extend(item for item in at.values() if isinstance(item, dict | list))
        elif isinstance(at, list):
            todo.extend(item for item in at if isinstance(item, dict))
    return count


def _refuse_constant(name: str) -> NoReturn:
    raise _one("", "bad_json", f"the body is not JSON: {name} is not a number")


def _bad_token(ids: Sequence[object]) -> InvalidInput:
    """Return the error for the first entry that is not an integer from 0 to 2^53 - 1."""
    at = next(i for i, value in enumerate(ids) if type(value) is not int or not 0 <= value <= MAX_INTEGER)
    if type(ids[at]) is not int:
        return _one(f"[{at}]", "wrong_type", "must be an integer")
    return _one(f"[{at}]", "out_of_range", "must be 0 to 2^53 - 1")


def _one(field: str, code: str, detail: str) -> InvalidInput:
    return InvalidInput("the body cannot be read", [FieldError(field, code, detail)])
