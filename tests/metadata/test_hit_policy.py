from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.errors import InvalidInput
from metadata.hit_policy import Restorable, Stop, anchor_presence, dead_end, restorable
from metadata.pools import AllPages, BlockGroups, TrailingPages
from tests.metadata import hit_oracle
from tests.metadata.hit_oracle import OraclePool

KV = {"kv": AllPages()}
KV_SWA1 = {"kv": AllPages(), "swa": TrailingPages(1)}
KV_SWA2 = {"kv": AllPages(), "swa": TrailingPages(2)}


def stored(bits: str) -> np.ndarray:
    """`x` is a stored page, `.` an absent one; spaces are for the eye."""
    return np.array([bit == "x" for bit in bits.replace(" ", "")], dtype=bool)


def presence(**pools: str) -> dict[str, np.ndarray]:
    return {name: stored(bits) for name, bits in pools.items()}


def lengths(answer: Restorable) -> list[int]:
    return [n for first, last in answer.runs for n in range(first, last + 1)]


def faults(caught: pytest.ExceptionInfo[InvalidInput]) -> list[tuple[str, str]]:
    return [(error.field, error.code) for error in caught.value.errors]


# H1: the exact set of restorable lengths


def test_everything_stored_restores_every_length():
    answer = restorable(presence(kv="xxxx", swa="xxxx"), KV_SWA2)
    assert answer == Restorable(4, ((1, 4),), {"kv": 4, "swa": 4}, 0, None)
    assert answer.hit_pages == 4


def test_a_long_call_restores_all_of_its_pages():
    assert restorable(presence(kv="x" * 1_000), KV) == Restorable(
        1_000, ((1, 1_000),), {"kv": 1_000}, 0, None
    )


def test_nothing_stored_restores_nothing():
    answer = restorable(presence(kv="...", swa="..."), KV_SWA2)
    assert answer == Restorable(3, (), {"kv": 0, "swa": 0}, 0, Stop(0, "kv", "absent"))
    assert answer.hit_pages == 0


def test_kv_to_page_3_and_a_window_complete_only_at_5_restores_nothing():
    answer = restorable(presence(kv="xxx..", swa="...xx"), KV_SWA2)
    assert answer.runs == ()
    assert answer.pools == {"kv": 3, "swa": 5}


def test_it_is_not_the_minimum_of_what_each_pool_allows_alone():
    answer = restorable(presence(kv="xxxx.", swa=".xx.x"), KV_SWA2)
    assert answer.pools == {"kv": 4, "swa": 3}
    assert answer.runs == ((3, 3),)


def test_a_window_complete_at_5_and_at_9_leaves_holes_between():
    answer = restorable(presence(kv="x" * 10, swa="...xx..xx."), KV_SWA2)
    assert answer.runs == ((5, 5), (9, 9))
    assert answer.hit_pages == 9


def test_two_windows_must_be_complete_at_the_same_length():
    policies = {"swa": TrailingPages(2), "mamba": TrailingPages(1)}
    answer = restorable(presence(swa="xx.xx", mamba="x..xx"), policies)
    assert answer.runs == ((1, 1), (5, 5))
    assert restorable(presence(swa="x.x.", mamba=".x.x"), policies).runs == ()


def test_a_hole_in_an_all_pages_pool_ends_every_longer_length():
    answer = restorable(presence(kv="xx.xx", indexer="xxxx."), {"kv": AllPages(), "indexer": AllPages()})
    assert answer.runs == ((1, 2),)
    assert answer.pools == {"kv": 2, "indexer": 4}


def test_runs_are_inclusive_and_leave_length_zero_out():
    answer = restorable(presence(swa="x.x"), {"swa": TrailingPages(1)})
    assert answer.runs == ((1, 1), (3, 3))
    assert not answer.allows(0)
    assert all(type(n) is int for run in answer.runs for n in run)


