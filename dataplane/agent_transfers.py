"""The transfers of an agent: what each has come to, and the rules that all of them keep.

A transfer ends by its deadline, whatever the store does. One whose store call has not returned by then is a
miss at once; its slots stay quarantined until the call came back and, since a device may write for a moment
after a time-out, for a period of grace (M1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataplane.agent_errors import RateLimited, UnknownTransfer
from dataplane.agent_sessions import Session
from dataplane.agent_settings import AgentSettings
from dataplane.agent_threads import TransferRoom, in_thread
from dataplane.messages.agent import Transfer, TransferCounts
from metadata.errors import CaketinError

log = logging.getLogger(__name__)

State: TypeAlias = Literal["queued", "running", "done", "cancelled", "failed"]
Kind: TypeAlias = Literal["backup", "prefetch"]
T = TypeVar("T")

ENDED: Final = frozenset({"done", "cancelled", "failed"})
SOFT_SHARE: Final = 0.85
"""Share of its time after which a transfer begins no further call of the store, so that it can end by itself
with what it has."""
_CANCEL_SECONDS: Final = 0.25
"""What a cancelled transfer gets to end by itself before its slots are quarantined."""


class TransferOverdue(CaketinError):
    """The store has not returned by the deadline, or the transfer was cancelled while it was blocked."""

    code = "transfer_overdue"


@dataclass(eq=False)
class Record:
    """One transfer.

    Attributes:
        transfer_id: random.
        kind: back up or prefetch.
        session: who asked for it.
        ends_at: its deadline, on the monotonic clock.
        keeps_part: whether a cancelled one counts for what it has by then.
        cancel: told to end.
        state: see `State`.
        pages_done: pool -> pages moved so far, or there already.
        transfers_done: every stage finished (O4).
        restorable: lengths that can be restored from host memory now.
        slots: of the longest of them, int32 (pages,) of each pool.
        token: of the lock on it.
        error: what cut it short.
        begun: whether its work was started.
        over: set once it has ended.
        ended_at: when that was.
    """

    kind: Kind
    session: Session
    ends_at: float
    keeps_part: bool = False
    transfer_id: str = field(default_factory=lambda: f"t-{secrets.token_hex(8)}")
    cancel: threading.Event = field(default_factory=threading.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    state: State = "queued"
    pages_done: dict[str, int] = field(default_factory=dict)
    transfers_done: bool = False
    restorable: list[tuple[int, int]] = field(default_factory=list)
    slots: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    token: str | None = None
    error: str | None = None
    begun: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ended_at: float = 0.0

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.ends_at - time.monotonic()

    def progress(self, pool: str, pages: int) -> None:
        """Count pages that were moved."""
        self.pages_done[pool] = self.pages_done.get(pool, 0) + pages

    def message(self) -> Transfer:
        """Return what an engine is told."""
        return Transfer(
            state=self.state,
            pages_done=dict(self.pages_done),
            transfers_done=self.transfers_done,
            restorable=self.restorable,
            slots={n: at.tolist() for n, at in self.slots.items()},
            token=self.token,
            error=self.error,
        )


Work: TypeAlias = Callable[[Record], Coroutine[Any, Any, None]]
"""Does a transfer: sets its result and leaves its state to the caller; an error that it raises is its end."""


class Transfers:
    """All transfers. All calls belong to the event loop."""

    def __init__(self, settings: AgentSettings, returned: Callable[[Session], None]) -> None:
        """Take the settings; `returned` is told when a transfer of a session has let go of the memory."""
        self._settings = settings
        self._returned = returned
        self._room = TransferRoom(settings.transfers, settings.bytes_in_flight)
        self._records: dict[str, Record] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.hanging = 0
        self.ended: Counter[str] = Counter()

    def start(self, record: Record, size: int, work: Work, unused: Callable[[], None] = lambda: None) -> str:
        """Begin a transfer; returns its id.

        Args:
            record: the transfer.
            size: most bytes that it moves.
            work: what it does.
            unused: called where the work is never started.

        Raises:
            RateLimited: as many wait as may.
        """
        waiting = sum(r.state == "queued" for r in self._records.values())
        if waiting >= self._settings.queued_transfers:
            raise RateLimited(f"{waiting} transfers wait already: come again when one has ended")
        self._records[record.transfer_id] = record
        record.session.running += 1
        task = asyncio.get_running_loop().create_task(self._run(record, size, work, unused))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return record.transfer_id

    def get(self, transfer_id: str) -> Record:
        """Return a transfer.

        Raises:
            UnknownTransfer: there is none, or it ended too long ago.
        """
        found = self._records.get(transfer_id)
        if found is None:
            raise UnknownTransfer(f"there is no transfer {transfer_id!r}")
        return found

    def cancel(self, record: Record) -> None:
        """Have a transfer end soon; one that has ended stays as it is."""
        if record.state not in ENDED:
            record.cancel.set()
            record.cancelled.set()

    def session_ended(self, session: Session) -> None:
        """Cancel what nobody waits for any more. Back-ups go on: what was published is to be stored."""
        for record in self._records.values():
            if record.session is session and record.kind == "prefetch":
                self.cancel(record)

    def counts(self) -> TransferCounts:
        """Return transfers now, and ended so far."""
        now = Counter(r.state for r in self._records.values() if r.state not in ENDED)
        return TransferCounts(
            queued=now["queued"],
            running=now["running"],
            done=self.ended["done"],
            cancelled=self.ended["cancelled"],
            failed=self.ended["failed"],
        )

    @property
    def bytes_in_flight(self) -> int:
        """Most bytes that the running transfers move."""
        return self._room.bytes

    def sweep(self) -> None:
        """Forget what ended long ago."""
        before = time.monotonic() - self._settings.keep_seconds
        for record in [r for r in self._records.values() if r.state in ENDED and r.ended_at < before]:
            del self._records[record.transfer_id]

    async def drain(self, seconds: float) -> None:
        """Let back-ups end within a time; prefetches are cancelled, for nobody will use what they bring."""
        for record in list(self._records.values()):
            if record.kind == "prefetch":
                self.cancel(record)
        running = [r.over.wait() for r in self._records.values() if r.state not in ENDED]
        if running:
            tasks = [asyncio.ensure_future(w) for w in running]
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            for record in self._records.values():
                self.cancel(record)

    def call(self, record: Record, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run what blocks in a thread of its own."""
        return in_thread(work, record.kind)

    async def until_over(self, record: Record, future: asyncio.Future[T]) -> bool:
        """Wait for a call of the store; return False where the deadline or a cancel came first.

        A cancelled transfer gets a moment to end by itself with what it has.
        """
        told = asyncio.ensure_future(record.cancelled.wait())
        waits: set[asyncio.Future[Any]] = {future, told}
        try:
            await asyncio.wait(waits, timeout=max(0.0, record.seconds_left), return_when="FIRST_COMPLETED")
            if not future.done() and record.cancelled.is_set():
                await asyncio.wait({future}, timeout=min(_CANCEL_SECONDS, max(0.0, record.seconds_left)))
        finally:
            told.cancel()
        return future.done()

    def when_back(
        self, record: Record, future: asyncio.Future[T], free: Callable[[], None], *, rest: bool = True
    ) -> None:
        """Free memory once a call of the store has come back, and after the period of grace.

        The session counts the transfer as running until then.
        """
        record.session.running += 1
        self.hanging += not future.done()

        async def wait() -> None:
            hung = not future.done()
            with contextlib.suppress(Exception):
                await future
            self.hanging -= hung
            if rest:
                await asyncio.sleep(self._settings.grace_seconds)
            free()
            self._returned(record.session)

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, record: Record, size: int, work: Work, unused: Callable[[], None]) -> None:
        state: State = "failed"
        try:
            await self._in_room(record, size, work)
            cut = record.cancel.is_set() and not record.keeps_part and not record.transfers_done
            state = "cancelled" if cut else "done"
        except CaketinError as error:
            record.error = error.detail
            state = "cancelled" if record.cancel.is_set() else "failed"
        except Exception:
            log.exception("a transfer failed in a way that nobody foresaw")
            record.error = "a fault of the agent; its log says more"
        finally:
            if not record.begun:
                unused()
            self._end(record, state)

    async def _in_room(self, record: Record, size: int, work: Work) -> None:
        if self.hanging >= self._settings.hanging_transfers:
            raise TransferOverdue(f"{self.hanging} transfers hang in the store: this one is not tried")
        entering = asyncio.ensure_future(self._room.enter(size))
        if not await self.until_over(record, entering):
            entering.cancel()
            raise TransferOverdue("other transfers took all of its time: it never began")
        try:
            record.state, record.begun = "running", True
            await work(record)
        finally:
            self._room.leave(size)

    def _end(self, record: Record, state: State) -> None:
        record.state, record.ended_at = state, time.monotonic()
        if state != "done":
            record.transfers_done = False
        self.ended[state] += 1
        record.over.set()
        self._returned(record.session)
