"""How much at once: calls a second per token, calls in flight, and connections.

Everything is counted in the process: with several workers or replicas each has its own count, so the bound of
the whole is as many times larger. It keeps one caller from taking all of a process; it is no accounting.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import Refused, problem_response

PROBES: Final = frozenset({"/healthz", "/readyz"})
"""Answered however much is going on: whoever restarts processes that do not answer must not do it then."""
OVER_CONNECTIONS: Final = "over_connections"
"""Set on the state of a request whose connection is one too many."""
MAX_BUCKETS: Final = 20_000


class RateLimited(Refused):
    """Too many calls; `Retry-After` says when to come again."""

    code = "rate_limited"

    @classmethod
    def after(cls, seconds: float, detail: str) -> RateLimited:
        """Return the error that tells to come again in so many seconds (whole ones, at least 1)."""
        return cls(detail, headers={"Retry-After": str(max(1, math.ceil(seconds)))})


class RateLimiter:
    """Token buckets: so many calls a second, and after a pause a burst of so many at once.

    A bucket is one number: the time at which it would be full again (generic cell rate algorithm).
    """

    def __init__(self, per_second: float, burst: int) -> None:
        """Make buckets of `burst` calls that fill by `per_second`; a rate of 0 does not limit."""
        self._seconds_a_call = 1 / per_second if per_second > 0 else 0.0
        self._depth = self._seconds_a_call * max(1, burst)
        self._full_at: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, who: Hashable, now: float) -> float:
        """Take one call out of a bucket.

        Args:
            who: whose bucket.
            now: seconds of any clock that never goes back.

        Returns:
            0 where there was one, else the seconds until there will be; nothing is taken then.
        """
        if not self._seconds_a_call:
            return 0.0
        full_at = max(self._full_at.get(who, now), now) + self._seconds_a_call
        wait = full_at - now - self._depth
        # Sums of many small numbers are off by a little; a call is not refused for that.
        if wait > self._seconds_a_call * 1e-6:
            return wait
        if len(self._full_at) >= MAX_BUCKETS and who not in self._full_at:
            self._full_at = {key: at for key, at in self._full_at.items() if at > now}
        self._full_at[who] = full_at
        return 0.0


class InFlightLimit:
    """ASGI middleware: answers what is beyond the bound at once, as a problem like any other."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        state = scope.get("state", {})
        if state.get(OVER_CONNECTIONS):
            refused = RateLimited.after(1, "the server has as many connections as it takes")
        elif self._now >= self._most:
            refused = RateLimited.after(1, f"the server answers {self._most} calls at once and is full")
        else:
            self._now += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._now -= 1
            return
        answer = problem_response(refused, state.get("request_id"), {"Connection": "close"})
        await answer(scope, receive, send)
