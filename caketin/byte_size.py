"""Sizes as an operator writes them: bytes, or 64Gi."""

from __future__ import annotations

import re
from typing import Final

from metadata.errors import FieldError, InvalidInput

_SIZE: Final = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti)?")
_UNITS: Final = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def byte_size(text: str, flag: str, least: int = 1) -> int:
    """Return the bytes that `text` means.

    Args:
        text: such as 1073741824 or 64Gi.
        flag: where it was given, for the error.
        least: fewer are refused.

    Raises:
        InvalidInput: it is no size, or too small.
    """
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < least:
        detail = f"must be a size such as 64Gi, of {least >> 20}Mi or more, not {text!r}"
        raise InvalidInput("no such size", [FieldError(flag, "invalid", detail)])
    return size
