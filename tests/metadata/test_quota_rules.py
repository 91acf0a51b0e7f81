"""Quotas as values: what fits, and why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.quota_rules import Amount, Quota

counts = st.integers(0, 2**53)


def test_amounts_add_up() -> None:
    assert Amount(1, 10) + Amount(2, 20) == Amount(3, 30)
    assert Amount() == Amount(0, 0)


def test_a_quota_without_bounds_is_none() -> None:
    assert not Quota().is_bound
    assert Quota(max_pages=0).is_bound
    assert Quota(max_bytes=0).is_bound


@pytest.mark.parametrize(
    ("quota", "said"),
    [
        (Quota(max_pages=10), None),
        (Quota(max_pages=9), "8 pages claimed of 9, and this call brings up to 2 more"),
        (Quota(max_bytes=100), None),
        (Quota(max_bytes=99), "80 bytes claimed of 99, and this call brings up to 20 more"),
        (Quota(9, 99), "pages"),
        (Quota(), None),
    ],
)
def test_what_is_beyond_the_bound_is_refused_with_the_numbers(quota: Quota, said: str | None) -> None:
    found = quota.excess(Amount(8, 80), Amount(2, 20))
    assert (found is None) if said is None else (found is not None and said in found)


@given(counts, counts, counts)
def test_exactly_what_keeps_the_sum_within_the_bound_fits(bound: int, has: int, adds: int) -> None:
    fits = adds == 0 or has + adds <= bound
    assert (Quota(max_pages=bound).excess(Amount(has, 0), Amount(adds, 0)) is None) == fits
    assert (Quota(max_bytes=bound).excess(Amount(0, has), Amount(0, adds)) is None) == fits


def test_a_call_that_adds_nothing_fits_even_into_a_tenant_that_is_over() -> None:
    assert Quota(0, 0).excess(Amount(5, 5), Amount()) is None
