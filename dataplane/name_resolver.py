"""Names to addresses within a deadline: `getaddrinfo` has no time-out of its own."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from typing import Any, TypeAlias

Address: TypeAlias = tuple[Any, ...]


class NameResolver:
    """Looks names up beside the caller, in a thread a name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int], list[queue.SimpleQueue[list[Address] | OSError]]] = {}

    def addresses(self, host: str, port: int, seconds: float) -> list[Address]:
        """Return the addresses of a host.

        Raises:
            OSError: there are none.
            TimeoutError: no answer until the deadline.
        """
        with contextlib.suppress(OSError):
            return _addresses(host, port, socket.AI_NUMERICHOST)
        mine: queue.SimpleQueue[list[Address] | OSError] = queue.SimpleQueue()
        with self._lock:
            # One thread a name, however many callers wait: a resolver that hangs must not collect threads.
            waiting = self._running.setdefault((host, port), [])
            waiting.append(mine)
            if len(waiting) == 1:
                threading.Thread(target=self._resolve, args=(host, port), daemon=True).start()
        try:
            found = mine.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"{host} was not resolved in time") from None
        if isinstance(found, OSError):
            raise found
        return found

    def _resolve(self, host: str, port: int) -> None:
        found: list[Address] | OSError
        try:
            found = _addresses(host, port, 0)
        except OSError as error:
            found = error
        except UnicodeError as error:
            found = OSError(str(error))
        with self._lock:
            waiting = self._running.pop((host, port))
        for one in waiting:
            one.put(found)


def _addresses(host: str, port: int, flags: int) -> list[Address]:
    return [found[4] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]
