"""Lists in pieces: `limit` and `cursor` in, one piece and `next_cursor` out."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Final

from fastapi import Query

from metadata.codec import ENGINE_ID
from metadata.errors import FieldError, InvalidInput

MAX_LIMIT: Final = 1000
DEFAULT_LIMIT: Final = 100
_NAME: Final = re.compile(ENGINE_ID)

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="most entries of the answer")]
Cursor = Annotated[
    str | None, Query(max_length=256, description="`next_cursor` of the answer before; none starts anew")
]


def write_cursor(name: str | None) -> str | None:
    """Return the cursor that goes on after `name`; None is the end.

    A name that comes or goes between two calls shifts nothing: the cursor is the last name given.
    """
    return None if name is None else base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def read_cursor(cursor: str | None) -> str | None:
    """Return the name that a cursor goes on after.

    Raises:
        InvalidInput: nobody here made that cursor.
    """
    if cursor is None:
        return None
    try:
        name = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except (binascii.Error, ValueError):
        name = ""
    if not _NAME.fullmatch(name) or write_cursor(name) != cursor:
        detail = "is no cursor of this list: give next_cursor as it was answered, or nothing"
        raise InvalidInput("the parameters cannot be used", [FieldError("cursor", "bad_cursor", detail)])
    return name
