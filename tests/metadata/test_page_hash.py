import hashlib
import json
import struct
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.errors import InvalidInput
from metadata.page_hash import check_hashes, from_hex, join, namespace_seed, page_hashes, split, to_hex

VECTORS = json.loads((Path(__file__).parent / "data" / "sglang_page_hashes.json").read_text())["vectors"]

# Made with SGLang 0.5.23 (get_storage_hash_str over RadixKey), where the published vectors are silent.
WIDE_BIGRAM = [
    "e32df256066d2e3fe197b071f499b3b2bfb7e0f6f0d7e328306f947c704f6c77",
    "3cc9fe96c050b53fa909384a6b60795df2694fff3f47694a8aee19ffade180a4",
]
EMPTY_EXTRA_KEY = "f4f1cc11b7c9dafb5734a227bb5a5ad508fd42d1a291708b7def4777e2b18637"
SALT_AND_EXTRA_KEY = "4e1444bb90e7326a41ba8a489052d44c71bfe4c83ed9d56d2978390210ea75b2"
TOKEN_2_63_LESS_1 = "ae9094f4c04deb4d02554381b8b488af1a2174eac2c66262b08ab529baa4d2f7"
TOKEN_2_32_LESS_1 = "2f63719df76283c009fc71cbe1ed655f2913379dc1b6d9f4ac17930ecb0f7535"
TOKEN_2_32 = "5a2b75a9004eba6edc2d4e2cd1fc1b3f6d315c16da37504fb91cee245ccfecd9"
AFTER_AB = "0010d6fe3e131292de72a8a9e5bafc7af0277c6c2bf3c11bd74961927beb6466"

narrow_tokens = st.integers(0, 2**32 - 1)
tokens = st.one_of(narrow_tokens, st.integers(0, 2**64 - 1))
kinds = st.sampled_from(["plain", "bigram"])
hashes = st.lists(st.binary(min_size=32, max_size=32), max_size=5)


def field_of(error: pytest.ExceptionInfo[InvalidInput]) -> list[str]:
    return [e.field for e in error.value.errors]


def by_struct(ids: list[int], page_size: int, kind: str = "plain", previous: bytes = b"") -> list[bytes]:
    """The rule once more, one token at a time."""
    units = [(t,) for t in ids] if kind == "plain" else list(pairwise(ids))
    out = []
    for start in range(0, len(units) - page_size + 1, page_size):
        page = [t for unit in units[start : start + page_size] for t in unit]
        wide = max(page) > 0xFFFFFFFF
        payload = b"\xff" * wide + b"".join(struct.pack("<Q" if wide else "<I", t) for t in page)
        previous = hashlib.sha256(previous + payload).digest()
        out.append(previous)
    return out


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['kind']}-{len(v['token_ids'])}")
@pytest.mark.parametrize("as_array", [False, True], ids=["list", "array"])
def test_whole_pages_hash_as_in_sglang_and_a_trailing_partial_page_is_left_out(vector, as_array):
    ids = vector["token_ids"]
    positions = len(ids) - (vector["kind"] == "bigram")
    got = page_hashes(
        np.array(ids) if as_array else ids,
        vector["page_size"],
        hash_kind=vector["kind"],
        cache_salt=vector["cache_salt"],
        extra_key=vector["extra_key"],
    )
    assert len(got) == positions // vector["page_size"]
    assert to_hex(got) == vector["page_hashes"][: len(got)]


def test_the_vectors_hold_partial_pages_wide_tokens_and_every_kind():
    partial = [v for v in VECTORS if (len(v["token_ids"]) - (v["kind"] == "bigram")) % v["page_size"]]
    wide = [v for v in VECTORS if max(v["token_ids"]) > 0xFFFFFFFF]
    assert partial
    assert wide
    assert {v["kind"] for v in VECTORS} == {"plain", "bigram"}
    assert (
        {bool(v["cache_salt"]) for v in VECTORS} == {bool(v["extra_key"]) for v in VECTORS} == {True, False}
    )


def test_a_bigram_page_with_a_wide_token_is_wide_for_every_page_that_contains_the_token():
    assert to_hex(page_hashes([1, 2, 3, 4, 2**33, 6, 7, 8, 9], 4, hash_kind="bigram")) == WIDE_BIGRAM
    assert to_hex(page_hashes([1, 2, 3, 4, 2**33], 4, hash_kind="bigram")) == WIDE_BIGRAM[:1]


