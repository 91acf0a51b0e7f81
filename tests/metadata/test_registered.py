"""What the registry knows, as values."""

from metadata.namespace import Namespace
from metadata.pools import Part, PoolSpec, RankPool
from metadata.registered import NamespaceView, RankRecord, Variant

KV = PoolSpec("kv", (Part("k", "bfloat16", 8),))
KV8 = PoolSpec("kv", (Part("k", "float8_e4m3fn", 4),))
SWA = PoolSpec("swa", (Part("k", "bfloat16", 8),))


def test_variants_of_a_name_come_by_bit():
    variants = {s.pool_id: Variant(s, bit, b"\1") for s, bit in ((KV8, 2), (SWA, 1), (KV, 0))}
    view = NamespaceView(Namespace("t", "m", "r", 64), variants)
    assert [v.bit for v in view.by_name("kv")] == [0, 2]
    assert view.by_name("mamba") == []
    assert view.namespace_id == view.identity.namespace_id


def test_a_rank_finds_its_pools_by_name():
    pools = (RankPool(KV, (0,)), RankPool(SWA, ()))
    record = RankRecord("e", "dp0-pp0-cp0-tp0", "i", "0" * 16, pools, 1, {}, 1, 0.0)
    assert record.specs == {"kv": KV, "swa": SWA}
    assert record.pool("swa") == pools[1]
    assert record.pool("mamba") is None


def test_shards_that_nobody_registered_are_named():
    spec = PoolSpec("kv", (Part("k", "bfloat16", 8),), shard_count=10)
    assert Variant(spec, 0, b"\xfb\2").missing_shards == [2, 8]
    assert Variant(spec, 0, b"\xff\3").missing_shards == []
    assert Variant(spec, 0, b"").missing_shards == list(range(10))
