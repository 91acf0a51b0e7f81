"""The page hashes of a call to the host tier, as a checked list.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metadata.codec import PageHashes
from metadata.errors import FieldError, InvalidInput
from metadata.page_hash import HASH_BYTES


def chain_of(page_hashes: Sequence[bytes], parent: bytes | None, *, distinct: bool = True) -> list[bytes]:
    """Return the hashes of a call as a list.

    Args:
        page_hashes: pages of the call, in order.
        parent: the page before them, None where they begin the sequence.
        distinct: refuse a page that comes twice; a chain of hashes cannot have one.

    Raises:
        InvalidInput: names the first hash that is none or comes twice.
    """
    if isinstance(page_hashes, PageHashes):
        # A sixth of the time of slicing.
        hashes: list[bytes] = np.frombuffer(page_hashes.raw, f"V{HASH_BYTES}").tolist()
        lengths: set[int] = set()
    else:
        hashes = list(page_hashes)
        lengths = {*map(len, hashes)}
    if lengths - {HASH_BYTES} or (parent is not None and len(parent) != HASH_BYTES):
        at = next((i for i, h in enumerate(hashes) if len(h) != HASH_BYTES), None)
        field = "parent" if at is None else f"page_hashes[{at}]"
        raise _refused(field, "bad_hash", f"a page hash has {HASH_BYTES} bytes")
    if distinct:
        seen = set(hashes)
        if len(seen) != len(hashes) or parent in seen:
            raise _refused(_repeated(hashes, parent), "duplicate", "comes twice; a page follows other pages")
    return hashes


def _repeated(hashes: list[bytes], parent: bytes | None) -> str:
    first = {page_hash: i for i, page_hash in reversed(list(enumerate(hashes)))}
    at = next(i for i, page_hash in enumerate(hashes) if page_hash == parent or first[page_hash] != i)
    return f"page_hashes[{at}]"


def _refused(field: str, code: str, detail: str) -> InvalidInput:
    return InvalidInput("the pages are no chain of page hashes", [FieldError(field, code, detail)])