def test_a_call_of_no_pages_has_no_length_and_no_reason():
    answer = restorable(presence(kv="", swa="", c128=""), {**KV_SWA2, "c128": BlockGroups(1, 2)})
    assert answer == Restorable(0, (), {"kv": 0, "swa": 0, "c128": 0}, 0, None)


def test_pools_are_told_in_the_order_of_the_policies():
    answer = restorable(presence(swa="x", kv="x"), {"kv": AllPages(), "swa": TrailingPages(1)})
    assert list(answer.pools) == ["kv", "swa"]


def test_the_presence_handed_in_is_only_read():
    given_presence = presence(kv="x.xx", swa=".xxx")
    for mask in given_presence.values():
        mask.flags.writeable = False
    restorable(given_presence, KV_SWA2, first_page=1, prefix_presence=presence(swa="x"))
    anchor_presence(given_presence, ["kv", "swa"])
    assert given_presence["kv"].tolist() == stored("x.xx").tolist()


@pytest.mark.parametrize("part", ["answer", "stop"])
def test_an_answer_that_several_ranks_share_cannot_be_changed(part):
    answer = restorable(presence(kv="x."), KV)
    shared = {"answer": answer, "stop": answer.stop}[part]
    with pytest.raises(FrozenInstanceError):
        setattr(shared, "runs" if part == "answer" else "page", ())


def test_columns_of_a_page_by_pool_table_are_taken_without_a_copy():
    table = np.stack([stored("xxx.x"), stored("xx.xx")], axis=1)
    answer = restorable({"kv": table[:, 0], "swa": table[:, 1]}, KV_SWA1)
    assert answer.runs == ((1, 2),)


# H2: trailing windows


def test_window_incomplete_at_longest_prefix_falls_back_to_an_earlier_one():
    answer = restorable(presence(kv="xxxxxx", swa="xxxx.x"), KV_SWA2)
    assert answer.hit_pages == 4
    assert answer.stop == Stop(4, "swa", "absent")


def test_a_sequence_shorter_than_the_window_needs_all_of_its_pages():
    window_5 = {"swa": TrailingPages(5)}
    assert lengths(restorable(presence(swa="xxx"), window_5)) == [1, 2, 3]
    assert lengths(restorable(presence(swa=".xx"), window_5)) == []
    assert lengths(restorable(presence(swa=".xxxxx"), window_5)) == [6]


def test_a_window_of_one_page_needs_only_the_last():
    assert lengths(restorable(presence(mamba=".x.x"), {"mamba": TrailingPages(1)})) == [2, 4]


@pytest.mark.parametrize("window", [3, 4, 5, 65_536, 2**40])
def test_a_window_as_long_as_the_call_or_longer_needs_every_page(window):
    assert lengths(restorable(presence(swa="x.x"), {"swa": TrailingPages(window)})) == [1]
    assert lengths(restorable(presence(swa="xxx"), {"swa": TrailingPages(window)})) == [1, 2, 3]


def test_lengths_count_pages_of_the_call_also_in_mid_sequence():
    answer = restorable(presence(kv="xx.", swa="xxx"), KV_SWA1, first_page=100)
    assert answer.queried_pages == 3
    assert answer.runs == ((1, 2),)
    assert answer.stop == Stop(2, "kv", "absent")


def test_a_window_that_reaches_before_the_call_is_checked_over_the_prefix_pages():
    swa_3 = {"swa": TrailingPages(3)}
    whole = {"first_page": 4, "prefix_presence": presence(swa="xxxx")}
    assert lengths(restorable(presence(swa="xxxx"), swa_3, **whole)) == [1, 2, 3, 4]
    hole_at_3 = {"first_page": 4, "prefix_presence": presence(swa="xxx.")}
    assert lengths(restorable(presence(swa="xxxx"), swa_3, **hole_at_3)) == [3, 4]
    hole_at_2 = {"first_page": 4, "prefix_presence": presence(swa="xx.x")}
    assert lengths(restorable(presence(swa="xxxx"), swa_3, **hole_at_2)) == [2, 3, 4]
    hole_at_1 = {"first_page": 4, "prefix_presence": presence(swa="x.xx")}
    assert lengths(restorable(presence(swa="xxxx"), swa_3, **hole_at_1)) == [1, 2, 3, 4]


