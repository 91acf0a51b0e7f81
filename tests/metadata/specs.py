"""Hypothesis strategies for pools and namespaces."""

from hypothesis import strategies as st

from metadata.namespace import HASH_KINDS, MAX_PAGE_SIZE, Namespace, fingerprint
from metadata.pools import (
    MAX_PART_BYTES,
    OBJECT_LAYOUTS,
    AllPages,
    BlockGroups,
    Part,
    PoolSpec,
    RankPool,
    TrailingPages,
)

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", fullmatch=True)
dtypes = st.sampled_from(["bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8"])
texts = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
policies = st.one_of(
    st.just(AllPages()),
    st.builds(TrailingPages, st.integers(1, 65_536)),
    st.builds(BlockGroups, st.integers(1, 65_536), st.integers(1, 65_536)),
)


def parts(min_bytes: int = 1) -> st.SearchStrategy[tuple[Part, ...]]:
    sizes = st.integers(min_bytes, MAX_PART_BYTES)
    one = st.builds(Part, names, dtypes, sizes)
    return st.lists(one, min_size=1, max_size=5, unique_by=lambda p: p.part).map(tuple)


shard_counts = st.sampled_from([1, 2, 3, 8, 10, 11, 100, 4096])
specs = st.builds(
    PoolSpec,
    name=names,
    parts=parts(),
    shard_count=shard_counts,
    hit_policy=policies,
    indices_from=st.one_of(st.none(), names),
    object_layout=st.sampled_from(OBJECT_LAYOUTS),
)
logical_specs = st.builds(
    PoolSpec, name=names, parts=st.just(()), shard_count=shard_counts, logical=st.just(True)
)
namespaces = st.builds(
    Namespace,
    tenant=texts,
    model=texts,
    revision=texts,
    page_size=st.integers(1, MAX_PAGE_SIZE),
    hash_kind=st.sampled_from(HASH_KINDS),
    salt_fingerprint=st.one_of(st.none(), texts).map(fingerprint),
)


@st.composite
def rank_pools(draw: st.DrawFn) -> RankPool:
    spec = draw(st.one_of(specs, logical_specs))
    owned = draw(st.sets(st.integers(0, spec.shard_count - 1), max_size=4))
    host_bytes = draw(st.one_of(st.none(), st.integers(0, 2**53 - 1)))
    return RankPool(spec, tuple(sorted(owned)), host_bytes)
