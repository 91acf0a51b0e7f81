"""The published production trace through the whole path, on every store, against an exact answer."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from caketin.replay.driver import ReplaySettings, replay
from caketin.replay.report import Report
from caketin.replay.trace import Load, read_trace, tokens
from caketin.stack import Stack, StackSettings
from dataplane.file_store import FileStore
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectStore
from metadata.object_keys import parse
from metadata.page_hash import page_hashes
from tests.replay.oracle import UnboundedCache, prefix_ids

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
    with Stack(StackSettings(tmp_path, store=request.param, store_bytes=2 << 30)) as running:
        yield running


def open_behind(stack: Stack) -> ObjectStore:
    """Open the stack's store as somebody who does not ask caketin."""
    if stack.mooncake is None:
        return FileStore(stack.settings.data_dir / "pages")
    return MooncakeStore(stack.mooncake.settings)


def run(stack: Stack, load: Load) -> Report:
    settings = ReplaySettings(
        stack.url, page_bytes=PAGE_BYTES, page_tokens=PAGE_TOKENS, verify=True, call_seconds=10
    )
    return replay(settings, load, lambda _pages: None)


def counted(stack: Stack) -> tuple[int, int, int]:
    """Return what the control plane says was asked, promised and lost."""
    answer = httpx.get(
        f"{stack.url}/v1/hit-rates", params={"window": "24h", "step": "1h"}, timeout=30, trust_env=False
    )
    (row,) = answer.json()["series"]
    return sum(row["queried_pages"]), sum(row["hit_pages"]), sum(row["lost_pages"])


def test_the_oracle_knows_the_published_answer(load: Load):
    cache = UnboundedCache(["c4"], None)
    served = [cache.request(ids) for ids in load.requests]
    assert sum(asked for asked, _ in served) == ASKED
    assert sum(hits for _, hits in served) == HIT
    assert len(cache.stored) == DISTINCT


def test_the_whole_trace_gives_the_exact_answer_and_lost_objects_change_it_as_they_must(
    load: Load, stack: Stack
):
    report = run(stack, load)
    assert (report.asked_pages, report.promised_pages, report.hit_pages) == (ASKED, HIT, HIT)
    assert (report.verified_pages, report.wrong_pages, report.lost_pages) == (HIT, 0, 0)
    assert report.backed_up_pages == ASKED - HIT
    assert counted(stack) == (ASKED, HIT, 0)
    view = httpx.get(f"{stack.url}/v1/namespaces", trust_env=False).json()["namespaces"]
    (namespace,) = view
    with closing(open_behind(stack)) as store:
        keys = [k for k in store.keys(f"ct1/{namespace['namespace_id']}/") if "/manifest/" not in k]
        assert len(keys) == len(set(keys)) == DISTINCT * OBJECTS_PER_PAGE
        cache, again = lose_objects(load, store, keys)
    expected = [cache.request(ids) for ids in again.requests]
    second = run(stack, again)
    assert second.asked_pages == sum(asked for asked, _ in expected)
    assert second.hit_pages == sum(hits for _, hits in expected)
    assert second.hit_pages < second.promised_pages == second.hit_pages + second.lost_pages
    assert second.wrong_pages == 0
    assert second.verified_pages == second.hit_pages
    asked, promised, lost = counted(stack)
    assert (asked, promised) == (ASKED + second.asked_pages, HIT + second.promised_pages)
    assert lost > 0


def lose_objects(load: Load, store: ObjectStore, keys: list[str]) -> tuple[UnboundedCache, Load]:
    """Delete objects of the first requests behind caketin's back, and tell the oracle which."""
    again = Load(load.name, load.requests[:REPLAYED_AGAIN])
    names: dict[bytes, bytes] = {}
    for ids in again.requests:
        names.update(zip(page_hashes(tokens(ids, PAGE_TOKENS), PAGE_TOKENS), prefix_ids(ids), strict=True))
    pools = pool_names(keys)
    windowed = pools.pop("swa")
    cache = UnboundedCache(list(pools.values()), windowed)
    for ids in load.requests:
        cache.request(ids)
    chosen = random.Random(20260).sample(sorted(k for k in keys if parse(k).page_hash in names), DELETED)
    assert store.remove(chosen) == DELETED
    for key in chosen:
        named = parse(key)
        cache.lose(names[named.page_hash], named.pool_id)
    return cache, again


def pool_names(keys: list[str]) -> dict[str, str]:
    """Return pool name -> pool id, read from the manifests' own ids."""
    from caketin.replay.pool_sets import deepseek_v4

    ids = {spec.name: spec.pool_id for spec in deepseek_v4(PAGE_BYTES) if not spec.logical}
    assert {parse(k).pool_id for k in keys[:1000]} <= set(ids.values())
    return ids
