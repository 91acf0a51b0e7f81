"""What a call of the control plane says of pages, pools and shards, in as few calls as possible.

A call names for each pool one set of pages, one set of shards and one reason. Facts are finer: page 3 of a
pool may lack shard 0 while page 4 lacks shards 0 and 1 for another reason. So several calls may be needed,
and every page must be in exactly one of them: the first report of a page raises its generation, which fences
a second one off; and a sidecar's claim must come in the same call as its anchor's.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PoolFacts:
    """What is known of one pool.

    Attributes:
        shards: the shards that the columns of `holds` stand for.
        holds: where the fact holds, bool (pages, shards).
        reasons: a number a page, int8 (pages,); looked at only where the fact holds for some shard.
    """

    shards: tuple[int, ...]
    holds: NDArray[np.bool_]
    reasons: NDArray[np.int8]


@dataclass(frozen=True)
class Statement:
    """What one call says of one pool.

    Attributes:
        pages: bool (pages,), at least one.
        shards: at least one; on each of the pages the fact holds for these shards and no other.
        reason: of all the pages.
    """

    pages: NDArray[np.bool_]
    shards: list[int]
    reason: int


def statements(facts: Mapping[str, PoolFacts]) -> list[dict[str, Statement]]:
    """Return the calls that say all facts and nothing else, by pool; every page is in one call at most."""
    if not facts:
        return []
    sorts = [_sorts_of_pages(pool) for pool in facts.values()]
    table = np.stack([sort for sort, _ in sorts], axis=1)
    kinds, kind_of_page = np.unique(table, axis=0, return_inverse=True)
    kind_of_page = kind_of_page.reshape(-1)
    calls: list[dict[str, Statement]] = []
    for chosen, members in _packed(kinds):
        in_call = np.isin(kind_of_page, members)
        call = {}
        for (name, pool), at, (_, rows) in zip(facts.items(), range(len(sorts)), sorts, strict=True):
            sort = int(chosen[at])
            if sort:
                row = rows[sort - 1]
                shards = [s for s, held in zip(pool.shards, row[:-1], strict=True) if held]
                call[name] = Statement(in_call & (table[:, at] == sort), shards, int(row[-1]))
        calls.append(call)
    return calls


def _sorts_of_pages(pool: PoolFacts) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Return for each page which sort it is of, 0 where nothing holds, and what each sort says.

    Row i of the second, int8 (sorts, shards + 1), is sort i + 1: which shards, then the reason.
    """
    said: NDArray[np.bool_] = np.any(pool.holds, axis=1)
    rows = np.concatenate((pool.holds.astype(np.int8), pool.reasons[:, None]), axis=1)[said]
    unique, which = np.unique(rows, axis=0, return_inverse=True)
    sorts = np.zeros(len(said), np.int64)
    sorts[said] = which.reshape(-1) + 1
    return sorts, unique


def _packed(kinds: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], list[int]]]:
    """Put kinds of pages together that do not contradict each other in any pool.

    Args:
        kinds: rows (kinds, pools) of sorts, 0 where nothing is said.

    Returns:
        For each call the sort of each pool, and the kinds in it.
    """
    calls: list[tuple[NDArray[np.int64], list[int]]] = []
    for i, kind in enumerate(kinds):
        if not kind.any():
            continue
        for sorts, members in calls:
            if not ((sorts != kind) & (sorts != 0) & (kind != 0)).any():
                np.copyto(sorts, kind, where=kind != 0)
                members.append(i)
                break
        else:
            calls.append((kind.copy(), [i]))
    return calls