def test_window_pages_before_the_call_that_nobody_checked_are_vouched_for_and_counted():
    answer = restorable(
        presence(kv="xx", swa="xx"), {"kv": AllPages(), "swa": TrailingPages(8)}, first_page=100
    )
    assert answer.runs == ((1, 2),)
    assert answer.unchecked_window_pages == 6


def test_the_prefix_may_cover_only_the_near_part_of_the_window():
    swa_8 = {"swa": TrailingPages(8)}
    near = restorable(presence(swa="xx"), swa_8, first_page=100, prefix_presence=presence(swa="xxxx"))
    assert (near.runs, near.unchecked_window_pages) == (((1, 2),), 2)
    whole = restorable(presence(swa="xx"), swa_8, first_page=100, prefix_presence=presence(swa="xxxxxx"))
    assert whole.unchecked_window_pages == 0
    more = restorable(presence(swa="xx"), swa_8, first_page=100, prefix_presence=presence(swa="xxxxxxxx"))
    assert more.unchecked_window_pages == 0


def test_no_more_unchecked_pages_than_the_sequence_has_before_the_call():
    answer = restorable(presence(swa="x"), {"swa": TrailingPages(8)}, first_page=3)
    assert answer.unchecked_window_pages == 3


def test_a_window_within_the_call_leaves_nothing_unchecked():
    answer = restorable(presence(swa="xxxx"), {"swa": TrailingPages(3)}, first_page=9)
    assert answer.unchecked_window_pages == 0


def test_a_call_that_starts_the_sequence_leaves_nothing_unchecked():
    answer = restorable(presence(swa="xx"), {"swa": TrailingPages(8)})
    assert (answer.runs, answer.unchecked_window_pages) == (((1, 2),), 0)


def test_the_pool_with_most_unchecked_pages_is_told():
    policies = {
        "kv": AllPages(),
        "swa": TrailingPages(3),
        "draft_swa": TrailingPages(6),
        "x": TrailingPages(4),
    }
    everywhere = dict.fromkeys(policies, stored("x"))
    assert restorable(everywhere, policies, first_page=9).unchecked_window_pages == 5
    checked = {"draft_swa": stored("xxxx")}
    assert restorable(everywhere, policies, first_page=9, prefix_presence=checked).unchecked_window_pages == 3


def test_unchecked_pages_are_those_of_the_window_at_the_hit_not_of_a_shorter_length():
    answer = restorable(
        presence(kv="xxx.", swa="xxxx"), {"kv": AllPages(), "swa": TrailingPages(5)}, first_page=9
    )
    assert (answer.hit_pages, answer.unchecked_window_pages) == (3, 2)


def test_without_a_hit_nothing_is_vouched_for():
    answer = restorable(
        presence(kv="..", swa="xx"), {"kv": AllPages(), "swa": TrailingPages(5)}, first_page=9
    )
    assert answer.unchecked_window_pages == 0


def test_all_pages_pools_are_not_checked_over_the_prefix():
    answer = restorable(presence(kv="xx"), KV, first_page=2, prefix_presence=presence(kv=".."))
    assert answer == Restorable(2, ((1, 2),), {"kv": 2}, 0, None)


def test_an_empty_prefix_is_no_prefix():
    swa_4 = {"swa": TrailingPages(4)}
    bare = restorable(presence(swa="x.x"), swa_4, first_page=2)
    assert restorable(presence(swa="x.x"), swa_4, first_page=2, prefix_presence={}) == bare
    assert restorable(presence(swa="x.x"), swa_4, first_page=2, prefix_presence=presence(swa="")) == bare


# H3: block groups


