"""A way to the control plane that a test can close, jam or slow down."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit


class Gate:
    """A TCP relay on a port of its own.

    Attributes:
        url: where it listens.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 0)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._delay = 0.0
        self._jammed = threading.Event()
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    def open(self) -> None:
        """Let everything through."""
        self._jammed.clear()
        self._delay = 0.0
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self._port))
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections and cut those there are, as a process that has died."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # A blocked accept returns only when the socket is shut down.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            cut, self._open = self._open, []
        for sock in cut:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def jam(self) -> None:
        """Take everything and pass nothing on, as a process that hangs."""
        self._jammed.set()

    def slow(self, seconds: float) -> None:
        """Pass on what comes after a while."""
        self._delay = seconds

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self._open += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                while self._jammed.is_set():
                    time.sleep(0.02)
                time.sleep(self._delay)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def gate_to(target: str) -> Iterator[Gate]:
    """Give an open gate, closed at the end."""
    gate = Gate(target)
    gate.open()
    try:
        yield gate
    finally:
        gate.close()
