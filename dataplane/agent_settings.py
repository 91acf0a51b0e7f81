"""What an agent is told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.store_access import AS_TOLD, StoreOverrides
from metadata.errors import FieldError, InvalidInput


def default_socket() -> Path:
    """Return `$XDG_RUNTIME_DIR/caketin/agent.sock`, or a place of this user below /tmp."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "caketin" / "agent.sock" if base else Path(f"/tmp/caketin-{os.getuid()}/agent.sock")  # noqa: S108  a folder of our own, checked to be ours


def default_shared_dir() -> Path:
    """Return a folder of this user in the machine's shared memory."""
    return Path(f"/dev/shm/caketin-{os.getuid()}")  # noqa: S108  made private, and checked to be ours


@dataclass(frozen=True)
class AgentSettings:
    """Settings of one agent.

    Attributes:
        url: of the control plane.
        socket: path of the Unix socket.
        shared_dir: folder on a tmpfs for the pools.
        memory_bytes: most bytes of all pools together.
        token: access token, or None.
        allowed_uids: users that may call besides our own.
        host: address for TCP, which serves metrics, probes and the status only.
        port: for TCP; None: no TCP.
        idle_seconds: a session without a word for so long ends.
        reconnect_seconds: a session whose connections are all closed ends after so long.
        transfers: how many move bytes at a time.
        queued_transfers: how many may wait; one more is refused.
        hanging_transfers: how many overdue ones may hang in the store before others are not tried.
        bytes_in_flight: most bytes of the transfers that run; a larger one runs alone.
        transfer_seconds: deadline of a transfer that is given none, and the longest that it may be given.
        grace_seconds: how long slots rest after a call of the store that timed out came back.
        drain_seconds: how long transfers may take to end after SIGTERM.
        call_seconds: deadline of a call to the control plane.
        join_seconds: how long opening a session waits for its registration; it goes on in the background.
        keep_seconds: how long a transfer that ended can be asked for.
        max_sessions: sessions at a time.
        max_body_bytes: of a request.
        store: how this host reaches the store.
    """

    url: str
    socket: Path = field(default_factory=default_socket)
    shared_dir: Path = field(default_factory=default_shared_dir)
    memory_bytes: int = 1 << 30
    token: str | None = field(default=None, repr=False)
    allowed_uids: frozenset[int] = frozenset()
    host: str = "127.0.0.1"
    port: int | None = None
    idle_seconds: float = 30.0
    reconnect_seconds: float = 1.0
    transfers: int = 4
    queued_transfers: int = 256
    hanging_transfers: int = 16
    bytes_in_flight: int = 1 << 30
    transfer_seconds: float = 60.0
    grace_seconds: float = 5.0
    drain_seconds: float = 20.0
    call_seconds: float = 1.0
    join_seconds: float = 3.0
    keep_seconds: float = 60.0
    max_sessions: int = 256
    max_body_bytes: int = 8 << 20
    store: StoreOverrides = AS_TOLD

    def __post_init__(self) -> None:
        positive = (
            *("memory_bytes", "idle_seconds", "reconnect_seconds", "transfers", "queued_transfers"),
            *("hanging_transfers", "bytes_in_flight", "transfer_seconds", "call_seconds", "max_sessions"),
        )
        errors = [
            FieldError(name, "out_of_range", f"is {getattr(self, name)}, must be positive")
            for name in positive
            if not getattr(self, name) > 0
        ]
        errors += [
            FieldError(name, "out_of_range", "must not be negative")
            for name in ("grace_seconds", "drain_seconds", "join_seconds", "keep_seconds")
            if getattr(self, name) < 0
        ]
        if errors:
            raise InvalidInput("the agent cannot work so", errors)
