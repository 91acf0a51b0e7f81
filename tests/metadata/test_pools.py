import string
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from metadata.errors import InvalidInput
from metadata.pools import (
    MAX_JSON_INT,
    MAX_PART_BYTES,
    MAX_PARTS,
    MAX_POOL_VARIANTS,
    MAX_SHARDS,
    AllPages,
    BlockGroups,
    Part,
    PoolSpec,
    RankPool,
    TrailingPages,
    anchor_pools,
    derived_from,
    shard_errors,
    validate_pool_set,
    write_stages,
)
from tests.metadata.specs import logical_specs, parts, policies, specs

K, V = Part("k", "bfloat16", 64), Part("v", "bfloat16", 64)
KV = PoolSpec("kv", (K, V), shard_count=8)
PAGE = (Part("page", "uint8", 64),)


def faults(error: pytest.ExceptionInfo[InvalidInput]) -> list[tuple[str, str]]:
    return [(e.field, e.code) for e in error.value.errors]


def pool(name: str, indices_from: str | None = None, logical: bool = False) -> PoolSpec:
    return PoolSpec(name, () if logical else PAGE, indices_from=indices_from, logical=logical)


def by_name(*pools: PoolSpec) -> dict[str, PoolSpec]:
    return {p.name: p for p in pools}


DEEPSEEK_V4 = by_name(
    pool("swa"),
    pool("deepseek_v4_c4_state", "swa"),
    pool("deepseek_v4_c4_indexer", "deepseek_v4_c4"),
    pool("deepseek_v4_c4", "kv"),
    pool("deepseek_v4_c128", "kv"),
    pool("kv", logical=True),
)
MHA_SWA = by_name(pool("swa"), pool("draft", "kv"), pool("kv"), pool("draft_swa", "swa"))


# Identity (I1)


def test_the_pool_id_is_eight_hex_digits_and_does_not_change_between_releases():
    # Pinned: another value would orphan everything that is stored.
    assert KV.pool_id == "271a05da"
    assert set(KV.pool_id) <= set(string.hexdigits.lower())


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "swa"},
        {"parts": (V, K)},
        {"parts": (K,)},
        {"parts": (replace(K, part="key"), V)},
        {"parts": (replace(K, dtype="float16"), V)},
        {"parts": (replace(K, bytes=65), V)},
        {"shard_count": 4},
        {"object_layout": "layer_first"},
        {"parts": (), "logical": True},
    ],
    ids=str,
)
def test_every_dimension_of_the_bytes_is_part_of_the_pool_id(changed):
    assert replace(KV, **changed).pool_id != KV.pool_id


@pytest.mark.parametrize("changed", [{"hit_policy": TrailingPages(2)}, {"indices_from": "swa"}], ids=str)
def test_how_an_engine_uses_the_pool_is_not_part_of_its_id(changed):
    assert replace(KV, **changed).pool_id == KV.pool_id


@given(specs, specs)
def test_ids_differ_when_the_bytes_do(one, other):
    assume(one.variant() != other.variant())
    assert one.pool_id != other.pool_id


@given(specs, policies, st.data())
def test_equal_bytes_have_one_id_whatever_zero_byte_parts_were_listed(spec, policy, data):
    at = data.draw(st.integers(0, len(spec.parts)))
    name = "temporal" + "x" * max(len(p.part) for p in spec.parts)
    padded = (*spec.parts[:at], Part(name[-64:], "float32", 0), *spec.parts[at:])
    assume(len({p.part for p in padded}) == len(padded))
    same = replace(spec, parts=padded, hit_policy=policy)
    assert same.parts == spec.parts
    assert same.pool_id == spec.pool_id
    assert same.bytes_per_page == spec.bytes_per_page == sum(p.bytes for p in padded)


@given(
    st.lists(st.text(st.sampled_from("a_.-0"), min_size=1, max_size=3), min_size=2, max_size=3, unique=True)
)
def test_no_delimiter_moves_text_between_part_and_dtype_unseen(texts):
    part = f"p{texts[0]}"
    one = PoolSpec("kv", (Part(part, texts[1], 8),))
    other = PoolSpec("kv", (Part(part + texts[1][0], texts[1][1:] or "z", 8),))
    assert one.pool_id != other.pool_id
    quoted = PoolSpec("kv", (Part("k", 'u8",8],["v","u8', 8),))
    assert quoted.pool_id != PoolSpec("kv", (Part("k", "u8", 8), Part("v", "u8", 8))).pool_id


