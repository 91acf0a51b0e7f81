"""The node daemon: host memory that engines share, and the transfers between it and L3.

An engine in any language opens a session, maps one file a pool, and says by REST over a Unix socket which
pages it fills and which it wants. This module is the calls; the server around it is `agent_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import UnsetType

from dataplane.agent_errors import Draining, RateLimited
from dataplane.agent_files import SharedFolder
from dataplane.agent_plan import Policies, call_policies, listed_slots, size_of
from dataplane.agent_sessions import Session, Sessions
from dataplane.agent_settings import AgentSettings
from dataplane.agent_store import SharedStores
from dataplane.agent_tiers import Tier, Tiers
from dataplane.agent_transfers import ENDED, Record, Transfers
from dataplane.agent_work import BackUpWork, PrefetchCall, PrefetchWork
from dataplane.host_answers import Pinned, UnknownToken
from dataplane.messages import agent as messages
from metadata.codec import MAX_PAGES, PageHashes
from metadata.errors import FieldError, InvalidInput, TooManyPages
from metadata.page_runs import page_runs

log = logging.getLogger(__name__)

_SWEEP_SECONDS: Final = 0.1
_LEAVE_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 5.0
_MOST_WAIT_MS: Final = 30_000


class Agent:
    """One agent. All calls belong to one event loop.

    Attributes:
        settings: what it was told.
        sessions: who is there.
        tiers: what is resident.
        transfers: what moves.
        stores: where to.
        draining: whether it is ending.
    """

    def __init__(self, settings: AgentSettings) -> None:
        """Take the shared folder; what an earlier agent left there is removed.

        Raises:
            FolderUnusable: it cannot be used.
        """
        self.settings = settings
        self._folder = SharedFolder(settings.shared_dir, for_others=bool(settings.allowed_uids))
        self.stores = SharedStores()
        self.tiers = Tiers(self._folder, settings.memory_bytes, self.stores)
        self.sessions = Sessions(settings, self.tiers, self.stores, self._folder.unlink)
        self.transfers = Transfers(settings, self.sessions.returned)
        self.sessions.on_end = self.transfers.session_ended
        self.draining = False
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch leases."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def drain(self) -> None:
        """Refuse what is new, let transfers end within their time, end all sessions; twice is fine."""
        self.draining = True
        await self.transfers.drain(self.settings.drain_seconds)
        await self.sessions.end_all(_LEAVE_SECONDS)

    async def stop(self) -> None:
        """Drain, and give all memory back."""
        await self.drain()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if not self.transfers.hanging:
            self.tiers.close()
            await asyncio.to_thread(self.stores.close)
        self._folder.close()

    # Sessions

    async def open_session(self, request: messages.SessionRequest, connection: int) -> messages.SessionResult:
        """`POST /v1/sessions`."""
        self._check_working()
        opened = await self.sessions.open(request, connection)
        return messages.SessionResult(
            session_id=opened.session.session_id,
            namespace_id=opened.session.namespace_id,
            idle_seconds=round(self.settings.idle_seconds),
            pools=opened.pools,
        )

    def end_session(self, session: Session) -> None:
        """`DELETE /v1/sessions/{id}`."""
        self.sessions.end(session, "the engine ended it")

    # Pages in host memory

    def match(self, session: Session, request: messages.MatchRequest) -> messages.MatchResult:
        """`POST /v1/sessions/{id}/match`."""
        hashes, parent = _checked(request.page_hashes), _parent(request.parent_hash)
        host, policies = session.tier.host, self._policies(session)
        if request.lock:
            held = host.lock(session.session_id, hashes, parent=parent)
            token = None
            if held.token is not None and held.pages:
                token = session.tier.outside(held.token)
            elif held.token is not None:
                host.release(held.token)
            found, slots, pages = held.restorable, held.slots, held.pages
        else:
            seen = host.match(hashes, parent=parent)
            found, slots, pages, token = seen.restorable, seen.slots, seen.pages, None
        listed = listed_slots(slots, policies, pages) if pages else {}
        return messages.MatchResult(pages=pages, restorable=list(found.runs), slots=listed, token=token)

    def slots(self, session: Session, request: messages.SlotsRequest) -> messages.SlotsResult:
        """`POST /v1/sessions/{id}/slots`."""
        self._check_working()
        hashes = _checked(request.page_hashes)
        tier = session.tier
        names = list(tier.specs) if request.pools is None else list(request.pools)
        got = tier.host.reserve(session.session_id, hashes, parent=_parent(request.parent_hash), pools=names)
        tier.note_evicted(got.evicted)
        everywhere = np.logical_and.reduce([got.resident[n] for n in names])
        session.given[got.token] = list(hashes)
        return messages.SlotsResult(
            token=tier.outside(got.token),
            slots={n: at.tolist() for n, at in got.slots.items()},
            resident=page_runs(everywhere),
            resident_by_pool={n: page_runs(mask) for n, mask in got.resident.items()},
        )

    def publish(self, session: Session, request: messages.PublishRequest) -> messages.PublishResult:
        """`POST /v1/sessions/{id}/publish`."""
        tier = session.tier
        inside = tier.inside(request.token)
        given = session.given.get(inside) if inside is not None else None
        if inside is None or given is None:
            raise _unknown(request.token)
        done = tier.host.publish(inside)
        del session.given[inside]
        new = np.logical_or.reduce([*done.published.values()])
        for i in np.flatnonzero(new).tolist():
            tier.unsaved.setdefault(given[i], False)
        started = None
        if request.backup:
            # Pages of another engine too, while nobody has stored them: what is acknowledged gets published.
            unsaved = [h for h in given if h in tier.unsaved]
            if unsaved:
                tier.unsaved.update(dict.fromkeys(unsaved, True))
                with contextlib.suppress(RateLimited):  # then it is done when there is room, see `_catch_up`
                    started = self._back_up(session, PageHashes.of(unsaved), tuple(tier.specs), None)
        return messages.PublishResult(published=int(new.sum()), transfer_id=started)

    def unlock(self, token: str) -> None:
        """`DELETE /v1/locks/{token}`; also gives up slots that are not to be published."""
        found = self.tiers.of_token(token)
        if found is None:
            raise _unknown(token)
        tier, inside = found
        try:
            tier.host.release(inside)
        except UnknownToken:
            raise _unknown(token) from None
        for session in self.sessions:
            session.given.pop(inside, None) if session.tier is tier else None

    # Transfers

    def transfer(self, session: Session, request: messages.TransferRequest) -> messages.TransferAccepted:
        """`POST /v1/sessions/{id}/transfers`."""
        self._check_working()
        hashes = _checked(request.page_hashes)
        policies = call_policies(session.tier.specs, request)
        if request.kind == "backup":
            started = self._back_up(session, hashes, tuple(policies), request.deadline_ms)
            return messages.TransferAccepted(transfer_id=started)
        if request.policy == "timeout" and request.deadline_ms is None:
            detail = "is missing: the policy `timeout` needs one"
            raise InvalidInput("the transfer has no deadline", [FieldError("deadline_ms", "missing", detail)])
        if request.first_page and not request.parent_hash:
            detail = "is missing: pages in mid-sequence hang below the page before them"
            raise InvalidInput("the pages have no place", [FieldError("parent_hash", "missing", detail)])
        call = PrefetchCall(
            hashes,
            request.first_page,
            _parent(request.parent_hash),
            policies,
            request.pools,
            request.lock,
        )
        self._check_chain(session, call)
        record = Record(
            "prefetch",
            session,
            self._ends_at(request.deadline_ms),
            keeps_part=request.policy == "best_effort",
        )
        work = PrefetchWork(call, self.transfers, self.stores)
        size = size_of(session.tier.specs, policies, len(hashes))
        return messages.TransferAccepted(transfer_id=self.transfers.start(record, size, work.run))

    async def transfer_state(self, transfer_id: str, wait_ms: int, connection: int) -> messages.Transfer:
        """`GET /v1/transfers/{id}?wait_ms=`."""
        record = self.transfers.get(transfer_id)
        self._hear(record, connection)
        if wait_ms and record.state not in ENDED:
            try:
                async with asyncio.timeout(min(wait_ms, _MOST_WAIT_MS) / 1000):
                    await record.over.wait()
            except TimeoutError:
                pass
            self._hear(record, connection)
        return record.message()

    def cancel(self, transfer_id: str, connection: int) -> None:
        """`DELETE /v1/transfers/{id}`."""
        record = self.transfers.get(transfer_id)
        self._hear(record, connection)
        self.transfers.cancel(record)

    # Observing

    def status(self) -> messages.AgentStatus:
        """`GET /v1/status`; pools of one name in several tiers are added up."""
        pools: dict[str, dict[str, int]] = {}
        for tier in self.tiers:
            for name, s in tier.host.status().items():
                total = pools.setdefault(name, dict.fromkeys(_COUNTS, 0))
                for count in _COUNTS:
                    total[count] += getattr(s, count)
        health = self.stores.health
        problem = health.detail if health.kind else self.not_ready()
        return messages.AgentStatus(
            sessions=len(self.sessions),
            pools={name: messages.PoolStatus(**counts) for name, counts in pools.items()},
            transfers=self.transfers.counts(),
            store=messages.StoreStatus(
                kind=health.kind, healthy=bool(health.kind) and not problem, detail=problem or ""
            ),
        )

    def not_ready(self) -> str | None:
        """Return what keeps the agent from moving bytes, None where nothing does."""
        if self.draining:
            return "the agent is ending"
        for session in self.sessions:
            failure = session.link.failure
            if failure is not None:
                return f"the control plane: {failure}"
            if session.link.joined is None:
                return "not attached yet"
        if self.transfers.hanging >= self.settings.hanging_transfers:
            return f"{self.transfers.hanging} transfers hang in the store"
        return self.stores.health.detail or None

    @staticmethod
    def _policies(session: Session) -> Policies:
        return {name: spec.hit_policy for name, spec in session.tier.specs.items()}

    def _back_up(
        self, session: Session, hashes: PageHashes, pools: Sequence[str], deadline_ms: int | None
    ) -> str:
        """Pin pages and begin to store them; the pins are nobody's, so they survive the engine."""
        tier = session.tier
        pinned = tier.host.pin(hashes, pools=pools)
        record = Record("backup", session, self._ends_at(deadline_ms))
        work = BackUpWork(hashes, pinned, self.transfers, self.stores)
        tier.backing_up.update(hashes)
        try:
            return self.transfers.start(record, _size(tier, pinned), work.run, lambda: work.let_go(tier))
        except RateLimited:
            work.let_go(tier)
            raise

    @staticmethod
    def _check_chain(session: Session, call: PrefetchCall) -> None:
        """Refuse hashes that come twice or contradict what is known, while the caller is there to see why."""
        host = session.tier.host
        held = host.lock(session.session_id, call.hashes, parent=call.parent, length=0)
        if held.token is not None:
            host.release(held.token)

    def _ends_at(self, deadline_ms: int | None) -> float:
        longest = self.settings.transfer_seconds
        seconds = longest if deadline_ms is None else min(longest, deadline_ms / 1000)
        return time.monotonic() + seconds

    def _hear(self, record: Record, connection: int) -> None:
        if not record.session.ended:
            self.sessions.heard(record.session.session_id, connection)

    def _check_working(self) -> None:
        if self.draining:
            raise Draining("the agent is ending: nothing new is begun; open a session with the next one")

    def _catch_up(self) -> None:
        """Store what was published and could not be stored: nobody was there, or there was no room for it."""
        now = time.monotonic()
        for session in self.sessions:
            tier = session.tier
            attached, before = session.link.joined is not None, session.was_attached
            session.was_attached = attached
            due = not before or now - tier.stored_at >= _RETRY_SECONDS
            if not attached or not due or self.draining:
                continue
            tier.stored_at = now
            # Under a steady load some back-up is always under way: it must not keep the others waiting.
            waiting = tier.waiting(MAX_PAGES)
            if waiting:
                with contextlib.suppress(RateLimited):
                    self._back_up(session, PageHashes.of(waiting), tuple(tier.specs), None)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                self.sessions.sweep()
                self.transfers.sweep()
                self._catch_up()
            except Exception:
                log.exception("looking after the leases failed in a way that nobody foresaw")


_COUNTS: Final = ("slots", "free", "resident", "locked", "quarantined")


def _checked(hashes: PageHashes) -> PageHashes:
    if len(hashes) > MAX_PAGES:
        detail = f"has {len(hashes)} pages, at most {MAX_PAGES} in one call"
        raise TooManyPages(detail, [FieldError("page_hashes", "too_many", detail)])
    return hashes


def _parent(digits: str | UnsetType | None) -> bytes | None:
    return bytes.fromhex(digits) if digits else None


def _size(tier: Tier, pinned: Pinned) -> int:
    return sum(tier.specs[n].bytes_per_page * int((at >= 0).sum()) for n, at in pinned.slots.items())


def _unknown(token: str) -> UnknownToken:
    return UnknownToken(f"there is no token {token!r}; it was used, released, or ended with its session")
