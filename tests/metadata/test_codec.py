"""Any valid message means the same to server and client, as JSON and as msgpack; bad bodies are refused."""

from __future__ import annotations

import base64
import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.schemas.bodies import decode_request, encode_response, validate
from api.schemas.commit import CommitRequest, CommitResult, MissingRequest
from api.schemas.engines import HeartbeatRequest, RegisterRequest
from api.schemas.keys import KeysRequest
from api.schemas.lookup import LookupRequest, LookupResult
from api.schemas.observe import HitRatesQuery
from api.schemas.pools import policy_body
from api.schemas.problems import MAX_ERRORS, Problem
from api.schemas.wire import REVEAL_SECRETS
from dataplane.messages import control
from dataplane.messages.wire import decode, encode
from dataplane.messages.wire import decode_request as agent_decode_request
from metadata.codec import MAX_KEYS, PageHashes, TokenIds, decode_json, decode_msgpack
from metadata.errors import FieldError, InvalidInput, TooManyPages
from metadata.namespace import fingerprint
from metadata.pool_json import rank_pool_to_json
from metadata.pools import AllPages, BlockGroups, Part, PoolSpec, RankPool, TrailingPages

JSON, MSGPACK = "application/json", "application/msgpack"
HASH = bytes(range(32))
HEX = HASH.hex()

# Messages.

names = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,15}\Z")
engine_ids = st.from_regex(r"\A[A-Za-z0-9._-]{1,20}\Z")
ranks = st.from_regex(r"\Adp(0|[1-9][0-9]{0,2})-pp[0-9]-cp[0-9]-tp(0|[1-9][0-9]{0,4})\Z")
counts = st.integers(0, 2**53 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
hash_lists = st.lists(st.binary(min_size=32, max_size=32), max_size=6).map(PageHashes.of)
narrow_tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(TokenIds.of)
shard_lists = st.lists(st.integers(0, 4095), min_size=1, max_size=4)
pool_ids = st.from_regex(r"\A[0-9a-f]{8}\Z")


@st.composite
def page_sets(draw, pages: int):
    if draw(st.booleans()):
        return "all"
    edges = sorted(draw(st.sets(st.integers(0, pages - 1), max_size=8))) if pages else []
    if len(edges) % 2:
        edges.append(edges[-1])
    return list(zip(edges[::2], edges[1::2], strict=True))


@st.composite
def lookups(draw):
    by_hash = draw(st.booleans())
    prefix = draw(hash_lists)
    query = st.builds(
        control.PoolQuery, window_pages=st.none() | st.integers(1, 65_536), pool_id=st.none() | pool_ids
    )
    return control.LookupRequest(
        page_hashes=draw(hash_lists) if by_hash else None,
        token_ids=None if by_hash else draw(narrow_tokens),
        cache_salt=draw(st.none() | texts),
        extra_key=draw(st.none() | texts),
        first_page=len(prefix) + draw(st.integers(0, 9)),
        prefix_hashes=prefix,
        engine_id=draw(st.none() | engine_ids),
        rank=draw(st.none() | ranks),
        pools=draw(st.none() | st.dictionaries(names, query, max_size=4)),
        min_pages=draw(st.integers(1, 65_536)),
        purpose=draw(st.sampled_from(["prefetch", "route", "probe"])),
        request_id=draw(st.none() | st.text("abc-019", min_size=1, max_size=40)),
        explain=draw(st.booleans()),
    )


@st.composite
def commits(draw):
    hashes = draw(hash_lists)
    pool = st.builds(control.StoredPool, pages=page_sets(len(hashes)), shards=shard_lists)
    return control.CommitRequest(
        engine_id=draw(engine_ids),
        rank=draw(ranks),
        page_hashes=hashes,
        stored=draw(st.dictionaries(names, pool, min_size=1, max_size=4)),
    )


@st.composite
def missings(draw):
    hashes = draw(hash_lists)
    pages = len(hashes)
    pool = st.builds(
        control.MissingPool,
        pages=page_sets(pages),
        shards=shard_lists,
        reason=st.sampled_from(["gone", "size_mismatch", "timeout", "checksum"]),
        size_seen=st.none() | counts,
    )
    return control.MissingRequest(
        engine_id=draw(engine_ids),
        rank=draw(ranks),
        page_hashes=hashes,
        generation=draw(st.none() | st.binary(min_size=pages, max_size=pages)),
        missing=draw(st.dictionaries(names, pool, min_size=1, max_size=4)),
    )


@st.composite
def keys_requests(draw):
    query = st.builds(control.PoolKeysQuery, pool_id=st.none() | pool_ids, shards=st.none() | shard_lists)
    return control.KeysRequest(
        page_hashes=draw(hash_lists), pools=draw(st.none() | st.dictionaries(names, query, max_size=4))
    )


MODELS = {
    control.LookupRequest: LookupRequest,
    control.CommitRequest: CommitRequest,
    control.MissingRequest: MissingRequest,
    control.KeysRequest: KeysRequest,
}


@given(st.one_of(lookups(), commits(), missings(), keys_requests()))
def test_any_request_means_the_same_on_both_sides_and_in_both_forms(message):
    model = MODELS[type(message)]
    as_json, as_msgpack = encode(message, "json"), encode(message, "msgpack")
    assert decode(as_json, "json", type(message)) == message
    assert decode(as_msgpack, "msgpack", type(message)) == message
    request = decode_request(as_json, JSON, model)
    assert decode_request(as_msgpack, MSGPACK, model) == request
    # and from the server's model back to the client's
    dumped = request.model_dump(mode="json", exclude_unset=True, context=REVEAL_SECRETS)
    assert json.loads(as_json) == dumped
    assert agent_decode_request(json.dumps(dumped).encode(), type(message)) == message


@given(
    st.builds(
        control.LookupResult,
        queried_pages=st.integers(0, 65_536),
        hit_pages=st.integers(0, 65_536),
        hit_tokens=counts,
        restorable=st.integers(1, 65_536).flatmap(page_sets).filter(lambda runs: runs != "all"),
        pools=st.dictionaries(texts, st.integers(0, 65_536), max_size=4),
        generation=st.binary(max_size=64),
        advisory=st.booleans(),
        degraded=st.booleans(),
        unchecked_window_pages=counts,
        miss=st.none()
        | st.builds(
            control.Miss,
            page=counts,
            pool=st.none() | texts,
            reason=st.sampled_from(["evicted", "lost", "degraded"]),
            shards=st.lists(counts, max_size=3),
            age_seconds=st.none() | counts,
        ),
        pages=st.none(),
    )
)
def test_any_lookup_answer_means_the_same_on_both_sides_and_in_both_forms(message):
    answer = validate(decode_json(encode(message, "json")), LookupResult)
    for form, media_type in (("json", JSON), ("msgpack", MSGPACK)):
        written, written_as = encode_response(answer, accept=media_type)
        assert written_as == media_type
        assert decode(written, form, control.LookupResult) == message
    assert validate(decode_msgpack(encode(message, "msgpack")), LookupResult, msgpack=True) == answer


# Page hashes and token ids.


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=8))
def test_page_hashes_are_the_sequence_of_their_hashes(pages):
    hashes = PageHashes.of(pages)
    assert list(hashes) == pages
    assert [hashes[i] for i in range(len(hashes))] == pages
    assert list(hashes[1:3]) == pages[1:3]
    assert list(hashes[::-2]) == pages[::-2]
    assert hashes.raw == b"".join(pages)
    assert hashes.to_hex() == [page.hex() for page in pages]
    assert PageHashes.from_hex([page.hex().upper() for page in pages]) == hashes
    assert hash(PageHashes.of(hashes)) == hash(hashes)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20), st.data())
def test_hashes_are_taken_as_they_would_be_one_by_one(pages, data):
    places = st.lists(st.integers(0, len(pages) - 1), max_size=30) if pages else st.just([])
    at = data.draw(places)
    taken = PageHashes.of(pages).take(np.array(at, np.int64))
    assert list(taken) == [pages[i] for i in at]


def test_a_hash_that_is_not_there_cannot_be_taken():
    with pytest.raises(IndexError):
        PageHashes(bytes(64)).take(np.array([2]))


def test_models_take_the_values_that_they_hold():
    hashes, tokens = PageHashes.of([HASH]), TokenIds.of([7])
    assert LookupRequest(page_hashes=hashes).page_hashes is hashes
    assert LookupRequest(token_ids=tokens).token_ids is tokens


