import json
import re
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from metadata.codec import PageHashes
from metadata.errors import InvalidInput
from metadata.namespace import Namespace, fingerprint
from metadata.object_keys import (
    ObjectKey,
    flat_object_keys,
    group_ids,
    manifest,
    manifest_key,
    namespace_prefix,
    object_keys,
    parse,
    parse_manifest,
    parse_manifest_key,
    purge_pattern,
    suffixes,
)
from metadata.pools import AllPages, Part, PoolSpec, TrailingPages
from tests.metadata.specs import logical_specs, namespaces, policies, specs

NS = "9f86d081884c7d65"
HASH = bytes(range(32))
HEX = HASH.hex()
SPEC = PoolSpec("kv", (Part("k", "bfloat16", 64), Part("v", "bfloat16", 64)), shard_count=16)
NAMESPACE = Namespace("acme", "Qwen/Qwen3-32B", "main", 64, "plain", fingerprint("a secret"))

namespace_ids = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
hashes = st.binary(min_size=32, max_size=32)
NOT_A_NAMESPACE = [
    "",
    "9f86",
    NS.upper(),
    NS + "0",
    NS + "\n",
    "." * 16,
    "9f86d081884c7d6/",
    " " + NS[1:],
    "٣" * 16,
]


def fields(error: pytest.ExceptionInfo[InvalidInput]) -> list[str]:
    return [e.field for e in error.value.errors]


def test_a_key_is_namespace_hash_pool_shard_part():
    assert object_keys(NS, [HASH], suffixes(SPEC, [0, 10])) == [
        [
            f"ct1/{NS}/{HEX}/{SPEC.pool_id}.0/k",
            f"ct1/{NS}/{HEX}/{SPEC.pool_id}.0/v",
            f"ct1/{NS}/{HEX}/{SPEC.pool_id}.10/k",
            f"ct1/{NS}/{HEX}/{SPEC.pool_id}.10/v",
        ]
    ]


@st.composite
def spec_and_shards(draw):
    spec = draw(specs)
    shards = draw(st.sets(st.integers(0, spec.shard_count - 1), min_size=1, max_size=4))
    return spec, sorted(shards)


@given(namespace_ids, st.lists(hashes, max_size=4), spec_and_shards())
def test_parsing_a_built_key_gives_back_what_it_was_built_from(ns, page_hashes, chosen):
    spec, shards = chosen
    keys = object_keys(ns, page_hashes, suffixes(spec, shards))
    expected = [
        [ObjectKey(ns, h, spec.pool_id, shard, p.part) for shard in shards for p in spec.parts]
        for h in page_hashes
    ]
    assert [[parse(key) for key in page] for page in keys] == expected
    assert flat_object_keys(ns, page_hashes, suffixes(spec, shards)) == [k for page in keys for k in page]
    assert all(re.search(purge_pattern(ns), key) for page in keys for key in page)


@given(namespace_ids, namespace_ids, hashes, hashes)
def test_two_pages_have_two_groups(ns, other_ns, page_hash, other_hash):
    (mine,) = group_ids(ns, [sha256(page_hash).digest()])
    (other,) = group_ids(other_ns, [sha256(other_hash).digest()])
    assert (mine == other) == ((ns, page_hash) == (other_ns, other_hash))


@given(namespace_ids, st.lists(hashes, max_size=4))
def test_group_names_fit_into_a_string_that_needs_no_memory_of_its_own(ns, page_hashes):
    groups = group_ids(ns, page_hashes)
    assert [len(g) for g in groups] == [15] * len(page_hashes)
    assert groups == group_ids(ns, PageHashes.of(page_hashes))
    assert groups == [g for h in page_hashes for g in group_ids(ns, [h])]


@given(specs, specs, hashes)
def test_keys_of_different_variants_never_meet(spec, other, page_hash):
    assume(spec.variant() != other.variant())
    mine = flat_object_keys(NS, [page_hash], suffixes(spec, [0]))
    assert not set(mine) & set(flat_object_keys(NS, [page_hash], suffixes(other, [0])))


def test_parts_of_zero_bytes_have_no_key():
    conv_only = PoolSpec("mamba", (Part("temporal", "float32", 0), Part("conv_0", "bfloat16", 8)))
    assert suffixes(conv_only, [0]) == [f"/{conv_only.pool_id}.0/conv_0"]


@given(logical_specs)
def test_a_logical_pool_has_no_keys(spec):
    assert suffixes(spec, [0]) == []
    assert object_keys(NS, [HASH, HASH], suffixes(spec, [0])) == [[], []]


@pytest.mark.parametrize("shards", [[1, 0], [0, 0], [-1], [16], [0, 16], [True], [0.0]])
def test_shards_must_ascend_and_exist(shards):
    with pytest.raises(InvalidInput) as error:
        suffixes(SPEC, shards)
    assert set(fields(error)) == {"shards"}


