"""Finds a key that one map of a msgpack body holds twice.

Decoders keep the last of two equal keys without a word, so that two readers of one body may act on different
values. A body in msgpack's shortest form gives itself away by its length (`codec.decode_msgpack`); this walks
the headers of any other and looks at nothing but keys.

Pure: values in, values out.
"""

# ruff: noqa: PLR2004 - the numbers are opcodes of the specification

from __future__ import annotations

from typing import Final, NamedTuple

from metadata.errors import FieldError, InvalidInput

MAX_VALUES: Final = 100_000

# Opcodes 0xc0 to 0xdf of the msgpack specification. Bytes of the length that follows the opcode ...
_STR: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BLOB: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXT: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_ARRAY: Final = {0xDC: 2, 0xDD: 4}
_MAP: Final = {0xDE: 2, 0xDF: 4}
# ... or of the value: nil and booleans, floats, integers, fixed extensions with their type byte.
_SCALAR: Final = {
    **{0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8},
    **{0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},
    **{0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17},
}


class _Value(NamedTuple):
    """One value's place: its own bytes, then `items` values inside it (a map has two an entry)."""

    start: int
    stop: int
    items: int = 0
    is_map: bool = False


def repeated_key(body: bytes) -> str | None:
    """Return a key that stands twice in one map of the body, or None.

    Args:
        body: exactly one well-formed msgpack value; what a decoder has taken already.

    Raises:
        InvalidInput: for more than `MAX_VALUES` values, which would take too long to walk.
    """
    values = 0
    # One entry an open container: items still to come, and the keys seen if it is a map.
    open_containers: list[tuple[int, set[bytes] | None]] = [(1, None)]
    at = 0
    while open_containers:
        left, keys = open_containers.pop()
        if left == 0:
            continue
        open_containers.append((left - 1, keys))
        value = _value_at(body, at)
        values += 1
        if values > MAX_VALUES:
            detail = f"a body of more than {MAX_VALUES} values must be in msgpack's shortest form"
            raise InvalidInput("the body cannot be read", [FieldError("", "too_many_values", detail)])
        if keys is not None and left % 2 == 0:
            key = body[value.start : value.stop]
            if key in keys:
                return key.decode("utf-8", "backslashreplace")
            keys.add(key)
        if value.items:
            open_containers.append((value.items, set() if value.is_map else None))
        at = value.stop
    return None


def _value_at(body: bytes, at: int) -> _Value:
    op = body[at]
    at += 1
    if op < 0x80 or op >= 0xE0:  # small integers: the opcode is the value
        return _Value(at - 1, at)
    if op < 0x90:
        return _Value(at, at, 2 * (op & 0x0F), True)
    if op < 0xA0:
        return _Value(at, at, op & 0x0F)
    if op < 0xC0:
        return _Value(at, at + (op & 0x1F))
    return _sized_value_at(body, at, op)


def _sized_value_at(body: bytes, at: int, op: int) -> _Value:
    if op in _SCALAR:
        return _Value(at - 1, at + _SCALAR[op])
    for widths, extra in ((_STR, 0), (_BLOB, 0), (_EXT, 1)):
        if op in widths:
            start = at + widths[op]
            return _Value(start, start + extra + int.from_bytes(body[at:start], "big"))
    widths = _MAP if op in _MAP else _ARRAY
    stop = at + widths[op]
    count = int.from_bytes(body[at:stop], "big")
    return _Value(stop, stop, 2 * count, True) if op in _MAP else _Value(stop, stop, count)