@pytest.mark.parametrize(
    ("bits", "covered"),
    [
        ("xxxxxx", 6),
        ("xxxxxxx", 6),
        ("xxxxx.", 0),
        ("xxxxxx xxxxxx", 12),
        ("xxxxxx xxx.xx", 6),
        (".xxxxx", 0),
    ],
)
def test_block_groups_report_the_pages_that_leading_complete_groups_cover(bits, covered):
    answer = restorable(presence(c128=bits), {"c128": BlockGroups(block=2, group=3)})
    assert answer.pools == {"c128": covered}


def test_block_groups_gate_nothing():
    policies = {"kv": AllPages(), "c128": BlockGroups(1, 4)}
    answer = restorable(presence(kv="xxx", c128="..."), policies)
    assert answer == Restorable(3, ((1, 3),), {"kv": 3, "c128": 0}, 0, None)
    stopped = restorable(presence(c128="...", kv="x.x"), {"c128": BlockGroups(1, 4), "kv": AllPages()})
    assert stopped.stop == Stop(1, "kv", "absent")


def test_without_a_gating_pool_every_length_is_restorable():
    answer = restorable(presence(c128="..."), {"c128": BlockGroups(1, 4)})
    assert (answer.runs, answer.stop) == (((1, 3),), None)


# P1: a logical anchor


def test_a_logical_anchor_is_present_where_all_pools_that_derive_from_it_are():
    pools = presence(c4="xx.x", c128="x.xx", swa="....")
    assert anchor_presence(pools, ["c4", "c128"]).tolist() == stored("x..x").tolist()
    assert anchor_presence(pools, ["c4"]).tolist() == stored("xx.x").tolist()


def test_the_anchor_presence_is_an_array_of_its_own():
    pools = presence(kv="xx")
    anchor_presence(pools, ["kv"])[0] = False
    assert pools["kv"].all()


def test_an_anchor_without_bytes_anywhere_is_refused():
    with pytest.raises(InvalidInput, match="anchor") as caught:
        anchor_presence(presence(swa="x"), [])
    assert faults(caught) == [("anchor_pools", "empty")]


def test_an_anchor_pool_without_presence_is_refused_by_name():
    with pytest.raises(InvalidInput, match="anchor") as caught:
        anchor_presence(presence(c4="x"), ["c4", "c128"])
    assert faults(caught) == [("presence.c128", "missing")]


def test_anchor_pools_of_several_lengths_are_refused_by_name():
    with pytest.raises(InvalidInput) as caught:
        anchor_presence(presence(c4="xxx", c128="x", swa="xxxxx"), ["c4", "c128"])
    assert faults(caught) == [("presence.c128", "length_mismatch")]


# H5: why it ends


def test_the_stop_names_the_pool_that_comes_first_in_the_policies():
    both = presence(kv="xx.", c4="xx.", swa="xx.")
    assert restorable(both, {"kv": AllPages(), "c4": AllPages(), "swa": TrailingPages(1)}).stop == Stop(
        2, "kv", "absent"
    )
    assert restorable(both, {"swa": TrailingPages(1), "c4": AllPages(), "kv": AllPages()}).stop == Stop(
        2, "swa", "absent"
    )


def test_the_stop_leaves_out_pools_that_allow_the_length():
    policies = {"kv": AllPages(), "swa": TrailingPages(2), "mamba": TrailingPages(1)}
    answer = restorable(presence(kv="xxx.", swa="xxx.", mamba="x..x"), policies)
    assert (answer.hit_pages, answer.stop) == (1, Stop(1, "mamba", "absent"))


def test_after_a_hit_a_window_stops_by_the_page_that_the_length_adds():
    policies = {"kv": AllPages(), "swa": TrailingPages(4)}
    answer = restorable(presence(kv="xxxxx", swa="x..xx"), policies)
    assert (answer.runs, answer.stop) == (((1, 1),), Stop(1, "swa", "absent"))
    answer = restorable(presence(kv="xxxxxxx", swa="x..xxxx"), policies)
    assert (answer.runs, answer.stop) == (((1, 1), (7, 7)), None)


