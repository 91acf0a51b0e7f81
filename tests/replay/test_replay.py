"""A replay's numbers against an oracle that shares no code with it; stored bytes harmed behind its back."""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from caketin.replay.pool_sets import rank_pools
from caketin.replay.trace import Load, generate
from caketin.stack import Stack, StackSettings
from dataplane.page_file import encode_header, read_table
from metadata.object_keys import parse
from tests.replay.oracle import OBJECTS, POOLS, UnboundedCache
from tests.replay.stacks import PROMPT, Place, metric, open_behind


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(StackSettings(tmp_path_factory.mktemp("stack"), store="file", control=PROMPT)) as running:
        yield running


@pytest.fixture
def place(stack: Stack, request: pytest.FixtureRequest) -> Place:
    return Place(stack, request.node.name)


LOAD = generate(60, seed=3)


@pytest.mark.parametrize("sidecars", ["all", "tail"])
@pytest.mark.parametrize("pools", POOLS)
def test_hits_are_exactly_those_of_the_oracle(place: Place, pools: str, sidecars: str):
    oracle = UnboundedCache.of(pools, tail=sidecars == "tail")
    asked, hits = oracle.serve(LOAD.requests)
    report = place.run(LOAD, pools=pools, sidecars=sidecars)
    assert (report.asked_pages, report.promised_pages, report.hit_pages) == (asked, hits, hits)
    assert (report.verified_pages, report.wrong_pages, report.lost_pages, report.degraded) == (hits, 0, 0, 0)
    assert (report.backed_up_pages, report.unstored_pages, report.rejected) == (asked - hits, 0, {})
    assert sum(report.misses.values()) == asked - hits
    assert not report.errors


def test_sidecars_at_the_tail_allow_fewer_hits_and_store_less():
    requests = generate(200, seed=5).requests
    for pools in ("deepseek-v4", "mha-swa", "mamba-hybrid"):
        everything, tail = UnboundedCache.of(pools), UnboundedCache.of(pools, tail=True)
        assert everything.serve(requests)[1] > tail.serve(requests)[1] > 0


METRICS = {
    "caketin_lookup_queried_pages_total": {"purpose": "prefetch"},
    "caketin_lookup_hit_pages_total": {"purpose": "prefetch"},
    "caketin_lookups_total": {"purpose": "prefetch"},
    "caketin_commit_pages_total": {"result": "committed"},
}


def test_report_hit_rates_and_metrics_agree_to_the_page(place: Place):
    before = [metric(place.stack, name, **labels) for name, labels in METRICS.items()]
    report = place.run(LOAD, pools="mha-swa", sidecars="tail")
    after = [metric(place.stack, name, **labels) for name, labels in METRICS.items()]
    whole = place.counted()[""]
    assert whole["queried_pages"] == report.asked_pages
    assert whole["hit_pages"] == report.promised_pages == report.hit_pages
    misses = {name.removeprefix("miss:"): n for name, n in whole.items() if name.startswith("miss:")}
    assert misses == dict(report.misses)
    by_pool = {name: row["hit_pages"] for name, row in place.counted(by="pool").items()}
    assert by_pool == dict(report.pool_hits)
    seen = [now - earlier for now, earlier in zip(after, before, strict=True)]
    counts = [report.asked_pages, report.promised_pages, report.requests, report.backed_up_pages]
    assert seen == counts


@pytest.mark.parametrize("pools", ["mha-swa", "deepseek-v4"])
def test_two_ranks_are_two_processes_and_share_one_answer(place: Place, pools: str):
    asked, hits = UnboundedCache.of(pools).serve(LOAD.requests)
    report = place.run(LOAD, pools=pools, tp=2)
    assert (report.asked_pages, report.hit_pages) == (asked, hits)
    assert (report.verified_pages, report.wrong_pages, report.lost_pages) == (hits, 0, 0)
    assert place.counted()[""]["queried_pages"] == asked  # the leader alone asks
    with closing(open_behind(place.stack)) as store:
        keys = [parse(k) for k in place.keys(store)]
    distinct = len({k.page_hash for k in keys})
    shards = 1 if pools == "deepseek-v4" else 2
    assert {k.shard for k in keys} == set(range(shards))
    assert len(keys) == distinct * OBJECTS[pools] * shards
    # Where all ranks hold the same bytes, one of them writes.
    page = sum(p.spec.bytes_per_page for p in rank_pools(pools, 512, tp=2)) * shards
    assert report.bytes_written == (asked - hits) * page


def test_a_page_is_a_hit_only_where_every_rank_restored_it(place: Place):
    load = Load("one prompt", [list(range(20))])
    place.run(load, pools="mha-swa", tp=2)
    with closing(open_behind(place.stack)) as store:
        mine = [k for k in place.keys(store) if parse(k).shard == 1]
        pages = page_order(load)
        gone = [k for k in mine if pages[parse(k).page_hash] == 12 and parse(k).part == "k"]
        assert store.remove(gone) == 2  # of kv and of swa, of rank 1 only
    report = place.run(load, pools="mha-swa", tp=2)
    assert (report.promised_pages, report.hit_pages, report.lost_pages) == (20, 12, 8)
    assert (report.lost, report.wrong_pages, report.verified_pages) == ({"gone": 8}, 0, 12)
    again = place.run(load, pools="mha-swa", tp=2)
    assert (again.hit_pages, again.lost_pages) == (20, 0)


