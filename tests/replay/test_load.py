"""Traces and generated loads: read exactly, refused with the line at fault, the same every time."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caketin.replay.pool_sets import POOL_SETS, rank_pools
from caketin.replay.trace import VOCABULARY, Load, generate, read_trace, tokens
from metadata.errors import InvalidInput
from metadata.page_hash import page_hashes
from metadata.pools import validate_pool_set
from tests.replay.oracle import prefix_ids


def trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_trace_is_read_in_order_and_up_to_the_limit(tmp_path: Path):
    path = trace(
        tmp_path, '{"timestamp": 0, "hash_ids": [0, 1]}', '{"hash_ids": [0, 2, 3]}', '{"hash_ids": []}'
    )
    assert read_trace(path) == Load("trace.jsonl", [[0, 1], [0, 2, 3], []])
    assert read_trace(path, limit=1).requests == [[0, 1]]
    assert (read_trace(path).pages, read_trace(path).longest) == (5, 3)


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", '{"timestamp": 1}', '{"hash_ids": "0"}', '{"hash_ids": [0.5]}', '{"hash_ids": [-1]}'],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str):
    with pytest.raises(InvalidInput, match=r"line 2 of trace\.jsonl"):
        read_trace(trace(tmp_path, '{"hash_ids": [0]}', line))


def test_a_missing_or_empty_trace_is_refused(tmp_path: Path):
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(InvalidInput, match="has no request"):
        read_trace(trace(tmp_path))


def test_the_generated_load_is_the_same_every_time_and_shares_prefixes():
    load = generate(100)
    assert load == generate(100)
    assert load != generate(100, seed=8)
    assert len(load.requests) == 100
    distinct = {page for ids in load.requests for page in prefix_ids(ids)}
    assert len(distinct) < load.pages / 2


@given(
    a=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6, unique=True),
    b=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6, unique=True),
)
def test_equal_ids_mean_equal_page_hashes_exactly_while_the_prefix_is_equal(a, b):
    hashes = [page_hashes(tokens(ids, 8), 8) for ids in (a, b)]
    equal = [x == y for x, y in zip(*hashes, strict=False)]
    same = [x == y for x, y in zip(prefix_ids(a), prefix_ids(b), strict=False)]
    assert equal == same


def test_tokens_are_token_ids():
    made = tokens([0, 7, 1 << 49], 512)
    assert made.dtype == np.uint32
    assert made.shape == (3 * 512,)
    assert made.max() < VOCABULARY
    assert len(np.unique(made)) > 1000


@pytest.mark.parametrize("name", POOL_SETS)
@pytest.mark.parametrize("page_bytes", [16, 512, 4096, 7_437_888])
def test_a_pool_set_fits_together_and_has_about_the_bytes_that_were_asked_for(name: str, page_bytes: int):
    pools = rank_pools(name, page_bytes)
    validate_pool_set(pools)
    parts = sum(len(p.spec.parts) for p in pools)
    size = sum(p.spec.bytes_per_page for p in pools)
    assert page_bytes - parts <= size <= page_bytes + 16 * parts


@pytest.mark.parametrize(
    ("name", "size", "field"),
    [("gpt", 512, "--pools"), ("mha-swa", 0, "--page-bytes"), ("mha-swa", 1 << 31, "--page-bytes")],
)
def test_an_unknown_pool_set_or_size_is_named(name: str, size: int, field: str):
    with pytest.raises(InvalidInput) as refused:
        rank_pools(name, size)
    assert refused.value.errors[0].field == field
