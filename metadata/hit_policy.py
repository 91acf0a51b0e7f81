"""Which prefix lengths can be restored from the pages that are stored, and why the longest one ends.

A *length* n is restorable when every gating pool allows n:

- `all_pages`: the pool has the pages 0 to n-1 of the call;
- `trailing_pages(w)`: it has the w pages that end at n, or all of them when the sequence is shorter;
- `block_groups`: never gates, only reports.

The restorable lengths are a set with holes, not everything up to a minimum of per-pool maxima: with KV
stored to page 3 and a sliding window that is complete only at length 5, nothing is restorable (H1). So the
answer is runs of lengths. One function decides for the lookup, for what a prefetch may still restore after
its reads, and for "why did this miss" (H5); only the presence handed in differs.

*Presence* is one boolean array a pool over the pages of the call. A page is present when every shard of the
pool's variant is stored (H4). A logical anchor has no presence of its own: hand in the pools that derive from
it (P1, `anchor_presence`).

Pure: values in, values out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metadata.errors import FieldError, InvalidInput
from metadata.page_runs import page_runs
from metadata.pools import AllPages, BlockGroups, HitPolicy, TrailingPages

PageMask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the length `hit_pages + 1` is not restorable.

    Of the pools that fail at that length, the first in the order of the policies is named. Its page is the
    last one that is missing: for `all_pages` that is the page `hit_pages` itself, for `trailing_pages` the
    last missing page of the window that ends there.

    Attributes:
        page: index into the call's pages; 0 where the missing page lies before the call.
        pool: name of the pool.
        kind: `absent` when the missing page is the one that the length would add (index `hit_pages`),
            `window_incomplete` when it is an earlier one of the window, the pages before the call included.
    """

    page: int
    pool: str
    kind: Literal["absent", "window_incomplete"]


@dataclass(frozen=True, slots=True)
class Restorable:
    """The set of restorable lengths of one call. Lengths count pages of the call.

    Attributes:
        queried_pages: pages of the call.
        runs: restorable lengths as ascending inclusive runs; length 0 is left out.
        pools: the longest length that each pool alone allows, in the order of the policies; for
            `block_groups` the pages that its leading complete groups cover.
        unchecked_window_pages: pages before the call that the windows at `hit_pages` need and that nobody
            checked, for the pool with the most of them; 0 without a hit.
        stop: why the set ends at `hit_pages`; None exactly when all queried pages are restorable.
    """

    queried_pages: int
    runs: tuple[tuple[int, int], ...]
    pools: dict[str, int]
    unchecked_window_pages: int
    stop: Stop | None

    @property
    def hit_pages(self) -> int:
        """The longest restorable length, or 0."""
        return self.runs[-1][1] if self.runs else 0

    def largest_at_most(self, pages: int) -> int:
        """Return the longest restorable length that is not above `pages`, or 0.

        What a prefetch restores that was cut short after `pages` pages (O5).
        """
        at = self._runs_from(pages)
        return min(pages, self.runs[at - 1][1]) if at else 0

    def allows(self, length: int) -> bool:
        """Return whether `length` is in the set; 0 never is."""
        at = self._runs_from(length)
        return at > 0 and length <= self.runs[at - 1][1]

    def _runs_from(self, length: int) -> int:
        return bisect_right(self.runs, length, key=lambda run: run[0])


@dataclass(frozen=True, slots=True)
class _Windows:
    """A trailing pool's pages, those before the call first.

    What lies before `pages` is the start of the sequence or unchecked; both count as present (H2).
    """

    window: int
    pages: PageMask
    before: int

    def complete(self) -> PageMask:
        """Return, for each length 1, 2, ... of the call, whether the window that ends there has no hole."""
        holes_to = np.zeros(self.pages.size + 1, dtype=np.int32)
        np.cumsum(~self.pages, out=holes_to[1:])
        holes_to_window = np.zeros_like(holes_to)
        holes_to_window[self.window :] = holes_to[: -self.window]
        return np.equal(holes_to, holes_to_window)[self.before + 1 :]

    def last_missing(self, length: int) -> int | None:
        """Return the last missing page of the window that ends at `length`; negative: before the call."""
        end = self.before + length
        start = max(0, end - self.window)
        missing = np.flatnonzero(~self.pages[start:end])
        return start + int(missing[-1]) - self.before if missing.size else None

    def unchecked(self, length: int, first_page: int) -> int:
        """Return how many pages of the window that ends at `length` lie before the checked ones."""
        needed_before = min(self.window - length, first_page)
        return max(0, needed_before - self.before)