def test_a_window_that_lacks_a_page_before_the_call_is_incomplete_not_absent():
    prefix = {"first_page": 8, "prefix_presence": presence(swa="x..x")}
    # Length 1 needs pages 5, 6, 7 before the call and page 0 of it; 5 and 6 are missing.
    answer = restorable(presence(swa="xx"), {"swa": TrailingPages(4)}, **prefix)
    assert (answer.runs, answer.stop) == ((), Stop(0, "swa", "window_incomplete"))
    # That page 1 is missing too does not matter at length 1.
    answer = restorable(presence(swa="x.xx"), {"swa": TrailingPages(4)}, **prefix)
    assert answer.stop == Stop(0, "swa", "window_incomplete")


def test_a_window_that_lacks_the_added_page_and_one_before_the_call_is_absent():
    prefix = {"first_page": 8, "prefix_presence": presence(swa="x..x")}
    answer = restorable(presence(swa="."), {"swa": TrailingPages(4)}, **prefix)
    assert answer.stop == Stop(0, "swa", "absent")


def test_no_stop_when_the_longest_length_is_restorable_whatever_holes_lie_before():
    answer = restorable(presence(kv="xxxx", swa=".x.x"), KV_SWA1)
    assert (answer.runs, answer.stop) == (((2, 2), (4, 4)), None)


# O5: what a prefetch that was cut short may restore


def test_a_prefetch_cut_short_restores_the_largest_restorable_length_it_reached():
    answer = restorable(presence(kv="x" * 10, swa="...xx..xxx"), KV_SWA2)
    assert answer.runs == ((5, 5), (9, 10))
    reached = {k: answer.largest_at_most(k) for k in (-1, 0, 1, 4, 5, 6, 8, 9, 10, 99)}
    assert reached == {-1: 0, 0: 0, 1: 0, 4: 0, 5: 5, 6: 5, 8: 5, 9: 9, 10: 10, 99: 10}


def test_clamping_finds_its_run_among_many():
    answer = restorable(
        presence(kv="x" * 12, mamba="x.x.x.x.x.xx"), {"kv": AllPages(), "mamba": TrailingPages(1)}
    )
    assert [answer.largest_at_most(k) for k in range(13)] == [0, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 12]
    assert [n for n in range(14) if answer.allows(n)] == [1, 3, 5, 7, 9, 11, 12]


def test_a_length_is_allowed_exactly_when_it_lies_in_a_run():
    answer = restorable(presence(kv="x" * 10, swa="...xx..xxx"), KV_SWA2)
    assert [n for n in range(-2, 14) if answer.allows(n)] == [5, 9, 10]


def test_an_empty_set_allows_no_length():
    answer = restorable(presence(kv="."), KV)
    assert (answer.largest_at_most(1), answer.allows(1), answer.allows(0)) == (0, False, False)


# What went wrong in the field


def test_field_1_indexer_evicted_after_the_existence_check_the_reads_decide():
    policies = {"kv": AllPages(), "indexer": AllPages()}
    promised = restorable(presence(kv="x" * 40, indexer="x" * 40), policies)
    assert promised.hit_pages == 40
    read = restorable(presence(kv="x" * 40, indexer="x" * 37 + "..."), policies)
    assert (read.hit_pages, read.stop) == (37, Stop(37, "indexer", "absent"))


def test_field_9_swa_short_by_one_page_keeps_the_length_at_which_both_hold():
    answer = restorable(
        presence(kv="x" * 32, swa="x" * 31 + "."), {"kv": AllPages(), "swa": TrailingPages(8)}
    )
    assert (answer.runs, answer.stop) == (((1, 31),), Stop(31, "swa", "absent"))