def test_page_hashes_know_their_ends_and_their_kind():
    hashes = PageHashes.of([HASH])
    with pytest.raises(IndexError):
        hashes[1]
    assert hashes[-1] == HASH
    assert hashes != [HASH]
    assert repr(hashes) == "PageHashes(1 pages, first 00010203...)"
    assert repr(PageHashes()) == "PageHashes(0 pages)"


@pytest.mark.parametrize(
    ("digits", "field"),
    [
        ([HEX, HEX[:-1]], "[1]"),
        ([HEX, HEX + "0"], "[1]"),
        ([HEX[:-2], HEX + "00"], "[0]"),  # adds up
        ([HEX, HEX[:-1] + "g"], "[1]"),
        ([HEX, " " + HEX[1:]], "[1]"),
        ([HEX[:-2] + "  ", HEX[:-2] + "  "], "[0]"),  # fromhex skips blanks
        ([HEX, HEX[:-1] + "\uff11"], "[1]"),  # a digit, but not of ASCII
        ([HEX, 7], "[1]"),
        ([HEX, None], "[1]"),
        ([HEX, list(HEX)], "[1]"),
    ],
)
def test_a_bad_hash_is_named_by_its_index(digits, field):
    with pytest.raises(InvalidInput) as refused:
        PageHashes.from_hex(digits)
    assert refused.value.errors[0].field == field


def test_a_run_of_bytes_that_cuts_a_hash_is_refused():
    with pytest.raises(InvalidInput) as refused:
        PageHashes(bytes(65))
    assert refused.value.errors[0].field == "[2]"
    with pytest.raises(InvalidInput) as refused:
        PageHashes.of([HASH, b"short"])
    assert refused.value.errors[0].field == "[1]"


@given(st.lists(st.integers(0, 2**53 - 1), max_size=20))
def test_token_ids_keep_their_values_and_are_narrow_where_they_fit(ids):
    tokens = TokenIds.of(ids)
    assert tokens.to_list() == ids
    assert len(tokens) == len(ids)
    fits = all(i < 2**32 for i in ids)
    assert tokens.values.dtype == (np.uint32 if fits else np.uint64)
    if fits:
        assert TokenIds.from_bytes(tokens.to_bytes()) == tokens
        assert tokens.to_bytes() == b"".join(i.to_bytes(4, "little") for i in ids)


def test_token_ids_equal_by_value():
    assert TokenIds.of([1, 2]) == TokenIds.of([1, 2])
    assert hash(TokenIds.of([1, 2])) == hash(TokenIds.of([1, 2]))
    assert TokenIds.of([1, 2]) != TokenIds.of([1, 3])
    assert TokenIds.of([1]) != [1]
    assert repr(TokenIds.of([1, 2])) == "TokenIds(2 tokens)"


@pytest.mark.parametrize(
    ("ids", "field", "code"),
    [
        ([0, -1], "[1]", "out_of_range"),
        ([0, 2**53], "[1]", "out_of_range"),
        ([0, 2**64], "[1]", "out_of_range"),
        ([0, 2**70, 1.5], "[1]", "out_of_range"),
        ([0, True], "[1]", "wrong_type"),
        ([0, 1.0], "[1]", "wrong_type"),
        ([0, "1"], "[1]", "wrong_type"),
        ([0, [1]], "[1]", "wrong_type"),
    ],
)
def test_a_bad_token_id_is_named_by_its_index(ids, field, code):
    with pytest.raises(InvalidInput) as refused:
        TokenIds.of(ids)
    assert [(e.field, e.code) for e in refused.value.errors] == [(field, code)]


def test_packed_token_ids_that_cut_a_token_are_refused():
    with pytest.raises(InvalidInput):
        TokenIds.from_bytes(bytes(6))


def test_wide_token_ids_have_no_msgpack_form():
    with pytest.raises(InvalidInput) as refused:
        TokenIds.of([1, 2**32]).to_bytes()
    assert refused.value.errors[0].field == "[1]"


