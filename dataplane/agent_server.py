"""The agent as a process: its Unix socket, the TCP port for metrics, and an end in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dataplane.agent import Agent
from dataplane.agent_app import create_app
from dataplane.agent_peers import PEER, peer_of
from dataplane.agent_settings import AgentSettings
from metadata.errors import CaketinError

log = logging.getLogger(__name__)

_BACKLOG: Final = 512
_LAST_ANSWERS_SECONDS: Final = 2
_TCP_SECONDS: Final = 30.0
_TCP_CONNECTIONS: Final = 64
_KEEP_ALIVE_SECONDS: Final = 3600
"""A session lives as long as its connection, which therefore is not closed for being idle."""


class SocketInUse(CaketinError):
    """The socket, or the port, cannot be listened on."""

    code = "socket_in_use"

    def __str__(self) -> str:
        return self.detail


class ListeningSocket:
    """A Unix socket at a path, which this process alone has."""

    def __init__(self, path: Path, *, for_others: bool) -> None:
        """Listen. What an agent that died left there is replaced.

        Args:
            path: of the socket.
            for_others: let other users connect; who may call is decided later.

        Raises:
            SocketInUse: another agent listens there, or the path cannot be used.
        """
        self._path = path
        try:
            path.parent.mkdir(mode=0o755 if for_others else 0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(f"{path}.lock", flags, 0o600)
        except OSError as error:
            raise SocketInUse(f"cannot listen at {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.socket = self._listen(for_others)
        except OSError as error:
            os.close(self._lock)
            taken = error.errno in {errno.EWOULDBLOCK, errno.EADDRINUSE}
            why = "another agent listens there" if taken else error.strerror or str(error)
            raise SocketInUse(f"cannot listen at {path}: {why}") from None

    def close(self) -> None:
        """Remove the socket."""
        self.socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            Path(f"{self._path}.lock").unlink()
        os.close(self._lock)

    def _listen(self, for_others: bool) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise OSError(errno.EEXIST, "there is something else than a socket")
            self._path.unlink()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Nobody gets in between: the socket is closed to others from its first moment.
            before = os.umask(0o177)
            try:
                made.bind(str(self._path))
            finally:
                os.umask(before)
            if for_others:
                self._path.chmod(0o666)
            made.listen(_BACKLOG)
        except BaseException:
            made.close()
            raise
        return made


def run_agent(settings: AgentSettings, say: Callable[[str], None] = lambda _line: None) -> bool:
    """Serve until SIGTERM or Ctrl-C, then drain and end; needs the extra `server`.

    Returns:
        Whether all store calls had come back. Where one had not, the process must end without the
        interpreter's own clean-up (`os._exit`): a native call that hangs would abort it.

    Raises:
        SocketInUse, FolderUnusable: something else has what the agent needs.
    """
    import uvicorn  # noqa: PLC0415  extra server

    listening = ListeningSocket(settings.socket, for_others=bool(settings.allowed_uids))
    try:
        sockets = [listening.socket]
        if settings.port is not None:
            sockets.append(_tcp(settings.host, settings.port))
        agent = Agent(settings)
        config = uvicorn.Config(
            create_app(agent),
            http=_protocol(agent),
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
        )
        server = _server(config, agent)
        say(f"caketin agent listens at {settings.socket}")
        server.run(sockets=sockets)
        return not agent.transfers.hanging
    finally:
        listening.close()


def _server(config: Any, agent: Agent) -> Any:
    import uvicorn  # noqa: PLC0415  extra server

    class DrainingServer(uvicorn.Server):
        """Goes on serving while the agent drains, so that engines hear of it."""

        _told = False
        _loop: asyncio.AbstractEventLoop | None = None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self._told:
                self.should_exit = True
                self.force_exit = sig == signal.SIGINT
                return
            self._told = True
            loop = self._loop
            if loop is None:  # it has not even started
                self.should_exit = True
                return
            loop.call_soon_threadsafe(lambda: loop.create_task(self._drain()))

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            self._loop = asyncio.get_running_loop()
            await super().startup(sockets)

        async def _drain(self) -> None:
            log.info("told to end: transfers may take %g s to end", agent.settings.drain_seconds)
            try:
                await agent.drain()
            finally:
                self.should_exit = True

    return DrainingServer(config)


def _protocol(agent: Agent) -> type:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # noqa: PLC0415  extra server

    over_tcp: set[int] = set()

    class PeerProtocol(HttpToolsProtocol):
        """Tells each request who its peer is, and the agent when a connection is gone."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._peer = peer_of(transport.get_extra_info("socket"))
            self.app_state = {**self.app_state, PEER: self._peer}
            if self._peer.uid is None:
                # A scrape is short; whoever keeps a port of all machines open for longer is let go.
                self.loop.call_later(_TCP_SECONDS, transport.abort)
                over_tcp.add(self._peer.number)
                if len(over_tcp) > _TCP_CONNECTIONS:
                    transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            over_tcp.discard(self._peer.number)
            agent.sessions.connection_closed(self._peer.number)

    return PeerProtocol


def _tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SocketInUse(f"cannot listen on {host} port {port}: {error.strerror}") from None
