"""One engine's life over real HTTP: register, miss, commit, hit, lose, explain, leave."""

import hashlib
import time

import httpx
import pytest

from tests.api.conftest import serving

PAGES = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(8)]
KV = {"name": "kv", "parts": [{"part": "k", "dtype": "bfloat16", "bytes": 64}], "indices_from": None}
SWA = {
    "name": "swa",
    "parts": [{"part": "page", "dtype": "uint8", "bytes": 32}],
    "hit_policy": {"kind": "trailing_pages", "window_pages": 2},
}
BODY = {
    "incarnation": "9d0c2c1e6f4b4c5fa2f3b9d1e4a7c8b0",
    "namespace": {"model": "m", "revision": "r", "page_size": 4, "namespace_salt": "a secret"},
    "pools": [KV, SWA],
}
RANK = "/v1/engines/e/ranks/dp0-pp0-cp0-tp0"
ME = {"engine_id": "e", "rank": "dp0-pp0-cp0-tp0"}


@pytest.fixture
def ns(client: httpx.Client) -> str:
    answer = client.put(RANK, json=BODY)
    assert answer.status_code == 201, answer.text
    return answer.json()["namespace_id"]


def lookup(client: httpx.Client, ns: str, **more) -> dict:
    answer = client.post(f"/v1/namespaces/{ns}/lookup", json={"page_hashes": PAGES, "engine_id": "e", **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def commit(client: httpx.Client, ns: str, **stored) -> dict:
    answer = client.post(f"/v1/namespaces/{ns}/commit", json={**ME, "page_hashes": PAGES, "stored": stored})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_registering_again_renews_and_tells_the_suffixes_of_the_ranks_own_objects(client, ns):
    answer = client.put(RANK, json=BODY)
    assert answer.status_code == 200
    body = answer.json()
    kv = body["pools"]["kv"]
    assert kv["suffixes"] == [f"/{kv['pool_id']}.0/k"]
    assert body["store"]["key_prefix"] == f"ct1/{ns}/"
    assert body["epoch"] == 1
    assert "a secret" not in client.get("/v1/namespaces").text


def test_a_cold_lookup_names_the_first_page_and_pool_that_stopped_it(client, ns):
    answer = lookup(client, ns)
    assert (answer["queried_pages"], answer["hit_pages"], answer["restorable"]) == (8, 0, [])
    assert answer["miss"] == {
        "page": 0,
        "pool": "kv",
        "reason": "not_stored",
        "shards": [],
        "age_seconds": None,
    }


def test_what_is_committed_is_restorable_at_the_lengths_that_every_pool_allows(client, ns):
    done = commit(
        client,
        ns,
        kv={"pages": "all", "shards": [0]},
        swa={"pages": [[0, 2], [4, 5]], "shards": [0]},
    )
    assert done == {"committed": 8, "complete": 8, "rejected": []}
    answer = lookup(client, ns)
    assert answer["restorable"] == [[1, 3], [6, 6]]
    assert (answer["hit_pages"], answer["hit_tokens"]) == (6, 24)
    assert answer["pools"] == {"kv": 8, "swa": 6}
    assert (answer["miss"]["page"], answer["miss"]["pool"], answer["miss"]["reason"]) == (
        6,
        "swa",
        "not_stored",
    )


def test_tokens_and_hashes_ask_for_the_same_pages(client, ns):
    from metadata.page_hash import page_hashes

    tokens = list(range(33))
    hashes = [h.hex() for h in page_hashes(tokens, 4)]
    body = {**ME, "page_hashes": hashes, "stored": {"kv": {"pages": "all", "shards": [0]}}}
    client.post(f"/v1/namespaces/{ns}/commit", json=body)
    answer = client.post(
        f"/v1/namespaces/{ns}/lookup", json={"token_ids": tokens, "pools": {}, "engine_id": "e"}
    ).json()
    assert (answer["queried_pages"], answer["hit_pages"]) == (8, 8)
    rest = {"token_ids": tokens[16:], "first_page": 4, "pools": {}, "engine_id": "e"}
    answer = client.post(f"/v1/namespaces/{ns}/lookup", json={**rest, "prefix_hashes": hashes[:4]}).json()
    assert (answer["queried_pages"], answer["hit_pages"]) == (4, 4)
    refused = client.post(f"/v1/namespaces/{ns}/lookup", json=rest)
    assert refused.json()["errors"][0]["field"] == "prefix_hashes"


def test_a_sidecar_before_its_anchor_is_rejected_and_named(client, ns):
    done = commit(client, ns, swa={"pages": [[2, 3]], "shards": [0]})
    assert done["committed"] == 0
    assert done["rejected"] == [{"page": p, "pool": "swa", "code": "anchor_missing"} for p in (2, 3)]


def test_a_page_reported_missing_is_a_miss_that_can_be_explained(client, ns):
    commit(client, ns, kv={"pages": "all", "shards": [0]}, swa={"pages": "all", "shards": [0]})
    before = lookup(client, ns)
    gone = {"kv": {"pages": [[5, 5]], "shards": [0], "reason": "size_mismatch", "size_seen": 1}}
    report = {**ME, "page_hashes": PAGES, "generation": before["generation"], "missing": gone}
    assert client.post(f"/v1/namespaces/{ns}/missing", json=report).json() == {"cleared": 1, "stale": 0}
    assert client.post(f"/v1/namespaces/{ns}/missing", json=report).json() == {"cleared": 0, "stale": 1}
    answer = lookup(client, ns)
    assert answer["hit_pages"] == 5
    assert (answer["miss"]["pool"], answer["miss"]["reason"]) == ("kv", "size_mismatch")
    assert answer["miss"]["age_seconds"] in {0, 1, 2}


def test_a_prefix_below_the_minimum_is_no_hit(client, ns):
    commit(client, ns, kv={"pages": [[0, 2]], "shards": [0]}, swa={"pages": [[0, 2]], "shards": [0]})
    assert lookup(client, ns, min_pages=3)["restorable"] == [[3, 3]]
    answer = lookup(client, ns, min_pages=4)
    assert (answer["hit_pages"], answer["miss"]["reason"]) == (0, "below_min_pages")


def hit_rate_sums(client: httpx.Client, by: str) -> dict[str, tuple[int, int, int]]:
    """Queried, hit and not stored, by pool; the server is shared, so tests look at differences."""
    rates = client.get("/v1/hit-rates", params={"window": "10m", "step": "10", "by": by}).json()
    assert rates["start"] % 10 == 0
    return {
        row["labels"].get("pool", ""): (
            sum(row["queried_pages"]),
            sum(row["hit_pages"]),
            sum(row["misses"].get("not_stored", [])),
        )
        for row in rates["series"]
    }


def test_hit_rates_count_prefetch_lookups_once_a_request_id(client, ns):
    commit(client, ns, kv={"pages": [[0, 4]], "shards": [0]}, swa={"pages": [[0, 4]], "shards": [0]})
    before = {by: hit_rate_sums(client, by) for by in ("", "pool,model")}
    for _ in range(3):
        lookup(client, ns, request_id="r1")
    hit_rate_sums(client, "")
    lookup(client, ns, request_id="r1")
    lookup(client, ns)
    lookup(client, ns, purpose="route")
    lookup(client, ns, purpose="probe")
    for by, pools in (("", [""]), ("pool,model", ["kv", "swa"])):
        after = hit_rate_sums(client, by)
        for pool in pools:
            then = before[by].get(pool, (0, 0, 0))
            assert [a - b for a, b in zip(after[pool], then, strict=True)][:2] == [16, 10]
    assert after["kv"][2] - before["pool,model"].get("kv", (0, 0, 0))[2] == 6


def test_an_unknown_pool_is_an_error_and_not_a_hit(client, ns):
    answer = client.post(f"/v1/namespaces/{ns}/lookup", json={"page_hashes": PAGES, "pools": {"mamba": {}}})
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_pool")
    body = {**ME, "page_hashes": PAGES, "stored": {"mamba": {"pages": "all", "shards": [0]}}}
    answer = client.post(f"/v1/namespaces/{ns}/commit", json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_pool")


def test_a_changed_pool_is_refused_field_by_field_and_nothing_is_half_registered(client, ns):
    changed = {**KV, "parts": [{"part": "k", "dtype": "float8_e4m3fn", "bytes": 64}]}
    new = {"name": "draft", "parts": [{"part": "k", "dtype": "bfloat16", "bytes": 8}]}
    answer = client.put(RANK, json={**BODY, "pools": [changed, SWA, new]})
    assert (answer.status_code, answer.json()["code"]) == (409, "pool_changed")
    (error,) = answer.json()["errors"]
    assert error["field"] == "pools[0].parts"
    assert "bfloat16" in error["detail"]
    assert "float8_e4m3fn" in error["detail"]
    pools = {p["name"] for p in client.get(f"/v1/namespaces/{ns}").json()["pools"]}
    assert pools == {"kv", "swa"}
    late = client.put(RANK, json={**BODY, "pools": [KV, SWA, new]})
    assert late.status_code == 200
    assert late.json()["epoch"] == 2


def test_an_old_incarnation_is_refused_everywhere(client, ns):
    newer = client.put(RANK, json={**BODY, "incarnation": "b" * 32})
    assert newer.status_code in {200, 201}
    for answer in (
        client.put(RANK, json=BODY),
        client.post(f"{RANK}/heartbeat", json={"incarnation": BODY["incarnation"], "epoch": 1}),
        client.delete(RANK, params={"incarnation": BODY["incarnation"]}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "stale_incarnation")
    beat = {"incarnation": "b" * 32, "epoch": newer.json()["epoch"]}
    assert client.post(f"{RANK}/heartbeat", json=beat).json() == {"lease_seconds": 30}


def test_leaving_twice_is_fine_and_takes_nothing_out_of_l3(client, ns):
    commit(client, ns, kv={"pages": "all", "shards": [0]}, swa={"pages": "all", "shards": [0]})
    for _ in range(2):
        assert client.delete(RANK, params={"incarnation": BODY["incarnation"]}).status_code == 204
        assert client.delete("/v1/engines/e").status_code == 204
    assert client.get("/v1/engines/e").json()["code"] == "unknown_engine"
    answer = client.post(f"/v1/namespaces/{ns}/lookup", json={"page_hashes": PAGES}).json()
    assert answer["hit_pages"] == 8


def test_namespaces_and_engines_can_be_looked_at(client, ns):
    commit(client, ns, kv={"pages": "all", "shards": [0]})
    view = client.get(f"/v1/namespaces/{ns}").json()
    kv = next(p for p in view["pools"] if p["name"] == "kv")
    assert (kv["pages"], kv["bytes"], kv["engines"], kv["shards_registered"]) == (8, 512, 1, 1)
    assert client.get("/v1/engines").json()["engines"][0]["ranks"] == ["dp0-pp0-cp0-tp0"]
    assert client.get("/v1/engines/e").json()["ranks"][0]["lease_seconds_left"] in range(28, 31)
    keys = client.post(f"/v1/namespaces/{ns}/keys", json={"page_hashes": PAGES[:1]}).json()
    assert keys["pools"]["kv"]["keys"] == [[f"ct1/{ns}/{PAGES[0]}/{kv['pool_id']}.0/k"]]


def test_health_and_readiness(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json()["ready"] is True


def test_errors_are_problems_with_a_field(client, ns):
    bad = {**BODY, "pools": [{**SWA, "hit_policy": {"kind": "trailing_pages", "window_pages": 0}}]}
    answer = client.put(RANK, json=bad)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (
        422,
        "pools[0].hit_policy.window_pages",
    )
    assert client.get("/v1/nothing").json()["code"] == "not_found"
    assert client.delete(f"/v1/namespaces/{ns}/lookup").json()["code"] == "method_not_allowed"
    huge = client.post(f"/v1/namespaces/{ns}/lookup", content=b" " * (9 << 20))
    assert (huge.status_code, huge.json()["code"]) == (413, "body_too_large")


def test_a_lookup_of_2048_pages_is_answered_in_one_call(client, ns):
    many = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(2048)]
    for pool in ("kv", "swa"):
        body = {**ME, "page_hashes": many, "stored": {pool: {"pages": "all", "shards": [0]}}}
        assert client.post(f"/v1/namespaces/{ns}/commit", json=body).json()["complete"] == 2048
    start = time.perf_counter()
    answer = client.post(f"/v1/namespaces/{ns}/lookup", json={"page_hashes": many, "engine_id": "e"}).json()
    assert answer["hit_pages"] == 2048
    assert answer["miss"] is None
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("asked", [{"engine_id": "e"}, {"engine_id": None}])
def test_a_pool_that_comes_late_gates_from_then_on(asked, client, ns):
    stored = {"pages": "all", "shards": [0]}
    commit(client, ns, kv=stored, swa=stored)
    assert lookup(client, ns, **asked)["hit_pages"] == 8
    draft = {"name": "draft", "parts": [{"part": "k", "dtype": "bfloat16", "bytes": 8}]}
    assert client.put(RANK, json={**BODY, "pools": [KV, SWA, draft]}).status_code == 200
    answer = lookup(client, ns, **asked)
    assert (answer["hit_pages"], answer["pools"]["draft"], answer["miss"]["pool"]) == (0, 0, "draft")
    commit(client, ns, draft=stored)
    assert lookup(client, ns, **asked)["hit_pages"] == 8


def test_an_engine_that_holds_another_variant_later_is_answered_for_that_one(client, ns):
    stored = {"pages": "all", "shards": [0]}
    commit(client, ns, kv=stored, swa=stored)
    assert lookup(client, ns)["hit_pages"] == 8
    other = {**KV, "parts": [{"part": "k", "dtype": "float8_e4m3fn", "bytes": 32}]}
    restarted = {**BODY, "incarnation": "c" * 32, "pools": [other, SWA]}
    assert client.put(RANK, json=restarted).json()["namespace_id"] == ns
    assert lookup(client, ns)["hit_pages"] == 0


def test_a_pool_that_left_with_its_rank_gates_no_longer(client):
    second = RANK.replace("tp0", "tp1")
    ns = client.put(RANK, json={**BODY, "pools": [KV]}).json()["namespace_id"]
    client.put(second, json=BODY)
    commit(client, ns, kv={"pages": "all", "shards": [0]})
    assert lookup(client, ns)["miss"]["pool"] == "swa"
    assert client.delete(second, params={"incarnation": BODY["incarnation"]}).status_code == 204
    assert lookup(client, ns)["hit_pages"] == 8


def test_an_engine_that_came_back_with_another_tp_size_is_answered_by_what_it_is_now(client, ns):
    """Field report 13: ranks that went silent are not what the engine is."""
    sharded = {**KV, "shard_count": 2}
    for shard in (0, 1):
        body = {**BODY, "pools": [{**sharded, "owned_shards": [shard]}, SWA]}
        answer = client.put(f"/v1/engines/two/ranks/dp0-pp0-cp0-tp{shard}", json=body)
        assert answer.status_code == 201, answer.text
    back = {**BODY, "incarnation": "c" * 32}
    assert client.put("/v1/engines/two/ranks/dp0-pp0-cp0-tp0", json=back).is_success
    commit(client, ns, kv={"pages": "all", "shards": [0]}, swa={"pages": "all", "shards": [0]})
    found = lookup(client, ns, engine_id="two", rank="dp0-pp0-cp0-tp0")
    assert found["hit_pages"] == 8


def test_the_asking_ranks_own_window_gates(client, ns):
    commit(client, ns, kv={"pages": "all", "shards": [0]}, swa={"pages": [[0, 0], [5, 5]], "shards": [0]})
    narrow = {**SWA, "hit_policy": {"kind": "trailing_pages", "window_pages": 1}}
    for tp, swa in enumerate((narrow, SWA)):
        body = {**BODY, "pools": [KV, swa]}
        assert client.put(f"/v1/engines/mixed/ranks/dp0-pp0-cp0-tp{tp}", json=body).is_success
    assert lookup(client, ns, engine_id="mixed", rank="dp0-pp0-cp0-tp0")["restorable"] == [[1, 1], [6, 6]]
    assert lookup(client, ns, engine_id="mixed", rank="dp0-pp0-cp0-tp1")["restorable"] == [[1, 1]]


@pytest.mark.parametrize(
    "policy",
    [{"kind": "block_groups", "block": 1, "group": 1}, {"kind": "trailing_pages", "window_pages": 1}],
)
def test_an_anchor_that_does_not_gate_is_refused(client, policy):
    """Else an empty store would answer a full hit."""
    for pools, field in (
        ([{**KV, "hit_policy": policy}], "pools[0].hit_policy.kind"),
        (
            [
                {"name": "kv", "logical": True},
                {"name": "c4", "parts": KV["parts"], "indices_from": "kv", "hit_policy": policy},
            ],
            "pools",
        ),
    ):
        answer = client.put(RANK, json={**BODY, "pools": pools})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


def test_more_tokens_than_pages_in_a_call_are_refused(client):
    body = {**BODY, "namespace": {**BODY["namespace"], "page_size": 1}}
    small = client.put(RANK, json={**body, "incarnation": "d" * 32}).json()["namespace_id"]
    answer = client.post(f"/v1/namespaces/{small}/lookup", json={"token_ids": [1] * 65_537})
    assert (answer.status_code, answer.json()["code"]) == (422, "too_many_pages")
    assert answer.json()["errors"][0]["field"] == "token_ids"


def test_the_largest_registration_is_taken_and_its_keys_are_refused(client):
    parts = [{"part": f"p{i}", "dtype": "uint8", "bytes": 1} for i in range(64)]
    pool = {"name": "kv", "parts": parts, "shard_count": 4096, "owned_shards": list(range(4096))}
    answer = client.put("/v1/engines/huge/ranks/dp0-pp0-cp0-tp0", json={**BODY, "pools": [pool]})
    assert answer.status_code == 201
    kv = answer.json()["pools"]["kv"]
    assert len(kv["suffixes"]) == 64 * 4096
    keys = client.post(
        f"/v1/namespaces/{answer.json()['namespace_id']}/keys",
        json={"page_hashes": PAGES, "pools": {"kv": {"pool_id": kv["pool_id"]}}},
    )
    assert (keys.status_code, keys.json()["errors"][0]["code"]) == (422, "too_many_keys")


WIDER = {**KV, "parts": [{"part": "k", "dtype": "float32", "bytes": 128}]}
LATER = {**BODY, "incarnation": "a" * 32, "pools": [WIDER, SWA]}


@pytest.mark.parametrize("call", ["commit", "missing"])
def test_an_earlier_life_does_not_speak_for_the_variant_that_its_rank_has_now(client, ns, call):
    """It stored its own dtype's bytes; claimed by name, they would be promised as the new one's."""
    old = client.put(RANK, json=BODY).json()["pools"]["kv"]["pool_id"]
    new = client.put(RANK, json=LATER).json()["pools"]["kv"]["pool_id"]
    assert old != new

    def say(pool_id: str | None):
        pool = {"pages": "all", "shards": [0], "pool_id": pool_id}
        body = {**ME, "page_hashes": PAGES}
        if call == "commit":
            body["stored"] = {"kv": pool}
        else:
            body |= {"generation": None, "missing": {"kv": {**pool, "reason": "gone"}}}
        return client.post(f"/v1/namespaces/{ns}/{call}", json=body)

    commit(client, ns, kv={"pages": [[0, 3]], "shards": [0]})
    refused = say(old)
    assert refused.status_code == 422
    field = "stored" if call == "commit" else "missing"
    fault = refused.json()["errors"][0]
    assert (fault["field"], fault["code"]) == (f"{field}.kv.pool_id", "other_variant")
    assert lookup(client, ns)["pools"]["kv"] == 4, "nothing was claimed and nothing cleared"
    for pool_id, pages in ((new, 8 if call == "commit" else 0), (None, 8 if call == "commit" else 0)):
        assert say(pool_id).status_code == 200
        assert lookup(client, ns)["pools"]["kv"] == pages


def test_ranks_without_a_lease_do_not_count_while_any_rank_lives(redis_url, tmp_path):
    """An engine that came back with fewer ranks is what its living ranks are, whoever asks for it."""
    with (
        serving(redis_url, tmp_path, lease_seconds=1) as stack,
        httpx.Client(base_url=stack.url, timeout=10) as client,
    ):
        gone = client.put("/v1/engines/shrunk/ranks/dp0-pp0-cp0-tp1", json={**BODY, "pools": [WIDER, SWA]})
        body = {**BODY, "incarnation": "b" * 32}
        there = client.put("/v1/engines/shrunk/ranks/dp0-pp0-cp0-tp0", json=body)
        ns = there.json()["namespace_id"]
        assert gone.json()["namespace_id"] == ns

        def asked():
            query = {"page_hashes": PAGES, "engine_id": "shrunk", "purpose": "route"}
            return client.post(f"/v1/namespaces/{ns}/lookup", json=query)

        assert asked().json()["code"] == "ambiguous_variant", "both live, and they disagree"
        deadline = time.monotonic() + 10
        while asked().status_code != 200:
            assert time.monotonic() < deadline
            client.put("/v1/engines/shrunk/ranks/dp0-pp0-cp0-tp0", json=body)
            time.sleep(0.1)
        assert asked().json()["hit_pages"] == 0


def test_a_page_of_another_site_cannot_call_a_server_without_tokens(client):
    """Its name may be given this machine's address; the browser still says the name."""
    for name in ("evil.example", "evil.example:7411", "10.0.0.1"):
        answer = client.get("/v1/engines", headers={"Host": name})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    for name in ("localhost:7411", "127.0.0.1", "[::1]:7411", "127.8.9.1:1"):
        assert client.get("/v1/engines", headers={"Host": name}).status_code == 200
