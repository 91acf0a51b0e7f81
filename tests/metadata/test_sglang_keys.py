import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.errors import InvalidInput, UnknownPool
from metadata.sglang_keys import SglangKey, SglangLayout, SglangPool

VECTORS = json.loads((Path(__file__).parent / "data" / "sglang_object_keys.json").read_text())["vectors"]
HASH = b"\xaa" * 32
HEX = HASH.hex()

# What a case's label says about the pool, where pool name and engine leave it open.
POOL_OF_CASE = {
    "mamba, two conv states": {"conv_states": 2},
    "mamba on mla": {"conv_states": 2},
    "mamba, conv only (no temporal state)": {"conv_states": 1, "temporal": False},
    "mha draft on mla": {"attention": "mha"},
}


def layout_of(vector) -> SglangLayout:
    return SglangLayout(
        **vector["engine"], pools=(SglangPool(vector["pool"], **POOL_OF_CASE.get(vector["case"], {})),)
    )


def fields(error: pytest.ExceptionInfo[InvalidInput]) -> list[str]:
    return [e.field for e in error.value.errors]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['case']}-{v['pool']}")
def test_keys_are_those_of_sglangs_own_builder(vector):
    layout = layout_of(vector)
    page_hash = bytes.fromhex(vector["page_hash"])
    assert layout.object_keys(vector["pool"], [page_hash]) == [vector["keys"]]
    parsed = [layout.parse(key) for key in vector["keys"]]
    assert {(p.page_hash, p.pool, p.shard) for p in parsed} == {
        (page_hash, vector["pool"], layout.own_shard(vector["pool"]))
    }
    assert len({p.part for p in parsed}) == len(parsed)


def test_the_vectors_hold_ranks_stages_tags_and_both_kinds():
    engines = [v["engine"] for v in VECTORS]
    assert len(VECTORS) == 80
    assert {e["attention"] for e in engines} == {"mha", "mla"}
    assert {e["tp_rank"] for e in engines} > {0}
    assert {e["pp_size"] for e in engines} == {1, 2}
    assert {e["extra_backend_tag"] for e in engines} == {None, "teamA"}


@pytest.mark.parametrize(
    ("pool", "attention", "suffixes"),
    [
        # As SGLang 0.5.23's `_get_hybrid_page_component_keys` answers at TP rank 3, stage 1 of 4.
        (SglangPool("draft_swa", "mha"), "mla", ["_3_1_draft_swa_k", "_3_1_draft_swa_v"]),
        (SglangPool("draft_swa", "mla"), "mha", ["_1_draft_swa"]),
        (SglangPool("draft", "mla"), "mha", ["_1_draft_k"]),
        (SglangPool("draft_indexer"), "mha", ["_1_draft_indexer"]),
        (SglangPool("indexer"), "mha", ["_1_indexer"]),
        (SglangPool("deepseek_v4_c128_state"), "mla", ["_1_deepseek_v4_c128_state"]),
    ],
)
def test_pools_beyond_the_vectors_follow_the_rule(pool, attention, suffixes):
    layout = SglangLayout("m", tp_rank=3, tp_size=8, pp_rank=1, pp_size=4, attention=attention, pools=(pool,))
    assert layout.suffixes(pool.name) == suffixes


@pytest.mark.parametrize(
    ("tag", "model", "prefix"),
    [
        (None, None, ""),
        (None, "", ""),
        (None, "a/b/c", "a-b-c_"),
        ("t", None, "t_"),
        ("t/u", "m", "t/u_m_"),
        ("", "m", "_m_"),
        ("", None, "_"),
    ],
)
def test_tag_and_model_stand_before_the_hash(tag, model, prefix):
    layout = SglangLayout(model, tag)
    assert layout.object_keys("kv", [HASH]) == [[f"{prefix}{HEX}_0_k", f"{prefix}{HEX}_0_v"]]


@st.composite
def layouts(draw):
    tp_size, pp_size = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    attention = draw(st.sampled_from(["mha", "mla"]))
    own = st.sampled_from([None, "mha", "mla"])
    candidates = [
        SglangPool("kv"),
        SglangPool("swa"),
        SglangPool("mamba", conv_states=draw(st.integers(1, 3)), temporal=draw(st.booleans())),
        SglangPool("draft", draw(own)),
        SglangPool("draft_swa", draw(own)),
        SglangPool("indexer"),
        SglangPool("deepseek_v4_c4"),
    ]
    pools = draw(st.lists(st.sampled_from(candidates), min_size=1, unique=True))
    return SglangLayout(
        draw(st.sampled_from([None, "a/b", "kv_0"])),
        draw(st.sampled_from([None, "", "t_1"])),
        draw(st.integers(0, tp_size - 1)),
        tp_size,
        draw(st.integers(0, pp_size - 1)),
        pp_size,
        attention,
        tuple(pools),
    )


@given(layouts(), st.binary(min_size=32, max_size=32))
def test_every_key_of_every_rank_parses_back_and_no_two_are_equal(layout, page_hash):
    seen = set()
    for pool in layout.pools:
        shards = list(range(layout.shard_count(pool.name)))
        keys = layout.object_keys(pool.name, [page_hash], shards)[0]
        parsed = [layout.parse(key) for key in keys]
        per_shard = len(keys) // len(shards)
        assert [(p.page_hash, p.pool, p.shard) for p in parsed] == [
            (page_hash, pool.name, shard) for shard in shards for _ in range(per_shard)
        ]
        assert not seen & set(keys)
        seen |= set(keys)


