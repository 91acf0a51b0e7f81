"""A pool and its memory: keys and buffers name the same objects in the same order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.bound_pool import BoundPool
from dataplane.host_memory import HostMemory
from dataplane.host_pool import LayerBuffers, Region, layer_first
from metadata.errors import InvalidInput
from metadata.object_keys import parse
from metadata.pools import AllPages, Part, PoolSpec, RankPool
from tests.dataplane.mover_world import NS, page_hash, shapes


@settings(deadline=None, max_examples=50)
@given(shapes("kv", AllPages(), None), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_buffer_i_is_the_memory_of_the_object_that_key_i_names(shape, slots):
    spec = shape.pool.spec
    memories = {s: HostMemory(spec, 5, layers=shape.layers) for s in shape.pool.owned_shards}
    bound = BoundPool(shape.pool, tuple(m.pool for m in memories.values()))
    keys = bound.keys(NS, [page_hash(i) for i in range(len(slots))])
    buffers = bound.buffers(np.array(slots))
    assert buffers.count == len(keys) == len(slots) * bound.objects_per_page
    assert buffers.sizes.tolist() == bound.object_sizes.tolist() * len(slots)
    for i, key in enumerate(keys):
        named = parse(key)
        page = i // bound.objects_per_page
        assert named.page_hash == page_hash(page)
        expected = memories[named.shard].fragments(slots[page], named.part)
        addresses, lengths = buffers.fragments(i)
        assert addresses == [int(f.ctypes.data) for f in expected]
        assert lengths == [f.size for f in expected]
    assert bound.bytes_per_page == int(bound.object_sizes.sum())
    assert bound.slots == 5


def test_shards_with_other_numbers_of_fragments_are_padded_to_the_widest():
    spec = PoolSpec("kv", (Part("k", "uint8", 6),), 2, object_layout="layer_first")
    two = layer_first(spec, 2, [LayerBuffers("k", (0x1000, 0x2000), 3)])
    three = layer_first(spec, 2, [LayerBuffers("k", (0x3000, 0x4000, 0x5000), 2)])
    buffers = BoundPool(RankPool(spec, (0, 1)), (two, three)).buffers(np.array([1]))
    assert [buffers.fragments(i) for i in range(2)] == [
        ([0x1003, 0x2003], [3, 3]),
        ([0x3002, 0x4002, 0x5002], [2, 2, 2]),
    ]


def test_parts_with_other_numbers_of_fragments_are_padded_to_the_widest():
    spec = PoolSpec("kv", (Part("k", "uint8", 6), Part("v", "uint8", 4)), object_layout="layer_first")
    host = layer_first(
        spec, 2, [LayerBuffers("k", (0x1000, 0x2000, 0x3000), 2), LayerBuffers("v", (0x4000,), 4)]
    )
    buffers = BoundPool(RankPool(spec, (0,)), (host,)).buffers(np.array([0, 1]))
    assert [buffers.fragments(i) for i in range(4)] == [
        ([0x1000, 0x2000, 0x3000], [2, 2, 2]),
        ([0x4000], [4]),
        ([0x1002, 0x2002, 0x3002], [2, 2, 2]),
        ([0x4004], [4]),
    ]


def test_a_slot_that_the_pool_does_not_have_gives_no_address():
    spec = PoolSpec("kv", (Part("k", "uint8", 6),))
    bound = BoundPool(RankPool(spec, (0,)), (HostMemory(spec, 2).pool,))
    for slot in (-1, 2):
        with pytest.raises(InvalidInput):
            bound.buffers(np.array([0, slot]))


def test_a_logical_pool_and_one_without_a_shard_here_have_no_memory():
    logical = BoundPool(RankPool(PoolSpec("kv", (), logical=True), (0,)), ())
    assert (logical.slots, logical.objects_per_page, logical.bytes_per_page) == (0, 0, 0)
    assert logical.keys(NS, [page_hash(0)]) == []
    elsewhere = BoundPool(RankPool(PoolSpec("kv", (Part("k", "uint8", 6),), 2), ()), ())
    assert (elsewhere.slots, elsewhere.objects_per_page) == (0, 0)


def host(name="kv", size=8, slots=2, part="k", layout="page_first"):
    spec = PoolSpec(name, (Part(part, "uint8", size),), object_layout=layout)
    if layout == "layer_first":
        return layer_first(spec, slots, [LayerBuffers(part, (0x1000,), size)], [Region(0x1000, 0x1000)])
    return HostMemory(spec, slots).pool


@pytest.mark.parametrize(
    ("hosts", "field"),
    [
        ([], "hosts"),
        ([host()], "hosts"),
        ([host(), host(), host()], "hosts"),
        ([host(), host(slots=3)], "hosts"),
        ([host(), host(name="swa")], "hosts[1].name"),
        ([host(size=9), host()], "hosts[0].parts"),
        ([host(), host(part="v")], "hosts[1].parts"),
        ([host(), host(layout="layer_first")], "hosts[1].object_layout"),
    ],
)
def test_memory_of_another_shape_than_the_pool_is_refused(hosts, field):
    """Else its bytes would be stored under another pool's keys."""
    pool = RankPool(PoolSpec("kv", (Part("k", "uint8", 8),), 2), (0, 1))
    with pytest.raises(InvalidInput) as refused:
        BoundPool(pool, tuple(hosts))
    assert [e.field for e in refused.value.errors] == [field]


@pytest.mark.parametrize("apart", [0, 7])
def test_two_shards_in_the_same_memory_are_refused(apart):
    spec = PoolSpec("kv", (Part("k", "uint8", 8),), 2, object_layout="layer_first")
    one, other = (
        layer_first(spec, 2, [LayerBuffers("k", (0x1000 + at,), 8, 16)], [Region(0x1000, 0x100)])
        for at in (0, apart)
    )
    with pytest.raises(InvalidInput) as refused:
        BoundPool(RankPool(spec, (0, 1)), (one, other))
    assert [(e.field, e.code) for e in refused.value.errors] == [("hosts", "overlap")]


def test_two_shards_side_by_side_in_one_buffer_are_fine():
    spec = PoolSpec("kv", (Part("k", "uint8", 8),), 2, object_layout="layer_first")
    one, other = (
        layer_first(spec, 2, [LayerBuffers("k", (0x1000 + at,), 8, 16)], [Region(0x1000, 0x100)])
        for at in (0, 8)
    )
    assert BoundPool(RankPool(spec, (0, 1)), (one, other)).buffers(np.array([1])).addresses.tolist() == [
        0x1010,
        0x1018,
    ]


def test_a_logical_pool_with_memory_is_refused():
    with pytest.raises(InvalidInput):
        BoundPool(RankPool(PoolSpec("kv", (), logical=True), (0,)), (host(),))
