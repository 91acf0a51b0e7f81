"""Lists come in pieces that together are the whole list, each entry once."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.paging import read_cursor, write_cursor
from metadata.errors import InvalidInput
from tests.api.test_first_path import BODY


def pieces(client: httpx.Client, name: str, limit: int) -> list[list[dict]]:
    found, cursor = [], {}
    while True:
        answer = client.get(f"/v1/{name}", params={"limit": limit, **cursor}).json()
        found.append(answer[name])
        if answer["next_cursor"] is None:
            return found
        cursor = {"cursor": answer["next_cursor"]}


@pytest.fixture
def seven(client: httpx.Client) -> httpx.Client:
    for i in range(7):
        namespace = {"model": f"m{i}", "revision": "r", "page_size": 4}
        answer = client.put(f"/v1/engines/e{i}/ranks/dp0-pp0-cp0-tp0", json={**BODY, "namespace": namespace})
        assert answer.status_code == 201
    return client


@pytest.mark.parametrize("limit", [1, 3, 7, 8, 1000])
@pytest.mark.parametrize(("name", "key"), [("engines", "engine_id"), ("namespaces", "namespace_id")])
def test_the_pieces_are_the_list(name, key, limit, seven):
    found = pieces(seven, name, limit)
    entries = [entry[key] for piece in found for entry in piece]
    assert len(entries) == len(set(entries)) == 7
    assert entries == sorted(entries)
    assert all(len(piece) == limit for piece in found[:-1])


def test_an_engine_that_leaves_between_two_calls_shifts_nothing(seven):
    first = seven.get("/v1/engines", params={"limit": 3}).json()
    seven.delete("/v1/engines/e2")
    rest = seven.get("/v1/engines", params={"limit": 10, "cursor": first["next_cursor"]}).json()
    assert [e["engine_id"] for e in rest["engines"]] == ["e3", "e4", "e5", "e6"]


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"cursor": ""}, {"cursor": "=="}]
)
def test_a_limit_or_cursor_that_cannot_be_is_refused(query, client):
    answer = client.get("/v1/engines", params=query)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, next(iter(query)))


@given(st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True))
def test_a_cursor_gives_its_name_back(name):
    assert read_cursor(write_cursor(name)) == name


@given(st.text(max_size=40))
def test_what_is_no_cursor_is_refused_or_is_exactly_one(text):
    try:
        name = read_cursor(text)
    except InvalidInput as error:
        assert error.errors[0].code == "bad_cursor"
    else:
        assert write_cursor(name) == text