@given(layouts())
def test_a_ranks_own_shard_is_the_one_its_keys_name(layout):
    for pool in layout.pools:
        own = layout.own_shard(pool.name)
        assert layout.suffixes(pool.name) == layout.suffixes(pool.name, [own])


def test_ranks_of_a_sharded_pool_write_apart_and_of_a_replicated_pool_alike():
    engine = SglangLayout(
        "m", tp_size=4, attention="mla", pools=(SglangPool("kv"), SglangPool("draft", "mha"))
    )
    other = replace(engine, tp_rank=3)
    assert engine.object_keys("kv", [HASH]) == other.object_keys("kv", [HASH])
    assert not set(engine.suffixes("draft")) & set(other.suffixes("draft"))
    assert (engine.shard_count("kv"), engine.shard_count("draft")) == (1, 4)


@pytest.mark.parametrize(
    "key",
    [
        "",
        f"m_{HEX}",
        f"m_{HEX}_0_k ",
        f"m_{HEX}_4_k",
        f"m_{HEX}_00_k",
        f"m_{HEX}_0_w",
        f"m_{HEX}__k",
        f"m_{HEX.upper()}_0_k",
        f"m_{HEX[:-1]}_0_k",
        f"n_{HEX}_0_k",
        f"{HEX}_0_k",
        f"m_{HEX}_0_swa_k",
        f"ct1/9f86d081884c7d65/{HEX}/3f2a91bc.0/k",
    ],
)
def test_a_key_that_no_rank_of_the_layout_writes_is_refused(key):
    layout = SglangLayout("m", tp_size=4)
    assert layout.parse(f"m_{HEX}_3_v") == SglangKey(HASH, "kv", 3, "v")
    with pytest.raises(InvalidInput) as error:
        layout.parse(key)
    assert fields(error) == ["key"]


@pytest.mark.parametrize(
    "suffix",
    [
        "_0_k",
        "_3_0_k",
        "_0_2_k",
        "_0_01_k",
        "_00_1_k",
        "__k",
        "_0_1_1_k",
        "_0__k",
        "__0_k",
        "_0_99999_k",
        "_0_1_",
    ],
)
def test_with_pipeline_stages_a_key_names_rank_and_stage_within_their_sizes(suffix):
    layout = SglangLayout("m", tp_size=3, pp_size=2)
    assert layout.parse(f"m_{HEX}_2_1_k").shard == 5
    with pytest.raises(InvalidInput):
        layout.parse(f"m_{HEX}{suffix}")


@pytest.mark.parametrize("suffix", ["__k", "_2_k", "_0_0_k", "_00_k"])
def test_a_replicated_pool_names_the_stage_only(suffix):
    layout = SglangLayout("m", tp_size=3, pp_size=2, attention="mla")
    assert layout.parse(f"m_{HEX}_1_k").shard == 1
    with pytest.raises(InvalidInput):
        layout.parse(f"m_{HEX}{suffix}")


def test_the_largest_layout_costs_no_more_than_a_small_one():
    pools = (SglangPool("kv"), SglangPool("mamba", conv_states=63), *(SglangPool(f"p{i}") for i in range(60)))
    layout = SglangLayout("m", tp_size=4096, pools=pools)
    assert layout.parse(f"m_{HEX}_4095_conv_62") == SglangKey(HASH, "mamba", 4095, "conv_62")


@pytest.mark.parametrize("shards", [[1, 0], [4], [-1]])
def test_shards_must_ascend_and_exist(shards):
    with pytest.raises(InvalidInput) as error:
        SglangLayout("m", tp_size=4).suffixes("kv", shards)
    assert set(fields(error)) == {"shards"}


def test_a_pool_the_layout_does_not_list_is_unknown():
    with pytest.raises(UnknownPool, match="'swa'"):
        SglangLayout("m").suffixes("swa")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": 4097}, "tp_size"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank"),
        ({"tp_rank": -1}, "tp_rank"),
        ({"pp_size": 2, "pp_rank": 2}, "pp_rank"),
        ({"pp_size": "2"}, "pp_size"),
        ({"tp_size": 4096, "pp_size": 2}, "pp_size"),
        ({"attention": "gqa"}, "attention"),
        ({"pools": (SglangPool("kv"), SglangPool("kv"))}, "pools[1].name"),
        ({"pools": (SglangPool("k v"),)}, "pools[0].name"),
        ({"pools": (SglangPool("0_swa"),)}, "pools[0].name"),
        ({"pools": (SglangPool("_kv"),)}, "pools[0].name"),
        ({"pools": (SglangPool("kv", "mla"),)}, "pools[0].attention"),
        ({"pools": (SglangPool("draft", "gqa"),)}, "pools[0].attention"),
        ({"pools": (SglangPool("kv", conv_states=1),)}, "pools[0].conv_states"),
        ({"pools": (SglangPool("mamba", conv_states=-1),)}, "pools[0].conv_states"),
        ({"pools": (SglangPool("mamba", temporal=False),)}, "pools[0].conv_states"),
        # The latent kv of an MLA engine writes objects named "k", and so would a packed pool of that name.
        ({"attention": "mla", "pools": (SglangPool("kv"), SglangPool("k"))}, "pools[1].name"),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused_by_field(arguments, field):
    with pytest.raises(InvalidInput) as error:
        SglangLayout("m", **arguments)
    assert set(fields(error)) == {field}