# Bodies that are refused before any model sees them.


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "bad_json"),
        (b"{", "bad_json"),
        (b"{} {}", "bad_json"),
        (b"{'a': 1}", "bad_json"),
        (b"\xff\xfe", "bad_json"),
        (b'\xef\xbb\xbf{"a": 1}', "bad_json"),
        (b'{"a": NaN}', "bad_json"),
        (b'{"a": -Infinity}', "bad_json"),
        (b'{"a": "\\ud800"}', "bad_json"),
        (b'{"\\udc00": 1}', "bad_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out_of_range"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "duplicate_key"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate_key"),
        (b"{%s}" % b",".join(b'"%d":1' % i for i in range(MAX_KEYS + 1)), "too_many_keys"),
        (b"[%s]" % b",".join([b'{"a":1,"b":2}'] * MAX_KEYS), "too_many_keys"),
        (b"[" * 100_000, "too_deep"),
        (b'{"a":' * 100_000, "too_deep"),
        (b"[" * 100_000 + b"]" * 100_000, "too_deep"),
    ],
)
def test_a_body_that_is_not_strict_json_is_refused(body, code):
    with pytest.raises(InvalidInput) as refused:
        decode_json(body)
    assert [e.code for e in refused.value.errors] == [code]


def test_as_many_keys_as_a_body_may_have_are_taken():
    value = {str(i): 1 for i in range(MAX_KEYS)}
    assert decode_json(json.dumps(value).encode()) == decode_msgpack(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize("key", ["\ud800", "k" * 100_000])
def test_a_repeated_key_is_named_in_a_form_that_an_answer_can_have(key):
    with pytest.raises(InvalidInput) as refused:
        decode_json(json.dumps({"a": 0})[:-1].encode() + 2 * f", {json.dumps(key)}: 1".encode() + b"}")
    assert len(Problem.of(refused.value).model_dump_json()) < 1000


def test_escapes_that_mean_text_are_taken():
    assert decode_json(b'{"a": "\\u00e9\\ud83c\\udf70\\n"}') == {"a": "é\U0001f370\n"}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "bad_msgpack"),
        (b"\xc1", "bad_msgpack"),
        (b"\x81\xa1a", "bad_msgpack"),
        (b"\x80\x80", "bad_msgpack"),
        (b"\x81\xa1\xff\x01", "bad_msgpack"),
        (b"\xdf\xff\xff\xff\xff", "bad_msgpack"),
        (b"\x81\x81\x01\x02\x03", "bad_msgpack"),  # a map as a key
        (b"\x82\xa1a\x01\xa1a\x02", "duplicate_key"),
        (msgspec.msgpack.encode({"a": [{"b": 1, "c": 2}] * MAX_KEYS}), "too_many_keys"),
        (msgspec.msgpack.encode({"a": {str(i): {} for i in range(MAX_KEYS)}}), "too_many_keys"),
        (b"\xdd\x00\x02\x00\x00" + b"\xcd\x00\x01" * 0x20000, "too_many_values"),
        (b"\x91" * 100_000, "too_deep"),
        (b"\x81\xa1a" * 100_000, "too_deep"),
    ],
)
def test_a_body_that_is_not_strict_msgpack_is_refused(body, code):
    with pytest.raises(InvalidInput) as refused:
        decode_msgpack(body)
    assert [e.code for e in refused.value.errors] == [code]


def test_a_msgpack_body_may_be_any_value():
    assert decode_msgpack(b"\x01") == 1


def test_msgpack_in_a_longer_form_than_needed_is_taken():
    assert decode_msgpack(b"\xde\x00\x02\xd9\x01a\xcd\x00\x01\xa1b\xdc\x00\x00") == {"a": 1, "b": []}


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("body", [b"", b"\xc1", b"[" * 100_000, b"\x91" * 100_000, b"\xff", b'"\\ud800"'])
def test_the_client_refuses_an_answer_that_is_no_message(form, body):
    with pytest.raises(InvalidInput):
        decode(body, form, control.LookupResult)


# Errors name their field.


def refused(value, model=LookupRequest, *, content_type=JSON) -> list[tuple[str, str]]:
    encoder = msgspec.msgpack if "msgpack" in content_type else msgspec.json
    with pytest.raises(InvalidInput) as error:
        decode_request(encoder.encode(value), content_type, model)
    return [(e.field, e.code) for e in error.value.errors]


WHO = {"engine_id": "e", "rank": "dp0-pp0-cp0-tp0"}


