"""Keeps a rank of an engine attached, from a thread of its own: no thread of the engine ever waits for it.

An engine starts whether or not the control plane is there. Until it is, everything is a miss; the thread goes
on trying. It also sends heartbeats, registers again where the control plane has forgotten the rank, looks
whether a silent control plane is back, and does the chores of the other parts: leases, claims that could not
be made.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from dataplane.attach import Attached, RankAttachment
from dataplane.bound_pool import BoundPool
from dataplane.control_client import ControlClient
from dataplane.control_plane import ControlPlaneAway, ControlRefused
from dataplane.messages import control
from dataplane.object_store import ObjectStore
from dataplane.transfer import RankPools
from metadata.circuit import Circuit
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.pools import RankPool, anchor_pools

log = logging.getLogger(__name__)

T = TypeVar("T")

_UNKNOWN: Final = frozenset({"unknown_engine", "unknown_rank", "unknown_namespace", "unknown_pool"})
"""What a control plane says that has lost its Redis, or thinks this rank has left."""
_TICK_SECONDS: Final = 0.25
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 15.0
_CLOSE_SECONDS: Final = 8.0
_NEVER: Final = float("inf")


@dataclass(frozen=True)
class Joined:
    """What an attached rank works with.

    Attributes:
        namespace_id: of its page hashes.
        store: the open store.
        pools: all that the rank holds, for reading.
        owned: pool name -> shards that the rank writes and speaks for.
        anchors: pools whose bytes are the anchor: `kv`, or what derives from a logical one.
    """

    namespace_id: str
    store: ObjectStore
    pools: RankPools
    owned: Mapping[str, tuple[int, ...]]
    anchors: tuple[str, ...]

    @property
    def writes_anchor(self) -> bool:
        """Whether this rank writes a part of the anchor."""
        return any(self.owned.get(name) for name in self.anchors)


class EngineLink:
    """The attachment of one rank. Safe to use from several threads.

    Attributes:
        failure: what the last registration or heartbeat failed with; None where it did not.
    """

    def __init__(self, client: ControlClient, attachment: RankAttachment) -> None:
        """Take the parts; `start` begins.

        Args:
            client: the rank's client; closed by `close`.
            attachment: of the same rank; left by `close`.
        """
        self.client = client
        self._attachment = attachment
        self._lock = threading.Lock()
        self._circuit = Circuit(time.monotonic)
        self._wanted: tuple[Sequence[BoundPool], Sequence[RankPool]] | None = None
        self._joined: Joined | None = None
        self._epoch = 0
        self._beat_every = 10.0
        self._beat_at = 0.0
        self._join_at = 0.0
        self._pause = _FIRST_PAUSE
        self._complaint = ""
        self.failure: CaketinError | None = None
        self._chores: list[tuple[Callable[[Joined], None], bool]] = []
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._first_try = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caketin-link", daemon=True)

    @property
    def joined(self) -> Joined | None:
        """What to work with, None while the rank is not attached."""
        return self._joined

    def on_tick(self, chore: Callable[[Joined], None], *, also_away: bool = False) -> None:
        """Have `chore` called a few times a second while attached.

        Args:
            chore: what to call.
            also_away: whether it is due while the control plane does not answer, too.
        """
        self._chores.append((chore, also_away))

    def start(self, seconds: float) -> bool:
        """Begin, and wait at most `seconds` for the first try; return whether it attached."""
        self._thread.start()
        self._first_try.wait(seconds)
        return self._joined is not None

    def set_pools(self, bound: Sequence[BoundPool], registered: Sequence[RankPool]) -> None:
        """Register these pools from now on; returns at once."""
        with self._lock:
            self._wanted = (tuple(bound), tuple(registered))
            self._join_at = 0.0
        self._wake.set()

    def rejoin(self) -> None:
        """Register again soon, unless that is being tried already: every lookup may ask for it."""
        with self._lock:
            if self._join_at == _NEVER:
                self._join_at = 0.0
        self._wake.set()

    @staticmethod
    def forgotten(error: ControlRefused) -> bool:
        """Whether the control plane does not know the rank any more; it registers again by itself."""
        return error.refusal in _UNKNOWN

    def call(self, make: Callable[[ControlClient], T]) -> T:
        """Make a call of the control plane, unless it has been silent lately.

        Raises:
            ControlPlaneAway: no answer in time; at once while the control plane is silent.
            ControlRefused: it refused. Where it does not know the rank, the rank registers again.
        """
        with self._lock:
            ticket = self._circuit.enter()
        if ticket is None:
            raise ControlPlaneAway("the control plane has not answered lately")
        try:
            answer = make(self.client)
        except ControlPlaneAway:
            with self._lock:
                opened = self._circuit.failed(ticket)
            if opened:
                log.warning("the control plane does not answer: all lookups are misses until it does")
                self._wake.set()
            raise
        except ControlRefused as error:
            with self._lock:
                self._circuit.succeeded(ticket)
            if self.forgotten(error):
                self.rejoin()
            raise
        with self._lock:
            self._circuit.succeeded(ticket)
        return answer

    def commit(
        self, namespace_id: str, page_hashes: PageHashes, stored: Mapping[str, control.StoredPool]
    ) -> control.CommitResult:
        """See `ControlPlane.commit`."""
        return self.call(lambda client: client.commit(namespace_id, page_hashes, stored))

    def missing(
        self,
        namespace_id: str,
        page_hashes: PageHashes,
        generation: bytes | None,
        missing: Mapping[str, control.MissingPool],
    ) -> control.MissingResult:
        """See `ControlPlane.missing`."""
        return self.call(lambda client: client.missing(namespace_id, page_hashes, generation, missing))

    def close(self) -> None:
        """Leave and close everything; again: nothing happens. Takes a few seconds at most."""
        self._ended.set()
        self._wake.set()
        if self._thread.ident is None:
            self._end()
            return
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("a call still runs; the rank leaves as soon as it has returned")

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._wake.clear()
                self._step()
                self._first_try.set()
                self._wake.wait(_TICK_SECONDS)
        finally:
            self._first_try.set()
            self._end()

    def _end(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            self._do_chores(joined)
        try:
            self._attachment.leave()
        except CaketinError as error:
            log.warning("leaving was not clean: %s", error)
        self.client.close()

    def _step(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        joining = self._join_due(now)
        try:
            if joining:
                self._join()
            elif self._joined is not None and self._beat_due(now):
                self._beat(now)
        except CaketinError as error:
            self._failed(error, joining=joining)
        except Exception:
            # The thread is all that can ever attach again, so nothing may end it.
            log.exception("attaching failed in a way that nobody foresaw")
            self._failed(None, joining=joining)
        if self._joined is not None:
            self._do_chores(self._joined)

    def _join_due(self, now: float) -> bool:
        with self._lock:
            return self._wanted is not None and now >= self._join_at

    def _beat_due(self, now: float) -> bool:
        with self._lock:
            return now >= self._beat_at or self._circuit.begin_probe()

    def _join(self) -> None:
        with self._lock:
            assert self._wanted is not None  # noqa: S101  `_join_due` has looked
            bound, registered = self._wanted
            self._join_at = _NEVER
        attached = self._attachment.join(bound, registered)
        self._joined = _joined(attached, bound, registered)
        self._epoch = attached.registration.epoch
        self._beat_every = max(0.2, attached.registration.lease_seconds / 3)
        self._complaint = ""
        self._alive(time.monotonic())
        names = ", ".join(sorted(p.spec.name for p in registered))
        log.info("attached to namespace %s with pools %s", attached.namespace_id, names)

    def _beat(self, now: float) -> None:
        try:
            self.client.heartbeat(self._epoch)
        except ControlRefused as error:
            self._alive(now)
            if not self.forgotten(error):
                raise
            self.rejoin()
        else:
            self._alive(now)

    def _alive(self, now: float) -> None:
        self.failure = None
        with self._lock:
            self._beat_at = now + self._beat_every
            self._pause = _FIRST_PAUSE
            was_open = self._circuit.is_open
            if was_open:
                self._circuit.begin_probe()
                self._circuit.end_probe(good=True)
            if was_open and not self._circuit.is_open:
                log.warning("the control plane answers again")

    def _failed(self, error: CaketinError | None, *, joining: bool) -> None:
        """Note when to try again; say each new reason once.

        What asked for a registration is there until one succeeds, also of a rank that is attached: pools that
        came late are a miss until then. Only a heartbeat that nobody answered asks for none.
        """
        now = time.monotonic()
        self.failure = error or self.failure
        pause = self._pause * random.uniform(0.7, 1.3)  # noqa: S311  spreads the ranks, protects nothing
        with self._lock:
            self._circuit.end_probe(good=False)
            self._beat_at = now + min(1.0, self._beat_every)
            if self._join_at == _NEVER and (joining or isinstance(error, ControlRefused)):
                self._join_at = now + pause
        self._pause = min(_LONGEST_PAUSE, self._pause * 2)
        if error is not None and str(error) != self._complaint:
            self._complaint = str(error)
            refused = not isinstance(error, ControlPlaneAway)
            level = logging.ERROR if refused else logging.WARNING
            state = (
                "not attached, everything is a miss"
                if self._joined is None
                else "the last registration holds"
            )
            log.log(level, "%s; trying again: %s", state, error)

    def _do_chores(self, joined: Joined) -> None:
        for chore, also_away in self._chores:
            if self._circuit.is_open and not also_away:
                continue
            try:
                chore(joined)
            except CaketinError as error:
                log.info("a chore failed and is tried again: %s", error)
            except Exception:
                log.exception("a chore failed in a way that nobody foresaw")


def _joined(attached: Attached, bound: Sequence[BoundPool], registered: Sequence[RankPool]) -> Joined:
    specs = {p.spec.name: p.spec for p in registered}
    return Joined(
        namespace_id=attached.namespace_id,
        store=attached.store,
        pools=RankPools(attached.namespace_id, bound),
        owned={p.spec.name: p.owned_shards for p in registered if not p.spec.logical},
        anchors=tuple(anchor_pools(specs)),
    )