def restorable(
    presence: Mapping[str, PageMask],
    policies: Mapping[str, HitPolicy],
    *,
    first_page: int = 0,
    prefix_presence: Mapping[str, PageMask] | None = None,
) -> Restorable:
    """Return the exact set of restorable lengths (H1).

    Args:
        presence: for each pool a mask of shape (pages of the call,).
        policies: how each of these pools gates, in the order in which `Stop` should name them: anchor first.
        first_page: index of the call's first page within its sequence.
        prefix_presence: for any of the pools a mask over the pages right before `first_page`, the last entry
            being page `first_page - 1`. May be shorter than `first_page` or absent: what is not in it counts
            as present, on the caller's word, and is reported as `unchecked_window_pages`. Only
            `trailing_pages` pools look at it.

    Raises:
        InvalidInput: no pool; a pool without policy or the reverse; masks that are not boolean, not flat or
            of several lengths; a window or group below one page; a negative `first_page`; a prefix for a
            pool that is not asked for, or of more pages than lie before the call. `errors` names the pools.
    """
    prefix = prefix_presence or {}
    queried = _checked_pages(presence, policies)
    _check_prefix(prefix, policies, first_page)

    allowed = np.ones(queried + 1, dtype=np.bool_)  # by length
    allowed[0] = False
    alone: dict[str, int] = {}
    windows: dict[str, _Windows] = {}
    for name, policy in policies.items():
        leading = _first_absent(presence[name])
        if isinstance(policy, AllPages):
            allowed[leading + 1 :] = False
            alone[name] = leading
        elif isinstance(policy, TrailingPages):
            windows[name] = _windows(presence[name], policy.window_pages, prefix.get(name))
            complete = windows[name].complete()
            allowed[1:] &= complete
            alone[name] = _last_true(complete) + 1
        else:
            alone[name] = leading - leading % (policy.block * policy.group)

    hit = max(0, _last_true(allowed))
    unchecked = max((w.unchecked(hit, first_page) for w in windows.values()), default=0)
    return Restorable(
        queried_pages=queried,
        runs=tuple(page_runs(allowed)),
        pools=alone,
        unchecked_window_pages=unchecked if hit else 0,
        stop=_stop(hit, policies, alone, windows) if hit < queried else None,
    )


def anchor_presence(presence: Mapping[str, PageMask], anchor_pools: Iterable[str]) -> PageMask:
    """Return where the anchor is present: where all the pools that are its bytes are (P1).

    Args:
        presence: for each pool a mask of shape (pages,).
        anchor_pools: the anchor itself, or what derives from a logical one (`metadata.pools.anchor_pools`).

    Raises:
        InvalidInput: no anchor pool, one without presence, or masks that do not fit each other.
    """
    names = list(anchor_pools)
    errors = [] if names else [FieldError("anchor_pools", "empty", "names no pool")]
    errors += [
        FieldError(f"presence.{name}", "missing", "the anchor needs it")
        for name in names
        if name not in presence
    ]
    errors += _mask_errors({name: presence[name] for name in names if name in presence})
    if errors:
        raise InvalidInput("the anchor has no presence", errors)
    anchor = presence[names[0]].copy()
    for name in names[1:]:
        anchor &= presence[name]
    return anchor


def dead_end(
    presence_so_far: Mapping[str, PageMask], policies: Mapping[str, HitPolicy], *, queried_pages: int
) -> int | None:
    """Return the first page whose absence rules out every length above it, or None: read on.

    For a lookup that reads pages in chunks. When this gives a page, `restorable` over the pages read, filled
    up to `queried_pages` with False, has the true runs, `hit_pages` and `stop`. Its `pools` then hold what
    was seen so far: a trailing pool might allow a greater length among the pages that were not read.

    A hole of an `all_pages` pool rules out all that follows. A hole of a `trailing_pages(w)` pool does when
    it is among the last w of the queried pages: no window of the call gets past it. Pages before the call
    are not looked at; at worst the caller reads on.

    Args:
        presence_so_far: for each pool a mask over the leading pages of the call that were read.
        policies: how each of these pools gates.
        queried_pages: pages of the whole call.

    Raises:
        InvalidInput: as `restorable`.
    """
    read = _checked_pages(presence_so_far, policies)
    ends: list[int] = []
    for name, policy in policies.items():
        if isinstance(policy, BlockGroups):
            continue
        start = 0 if isinstance(policy, AllPages) else max(0, queried_pages - policy.window_pages)
        ends.append(start + _first_absent(presence_so_far[name][start:]))
    first = min(ends, default=read)
    return first if first < read else None