@pytest.mark.parametrize(
    ("value", "faults"),
    [
        ([], [("", "wrong_type")]),
        ({}, [("page_hashes", "exactly_one")]),
        ({"page_hashes": [HEX], "token_ids": []}, [("page_hashes", "exactly_one")]),
        ({"page_hashes": HEX}, [("page_hashes", "wrong_type")]),
        ({"page_hashes": [HEX, HEX, 3]}, [("page_hashes[2]", "bad_hash")]),
        ({"page_hashes": [HEX], "prefix_hashes": [HEX]}, [("prefix_hashes", "out_of_range")]),
        ({"page_hashes": [HEX], "prefix_hashes": ["x"]}, [("prefix_hashes[0]", "bad_hash")]),
        ({"token_ids": "AAAA"}, [("token_ids", "wrong_type")]),
        ({"token_ids": [1, 2**53]}, [("token_ids[1]", "out_of_range")]),
        ({"page_hashes": [HEX], "first_page": 2**53}, [("first_page", "out_of_range")]),
        ({"page_hashes": [HEX], "first_page": True}, [("first_page", "wrong_type")]),
        ({"page_hashes": [HEX], "first_page": 1.0}, [("first_page", "wrong_type")]),
        ({"page_hashes": [HEX], "explain": 1}, [("explain", "wrong_type")]),
        ({"page_hashes": [HEX], "engine_id": "a/b"}, [("engine_id", "bad_format")]),
        ({"page_hashes": [HEX], "engine_id": "a\n"}, [("engine_id", "bad_format")]),
        ({"page_hashes": [HEX], "rank": "dp00-pp0-cp0-tp0"}, [("rank", "bad_format")]),
        ({"page_hashes": [HEX], "pools": {"a b": {}}}, [("pools.a b", "bad_format")]),
        ({"page_hashes": [HEX], "pools": {"swa": {"window": 1}}}, [("pools.swa.window", "unknown_field")]),
        ({"page_hashes": [HEX], "request_id": ""}, [("request_id", "too_short")]),
        ({"page_hashes": [HEX], "cache_salt": 7}, [("cache_salt", "wrong_type")]),
        ({"page_hashes": [HEX], "tenant": "other"}, [("tenant", "unknown_field")]),
        ({"page_hashes": [HEX], "x" * 100: 1}, [("x" * 64, "unknown_field")]),
    ],
)
def test_a_fault_of_a_lookup_is_named(value, faults):
    assert refused(value) == faults


@pytest.mark.parametrize(
    ("value", "faults"),
    [
        ({"page_hashes": HASH[:-1]}, [("page_hashes[0]", "bad_hash")]),
        ({"page_hashes": [HEX]}, [("page_hashes", "wrong_type")]),
        ({"page_hashes": HEX}, [("page_hashes", "wrong_type")]),
        ({"token_ids": b"123"}, [("token_ids", "bad_length")]),
        ({"token_ids": [1]}, [("token_ids", "wrong_type")]),
        ({"page_hashes": HASH, 1: 2}, [("[1]", "invalid_key")]),
    ],
)
def test_a_fault_of_a_msgpack_lookup_is_named(value, faults):
    assert refused(value, content_type=MSGPACK) == faults


@pytest.mark.parametrize(
    ("pages", "field", "code"),
    [
        ("some", "", "unknown"),
        (None, "", "wrong_type"),
        ({"0": 1}, "", "wrong_type"),
        ([0, 1], "[0]", "bad_run"),
        ([[0]], "[0]", "bad_run"),
        ([[0, 0, 0]], "[0]", "bad_run"),
        ([[0, True]], "[0]", "bad_run"),
        ([[0, 0], ["1", "1"]], "[1]", "bad_run"),
        ([[1, 0]], "[0]", "bad_run"),
        ([[-1, 0]], "[0]", "bad_run"),
        ([[0, 2**53]], "[0]", "bad_run"),
        ([[0, 0]] * 65_537, "", "too_many"),
        ([[0, 2]], "[0]", "out_of_range"),
        ([[0, 0], [0, 1]], "[1]", "not_ascending"),
    ],
)
def test_a_bad_page_set_is_named(pages, field, code):
    body = WHO | {"page_hashes": [HEX, HEX], "stored": {"swa": {"pages": pages, "shards": [0]}}}
    assert refused(body, CommitRequest) == [(f"stored.swa.pages{field}", code)]


