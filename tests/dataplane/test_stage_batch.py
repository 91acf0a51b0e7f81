"""A stage as one batch: keys, groups, sizes, buffers and answers in one order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.bound_pool import BoundPool
from dataplane.host_memory import HostMemory
from dataplane.stage_batch import PoolPages, StageBatch
from metadata.object_keys import group_ids, parse
from metadata.pools import AllPages, Part, PoolSpec, RankPool
from tests.dataplane.mover_world import NS, hashes_of, page_hash, shapes


@st.composite
def batches(draw):
    members, memories = [], {}
    for name in draw(st.sampled_from([["kv"], ["a", "b"], ["a", "b", "c"]])):
        shape = draw(shapes(name, AllPages(), None))
        found = {s: HostMemory(shape.pool.spec, 6, layers=shape.layers) for s in shape.pool.owned_shards}
        pages = draw(st.lists(st.integers(0, 5), min_size=0, max_size=4, unique=True))
        slots = draw(st.permutations(range(6)))[: len(pages)]
        bound = BoundPool(shape.pool, tuple(m.pool for m in found.values()))
        members.append(PoolPages(bound, np.array(pages, np.int64), np.array(slots, np.int64)))
        memories[shape.pool.spec.pool_id] = found, dict(zip(pages, slots, strict=True))
    return StageBatch(NS, hashes_of(6), tuple(members)), memories


@settings(deadline=None, max_examples=60)
@given(batches())
def test_keys_groups_sizes_and_buffers_speak_of_the_same_objects(case):
    batch, memories = case
    number = {page_hash(p): p for p in range(6)}
    assert len(batch.keys) == len(set(batch.keys)) == len(batch.groups) == batch.objects
    assert batch.sizes.tolist() == batch.buffers.sizes.tolist()
    for i, key in enumerate(batch.keys):
        named = parse(key)
        found, slot_of = memories[named.pool_id]
        expected = found[named.shard].fragments(slot_of[number[named.page_hash]], named.part)
        assert batch.buffers.fragments(i)[0] == [int(f.ctypes.data) for f in expected]
        assert batch.groups[i] == group_ids(NS, [named.page_hash])[0]


@settings(deadline=None, max_examples=60)
@given(batches())
def test_answers_come_back_by_pool_page_shard_and_part(case):
    batch, _ = case
    keys = np.array(batch.keys, dtype=object)
    seen = []
    for member, of_member in batch.by_shard(keys):
        assert of_member.shape == (len(member.pages), len(member.pool.shards), member.pool.parts)
        for page, of_page in zip(member.pages.tolist(), of_member, strict=True):
            for shard, of_shard in zip(member.pool.shards, of_page, strict=True):
                for part, key in zip(member.pool.pool.spec.parts, of_shard, strict=True):
                    named = parse(key)
                    assert named.page_hash == page_hash(page)
                    assert (named.shard, named.part) == (shard, part.part)
                    assert named.pool_id == member.pool.pool.spec.pool_id
                    seen.append(key)
    assert seen == batch.keys


@pytest.mark.parametrize("slots", [None, np.arange(1), np.arange(3)])
def test_a_batch_without_a_slot_for_each_page_has_no_buffers(slots):
    spec = PoolSpec("kv", (Part("k", "uint8", 8),))
    bound = BoundPool(RankPool(spec, (0,)), (HostMemory(spec, 4).pool,))
    batch = StageBatch(NS, hashes_of(4), (PoolPages(bound, np.arange(2), slots),))
    assert len(batch.keys) == 2
    with pytest.raises(ValueError, match="a slot for each"):
        _ = batch.buffers