@pytest.mark.parametrize("bad", ["", b"", b"a" * 31, "a" * 32])
def test_a_page_hash_that_is_none_is_refused_with_its_index(bad):
    with pytest.raises(InvalidInput) as error:
        object_keys(NS, [HASH, bad], ["/x"])
    assert fields(error) == ["page_hashes[1]"]


@pytest.mark.parametrize("ns", NOT_A_NAMESPACE)
def test_nothing_but_a_whole_namespace_id_makes_a_prefix_or_a_purge(ns):
    for build in (
        namespace_prefix,
        purge_pattern,
        lambda n: object_keys(n, [], []),
        lambda n: group_ids(n, [HASH]),
        lambda n: manifest_key(n, "3f2a91bc"),
    ):
        with pytest.raises(InvalidInput) as error:
            build(ns)
        assert fields(error) == ["namespace_id"]


def test_a_purge_reaches_one_namespace_only():
    pattern = purge_pattern(NS)
    assert pattern == f"^ct1/{NS}/"
    assert re.search(pattern, manifest_key(NS, SPEC.pool_id))
    for other in (f"ct1/{NS[:-1]}0/x", f"xct1/{NS}/x", f"ct1/{NS}0/x", f"ct1/0/ct1/{NS}/", "Qwen_0_k"):
        assert not re.search(pattern, other)


@pytest.mark.parametrize(
    "key",
    [
        "",
        f"ct2/{NS}/{HEX}/3f2a91bc.0/k",
        f"/ct1/{NS}/{HEX}/3f2a91bc.0/k",
        f"ct1/{NS}/{HEX}/3f2a91bc.0/k\n",
        f"ct1/{NS}/{HEX}/3f2a91bc.0/k/",
        f"ct1/{NS}/{HEX}/3f2a91bc.0/",
        f"ct1/{NS}/{HEX}/3f2a91bc.0/.k",
        f"ct1/{NS}/{HEX}/3f2a91bc.0/k k",
        f"ct1/{NS}/{HEX}/3f2a91bc.0/{'k' * 65}",
        f"ct1/{NS}/{HEX}/3f2a91bc.00/k",
        f"ct1/{NS}/{HEX}/3f2a91bc.01/k",
        f"ct1/{NS}/{HEX}/3f2a91bc.-1/k",
        f"ct1/{NS}/{HEX}/3f2a91bc./k",
        f"ct1/{NS}/{HEX}/3f2a91bc.4096/k",
        f"ct1/{NS}/{HEX}/3f2a91bc.10000/k",
        f"ct1/{NS}/{HEX}/3f2a91bc.٣/k",
        f"ct1/{NS}/{HEX}/3f2a91bc/k",
        f"ct1/{NS}/{HEX}/3f2a91b.0/k",
        f"ct1/{NS}/{HEX}/3F2A91BC.0/k",
        f"ct1/{NS}/{HEX.upper()}/3f2a91bc.0/k",
        f"ct1/{NS}/{HEX[:-2]}/3f2a91bc.0/k",
        f"ct1/{NS[:-1]}/{HEX}/3f2a91bc.0/k",
        f"ct1/{NS}/manifest/3f2a91bc",
        f"Qwen-Qwen3-32B_{HEX}_0_k",
    ],
)
def test_a_key_that_cannot_have_been_built_is_refused(key):
    with pytest.raises(InvalidInput) as error:
        parse(key)
    assert fields(error) == ["key"]


def test_the_last_shard_parses():
    assert parse(f"ct1/{NS}/{HEX}/3f2a91bc.4095/k").shard == 4095


@given(st.text(st.sampled_from("ct1/09af.-_k\n"), max_size=130))
def test_what_parses_is_what_the_builder_writes(text):
    try:
        key = parse(text)
    except InvalidInput:
        return
    assert object_keys(key.namespace_id, [key.page_hash], [f"/{key.pool_id}.{key.shard}/{key.part}"]) == [
        [text]
    ]


def test_a_manifest_key_parses_and_is_no_object_key():
    key = manifest_key(NS, "3f2a91bc")
    assert key == f"ct1/{NS}/manifest/3f2a91bc"
    assert parse_manifest_key(key) == (NS, "3f2a91bc")


@pytest.mark.parametrize(
    "key", [f"ct1/{NS}/{HEX}/3f2a91bc.0/k", f"ct1/{NS}/manifest/3f2a91bc\n", f"ct1/{NS}/manifest/"]
)
def test_a_key_that_is_no_manifests_is_refused(key):
    with pytest.raises(InvalidInput) as error:
        parse_manifest_key(key)
    assert fields(error) == ["key"]


@pytest.mark.parametrize("pool_id", ["", "3f2a91b", "3F2A91BC", "3f2a91bc0", "3f2a91bc\n"])
def test_a_manifest_key_takes_pool_ids_only(pool_id):
    with pytest.raises(InvalidInput) as error:
        manifest_key(NS, pool_id)
    assert fields(error) == ["pool_id"]