@pytest.mark.parametrize(
    ("generation", "code"),
    [
        ("AA", "bad_base64"),
        ("AAAA====", "bad_base64"),
        ("AAA==", "bad_base64"),
        ("A\u00e9==", "bad_base64"),
        (7, "wrong_type"),
        ("", "bad_length"),
        ("AAA=", "bad_length"),
    ],
)
def test_a_bad_generation_is_named(generation, code):
    lost = {"kv": {"pages": "all", "shards": [0], "reason": "gone"}}
    body = WHO | {"page_hashes": [HEX], "generation": generation, "missing": lost}
    assert refused(body, MissingRequest) == [("generation", code)]


def test_a_msgpack_generation_is_binary_and_not_base64():
    lost = {"kv": {"pages": "all", "shards": [0], "reason": "gone"}}
    body = WHO | {"page_hashes": HASH, "missing": lost}
    assert refused(body | {"generation": "AA=="}, MissingRequest, content_type=MSGPACK) == [
        ("generation", "wrong_type")
    ]
    packed = msgspec.msgpack.encode(body | {"generation": b"\x07"})
    assert decode_request(packed, MSGPACK, MissingRequest).generation == b"\x07"


@pytest.mark.parametrize(
    ("policy", "faults"),
    [
        ({"kind": "trailing_pages"}, [("pools[0].hit_policy.window_pages", "missing")]),
        ({"kind": "last"}, [("pools[0].hit_policy.kind", "unknown")]),
        ({}, [("pools[0].hit_policy.kind", "missing")]),
        ("all_pages", [("pools[0].hit_policy", "wrong_type")]),
        ({"kind": "all_pages", "window_pages": 1}, [("pools[0].hit_policy.window_pages", "unknown_field")]),
        ({"kind": "block_groups", "block": "1", "group": 2}, [("pools[0].hit_policy.block", "wrong_type")]),
    ],
)
def test_a_fault_of_a_hit_policy_is_named_without_its_kind_in_the_path(policy, faults):
    body = {
        "incarnation": "i",
        "namespace": {"model": "m", "revision": "r", "page_size": 64},
        "pools": [
            {"name": "kv", "parts": [{"part": "k", "dtype": "uint8", "bytes": 1}], "hit_policy": policy}
        ],
    }
    assert refused(body, RegisterRequest) == faults


@pytest.mark.parametrize("form", [JSON, MSGPACK])
@pytest.mark.parametrize("field", ["page_hashes", "prefix_hashes"])
def test_one_page_too_many_is_too_many_pages(form, field):
    pages = PageHashes(bytes(32 * 65_537))
    value = {"page_hashes": [], field: pages.to_hex()} if form == JSON else {field: pages.raw}
    encoder = msgspec.json if form == JSON else msgspec.msgpack
    with pytest.raises(TooManyPages) as error:
        decode_request(encoder.encode(value), form, LookupRequest)
    assert error.value.errors[0].field == field


def test_as_many_pages_as_one_call_takes_are_taken():
    pages = PageHashes(bytes(32 * 65_536))
    message = control.LookupRequest(page_hashes=pages)
    assert decode_request(encode(message, "json"), JSON, LookupRequest).page_hashes == pages


def test_more_than_64_pools_are_refused():
    faults = refused({"page_hashes": [HEX], "pools": {f"p{i}": {} for i in range(65)}})
    assert faults == [("pools", "too_many")]


def test_a_body_of_many_faults_gets_a_bounded_answer():
    faults = refused({"page_hashes": [HEX], **{f"x{i}": 1 for i in range(5000)}})
    assert len(faults) == MAX_ERRORS
    many = InvalidInput("bad", [FieldError(f"x{i}", "unknown_field", "no") for i in range(5000)])
    assert len(Problem.of(many).errors) == MAX_ERRORS


# Content negotiation.


@pytest.mark.parametrize("content_type", [None, "", "application/json", "Application/JSON; charset=utf-8"])
def test_json_is_the_default(content_type):
    assert decode_request(b'{"token_ids": [1]}', content_type, LookupRequest).token_ids == TokenIds.of([1])


def test_msgpack_has_its_older_name_too():
    body = msgspec.msgpack.encode({"token_ids": b"\1\0\0\0"})
    assert decode_request(body, "application/x-msgpack", LookupRequest).token_ids == TokenIds.of([1])


