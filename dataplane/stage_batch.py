"""The objects of one stage of a transfer, over several pools, as one batch for the store.

Pools of one stage may move in any order, so their objects share one call of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataplane.bound_pool import BoundPool
from dataplane.object_store import ObjectBuffers
from metadata import object_keys
from metadata.codec import PageHashes

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class PoolPages:
    """Pages of one pool in a batch.

    Attributes:
        pool: the pool.
        pages: indices into the batch's page hashes, int64 (n,).
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
        page_hashes: hashes of the pages that the members' indices mean.
        members: the pools' pages; each pool once.
    """

    namespace_id: str
    page_hashes: Sequence[bytes]
    members: tuple[PoolPages, ...]

    @property
    def objects(self) -> int:
        """Number of objects."""
        return sum(len(m.pages) * m.pool.objects_per_page for m in self.members)

    @cached_property
    def keys(self) -> list[str]:
        """One key an object."""
        return [key for m in self.members for key in m.pool.keys(self.namespace_id, self._hashes(m))]

    @cached_property
    def groups(self) -> list[str]:
        """The lease group of each object: one a page, the same in all its pools."""
        found: list[str] = []
        seen: tuple[NDArray[np.int64], list[str]] | None = None
        for m in self.members:
            if seen is None or not np.array_equal(seen[0], m.pages):
                seen = m.pages, object_keys.group_ids(self.namespace_id, self._hashes(m))
            pages, each = seen[1], m.pool.objects_per_page
            found += pages if each == 1 else [page for page in pages for _ in range(each)]
        return found

    @cached_property
    def buffers(self) -> ObjectBuffers:
        """Where the bytes of each object lie.

        Raises:
            InvalidInput: a slot that a pool does not have.
            ValueError: a member has no slots.
        """
        tables = []
        for m in self.members:
            if m.slots is None or len(m.slots) != len(m.pages):
                raise ValueError(f"pool {m.pool.name!r} needs a slot for each of its {len(m.pages)} pages")
            tables.append(m.pool.buffers(m.slots))
        return tables[0] if len(tables) == 1 else _joined(tables)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes that each object must have, int64."""
        return np.concatenate([np.tile(m.pool.object_sizes, len(m.pages)) for m in self.members])

    def make(self) -> None:
        """Make keys and buffers now; otherwise they are made when they are first asked for."""
        if self.members:
            _ = self.keys, self.buffers

    def by_shard(self, values: NDArray[T]) -> Iterator[tuple[PoolPages, NDArray[T]]]:
        """Yield for each member the values of its objects, (pages, owned shards, parts).

        Args:
            values: one an object, in the order of the keys.
        """
        start = 0
        for m in self.members:
            shape = (len(m.pages), len(m.pool.shards), m.pool.parts)
            stop = start + len(m.pages) * m.pool.objects_per_page
            yield m, values[start:stop].reshape(shape)
            start = stop

    def _hashes(self, member: PoolPages) -> PageHashes:
        return PageHashes.of(self.page_hashes).take(member.pages)


def _joined(tables: Sequence[ObjectBuffers]) -> ObjectBuffers:
    """Return the objects of several tables as one, fragments padded to the widest."""
    widest = max((t.addresses.shape[1] if t.fragmented else 1 for t in tables), default=1)
    addresses = [_widened(t.addresses, widest) for t in tables]
    lengths = [_widened(t.lengths, widest) for t in tables]
    return ObjectBuffers(np.concatenate(addresses), np.concatenate(lengths))


def _widened(table: NDArray[T], fragments: int) -> NDArray[T]:
    columns = table[:, None] if table.ndim == 1 else table
    if columns.shape[1] == fragments:
        return columns
    return np.pad(columns, ((0, 0), (0, fragments - columns.shape[1])))