# One pool


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"name": ""}, ("name", "bad_name")),
        ({"name": "a/b"}, ("name", "bad_name")),
        ({"name": ".."}, ("name", "bad_name")),
        ({"name": "kv\n"}, ("name", "bad_name")),
        ({"name": "ü"}, ("name", "bad_name")),
        ({"name": "k" * 65}, ("name", "bad_name")),
        ({"name": 5}, ("name", "bad_name")),
        ({"shard_count": 0}, ("shard_count", "out_of_range")),
        ({"shard_count": MAX_SHARDS + 1}, ("shard_count", "out_of_range")),
        ({"shard_count": True}, ("shard_count", "bad_type")),
        ({"shard_count": 8.0}, ("shard_count", "bad_type")),
        ({"object_layout": "page_last"}, ("object_layout", "unknown")),
        ({"parts": ()}, ("parts", "empty")),
        ({"parts": (replace(K, bytes=0),)}, ("parts", "empty")),
        ({"logical": True}, ("parts", "logical_with_bytes")),
        ({"parts": (K, replace(V, bytes=-1))}, ("parts[1].bytes", "out_of_range")),
        ({"parts": (K, replace(V, bytes=MAX_PART_BYTES + 1))}, ("parts[1].bytes", "out_of_range")),
        ({"parts": (K, replace(V, bytes=64.0))}, ("parts[1].bytes", "bad_type")),
        ({"parts": (K, replace(V, bytes="64"))}, ("parts[1].bytes", "bad_type")),
        ({"parts": (K, replace(V, part="v/0"))}, ("parts[1].part", "bad_name")),
        ({"parts": (K, replace(V, part="k"))}, ("parts[1].part", "duplicate")),
        ({"parts": (K, replace(V, dtype=""))}, ("parts[1].dtype", "bad_text")),
        ({"parts": (K, replace(V, dtype="u8\n"))}, ("parts[1].dtype", "bad_text")),
        ({"parts": (K, replace(V, dtype="x" * 65))}, ("parts[1].dtype", "bad_text")),
        ({"parts": (K, replace(V, dtype=None))}, ("parts[1].dtype", "bad_text")),
        ({"parts": tuple(replace(K, part=f"k{i}") for i in range(MAX_PARTS + 1))}, ("parts", "too_many")),
        ({"hit_policy": TrailingPages(0)}, ("hit_policy.window_pages", "out_of_range")),
        ({"hit_policy": TrailingPages(65_537)}, ("hit_policy.window_pages", "out_of_range")),
        ({"hit_policy": TrailingPages(1.5)}, ("hit_policy.window_pages", "bad_type")),
        ({"hit_policy": BlockGroups(0, 1)}, ("hit_policy.block", "out_of_range")),
        ({"hit_policy": BlockGroups(1, 0)}, ("hit_policy.group", "out_of_range")),
        ({"hit_policy": "all_pages"}, ("hit_policy", "unknown")),
    ],
    ids=str,
)
def test_a_pool_that_breaks_a_rule_is_refused_by_field(changed, fault):
    with pytest.raises(InvalidInput) as error:
        replace(KV, **changed)
    assert faults(error) == [fault]


def test_limits_are_inclusive():
    many = tuple(Part(f"k{i}", "x" * 64, MAX_PART_BYTES) for i in range(MAX_PARTS))
    spec = PoolSpec("k" * 64, many, MAX_SHARDS, BlockGroups(65_536, 65_536))
    assert spec.bytes_per_page == MAX_PARTS * MAX_PART_BYTES
    assert RankPool(spec, (0, MAX_SHARDS - 1), MAX_JSON_INT).owned_shards == (0, MAX_SHARDS - 1)


