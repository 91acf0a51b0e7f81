"""Which pools share page slots, and what a pool's presence is made of.

A pool with `indices_from` has its source's slots: the two live and die together. So host memory has one *slot
space* for each pool without a source. A slot has one bit for each pool whose bytes it holds; a logical anchor
is there where all pools are that it is made of (P1).

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from metadata.errors import FieldError, InvalidInput, UnknownPool
from metadata.hit_policy import PageMask
from metadata.pools import (
    ANCHOR,
    HitPolicy,
    PoolSpec,
    RankPool,
    TrailingPages,
    anchor_pools,
    derived_from,
    validate_pool_set,
)

Pools: TypeAlias = Collection[str] | Mapping[str, PageMask] | None
"""Pools of a call: names, or a mask over the pages for each, or None for all pools."""


@dataclass(frozen=True, slots=True)
class HostPoolInfo:
    """A pool's place in host memory.

    Attributes:
        space: index of its slot space.
        bits: the bits that a slot must have for the pool to be there.
        policy: which pages of it a prefix needs.
    """

    space: int
    bits: np.uint64
    policy: HitPolicy


class Spaces:
    """The slot spaces of a set of pools.

    Attributes:
        names: space -> the pool that owns its slots; the anchor's is the first.
        members: space -> that pool and all that derive from it.
        capacities: space -> slots.
        pools: pool name -> its place, the anchor first.
        windows: space -> the last pages of a prefix that its pools need, None for all.
    """

    def __init__(self, specs: Sequence[PoolSpec], slots: Mapping[str, int]) -> None:
        """Lay the spaces out.

        Args:
            specs: the pools.
            slots: pages that fit, for each pool without `indices_from`; may name derived pools too.

        Raises:
            InvalidInput: the pools do not fit together, or a number of slots is missing, below one, for no
                pool, or another than the source's.
        """
        validate_pool_set([RankPool(spec, ()) for spec in specs])
        by_name = {s.name: s for s in sorted(specs, key=lambda s: s.name != ANCHOR)}
        self.names = [n for n, s in by_name.items() if s.indices_from is None]
        self.members = [(n, *derived_from(n, by_name)) for n in self.names]
        self._check_slots(slots)
        self.capacities = [slots[n] for n in self.names]
        self.pools: dict[str, HostPoolInfo] = {}
        bit_of = {name: np.uint64(1 << i) for i, name in enumerate(by_name)}
        for name, spec in by_name.items():
            parts = anchor_pools(by_name) if spec.logical else [name]
            space = next(i for i, names in enumerate(self.members) if name in names)
            bits = np.bitwise_or.reduce([bit_of[p] for p in parts])
            self.pools[name] = HostPoolInfo(space, bits, spec.hit_policy)
        self.windows = [self._window(names) for names in self.members]

    @property
    def longest_window(self) -> int:
        """Pages of the longest window of any pool; 0 where no pool has one."""
        policies = [info.policy for info in self.pools.values()]
        return max((p.window_pages for p in policies if isinstance(p, TrailingPages)), default=0)

    def space_of(self, pool: str) -> int:
        """Return the space that a pool's slots are of.

        Raises:
            UnknownPool: there is no such pool.
        """
        self.check([pool])
        return self.pools[pool].space

    def check(self, pools: Collection[str]) -> None:
        """Refuse names that are no pool.

        Raises:
            UnknownPool: names them.
        """
        unknown = [name for name in pools if name not in self.pools]
        if unknown:
            errors = [
                FieldError("pools", "unknown_pool", f"{n!r} is not a pool of the tier") for n in unknown
            ]
            raise UnknownPool(f"the host tier has no pool {unknown[0]!r}", errors)

    def chosen(self, pools: Pools) -> list[str]:
        """Return the pools that a call names, the anchor first and always among them.

        Raises:
            UnknownPool: a name is no pool.
        """
        if pools is None:
            return list(self.pools)
        self.check(pools)
        return [name for name in self.pools if name in pools or name == ANCHOR]

    def asked(self, pools: Pools, pages: int, field: str = "pools") -> dict[int, NDArray[np.uint64]]:
        """Return for each space the bits that a call wants of each page, uint64 (pages,).

        Raises:
            UnknownPool: a name is no pool.
            InvalidInput: a mask that is not bool (pages,).
        """
        self.check(pools if pools is not None else [])
        wanted: dict[int, NDArray[np.uint64]] = {}
        for name in self.pools if pools is None else pools:
            info = self.pools[name]
            mask = pools[name] if isinstance(pools, Mapping) else np.ones(pages, np.bool_)
            if mask.dtype != np.bool_ or mask.shape != (pages,):
                detail = f"is {mask.dtype} of shape {mask.shape}, must be bool of shape ({pages},)"
                error = FieldError(f"{field}.{name}", "bad_mask", detail)
                raise InvalidInput("a mask does not fit the call", [error])
            row = wanted.setdefault(info.space, np.zeros(pages, np.uint64))
            row[mask] |= info.bits
        return wanted

    def _window(self, members: Sequence[str]) -> int | None:
        policies = [self.pools[n].policy for n in members]
        windows = [p.window_pages for p in policies if isinstance(p, TrailingPages)]
        return max(windows) if len(windows) == len(policies) else None

    def _check_slots(self, slots: Mapping[str, int]) -> None:
        owner = {name: names[0] for names in self.members for name in names}
        errors = [
            FieldError(f"slots.{n}", "missing", "the pool has page slots of its own")
            for n in self.names
            if n not in slots
        ]
        for name, count in slots.items():
            if name not in owner:
                errors.append(FieldError(f"slots.{name}", "unknown_pool", "is no pool of the tier"))
            elif count < 1:
                errors.append(FieldError(f"slots.{name}", "out_of_range", f"is {count}, must be at least 1"))
            elif count != slots.get(owner[name], count):
                detail = f"is {count}; {owner[name]!r}, whose slots it has, has {slots[owner[name]]}"
                errors.append(FieldError(f"slots.{name}", "mismatch", detail))
        if errors:
            raise InvalidInput("the slots do not fit the pools", errors)
