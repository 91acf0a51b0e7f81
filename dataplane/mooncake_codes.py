"""What Mooncake's return codes mean: its negative integers as `StoreCode`."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.object_store import StoreCode

INVALID_PARAMS: Final = -600
NOT_FOUND: Final = -704
TRANSFER_FAIL: Final = -800

_CODES: Final[dict[int, StoreCode]] = {
    -101: StoreCode.TRANSFER_FAILED,  # the segment of the object is not mounted any more
    -103: StoreCode.UNAVAILABLE,  # the master has forgotten this client, after a restart of its own
    -200: StoreCode.NO_SPACE,
    -500: StoreCode.TRANSFER_FAILED,
    INVALID_PARAMS: StoreCode.INVALID,
    -700: StoreCode.TRANSFER_FAILED,
    -701: StoreCode.TRANSFER_FAILED,
    -702: StoreCode.MISSING,
    -703: StoreCode.MISSING,  # another writer has not finished it
    NOT_FOUND: StoreCode.MISSING,
    -705: StoreCode.OK,  # a put on a key that exists
    -707: StoreCode.LEASE_LOST,
    -710: StoreCode.MISSING,
    -712: StoreCode.MISSING,  # the replica's node is gone and the master knows
    TRANSFER_FAIL: StoreCode.TRANSFER_FAILED,
    -900: StoreCode.UNAVAILABLE,
}
_AWAY: Final = range(-1099, -899)
"""The master cannot be reached, or is not the one that serves (high availability)."""


def store_code(raw: int) -> StoreCode:
    """Return what one answer means; counts of bytes are `OK`, what nobody knows is `INVALID`."""
    if raw >= 0:
        return StoreCode.OK
    return _CODES.get(raw, StoreCode.UNAVAILABLE if raw in _AWAY else StoreCode.INVALID)


def store_codes(raw: list[int]) -> NDArray[np.int8]:
    """Return what each answer means, int8."""
    codes = np.zeros(len(raw), dtype=np.int8)
    for i in np.flatnonzero(raw):
        codes[i] = store_code(raw[i])
    return codes
