"""The control client for asyncio: the same calls, made by `ControlClient` in threads.

So there is one implementation of deadlines, retries and forms. A thread costs some 50 us a call, a tenth of
an empty call.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar, cast

from dataplane.control_client import ControlClient, ControlSettings, RankIdentity
from dataplane.control_plane import ControlPlaneAway

P = ParamSpec("P")
T = TypeVar("T")

_THREADS: Final = 32

_Sync: TypeAlias = Callable[Concatenate[ControlClient, P], T]
_Async: TypeAlias = Callable[Concatenate["AsyncControlClient", P], Coroutine[Any, Any, T]]


def _awaited(call: _Sync[P, T], *, attach: bool = False) -> _Async[P, T]:
    async def awaited(self: AsyncControlClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(functools.partial(call, self._client, *args, **kwargs), attach=attach)

    # `functools.wraps` would give it the type of the method that it wraps.
    return cast("_Async[P, T]", functools.update_wrapper(awaited, call))


class AsyncControlClient:
    """Calls of one rank, as coroutines; arguments, answers and errors are those of `ControlClient`.

    A cancelled call ends at once for its caller. The deadline holds from the call on, also for one that waits
    because `_THREADS` others are under way.
    """

    def __init__(self, settings: ControlSettings, me: RankIdentity) -> None:
        """Take how to reach the control plane, and who calls; connects on first use."""
        self.me = me
        self._settings = settings
        self._client = ControlClient(settings, me)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="caketin-control")

    async def close(self) -> None:
        """Close all connections; later calls fail as `ControlPlaneAway`. Again: nothing happens."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    register = _awaited(ControlClient.register, attach=True)
    heartbeat = _awaited(ControlClient.heartbeat)
    leave = _awaited(ControlClient.leave)
    lookup = _awaited(ControlClient.lookup)
    commit = _awaited(ControlClient.commit)
    missing = _awaited(ControlClient.missing)
    purge = _awaited(ControlClient.purge, attach=True)
    job = _awaited(ControlClient.job)

    async def _run(self, call: Callable[[], T], *, attach: bool) -> T:
        seconds = self._settings.attach_seconds if attach else self._settings.call_seconds
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except RuntimeError as error:  # the threads are shut down
            raise ControlPlaneAway("the client is closed") from error
        try:
            return await asyncio.wait_for(running, seconds)
        except TimeoutError as error:
            raise ControlPlaneAway(f"no answer from {self._settings.url} within {seconds:g} s") from error
