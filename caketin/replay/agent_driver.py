"""Replays a load as an engine that has no memory of its own: all pages are in the agent's.

A request asks what is resident and locks it, fetches what L3 has beyond that, compares the bytes, then fills
and publishes the rest. Requests come one after the other, so that hit rates are exact.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from caketin.replay.agent_report import AgentReport
from caketin.replay.page_bytes import BYTES_VERSION, expected
from caketin.replay.pool_sets import rank_pools
from caketin.replay.rank import ReplaySettings
from caketin.replay.trace import Load, tokens
from dataplane.agent_client import AgentClient, AgentRefused, AgentSession
from dataplane.agent_pools import shapes_of
from dataplane.messages.agent import AgentPool, SessionRequest
from dataplane.messages.control import NamespaceMessage, PoolMessage
from metadata.codec import PageHashes
from metadata.page_hash import page_hashes
from metadata.pools import RankPool, TrailingPages

_HOST_SHARE = 4


def host_slots(load: Load, asked: int | None) -> int:
    """Return the pages of the host tier: as asked, or a quarter of the load's distinct pages."""
    if asked is not None:
        return asked
    return max(1, len({i for request in load.requests for i in request}) // _HOST_SHARE)


def memory_needed(settings: ReplaySettings, slots: int) -> int:
    """Return the bytes that the agent's pools take."""
    pools = rank_pools(settings.pools, settings.page_bytes)
    capacities = {p.spec.name: slots for p in pools if p.spec.indices_from is None}
    return sum(shape.length for shape in shapes_of(pools, capacities).values())


class AgentReplay:
    """A replay of one load by one engine through an agent."""

    def __init__(
        self,
        settings: ReplaySettings,
        load: Load,
        session: AgentSession,
        slots: int,
        advance: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._load = load
        self._session = session
        self._advance = advance
        self._pools = rank_pools(settings.pools, settings.page_bytes)
        self._parts = [(p.spec.name, part.part, part.bytes) for p in self._pools for part in p.spec.parts]
        self._columns = {(n, p): session.pools[n].part(p) for n, p, _ in self._parts}
        windows = [
            p.spec.hit_policy.window_pages
            for p in self._pools
            if isinstance(p.spec.hit_policy, TrailingPages)
        ]
        self._window = max(windows, default=0)
        self._whole = [p.spec.name for p in self._pools if not isinstance(p.spec.hit_policy, TrailingPages)]
        self.report = AgentReport(load.name, settings.pools, slots)

    def run(self) -> AgentReport:
        """Replay every request in order."""
        start = time.perf_counter()
        for ids in self._load.requests:
            self._one(ids)
            self._advance(len(ids))
        self.report.seconds = time.perf_counter() - start
        return self.report

    def _one(self, ids: list[int]) -> None:
        report, size = self.report, self._settings.page_tokens
        hashes = PageHashes.of(page_hashes(tokens(ids, size), size))
        with self._timed("match"):
            found = self._session.match(hashes)
        with self._timed("prefetch"):
            started = self._session.prefetch(
                hashes, deadline_ms=round(self._settings.transfer_seconds * 1000)
            )
            done = self._session.wait(started)
        length = done.restorable[-1][1] if done.restorable else 0
        report.requests += 1
        report.asked_pages += len(hashes)
        report.host_hit_pages += found.pages
        report.l3_hit_pages += max(0, length - found.pages)
        if done.state != "done" or done.error:
            report.errors[f"prefetch: {done.error or done.state}"] += 1
        if self._settings.verify and length:
            self._compare(hashes, done.slots, length)
        self._publish(hashes, length)
        for token in (found.token, done.token):
            if token is not None:
                self._session.release(token)

    def _publish(self, hashes: PageHashes, first: int) -> None:
        """Fill and publish the pages from `first` on; of pools with a window all of them, or the last."""
        tail = first
        if self._settings.sidecars == "tail" and self._window:
            tail = max(first, len(hashes) - self._window)
        if first < tail:
            self._fill_and_publish(hashes, first, tail, self._whole)
        if tail < len(hashes):
            self._fill_and_publish(hashes, tail, len(hashes), None)

    def _fill_and_publish(
        self, hashes: PageHashes, first: int, stop: int, pools: Sequence[str] | None
    ) -> None:
        report, pages = self.report, hashes[first:stop]
        try:
            with self._timed("slots"):
                got = self._session.slots(pages, parent=hashes[first - 1] if first else None, pools=pools)
        except AgentRefused as error:
            report.errors[f"slots: {error.refusal}"] += 1
            report.no_slots_pages += len(pages)
            return
        there = {n: {i for a, b in runs for i in range(a, b + 1)} for n, runs in got.resident_by_pool.items()}
        for name, part, size in self._parts:
            if name not in got.slots:
                continue
            column = self._columns[name, part]
            for i, slot in enumerate(got.slots[name]):
                if i not in there[name]:
                    column[slot] = expected(pages[i], name, 0, part, size)
        with self._timed("publish"):
            done = self._session.publish(got.token)
        if done.transfer_id is None:
            return
        with self._timed("back up"):
            ended = self._session.wait(done.transfer_id)
        if ended.transfers_done:
            report.stored_pages += len(pages)
        else:
            report.unstored_pages += len(pages)
            report.errors[f"back up: {ended.error or ended.state}"] += 1

    def _compare(self, hashes: PageHashes, slots: dict[str, list[int]], length: int) -> None:
        wrong = set()
        for name, part, size in self._parts:
            listed = slots[name]
            for page, slot in zip(range(length - len(listed), length), listed, strict=True):
                found = self._columns[name, part][slot]
                if not np.array_equal(found, expected(hashes[page], name, 0, part, size)):
                    wrong.add(page)
        self.report.verified_pages += length
        self.report.wrong_pages += len(wrong)

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.report.latencies.note(call, time.perf_counter() - start)


def replay_with_agent(
    settings: ReplaySettings, load: Load, socket: Path, slots: int, advance: Callable[[int], None]
) -> AgentReport:
    """Open a session, replay the load, and end the session.

    Args:
        settings: how.
        load: what.
        socket: the agent's.
        slots: pages of the host tier, of every pool.
        advance: told how many pages were dealt with, after each request.

    Raises:
        InvalidInput: no such pool set or page size.
        AgentAway, AgentRefused: the agent cannot be used.
    """
    pools = rank_pools(settings.pools, settings.page_bytes)
    request = SessionRequest(
        engine_id=settings.engine_id,
        rank="dp0-pp0-cp0-tp0",
        incarnation=secrets.token_hex(16),
        namespace=NamespaceMessage(
            model=settings.model,
            revision=f"{settings.pools}-{settings.page_bytes}-{BYTES_VERSION}",
            page_size=settings.page_tokens,
        ),
        pools=[_agent_pool(p, slots) for p in pools],
    )
    patience = 2 * settings.transfer_seconds + 30
    with AgentClient(socket, seconds=patience) as client, client.open(request) as session:
        return AgentReplay(settings, load, session, slots, advance).run()


def _agent_pool(pool: RankPool, slots: int) -> AgentPool:
    message = PoolMessage.of(pool)
    return AgentPool(
        **{n: getattr(message, n) for n in message.__struct_fields__},
        capacity_pages=slots,
    )
