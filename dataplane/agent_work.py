"""What a transfer does, between the host tier (on the event loop) and the mover (in a thread).

Every call of the tier that belongs together is made without an `await` in between.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Final

import numpy as np

from dataplane.agent_plan import (
    Policies,
    ReadPlan,
    listed_slots,
    parents,
    part_of,
    plan_read,
    shorter_length,
)
from dataplane.agent_store import SharedStores
from dataplane.agent_tiers import Tier
from dataplane.agent_transfers import SOFT_SHARE, Record, TransferOverdue, Transfers
from dataplane.back_up import BackedUp
from dataplane.control_client import ControlClient
from dataplane.control_plane import ControlPlaneAway
from dataplane.host_answers import NoSlots, PageMasks, Pinned, UnknownToken
from dataplane.messages import control
from dataplane.prefetch import Prefetched
from dataplane.read_log import ReadLog, ReadSoFar
from metadata.codec import PageHashes
from metadata.errors import CaketinError, InvalidInput
from metadata.hit_policy import PageMask
from metadata.pools import AllPages, TrailingPages

log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4
"""How many lengths are tried where slots are short; each looks at all pages of the call."""
_SPARE_SHARE: Final = 2
"""One of so many slots that would stay free may take windows of shorter lengths."""


class NotAttached(CaketinError):
    """The control plane has not been reached yet, so nothing is known of L3."""

    code = "not_attached"


class TransferCut(CaketinError):
    """The transfer ended before all was moved."""

    code = "transfer_cut"


@dataclass(frozen=True)
class PrefetchCall:
    """What a prefetch was asked for.

    Attributes:
        hashes: pages of the call.
        first_page: pages of the sequence before them.
        parent: hash of the page before them.
        policies: pools that move, and which pages each needs.
        queries: as the lookup is asked.
        lock: whether the result is locked.
    """

    hashes: PageHashes
    first_page: int
    parent: bytes | None
    policies: Policies
    queries: dict[str, control.PoolQuery] | None
    lock: bool


@dataclass(frozen=True, slots=True)
class _Reading:
    """A read that has its slots.

    Attributes:
        plan: what to read.
        token: of the reservation.
        hold: of the lock on the pages before, None where there are none.
        slots: for the mover.
    """

    plan: ReadPlan
    token: str
    hold: str | None
    slots: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]


class PrefetchWork:
    """One prefetch."""

    def __init__(self, call: PrefetchCall, transfers: Transfers, stores: SharedStores) -> None:
        self._call = call
        self._transfers = transfers
        self._stores = stores

    async def run(self, record: Record) -> None:
        """Look up, read what host memory lacks, and lock what can be restored then.

        Raises:
            TransferOverdue: the deadline passed, or a cancel, while a call was blocked; and what was read by
                then makes no restorable length.
            TransferCut: the same, where a call failed; or the session ended.
        """
        promise = await self._lookup(record)
        _check_open(record)
        promised = promise.hit_pages if promise else 0
        reading = self._reserve(record, promise) if promise else None
        # Nothing to read is a promise kept; no room to read is none.
        vouched = 0 if record.error else promised
        cut: CaketinError | None = None
        if reading is not None:
            try:
                done = await self._read(record, reading)
            except (TransferOverdue, TransferCut) as error:
                # What calls before the blocked one have read is resident by now, and counts like host memory.
                _check_open(record)
                cut, vouched, record.error = error, 0, error.detail
            else:
                vouched = self._attach(record, reading, done)
                if done.error is not None:
                    record.error = done.error.detail
        self._finish(record, promised, vouched)
        if cut is not None and not record.restorable:
            raise cut

    async def _lookup(self, record: Record) -> control.LookupResult | None:
        """Return what L3 promises; None where nobody can say, which is a miss."""
        link, space, call = record.session.link, record.session.namespace_id, self._call
        if not space or not call.hashes:
            return None

        def ask(client: ControlClient) -> control.LookupResult:
            return client.lookup(
                space,
                call.hashes,
                first_page=call.first_page,
                pools=call.queries,
                request_id=record.transfer_id,
            )

        asked = self._transfers.call(record, lambda: link.call(ask))
        if not await self._transfers.until_over(record, asked):
            raise TransferOverdue("the lookup did not end in time")
        try:
            found = asked.result()
        except CaketinError as error:
            # Host memory may still have something. An unknown namespace or engine registers again by itself.
            record.error = error.detail
            if not isinstance(error, ControlPlaneAway):
                log.warning("a lookup was refused: %s", error)
            return None
        return None if found.degraded else found

    def _reserve(self, record: Record, promise: control.LookupResult) -> _Reading | None:
        """Return the read with its slots, None where nothing is to be read.

        Where the slots do not suffice, the longest length that they suffice for.
        """
        session, call = record.session, self._call
        tier = session.tier
        length = promise.hit_pages
        for _ in range(_ATTEMPTS):
            found = tier.host.match(call.hashes, parent=call.parent, pools=call.policies)
            if length <= found.pages:
                return None
            plan = plan_read(
                promise, found.slots, call.policies, length=length, spare=_spare(tier, call.policies)
            )
            if plan is None:
                return None
            # Before room is made: what was found must not be evicted for what is read.
            held = tier.host.lock(
                session.session_id,
                call.hashes,
                parent=call.parent,
                length=plan.start,
                pools=call.policies,
            )
            try:
                got = tier.host.reserve(
                    session.session_id,
                    call.hashes[plan.start : plan.stop],
                    parent=parents(call.hashes, plan.start, call.parent),
                    pools=plan.masks,
                    fresh=True,
                )
            except NoSlots as error:
                _release(tier, held.token)
                record.error = error.detail
                length = shorter_length(promise, min(length, _room(plan, error, call.policies) + 1))
                if not length:
                    return None
                promise = part_of(promise, 0, length)
                continue
            except BaseException:
                _release(tier, held.token)
                raise
            tier.note_evicted(got.evicted)
            return _Reading(plan, got.token, held.token, tier.bytes_of(got.slots))
        return None

    async def _read(self, record: Record, reading: _Reading) -> Prefetched:
        """Read; afterwards the slots are the tier's again.

        Raises:
            TransferOverdue: it has not returned in time. Slots that the store may still write are
                quarantined; what calls that came back have read is resident.
            TransferCut: the same, where the store came back in time and left memory in doubt; or the session
                ended.
        """
        session, call, plan = record.session, self._call, reading.plan
        tier, mover = session.tier, session.mover()
        hashes = call.hashes[plan.start : plan.stop]
        windows = {n: p.window_pages for n, p in call.policies.items() if isinstance(p, TrailingPages)}
        seconds = record.seconds_left * SOFT_SHARE
        if mover is None or seconds <= 0:
            tier.host.release(reading.token)
            _release(tier, reading.hold)
            raise TransferOverdue("no time was left to read")

        calls = ReadLog(reading.slots, plan.stop - plan.start)

        def work() -> tuple[Prefetched, bool]:
            with self._stores.watching() as in_doubt:
                done = mover.prefetch(
                    hashes,
                    plan.promise,
                    reading.slots,
                    record.progress,
                    windows={n: w for n, w in windows.items() if n in reading.slots},
                    cancel=record.cancel,
                    deadline_seconds=seconds,
                    calls=calls,
                )
                return done, in_doubt()

        tier.host.hand_to_store(reading.token)
        tier.busy += 1
        future = self._transfers.call(record, work)
        in_time = await self._transfers.until_over(record, future)
        failure = future.exception() if in_time else None
        if in_time and failure is None and not future.result()[1]:
            tier.busy -= 1
            if tier.host.store_returned(reading.token):
                raise TransferCut("the session ended")
            return future.result()[0]
        _give_up(tier, reading, calls.close(), call.policies)
        self._transfers.when_back(record, future, lambda: _free(tier, reading.token))
        if failure is not None:
            raise failure
        if not in_time:
            raise TransferOverdue(_overdue(record))
        done = future.result()[0]
        raise TransferCut(done.error.detail if done.error else "the store could not move all of the bytes")

    def _attach(self, record: Record, reading: _Reading, done: Prefetched) -> int:
        """Make what was read resident; return the length that the read says is restorable."""
        tier = record.session.tier
        read = np.zeros(reading.plan.stop - reading.plan.start, np.bool_)
        read[: done.pages] = True
        try:
            tier.host.publish(reading.token, _filled(reading.plan, done.read, read))
        except InvalidInput:  # somebody has named another parent of these pages meanwhile
            tier.host.release(reading.token)
            raise
        finally:
            _release(tier, reading.hold)
        complete = done.pages == reading.plan.stop - reading.plan.start
        return reading.plan.start + done.pages if complete or not reading.plan.start else 0

    def _finish(self, record: Record, promised: int, vouched: int) -> None:
        """Lock the longest length that can be restored, and say so."""
        session, call = record.session, self._call
        host, policies = session.tier.host, call.policies
        if record.cancel.is_set() and not record.keeps_part:
            return
        match = host.match(call.hashes, parent=call.parent, pools=policies)
        length = max(match.pages, vouched if call.first_page else 0)
        runs = list(match.restorable.runs)
        if length > match.pages:
            runs.append((length, length))
        slots = match.slots
        if call.lock and length:
            held = host.lock(
                session.session_id, call.hashes, parent=call.parent, length=length, pools=policies
            )
            record.token = None if held.token is None else session.tier.outside(held.token)
            slots = held.slots
        record.restorable = runs
        listed = listed_slots(slots, policies, length) if length else {}
        # Kept for a minute after the end, of thousands of transfers: four bytes a slot, not forty.
        record.slots = {n: np.array(at, np.int32) for n, at in listed.items()}
        record.pages_done = {n: len(at) for n, at in listed.items()}
        record.transfers_done = length > 0 and length >= promised and record.error is None


class BackUpWork:
    """One back up of pages that are pinned."""

    def __init__(
        self, hashes: PageHashes, pinned: Pinned, transfers: Transfers, stores: SharedStores
    ) -> None:
        self._hashes = hashes
        self._pinned = pinned
        self._transfers = transfers
        self._stores = stores

    async def run(self, record: Record) -> None:
        """Store the pages; their pins end when the store has returned.

        Raises:
            NotAttached: there is no store yet.
            TransferOverdue: it has not returned in time.
            TransferCut: not everything was stored.
        """
        session = record.session
        tier, mover = session.tier, session.mover()
        seconds = record.seconds_left * SOFT_SHARE
        if mover is None or seconds <= 0:
            self.let_go(tier)
            raise NotAttached("the control plane has not been reached yet: nothing is known of the store")
        slots = tier.bytes_of(self._pinned.slots)

        def work() -> tuple[BackedUp, bool]:
            with self._stores.watching() as in_doubt:
                done = mover.back_up(
                    self._hashes, slots, record.progress, cancel=record.cancel, deadline_seconds=seconds
                )
                return done, in_doubt()

        tier.busy += 1
        future = self._transfers.call(record, work)
        in_time = await self._transfers.until_over(record, future)
        failure = future.exception() if in_time else None

        def back() -> None:
            tier.busy -= 1
            self.let_go(tier)

        if in_time and failure is None and not future.result()[1]:
            back()
        else:
            self._transfers.when_back(record, future, back)
        if failure is not None:
            raise failure
        if not in_time:
            raise TransferOverdue(_overdue(record))
        self._note(record, future.result()[0])

    def let_go(self, tier: Tier) -> None:
        """End the pins; once, also where the work was never begun."""
        tier.backed_up(self._hashes)
        _release(tier, self._pinned.token)

    def _note(self, record: Record, done: BackedUp) -> None:
        tier = record.session.tier
        wanted = {n: self._pinned.slots[n] >= 0 for n in done.stored}
        whole = np.logical_and.reduce([done.stored[n] | ~wanted[n] for n in wanted])
        there = np.logical_or.reduce([*wanted.values()])
        # A page may have bytes of pools that this transfer was not asked for, or that came meanwhile.
        resident = tier.bytes_of(tier.host.match(self._hashes).slots)
        stored = {n: done.stored[n] if n in done.stored else np.zeros(there.size, np.bool_) for n in resident}
        unsaved = np.logical_or.reduce([(at >= 0) & ~stored[n] for n, at in resident.items()])
        for i in np.flatnonzero(whole & there & ~unsaved).tolist():
            tier.unsaved.pop(self._hashes[i], None)
        record.pages_done = {n: int(mask.sum()) for n, mask in done.stored.items()}
        record.transfers_done = done.transfers_done and bool(there.all())
        if done.error is not None:
            raise TransferCut(done.error.detail)
        if done.rejected:
            first = done.rejected[0]
            record.error = f"{len(done.rejected)} claims were refused, first {first.pool}: {first.code}"
        elif not record.transfers_done:
            lacking = int((~(whole & there)).sum())
            record.error = f"{lacking} pages are not resident, or the store has not confirmed them"


def _check_open(record: Record) -> None:
    if record.session.ended:
        raise TransferCut("the session ended")


def _spare(tier: Tier, policies: Policies) -> dict[str, int]:
    """Return for each pool the slots that windows of shorter lengths may take, all of them free ones."""
    free = {n: s.free for n, s in tier.host.status().items()}
    return {
        n: max(0, free[tier.owner_of(n)] - p.window_pages) // _SPARE_SHARE
        for n, p in policies.items()
        if isinstance(p, TrailingPages)
    }


def _room(plan: ReadPlan, error: NoSlots, policies: Policies) -> int:
    """Return a length that may fit: as many pages as the scarcest pool that needs all has slots for."""
    room = plan.stop - 1
    for name, short in error.pools.items():
        if isinstance(policies.get(name), AllPages):
            room = min(room, plan.start + short.free)
    return room


def _release(tier: Tier, token: str | None) -> None:
    """Release a lock or pin that may have ended with its session."""
    if token is not None:
        with contextlib.suppress(UnknownToken):
            tier.host.release(token)


def _filled(plan: ReadPlan, read: PageMasks, whole: PageMask) -> PageMasks:
    """Return what to publish; pools without bytes here (a logical anchor) are there where the others are."""
    return {n: read[n] if n in read else whole & mask for n, mask in plan.masks.items()}


def _give_up(tier: Tier, reading: _Reading, calls: ReadSoFar, policies: Policies) -> None:
    """Publish what was read, and quarantine the slots that the store may still write (M1).

    Whether that makes a restorable length, the tier decides as for all pages: nothing of a page counts that
    was not read (O5).
    """
    host, plan = tier.host, reading.plan
    with contextlib.suppress(UnknownToken):  # where its session ended meanwhile, all of it is quarantined
        parted = host.split(reading.token, calls.written)
        host.cancel(reading.token)
        every = [mask for n, mask in calls.read.items() if isinstance(policies[n], AllPages)]
        whole = np.logical_and.reduce(every) if every else np.zeros(plan.stop - plan.start, np.bool_)
        try:
            host.publish(parted, _filled(plan, calls.read, whole))
        except InvalidInput:  # somebody has named another parent of these pages meanwhile
            host.release(parted)
    _release(tier, reading.hold)


def _free(tier: Tier, token: str) -> None:
    tier.busy -= 1
    tier.host.store_returned(token)


def _overdue(record: Record) -> str:
    if record.cancel.is_set():
        return "the store had not answered when the transfer was cancelled"
    return "the store did not answer by the deadline"
