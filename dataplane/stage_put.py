"""Puts the objects of a stage and believes only what the store confirms (O3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dataplane.object_store import ObjectBuffers, ObjectStore, StoreCode, describe_failures
from dataplane.stage_batch import StageBatch

log = logging.getLogger(__name__)


def put_confirmed(
    store: ObjectStore, batch: StageBatch, note: Callable[[NDArray[np.int8]], None]
) -> NDArray[np.int8]:
    """Put a batch; an object of a wrong size under one of its keys is removed and put again.

    Args:
        store: where to.
        batch: the objects; at least one.
        note: told a `StoreCode` per object, as often as something became known: what is confirmed is told
            before anything else is tried that may fail.

    Returns:
        The last that `note` was told, int8 (objects,).
    """
    codes = _put(store, batch.keys, batch.buffers, batch.groups)
    note(codes)
    wrong = np.flatnonzero(codes == StoreCode.SIZE_MISMATCH)
    if wrong.size:
        # Somebody's object of another size sits under our key: it is worth nothing to anybody.
        log.warning("removing objects of a wrong size: %s", describe_failures(batch.keys, codes))
        bad = [batch.keys[i] for i in wrong.tolist()]
        store.remove(bad)
        codes[wrong] = _put(store, bad, batch.buffers[wrong], [batch.groups[i] for i in wrong.tolist()])
        note(codes)
    if codes.any():
        log.warning("not everything was stored: %s", describe_failures(batch.keys, codes))
    return codes


def _put(
    store: ObjectStore, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str]
) -> NDArray[np.int8]:
    codes = store.put(keys, buffers, groups)
    return np.where(codes == StoreCode.OK, store.confirm(keys, buffers.sizes), codes)