def test_ranks_that_restored_different_lengths_read_again_until_they_agree(place: Place):
    load = Load("one prompt", [list(range(20))])
    place.run(load, pools="mha-swa", tp=2)
    names = {p.spec.pool_id: p.spec.name for p in rank_pools("mha-swa", 512, tp=2)}
    pages = page_order(load)
    with closing(open_behind(place.stack)) as store:
        # Rank 1 lacks KV from page 12 on. Rank 0 could do with all 20 pages, but has no window that ends at
        # 11 to 14: the longest length at which both have everything is 10.
        lost = {("kv", 1, 12), ("swa", 0, 10)}
        named = {k: parse(k) for k in place.keys(store)}
        gone = [k for k, p in named.items() if (names[p.pool_id], p.shard, pages[p.page_hash]) in lost]
        assert store.remove(gone) == 4
    report = place.run(load, pools="mha-swa", tp=2)
    assert (report.promised_pages, report.hit_pages, report.lost_pages) == (20, 10, 10)
    assert (report.wrong_pages, report.verified_pages) == (0, 10)


def test_several_requests_in_flight_restore_no_wrong_byte(place: Place):
    asked, hits = UnboundedCache.of("mha-swa").serve(LOAD.requests)
    report = place.run(LOAD, pools="mha-swa", concurrency=4, tp=2)
    assert (report.requests, report.asked_pages) == (60, asked)
    # Two requests that share pages which neither has stored yet both miss: never more hits than in order.
    assert 0 < report.hit_pages <= hits
    assert (report.wrong_pages, report.verified_pages) == (0, report.hit_pages)
    again = place.run(LOAD, pools="mha-swa", concurrency=4, tp=2)
    assert again.hit_pages == again.asked_pages


def page_order(load: Load) -> dict[bytes, int]:
    from caketin.replay.trace import tokens
    from metadata.page_hash import page_hashes

    return {h: i for ids in load.requests for i, h in enumerate(page_hashes(tokens(ids, 64), 64))}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def other_size(path: Path) -> None:
    rewrite(path, extra=1)


def rewrite(path: Path, *, extra: int = 0) -> None:
    """Write other bytes under the same name, with a header and checksums that are right for them."""
    import zlib

    with path.open("rb") as file:
        identity, parts = read_table(file.fileno())
    bodies = {name: bytes(part.length + extra) for name, part in parts.items()}
    table = [(name, len(body), zlib.crc32(body)) for name, body in bodies.items()]
    path.write_bytes(encode_header(identity, table) + b"".join(bodies.values()))


@pytest.mark.parametrize(
    ("harm", "reason"),
    # A file whose length or name does not fit its header is no object: that shows before the first read.
    [(flip, "checksum"), (truncate, "gone"), (Path.unlink, "gone"), (other_size, "size_mismatch")],
)
def test_what_was_harmed_behind_caketins_back_is_a_miss_with_its_reason(place: Place, harm, reason: str):
    load = Load("one prompt", [list(range(30))])
    assert place.run(load).hit_pages == 0
    pages = page_order(load)
    victims = [p for p in place.page_files() if pages[bytes.fromhex(p.name[:64])] == 17]
    assert len(victims) == 4
    for path in victims:
        harm(path)
    report = place.run(load)
    assert (report.promised_pages, report.hit_pages, report.lost_pages) == (30, 17, 13)
    assert (report.lost, report.wrong_pages, report.verified_pages) == ({reason: 13}, 0, 17)
    assert report.reported_pages == place.counted()[""]["lost_pages"] >= 1
    healed = place.run(load)
    assert (healed.hit_pages, healed.lost_pages, healed.wrong_pages) == (30, 0, 0)


def test_files_swapped_with_each_other_are_never_served(place: Place):
    load = Load("one prompt", [list(range(30))])
    place.run(load, pools="mha")
    pages = page_order(load)
    at = {pages[bytes.fromhex(p.name[:64])]: p for p in place.page_files()}
    spare = at[9].with_name("spare")
    at[9].rename(spare)
    at[21].rename(at[9])
    spare.rename(at[21])
    report = place.run(load, pools="mha")
    assert (report.hit_pages, report.lost, report.wrong_pages) == (9, {"gone": 21}, 0)


def test_objects_lost_at_random_cost_exactly_what_the_oracle_says(place: Place):
    dice = random.Random(11)
    oracle = UnboundedCache.of("mha-swa")
    oracle.serve(LOAD.requests)
    place.run(LOAD, pools="mha-swa")
    from tests.replay.oracle import prefix_ids

    names = {p.spec.pool_id: p.spec.name for p in rank_pools("mha-swa", 512)}
    blocks = {h: prefix_ids(ids)[i] for ids in LOAD.requests for h, i in page_order(Load("", [ids])).items()}
    with closing(open_behind(place.stack)) as store:
        chosen = dice.sample(sorted(place.keys(store)), 40)
        assert store.remove(chosen) == 40
    for key in map(parse, chosen):
        oracle.lose(blocks[key.page_hash], names[key.pool_id])
    asked, hits = oracle.serve(LOAD.requests)
    report = place.run(LOAD, pools="mha-swa")
    assert (report.asked_pages, report.hit_pages, report.wrong_pages) == (asked, hits, 0)
    assert report.lost_pages == report.promised_pages - hits > 0
    assert set(report.lost) == {"gone"}


def test_verify_turns_red_when_the_store_serves_other_bytes(place: Place):
    load = Load("one prompt", [list(range(10))])
    place.run(load, pools="mha")
    for path in place.page_files()[:3]:
        rewrite(path)
    report = place.run(load, pools="mha")
    assert (report.hit_pages, report.wrong_pages) == (10, 3)
    assert place.run(load, pools="mha", verify=False).wrong_pages == 0
    assert place.run(load, pools="mha", tp=1).wrong_pages == 3
