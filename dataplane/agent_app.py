"""The agent's calls as an HTTP application (FastAPI): who may call, how much they may send, what they get."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from dataplane.agent import Agent
from dataplane.agent_errors import (
    PROBLEM_MEDIA_TYPE,
    BodyTooLarge,
    Forbidden,
    Internal,
    MethodNotAllowed,
    NotFound,
    problem,
)
from dataplane.agent_metrics import AgentCollector
from dataplane.agent_peers import PEER, Peer
from dataplane.messages import agent as messages
from dataplane.messages.wire import MEDIA_TYPES, Message, decode_request, encode
from metadata.errors import CaketinError, FieldError, InvalidInput

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"

OPEN_OVER_TCP: Final = frozenset({"/healthz", "/readyz", "/metrics", "/v1/status"})
"""Tells and changes nothing. Nobody can say over TCP whose process asks, so the rest is for the socket."""
_BODY_SECONDS: Final = 10.0
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_WAIT_MS: Final = re.compile(r"[0-9]{1,9}")


class Calls:
    """The handlers: parse, call one thing, answer."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def open_session(self, request: Request) -> Response:
        """`POST /v1/sessions`."""
        body = await self._read(request, messages.SessionRequest)
        return _answer(await self._agent.open_session(body, _peer(request).number), 201)

    async def end_session(self, request: Request) -> Response:
        """`DELETE /v1/sessions/{id}`."""
        session = self._agent.sessions.heard(request.path_params["session_id"], _peer(request).number)
        self._agent.end_session(session)
        return _answer(None, 204)

    async def match(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/match`."""
        body = await self._read(request, messages.MatchRequest)
        session = self._agent.sessions.heard(request.path_params["session_id"], _peer(request).number)
        return _answer(self._agent.match(session, body))

    async def slots(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/slots`."""
        body = await self._read(request, messages.SlotsRequest)
        session = self._agent.sessions.heard(request.path_params["session_id"], _peer(request).number)
        return _answer(self._agent.slots(session, body))

    async def publish(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/publish`."""
        body = await self._read(request, messages.PublishRequest)
        session = self._agent.sessions.heard(request.path_params["session_id"], _peer(request).number)
        return _answer(self._agent.publish(session, body))

    async def transfer(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/transfers`."""
        body = await self._read(request, messages.TransferRequest)
        session = self._agent.sessions.heard(request.path_params["session_id"], _peer(request).number)
        return _answer(self._agent.transfer(session, body), 202)

    async def transfer_state(self, request: Request) -> Response:
        """`GET /v1/transfers/{id}`."""
        given = request.query_params.get("wait_ms", "0")
        if not _WAIT_MS.fullmatch(given):
            fault = FieldError("wait_ms", "bad_format", "must be a number of milliseconds")
            raise InvalidInput("the parameters cannot be used", [fault])
        name = request.path_params["transfer_id"]
        return _answer(await self._agent.transfer_state(name, int(given), _peer(request).number))

    async def cancel(self, request: Request) -> Response:
        """`DELETE /v1/transfers/{id}`."""
        self._agent.cancel(request.path_params["transfer_id"], _peer(request).number)
        return _answer(None, 202)

    async def unlock(self, request: Request) -> Response:
        """`DELETE /v1/locks/{token}`."""
        self._agent.unlock(request.path_params["token"])
        return _answer(None, 204)

    async def status(self, _request: Request) -> Response:
        """`GET /v1/status`."""
        return _answer(self._agent.status())

    async def healthz(self, _request: Request) -> Response:
        """`GET /healthz`: the process serves."""
        return _json({"status": "ok"})

    async def readyz(self, _request: Request) -> Response:
        """`GET /readyz`: bytes can be moved; says what is wrong where they cannot."""
        wrong = self._agent.not_ready()
        checks = [{"name": "agent", "ok": wrong is None, "detail": wrong or ""}]
        return _json({"status": "not_ready" if wrong else "ready", "checks": checks}, 503 if wrong else 200)

    async def metrics(self, _request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest  # noqa: PLC0415
        from starlette.responses import Response  # noqa: PLC0415  extra server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(AgentCollector(self._agent))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _read(self, request: Request, kind: type[M]) -> M:
        limit = self._agent.settings.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise BodyTooLarge(f"the body has more than {limit} bytes: split the call")
        except TimeoutError:
            fault = FieldError("", "too_slow", f"did not arrive within {_BODY_SECONDS:g} s")
            raise InvalidInput("the body is incomplete", [fault]) from None
        return decode_request(bytes(body), kind)


def create_app(agent: Agent) -> FastAPI:
    """Return the application of an agent; needs the extra `server`."""
    from fastapi import FastAPI  # noqa: PLC0415  extra server
    from starlette.exceptions import HTTPException  # noqa: PLC0415

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        await agent.start()
        try:
            yield
        finally:
            await agent.stop()

    app = FastAPI(title="caketin agent", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    calls = Calls(agent)
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/sessions", calls.open_session),
        ("DELETE", "/v1/sessions/{session_id}", calls.end_session),
        ("POST", "/v1/sessions/{session_id}/match", calls.match),
        ("POST", "/v1/sessions/{session_id}/slots", calls.slots),
        ("POST", "/v1/sessions/{session_id}/publish", calls.publish),
        ("POST", "/v1/sessions/{session_id}/transfers", calls.transfer),
        ("GET", "/v1/transfers/{transfer_id}", calls.transfer_state),
        ("DELETE", "/v1/transfers/{transfer_id}", calls.cancel),
        ("DELETE", "/v1/locks/{token}", calls.unlock),
        ("GET", "/v1/status", calls.status),
        ("GET", "/healthz", calls.healthz),
        ("GET", "/readyz", calls.readyz),
        ("GET", "/metrics", calls.metrics),
    ]
    for method, path, handler in routes:
        app.add_route(path, handler, methods=[method])

    @app.exception_handler(CaketinError)
    async def domain(_request: Request, error: CaketinError) -> Response:
        return _problem(error)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:  # noqa: PLR2004
            return _problem(MethodNotAllowed(f"{request.method} is not a method of this call"))
        return _problem(NotFound("there is no such call; docs/agent.md lists all"))

    app.add_middleware(Gate, allowed=agent.settings.allowed_uids | {os.geteuid()})
    return app


class Gate:
    """ASGI middleware: turns other users away, gives every answer an id, and no answer a traceback."""

    def __init__(self, app: Any, allowed: frozenset[int]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        begun = False

        async def send_with_id(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        refused = self._refusal(scope)
        if refused is not None:
            await _problem(refused)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("call %s %s failed (request %s)", scope["method"], scope["path"], request_id)
            if begun:
                raise
            await _problem(Internal("an error of the agent; its log says more"))(scope, receive, send_with_id)

    def _refusal(self, scope: Any) -> CaketinError | None:
        peer: Peer = scope["state"][PEER]
        if peer.uid is None:
            if scope["path"] in OPEN_OVER_TCP and scope["method"] == "GET":
                return None
            return Forbidden("over TCP the agent tells its state only: use its socket")
        if peer.uid not in self._allowed:
            return Forbidden("the socket belongs to another user")
        return None


def _peer(request: Request) -> Peer:
    found: Peer = request.scope["state"][PEER]
    return found


def _request_id(scope: Any) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(given):
                return str(given)
    return secrets.token_hex(8)


def _answer(message: Message | None, status: int = 200) -> Response:
    from starlette.responses import Response  # noqa: PLC0415  extra server

    body = b"" if message is None else encode(message, "json")
    return Response(body, status, media_type=None if message is None else MEDIA_TYPES["json"])


def _json(value: object, status: int = 200) -> Response:
    from starlette.responses import Response  # noqa: PLC0415  extra server

    return Response(msgspec.json.encode(value), status, media_type=MEDIA_TYPES["json"])


def _problem(error: CaketinError) -> Response:
    from starlette.responses import Response  # noqa: PLC0415  extra server

    told = problem(error)
    return Response(told.body, told.status, told.headers, media_type=PROBLEM_MEDIA_TYPE)
