"""Replays a load: look up, prefetch what is restorable, back up the rest, and count what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from caketin.replay.rank import ReplaySettings, Restored, Stored
from caketin.replay.rank_group import RankGroup, rank_group
from caketin.replay.report import Report
from caketin.replay.trace import Load, tokens
from dataplane.control_plane import ControlPlaneAway, ControlRefused
from dataplane.messages.control import LookupResult
from metadata.codec import PageHashes
from metadata.page_hash import page_hashes

__all__ = ["ReplaySettings", "replay"]

_LOOK_SECONDS: Final = 0.2
_INTERRUPTED: Final = "interrupted"


class Replay:
    """A replay of one load by one engine.

    A control plane or store that is away is counted and does not end it: a lookup without an answer is
    `degraded` and no miss, a transfer that fails restores or stores nothing. Only one that stays away does.
    """

    def __init__(
        self, settings: ReplaySettings, load: Load, group: RankGroup, advance: Callable[[int], None]
    ) -> None:
        self._settings = settings
        self._group = group
        self._advance = advance
        self._requests = iter(load.requests)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._answered = 0.0
        self.report = Report(
            load.name,
            settings.pools,
            group.leader.store,
            tp=settings.tp,
            sidecars=settings.sidecars,
            concurrency=settings.concurrency,
        )

    def run(self) -> Report:
        """Replay every request; in order, and one after the other where only one may be in flight."""
        start = self._answered = time.perf_counter()
        try:
            if self._settings.concurrency == 1:
                self._replay_lane(0)
            else:
                self._replay_lanes()
        except KeyboardInterrupt:
            # What was counted until then is what whoever presses Ctrl-C wants to see.
            self._stopped.set()
            self.report.ended_early = _INTERRUPTED
        self.report.seconds = time.perf_counter() - start
        if self._failure is not None:
            raise self._failure
        interrupted = self.report.ended_early == _INTERRUPTED
        # An answer of the request that was cut off may be under way from the other ranks.
        self.report.reported_pages = (
            self._group.leader.client.reported_pages if interrupted else self._group.reported_pages()
        )
        self.report.hanging = self._group.leader.hanging
        self.report.events.update(self._group.leader.membership.events)
        return self.report

    def _replay_lanes(self) -> None:
        lanes = [
            threading.Thread(target=self._replay_lane, args=(i,), name=f"replay-request-{i}", daemon=True)
            for i in range(self._settings.concurrency)
        ]
        for lane in lanes:
            lane.start()
        try:
            for lane in lanes:
                while lane.is_alive():
                    lane.join(_LOOK_SECONDS)
        finally:
            self._stopped.set()

    def _replay_lane(self, lane: int) -> None:
        try:
            for ids in self._taken():
                self._one(lane, ids)
        except Exception as error:
            self._failure = self._failure or error
            self._stopped.set()

    def _taken(self) -> Iterator[list[int]]:
        while not self._stopped.is_set():
            with self._lock:
                ids = next(self._requests, None)
            if ids is None:
                return
            if time.perf_counter() - self._answered > self._settings.give_up_seconds:
                self.report.ended_early = f"no answer for {self._settings.give_up_seconds:g} s"
                self._stopped.set()
                return
            yield ids

    def _one(self, lane: int, ids: list[int]) -> None:
        size = self._settings.page_tokens
        hashes = PageHashes.of(page_hashes(tokens(ids, size), size))
        found = self._lookup(hashes)
        restored = 0
        if found is not None and found.hit_pages:
            done = self._group.prefetch(lane, hashes, found)
            restored = done.pages
            self._note_prefetch(found, done)
        if restored < len(hashes):
            self._note_back_up(self._group.back_up(lane, hashes, restored))
        self._advance(len(ids))

    def _lookup(self, hashes: PageHashes) -> LookupResult | None:
        leader = self._group.leader
        start = time.perf_counter()
        found, error = None, None
        try:
            found = leader.client.lookup(leader.namespace_id, hashes)
        except ControlPlaneAway as away:
            error = away.code
        except ControlRefused as refused:
            leader.membership.seen(refused)
            error = refused.refusal
        seconds = time.perf_counter() - start
        with self._lock:
            self.report.looked_up(len(hashes), found, seconds, error)
        if found is None or found.degraded:
            return None
        self._answered = time.perf_counter()
        return found

    def _note_prefetch(self, found: LookupResult, done: Restored) -> None:
        with self._lock:
            self.report.prefetched(found.hit_pages, done, verified=self._settings.verify)

    def _note_back_up(self, done: Stored) -> None:
        with self._lock:
            self.report.backed_up(done)


def replay(settings: ReplaySettings, load: Load, advance: Callable[[int], None]) -> Report:
    """Register an engine, replay the load, and leave. In the main thread, where there are several ranks.

    Args:
        settings: how.
        load: what.
        advance: told how many pages were dealt with, after each request, from whichever thread.

    Raises:
        InvalidInput: no such pool set, page size or number of ranks.
        ControlPlaneAway, ControlRefused: the registration failed.
        StoreUnavailable: the store that the control plane names cannot be reached.
        ChildFailed: a rank's process is gone.
    """
    with rank_group(settings, load.longest) as group:
        return Replay(settings, load, group, advance).run()
