"""Brute force for the hit rules, from the words of the design, on Python sets.

Imports nothing of the packages and no numpy, so that it cannot share a mistake with them. Pages are numbered
within the whole sequence; the call covers `first_page` to `first_page + queried_pages - 1`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OraclePool:
    """One pool.

    `policy` is ("all_pages",), ("trailing_pages", w) or ("block_groups", block, group). `stored` are the
    pages seen to be there, `looked_at` those that anybody looked at (call and prefix).
    """

    name: str
    policy: tuple
    stored: frozenset[int]
    looked_at: frozenset[int]


def missing_pages(pool: OraclePool, length: int, first_page: int) -> set[int]:
    """Pages that a prefix of `length` pages of the call needs and that are known to be absent."""
    return {
        page for page in needed_pages(pool, length, first_page) & pool.looked_at if page not in pool.stored
    }


def needed_pages(pool: OraclePool, length: int, first_page: int) -> set[int]:
    end = first_page + length
    if pool.policy[0] == "all_pages":
        return {page for page in range(end) if page >= first_page}
    if pool.policy[0] == "trailing_pages":
        return {page for page in range(end) if page >= end - pool.policy[1]}
    return set()


def lengths_allowed(pool: OraclePool, queried_pages: int, first_page: int) -> set[int]:
    return {n for n in range(1, queried_pages + 1) if not missing_pages(pool, n, first_page)}


def restorable_lengths(pools: list[OraclePool], queried_pages: int, first_page: int) -> set[int]:
    lengths = set(range(1, queried_pages + 1))
    for pool in pools:
        lengths &= lengths_allowed(pool, queried_pages, first_page)
    return lengths


def longest_alone(pool: OraclePool, queried_pages: int, first_page: int) -> int:
    if pool.policy[0] != "block_groups":
        return max(lengths_allowed(pool, queried_pages, first_page), default=0)
    size = pool.policy[1] * pool.policy[2]
    covered = 0
    while covered + size <= queried_pages:
        group = {first_page + covered + i for i in range(size)}
        if not group <= pool.stored:
            break
        covered += size
    return covered


def unchecked_window_pages(pools: list[OraclePool], hit_pages: int, first_page: int) -> int:
    if hit_pages == 0:
        return 0
    counts = [len(needed_pages(pool, hit_pages, first_page) - pool.looked_at) for pool in pools]
    return max(counts, default=0)


def stop_of(pools: list[OraclePool], queried_pages: int, first_page: int) -> tuple[int, str, str] | None:
    hit_pages = max(restorable_lengths(pools, queried_pages, first_page), default=0)
    if hit_pages == queried_pages:
        return None
    for pool in pools:
        missing = missing_pages(pool, hit_pages + 1, first_page)
        if missing:
            page = max(missing) - first_page
            return max(0, page), pool.name, "absent" if page == hit_pages else "window_incomplete"
    raise AssertionError("a length fails and no pool fails")
