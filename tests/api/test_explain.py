"""`explain`: the state of each page and pool, of a bounded number of pages around the end of the prefix."""

from __future__ import annotations

import hashlib

import httpx
import pytest

from metadata.prefix_lookup import EXPLAINED_PAGES
from tests.api.test_first_path import BODY, KV, ME, RANK, SWA

MANY = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(1000)]


def explained(client: httpx.Client, ns: str, pages: list[str]) -> list[dict]:
    body = {"page_hashes": pages, "purpose": "probe", "explain": True}
    answer = client.post(f"/v1/namespaces/{ns}/lookup", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["pages"]


@pytest.fixture
def ns(client: httpx.Client) -> str:
    return client.put(
        RANK, json={**BODY, "pools": [{**KV, "shard_count": 3, "owned_shards": [0, 2]}, SWA]}
    ).json()["namespace_id"]


def commit(client: httpx.Client, ns: str, pages: list[str], **stored) -> None:
    body = {**ME, "page_hashes": pages, "stored": stored}
    assert client.post(f"/v1/namespaces/{ns}/commit", json=body).json()["rejected"] == []


def test_states_missing_shards_and_notes(client, ns):
    commit(client, ns, MANY[:3], kv={"pages": "all", "shards": [0, 2]}, swa={"pages": "all", "shards": [0]})
    lost = {"swa": {"pages": [[1, 1]], "shards": [0], "reason": "size_mismatch"}}
    client.post(f"/v1/namespaces/{ns}/missing", json={**ME, "page_hashes": MANY[:3], "missing": lost})
    first, second, _, fourth = explained(client, ns, MANY[:4])
    assert first == {
        "page": 0,
        "pools": {
            "kv": {"state": "incomplete", "shards": [1], "note": None},
            "swa": {"state": "stored", "shards": [], "note": None},
        },
    }
    swa = second["pools"]["swa"]
    assert (swa["state"], swa["shards"], swa["note"]["reason"]) == ("absent", [0], "size_mismatch")
    assert swa["note"]["age_seconds"] in {0, 1, 2}
    assert fourth["pools"]["kv"] == {"state": "absent", "shards": [0, 1, 2], "note": None}


def test_a_long_call_is_explained_around_the_end_of_its_prefix(client):
    ns = client.put(RANK, json=BODY).json()["namespace_id"]
    commit(client, ns, MANY[:700], kv={"pages": "all", "shards": [0]}, swa={"pages": "all", "shards": [0]})
    pages = explained(client, ns, MANY)
    assert len(pages) == EXPLAINED_PAGES
    numbers = [p["page"] for p in pages]
    assert numbers == list(range(numbers[0], numbers[0] + EXPLAINED_PAGES))
    assert 700 in numbers and 699 in numbers
    states = {p["page"]: p["pools"]["kv"]["state"] for p in pages}
    assert (states[699], states[700]) == ("stored", "absent")


def test_a_full_hit_is_explained_at_its_end_and_a_cold_one_at_its_start(client):
    ns = client.put(RANK, json=BODY).json()["namespace_id"]
    assert explained(client, ns, MANY)[0]["page"] == 0
    commit(client, ns, MANY, kv={"pages": "all", "shards": [0]}, swa={"pages": "all", "shards": [0]})
    assert explained(client, ns, MANY)[-1]["page"] == 999
    assert explained(client, ns, []) == []


def test_without_explain_the_answer_has_no_pages(client, ns):
    answer = client.post(f"/v1/namespaces/{ns}/lookup", json={"page_hashes": MANY[:2]}).json()
    assert "pages" not in answer
