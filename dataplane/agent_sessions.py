"""Sessions of engines: who is there, under which lease, and what ends with them.

A session ends when it is told to, when all connections that have spoken for it are closed and no new one
speaks soon, or after a time without a word. What it holds in the host tier is given back at once; its rank
leaves the control plane once its last transfer has returned.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from dataplane.agent_errors import RateLimited
from dataplane.agent_settings import AgentSettings
from dataplane.agent_store import SharedStores
from dataplane.agent_threads import in_thread
from dataplane.agent_tiers import PoolPlan, Tier, Tiers, plan_of
from dataplane.attach import RankAttachment
from dataplane.commit_queue import CommitQueue
from dataplane.control_client import ControlClient, ControlSettings, ModelIdentity, RankIdentity
from dataplane.control_plane import ControlRefused
from dataplane.engines.link import EngineLink, Joined
from dataplane.host_answers import UnknownSession
from dataplane.messages.agent import MappedPool, SessionRequest
from dataplane.page_mover import PageMover
from metadata.errors import CaketinError, InvalidInput, PoolChanged, StaleIncarnation
from metadata.namespace import Namespace, fingerprint
from metadata.pool_json import spec_differences
from metadata.pools import RankPool

log = logging.getLogger(__name__)

_REMEMBERED: Final = 1024
_RANKS: Final = 4096
_REFUSALS: Final[dict[str, type[CaketinError]]] = {
    "stale_incarnation": StaleIncarnation,
    "pool_changed": PoolChanged,
    "invalid": InvalidInput,
}
"""What the control plane refuses for good, told to the engine as the same."""


@dataclass(eq=False)
class Session:
    """One session.

    Attributes:
        session_id: random.
        me: the rank that the engine is.
        tier: what it shares with others.
        link: its rank's place in the control plane.
        unclaimed: what was stored while the control plane was away.
        given: pages of the reservations that it may publish, by the tier's token.
        connections: open connections that have spoken for it.
        heard_at: of its last word.
        alone_since: when its last connection closed; None while there is one.
        running: transfers of it that have not returned.
        was_attached: whether its rank was registered when that was looked at last.
        ended: whether it has.
    """

    session_id: str
    me: RankIdentity
    tier: Tier
    link: EngineLink
    unclaimed: CommitQueue = field(default_factory=CommitQueue)
    given: dict[str, list[bytes]] = field(default_factory=dict)
    connections: set[int] = field(default_factory=set)
    heard_at: float = field(default_factory=time.monotonic)
    alone_since: float | None = None
    running: int = 0
    ended: bool = False
    was_attached: bool = False
    _mover: tuple[Joined, PageMover] | None = None

    @property
    def namespace_id(self) -> str:
        """Of its page hashes; empty while the control plane has not been reached."""
        joined = self.link.joined
        return "" if joined is None else joined.namespace_id

    def mover(self) -> PageMover | None:
        """Return what moves its pages, None while it is not attached."""
        joined = self.link.joined
        if joined is None:
            return None
        if self._mover is None or self._mover[0] is not joined:
            mover = PageMover(joined.store, self.link, joined.namespace_id, self.tier.memory.bound)
            mover.unclaimed = self.unclaimed
            self._mover = (joined, mover)
        return self._mover[1]


@dataclass
class _Life:
    """One process life of a rank: its pools stay as they are, and what came before it is over (I1, T5)."""

    incarnation: str
    gone: dict[str, None]
    pools: dict[str, RankPool] = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    """A session and the files that it maps."""

    session: Session
    pools: dict[str, MappedPool]


class Sessions:
    """All sessions of an agent. All calls belong to the event loop."""

    def __init__(
        self,
        settings: AgentSettings,
        tiers: Tiers,
        stores: SharedStores,
        unlink: Callable[[str], None],
    ) -> None:
        """Take the parts; `unlink` removes the names of a session's files."""
        self._settings = settings
        self._tiers = tiers
        self._stores = stores
        self._unlink = unlink
        self._open: dict[str, Session] = {}
        self._lives: dict[tuple[str, str], _Life] = {}
        self._opening = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._lingering: set[Session] = set()
        self.on_end: Callable[[Session], None] = lambda _session: None

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    async def open(self, request: SessionRequest, connection: int) -> Opened:
        """Open a session; its rank registers with the control plane, as soon as that is there.

        Raises:
            InvalidInput: something in the request cannot be used.
            StaleIncarnation, PoolChanged: the rank may not be registered so.
            OutOfHostMemory: there is no room for its pools.
            RateLimited: there are as many sessions as the agent takes.
        """
        plan = plan_of(request.pools)
        me, model = _identity(request)
        async with self._opening:
            life = self._life(me)
            _check_unchanged(life, plan)
            if len(self._open) >= self._settings.max_sessions:
                raise RateLimited(f"the agent has {len(self._open)} sessions, as many as it takes")
            self._replace(me)
            tier = await self._tier(request, plan)
            session = self._begin(me, model, tier, plan, connection)
            try:
                mapped = tier.memory.link(session.session_id)
            except BaseException:
                self.end(session, "its files could not be named")
                raise
            life.pools |= {p.spec.name: p for p in plan.pools}
        session.link.set_pools(tier.memory.bound, plan.pools)
        await in_thread(lambda: session.link.start(self._settings.join_seconds), "join")
        self._check_joined(session)
        session.heard_at = time.monotonic()
        log.info("session %s of engine %s rank %s is open", session.session_id, me.engine_id, me.rank)
        return Opened(session, mapped)

    def heard(self, session_id: str, connection: int) -> Session:
        """Return a session and renew its lease.

        Raises:
            UnknownSession: it ended, or never was.
        """
        session = self._open.get(session_id)
        if session is None:
            raise UnknownSession(
                f"there is no session {session_id!r}; it ended with its connection or after "
                f"{self._settings.idle_seconds:g} s of silence"
            )
        session.heard_at = time.monotonic()
        session.connections.add(connection)
        session.alone_since = None
        return session

    def find(self, session_id: str) -> Session | None:
        """Return an open session without renewing it."""
        return self._open.get(session_id)

    def connection_closed(self, connection: int) -> None:
        """Note that a connection is gone."""
        for session in self._open.values():
            if connection in session.connections:
                session.connections.discard(connection)
                if not session.connections:
                    session.alone_since = time.monotonic()

    def sweep(self) -> None:
        """End the sessions whose time is over."""
        now = time.monotonic()
        for session in list(self._open.values()):
            if now - session.heard_at >= self._settings.idle_seconds:
                self.end(session, f"no word for {self._settings.idle_seconds:g} s")
            elif (
                session.alone_since is not None
                and now - session.alone_since >= self._settings.reconnect_seconds
            ):
                self.end(session, "its connections are closed")
            elif _refused(session) == "stale_incarnation":
                self._life(session.me).gone[session.me.incarnation] = None
                self.end(session, "a newer process of its rank has registered")

    def end(self, session: Session, why: str) -> None:
        """End a session; again: nothing happens."""
        if session.ended:
            return
        session.ended = True
        del self._open[session.session_id]
        left = session.tier.host.end_session(session.session_id)
        session.given.clear()
        self._unlink(session.session_id)
        self.on_end(session)
        log.info(
            "session %s ended (%s): %d locks released, %d slots freed, %d reservations still in the store",
            *(session.session_id, why, len(left.locks), sum(left.freed.values()), len(left.quarantined)),
        )
        if session.running:
            self._lingering.add(session)
        else:
            self._leave(session)

    def returned(self, session: Session) -> None:
        """Note that a transfer of a session has come back from the store."""
        session.running -= 1
        if session.ended and not session.running:
            self._lingering.discard(session)
            self._leave(session)

    async def end_all(self, seconds: float) -> None:
        """End all sessions and see their ranks off, within a time."""
        for session in list(self._open.values()):
            self.end(session, "the agent ends")
        for session in self._lingering:  # nobody waits any more for what hangs in the store
            self._leave(session)
        self._lingering.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=seconds)

    def _leave(self, session: Session) -> None:
        async def leave() -> None:
            await in_thread(session.link.close, "leave")

        task = asyncio.get_running_loop().create_task(leave())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _begin(
        self, me: RankIdentity, model: ModelIdentity, tier: Tier, plan: PoolPlan, connection: int
    ) -> Session:
        control = ControlSettings(
            self._settings.url, call_seconds=self._settings.call_seconds, token=self._settings.token
        )
        # A registration is a session's: the control plane takes no incarnation again that has left, and an
        # engine goes on when its session, or the agent, ended.
        client = ControlClient(control, replace(me, incarnation=secrets.token_hex(16)))
        attachment = RankAttachment(client, model, self._settings.store, self._stores.open)
        session = Session(f"s-{secrets.token_hex(8)}", me, tier, EngineLink(client, attachment))
        link, queue = session.link, session.unclaimed
        link.on_tick(lambda _joined: queue.flush(link))
        session.connections.add(connection)
        tier.host.open_session(session.session_id)
        self._open[session.session_id] = session
        return session

    async def _tier(self, request: SessionRequest, plan: PoolPlan) -> Tier:
        key = plan.key(request.namespace)
        found = self._tiers.find(key)
        if found is not None:
            return found
        return await in_thread(lambda: self._tiers.make(key, plan), "memory")

    def _life(self, me: RankIdentity) -> _Life:
        """Return the life of a rank's process, which is its newest.

        Raises:
            StaleIncarnation: an older process speaks.
        """
        known = self._lives.get((me.engine_id, me.rank))
        if known is None or known.incarnation != me.incarnation:
            gone = {} if known is None else {**known.gone, known.incarnation: None}
            known = _Life(me.incarnation, gone)
        if me.incarnation in known.gone:
            raise StaleIncarnation(
                f"a newer process of rank {me.rank} of engine {me.engine_id} has a session; this one must "
                "stop"
            )
        while len(known.gone) > _REMEMBERED:
            del known.gone[next(iter(known.gone))]
        # The newest is the last: what is forgotten at last is a rank that has not come back for longest.
        self._lives.pop((me.engine_id, me.rank), None)
        self._lives[me.engine_id, me.rank] = known
        while len(self._lives) > _RANKS:
            del self._lives[next(iter(self._lives))]
        return known

    def _replace(self, me: RankIdentity) -> None:
        """End the session that the same rank has: an engine that starts again takes the place of itself."""
        for session in list(self._open.values()):
            if (session.me.engine_id, session.me.rank) == (me.engine_id, me.rank):
                self.end(session, "its rank has opened another one")

    def _check_joined(self, session: Session) -> None:
        failure = session.link.failure
        if session.ended or not isinstance(failure, ControlRefused) or failure.refusal not in _REFUSALS:
            return
        self.end(session, f"the control plane refuses it: {failure.refusal}")
        raise _REFUSALS[failure.refusal](failure.detail, failure.errors)