@pytest.mark.parametrize("page_size", [2, 64, 256])
@pytest.mark.parametrize("whole_pages", [1, 5])
def test_field_10_a_length_in_tokens_has_one_page_length_at_every_page_boundary(page_size, whole_pages):
    answer = restorable(presence(kv="x" * 8, swa="x" * 8), KV_SWA2)
    for rest in (0, 1, page_size - 1):
        tokens = whole_pages * page_size + rest
        assert answer.largest_at_most(tokens // page_size) == whole_pages
    # The scheduler that keeps one token back of N = whole pages reaches one page less, and no further.
    assert answer.largest_at_most((whole_pages * page_size - 1) // page_size) == whole_pages - 1


def test_field_20_a_partial_retrieve_is_clamped_not_taken_for_the_whole():
    policies = {"kv": AllPages(), "c4": AllPages(), "swa": TrailingPages(2)}
    read = restorable(presence(kv="xxxxx", c4="xxxx.", swa="xx.xx"), policies)
    assert read.runs == ((1, 2),)
    assert read.largest_at_most(5) == 2
    # Pages read after a failed one do not count, though their bytes came.
    assert restorable(presence(kv="xx.xx"), KV).hit_pages == 2


# Chunked reading


def test_a_hole_in_an_all_pages_pool_is_a_dead_end():
    assert dead_end(presence(kv="xx.x", swa="xxxx"), KV_SWA2, queried_pages=100) == 2


def test_a_hole_in_a_window_is_no_dead_end_while_a_later_window_may_be_complete():
    assert dead_end(presence(kv="xxxx", swa="...."), KV_SWA2, queried_pages=100) is None


def test_a_hole_that_every_later_window_of_the_call_covers_is_a_dead_end():
    swa_6 = {"swa": TrailingPages(6)}
    assert dead_end(presence(swa="xx.x"), swa_6, queried_pages=8) == 2
    assert dead_end(presence(swa="xx.x"), swa_6, queried_pages=9) is None
    assert dead_end(presence(swa="x..x"), swa_6, queried_pages=8) == 2
    assert dead_end(presence(swa=".xxx"), swa_6, queried_pages=6) == 0
    assert dead_end(presence(swa=".xxx"), swa_6, queried_pages=4) == 0
    assert dead_end(presence(swa=".xxx"), swa_6, queried_pages=7) is None


def test_the_first_dead_end_of_all_pools_is_told():
    policies = {"kv": AllPages(), "swa": TrailingPages(9), "c4": AllPages()}
    seen = presence(kv="xxxx.", swa="x.xxx", c4="xx..x")
    assert dead_end(seen, policies, queried_pages=9) == 1
    assert dead_end(seen, policies, queried_pages=99) == 2


def test_there_is_no_dead_end_without_a_hole_or_without_a_gating_pool():
    assert dead_end(presence(kv="xxx", swa="xxx"), KV_SWA2, queried_pages=4) is None
    assert dead_end(presence(kv="xxx", swa="xxx"), KV_SWA2, queried_pages=400) is None
    assert dead_end(presence(c128="..."), {"c128": BlockGroups(1, 1)}, queried_pages=4) is None
    assert dead_end(presence(kv=""), KV, queried_pages=4) is None


def test_block_groups_do_not_hide_the_dead_end_of_a_pool_after_them():
    policies = {"c128": BlockGroups(1, 1), "kv": AllPages()}
    assert dead_end(presence(c128="...", kv="xx."), policies, queried_pages=4) == 2


def test_a_dead_end_checks_its_input_as_the_answer_does():
    with pytest.raises(InvalidInput) as caught:
        dead_end(presence(kv="xx", swa="x"), KV_SWA2, queried_pages=4)
    assert faults(caught) == [("presence.swa", "length_mismatch")]


# Bad input


def refused(*args, **kwargs) -> list[tuple[str, str]]:
    with pytest.raises(InvalidInput) as caught:
        restorable(*args, **kwargs)
    assert caught.value.detail
    assert all(error.detail for error in caught.value.errors)
    return faults(caught)


def test_no_pool_at_all_is_refused():
    assert refused({}, {}) == [("presence", "empty")]


def test_a_pool_without_policy_is_refused_by_name():
    assert refused(presence(kv="x", swa="x"), KV) == [("policies.swa", "missing")]


def test_a_policy_without_presence_is_refused_by_name():
    assert refused(presence(kv="x"), KV_SWA1) == [("presence.swa", "missing")]


def test_masks_of_another_length_are_refused_by_name():
    assert refused(presence(kv="xxx", swa="xx"), KV_SWA1) == [("presence.swa", "length_mismatch")]
    with pytest.raises(InvalidInput, match="has 2 pages, another pool has 3"):
        restorable(presence(kv="xxx", swa="xx"), KV_SWA1)


@pytest.mark.parametrize("mask", [np.ones(3, np.uint8), np.ones((3, 1), bool), np.ones((3, 1), np.int64)])
def test_masks_that_are_not_flat_booleans_are_refused_by_name(mask):
    assert refused({"kv": stored("xxx"), "swa": mask}, KV_SWA1) == [("presence.swa", "bad_mask")]
    prefix = {"first_page": 3, "prefix_presence": {"swa": mask}}
    assert refused(presence(kv="x", swa="x"), KV_SWA1, **prefix) == [("prefix_presence.swa", "bad_mask")]


def test_a_single_flag_is_no_mask():
    assert refused({"kv": np.array(True)}, KV) == [("presence.kv", "bad_mask")]


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (TrailingPages(0), "policies.swa.window_pages"),
        (TrailingPages(-3), "policies.swa.window_pages"),
        (BlockGroups(0, 1), "policies.swa"),
        (BlockGroups(1, 0), "policies.swa"),
        (BlockGroups(-1, -1), "policies.swa"),
    ],
)
def test_a_window_or_group_of_no_page_is_refused_by_name(policy, field):
    assert refused(presence(kv="x", swa="x"), {"kv": AllPages(), "swa": policy}) == [(field, "out_of_range")]


