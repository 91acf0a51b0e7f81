"""The file that holds one shard of one page: header, part table, bytes. Read and written without copies.

    8 bytes magic | u32 table length | u32 CRC-32 of the table | table | bytes of all parts, in table order
    table: u16 identity length | identity | u16 parts | one entry a part
    entry: u8 name length | name | u64 bytes | u32 CRC-32

The identity is the object key without its part. It makes a file that was moved onto another name as wrong as
one with flipped bits. Numbers are little-endian.
"""

from __future__ import annotations

import ctypes
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

_MAGIC: Final = b"CTPAGE1\n"
_START: Final = struct.Struct("<8sII")
_COUNT: Final = struct.Struct("<H")
_PART: Final = struct.Struct("<QI")
_FIRST_READ: Final = 1024  # holds the header of a page with a score of parts
_MAX_TABLE: Final = 1 << 20
_IOV_MAX: Final = 1024

Memory: TypeAlias = "ctypes.Array[ctypes.c_char]"
"""Bytes somewhere in this process's memory, as the buffer protocol sees them."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where a part lies in its file: offset and length in bytes, and the CRC-32 of its bytes."""

    offset: int
    length: int
    checksum: int


class Damaged(Exception):
    """The file is not what its name and its header say."""


def memory_at(addresses: Iterable[int], lengths: Iterable[int]) -> list[Memory]:
    """Return the memory at some addresses; reading and writing it goes straight there."""
    return [_array_type(n).from_address(a) for a, n in zip(addresses, lengths, strict=True)]


def checksum_of(memory: Iterable[Memory]) -> int:
    """Return the CRC-32 over several pieces of memory in order."""
    value = 0
    for piece in memory:
        value = zlib.crc32(piece, value)
    return value


def encode_header(identity: str, parts: Sequence[tuple[str, int, int]]) -> bytes:
    """Return the header of a file with these parts: name, bytes, CRC-32."""
    name = identity.encode()
    table = bytearray(_COUNT.pack(len(name)) + name + _COUNT.pack(len(parts)))
    for part, length, checksum in parts:
        encoded = part.encode()
        table += bytes((len(encoded),)) + encoded + _PART.pack(length, checksum)
    return _START.pack(_MAGIC, len(table), zlib.crc32(table)) + table


def read_parts(fd: int, identity: str) -> dict[str, StoredPart]:
    """Return the part table of an open file, in file order.

    Raises:
        Damaged: another file's identity, a broken header, or fewer or more bytes than the header promises.
    """
    found, parts = read_table(fd)
    if found != identity:
        raise Damaged(f"holds {found}")
    return parts


def read_table(fd: int) -> tuple[str, dict[str, StoredPart]]:
    """Return identity and part table of an open file, for a walk that trusts no file name.

    Raises:
        Damaged: a broken header, or fewer or more bytes than the header promises.
    """
    raw = os.pread(fd, _FIRST_READ, 0)
    if len(raw) < _START.size:
        raise Damaged("is cut short")
    magic, length, checksum = _START.unpack_from(raw)
    if magic != _MAGIC or length > _MAX_TABLE:
        raise Damaged("has no header")
    end = _START.size + length
    if len(raw) < end:
        raw += os.pread(fd, end - len(raw), len(raw))
    table = raw[_START.size : end]
    if len(table) != length or zlib.crc32(table) != checksum:
        raise Damaged("has a damaged header")
    try:
        identity, parts, size = _decode(table, end)
    except (struct.error, IndexError, UnicodeDecodeError) as e:
        raise Damaged("has a header that makes no sense") from e
    if os.fstat(fd).st_size != size:
        raise Damaged("has another length than its header says")
    return identity, parts


def read_into(fd: int, part: StoredPart, memory: Sequence[Memory]) -> bool:
    """Read one part into memory of the same total length; return whether the bytes are the stored ones."""
    offset, left = part.offset, list(memory)
    while left:
        count = os.preadv(fd, left[:_IOV_MAX], offset)
        if count == 0:
            return False
        offset += count
        left = _after(left, count)
    return checksum_of(memory) == part.checksum


def write_all(fd: int, pieces: Sequence[bytes | Memory]) -> None:
    """Write pieces one after the other.

    Raises:
        OSError: disk full among others; part of the bytes may be written.
    """
    left: list[Any] = list(pieces)
    while left:
        left = _after(left, os.writev(fd, left[:_IOV_MAX]))


def copy_part(source: int, target: int, part: StoredPart) -> None:
    """Append a part of one open file to another.

    Raises:
        OSError: disk full among others.
        Damaged: the source ends early.
    """
    offset, end = part.offset, part.offset + part.length
    while offset < end:
        count = os.sendfile(target, source, offset, end - offset)
        if count == 0:
            raise Damaged("is cut short")
        offset += count


def _decode(table: bytes, data_start: int) -> tuple[str, dict[str, StoredPart], int]:
    (length,) = _COUNT.unpack_from(table)
    at = _COUNT.size + length
    identity = table[_COUNT.size : at].decode()
    (count,) = _COUNT.unpack_from(table, at)
    at += _COUNT.size
    offset = data_start
    parts: dict[str, StoredPart] = {}
    for _ in range(count):
        name_end = at + 1 + table[at]
        name = table[at + 1 : name_end].decode()
        length, checksum = _PART.unpack_from(table, name_end)
        parts[name] = StoredPart(offset, length, checksum)
        offset += length
        at = name_end + _PART.size
    return identity, parts, offset


def _after(pieces: list[Any], count: int) -> list[Any]:
    """Return what is left of `pieces` behind their first `count` bytes."""
    for i, piece in enumerate(pieces):
        if count < len(piece):
            return [memoryview(piece).cast("B")[count:], *pieces[i + 1 :]] if count else pieces[i:]
        count -= len(piece)
    return []


@lru_cache(maxsize=4096)
def _array_type(length: int) -> type[Memory]:
    return ctypes.c_char * length
