"""Servers that we start as children: they die with us, say when they are ready, and leave nothing behind."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_TAIL_BYTES: Final = 2_000


class ChildFailed(RuntimeError):
    """A server that we started ended, or was not ready in time."""


@dataclass
class ChildProcess:
    """A running child.

    Attributes:
        name: what it is, for messages.
        process: the process.
        log: file with its output.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None
    ) -> ChildProcess:
        """Start `command` in a session of its own: a Ctrl-C reaches us alone and we end it in order."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                # The child runs nothing but one prctl before exec, so that a thread holding a lock here is no
                # danger to it.
                preexec_fn=die_with_parent,  # noqa: PLW1509
            )
        return cls(name, process, log)

    def wait_ready(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `ready()`.

        Raises:
            ChildFailed: it ended or was not ready in time; the text holds the end of its log.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if self.process.poll() is not None:
                raise ChildFailed(f"{self.name} ended with code {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name} was not ready after {seconds:.0f} s:\n{self.tail()}")
            time.sleep(0.02)

    def tail(self) -> str:
        """Return the end of the child's output."""
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""

    def stop(self, seconds: float = 5.0) -> None:
        """End the child: SIGTERM, and SIGKILL after `seconds`. Twice is fine."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux); for `preexec_fn`."""
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = getattr(libc, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def accepts(host: str, port: int) -> bool:
    """Return whether something listens at `host:port`."""
    try:
        with socket.create_connection((host, port), timeout=0.2):
            return True
    except OSError:
        return False
