"""Around every request: its id, its duration, its log line, and a problem where the code failed."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from secrets import token_hex
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from api.errors import Internal, problem_response
from api.logs import get_logger
from api.metrics import Metrics

REQUEST_ID_HEADER: Final = "X-Request-ID"
_HEADER: Final = REQUEST_ID_HEADER.lower().encode()
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}\Z")
_NO_ROUTE: Final = "none"
_CLIENT_LEFT: Final = 499
_CLIENT_FAULT, _SERVER_FAULT = 400, 500

log = get_logger(__name__)


class RequestObserver:
    """ASGI middleware. One object a server; what it knows of a request lives in the call."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, log_requests: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        echoed = (_HEADER, request_id.encode())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), echoed]
            await send(message)

        with bound_contextvars(request_id=request_id), self._metrics.in_flight():
            try:
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                status = status or _CLIENT_LEFT
            except Exception:
                log.exception("request failed", method=scope["method"], route=_route(scope))
                if status == 0:
                    problem = problem_response(Internal(f"see the log for {request_id}"), request_id)
                    await problem(scope, receive, send_with_id)
            finally:
                self._tell(scope, status or _CLIENT_LEFT, time.perf_counter() - started)

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route(scope)
        self._metrics.request(scope["method"], route, status, seconds)
        if not self._log_requests and status < _CLIENT_FAULT:
            return
        level = log.info if status < _SERVER_FAULT else log.warning
        level("request", method=scope["method"], route=route, status=status, ms=round(1000 * seconds, 2))


def _request_id(scope: Scope) -> str:
    """Return the caller's request id where it is printable and short, else a new one."""
    for name, value in scope["headers"]:
        if name == _HEADER and _REQUEST_ID.match(value):
            return str(value.decode("ascii"))
    return token_hex(8)


def _route(scope: Mapping[str, Any]) -> str:
    """Return the template of the route that matched: the path may hold anything."""
    return str(getattr(scope.get("route"), "path", _NO_ROUTE))
