"""An engine's side of the agent, for Python: the calls over its Unix socket, and pools mapped without a copy.

    with AgentClient(socket) as agent, agent.open(request) as session:
        got = session.slots(hashes, parent=None)
        kv = session.pools["kv"].part("k")              # uint8 (slots, bytes), the memory itself
        kv[got.slots["kv"][0]] = ...                    # fill what is not resident
        done = session.publish(got.token)

A session sends a word by itself, from a thread, so that an engine which computes for a minute keeps it. Safe
to use from several threads.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import httpx
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from dataplane.messages import agent as messages
from dataplane.messages import control
from dataplane.messages.wire import Message, decode, encode
from metadata.codec import PageHashes
from metadata.errors import CaketinError, FieldError, InvalidInput

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

_WORDS_A_LEASE: Final = 4
_WAIT_MS: Final = 10_000
_ALLOCATION_SECONDS: Final = 300.0
"""Touching hundreds of gigabytes takes the agent a while."""
_ENDED: Final = frozenset({"done", "cancelled", "failed"})


class AgentAway(CaketinError):
    """The agent did not answer: not started, ended, or not this user's."""

    code = "agent_away"


class AgentRefused(CaketinError):
    """The agent refused a call.

    Attributes:
        refusal: the contract's code, such as `no_slots`.
        status: HTTP status.
        pools: with `no_slots`, what each pool lacks.
    """

    code = "agent_refused"

    def __init__(self, problem: control.Problem) -> None:
        errors = [FieldError(e.field, e.code, e.detail) for e in problem.errors]
        super().__init__(problem.detail, errors)
        self.refusal = problem.code
        self.status = problem.status
        self.pools = problem.pools or {}


class MappedMemory:
    """The memory of one pool, shared with the agent.

    Views stay valid after `close`, until the last is gone: the mapping lives as long as they do. They are
    worthless once the session has ended: others own the slots then.

    Attributes:
        pool: what the agent said of it.
    """

    def __init__(self, pool: messages.MappedPool) -> None:
        """Map the file; a pool without bytes maps nothing.

        Raises:
            OSError: it cannot be opened, or somebody has put a link there.
        """
        self.pool = pool
        self._bytes: NDArray[np.uint8] | None = None
        if pool.path is not None:
            fd = os.open(pool.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(fd, pool.length, flags=mmap.MAP_SHARED)
            finally:
                os.close(fd)
            self._bytes = np.frombuffer(mapped, np.uint8)

    def part(self, name: str, occurrence: int = 0) -> NDArray[np.uint8]:
        """Return a part of all slots, uint8 (slots, bytes), without a copy.

        Args:
            name: of the part.
            occurrence: which shard, where the rank holds several; in the order of `owned_shards`.

        Raises:
            InvalidInput: there is no such part.
        """
        found = [p for p in self.pool.parts if p.part == name]
        if self._bytes is None or occurrence >= len(found):
            named = [p.part for p in self.pool.parts]
            fault = FieldError("part", "unknown", f"is {name!r} number {occurrence}, the pool has {named}")
            raise InvalidInput("the pool has no such part", [fault])
        part = found[occurrence]
        return np.ndarray(
            (self.pool.slots, part.bytes),
            np.uint8,
            buffer=self._bytes,
            offset=part.offset,
            strides=(self.pool.page_stride, 1),
        )

    def tensor(self, name: str, dtype: Any = None, occurrence: int = 0) -> Any:
        """Return a part of all slots as a torch tensor, (slots, elements), without a copy.

        Args:
            name: of the part.
            dtype: torch dtype of the elements; None for uint8.
            occurrence: which shard.

        Raises:
            ModuleNotFoundError: torch is not installed.
            InvalidInput: there is no such part.
        """
        import torch  # noqa: PLC0415  an extra of its own

        plain = torch.from_numpy(self.part(name, occurrence))
        return plain if dtype is None else plain.view(dtype)

    def close(self) -> None:
        """Let go of the memory; views keep what they need of it."""
        self._bytes = None


class AgentClient:
    """A connection to the agent of this machine; `sessions` are those it has open.

    Errors of every call: `AgentAway` where no answer came, `AgentRefused` with the contract's code where the
    answer is a problem.
    """

    def __init__(self, socket: Path | str, *, seconds: float = 30.0) -> None:
        """Take the path of the socket; nothing is called yet.

        Args:
            socket: the agent's.
            seconds: how long an answer may take, beyond what a call itself waits.
        """
        self.socket = Path(socket)
        self.sessions: set[AgentSession] = set()
        self._seconds = seconds
        limits = httpx.Limits(keepalive_expiry=None)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket), limits=limits),
            base_url="http://agent",
            timeout=seconds,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and the sessions that are still open."""
        for session in list(self.sessions):
            session.close()
        self._http.close()

    def open(self, request: messages.SessionRequest) -> AgentSession:
        """Open a session and map its pools."""
        path, told = "/v1/sessions", messages.SessionResult
        opened = self.call("POST", path, request, told, wait_seconds=_ALLOCATION_SECONDS)
        return AgentSession(self, opened)

    def status(self) -> messages.AgentStatus:
        """Return the agent's state."""
        return self.call("GET", "/v1/status", None, messages.AgentStatus)

    def call(
        self, method: str, path: str, body: Message | None, answer: type[M], *, wait_seconds: float = 0.0
    ) -> M:
        """Make a call and return its answer."""
        return decode(self.send(method, path, body, wait_seconds=wait_seconds), "json", answer)

    def send(
        self, method: str, path: str, body: Message | None = None, *, wait_seconds: float = 0.0
    ) -> bytes:
        """Make a call and return the answer's body."""
        content = None if body is None else encode(body, "json")
        headers = {} if content is None else {"content-type": "application/json"}
        try:
            answer = self._http.request(
                method, path, content=content, headers=headers, timeout=self._seconds + wait_seconds
            )
        except (httpx.HTTPError, RuntimeError) as error:
            why = str(error) or type(error).__name__
            raise AgentAway(f"{method} {path} at {self.socket}: {why}") from error
        if answer.is_success:
            return answer.content
        try:
            problem = decode(answer.content, "json", control.Problem)
        except InvalidInput:
            raise AgentAway(f"{path} was answered with {answer.status_code} and no problem") from None
        raise AgentRefused(problem)


