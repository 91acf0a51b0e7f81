"""The objects of one stage of a transfer, over several pools, as one batch for the store.

Pools of one stage may move in any order, so their objects share one call of the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataplane.bound_pool import BoundPool
from dataplane.object_store import ObjectBuffers, StoreCode
from metadata.object_keys import group_id

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class PoolPages:
    """Pages of one pool in a batch.

    Attributes:
        pool: the pool.
        pages: indices into the call's pages, int64 (n,), at least one.
        slots: their page slots, int64 (n,); None where only keys matter.
    """

    pool: BoundPool
    pages: NDArray[np.int64]
    slots: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class StageBatch:
    """Objects of the pages of some pools; pool after pool, page after page, in the order of the keys.

    Attributes:
        namespace_id: the namespace.
        page_hashes: hashes of the call's pages.
        members: the pools' pages.
    """

    namespace_id: str
    page_hashes: Sequence[bytes]
    members: tuple[PoolPages, ...]

    @cached_property
    def keys(self) -> list[str]:
        """One key an object."""
        return [key for m in self.members for key in m.pool.keys(self.namespace_id, self._hashes(m.pages))]

    @cached_property
    def groups(self) -> list[str]:
        """The lease group of each object: one a page."""
        found: list[str] = []
        for m in self.members:
            for page in self._hashes(m.pages):
                found += [group_id(self.namespace_id, page)] * m.pool.objects_per_page
        return found

    @cached_property
    def buffers(self) -> ObjectBuffers:
        """Where the bytes of each object lie."""
        tables = [m.pool.buffers(m.slots) for m in self.members if m.slots is not None]
        return tables[0] if len(tables) == 1 else _joined(tables)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes that each object must have, int64."""
        return np.concatenate([np.tile(m.pool.object_sizes, len(m.pages)) for m in self.members])

    def by_page(self, codes: NDArray[np.int8]) -> Mapping[str, NDArray[np.int8]]:
        """Return for each pool the worst `StoreCode` of each of its pages, int8, in the order of `pages`."""
        worst: dict[str, NDArray[np.int8]] = {}
        start = 0
        for m in self.members:
            stop = start + len(m.pages) * m.pool.objects_per_page
            worst[m.pool.name] = codes[start:stop].reshape(len(m.pages), -1).max(axis=1)
            start = stop
        return worst

    def whole(self, codes: NDArray[np.int8]) -> dict[str, NDArray[np.int64]]:
        """Return for each pool the pages whose every object is `OK`."""
        worst = self.by_page(codes)
        return {m.pool.name: m.pages[worst[m.pool.name] == StoreCode.OK] for m in self.members}

    def _hashes(self, pages: NDArray[np.int64]) -> list[bytes]:
        return [self.page_hashes[i] for i in pages.tolist()]


def _joined(tables: Sequence[ObjectBuffers]) -> ObjectBuffers:
    """Return the objects of several tables as one, fragments padded to the widest."""
    widest = max(t.addresses.shape[1] if t.fragmented else 1 for t in tables)
    addresses = [_widened(t.addresses, widest) for t in tables]
    lengths = [_widened(t.lengths, widest) for t in tables]
    return ObjectBuffers(np.concatenate(addresses), np.concatenate(lengths))


def _widened(table: NDArray[T], fragments: int) -> NDArray[T]:
    if fragments == 1:
        return table
    columns = table[:, None] if table.ndim == 1 else table
    return np.pad(columns, ((0, 0), (0, fragments - columns.shape[1])))