@pytest.mark.parametrize(
    ("token", "expected"),
    [(2**32 - 1, TOKEN_2_32_LESS_1), (2**32, TOKEN_2_32), (2**63 - 1, TOKEN_2_63_LESS_1)],
)
def test_a_page_turns_wide_at_two_to_the_32(token, expected):
    ids = [token, 0, 1, 2]
    for given_as in (ids, tuple(ids), np.array(ids, np.int64), np.array(ids, np.uint64), array("q", ids)):
        assert to_hex(page_hashes(given_as, 4)) == [expected]


def test_an_empty_salt_is_no_salt_but_an_empty_extra_key_is_a_key():
    assert page_hashes([1, 2], 2, cache_salt="") == page_hashes([1, 2], 2)
    assert to_hex(page_hashes([1, 2, 3, 4], 4, extra_key="")) == [EMPTY_EXTRA_KEY]
    assert namespace_seed("", None) == namespace_seed(None, None) == b""


def test_salt_and_extra_key_together_seed_the_first_page():
    assert to_hex(page_hashes([1, 2, 3, 4], 4, extra_key="a", cache_salt="é")) == [SALT_AND_EXTRA_KEY]


def test_a_chain_continues_after_the_previous_page():
    assert to_hex(page_hashes([1, 2, 3, 4], 4, previous=b"\xab" * 32)) == [AFTER_AB]
    assert to_hex(page_hashes([1, 2, 3, 4], 4, previous=b"\xab" * 32, cache_salt="")) == [AFTER_AB]


@given(st.lists(tokens, max_size=40), st.integers(1, 7), kinds)
def test_every_form_of_the_same_tokens_gives_the_hashes_of_the_rule(ids, page_size, kind):
    expected = by_struct(ids, page_size, kind)
    assert page_hashes(ids, page_size, hash_kind=kind) == expected
    assert page_hashes(np.array(ids, np.uint64), page_size, hash_kind=kind) == expected
    assert page_hashes(np.array(ids, object), page_size, hash_kind=kind) == expected
    strided = np.zeros(2 * len(ids), np.uint64)
    strided[::2] = ids
    assert page_hashes(strided[::2], page_size, hash_kind=kind) == expected
    assert page_hashes(np.array(ids[::-1], np.uint64)[::-1], page_size, hash_kind=kind) == expected


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">u2", "<i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8"])
def test_every_integer_dtype_gives_the_same_hashes(dtype):
    ids = [5, 0, 127, 9, 1, 2, 3]
    for kind in ("plain", "bigram"):
        assert page_hashes(np.array(ids, dtype), 3, hash_kind=kind) == by_struct(ids, 3, kind)


def test_hashing_leaves_the_callers_array_alone():
    ids = np.arange(8, dtype=np.uint32)
    ids.setflags(write=False)
    assert page_hashes(ids, 4) == by_struct(list(range(8)), 4)
    assert ids.tolist() == list(range(8))


@given(st.lists(tokens, max_size=40), st.integers(1, 5), st.integers(0, 8), kinds)
def test_a_sequence_cut_at_a_page_and_continued_hashes_as_one(ids, page_size, cut_page, kind):
    whole = page_hashes(ids, page_size, hash_kind=kind)
    cut = min(cut_page, len(whole))
    shared = 1 if kind == "bigram" else 0
    head = page_hashes(ids[: cut * page_size + shared], page_size, hash_kind=kind)
    tail = page_hashes(ids[cut * page_size :], page_size, hash_kind=kind, previous=head[-1] if head else None)
    assert head + tail == whole


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("kind", ["plain", "bigram"])
def test_the_number_of_pages_is_right_at_page_boundaries(page_size, kind):
    extra = 1 if kind == "bigram" else 0
    for whole in (0, 1, 3):
        for over in {0, 1, page_size - 1}:
            count = whole * page_size + over
            ids = list(range(count + extra))
            assert len(page_hashes(ids, page_size, hash_kind=kind)) == count // page_size
    assert page_hashes([], page_size, hash_kind=kind) == []
    assert page_hashes(np.array([], np.int64), page_size, hash_kind=kind) == []


