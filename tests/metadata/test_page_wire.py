"""Page values on the wire: the command is what a client would pack, the rows are what the values say."""

import hashlib

import numpy as np
import pytest
from hiredis import pack_command
from hypothesis import given
from hypothesis import strategies as st

from metadata import page_wire, redis_keys
from metadata.codec import PageHashes

NS = "9f86d081884c7d65"
hash_lists = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40)


@given(hashes=hash_lists, ns=st.sampled_from([NS, "0123456789abcdef", "x"]))
def test_the_command_is_what_a_client_packs_from_the_keys(hashes, ns):
    packed = page_wire.mget(ns, page_wire.hash_rows(hashes))
    assert packed == pack_command(("MGET", *redis_keys.pages(ns, hashes)))


@given(hashes=hash_lists)
def test_groups_are_the_pages_of_one_bucket_and_cover_all_once(hashes):
    rows = page_wire.hash_rows(hashes)
    groups = list(page_wire.by_bucket(rows))
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(hashes)))
    buckets = [{redis_keys.bucket(hashes[i]) for i in group} for group in groups]
    assert all(len(found) == 1 for found in buckets)
    assert len(set().union(*buckets)) == len(groups), "one group a bucket"


@given(hashes=hash_lists)
def test_hashes_that_are_one_run_of_bytes_make_the_same_rows(hashes):
    rows = page_wire.hash_rows(PageHashes(b"".join(hashes)))
    assert (rows == page_wire.hash_rows(hashes)).all()


def test_no_pages_make_no_groups_and_no_rows():
    empty = page_wire.hash_rows([])
    assert list(page_wire.by_bucket(empty)) == []
    assert page_wire.value_rows([]).shape == (0, 9)


@given(values=st.lists(st.none() | st.binary(max_size=9), max_size=60))
def test_rows_hold_the_values_filled_with_zeros(values):
    rows = page_wire.value_rows(values)
    assert [row.tobytes() for row in rows] == [(v or b"").ljust(9, b"\0") for v in values]


@given(value=st.binary(min_size=1, max_size=9), count=st.integers(1, 20))
def test_rows_of_equal_length_too(value, count):
    assert (page_wire.value_rows([value] * count) == np.frombuffer(value.ljust(9, b"\0"), np.uint8)).all()


@pytest.mark.parametrize("brace", [b"}", b"{"])
def test_a_hash_with_braces_stays_in_the_slot_of_its_bucket(brace):
    from redis.crc import key_slot

    page = brace * 32
    (key,) = redis_keys.pages(NS, [page])
    (companion,) = redis_keys.companions(NS, [page])
    assert key_slot(key) == key_slot(companion) == key_slot(redis_keys.claims(NS, redis_keys.bucket(page)))


def test_every_family_of_a_page_shares_its_slot():
    from redis.crc import key_slot

    for i in range(200):
        page = hashlib.sha256(str(i).encode()).digest()
        families = (redis_keys.pages, redis_keys.companions, redis_keys.notes)
        slots = {key_slot(family(NS, [page])[0]) for family in families}
        assert len(slots) == 1