class AgentSession:
    """A session.

    Attributes:
        opened: what the agent answered.
        pools: the mapped memory of each pool.
        ended: set when the agent says that it has ended: what is mapped must not be written any more.
    """

    def __init__(self, client: AgentClient, opened: messages.SessionResult) -> None:
        self.opened = opened
        self.session_id = opened.session_id
        self.ended = threading.Event()
        self._client = client
        client.sessions.add(self)
        self._path = f"/v1/sessions/{opened.session_id}"
        self._closed = threading.Event()
        try:
            self.pools = {name: MappedMemory(pool) for name, pool in opened.pools.items()}
        except OSError:
            self.close()
            raise
        self._every = max(0.05, opened.idle_seconds / _WORDS_A_LEASE)
        threading.Thread(target=self._stay, name="caketin-agent-session", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session; again: nothing happens."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._client.sessions.discard(self)
        with contextlib.suppress(AgentAway, AgentRefused):
            self._client.send("DELETE", self._path)
        for pool in getattr(self, "pools", {}).values():
            pool.close()

    def match(
        self, page_hashes: Sequence[bytes], *, parent: bytes | None = None, lock: bool = True
    ) -> messages.MatchResult:
        """Ask what is resident on this host, and lock it."""
        body = messages.MatchRequest(
            page_hashes=PageHashes.of(page_hashes), lock=lock, parent_hash=parent.hex() if parent else UNSET
        )
        return self._call("match", body, messages.MatchResult)

    def slots(
        self,
        page_hashes: Sequence[bytes],
        *,
        parent: bytes | None = None,
        pools: Sequence[str] | None = None,
    ) -> messages.SlotsResult:
        """Ask for slots to fill; what is resident already must not be written."""
        body = messages.SlotsRequest(
            page_hashes=PageHashes.of(page_hashes),
            parent_hash=parent.hex() if parent else None,
            pools=None if pools is None else list(pools),
        )
        return self._call("slots", body, messages.SlotsResult)

    def publish(self, token: str, *, backup: bool = True) -> messages.PublishResult:
        """Say that the slots of a token are filled."""
        body = messages.PublishRequest(token=token, backup=backup)
        return self._call("publish", body, messages.PublishResult)

    def prefetch(
        self,
        page_hashes: Sequence[bytes],
        *,
        first_page: int = 0,
        parent: bytes | None = None,
        pools: Mapping[str, control.PoolQuery] | None = None,
        policy: Literal["wait_complete", "best_effort", "timeout"] = "wait_complete",
        deadline_ms: int | None = None,
        lock: bool = True,
    ) -> str:
        """Begin to fetch what host memory lacks; return the transfer's id."""
        body = messages.TransferRequest(
            kind="prefetch",
            page_hashes=PageHashes.of(page_hashes),
            first_page=first_page,
            pools=None if pools is None else dict(pools),
            policy=policy,
            deadline_ms=deadline_ms,
            lock=lock,
            parent_hash=parent.hex() if parent else UNSET,
        )
        return self._call("transfers", body, messages.TransferAccepted).transfer_id

    def back_up(
        self,
        page_hashes: Sequence[bytes],
        *,
        pools: Mapping[str, control.PoolQuery] | None = None,
        deadline_ms: int | None = None,
    ) -> str:
        """Begin to store resident pages; return the transfer's id."""
        body = messages.TransferRequest(
            kind="backup",
            page_hashes=PageHashes.of(page_hashes),
            pools=None if pools is None else dict(pools),
            deadline_ms=deadline_ms,
            lock=False,
        )
        return self._call("transfers", body, messages.TransferAccepted).transfer_id

    def transfer(self, transfer_id: str, *, wait_ms: int = 0) -> messages.Transfer:
        """Return what a transfer has come to; waits at most so long for its end."""
        path = f"/v1/transfers/{transfer_id}?wait_ms={wait_ms}"
        return self._client.call("GET", path, None, messages.Transfer, wait_seconds=wait_ms / 1000)

    def wait(self, transfer_id: str) -> messages.Transfer:
        """Wait for the end of a transfer; each has a deadline of its own."""
        while True:
            found = self.transfer(transfer_id, wait_ms=_WAIT_MS)
            if found.state in _ENDED:
                return found

    def cancel(self, transfer_id: str) -> None:
        """Have a transfer end soon."""
        self._client.send("DELETE", f"/v1/transfers/{transfer_id}")

    def release(self, token: str) -> None:
        """Release a lock, or give up slots that are not to be published."""
        self._client.send("DELETE", f"/v1/locks/{token}")

    def _call(self, name: str, body: Message, answer: type[M]) -> M:
        return self._client.call("POST", f"{self._path}/{name}", body, answer)

    def _stay(self) -> None:
        """Say a word now and then."""
        nothing = messages.MatchRequest(page_hashes=PageHashes(), lock=False)
        while not self._closed.wait(self._every):
            try:
                self._call("match", nothing, messages.MatchResult)
            except AgentRefused as error:
                if error.refusal == "unknown_session":
                    self.ended.set()
                    return
            except AgentAway:
                continue