def test_a_negative_first_page_is_refused():
    assert refused(presence(kv="x"), KV, first_page=-1) == [("first_page", "out_of_range")]


def test_a_prefix_of_more_pages_than_lie_before_the_call_is_refused_by_name():
    prefix = {"first_page": 2, "prefix_presence": presence(kv="xx", swa="xxx")}
    assert refused(presence(kv="x", swa="x"), KV_SWA1, **prefix) == [("prefix_presence.swa", "out_of_range")]


def test_a_prefix_for_a_pool_that_is_not_asked_for_is_refused_by_name():
    prefix = {"first_page": 2, "prefix_presence": presence(sva="xx")}
    assert refused(presence(kv="x", swa="x"), KV_SWA1, **prefix) == [("prefix_presence.sva", "unknown_pool")]


def test_all_faults_are_told_at_once():
    policies = {"kv": AllPages(), "swa": TrailingPages(0), "c4": AllPages()}
    assert refused(presence(kv="x", swa="xx", mamba="xx"), policies) == [
        ("policies.mamba", "missing"),
        ("policies.swa.window_pages", "out_of_range"),
        ("presence.c4", "missing"),
        ("presence.kv", "length_mismatch"),
    ]


# Against the brute-force oracle


POLICIES = st.one_of(
    st.just(AllPages()),
    st.builds(TrailingPages, st.integers(1, 12)),
    st.builds(TrailingPages, st.integers(1, 60)),
    st.builds(BlockGroups, st.integers(1, 4), st.integers(1, 4)),
)


@st.composite
def masks(draw, pages: int) -> np.ndarray:
    """A few holes, runs, or noise: noise alone would leave no window of more than some pages complete."""
    shape = draw(st.sampled_from(["few_holes", "prefix", "noise"]))
    if shape == "noise":
        return np.array(draw(st.lists(st.booleans(), min_size=pages, max_size=pages)), dtype=bool)
    mask = np.ones(pages, dtype=bool)
    if shape == "prefix":
        mask[draw(st.integers(0, pages)) :] = False
    elif pages:
        mask[draw(st.lists(st.integers(0, pages - 1), max_size=3))] = False
    return mask