def test_another_media_type_is_refused_and_so_is_msgpack_where_the_call_is_json_only():
    assert refused({}, content_type="text/plain") == [("Content-Type", "unsupported")]
    assert refused({}, HeartbeatRequest, content_type=MSGPACK) == [("Content-Type", "unsupported")]


@pytest.mark.parametrize(
    ("accept", "content_type", "given"),
    [
        (None, None, JSON),
        (None, MSGPACK, MSGPACK),
        ("*/*", MSGPACK, MSGPACK),
        ("*/*", JSON, JSON),
        ("", None, JSON),
        (MSGPACK, JSON, MSGPACK),
        (f"text/html, {MSGPACK};q=0.9", None, MSGPACK),
        (JSON, MSGPACK, JSON),
    ],
)
def test_the_answer_has_the_form_that_is_asked_for(accept, content_type, given):
    answer = CommitResult(committed=1, complete=1, rejected=[])
    assert encode_response(answer, accept, content_type)[1] == given


def test_a_call_without_msgpack_answers_json():
    assert encode_response(Problem.of(InvalidInput("bad")), MSGPACK)[1] == JSON


# To and from the domain.

POOLS = [
    RankPool(PoolSpec("kv", (), logical=True), (0,)),
    RankPool(PoolSpec("c4", (Part("page", "uint8", 64),), indices_from="kv"), (0,), 4096),
    RankPool(PoolSpec("swa", (Part("k", "bf16", 8), Part("v", "bf16", 8)), 4, TrailingPages(3)), (1, 2)),
    RankPool(PoolSpec("draft", (Part("k", "bf16", 8),), hit_policy=BlockGroups(2, 4)), ()),
]


def test_the_domain_s_pools_travel_from_client_to_server_unchanged():
    message = control.RegisterRequest(
        incarnation="i",
        namespace=control.NamespaceMessage(model="m", revision="r", page_size=64, namespace_salt="s"),
        pools=[control.PoolMessage.of(pool) for pool in POOLS],
    )
    request = decode_request(encode(message, "json"), JSON, RegisterRequest)
    assert request.to_rank_pools() == POOLS
    namespace = request.namespace.to_namespace("default")
    assert (namespace.tenant, namespace.salt_fingerprint) == ("default", fingerprint("s"))


def test_the_domain_s_own_json_of_a_pool_is_the_contract_s():
    pools = [rank_pool_to_json(pool) for pool in POOLS]
    body = {"incarnation": "i", "namespace": {"model": "m", "revision": "r", "page_size": 64}, "pools": pools}
    assert decode_request(json.dumps(body).encode(), JSON, RegisterRequest).to_rank_pools() == POOLS


@pytest.mark.parametrize("policy", [AllPages(), TrailingPages(2), BlockGroups(1, 2)])
def test_a_policy_comes_back_from_its_body(policy):
    assert policy_body(policy).to_policy() == policy


def test_rules_of_the_domain_name_the_field_of_the_body():
    body = {
        "incarnation": "i",
        "namespace": {"model": "", "revision": "r", "page_size": 0},
        "pools": [
            {"name": "kv", "parts": [{"part": "k", "dtype": "u8", "bytes": 1}]},
            {"name": "a/b", "parts": [{"part": "k", "dtype": "", "bytes": 2**40}], "owned_shards": [1]},
        ],
    }
    request = decode_request(json.dumps(body).encode(), JSON, RegisterRequest)
    with pytest.raises(InvalidInput) as error:
        request.to_rank_pools()
    assert [e.field for e in error.value.errors] == [
        "pools[1].name",
        "pools[1].parts[0].bytes",
        "pools[1].parts[0].dtype",
    ]
    with pytest.raises(InvalidInput) as error:
        request.namespace.to_namespace("default")
    assert [e.field for e in error.value.errors] == ["namespace.model", "namespace.page_size"]


def test_rules_between_pools_are_checked_too():
    body = {"incarnation": "i", "namespace": {"model": "m", "revision": "r", "page_size": 1}, "pools": []}
    with pytest.raises(InvalidInput) as error:
        decode_request(json.dumps(body).encode(), JSON, RegisterRequest).to_rank_pools()
    assert [e.field for e in error.value.errors] == ["pools"]


# Secrets.


