"""A pool of this rank, tied to its memory: which objects a page is, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataplane.host_fragments import HostPart, covered_regions, memory_errors
from dataplane.host_pool import Buffers, HostPool
from dataplane.object_store import ObjectBuffers
from metadata import object_keys
from metadata.errors import FieldError, InvalidInput
from metadata.pools import PoolSpec, RankPool

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class BoundPool:
    """A pool with its host memory.

    Attributes:
        pool: the pool as this rank registers it.
        hosts: one host pool an owned shard, in the order of `pool.owned_shards`; none for a logical pool. All
            have the same number of slots: a page slot names the same slot in each.
    """

    pool: RankPool
    hosts: tuple[HostPool, ...]

    def __post_init__(self) -> None:
        errors = self._count_errors()
        for i, host in enumerate(self.hosts):
            errors += [e.under(f"hosts[{i}]") for e in _layout_errors(self.pool.spec, host)]
        if not errors:
            errors = self._shared_memory_errors()
        if errors:
            raise InvalidInput(f"pool {self.name!r} is not bound", errors)

    def _count_errors(self) -> list[FieldError]:
        expected = 0 if self.pool.spec.logical else len(self.pool.owned_shards)
        slots = sorted({host.slots for host in self.hosts})
        if len(self.hosts) == expected and len(slots) <= 1:
            return []
        detail = (
            f"has {len(self.hosts)} host pools of {slots} slots, it needs one for each of its {expected} "
            "shards, all of one size"
        )
        return [FieldError("hosts", "mismatch", detail)]

    def _shared_memory_errors(self) -> list[FieldError]:
        """Return where two shards have bytes in common: one would be stored as the other."""
        if len(self.hosts) <= 1:
            return []
        parts = [
            HostPart(f"{shard}.{part.part}", part.fragments)
            for shard, host in zip(self.shards, self.hosts, strict=True)
            for part in host.parts
        ]
        if not memory_errors(parts, self.slots, covered_regions(parts, self.slots)):
            return []
        return [FieldError("hosts", "overlap", f"shards {list(self.shards)} share bytes of memory")]

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.pool.spec.name

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that this rank holds, ascending."""
        return self.pool.owned_shards

    @property
    def parts(self) -> int:
        """Objects of one shard of one page."""
        return len(self.pool.spec.parts)

    @property
    def objects_per_page(self) -> int:
        """Objects that this rank holds of one page."""
        return len(self.shards) * self.parts

    @property
    def bytes_per_page(self) -> int:
        """Bytes that this rank holds of one page."""
        return len(self.shards) * self.pool.spec.bytes_per_page

    @property
    def slots(self) -> int:
        """Pages that its memory holds; 0 where this rank has no bytes of the pool."""
        return self.hosts[0].slots if self.hosts else 0

    @property
    def object_sizes(self) -> NDArray[np.int64]:
        """Bytes of each object of a page, int64 (objects_per_page,), in the order of the keys."""
        sizes = [p.bytes for p in self.pool.spec.parts] * len(self.pool.owned_shards)
        return np.array(sizes, dtype=np.int64)

    def keys(self, namespace_id: str, page_hashes: Sequence[bytes]) -> list[str]:
        """Return the keys of pages, page by page: shards ascending, within a shard parts in order."""
        suffixes = object_keys.suffixes(self.pool.spec, self.pool.owned_shards)
        return object_keys.flat_object_keys(namespace_id, page_hashes, suffixes)

    def buffers(self, slots: NDArray[np.int64]) -> ObjectBuffers:
        """Return where the objects of the pages in `slots` lie, in the order of `keys`.

        Raises:
            InvalidInput: a slot that the pool does not have.
        """
        tables = [_objects(host.buffers(slots)) for host in self.hosts]
        fragments = max(a.shape[2] for a, _ in tables)
        addresses = np.concatenate([_padded(a, fragments) for a, _ in tables], axis=1)
        lengths = np.concatenate([_padded(n, fragments) for _, n in tables], axis=1)
        return ObjectBuffers(addresses.reshape(-1, fragments), lengths.reshape(-1, fragments))


def _layout_errors(spec: PoolSpec, host: HostPool) -> list[FieldError]:
    """Return how the memory differs from what the keys will say of it: bytes of one pool under another's."""
    said = [(p.part, p.bytes) for p in spec.parts]
    found = [(p.part, p.bytes) for p in host.parts]
    errors = []
    if host.name != spec.name:
        errors.append(FieldError("name", "mismatch", f"is {host.name!r}, the pool is {spec.name!r}"))
    if said != found:
        errors.append(FieldError("parts", "mismatch", f"are {found}, the pool has {said}"))
    if host.object_layout != spec.object_layout:
        detail = f"is {host.object_layout!r}, the pool is {spec.object_layout!r}"
        errors.append(FieldError("object_layout", "mismatch", detail))
    return errors


def _objects(table: Buffers) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return addresses and lengths as (pages, parts, fragments), padded with zeros."""
    parts = len(table.part_starts) - 1
    counts = np.diff(np.array(table.part_starts))
    widest = int(counts.max())
    pages = table.addresses.shape[0]
    if bool((counts == widest).all()):
        shape = (pages, parts, widest)
        return table.addresses.reshape(shape), np.ascontiguousarray(table.lengths).reshape(shape)
    addresses = np.zeros((pages, parts, widest), np.uint64)
    lengths = np.zeros((pages, parts, widest), np.int64)
    for i, count in enumerate(counts.tolist()):
        addresses[:, i, :count], lengths[:, i, :count] = table.of_part(i)
    return addresses, lengths


def _padded(table: NDArray[T], fragments: int) -> NDArray[T]:
    missing = fragments - table.shape[2]
    return np.pad(table, ((0, 0), (0, 0), (0, missing))) if missing else table
