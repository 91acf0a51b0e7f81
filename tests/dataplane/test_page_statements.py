"""All facts, nothing but the facts, and every page in one call."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataplane.page_statements import PoolFacts, statements


@st.composite
def facts(draw):
    pages = draw(st.integers(0, 8))
    found = {}
    for name in draw(st.sets(st.sampled_from("abc"))):
        shards = draw(st.sets(st.integers(0, 9), min_size=1, max_size=3))
        shape = (pages, len(shards))
        holds = np.array(
            draw(st.lists(st.booleans(), min_size=pages * len(shards), max_size=pages * len(shards)))
        )
        reasons = draw(st.lists(st.integers(-1, 2), min_size=pages, max_size=pages))
        found[name] = PoolFacts(
            tuple(sorted(shards)), holds.astype(np.bool_).reshape(shape), np.array(reasons, np.int8)
        )
    return found


@given(facts())
def test_the_calls_say_every_fact_once_and_nothing_else(given_facts):
    said = [
        (name, int(page), shard, one.reason)
        for call in statements(given_facts)
        for name, one in call.items()
        for page in np.flatnonzero(one.pages)
        for shard in one.shards
    ]
    true = [
        (name, page, shard, int(pool.reasons[page]))
        for name, pool in given_facts.items()
        for page in range(len(pool.holds))
        for shard, held in zip(pool.shards, pool.holds[page], strict=True)
        if held
    ]
    assert sorted(said) == sorted(true)


@given(facts())
def test_every_page_is_in_one_call_with_all_its_pools(given_facts):
    seen: set[int] = set()
    for call in statements(given_facts):
        assert call
        pages = {int(p) for one in call.values() for p in np.flatnonzero(one.pages)}
        assert not pages & seen
        assert all(one.pages.any() and one.shards for one in call.values())
        seen |= pages


def one(shards, holds, reasons=None):
    mask = np.array(holds, np.bool_)
    return PoolFacts(shards, mask, np.array(reasons or [0] * len(mask), np.int8))


def test_what_does_not_contradict_itself_is_one_call():
    whole = [[True], [True], [False], [True]]
    some = [[False], [True], [True], [False]]
    assert len(statements({"kv": one((0,), whole), "swa": one((3,), some)})) == 1


def test_other_shards_or_another_reason_need_another_call():
    shards = one((0, 1), [[True, True], [True, False], [True, True]])
    assert [(c["kv"].pages.tolist(), c["kv"].shards) for c in statements({"kv": shards})] == [
        ([False, True, False], [0]),
        ([True, False, True], [0, 1]),
    ]
    reasons = one((0,), [[True], [True], [True]], [1, 2, 1])
    assert [(c["kv"].pages.tolist(), c["kv"].reason) for c in statements({"kv": reasons})] == [
        ([True, False, True], 1),
        ([False, True, False], 2),
    ]


def test_no_facts_are_no_call():
    assert statements({}) == []
    assert statements({"kv": one((0,), [[False], [False]])}) == []
