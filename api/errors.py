"""The one place where errors of the domain become HTTP problems (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.schemas.problems import KINDS, PROBLEM_MEDIA_TYPE, Problem
from metadata.errors import CaketinError, FieldError, InvalidInput


class BodyTooLarge(CaketinError):
    """The body has more bytes than the server takes."""

    code = "body_too_large"


class NotFound(CaketinError):
    """There is no such call."""

    code = "not_found"


class MethodNotAllowed(CaketinError):
    """The call exists with another method."""

    code = "method_not_allowed"


def problem_response(error: CaketinError, headers: dict[str, str] | None = None) -> Response:
    """Return the answer that tells `error`."""
    body = Problem.of(error).model_dump_json()
    return Response(body, KINDS[error.code].status, headers, media_type=PROBLEM_MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Have `app` answer errors as problems."""

    @app.exception_handler(CaketinError)
    async def domain(_: Request, error: CaketinError) -> Response:
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def parameters(_: Request, error: RequestValidationError) -> Response:
        faults = [
            FieldError(".".join(str(step) for step in e["loc"][1:]), e["type"], e["msg"])
            for e in error.errors()
        ]
        return problem_response(InvalidInput("the parameters cannot be used", faults))

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.method} is not a method of {request.url.path}"
            return problem_response(MethodNotAllowed(detail), dict(error.headers or {}))
        return problem_response(NotFound(f"there is no {request.url.path}; /docs lists the calls"))
