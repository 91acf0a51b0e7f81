import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.errors import InvalidInput
from metadata.page_runs import page_runs, runs_to_mask

masks = st.lists(st.booleans(), max_size=60)


def mask_of(*pages: int, size: int) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[list(pages)] = True
    return mask


def fault_of(runs, pages: int, field: str = "pages") -> tuple[str, str, str]:
    with pytest.raises(InvalidInput) as caught:
        runs_to_mask(runs, pages, field=field)
    assert "page runs" in caught.value.detail
    (error,) = caught.value.errors
    return error.field, error.code, error.detail


@pytest.mark.parametrize(
    ("pages", "size", "runs"),
    [
        ((), 0, []),
        ((), 3, []),
        ((0,), 1, [(0, 0)]),
        ((0, 1, 2), 3, [(0, 2)]),
        ((1,), 3, [(1, 1)]),
        ((0, 2, 3, 5), 6, [(0, 0), (2, 3), (5, 5)]),
    ],
)
def test_runs_are_inclusive_ascending_and_as_long_as_they_can_be(pages, size, runs):
    assert page_runs(mask_of(*pages, size=size)) == runs


def test_runs_may_be_numbered_from_another_start_than_0():
    assert page_runs(mask_of(0, 2, 3, size=4), start=1) == [(1, 1), (3, 4)]


def test_runs_are_plain_python_numbers_that_json_takes():
    ((first, last),) = page_runs(mask_of(1, 2, size=4))
    assert type(first) is int
    assert type(last) is int


@given(masks)
def test_a_mask_comes_back_from_its_runs(flags):
    mask = np.array(flags, dtype=bool)
    runs = page_runs(mask)
    assert runs_to_mask(runs, mask.size).tolist() == flags
    listed = [page for first, last in runs for page in range(first, last + 1)]
    assert listed == [i for i, flag in enumerate(flags) if flag]
    assert all(after[0] > before[1] + 1 for before, after in pairwise(runs))


def test_all_means_every_page_of_the_call():
    assert runs_to_mask("all", 3).tolist() == [True, True, True]
    assert runs_to_mask(json.loads('"all"'), 2).tolist() == [True, True]
    assert runs_to_mask("all", 0).size == 0
    assert runs_to_mask("all", 3).dtype == np.bool_


def test_runs_as_json_gives_them_are_taken():
    mask = runs_to_mask([[0, 0], [2, 3]], 5)
    assert mask.tolist() == [True, False, True, True, False]
    assert mask.dtype == np.bool_


def test_no_run_means_no_page():
    assert runs_to_mask([], 2).tolist() == [False, False]


def test_runs_that_touch_are_taken():
    assert runs_to_mask([[0, 1], [2, 3]], 4).tolist() == [True] * 4


@pytest.mark.parametrize(
    ("runs", "index", "code", "says"),
    [
        ([[0]], 0, "bad_run", "has 1 numbers"),
        ([[0, 1, 2]], 0, "bad_run", "has 3 numbers"),
        ([[]], 0, "bad_run", "has 0 numbers"),
        ([[0, 1], [4, 3]], 1, "bad_run", "is [4, 3]"),
        ([[-1, 3]], 0, "out_of_range", "has 10 pages"),
        ([[0, 9], [10, 10]], 1, "out_of_range", "has 10 pages"),
        ([[3, 10]], 0, "out_of_range", "is [3, 10]"),
        ([[0, 2**70]], 0, "out_of_range", "has 10 pages"),
        ([[5, 6], [0, 1]], 1, "not_ascending", "ends at 6"),
        ([[0, 3], [3, 4]], 1, "not_ascending", "ends at 3"),
        ([[2, 2], [2, 2]], 1, "not_ascending", "ends at 2"),
        ("everything", 0, "bad_run", "has 1 numbers"),
    ],
)
def test_runs_out_of_range_out_of_order_or_overlapping_are_refused_by_name(runs, index, code, says):
    field, seen, detail = fault_of(runs, 10, field="stored.swa.pages")
    assert (field, seen) == (f"stored.swa.pages[{index}]", code)
    assert says in detail


def test_only_the_first_fault_is_named_so_that_a_hostile_body_costs_no_more_than_its_good_part():
    assert fault_of([[9, 9]] * 1_000, 5)[0] == "pages[0]"


def test_no_page_of_an_empty_call_can_be_named():
    assert fault_of([[0, 0]], 0)[1] == "out_of_range"