def test_every_fault_of_a_pool_is_listed_at_once():
    with pytest.raises(InvalidInput) as error:
        PoolSpec("a/b", (Part("", "", -1),), 0, TrailingPages(0), object_layout="x")
    assert [field for field, _ in faults(error)] == [
        "name", "shard_count", "object_layout", "parts[0].part", "parts[0].bytes", "parts[0].dtype",
        "hit_policy.window_pages",
    ]  # fmt: skip


@given(logical_specs)
def test_a_logical_pool_has_no_bytes(spec):
    assert spec.parts == ()
    assert spec.bytes_per_page == 0


def test_a_part_without_bytes_does_not_make_a_logical_pool_physical():
    assert PoolSpec("kv", (Part("k", "uint8", 0),), logical=True) == PoolSpec("kv", (), logical=True)


@pytest.mark.parametrize(
    ("owned", "host_bytes", "fault"),
    [
        ((1, 0), None, ("owned_shards", "not_ascending")),
        ((0, 0), None, ("owned_shards", "not_ascending")),
        ((8,), None, ("owned_shards", "out_of_range")),
        ((-1,), None, ("owned_shards", "out_of_range")),
        ((False, 1), None, ("owned_shards", "bad_type")),
        (("0",), None, ("owned_shards", "bad_type")),
        ((), -1, ("host_bytes", "out_of_range")),
        ((), 1.5, ("host_bytes", "bad_type")),
    ],
    ids=str,
)
def test_a_rank_owns_shards_that_exist_each_once_ascending(owned, host_bytes, fault):
    with pytest.raises(InvalidInput) as error:
        RankPool(KV, owned, host_bytes)
    assert faults(error) == [fault]


@given(st.lists(st.integers(-2, 6), max_size=5), st.integers(1, 5))
def test_shards_are_right_exactly_when_they_are_a_sorted_set_within_range(shards, count):
    good = shards == [s for s in range(count) if s in shards]
    assert (shard_errors("shards", shards, count) == []) == good


def test_a_rank_may_own_no_shard_and_hold_no_known_amount_of_memory():
    assert RankPool(KV, ()).host_bytes is None
    assert RankPool(KV, (), 0).host_bytes == 0


# The pools of a rank together


@pytest.mark.parametrize("specs_by_name", [DEEPSEEK_V4, MHA_SWA])
def test_the_pools_of_real_models_fit_together(specs_by_name):
    validate_pool_set([RankPool(spec, (0,)) for spec in specs_by_name.values()])


def test_a_pool_of_a_name_nobody_heard_of_is_accepted():
    validate_pool_set([RankPool(pool("kv"), (0,)), RankPool(pool("next_years_pool", "kv"), (0,))])


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ([], [("pools", "empty")]),
        ([pool("kv"), pool("kv")], [("pools[1].name", "duplicate")]),
        ([pool("kv"), pool("swa", "kvv")], [("pools[1].indices_from", "unknown_pool")]),
        ([pool("kv"), pool("a", "b"), pool("b", "zz")], [
            ("pools[1].indices_from", "unknown_pool"), ("pools[2].indices_from", "unknown_pool"),
        ]),
        ([pool("kv"), pool("a", "a")], [("pools[1].indices_from", "cycle")]),
        ([pool("kv"), pool("a", "b"), pool("b", "c"), pool("c", "b")], [
            ("pools[1].indices_from", "cycle"),
            ("pools[2].indices_from", "cycle"),
            ("pools[3].indices_from", "cycle"),
        ]),
        ([pool("swa"), pool("kv", "swa")], [("pools[1].indices_from", "anchor")]),
        ([pool("kv"), pool("swa", logical=True)], [("pools[1].logical", "not_anchor")]),
        ([pool("kv", logical=True)], [("pools", "anchor_without_bytes")]),
        (
            [pool("swa"), replace(pool("kv"), hit_policy=BlockGroups(1, 1))],
            [("pools[1].hit_policy.kind", "anchor")],
        ),
        ([replace(pool("kv"), hit_policy=TrailingPages(1))], [("pools[0].hit_policy.kind", "anchor")]),
        ([pool("kv", logical=True), pool("swa")], [("pools", "anchor_without_bytes")]),
        ([pool("kv")] + [pool(f"p{i}") for i in range(MAX_POOL_VARIANTS)], [("pools", "too_many")]),
    ],
)  # fmt: skip
def test_pools_that_do_not_fit_together_are_refused_by_field(pools, expected):
    with pytest.raises(InvalidInput) as error:
        validate_pool_set([RankPool(spec, ()) for spec in pools])
    assert faults(error) == expected