def _check_unchanged(life: _Life, plan: PoolPlan) -> None:
    errors = [
        fault.under(f"pools[{i}]")
        for i, pool in enumerate(plan.pools)
        if pool.spec.name in life.pools
        for fault in spec_differences(life.pools[pool.spec.name], pool)
    ]
    if errors:
        raise PoolChanged("a process keeps its pools as they are; one that changed them is a new one", errors)


def _refused(session: Session) -> str | None:
    failure = session.link.failure
    return failure.refusal if isinstance(failure, ControlRefused) else None


def _identity(request: SessionRequest) -> tuple[RankIdentity, ModelIdentity]:
    """Return who the engine is and what its hashes mean.

    Raises:
        InvalidInput: one of them cannot be named so.
    """
    space = request.namespace
    try:
        # The tenant is the token's; any stands for it in the check of the other fields.
        Namespace(
            "tenant",
            space.model,
            space.revision,
            space.page_size,
            space.hash_kind,
            fingerprint(space.namespace_salt),
        )
    except InvalidInput as error:
        raise InvalidInput(error.detail, [e.under("namespace") for e in error.errors]) from None
    model = ModelIdentity(
        space.model,
        space.revision,
        space.page_size,
        "bigram" if space.hash_kind == "bigram" else "plain",
        space.namespace_salt,
    )
    return RankIdentity(request.engine_id, request.rank, request.incarnation), model
