"""`caketin size`: the curve against a real LRU, a simulator by other hands, and the published numbers."""

import json
import subprocess
import sys
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_lines

from caketin.model_bytes import model_bytes
from caketin.model_config import find_config
from caketin.replay.trace import generate
from caketin.sizing import hit_curve
from tests.servers import stack

__all__ = ["stack"]

PAGE_TOKENS = 512


def lru_hits(requests: list[list[int]], size: int, first: int) -> int:
    """Hits of an LRU that is really kept: prefixes only, deepest page used first."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for index, pages in enumerate(requests):
        prefix = next((i for i, page in enumerate(pages) if page not in kept), len(pages))
        hits += prefix if index >= first else 0
        for page in reversed(pages):
            kept[page] = None
            kept.move_to_end(page)
            if len(kept) > size:
                kept.popitem(last=False)
    return hits


@st.composite
def chains(draw) -> list[list[int]]:
    """Requests as paths of a tree: an id stands for the whole prefix up to it."""
    ids: dict[tuple[int, ...], int] = {}
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
    return [[ids.setdefault(tuple(p[: n + 1]), len(ids)) for n in range(len(p))] for p in paths]


@given(chains(), st.integers(0, 3))
def test_the_curve_is_what_an_lru_of_each_size_finds(requests: list[list[int]], quarters: int) -> None:
    curve = hit_curve(requests, quarters / 4)
    first = int(len(requests) * quarters / 4)
    assert curve.asked_pages == sum(map(len, requests[first:]))
    for size in range(curve.distinct_pages + 1):
        # Within a request its own pages push each other out only where it is longer than the cache.
        if size == 0 or size >= max(map(len, requests)):
            assert curve.hits[size] == lru_hits(requests, size, first), size


@given(chains())
def test_a_larger_cache_finds_no_less(requests: list[list[int]]) -> None:
    hits = hit_curve(requests, 0).hits
    assert hits[0] == 0
    assert all(a <= b for a, b in pairwise(hits))


def test_the_size_for_a_hit_rate_is_the_smallest_that_has_it() -> None:
    curve = hit_curve(generate(100).requests, 0.5)
    most = curve.hit_rate(curve.distinct_pages)
    for rate in (0.0, most / 3, most):
        pages = curve.pages_for(rate)
        assert pages is not None
        assert curve.hit_rate(pages) >= rate - 1e-9
        assert pages == 0 or curve.hit_rate(pages - 1) < rate - 1e-9
    assert curve.pages_for(min(1.0, most + 0.01)) is None


def judged(requests: list[list[int]], size: int) -> float:
    """Hits by kvcache-simulator."""
    lines = [
        json.dumps({"timestamp": i, "input_length": PAGE_TOKENS * len(r), "output_length": 1,
                    "block_size": PAGE_TOKENS, "hash_ids": r})
        for i, r in enumerate(requests)
    ]  # fmt: skip
    found = simulate_policy(build_execution_plan(parse_trace_lines(lines), 0.5), "lru", size)
    assert found.measurementMode == "fixed_window", "the cache was not full when measuring began"
    return found.hitTokens / PAGE_TOKENS


@pytest.mark.parametrize("size", [60, 100, 200, 400])
def test_the_simulator_of_others_finds_the_same(size: int) -> None:
    requests = generate(400).requests
    assert hit_curve(requests, 0.5).hits[size] == judged(requests, size)


@pytest.mark.trace
@pytest.mark.timeout(300)
def test_the_published_trace_has_the_published_hits_and_the_simulators(conversation_trace: Path) -> None:
    requests = [json.loads(line)["hash_ids"] for line in conversation_trace.read_text().splitlines()]
    whole = hit_curve(requests, 0)
    assert (whole.asked_pages, whole.distinct_pages, whole.hits[-1]) == (288_500, 182_790, 105_710)
    curve = hit_curve(requests, 0.5)
    for size in (5_712, 45_697):
        assert curve.hits[size] == judged(requests, size)
    # What docs/install.md says.
    pages = curve.pages_for(0.3)
    assert pages is not None
    assert round(100 * curve.hit_rate(curve.distinct_pages)) == 39
    token = model_bytes(find_config("deepseek-v4-flash"))
    states = sum(size for pool, size in token.pools.items() if pool.endswith("_state"))
    assert (round(token.per_token / 1e3, 1), round((token.per_token - states) / 1e3, 1)) == (35.8, 29.1)
    assert round(pages * PAGE_TOKENS * token.per_token / (1 << 30)) == 350


def size(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "caketin", "size", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps({"hash_ids": r}) for r in generate(100).requests))
    return file


def test_the_command_says_what_each_size_brings_and_what_a_hit_rate_takes(trace: Path) -> None:
    done = size(str(trace), "--bytes-per-token", "1024", "--hit-rate", "50", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (wanted,) = told["wanted"]
    assert wanted["gib"] == round(wanted["pages"] * 1024 * PAGE_TOKENS / (1 << 30), 3)
    rates = [row["hit_rate"] for row in told["sizes"]]
    assert rates == sorted(rates)
    assert rates[-1] >= 0.5
    assert "hit rate" in size(str(trace), "--bytes-per-token", "1024").stdout


def test_a_hit_rate_that_no_size_has_is_told_and_ends_with_1(trace: Path) -> None:
    done = size(str(trace), "--bytes-per-token", "1024", "--hit-rate", "100")
    assert done.returncode == 1
    assert "no size: the trace has" in done.stdout


def test_the_bytes_of_a_token_come_from_the_model(trace: Path, tmp_path: Path) -> None:
    done = size(str(trace), "--model", "deepseek-v4-flash", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (round(told["bytes_per_token"]), told["page_size"], len(told["pools"])) == (35_774, 256, 6)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 128}))
    done = size(str(trace), "--model", str(tmp_path), "--kv-dtype", "fp8", "--tp", "8")
    assert done.returncode == 0, done.stderr
    assert "4,096 bytes a token, in pages of 64 tokens: kv 4,096" in done.stdout


def test_states_that_count_once_a_page_are_told_to_be_the_most(trace: Path) -> None:
    named = (str(trace), "--model", "qwen3-next-80b-a3b")
    assert "--state-tokens" in size(*named).stdout
    told = size(*named, "--state-tokens", "8192", "--page-size", "128")
    assert "in pages of 128 tokens: kv 24,576, mamba 9,432" in told.stdout
    assert "--state-tokens" not in told.stdout


ONE_OF = "give one of --model, --bytes-per-token and --namespace"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], ONE_OF),
        (["--bytes-per-token", "1", "--namespace", "x"], ONE_OF),
        (["--model", "qwen3-8b", "--namespace", "x"], ONE_OF),
        (["--model", "qwen3-8b", "--bytes-per-token", "1"], ONE_OF),
        (["--bytes-per-token", "1", "--tp", "1"], "--tp goes with --model"),
        (["--model", "qwen3-8c"], "known are deepseek-r1, deepseek-v3"),
        (["--model", "/dev/null"], "give --bytes-per-token or --namespace instead"),
        (["--bytes-per-token", "inf"], "--bytes-per-token"),
        (["--bytes-per-token", "nan"], "--bytes-per-token"),
        (["--namespace", "9f86d081884c7d65", "--url", "http://127.0.0.1:1"], "does not say"),
    ],
)
def test_what_is_missing_is_told(trace: Path, arguments: list[str], says: str) -> None:
    done = size(str(trace), *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def test_the_bytes_of_a_token_come_from_what_engines_registered(trace: Path, stack) -> None:
    pools = [
        {
            "name": "kv",
            "logical": False,
            "parts": [{"part": part, "dtype": "uint8", "bytes": 4096} for part in ("k", "v")],
            "shard_count": 2,
            "owned_shards": [0],
            "hit_policy": {"kind": "all_pages"},
            "indices_from": None,
            "object_layout": "page_first",
        }
    ]
    body = {
        "incarnation": "ab" * 16,
        "namespace": {"model": "m", "revision": "1", "page_size": 64, "hash_kind": "plain"},
        "pools": pools,
    }
    answer = httpx.put(f"{stack.url}/v1/engines/e/ranks/dp0-pp0-cp0-tp0", json=body, trust_env=False)
    done = size(str(trace), "--namespace", answer.json()["namespace_id"], "--url", stack.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes_per_token"] == 2 * 8192 / 64
