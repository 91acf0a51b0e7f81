"""Calls that block, each in a thread of its own, and how many transfers may be under way.

A daemon thread a call instead of a pool: a call that hangs in a store for a minute must keep neither another
call nor the end of the process waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `call` in a thread; the future is of the running loop. Cancelling it does not end the call."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            tell(future.set_exception, error)
        else:
            tell(future.set_result, result)

    def tell(what: Callable[[Any], None], value: object) -> None:
        def now() -> None:
            if not future.cancelled():
                what(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, nobody waits any more
            loop.call_soon_threadsafe(now)

    threading.Thread(target=run, name=f"caketin-{name}", daemon=True).start()
    return future


class TransferRoom:
    """Lets transfers in, first come, first served, while their number and their bytes are within bounds."""

    def __init__(self, transfers: int, most_bytes: int) -> None:
        self._transfers = transfers
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.running = 0
        self.bytes = 0

    async def enter(self, size: int) -> None:
        """Wait for room; a transfer larger than all bytes runs alone. `leave` with the same size ends it."""
        gate = asyncio.get_running_loop().create_future()
        self._waiting.append((size, gate))
        self._let_in()
        try:
            await gate
        except asyncio.CancelledError:
            if gate.done() and not gate.cancelled():
                self.leave(size)
            else:
                self._waiting.remove((size, gate))
                self._let_in()
            raise

    def leave(self, size: int) -> None:
        """Give the room back."""
        self.running -= 1
        self.bytes -= size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            size, gate = self._waiting[0]
            if self.running >= self._transfers or (self.running and self.bytes + size > self._most_bytes):
                return
            self._waiting.popleft()
            if gate.cancelled():
                continue
            self.running += 1
            self.bytes += size
            gate.set_result(None)
