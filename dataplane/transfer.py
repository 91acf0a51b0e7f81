"""What back up and prefetch share: the pools of a rank in their order, page slots, chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane.bound_pool import BoundPool
from metadata.codec import MAX_PAGES, PageHashes
from metadata.errors import FieldError, InvalidInput
from metadata.pools import HitPolicy, PoolSpec, validate_pool_set, write_stages

NO_SLOT: Final = -1
CHUNK_PAGES: Final = 1024
"""Pages that one call of the store reads: a call of 1,024 DeepSeek V4 pages is faster than two of 512."""

CHUNK_BYTES: Final = 1 << 30
"""Bytes that one call of the store reads of pools that need every page: a second of a 10 Gb/s link, since
nobody can tell what a call has read when its time is up."""

WRITE_CHUNK_PAGES: Final = 256
"""Pages of a back-up's chunk; fewer, since what one needs besides is done while another one moves."""

BoolArray: TypeAlias = NDArray[np.bool_]
PageArray: TypeAlias = NDArray[np.int64]
Slots: TypeAlias = Mapping[str, NDArray[np.int64]]
"""Pool name -> page slot of each page of the call, int64 (pages,); `NO_SLOT` where a page has none."""

Progress: TypeAlias = Callable[[str, int], None]
"""Told a pool's name and how many more of its pages were moved."""


class RankPools:
    """The pools of one rank, in the order in which they move.

    Attributes:
        namespace_id: of the rank's page hashes.
        bound: the pools that this rank has bytes of, by name. A pool whose shards are all on other ranks
            (another pipeline stage's) is not among them.
        stages: their names, stage by stage (O1).
        policies: their hit policies, in the order of the stages.
    """

    def __init__(self, namespace_id: str, pools: Sequence[BoundPool]) -> None:
        """Take the pools.

        Raises:
            InvalidInput: they do not fit together.
        """
        validate_pool_set([p.pool for p in pools])
        self.namespace_id = namespace_id
        self.bound = {p.name: p for p in pools if p.hosts}
        specs: dict[str, PoolSpec] = {p.name: p.pool.spec for p in pools}
        stages = ([n for n in stage if n in self.bound] for stage in write_stages(specs))
        self.stages = [stage for stage in stages if stage]
        self.policies: dict[str, HitPolicy] = {n: specs[n].hit_policy for s in self.stages for n in s}

    def checked_slots(self, page_hashes: PageHashes, slots: Slots) -> dict[str, PageArray]:
        """Return the slots as int64, after every rule that does not depend on the direction.

        Raises:
            InvalidInput: too many pages, a pool without bytes here, not one slot a page, a slot that is no
                slot of the pool, or one slot for two pages.
        """
        errors = []
        if len(page_hashes) > MAX_PAGES:
            detail = f"has {len(page_hashes)} pages, at most {MAX_PAGES} move in one call"
            errors.append(FieldError("page_hashes", "too_many", detail))
        checked: dict[str, PageArray] = {}
        for name, given in slots.items():
            if name not in self.bound:
                detail = f"is no pool of this rank with bytes; those are {sorted(self.bound)}"
                errors.append(FieldError(f"slots.{name}", "unknown_pool", detail))
                continue
            array = np.asarray(given)
            fault = _slots_fault(array, len(page_hashes), self.bound[name].slots)
            if fault is not None:
                errors.append(FieldError(f"slots.{name}{fault[0]}", fault[1], fault[2]))
                continue
            checked[name] = array.astype(np.int64, copy=False)
        if errors:
            raise InvalidInput("the slots do not fit the call", errors)
        return checked


def _slots_fault(slots: NDArray[Any], pages: int, bound: int) -> tuple[str, str, str] | None:
    """Return place, code and text of the first thing wrong with a pool's slots."""
    if slots.shape != (pages,):
        return "", "bad_shape", f"has shape {slots.shape}, the call has {pages} pages"
    if slots.dtype.kind not in "iu" and pages:
        return "", "not_integer", f"has type {slots.dtype}, give integers"
    outside = np.flatnonzero((slots < NO_SLOT) | (slots >= bound))
    if outside.size:
        at = int(outside[0])
        return f"[{at}]", "out_of_range", f"is {slots[at]}, must be 0 to {bound - 1}, or {NO_SLOT} for none"
    used = np.flatnonzero(slots != NO_SLOT)
    order = used[np.argsort(slots[used], kind="stable")]
    # Two pages in one slot: whichever moves second has the other's bytes under its own hash.
    twice = np.flatnonzero(slots[order][1:] == slots[order][:-1])
    if twice.size:
        first, second = int(order[twice[0]]), int(order[twice[0] + 1])
        return f"[{second}]", "duplicate", f"is {slots[second]}, which page {first} has already"
    return None


def chunks(pages: int, most: int | None = None) -> Iterator[slice]:
    """Yield slices of at most `most` pages (`CHUNK_PAGES`) that cover `pages` in order."""
    step = min(most or CHUNK_PAGES, CHUNK_PAGES)
    for start in range(0, pages, step):
        yield slice(start, min(start + step, pages))
