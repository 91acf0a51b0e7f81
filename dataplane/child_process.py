"""Servers that we start as children: they die with us, say when they are ready, and leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metadata.errors import CaketinError

# Looked up before any fork: a child of a process with threads must not touch the loader's locks.
_PRCTL: Final = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
_PR_SET_PDEATHSIG: Final = 1
_TAIL_BYTES: Final = 2_000
_LOOPBACK: Final = "127.0.0.1"


class ChildFailed(CaketinError):
    """A server that we started ended, or was not ready in time."""

    code = "child_failed"

    def __str__(self) -> str:
        return self.detail


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
        cls, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Start `command` in a session of its own: a Ctrl-C reaches us alone and we end it in order.

        Only in the main thread: the kernel ends the child when the *thread* that started it ends.

        Raises:
            RuntimeError: called in another thread.
            ChildFailed: the command cannot be run.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"{name} must be started in the main thread: it dies with its thread")
        log.parent.mkdir(parents=True, exist_ok=True)
        us = os.getpid()
        try:
            with log.open("ab") as out:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=None if env is None else dict(env),
                    start_new_session=True,
                    # Two system calls, so that a lock held by one of our threads is no danger to the child.
                    # The kernel keeps the wish over the exec.
                    preexec_fn=lambda: _die_with(us),  # noqa: PLW1509
                )
        except OSError as error:
            raise ChildFailed(f"{name} cannot be started: {error}") from error
        return cls(name, process, log)

    def wait_ready(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `ready()`.

        Raises:
            ChildFailed: it ended or was not ready in time; the text holds the end of its log.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if (ended := self.ended()) is not None:
                raise ChildFailed(ended)
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name} was not ready after {seconds:g} s:\n{self.tail()}")
            time.sleep(0.02)

    def ended(self) -> str | None:
        """Return how it ended and the end of its log, or None while it runs."""
        code = self.process.poll()
        return None if code is None else f"{self.name} ended with code {code}:\n{self.tail()}"

    def tail(self) -> str:
        """Return the end of the child's output."""
        try:
            return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return ""

    def kill(self) -> None:
        """End the child at once, as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 5.0) -> None:
        """End the child: SIGTERM, and SIGKILL after `seconds`. Twice is fine."""
        self.ask_to_end()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def ask_to_end(self) -> None:
        """Send SIGTERM and do not wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


def die_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends (Linux)."""
    _die_with(os.getppid())


def _die_with(parent: int) -> None:
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)


def free_port(host: str = _LOOPBACK) -> int:
    """Return a TCP port that was free a moment ago."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = _LOOPBACK) -> list[int]:
    """Return different TCP ports that were free a moment ago."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def accepts(host: str, port: int, seconds: float = 0.2) -> bool:
    """Return whether something listens at `host:port`."""
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except OSError:
        return False
