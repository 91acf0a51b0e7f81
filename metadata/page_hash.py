"""Token ids to page hashes, as SGLang computes them: every engine and router gives a page the same name.

The hash of a page is `sha256(previous page's 32 bytes || tokens of the page)`. It covers all tokens before
the page too, so an equal hash means an equal prefix. Tokens are little-endian uint32; a page with a token
above 2^32 - 1 is one byte `ff` and then *all* its tokens as little-endian uint64. With `bigram` (EAGLE and
MTP engines) position i contributes tokens i and i + 1, so a page needs page_size + 1 tokens and neighbouring
pages share one. The first page follows nothing, or the seed of a `cache_salt` / `extra_key`.

A hash is raw `bytes` of length 32 inside Python, 64 hex digits in JSON, and one packed byte string for many
pages in msgpack; the converters are here.

Pure: values in, values out.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from metadata.errors import FieldError, InvalidInput
from metadata.namespace import HASH_KINDS

HASH_BYTES: Final = 32
HEX_DIGITS: Final = 2 * HASH_BYTES

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[Any]
_Tokens: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]  # uint32 where all ids fit, else uint64

_MAX_NARROW: Final = 2**32 - 1
_MAX_TOKEN: Final = 2**64 - 1
_WIDE_MARK: Final = b"\xff"
_HASH_HEX: Final = re.compile(r"[0-9A-Fa-f]{64}")
_SEED_DOMAIN: Final = b"sglang-cache-namespace-v1"
_LISTED_FAULTS: Final = 8


def page_hashes(
    token_ids: TokenIds,
    page_size: int,
    *,
    hash_kind: str = "plain",
    cache_salt: str | None = None,
    extra_key: str | None = None,
    previous: bytes | None = None,
) -> list[bytes]:
    """Return the hashes of the whole pages of a sequence; a trailing partial page is left out.

    Args:
        token_ids: ids in 0 to 2^64 - 1: a sequence of int or a one-dimensional array of any integer dtype.
            With `bigram`, the raw tokens (not pairs), and the token after the last page belongs to it.
        page_size: tokens (with `bigram`: token pairs) in a page.
        hash_kind: `plain` or `bigram`.
        cache_salt: the request's salt; empty means none, as in SGLang.
        extra_key: the request's further key (LoRA id, ...); empty is a key of its own, as in SGLang.
        previous: the 32-byte hash of the page before `token_ids`, to continue a chain.

    Returns:
        One hash of 32 bytes a page, in order.

    Raises:
        InvalidInput: with the field at fault: `token_ids[i]`, `page_size`, `hash_kind`, `previous`,
            `cache_salt` or `extra_key`.
    """
    _check_page_size(page_size)
    if hash_kind not in HASH_KINDS:
        raise _invalid("hash_kind", "unknown", f"is {hash_kind!r}, use one of {', '.join(HASH_KINDS)}")
    seed = _chain_start(cache_salt, extra_key, previous)
    tokens = _tokens(token_ids)
    if hash_kind == "bigram":
        return _chain(np.stack((tokens[:-1], tokens[1:]), axis=1), page_size, seed)
    return _chain(tokens.reshape(-1, 1), page_size, seed)


def namespace_seed(cache_salt: str | None, extra_key: str | None) -> bytes:
    """Return what the first page of a sequence follows: 32 bytes, or none without salt and extra key.

    SGLang's rule: `sha256(domain || part(extra_key) || part(cache_salt))` where an absent part is `00` and a
    present one `01`, its length in bytes as little-endian uint64, and its UTF-8.

    Raises:
        InvalidInput: for text that has no UTF-8 form (a lone surrogate, which JSON can carry).
    """
    salt = cache_salt or None
    if salt is None and extra_key is None:
        return b""
    return hashlib.sha256(
        _SEED_DOMAIN + _seed_part("extra_key", extra_key) + _seed_part("cache_salt", salt)
    ).digest()


def check_hashes(page_hashes: Sequence[bytes], field: str = "page_hashes") -> None:
    """Check that every hash is `bytes` of length 32.

    Raises:
        InvalidInput: naming the index of the hashes at fault (the first few), such as `page_hashes[3]`.
    """
    if set(map(type, page_hashes)) <= {bytes} and set(map(len, page_hashes)) <= {HASH_BYTES}:
        return
    raise _faults(
        field,
        (
            (i, f"must be {HASH_BYTES} bytes, is {_shape(h)}")
            for i, h in enumerate(page_hashes)
            if type(h) is not bytes or len(h) != HASH_BYTES
        ),
    )


def from_hex(values: Sequence[str], field: str = "page_hashes") -> list[bytes]:
    """Return the hashes that are written as 64 hex digits each.

    Raises:
        InvalidInput: naming the index of the values at fault (the first few), such as `page_hashes[3]`.
    """
    if set(map(type, values)) <= {str} and set(map(len, values)) <= {HEX_DIGITS}:
        try:
            raw = bytes.fromhex("".join(values))
        except ValueError:
            raw = b""
        # `fromhex` skips blanks, so only the full length proves that every character was a digit.
        if len(raw) == HASH_BYTES * len(values):
            return _cut(raw)
    raise _faults(
        field,
        (
            (i, f"must be {HEX_DIGITS} hex digits, is {_shape(v)}")
            for i, v in enumerate(values)
            if not _is_hash_hex(v)
        ),
    )


def to_hex(page_hashes: Sequence[bytes]) -> list[str]:
    """Return each hash as 64 lower-case hex digits."""
    return [h.hex() for h in page_hashes]


def split(packed: bytes, field: str = "page_hashes") -> list[bytes]:
    """Return the hashes of a packed string of 32 bytes a page.

    Raises:
        InvalidInput: for a length that is no multiple of 32, naming the page that is cut short.
    """
    if len(packed) % HASH_BYTES:
        short = f"{field}[{len(packed) // HASH_BYTES}]"
        detail = f"the packed hashes end after {len(packed)} bytes, {HASH_BYTES} a page are needed"
        raise _invalid(short, "bad_hash", detail)
    return _cut(packed)


def join(page_hashes: Sequence[bytes], field: str = "page_hashes") -> bytes:
    """Return the hashes packed into one string of 32 bytes a page.

    Raises:
        InvalidInput: naming the index of a hash of another length, such as `page_hashes[3]`.
    """
    check_hashes(page_hashes, field)
    return b"".join(page_hashes)


def _check_page_size(page_size: object) -> None:
    if not isinstance(page_size, int) or page_size < 1:
        raise _invalid("page_size", "out_of_range", f"is {page_size!r}, must be an integer of 1 or more")


def _chain_start(cache_salt: str | None, extra_key: str | None, previous: object) -> bytes:
    seed = namespace_seed(cache_salt, extra_key)
    if previous is None:
        return seed
    if seed:
        detail = "a chain is seeded once, at its first page: give previous, or cache_salt / extra_key"
        raise _invalid("previous", "conflict", detail)
    if not isinstance(previous, bytes) or len(previous) != HASH_BYTES:
        raise _invalid("previous", "bad_hash", f"must be {HASH_BYTES} bytes, is {_shape(previous)}")
    return previous


def _seed_part(field: str, text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise _invalid(field, "bad_text", "has no UTF-8 form (a lone surrogate)") from None
    return b"\x01" + len(encoded).to_bytes(8, "little") + encoded


def _tokens(token_ids: TokenIds) -> _Tokens:
    """Return the ids as one array: uint32 where all fit, else uint64."""
    if not isinstance(token_ids, np.ndarray):
        return _tokens_of_sequence(token_ids)
    if token_ids.ndim != 1:
        raise _invalid("token_ids", "bad_shape", f"has {token_ids.ndim} dimensions, must have one")
    if token_ids.dtype.kind == "O":
        # What numpy makes of a list with ids above 2^63: Python ints, to be read as such.
        return _tokens_of_sequence(token_ids.tolist())
    if token_ids.dtype.kind not in "iu":
        raise _invalid("token_ids", "bad_type", f"has dtype {token_ids.dtype}, must be an integer dtype")
    if not token_ids.size:
        return np.empty(0, np.uint32)
    if token_ids.dtype.kind == "i" and int(token_ids.min()) < 0:
        raise _bad_tokens(token_ids.tolist())
    if int(token_ids.max()) <= _MAX_NARROW:
        return token_ids.astype(np.uint32, copy=False)
    return token_ids.astype(np.uint64, copy=False)


def _tokens_of_sequence(token_ids: Sequence[int]) -> _Tokens:
    if isinstance(token_ids, str | bytes | bytearray | memoryview):
        kind = type(token_ids).__name__
        raise _invalid("token_ids", "bad_type", f"is {kind}, must be a sequence of integers or an array")
    # `array` refuses floats and out-of-range values, which numpy would round or wrap.
    try:
        return np.asarray(array("I", token_ids), np.uint32)
    except OverflowError:
        pass
    except TypeError:
        raise _bad_tokens(token_ids) from None
    try:
        return np.asarray(array("Q", token_ids), np.uint64)
    except (OverflowError, TypeError):
        raise _bad_tokens(token_ids) from None


def _bad_tokens(token_ids: Sequence[int]) -> InvalidInput:
    faults: list[tuple[int, str]] = []
    for i, token in enumerate(token_ids):
        if not hasattr(token, "__index__"):
            faults.append((i, f"is {type(token).__name__}, must be an integer"))
        elif not 0 <= token <= _MAX_TOKEN:
            faults.append((i, f"is {token}, must be 0 to 2^64 - 1"))
    return _faults("token_ids", faults, code="bad_token")


def _chain(units: _Tokens, page_size: int, seed: bytes) -> list[bytes]:
    """Return the hash chain over `units`, shape (positions, ids a position)."""
    pages = len(units) // page_size
    hashes: list[bytes] = []
    sha256, previous = hashlib.sha256, seed
    for payload in _payloads(units[: pages * page_size].reshape(pages, page_size * units.shape[1])):
        previous = sha256(previous + payload).digest()
        hashes.append(previous)
    return hashes


def _payloads(by_page: _Tokens) -> Iterator[bytes | memoryview]:
    """Yield the bytes that are hashed of each page, as slices of one buffer."""
    ids = by_page.shape[1]
    narrow = _bytes_of(by_page.astype("<u4", order="C"))
    if by_page.dtype == np.uint32:
        for at in range(0, len(narrow), 4 * ids):
            yield narrow[at : at + 4 * ids]
        return
    wide = _bytes_of(by_page.astype("<u8", order="C"))
    has_wide: list[bool] = np.any(by_page > _MAX_NARROW, axis=1).tolist()
    for page, is_wide in enumerate(has_wide):
        if is_wide:
            yield _WIDE_MARK + wide[8 * ids * page : 8 * ids * (page + 1)]
        else:
            yield narrow[4 * ids * page : 4 * ids * (page + 1)]


def _bytes_of(by_page: npt.NDArray[Any]) -> memoryview:
    return by_page.view(np.uint8).reshape(-1).data


def _cut(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def _is_hash_hex(value: object) -> bool:
    return isinstance(value, str) and _HASH_HEX.fullmatch(value) is not None


def _shape(value: object) -> str:
    kind = type(value).__name__
    return f"{kind} of length {len(value)}" if isinstance(value, str | bytes) else kind


def _invalid(field: str, code: str, detail: str) -> InvalidInput:
    return InvalidInput("the page hashes cannot be computed", [FieldError(field, code, detail)])


def _faults(field: str, faults: Iterable[tuple[int, str]], code: str = "bad_hash") -> InvalidInput:
    listed = [FieldError(f"{field}[{i}]", code, detail) for i, detail in islice(faults, _LISTED_FAULTS)]
    return InvalidInput(f"{field} holds values that cannot be used", listed)
