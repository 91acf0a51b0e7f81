"""A call beside the caller's own work.

In a daemon thread: one that hangs in a store for a minute must not hold the end of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """One call, running from its making on."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        """Start `call` in a thread of this name."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._call = call
        threading.Thread(target=self._run, name=f"caketin-{name}", daemon=True).start()

    def wait(self) -> None:
        """Wait until it has ended, however it did."""
        self._ended.wait()

    def result(self) -> T:
        """Wait for the end; return what the call returned, or raise what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
