"""Reading a request's body within its limits, and writing the answer in the caller's form."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response

from api.context import Context
from api.errors import BodyTooLarge
from api.schemas.bodies import decode_request, encode_response
from api.schemas.wire import Body
from metadata.errors import FieldError, InvalidInput

M = TypeVar("M", bound=Body)


async def read(request: Request, context: Context, model: type[M]) -> M:
    """Return the request that the body means.

    Raises:
        BodyTooLarge: it has more bytes than the server takes; the rest is not read.
        InvalidInput: it breaks a rule, or did not arrive in time.
    """
    limit = context.settings.max_body_bytes
    body = bytearray()
    try:
        async with asyncio.timeout(context.settings.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise BodyTooLarge(f"the body has more than {limit} bytes: split the call")
    except TimeoutError:
        detail = f"did not arrive within {context.settings.body_seconds} s"
        raise InvalidInput("the body is incomplete", [FieldError("", "too_slow", detail)]) from None
    return decode_request(bytes(body), request.headers.get("content-type"), model)


def answer(request: Request, model: Body, status: int = 200) -> Response:
    """Return `model` as JSON or msgpack, as the request asks."""
    body, media_type = encode_response(
        model, request.headers.get("accept"), request.headers.get("content-type")
    )
    return Response(body, status, media_type=media_type)
