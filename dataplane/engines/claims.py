"""Claims of an engine's stored pages, made behind its back: a write does not wait for the control plane.

Every batch of 128 pages would cost a call. Here a thread makes the calls, one at a time and in the order in
which the pages were stored, and puts what came meanwhile into one call. Only what the store has confirmed
comes here (O3), an anchor before what was stored for it later (O2). What the control plane cannot take now
is kept, within bounds, and tried again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from dataplane.control_plane import ControlPlaneAway, ControlRefused
from dataplane.engines.link import EngineLink, Joined
from dataplane.engines.page_reads import BoolArray
from dataplane.messages import control
from dataplane.page_statements import PoolFacts, statements
from metadata.codec import PageHashes
from metadata.page_runs import page_runs

log = logging.getLogger(__name__)

MAX_KEPT_PAGES: Final = 262_144
MAX_QUEUED_PAGES: Final = 16_384
"""Pages that may wait for the thread; a write that brings more waits too, for a while."""
CALL_PAGES: Final = 4096
_FEWEST_CALL_PAGES: Final = 128
_MORE_CALL_PAGES: Final = 16
"""Pages of a call: half as many after one that was not answered in time, a few more after one that was. Many
pages of many shards can take longer than the deadline, and would again at every try."""
_ROOM_SECONDS: Final = 5.0
_NEGATIVE_ENTRY: Final = "negative_entry"
"""A page that could not be read a moment ago is not claimed for some seconds, even when written anew."""

HeldRows: TypeAlias = dict[str, BoolArray]
"""Of one page: pool name -> which owned shards are confirmed, bool (shards,)."""


@dataclass(frozen=True)
class _Claim:
    """Pages to claim: of each pool which owned shards are confirmed, bool (pages, shards)."""

    joined: Joined
    page_hashes: PageHashes
    held: Mapping[str, BoolArray]


class Claims:
    """The claims of one rank. Safe to use from several threads."""

    def __init__(
        self, link: EngineLink, on_taken: Callable[[PageHashes, Mapping[str, BoolArray]], None]
    ) -> None:
        """Take the parts; the thread starts with the first claim.

        Args:
            link: to the control plane.
            on_taken: told pages that the index has taken completely, and what was claimed of them.
        """
        self._link = link
        self._on_taken = on_taken
        self._changed = threading.Condition()
        self._queue: deque[_Claim] = deque()
        self._queued_pages = 0
        self._call_pages = CALL_PAGES
        self._at_work = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._kept: OrderedDict[bytes, HeldRows] = OrderedDict()

    def claim(
        self,
        joined: Joined,
        page_hashes: PageHashes,
        held: Mapping[str, BoolArray],
        room_seconds: float = _ROOM_SECONDS,
    ) -> None:
        """Claim pages soon.

        Args:
            joined: what they were stored with.
            page_hashes: pages.
            held: pool name -> which owned shards are confirmed, bool (pages, shards).
            room_seconds: how long to wait where too many pages wait already; then these are kept for later.
        """
        claim = _Claim(joined, page_hashes, {n: t for n, t in held.items() if t.any()})
        if not page_hashes or not claim.held:
            return
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._closed or self._queued_pages < MAX_QUEUED_PAGES, room_seconds
            )
            if room and not self._closed:
                self._queue.append(claim)
                self._queued_pages += len(page_hashes)
                self._start()
                self._changed.notify_all()
                return
            closed = self._closed
        if closed:
            self._make(claim)
        else:
            log.warning("%d stored pages are claimed later: the control plane is slow", len(page_hashes))
            self._keep(page_hashes, claim.held)

    def claim_rows(self, joined: Joined, pages: Sequence[tuple[bytes, HeldRows]]) -> None:
        """Claim pages that one knows one by one; rows of a pool that has other shards now are left out.

        Never waits: chores come here, on the thread that sends the heartbeats.
        """
        for start in range(0, len(pages), CALL_PAGES):
            some = pages[start : start + CALL_PAGES]
            held: dict[str, BoolArray] = {}
            for i, (_, rows) in enumerate(some):
                for name, row in rows.items():
                    if len(joined.owned.get(name, ())) == len(row):
                        held.setdefault(name, np.zeros((len(some), len(row)), np.bool_))[i] = row
            self.claim(joined, PageHashes.of([h for h, _ in some]), held, room_seconds=0)

    def retry(self, joined: Joined) -> None:
        """Claim again what could not be claimed before."""
        with self._changed:  # in one step: whoever waits for all claims must not see them nowhere
            room = max(0, MAX_QUEUED_PAGES - self._queued_pages)
            kept = [self._kept.popitem(last=False) for _ in range(min(room, len(self._kept)))]
            self.claim_rows(joined, kept)

    def flush(self, seconds: float) -> bool:
        """Wait until all that came is claimed; return False when time is up before, or something is kept."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._at_work and not self._kept, seconds)
            return not (self._queue or self._at_work or self._kept)

    def forget(self, seconds: float) -> None:
        """Drop what waits, and wait for the call under way."""
        with self._changed:
            self._queue.clear()
            self._queued_pages = 0
            self._kept.clear()
            self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: not self._at_work, seconds)
            self._kept.clear()

    def close(self, seconds: float) -> None:
        """Make the claims that wait and end the thread; a later claim is made by its caller."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._queue and not self._at_work, seconds):
                log.warning("%d stored pages stay unclaimed", self._queued_pages)
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="caketin-claims", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (claim := self._next()) is not None:
            try:
                self._make(claim)
            except Exception:
                # The thread is all that claims, so nothing may end it.
                log.exception("a claim failed in a way that nobody foresaw")
            with self._changed:
                self._at_work = False
                self._changed.notify_all()

    def _next(self) -> _Claim | None:
        """Wait for claims and take as many as go into one call; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._queue))
            if self._closed:
                return None
            taken = [self._queue.popleft()]
            seen, pages = set(taken[0].page_hashes), len(taken[0].page_hashes)
            while self._queue:
                following = self._queue[0]
                hashes, pages = set(following.page_hashes), pages + len(following.page_hashes)
                if following.joined is not taken[0].joined or pages > self._call_pages or seen & hashes:
                    break
                seen |= hashes
                taken.append(self._queue.popleft())
            self._queued_pages -= sum(len(c.page_hashes) for c in taken)
            self._at_work = True
            self._changed.notify_all()
        return _merged(taken)

    def _make(self, claim: _Claim) -> None:
        """Make one claim, in as many calls as it takes."""
        start = 0
        while start < len(claim.page_hashes):
            rows = slice(start, start + self._call_pages)
            start = rows.stop
            self._call(
                _Claim(claim.joined, claim.page_hashes[rows], {n: t[rows] for n, t in claim.held.items()})
            )

    def _call(self, claim: _Claim) -> None:
        """Claim some pages; what the control plane cannot take now is claimed later."""
        nothing = np.zeros(len(claim.page_hashes), np.int8)
        facts = {n: PoolFacts(claim.joined.owned[n], table, nothing) for n, table in claim.held.items()}
        taken = np.ones(len(claim.page_hashes), np.bool_)
        try:
            for call in statements(facts):
                stored = {
                    n: control.StoredPool(
                        pages=page_runs(said.pages),
                        shards=said.shards,
                        pool_id=claim.joined.pools.bound[n].pool.spec.pool_id,
                    )
                    for n, said in call.items()
                }
                result = self._link.commit(claim.joined.namespace_id, claim.page_hashes, stored)
                self._note_rejected(claim, result.rejected, taken)
        except (ControlPlaneAway, ControlRefused) as error:
            log.warning("%d stored pages are claimed later: %s", len(claim.page_hashes), error)
            if isinstance(error, ControlPlaneAway):
                self._call_pages = max(_FEWEST_CALL_PAGES, self._call_pages // 2)
            if isinstance(error, ControlPlaneAway) or error.passing or self._link.forgotten(error):
                self._keep(claim.page_hashes, claim.held)
            return
        self._call_pages = min(CALL_PAGES, self._call_pages + _MORE_CALL_PAGES)
        pages = claim.page_hashes.take(np.flatnonzero(taken))
        self._on_taken(pages, {n: table[taken] for n, table in claim.held.items()})

    def _note_rejected(self, claim: _Claim, rejected: Sequence[control.Rejection], taken: BoolArray) -> None:
        """Note what the index did not take; what it only takes later is claimed later.

        An anchor that has a negative entry takes its sidecars along: what is rejected of such a page stays
        together.
        """
        ours = [r for r in rejected if r.page < len(claim.page_hashes) and r.pool in claim.held]
        later = {r.page for r in ours if r.code == _NEGATIVE_ENTRY}
        for one in ours:
            taken[one.page] = False
            if one.page in later:
                row = slice(one.page, one.page + 1)
                self._keep(claim.page_hashes[row], {one.pool: claim.held[one.pool][row]})

    def _keep(self, page_hashes: PageHashes, held: Mapping[str, BoolArray]) -> None:
        with self._changed:
            for i, page_hash in enumerate(page_hashes):
                rows = {n: table[i] for n, table in held.items() if table[i].any()}
                if rows:
                    self._kept.setdefault(page_hash, {}).update(rows)
            while len(self._kept) > MAX_KEPT_PAGES:
                self._kept.popitem(last=False)


def _merged(claims: Sequence[_Claim]) -> _Claim:
    """Return claims of different pages as one."""
    if len(claims) == 1:
        return claims[0]
    joined = claims[0].joined
    names = dict.fromkeys(n for c in claims for n in c.held)
    held = {}
    for name in names:
        columns = len(joined.owned[name])
        nothing = {len(c.page_hashes): np.zeros((len(c.page_hashes), columns), np.bool_) for c in claims}
        held[name] = np.concatenate([c.held.get(name, nothing[len(c.page_hashes)]) for c in claims])
    return _Claim(joined, PageHashes(b"".join(c.page_hashes.raw for c in claims)), held)