@given(namespaces, st.one_of(specs, logical_specs))
def test_a_manifest_gives_back_the_identity_it_was_made_of(namespace, spec):
    raw = manifest(namespace, spec)
    read = parse_manifest(raw)
    assert read.namespace == namespace
    assert read.spec.variant() == spec.variant()
    assert manifest(read.namespace, read.spec) == raw


@given(namespaces, specs, policies)
def test_engines_that_share_a_pool_id_write_the_same_manifest(namespace, spec, policy):
    assert manifest(namespace, replace(spec, hit_policy=policy, indices_from="swa")) == manifest(
        namespace, spec
    )


def test_a_manifest_holds_the_salts_fingerprint_and_not_the_salt():
    raw = manifest(NAMESPACE, SPEC)
    assert b"secret" not in raw
    assert fingerprint("a secret").encode() in raw
    assert parse_manifest(raw).spec.hit_policy == AllPages()
    assert manifest(NAMESPACE, replace(SPEC, hit_policy=TrailingPages(3))) == raw


def edited(*path, value) -> bytes:
    content = json.loads(manifest(NAMESPACE, SPEC))
    at = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def test_the_editing_that_these_tests_do_is_canonical():
    assert edited("pool", "shard_count", value=16) == manifest(NAMESPACE, SPEC)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (edited("namespace", "revision", value="other"), "namespace_id"),
        (edited("namespace_id", value=NS), "namespace_id"),
        (edited("pool", "shard_count", value=8), "pool_id"),
        (edited("pool", "parts", 0, 1, value="uint8"), "pool_id"),
        (edited("pool_id", value="3f2a91bc"), "pool_id"),
        (edited("pool", "shard_count", value=0), "shard_count"),
        (edited("pool", "shard_count", value=16.0), "shard_count"),
        (edited("pool", "name", value=5), "name"),
        (edited("pool", "object_layout", value=[]), "object_layout"),
        (edited("namespace", "tenant", value=None), "tenant"),
        (edited("namespace", "page_size", value=True), "page_size"),
        (edited("namespace", "salt_fingerprint", value="a secret"), "salt_fingerprint"),
        (edited("format", value="caketin-pool-manifest-v2"), "manifest"),
        (edited("note", value="hello"), "manifest"),
        (edited("pool", value=[]), "manifest"),
        (edited("pool", "parts", 0, value=["k"]), "manifest"),
        (edited("pool", "parts", 0, value=[["k"], "bfloat16", 64]), "manifest"),
        (edited("namespace", value="x"), "manifest"),
        (manifest(NAMESPACE, SPEC) + b" ", "manifest"),
        (manifest(NAMESPACE, SPEC)[:-1], "manifest"),
        (b"", "manifest"),
        (b"\xff\xfe", "manifest"),
        (b"[]", "manifest"),
        (b"{}", "manifest"),
        (b"null", "manifest"),
        (b"[" * 100_000, "manifest"),
        (b" " * (1 << 20), "manifest"),
    ],
)
def test_a_damaged_or_forged_manifest_is_refused(raw, field):
    with pytest.raises(InvalidInput) as error:
        parse_manifest(raw)
    assert fields(error) == [field]


def test_a_manifest_larger_than_any_pool_needs_is_refused_unread():
    with pytest.raises(InvalidInput, match=f"has {256 * 1024 + 1} bytes, at most {256 * 1024}"):
        parse_manifest(b"[" * (256 * 1024 + 1))
    with pytest.raises(InvalidInput, match="no JSON object"):
        parse_manifest(b"[" * (256 * 1024))


def test_the_largest_manifest_there_can_be_is_read():
    many = tuple(Part(f"k{i:063}", "\U0001f370" * 64, 1) for i in range(64))
    text = "\U0001f370" * 512
    raw = manifest(Namespace(text, text, text, 65_536, "bigram", fingerprint("a")), PoolSpec("k" * 64, many))
    assert parse_manifest(raw).spec.parts == many


@given(st.binary(max_size=60))
def test_no_bytes_make_the_manifest_parser_fail_otherwise(raw):
    with pytest.raises(InvalidInput):
        parse_manifest(raw)


def test_hashes_as_one_run_of_bytes_give_the_same_keys():
    spec = PoolSpec("kv", (Part("k", "bfloat16", 8), Part("v", "bfloat16", 8)))
    listed = [bytes([i]) * 32 for i in range(5)]
    for named in (suffixes(spec, [0]), suffixes(spec, [0])[:1]):
        expected = flat_object_keys("0" * 16, listed, named)
        assert flat_object_keys("0" * 16, PageHashes.of(listed), named) == expected
        assert len(set(expected)) == 5 * len(named)