def _first_absent(pages: PageMask) -> int:
    return pages.size if pages.all() else int(pages.argmin())


def _last_true(mask: PageMask) -> int:
    at = np.flatnonzero(mask)
    return int(at[-1]) if at.size else -1


def _windows(pages: PageMask, window: int, prefix: PageMask | None) -> _Windows:
    if prefix is None:
        return _Windows(window, pages, 0)
    return _Windows(window, np.concatenate((prefix, pages)), prefix.size)


def _stop(
    hit: int, policies: Mapping[str, HitPolicy], alone: Mapping[str, int], windows: Mapping[str, _Windows]
) -> Stop:
    """Return what the first pool that fails at length `hit + 1` lacks; see `Stop`."""
    stops = (_pool_stop(hit, name, policy, alone, windows) for name, policy in policies.items())
    return next(stop for stop in stops if stop is not None)


def _pool_stop(
    hit: int, name: str, policy: HitPolicy, alone: Mapping[str, int], windows: Mapping[str, _Windows]
) -> Stop | None:
    match policy:
        case AllPages() if alone[name] == hit:
            return Stop(hit, name, "absent")
        case TrailingPages():
            last = windows[name].last_missing(hit + 1)
            if last is not None:
                return Stop(max(0, last), name, "absent" if last == hit else "window_incomplete")
    return None


def _checked_pages(presence: Mapping[str, PageMask], policies: Mapping[str, HitPolicy]) -> int:
    """Return how many pages the masks cover, after checking that masks and policies fit each other."""
    errors = [] if presence else [FieldError("presence", "empty", "has no pool; the anchor always gates")]
    errors += [
        FieldError(f"policies.{name}", "missing", "the pool has presence but no hit policy")
        for name in presence
        if name not in policies
    ]
    for name, policy in policies.items():
        if name not in presence:
            detail = "the pool has a hit policy but no presence"
            errors.append(FieldError(f"presence.{name}", "missing", detail))
        errors += _policy_errors(f"policies.{name}", policy)
    errors += _mask_errors(presence)
    if errors:
        raise InvalidInput("presence and hit policies do not fit together", errors)
    return next(iter(presence.values())).size


def _check_prefix(prefix: Mapping[str, PageMask], policies: Mapping[str, HitPolicy], first_page: int) -> None:
    errors: list[FieldError] = []
    if first_page < 0:
        errors.append(FieldError("first_page", "out_of_range", f"is {first_page}, must not be negative"))
    for name, mask in prefix.items():
        field = f"prefix_presence.{name}"
        errors += _mask_error(field, mask)
        if name not in policies:
            errors.append(FieldError(field, "unknown_pool", "the pool is not asked for"))
        if mask.size > first_page:
            detail = f"has {mask.size} pages, only {first_page} lie before the call"
            errors.append(FieldError(field, "out_of_range", detail))
    if errors:
        raise InvalidInput("the pages before the call cannot be used", errors)


def _mask_errors(presence: Mapping[str, PageMask]) -> list[FieldError]:
    errors: list[FieldError] = []
    pages = max((mask.size for mask in presence.values()), default=0)
    for name, mask in presence.items():
        field = f"presence.{name}"
        errors += _mask_error(field, mask)
        if mask.size != pages:
            detail = f"has {mask.size} pages, another pool has {pages}; all must be of one length"
            errors.append(FieldError(field, "length_mismatch", detail))
    return errors


def _mask_error(field: str, mask: PageMask) -> list[FieldError]:
    # On integers `~` gives -1 and -2, both true: every page would count as a hole.
    if mask.ndim == 1 and mask.dtype == np.bool_:
        return []
    detail = f"is {mask.dtype} of shape {mask.shape}, must be bool of shape (pages,)"
    return [FieldError(field, "bad_mask", detail)]


def _policy_errors(field: str, policy: HitPolicy) -> list[FieldError]:
    match policy:
        case TrailingPages(window) if window < 1:
            return [FieldError(f"{field}.window_pages", "out_of_range", f"is {window}, must be at least 1")]
        case BlockGroups(block, group) if block < 1 or group < 1:
            return [FieldError(field, "out_of_range", f"is {block} x {group} pages, both must be at least 1")]
        case _:
            return []