def test_as_many_pools_as_the_index_has_bits_are_accepted():
    validate_pool_set(
        [RankPool(pool("kv"), ())] + [RankPool(pool(f"p{i}"), ()) for i in range(MAX_POOL_VARIANTS - 1)]
    )


# Order (O1) and the logical anchor (P1)


def test_pools_derive_from_a_source_directly_and_through_others():
    assert derived_from("kv", DEEPSEEK_V4) == ["deepseek_v4_c128", "deepseek_v4_c4", "deepseek_v4_c4_indexer"]
    assert derived_from("deepseek_v4_c4", DEEPSEEK_V4) == ["deepseek_v4_c4_indexer"]
    assert derived_from("swa", MHA_SWA) == ["draft_swa"]
    assert derived_from("draft", MHA_SWA) == []
    assert derived_from("absent", MHA_SWA) == []


def test_a_cycle_does_not_hang_the_walk():
    looped = by_name(pool("a", "b"), pool("b", "a"))
    assert derived_from("a", looped) == ["b"]


def test_the_bytes_of_a_logical_anchor_are_those_of_the_pools_that_derive_from_it():
    assert anchor_pools(MHA_SWA) == ["kv"]
    assert anchor_pools(DEEPSEEK_V4) == ["deepseek_v4_c128", "deepseek_v4_c4", "deepseek_v4_c4_indexer"]
    assert anchor_pools(by_name(pool("swa"))) == []


def test_the_anchor_goes_first_then_what_derives_from_it_then_the_rest():
    assert write_stages(MHA_SWA) == [["kv"], ["draft"], ["draft_swa", "swa"]]


def test_a_logical_anchor_takes_no_stage():
    assert write_stages(DEEPSEEK_V4) == [
        ["deepseek_v4_c128", "deepseek_v4_c4", "deepseek_v4_c4_indexer"],
        ["deepseek_v4_c4_state", "swa"],
    ]


def test_empty_stages_are_left_out():
    assert write_stages(by_name(pool("kv"))) == [["kv"]]
    assert write_stages(by_name(pool("kv", logical=True))) == []
    assert write_stages(by_name(pool("mamba"))) == [["mamba"]]
    assert write_stages({}) == []


@st.composite
def pool_sets(draw):
    """Any registration that validates: a forest of pools, some hanging from the anchor."""
    names = draw(st.lists(st.sampled_from("abcdefg"), unique=True))
    logical = draw(st.booleans())
    pools = [pool("kv", logical=logical)]
    for name in names:
        source = draw(st.sampled_from([None, *[p.name for p in pools]]))
        pools.append(pool(name, source))
    if logical:
        pools.append(pool("z", "kv"))
    return by_name(*draw(st.permutations(pools)))


@given(pool_sets())
def test_every_pool_with_bytes_is_in_one_stage_and_kv_derived_pools_come_after_it(specs_by_name):
    validate_pool_set([RankPool(spec, ()) for spec in specs_by_name.values()])
    stages = write_stages(specs_by_name)
    flat = [name for stage in stages for name in stage]
    assert sorted(flat) == sorted(name for name, spec in specs_by_name.items() if not spec.logical)
    assert all(stages)
    assert set(stages[0]) == set(anchor_pools(specs_by_name))
    for name in specs_by_name:
        at, hangs = name, False
        while at is not None:
            hangs = hangs or at == "kv"
            at = specs_by_name[at].indices_from
        if name != "kv":
            assert (name in derived_from("kv", specs_by_name)) == hangs


@given(parts(min_bytes=0), st.integers(1, MAX_SHARDS))
def test_equal_registrations_are_equal_values(some_parts, shard_count):
    assume(any(p.bytes for p in some_parts))
    assert PoolSpec("kv", some_parts, shard_count) == PoolSpec("kv", some_parts, shard_count, AllPages())