@st.composite
def calls(draw) -> tuple:
    """Policies, presence, first_page and prefix of a call, as the function takes them."""
    queried = draw(st.integers(0, 40))
    first_page = draw(st.one_of(st.just(0), st.integers(0, 50)))
    policies = {f"pool{i}": draw(POLICIES) for i in range(draw(st.integers(1, 5)))}
    pools = {name: draw(masks(queried)) for name in policies}
    with_prefix = [name for name in policies if draw(st.booleans())]
    prefix = {name: draw(masks(draw(st.integers(0, min(first_page, 20))))) for name in with_prefix}
    return policies, pools, first_page, prefix


def oracle_pool(name, policy, mask, first_page, prefix) -> OraclePool:
    match policy:
        case AllPages():
            words = ("all_pages",)
        case TrailingPages(window):
            words = ("trailing_pages", window)
        case BlockGroups(block, group):
            words = ("block_groups", block, group)
    seen = dict(enumerate(mask.tolist(), start=first_page))
    seen |= dict(enumerate(prefix.tolist(), start=first_page - prefix.size))
    return OraclePool(name, words, frozenset(p for p, there in seen.items() if there), frozenset(seen))


def oracle_pools(policies, pools, first_page, prefix) -> list[OraclePool]:
    none = np.zeros(0, dtype=bool)
    return [
        oracle_pool(name, policy, pools[name], first_page, prefix.get(name, none))
        for name, policy in policies.items()
    ]


@given(calls())
def test_the_answer_is_what_brute_force_over_sets_says(call):
    policies, pools, first_page, prefix = call
    answer = restorable(pools, policies, first_page=first_page, prefix_presence=prefix)
    said = oracle_pools(*call)
    queried = answer.queried_pages
    expected = hit_oracle.restorable_lengths(said, queried, first_page)
    assert queried == next(iter(pools.values())).size
    assert lengths(answer) == sorted(expected)
    assert all(after[0] > before[1] + 1 for before, after in pairwise(answer.runs))
    assert answer.hit_pages == max(expected, default=0)
    assert answer.pools == {p.name: hit_oracle.longest_alone(p, queried, first_page) for p in said}
    assert answer.unchecked_window_pages == hit_oracle.unchecked_window_pages(
        said, answer.hit_pages, first_page
    )
    stop = answer.stop
    assert (stop and (stop.page, stop.pool, stop.kind)) == hit_oracle.stop_of(said, queried, first_page)


@given(calls(), st.integers(-2, 45))
def test_clamping_and_asking_agree_with_the_set(call, pages):
    policies, pools, first_page, prefix = call
    answer = restorable(pools, policies, first_page=first_page, prefix_presence=prefix)
    expected = hit_oracle.restorable_lengths(oracle_pools(*call), answer.queried_pages, first_page)
    assert answer.largest_at_most(pages) == max((n for n in expected if n <= pages), default=0)
    assert answer.allows(pages) == (pages in expected)


@given(calls(), st.integers(0, 40))
def test_a_chunked_reader_stops_as_early_as_it_may_and_never_loses_a_length(call, read):
    policies, pools, first_page, prefix = call
    queried = next(iter(pools.values())).size
    seen = {name: mask[:read] for name, mask in pools.items()}
    end = dead_end(seen, policies, queried_pages=queried)

    unread_stored = {name: mask.copy() for name, mask in pools.items()}
    for mask in unread_stored.values():
        mask[read:] = True
    no_prefix = oracle_pools(policies, unread_stored, first_page, {})
    possible = hit_oracle.restorable_lengths(no_prefix, queried, first_page)
    assert (end is None) == (queried in possible or queried == 0)
    if end is not None:
        assert not [n for n in possible if n > end]
        filled = {name: np.pad(mask, (0, queried - mask.size)) for name, mask in seen.items()}
        early = restorable(filled, policies, first_page=first_page, prefix_presence=prefix)
        late = restorable(pools, policies, first_page=first_page, prefix_presence=prefix)
        assert (early.runs, early.stop) == (late.runs, late.stop)
        assert early.unchecked_window_pages == late.unchecked_window_pages
