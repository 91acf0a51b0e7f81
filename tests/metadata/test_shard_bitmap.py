"""Sets of shards as bitmaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata.shard_bitmap import has_shard, shard_bitmap, shards_in


@given(shards=st.sets(st.integers(0, 99)), extra=st.integers(0, 30))
def test_a_bitmap_names_exactly_its_shards(shards, extra):
    count = max(shards, default=0) + 1 + extra
    bitmap = shard_bitmap(shards, count)
    assert len(bitmap) == (count + 7) // 8
    assert shards_in(bitmap) == sorted(shards)
    assert [s for s in range(count + 20) if has_shard(bitmap, s)] == sorted(shards)


@pytest.mark.parametrize("shard", [-1, 8, 100])
def test_a_shard_that_the_pool_does_not_have_is_no_bit(shard):
    with pytest.raises(IndexError, match=f"shard {shard} of 8"):
        shard_bitmap([shard], 8)
