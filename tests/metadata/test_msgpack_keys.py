"""A key that stands twice in one map is found, wherever it is and however it is written."""

from __future__ import annotations

import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.msgpack_keys import repeated_key

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.sampled_from(["x" * 300, "x" * 70_000, b"x" * 300, b"x" * 70_000]),
    st.binary(max_size=40),
    st.builds(
        msgspec.msgpack.Ext, st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 8, 16, 300, 70_000]).map(bytes)
    ),
    st.just(datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=30,
)


@given(values)
def test_a_body_whose_keys_differ_has_no_repeated_key(value):
    assert repeated_key(msgspec.msgpack.encode(value)) is None


@pytest.mark.parametrize(
    "value", [list(range(70_000)), {str(i): i for i in range(33_000)}, {str(i): i for i in range(300)}]
)
def test_long_containers_are_walked_to_their_end(value):
    pair = b"\x92" + msgspec.msgpack.encode(value)
    assert repeated_key(pair + b"\x80") is None
    assert repeated_key(pair + b"\x82\xa1k\x01\xa1k\x02") == "k"


@given(values, values, st.text(max_size=40))
def test_a_repeated_key_is_found_behind_any_value(before, between, key):
    encoded = msgspec.msgpack.encode
    inner = b"\x82" + encoded(key) + encoded(between) + encoded(key) + encoded(1)
    assert repeated_key(b"\x92" + encoded(before) + inner) == key


def test_two_spellings_of_one_key_are_one_key():
    assert repeated_key(b"\x82\xa1a\x01\xd9\x01a\x02") == "a"


def test_the_same_key_in_two_maps_is_no_repetition():
    assert repeated_key(b"\x92\x81\xa1a\x01\x81\xa1a\x02") is None
    assert repeated_key(b"\x82\xa1a\x81\xa1a\x01\xa1b\x02") is None


def test_a_container_as_a_key_is_walked_over():
    assert repeated_key(b"\x82\x91\x01\x02\xa1a\x01") is None
