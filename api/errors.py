"""The one place where errors of the domain become HTTP problems (RFC 9457)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.logs import get_logger
from api.schemas.bodies import CODES
from api.schemas.problems import KINDS, PROBLEM_MEDIA_TYPE, Problem
from metadata.errors import CaketinError, FieldError, InvalidInput, RedisUnavailable

log = get_logger(__name__)


class BodyTooLarge(CaketinError):
    """The body has more bytes than the server takes."""

    code = "body_too_large"


class NotFound(CaketinError):
    """There is no such call."""

    code = "not_found"


class MethodNotAllowed(CaketinError):
    """The call exists with another method."""

    code = "method_not_allowed"


@dataclass
class Refused(CaketinError):
    """A call that is turned away before anything is done; `headers` go with the answer."""

    headers: dict[str, str] = field(default_factory=dict)


class Internal(CaketinError):
    """A fault of the server's own code; its log says more."""

    code = "internal"


def problem_response(
    error: CaketinError, request_id: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Return the answer that tells `error`; one that can be tried again says when (`Retry-After`)."""
    kind = KINDS[error.code]
    problem = Problem.of(error, request_id)
    body = problem.model_copy(update={"detail": told(error)}).model_dump_json()
    sent = dict(headers or {})
    if isinstance(error, Refused):
        sent |= error.headers
    if isinstance(error, RedisUnavailable):
        sent["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    return Response(body, kind.status, sent, media_type=PROBLEM_MEDIA_TYPE)


def told(error: CaketinError) -> str:
    """Return what a caller is told of an error: of Redis neither its address nor what its driver said."""
    if isinstance(error, RedisUnavailable):
        return error.detail.partition(" (at ")[0].partition(" [")[0]
    return error.detail


def install(app: FastAPI) -> None:
    """Have `app` answer errors as problems."""

    @app.exception_handler(CaketinError)
    async def domain(request: Request, error: CaketinError) -> Response:
        if isinstance(error, RedisUnavailable):
            log.warning("redis unavailable", reason=error.reason, detail=error.detail)
        return problem_response(error, _request_id(request))

    @app.exception_handler(RequestValidationError)
    async def parameters(request: Request, error: RequestValidationError) -> Response:
        faults = [
            FieldError(
                ".".join(str(step) for step in e["loc"][1:]), CODES.get(e["type"], "wrong_type"), e["msg"]
            )
            for e in error.errors()
        ]
        return problem_response(InvalidInput("the parameters cannot be used", faults), _request_id(request))

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        request_id = _request_id(request)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            refused: CaketinError = MethodNotAllowed(f"{request.method} is not a method of this call")
            return problem_response(refused, request_id, dict(error.headers or {}))
        return problem_response(NotFound("there is no such call; /docs lists all"), request_id)


def _request_id(request: Request) -> str | None:
    found = request.scope.get("state", {}).get("request_id")
    return found if isinstance(found, str) else None
