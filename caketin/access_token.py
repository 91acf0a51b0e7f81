"""The token that a command shows to a control plane: `CAKETIN_TOKEN`, or a file with nothing else in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from api.tokens import TOKEN_FORM
from metadata.errors import FieldError, InvalidInput

VARIABLE: Final = "CAKETIN_TOKEN"
_MOST_BYTES: Final = 4096

TokenFileOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help=f"file that holds the access token; none: the variable {VARIABLE}, if it is set",
        dir_okay=False,
    ),
]
"""A file and not the token itself: a command line is there for all users of the machine to read."""


def access_token(file: Path | None) -> str | None:
    """Return the token to show, or None where there is none.

    Raises:
        InvalidInput: what is given is no token; the text does not repeat it.
    """
    if file is None:
        text, where = os.environ.get(VARIABLE, ""), VARIABLE
        if not text:
            return None
    else:
        text, where = _read(file), str(file)
    token = text.strip()
    if TOKEN_FORM.fullmatch(token):
        return token
    hint = ": it is a server's token file, which holds digests only" if "[[token]]" in text else ""
    detail = f"{where} holds no access token (ct_ and 43 characters){hint}"
    raise InvalidInput(detail, [FieldError("token", "invalid", "is no access token")])


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}") from None
