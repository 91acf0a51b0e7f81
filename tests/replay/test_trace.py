"""The published production trace through the whole path, on every store, against an exact answer."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from caketin.replay.pool_sets import deepseek_v4
from caketin.replay.trace import Load, read_trace, tokens
from caketin.stack import Stack, StackSettings
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectStore
from metadata.object_keys import parse
from metadata.page_hash import page_hashes
from tests.replay.oracle import POOLS, UnboundedCache, prefix_ids
from tests.replay.stacks import PROMPT, counted, metric, open_behind, run

pytestmark = [pytest.mark.trace, pytest.mark.timeout(2400)]

ASKED, HIT, DISTINCT = 288_500, 105_710, 182_790
OBJECTS_PER_PAGE = 4
PAGE_BYTES = 512
DELETED = 500
REPLAYED_AGAIN = 2_000
PAGE_TOKENS = 64
"""Tokens of a page here: the exact answer does not depend on it, the time of a run does."""


@pytest.fixture(scope="module")
def load(conversation_trace: Path) -> Load:
    return read_trace(conversation_trace)


@pytest.fixture(params=["file", "mooncake"])
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    if request.param == "mooncake":
        loads, why = MooncakeStore.available()
        if not loads:
            pytest.skip(f"Mooncake does not load: {why}")
    with Stack(StackSettings(tmp_path, store=request.param, store_bytes=2 << 30, control=PROMPT)) as running:
        yield running


def totals(stack: Stack) -> tuple[int, int, int]:
    """Return what the control plane says was asked, promised and lost."""
    row = counted(stack, "replay")[""]
    return row["queried_pages"], row["hit_pages"], row["lost_pages"]


def test_the_oracle_knows_the_published_answer(load: Load):
    cache = UnboundedCache.of("mha")
    assert cache.serve(load.requests) == (ASKED, HIT)
    assert len(cache.stored["kv"]) == DISTINCT


def test_the_whole_trace_gives_the_exact_answer_and_lost_objects_change_it_as_they_must(
    load: Load, stack: Stack
):
    report = run(stack, load)
    print(f"{stack.store}: the whole trace in {report.seconds:.0f} s")  # seen with -rP
    assert (report.asked_pages, report.promised_pages, report.hit_pages) == (ASKED, HIT, HIT)
    assert (report.verified_pages, report.wrong_pages, report.lost_pages) == (HIT, 0, 0)
    assert report.backed_up_pages == ASKED - HIT
    assert totals(stack) == (ASKED, HIT, 0)
    assert metric(stack, "caketin_lookup_queried_pages_total", purpose="prefetch") == ASKED
    assert metric(stack, "caketin_lookup_hit_pages_total", purpose="prefetch") == HIT
    view = httpx.get(f"{stack.url}/v1/namespaces", trust_env=False).json()["namespaces"]
    (namespace,) = view
    with closing(open_behind(stack)) as store:
        keys = [k for k in store.keys(f"ct1/{namespace['namespace_id']}/") if "/manifest/" not in k]
        assert len(keys) == len(set(keys)) == DISTINCT * OBJECTS_PER_PAGE
        cache, again = lose_objects(load, store, keys)
    expected = cache.serve(again.requests)
    second = run(stack, again)
    assert (second.asked_pages, second.hit_pages) == expected
    assert second.hit_pages < second.promised_pages == second.hit_pages + second.lost_pages
    assert second.wrong_pages == 0
    assert second.verified_pages == second.hit_pages
    asked, promised, lost = totals(stack)
    assert (asked, promised) == (ASKED + second.asked_pages, HIT + second.promised_pages)
    assert lost > 0


def lose_objects(load: Load, store: ObjectStore, keys: list[str]) -> tuple[UnboundedCache, Load]:
    """Delete objects of the first requests behind caketin's back, and tell the oracle which."""
    again = Load(load.name, load.requests[:REPLAYED_AGAIN])
    names: dict[bytes, bytes] = {}
    for ids in again.requests:
        names.update(zip(page_hashes(tokens(ids, PAGE_TOKENS), PAGE_TOKENS), prefix_ids(ids), strict=True))
    cache = UnboundedCache.of("deepseek-v4")
    cache.serve(load.requests)
    pools = {pool_id: name for name, pool_id in pool_ids(keys).items()}
    chosen = random.Random(20260).sample(sorted(k for k in keys if parse(k).page_hash in names), DELETED)
    assert store.remove(chosen) == DELETED
    for key in chosen:
        named = parse(key)
        cache.lose(names[named.page_hash], pools[named.pool_id])
    return cache, again


def pool_ids(keys: list[str]) -> dict[str, str]:
    """Return pool name -> pool id, read from the manifests' own ids."""
    ids = {spec.name: spec.pool_id for spec in deepseek_v4(PAGE_BYTES) if not spec.logical}
    assert {parse(k).pool_id for k in keys[:1000]} <= set(ids.values())
    return ids


@pytest.fixture(scope="module")
def file_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(StackSettings(tmp_path_factory.mktemp("stack"), store="file")) as running:
        yield running


@pytest.mark.parametrize("sidecars", ["all", "tail"])
@pytest.mark.parametrize("pools", POOLS)
def test_the_first_requests_give_the_exact_answer_for_every_pool_set(
    conversation_trace: Path, file_stack: Stack, pools: str, sidecars: str
):
    part = read_trace(conversation_trace, limit=REPLAYED_AGAIN)
    asked, hits = UnboundedCache.of(pools, tail=sidecars == "tail").serve(part.requests)
    report = run(file_stack, part, pools=pools, sidecars=sidecars, model=f"{pools}-{sidecars}")
    assert (report.asked_pages, report.promised_pages, report.hit_pages) == (asked, hits, hits)
    assert (report.verified_pages, report.wrong_pages, report.lost_pages) == (hits, 0, 0)
    row = counted(file_stack, f"{pools}-{sidecars}")[""]
    assert (row["queried_pages"], row["hit_pages"], row["lost_pages"]) == (asked, hits, 0)


def test_two_ranks_give_the_exact_answer(conversation_trace: Path, file_stack: Stack):
    part = read_trace(conversation_trace, limit=500)
    asked, hits = UnboundedCache.of("mha-swa").serve(part.requests)
    report = run(file_stack, part, pools="mha-swa", tp=2, model="two-ranks")
    assert (report.asked_pages, report.hit_pages, report.verified_pages) == (asked, hits, hits)
    assert (report.wrong_pages, report.lost_pages) == (0, 0)


def test_smoke_the_trace_is_read_and_its_start_replays(conversation_trace: Path, file_stack: Stack):
    part = read_trace(conversation_trace, limit=50)
    report = run(file_stack, part, model="smoke")
    assert report.hit_pages == UnboundedCache.of("deepseek-v4").serve(part.requests)[1]