def test_no_salt_is_shown_by_either_side():
    message = control.LookupRequest(token_ids=TokenIds.of([1]), cache_salt="hush1", extra_key="hush2")
    namespace = control.NamespaceMessage(model="m", revision="r", page_size=1, namespace_salt="hush3")
    request = decode_request(encode(message, "json"), JSON, LookupRequest)
    shown = [repr(message), str(message), repr(namespace), repr(request), str(request)]
    shown += [repr(request.model_dump()), request.model_dump_json()]
    assert not [text for text in shown if "hush" in text]


def test_no_refusal_repeats_a_salt():
    for field, salt in (("cache_salt", ["hush"]), ("extra_key", "hush" * 2000)):
        with pytest.raises(InvalidInput) as error:
            decode_request(json.dumps({"token_ids": [1], field: salt}).encode(), JSON, LookupRequest)
        assert "hush" not in str(error.value)


# The query of hit rates.


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("2h", 7200), ("7d", 604_800)]
)
def test_a_duration_is_seconds_or_a_number_with_its_unit(text, seconds):
    assert HitRatesQuery.parse(window=text, step="1").window == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1w", "1 h", "h", "\u0661", "9" * 10, "1h\n"])
def test_any_other_duration_is_refused(text):
    with pytest.raises(InvalidInput) as error:
        HitRatesQuery.parse(window=text)
    assert [e.field for e in error.value.errors] == ["window"]


def test_a_step_longer_than_its_window_is_refused():
    with pytest.raises(InvalidInput) as error:
        HitRatesQuery.parse(window="1m", step="1h")
    assert [e.field for e in error.value.errors] == ["step"]


def test_dimensions_are_listed_once_in_their_order():
    assert HitRatesQuery.parse(by="pool,model,pool").by == ["pool", "model"]
    assert HitRatesQuery.parse().by == []


def test_a_page_s_generation_is_base64_in_json_only():
    message = control.MissingRequest(**WHO, page_hashes=PageHashes.of([HASH]), generation=b"\x07", missing={})
    assert json.loads(encode(message, "json"))["generation"] == base64.b64encode(b"\x07").decode()
    assert msgspec.msgpack.decode(encode(message, "msgpack"))["generation"] == b"\x07"


# What the client says of a fault.


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"page_hashes": ["a"]}', "page_hashes[0]"),
        (b'{"page_hashes": 3}', "page_hashes"),
        (b'{"token_ids": [1, -1]}', "token_ids[1]"),
        (b'{"pools": {"swa": {"window_pages": -1}}}', "pools[...].window_pages"),
        (b'{"pools": {"a b": {}}}', "pools"),
        (b'{"engine_id": "a\\n"}', "engine_id"),
        (b'{"colour": 1}', ""),
        (b'{"min_pages": 1, "min_pages": 2}', "min_pages"),
    ],
)
def test_a_request_to_the_agent_is_refused_with_its_field(body, field):
    with pytest.raises(InvalidInput) as error:
        agent_decode_request(body, control.LookupRequest)
    assert [e.field for e in error.value.errors] == [field]


@pytest.mark.parametrize(
    "value", [{"page_hashes": HASH[1:]}, {"page_hashes": [HEX]}, {"token_ids": b"1"}, {"token_ids": [1]}]
)
def test_a_msgpack_message_is_refused_with_its_field(value):
    with pytest.raises(InvalidInput) as error:
        decode(msgspec.msgpack.encode(value), "msgpack", control.LookupRequest)
    assert error.value.errors[0].field.startswith(next(iter(value)))


def test_an_answer_may_have_fields_that_the_client_does_not_know():
    assert decode(b'{"cleared": 1, "stale": 0, "new": {}}', "json", control.MissingResult).cleared == 1


def test_an_answer_that_is_nested_too_deep_is_refused():
    with pytest.raises(InvalidInput) as error:
        decode(b'{"cleared": 1, "stale": 0, "new": ' + b"[" * 100_000, "json", control.MissingResult)
    assert [e.code for e in error.value.errors] == ["too_deep"]


def test_a_value_that_no_call_carries_has_no_form():
    message = control.HeartbeatRequest(incarnation=object(), epoch=1)
    for form in ("json", "msgpack"):
        with pytest.raises(NotImplementedError):
            encode(message, form)
