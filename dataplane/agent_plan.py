"""What a prefetch has to read: the promise of L3 beside what is resident in host memory.

Pages that are resident are not read again. What is read starts at `start`: behind the pages that every pool
has which needs all of them; earlier, where a window at the promised length is not resident, since a window is
read with its pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from dataplane.host_answers import PageSlots
from dataplane.messages import control
from dataplane.messages.agent import TransferRequest
from dataplane.transfer import NO_SLOT
from metadata.errors import FieldError, InvalidInput, UnknownPool
from metadata.pools import ANCHOR, AllPages, BlockGroups, HitPolicy, PoolSpec, TrailingPages, anchor_pools

Policies: TypeAlias = Mapping[str, HitPolicy]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read.

    Attributes:
        start: first page of the call that is read.
        stop: behind the last one; the promised length.
        masks: pool -> pages of `start` to `stop` that need a slot, bool.
        promise: of exactly these pages.
    """

    start: int
    stop: int
    masks: dict[str, NDArray[np.bool_]]
    promise: control.LookupResult


def call_policies(specs: Mapping[str, PoolSpec], request: TransferRequest) -> dict[str, HitPolicy]:
    """Return the pools that a transfer moves, the anchor's always among them, and which pages each needs.

    Raises:
        UnknownPool: the session has no such pool.
        InvalidInput: a window larger than the registered one, or of a pool that has none.
    """
    asked = request.pools
    if asked is None:
        return {name: spec.hit_policy for name, spec in specs.items()}
    unknown = [name for name in asked if name not in specs]
    if unknown:
        faults = [FieldError(f"pools.{n}", "unknown_pool", "is not a pool of the session") for n in unknown]
        raise UnknownPool(f"the session has no pool {unknown[0]!r}", faults)
    anchors = {ANCHOR, *anchor_pools(dict(specs))}
    policies = {n: s.hit_policy for n, s in specs.items() if n in asked or n in anchors}
    errors = []
    for name, query in asked.items():
        registered = policies[name]
        window = query.window_pages
        if window is None:
            continue
        field = f"pools.{name}.window_pages"
        if not isinstance(registered, TrailingPages):
            errors.append(FieldError(field, "no_window", "the pool has no window"))
        elif not 1 <= window <= registered.window_pages:
            detail = f"is {window}, must be 1 to {registered.window_pages}, the registered window"
            errors.append(FieldError(field, "out_of_range", detail))
        else:
            policies[name] = TrailingPages(window)
    if errors:
        raise InvalidInput("the windows do not fit the session's pools", errors)
    return policies


def plan_read(
    promise: control.LookupResult,
    resident: PageSlots,
    policies: Policies,
    *,
    length: int,
    spare: Mapping[str, int],
) -> ReadPlan | None:
    """Return what to read so that `length` pages are resident; None where nothing is missing.

    Args:
        promise: the lookup's answer for the pages of the call.
        resident: slots of the call's pages in host memory.
        policies: of the pools of the call.
        length: one of the promised lengths.
        spare: pool -> slots that may be used for windows of shorter lengths, for when the longest cannot be
            read.
    """
    start = min([length, *(_run(resident[n]) for n, p in policies.items() if isinstance(p, AllPages))])
    windows = {n: p.window_pages for n, p in policies.items() if isinstance(p, TrailingPages)}
    for name, window in windows.items():
        first = max(0, length - window)
        if (resident[name][first:start] == NO_SLOT).any():
            start = min(start, first)
    if start == length:
        return None
    pages = length - start
    masks = {}
    for name, policy in policies.items():
        mask = np.ones(pages, np.bool_)
        if isinstance(policy, TrailingPages):
            mask[: max(0, pages - policy.window_pages - spare.get(name, 0))] = False
        elif isinstance(policy, BlockGroups):
            mask[max(0, promise.pools.get(name, 0) - start) :] = False
        masks[name] = mask
    return ReadPlan(start, length, masks, part_of(promise, start, length))


def part_of(promise: control.LookupResult, start: int, stop: int) -> control.LookupResult:
    """Return what a promise says of the pages from `start` to before `stop`, a promised length."""
    runs = [
        (max(1, first - start), min(last, stop) - start)
        for first, last in promise.restorable
        if last > start and first <= stop
    ]
    return msgspec.structs.replace(
        promise,
        queried_pages=stop - start,
        hit_pages=stop - start,
        restorable=runs,
        pools={n: min(stop, max(start, count)) - start for n, count in promise.pools.items()},
        generation=promise.generation[start:stop],
        miss=None,
    )


def shorter_length(promise: control.LookupResult, below: int) -> int:
    """Return the longest promised length below `below`, 0 where there is none."""
    return max((min(last, below - 1) for first, last in promise.restorable if first < below), default=0)


def listed_slots(slots: PageSlots, policies: Policies, length: int) -> dict[str, list[int]]:
    """Return the slots of a prefix as the calls write them.

    All pages of a pool that needs all; the last pages, as many as its window, of a pool with a window; the
    first pages, as far as they are there, of a pool that gates nothing.
    """
    listed = {}
    for name, row in slots.items():
        inside = row[:length]
        match policies[name]:
            case TrailingPages(window):
                inside = inside[max(0, length - window) :]
            case BlockGroups():
                inside = inside[: _run(inside)]
            case AllPages():
                pass
        listed[name] = inside.tolist()
    return listed


def size_of(specs: Mapping[str, PoolSpec], policies: Policies, pages: int) -> int:
    """Return the most bytes that a prefetch of so many pages moves."""
    return sum(
        specs[n].bytes_per_page * (min(pages, p.window_pages) if isinstance(p, TrailingPages) else pages)
        for n, p in policies.items()
    )


def parents(page_hashes: Sequence[bytes], start: int, parent: bytes | None) -> bytes | None:
    """Return the hash of the page before page `start` of a call."""
    return page_hashes[start - 1] if start else parent


def _run(row: NDArray[np.int64]) -> int:
    """Return how many pages from the first on have a slot."""
    gaps = np.flatnonzero(row == NO_SLOT)
    return int(gaps[0]) if gaps.size else row.size