@given(st.lists(narrow_tokens, min_size=1, max_size=12), st.data())
def test_changing_any_token_changes_its_page_and_all_later_pages(ids, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    same = [a == b for a, b in zip(page_hashes(ids, 2), page_hashes(other, 2), strict=True)]
    assert same == [page < at // 2 for page in range(len(ids) // 2)]


@given(st.one_of(st.none(), st.text(max_size=4)), st.one_of(st.none(), st.text(max_size=4)))
def test_a_seed_tells_salt_and_extra_key_apart(salt, extra_key):
    seed = namespace_seed(salt, extra_key)
    assert len(seed) == (0 if not salt and extra_key is None else 32)
    if salt and salt != extra_key:
        assert seed != namespace_seed(extra_key, salt)
    if salt:
        assert seed != namespace_seed(salt[1:], (extra_key or "") + salt[0])


@pytest.mark.parametrize(
    "ids",
    [
        [3, 4, -1],
        [3, 4, 2**64],
        [3, 2**40, 2**64],
        [3, 2**40, -7],
        [3, 4, 5.0],
        [3, 2**40, "5"],
        [3, 4, None],
        np.array([3, 4, -1]),
        np.array([3, 4, -1], np.int8),
        np.array([3, 4, 2**64], object),
        np.array([3, 4, 0.5], object),
    ],
    ids=str,
)
def test_a_bad_token_is_refused_with_its_index(ids):
    with pytest.raises(InvalidInput) as error:
        page_hashes(ids, 1)
    assert field_of(error)[-1] == "token_ids[2]"
    assert len(error.value.errors) == 1


def test_only_the_first_bad_tokens_are_listed():
    with pytest.raises(InvalidInput) as error:
        page_hashes([-1] * 1000, 1)
    assert field_of(error) == [f"token_ids[{i}]" for i in range(8)]


@pytest.mark.parametrize(
    "ids",
    [
        "1234",
        b"1234",
        bytearray(4),
        memoryview(b"1234"),
        np.zeros((2, 2), int),
        np.zeros(4),
        np.zeros(4, bool),
    ],
)
def test_what_is_no_list_of_integers_is_refused(ids):
    with pytest.raises(InvalidInput) as error:
        page_hashes(ids, 1)
    assert field_of(error) == ["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": -4}, "page_size"),
        ({"page_size": 2.0}, "page_size"),
        ({"hash_kind": "trigram"}, "hash_kind"),
        ({"previous": b"\xab" * 31}, "previous"),
        ({"previous": "ab" * 16}, "previous"),
        ({"previous": b""}, "previous"),
        ({"previous": b"\xab" * 32, "cache_salt": "a"}, "previous"),
        ({"previous": b"\xab" * 32, "extra_key": ""}, "previous"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"extra_key": "\ud800"}, "extra_key"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_by_name(arguments, field):
    with pytest.raises(InvalidInput) as error:
        page_hashes(**{"token_ids": [1, 2], "page_size": 2, **arguments})
    assert field_of(error) == [field]


@given(hashes)
def test_hex_and_packed_forms_give_the_hashes_back(page_hashes):
    assert from_hex(to_hex(page_hashes)) == page_hashes
    assert from_hex([h.upper() for h in to_hex(page_hashes)]) == page_hashes
    assert split(join(page_hashes)) == page_hashes


@pytest.mark.parametrize(
    "bad", ["", "ab", "ab" * 33, "zz" + "ab" * 31, " " * 64, "ab " * 21 + "a", "٣" * 64, b"ab" * 32, None]
)
def test_hex_that_is_no_hash_is_refused_with_its_index(bad):
    good = "ab" * 32
    with pytest.raises(InvalidInput) as error:
        from_hex([good, good, good, bad, good])
    assert field_of(error) == ["page_hashes[3]"]
    with pytest.raises(InvalidInput) as error:
        from_hex([bad], field="prefix_hashes")
    assert field_of(error) == ["prefix_hashes[0]"]


def test_two_bad_lengths_that_add_up_are_refused():
    with pytest.raises(InvalidInput) as error:
        from_hex(["ab" * 31, "ab" * 33])
    assert field_of(error) == ["page_hashes[0]", "page_hashes[1]"]


@pytest.mark.parametrize("bad", [b"", b"a" * 31, b"a" * 33, "a" * 32, bytearray(32)])
def test_bytes_that_are_no_hash_are_refused_with_their_index(bad):
    good = b"a" * 32
    for refuses in (join, check_hashes):
        with pytest.raises(InvalidInput) as error:
            refuses([good, bad, good])
        assert field_of(error) == ["page_hashes[1]"]


def test_packed_hashes_that_end_inside_a_page_are_refused_with_the_page():
    with pytest.raises(InvalidInput) as error:
        split(b"a" * 100, field="prefix_hashes")
    assert field_of(error) == ["prefix_hashes[3]"]
    assert split(b"") == []
