"""Puts the objects of a stage and believes only what the store confirms (O3).

The store is asked before and after. Before: what is there, and of the right size, is not moved again; what is
of another size is removed by its key, since a put keeps it and says "stored". After: one existence query over
all objects, since a put that met another writer may never come to exist. Sizes are asked of objects that were
there before only: asked of all, they cost Mooncake twenty times the existence query. What another writer
of the same key leaves in between has the size that the pool id in the key stands for, or the read finds out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.object_store import ObjectStore, StoreCode, describe_failures
from dataplane.stage_batch import StageBatch

log = logging.getLogger(__name__)

NO_TURN: Final = nullcontext()


def put_confirmed(
    store: ObjectStore,
    batch: StageBatch,
    note: Callable[[NDArray[np.int8]], None],
    turn: AbstractContextManager[object] = NO_TURN,
) -> NDArray[np.int8]:
    """Put a batch; an object of a wrong size under one of its keys is removed and put again.

    Args:
        store: where to.
        batch: the objects; at least one.
        note: told a `StoreCode` per object, as often as something became known: what is confirmed is told
            before anything else is tried that may fail.
        turn: entered while the bytes move.

    Returns:
        The last that `note` was told, int8 (objects,).
    """
    codes = _there_already(store, batch)
    if (codes == StoreCode.OK).any():
        note(codes)
    absent = np.flatnonzero(codes != StoreCode.OK)
    if absent.size:
        all_of_it = absent.size == len(batch.keys)
        keys = batch.keys if all_of_it else [batch.keys[i] for i in absent.tolist()]
        groups = batch.groups if all_of_it else [batch.groups[i] for i in absent.tolist()]
        buffers = batch.buffers if all_of_it else batch.buffers[absent]
        with turn:
            codes[absent] = store.put(keys, buffers, groups)
    held = np.flatnonzero(codes == StoreCode.OK)
    if held.size:
        there = store.exists(batch.keys if held.size == len(batch.keys) else [batch.keys[i] for i in held])
        codes[held[~there]] = StoreCode.UNCONFIRMED
    note(codes)
    if codes.any():
        log.warning("not everything was stored: %s", describe_failures(batch.keys, codes))
    return codes


def _there_already(store: ObjectStore, batch: StageBatch) -> NDArray[np.int8]:
    """Return `OK` for objects that are there and of the right size, else `UNCONFIRMED`, int8 (objects,)."""
    codes = np.full(len(batch.keys), StoreCode.UNCONFIRMED, np.int8)
    there = np.flatnonzero(store.exists(batch.keys))
    if there.size:
        keys = [batch.keys[i] for i in there.tolist()]
        codes[there] = store.confirm(keys, batch.buffers.sizes[there])
    wrong = np.flatnonzero(codes == StoreCode.SIZE_MISMATCH)
    if wrong.size:
        # Somebody's object of another size sits under our key: it is worth nothing to anybody.
        log.warning("removing objects of a wrong size: %s", describe_failures(batch.keys, codes))
        store.remove([batch.keys[i] for i in wrong.tolist()])
        codes[wrong] = StoreCode.UNCONFIRMED
    return codes
