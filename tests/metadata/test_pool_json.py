import json
from dataclasses import replace

import pytest
from hypothesis import given

from metadata.errors import FieldError, InvalidInput
from metadata.pool_json import (
    policy_from_json,
    policy_to_json,
    rank_pool_from_json,
    rank_pool_to_json,
    spec_differences,
)
from metadata.pools import AllPages, BlockGroups, Part, PoolSpec, RankPool, TrailingPages
from tests.metadata.specs import policies, rank_pools

PARTS = (Part("k", "bfloat16", 64), Part("v", "bfloat16", 64))
POOL = RankPool(PoolSpec("swa", PARTS, 8, TrailingPages(2), "kv"), (0, 1), 4096)


@given(rank_pools())
def test_json_gives_the_pool_back(pool):
    assert rank_pool_from_json(json.loads(json.dumps(rank_pool_to_json(pool)))) == pool


@given(policies)
def test_json_gives_the_policy_back(policy):
    assert policy_from_json(json.loads(json.dumps(policy_to_json(policy)))) == policy


def test_a_pool_is_written_as_the_contract_has_it():
    assert rank_pool_to_json(POOL) == {
        "name": "swa",
        "logical": False,
        "parts": [
            {"part": "k", "dtype": "bfloat16", "bytes": 64},
            {"part": "v", "dtype": "bfloat16", "bytes": 64},
        ],
        "shard_count": 8,
        "owned_shards": [0, 1],
        "hit_policy": {"kind": "trailing_pages", "window_pages": 2},
        "indices_from": "kv",
        "object_layout": "page_first",
        "host_bytes": 4096,
    }
    assert policy_to_json(AllPages()) == {"kind": "all_pages"}
    assert policy_to_json(BlockGroups(4, 2)) == {"kind": "block_groups", "block": 4, "group": 2}


def test_fields_with_a_default_may_be_left_out():
    short = rank_pool_to_json(RankPool(PoolSpec("kv", PARTS), (0,)))
    full = dict(short)
    for name in ("logical", "indices_from", "object_layout", "host_bytes"):
        del short[name]
    assert rank_pool_from_json(short) == rank_pool_from_json(full)


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({}, "hit_policy.kind"),
        ({"kind": "first_pages"}, "hit_policy.kind"),
        ({"kind": "trailing_pages"}, "hit_policy.window_pages"),
        ({"kind": "trailing_pages", "window_pages": 1.5}, "hit_policy.window_pages"),
        ({"kind": "trailing_pages", "window_pages": "1"}, "hit_policy.window_pages"),
        ({"kind": "block_groups", "group": 1}, "hit_policy.block"),
        ({"kind": "block_groups", "block": 1, "group": None}, "hit_policy.group"),
    ],
    ids=str,
)
def test_a_policy_that_breaks_a_rule_is_refused_by_field_and_never_rounded(policy, field):
    with pytest.raises(InvalidInput) as error:
        rank_pool_from_json({**rank_pool_to_json(POOL), "hit_policy": policy})
    assert [e.field for e in error.value.errors] == [field]


@given(rank_pools())
def test_a_pool_does_not_differ_from_itself(pool):
    assert spec_differences(pool, rank_pool_from_json(rank_pool_to_json(pool))) == []


@pytest.mark.parametrize(
    ("new", "differences"),
    [
        (
            replace(POOL, spec=replace(POOL.spec, parts=(PARTS[0],))),
            {
                "parts": 'was [{"part": "k", "dtype": "bfloat16", "bytes": 64}, '
                '{"part": "v", "dtype": "bfloat16", "bytes": 64}], '
                'now [{"part": "k", "dtype": "bfloat16", "bytes": 64}]'
            },
        ),
        (replace(POOL, spec=replace(POOL.spec, shard_count=4)), {"shard_count": "was 8, now 4"}),
        (replace(POOL, owned_shards=(1,)), {"owned_shards": "was [0, 1], now [1]"}),
        (
            replace(POOL, spec=replace(POOL.spec, hit_policy=TrailingPages(3))),
            {
                "hit_policy": 'was {"kind": "trailing_pages", "window_pages": 2}, '
                'now {"kind": "trailing_pages", "window_pages": 3}'
            },
        ),
        (replace(POOL, spec=replace(POOL.spec, indices_from=None)), {"indices_from": 'was "kv", now null'}),
        (
            replace(POOL, spec=replace(POOL.spec, object_layout="layer_first")),
            {"object_layout": 'was "page_first", now "layer_first"'},
        ),
        (
            replace(POOL, spec=replace(POOL.spec, parts=(), logical=True)),
            {
                "parts": 'was [{"part": "k", "dtype": "bfloat16", "bytes": 64}, '
                '{"part": "v", "dtype": "bfloat16", "bytes": 64}], now []',
                "logical": "was false, now true",
            },
        ),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)
def test_every_field_that_changed_is_named_with_both_values(new, differences):
    assert spec_differences(POOL, new) == [
        FieldError(field, "changed", detail) for field, detail in differences.items()
    ]


def test_what_is_only_for_the_operators_eyes_is_no_change():
    assert spec_differences(POOL, replace(POOL, host_bytes=None)) == []


def test_a_listed_part_of_zero_bytes_is_no_change():
    padded = replace(POOL.spec, parts=(*PARTS, Part("temporal", "float32", 0)))
    assert spec_differences(POOL, replace(POOL, spec=padded)) == []
