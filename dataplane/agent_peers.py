"""Who is at the other end of a connection: the kernel says so on a Unix socket (`SO_PEERCRED`)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

PEER: Final = "caketin_peer"
"""Where a request's state has its peer."""

_CREDENTIALS: Final = struct.Struct("3i")
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of one connection.

    Attributes:
        number: of the connection, never the same twice.
        uid: user of the peer's process; None over TCP.
        pid: its process; None over TCP.
    """

    number: int
    uid: int | None
    pid: int | None


def peer_of(connection: Any) -> Peer:
    """Return who is at the other end of a connected socket, or of what has a socket's `getsockopt`."""
    if connection.family != socket.AF_UNIX:
        return Peer(next(_numbers), None, None)
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(packed)
    return Peer(next(_numbers), uid, pid)
