"""The memory of a set of pools: one file a pool, seen as page slots by the agent and by every engine.

A slot's part lies at `offset + slot * page_stride` of the pool's file. Where a rank holds several shards of a
pool, each has a run of its own in the file, and `parts` lists them shard by shard, in the order of the keys.
A page is one run of bytes, in the order of its object, whatever the pool's layout is called.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Final

from dataplane import host_pool
from dataplane.agent_files import PoolFile, SharedFolder
from dataplane.bound_pool import BoundPool
from dataplane.host_memory import PART_ALIGNMENT
from dataplane.host_pool import HostPool, LayerBuffers, PageBuffer, Region
from dataplane.messages.agent import MappedPart, MappedPool
from metadata.pools import PoolSpec, RankPool, derived_from

_PAGE: Final = mmap.PAGESIZE


class PoolShape:
    """How one pool lies in its file.

    Attributes:
        pool: the pool.
        slots: pages that fit.
        stride: bytes from slot to slot; 0 where the rank has no bytes of the pool.
        run: bytes of one shard's slots.
        length: bytes of the file.
    """

    def __init__(self, pool: RankPool, slots: int) -> None:
        self.pool = pool
        self.slots = slots
        page = sum(_up(p.bytes, PART_ALIGNMENT) for p in pool.spec.parts)
        self.stride = _up(page, _PAGE if page >= _PAGE else PART_ALIGNMENT)
        self.run = _up(self.stride * slots, _PAGE)
        self.length = self.run * len(pool.owned_shards) if pool.spec.parts else 0

    @property
    def parts(self) -> list[MappedPart]:
        """Where each part of slot 0 lies in the file."""
        found = []
        for i in range(len(self.pool.owned_shards)):
            at = i * self.run
            for part in self.pool.spec.parts:
                found.append(MappedPart(part=part.part, offset=at, bytes=part.bytes))
                at += _up(part.bytes, PART_ALIGNMENT)
        return found

    def mapped(self, path: str | None) -> MappedPool:
        """Return what an engine is told."""
        there = self.length > 0
        return MappedPool(
            path=path if there else None,
            length=self.length,
            slots=self.slots,
            page_stride=self.stride if there else 0,
            parts=self.parts if there else [],
        )

    def bound(self, address: int) -> BoundPool:
        """Return the pool with its memory at an address."""
        if not self.length:
            return BoundPool(self.pool, ())
        each = len(self.pool.spec.parts)
        parts = self.parts
        hosts = [
            self._host(address, i * self.run, parts[i * each : (i + 1) * each])
            for i in range(len(self.pool.owned_shards))
        ]
        return BoundPool(self.pool, tuple(hosts))

    def _host(self, address: int, start: int, parts: Sequence[MappedPart]) -> HostPool:
        spec, regions = self.pool.spec, [Region(address + start, self.run)]
        if spec.object_layout == "layer_first":
            layers = [LayerBuffers(p.part, (address + p.offset,), p.bytes, self.stride) for p in parts]
            return host_pool.layer_first(spec, self.slots, layers, regions)
        buffers = [PageBuffer(p.part, address + p.offset, p.bytes, self.stride) for p in parts]
        direct = spec.object_layout == "page_first_direct"
        make = host_pool.page_first_direct if direct else host_pool.page_first
        return make(spec, self.slots, buffers, regions)


class PoolMemory:
    """The memory of all pools of one tier.

    Attributes:
        shapes: pool name -> how it lies in its file.
        bound: the pools with their memory.
    """

    def __init__(self, folder: SharedFolder, tier: int, shapes: Mapping[str, PoolShape]) -> None:
        """Allocate; nothing is left behind where that fails.

        Raises:
            OutOfHostMemory: there is no room.
        """
        self.shapes = dict(shapes)
        self._folder = folder
        self._tier = tier
        self._files: dict[str, PoolFile] = {}
        self.bound: list[BoundPool] = []
        try:
            for name, shape in self.shapes.items():
                if shape.length:
                    self._files[name] = folder.pool_file(tier, name, shape.length)
                file = self._files.get(name)
                self.bound.append(shape.bound(file.address if file else 0))
        except BaseException:
            self.close()
            raise

    @property
    def length(self) -> int:
        """Bytes of all files."""
        return sum(s.length for s in self.shapes.values())

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First and last-but-one address of each file."""
        return [(f.address, f.address + f.length) for f in self._files.values()]

    def link(self, session: str) -> dict[str, MappedPool]:
        """Give a session names for the files and return what it is told."""
        return {
            name: shape.mapped(
                str(self._folder.link(session, self._tier, name)) if name in self._files else None
            )
            for name, shape in self.shapes.items()
        }

    def close(self) -> None:
        """Give everything back; again: nothing happens."""
        self._folder.remove_tier(self._tier)
        for file in self._files.values():
            file.close()


def shapes_of(pools: Sequence[RankPool], capacities: Mapping[str, int]) -> dict[str, PoolShape]:
    """Return how pools lie in memory, by name.

    Args:
        pools: a valid set of pools.
        capacities: slots of each pool without `indices_from`.
    """
    specs: dict[str, PoolSpec] = {p.spec.name: p.spec for p in pools}
    slots = {
        name: capacities[owner]
        for owner, spec in specs.items()
        if spec.indices_from is None
        for name in (owner, *derived_from(owner, specs))
    }
    return {p.spec.name: PoolShape(p, slots[p.spec.name]) for p in pools}


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
