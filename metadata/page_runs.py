"""Sets of pages as inclusive runs `[first, last]`, the form the calls use, and as boolean arrays.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metadata.errors import FieldError, InvalidInput

PageSet: TypeAlias = Literal["all"] | Sequence[Sequence[int]]
"""What a call says of pages: `"all"`, or inclusive runs of indices into its `page_hashes`."""


def page_runs(mask: NDArray[np.bool_], *, start: int = 0) -> list[tuple[int, int]]:
    """Return the True entries of a mask as ascending inclusive runs, each as long as it can be.

    Args:
        mask: shape (pages,).
        start: the number of the first entry; 1 where the entries are lengths.
    """
    padded = np.zeros(mask.size + 2, dtype=np.bool_)
    padded[1:-1] = mask
    edges = np.flatnonzero(padded[1:] != padded[:-1]) + start
    return list(zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True))


def runs_to_mask(runs: PageSet, pages: int, *, field: str = "pages") -> NDArray[np.bool_]:
    """Return a mask of shape (pages,) that is True in the runs, or everywhere for `"all"`.

    Runs that touch, such as `[0, 1], [2, 3]`, are taken.

    Args:
        runs: `"all"` or ascending inclusive runs.
        pages: how many pages the call has.
        field: path of the runs in the call, for the error.

    Raises:
        InvalidInput: names the first run that is not two numbers, ends before it starts, leaves the call's
            pages, or starts before the end of the run before it.
    """
    if runs == "all":
        return np.ones(pages, dtype=np.bool_)
    mask = np.zeros(pages, dtype=np.bool_)
    free_from = 0
    # Stopping at the first fault bounds the work: good runs are disjoint, so there are at most `pages`.
    for i, run in enumerate(runs):
        fault = _run_fault(run, pages, free_from)
        if fault is not None:
            code, detail = fault
            raise InvalidInput("the page runs cannot be used", [FieldError(f"{field}[{i}]", code, detail)])
        first, last = run
        mask[first : last + 1] = True
        free_from = last + 1
    return mask


def _run_fault(run: Sequence[int], pages: int, free_from: int) -> tuple[str, str] | None:
    if len(run) != 2:  # noqa: PLR2004 - a run is a pair
        return "bad_run", f"has {len(run)} numbers, a run is [first, last]"
    first, last = run
    if first > last:
        return "bad_run", f"is [{first}, {last}], the first page must not be after the last"
    if first < 0 or last >= pages:
        return "out_of_range", f"is [{first}, {last}], the call has {pages} pages, counted from 0"
    if first < free_from:
        return "not_ascending", f"is [{first}, {last}], the run before it ends at {free_from - 1}"
    return None
