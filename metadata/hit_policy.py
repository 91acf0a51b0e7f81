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
from collections.abc import Iterable, Mapping, Sequence
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

    Of the pools that fail at that length, the first in the order of the policies is named.

    There are two ways to fail there. Mostly the pool lacks the page that the length adds. The window of a
    trailing pool at `hit_pages + 1` holds, besides that page, only pages of the window at `hit_pages`, and
    those are there. Only when nothing is restorable (`hit_pages` 0) there is no such window, and the pool may
    have the page but lack one that its window needs before the call.

    Attributes:
        page: index of the page that the length adds; equals `hit_pages`.
        pool: name of the pool.
        kind: `absent` when the pool lacks that page, `window_incomplete` when it lacks one before the call.
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

    # Where a pool needs all pages a number says all; only windows need a mask.
    leading: dict[str, int] = {}
    windows: dict[str, PageMask] = {}
    alone: dict[str, int] = {}
    for name, policy in policies.items():
        if isinstance(policy, TrailingPages):
            windows[name] = _windows_complete(presence[name], policy.window_pages, prefix.get(name))
            alone[name] = _longest(windows[name])
        elif isinstance(policy, AllPages):
            alone[name] = leading[name] = _first_absent(presence[name])
        else:
            whole = _first_absent(presence[name])
            alone[name] = whole - whole % (policy.block * policy.group)

    reach = min(leading.values(), default=queried)
    runs = _runs(reach, list(windows.values()))
    hit = runs[-1][1] if runs else 0
    return Restorable(
        queried_pages=queried,
        runs=runs,
        pools=alone,
        unchecked_window_pages=_unchecked(hit, policies, prefix, first_page) if hit else 0,
        stop=_stop(hit, policies, presence, leading, windows) if hit < queried else None,
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


def _runs(reach: int, windows: Sequence[PageMask]) -> tuple[tuple[int, int], ...]:
    """Return the lengths up to `reach` that all windows allow."""
    if reach == 0:
        return ()
    if not windows:
        return ((1, reach),)
    allowed = windows[0][:reach]
    for window in windows[1:]:
        allowed = allowed & window[:reach]
    return tuple(page_runs(allowed, start=1))


def _windows_complete(pages: PageMask, window: int, prefix: PageMask | None) -> PageMask:
    """Return for each length whether the window that ends there has no hole: entry i is length i + 1.

    A window is whole when as many holes lie before its end as before its start. What lies before `prefix`
    (or `pages`) is the start of the sequence, or nobody looked: no hole there (H2).
    """
    known = pages if prefix is None else np.concatenate((prefix, pages))
    holes_before_end = np.zeros(known.size + 1, dtype=np.int32)
    np.cumsum(~known, out=holes_before_end[1:])
    holes_before_start = np.zeros_like(holes_before_end)
    holes_before_start[window:] = holes_before_end[:-window]
    whole = np.equal(holes_before_end, holes_before_start)
    return whole[whole.size - pages.size :]


def _unchecked(
    hit: int, policies: Mapping[str, HitPolicy], prefix: Mapping[str, PageMask], first_page: int
) -> int:
    """Return how many pages before the call the windows at `hit` need that no prefix mask covers."""
    counts = [0]
    for name, policy in policies.items():
        if isinstance(policy, TrailingPages):
            needed = min(policy.window_pages - hit, first_page)
            counts.append(needed - (prefix[name].size if name in prefix else 0))
    return max(counts)


def _stop(
    hit: int,
    policies: Mapping[str, HitPolicy],
    presence: Mapping[str, PageMask],
    leading: Mapping[str, int],
    windows: Mapping[str, PageMask],
) -> Stop:
    """Return which pool forbids the length after `hit`."""
    name = next(
        name
        for name in policies
        if (name in leading and leading[name] <= hit) or (name in windows and not windows[name][hit])
    )
    return Stop(hit, name, "window_incomplete" if presence[name][hit] else "absent")


def _first_absent(pages: PageMask) -> int:
    at = int(pages.argmin()) if pages.size else 0
    return pages.size if pages.size == 0 or pages[at] else at


def _longest(allowed: PageMask) -> int:
    """Return the longest length of a mask in which entry i is length i + 1, or 0."""
    at = np.flatnonzero(allowed)
    return int(at[-1]) + 1 if at.size else 0


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
