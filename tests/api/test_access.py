"""The access matrix: every route of the application, with every kind of token, over real HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from fastapi import FastAPI

from api.auth import RULES
from api.tokens import SCOPES
from tests.api.access_scene import bearer, guarded, secret
from tests.api.conftest import Stack

PAGE = "ab" * 32
INCARNATION, OTHER = "a" * 32, "b" * 32
RANK = "/v1/engines/{engine_id}/ranks/{rank}"
NS = "/v1/namespaces/{ns}"
KV = {"name": "kv", "parts": [{"part": "k", "dtype": "bfloat16", "bytes": 64}]}
REGISTER = {
    "incarnation": INCARNATION,
    "namespace": {"model": "m", "revision": "r", "page_size": 4, "namespace_salt": "a secret"},
    "pools": [KV],
}
ME = {"engine_id": "e1", "rank": "dp0-pp0-cp0-tp0", "page_hashes": [PAGE]}
STORED = {**ME, "stored": {"kv": {"pages": "all", "shards": [0]}}}
MISSING = {**ME, "missing": {"kv": {"pages": "all", "shards": [0], "reason": "gone"}}}

READ = {"reader", "operator"}
ANY = {"engine", "reader", "operator"}


@dataclass(frozen=True)
class Row:
    """One way to use one route.

    Attributes:
        scopes: tokens of one scope that may; None: everybody, without a token.
        status: for who may.
        elsewhere: for a token of another tenant with all scopes.
        all_tenants: whether the token of all tenants may.
    """

    method: str
    path: str
    scopes: set[str] | None
    status: int = 200
    elsewhere: int = 404
    body: dict[str, Any] | None = None
    query: str = ""
    all_tenants: bool = False
    name: str = ""

    @property
    def id(self) -> str:
        return f"{self.method} {self.path} {self.name}".strip()


def lookup(purpose: str, scopes: set[str], **more: Any) -> Row:
    body = {"page_hashes": [PAGE], "purpose": purpose, **more}
    return Row("POST", f"{NS}/lookup", scopes, body=body, name=" ".join([purpose, *more]))


TABLE = [
    Row("PUT", RANK, {"engine"}, elsewhere=201, body=REGISTER),
    Row("POST", f"{RANK}/heartbeat", {"engine"}, body={"incarnation": INCARNATION, "epoch": 1}),
    # Gone is gone, whoever asks, so a rank of somebody else looks like one that has left.
    Row("DELETE", RANK, {"engine", "operator"}, 204, 204, query=f"?incarnation={INCARNATION}"),
    Row("DELETE", "/v1/engines/{engine_id}", {"operator"}, 204, 204),
    Row("GET", "/v1/engines", READ, elsewhere=200),
    Row("GET", "/v1/engines/{engine_id}", READ),
    Row("GET", "/v1/namespaces", READ, elsewhere=200),
    Row("GET", NS, READ),
    Row("DELETE", NS, {"operator"}, 202),
    Row("GET", "/v1/jobs/{job_id}", {"operator"}),
    lookup("prefetch", {"engine"}),
    lookup("prefetch", {"engine"}, engine_id="e1", explain=True),
    lookup("route", ANY),
    lookup("probe", ANY, explain=True),
    lookup("route", ANY, engine_id="e1", rank="dp0-pp0-cp0-tp0"),
    lookup("route", ANY, pools={"nobody": {}}),
    Row("POST", f"{NS}/commit", {"engine"}, body=STORED),
    Row("POST", f"{NS}/missing", {"engine"}, body=MISSING),
    Row("POST", f"{NS}/keys", ANY, body={"page_hashes": [PAGE]}),
    Row("GET", "/v1/hit-rates", READ, elsewhere=200, query="?by=tenant,namespace", all_tenants=True),
    Row("GET", "/metrics", set(), elsewhere=403, all_tenants=True),
    Row("GET", "/healthz", None),
    Row("GET", "/readyz", None),
    Row("GET", "/openapi.json", None),
    Row("GET", "/docs", None),
    Row("GET", "/docs/oauth2-redirect", None),
    Row("GET", "/redoc", None),
]
"""What is right. A route that is not here fails the test below."""
# Routes whose own answers differ: a pool that nobody has.
STATUS_OF_RIGHT = {"POST /v1/namespaces/{ns}/lookup route pools": 404}
GUARDED = [row for row in TABLE if row.scopes is not None]
OPEN = [row for row in TABLE if row.scopes is None]


def rows(found: list[Row]) -> dict[str, Any]:
    return {"argvalues": found, "ids": [row.id for row in found]}


def routes(found: list[Any]) -> Iterator[tuple[str, str]]:
    """Method and path of every route; a mounted application counts as a route without a method."""
    for route in found:
        if hasattr(route, "effective_candidates"):
            yield from routes(route.effective_candidates())
        else:
            for method in getattr(route, "methods", None) or {"ANY"}:
                if method != "HEAD":
                    yield method, route.path


def without_an_entry(app: FastAPI) -> set[tuple[str, str]]:
    return set(routes(app.routes)) ^ {(row.method, row.path) for row in TABLE}


@dataclass
class Scene:
    """A server on which tenant acme has an engine, a page, a lookup and a purge that is over."""

    stack: Stack
    http: httpx.Client
    ids: dict[str, str] = field(default_factory=dict)

    def ask(self, row: Row, headers: dict[str, str] | None = None, **ids: str) -> httpx.Response:
        url = row.path.format(**self.ids | ids) + row.query
        told = {"X-Request-ID": "the-same", **(headers or {})}
        return self.http.request(row.method, url, json=row.body, headers=told)

    def prepare(self) -> None:
        with redis.Redis.from_url(self.stack.redis_url) as plain:
            plain.flushall()
        self.ids = {"engine_id": "e1", "rank": "dp0-pp0-cp0-tp0", "ns": "", "job_id": ""}
        engine, operator = bearer("acme-engine"), bearer("acme-operator")
        second = {**REGISTER, "namespace": {**REGISTER["namespace"], "revision": "old"}}
        url = "/v1/engines/e0/ranks/dp0-pp0-cp0-tp0"
        old = self.http.put(url, json=second, headers=engine).json()["namespace_id"]
        self.http.delete("/v1/engines/e0", headers=operator)
        self.ids["job_id"] = self.http.delete(f"/v1/namespaces/{old}", headers=operator).json()["job_id"]
        new = self.http.put(RANK.format(**self.ids), json=REGISTER, headers=engine)
        self.ids["ns"] = new.json()["namespace_id"]
        done = self.http.post(f"/v1/namespaces/{self.ids['ns']}/commit", json=STORED, headers=engine)
        assert done.json()["complete"] == 1, done.text


@pytest.fixture(scope="module")
def guarded_stack(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with guarded(redis_url, Path(tmp_path_factory.mktemp("guarded"))) as found:
        yield found


@pytest.fixture
def scene(guarded_stack: Stack) -> Iterator[Scene]:
    with httpx.Client(base_url=guarded_stack.url, timeout=10) as http:
        found = Scene(guarded_stack, http)
        found.prepare()
        yield found


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def test_every_route_is_in_the_table_and_every_rule_is_of_a_route(guarded_stack: Stack) -> None:
    assert without_an_entry(guarded_stack.app) == set()
    documents = {("GET", row.path) for row in OPEN if row.path not in {"/healthz", "/readyz"}}
    assert set(RULES) == {(row.method, row.path) for row in TABLE} - documents


@pytest.mark.parametrize("row", **rows(GUARDED))
def test_without_a_token_in_force_every_answer_is_the_same_401(scene: Scene, row: Row) -> None:
    none = scene.ask(row)
    assert code(none) == (401, "unauthenticated")
    assert none.headers["www-authenticate"] == 'Bearer realm="caketin"'
    known = secret("acme-engine")
    answers = [
        scene.ask(row, {"Authorization": value})
        for value in (
            f"Bearer {secret('nobody')}",
            f"Bearer {secret('acme-expired')}",
            f"Basic {known}",
            known,
            f"Bearer {known}x",
            "Bearer hunter2",
            "Bearer",
            f"Bearer {known}, Bearer {known}",
        )
    ]
    for answer in answers:
        assert answer.content == none.content
        assert answer.headers["www-authenticate"] == 'Bearer realm="caketin", error="invalid_token"'
    # A token anywhere but in the header is none.
    named = f"{row.query}{'&' if row.query else '?'}access_token={known}"
    url = row.path.format(**scene.ids) + named
    answer = scene.http.request(row.method, url, json=row.body, headers={"Cookie": f"token={known}"})
    assert answer.status_code == 401


@pytest.mark.parametrize("row", **rows(GUARDED))
def test_two_authorization_headers_are_none(scene: Scene, row: Row) -> None:
    twice = [("Authorization", f"Bearer {secret('acme-engine')}")] * 2
    answer = scene.http.request(row.method, row.path.format(**scene.ids), json=row.body, headers=twice)
    assert code(answer) == (401, "unauthenticated")


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("row", **rows(GUARDED))
def test_a_token_of_one_scope_may_what_the_table_says(scene: Scene, row: Row, scope: str) -> None:
    answer = scene.ask(row, bearer(f"acme-{scope}"))
    if scope in (row.scopes or ()):
        assert answer.status_code == STATUS_OF_RIGHT.get(row.id, row.status), answer.text
        return
    assert code(answer) == (403, "forbidden")
    if row.path == "/metrics" and scope == "operator":
        assert 'tenant "*"' in answer.json()["detail"]
        return
    # The narrowest scope that would do is named: an operator may read, too, but a reader suffices.
    needed = [
        s for s in SCOPES if s in (row.scopes or {"operator"}) and (s != "operator" or row.scopes != READ)
    ]
    assert answer.json()["detail"].endswith(f"of scope {' or '.join(needed)}")
    assert f'scope="{" ".join(needed)}"' in answer.headers["www-authenticate"]


@pytest.mark.parametrize("row", **rows(GUARDED))
def test_a_token_of_all_tenants_sees_numbers_only(scene: Scene, row: Row) -> None:
    answer = scene.ask(row, bearer("everybody"))
    if row.all_tenants:
        assert answer.status_code == 200
        return
    assert code(answer) == (403, "forbidden")


def shape(answer: httpx.Response, ids: dict[str, str]) -> tuple[int, str, list[tuple[str, str]]]:
    """All of an answer, with the names that the caller asked by replaced."""
    text = answer.text
    for name, value in sorted(ids.items(), key=lambda pair: -len(pair[1])):
        text = text.replace(value, f"<{name}>")
    headers = [(n, v) for n, v in answer.headers.multi_items() if n not in {"date", "content-length"}]
    return answer.status_code, text, headers


UNKNOWN = {"engine_id": "e9", "ns": "0123456789abcdef", "job_id": "purge-9999"}


@pytest.mark.parametrize("row", **rows([r for r in GUARDED if "{" in r.path and r.method != "PUT"]))
def test_what_is_another_tenants_looks_exactly_like_what_there_is_not(scene: Scene, row: Row) -> None:
    mine = bearer("globex-everything")
    for own in ("nothing", "an engine of the same name"):
        if own != "nothing":
            # With an engine of its own, only the namespace and the job are another's.
            if "engines" in row.path:
                continue
            scene.http.put(RANK.format(**scene.ids), json=REGISTER, headers=mine)
        theirs = scene.ask(row, mine)
        assert theirs.status_code == row.elsewhere, theirs.text
        unknown = scene.ask(row, mine, **UNKNOWN)
        assert shape(theirs, scene.ids) == shape(unknown, scene.ids | UNKNOWN)


def test_what_another_tenant_deletes_stays_there(scene: Scene) -> None:
    before = everything_of_acme(scene)
    for row in GUARDED:
        if row.method in {"DELETE", "POST"}:
            scene.ask(row, bearer("globex-everything"))
    after = everything_of_acme(scene)
    assert before == after
    assert '"hit_pages":1' in after


def everything_of_acme(scene: Scene) -> str:
    seen = [r for r in TABLE if r.method == "GET" and r.path.startswith("/v1/") and r.path != "/v1/hit-rates"]
    seen.append(lookup("probe", ANY, explain=True))
    texts = [scene.ask(row, bearer("acme-operator")).text for row in seen]
    return re.sub(r'"lease_seconds_left":\d+', "", "".join(texts))


def test_the_same_names_in_two_tenants_are_two_things(scene: Scene) -> None:
    globex = scene.http.put(
        RANK.format(**scene.ids), json={**REGISTER, "incarnation": OTHER}, headers=bearer("globex-everything")
    )
    assert globex.status_code == 201
    other = globex.json()["namespace_id"]
    assert other != scene.ids["ns"]
    # Neither rank fenced the other off.
    beat = f"{RANK}/heartbeat".format(**scene.ids)
    for name, incarnation in (("acme-engine", INCARNATION), ("globex-everything", OTHER)):
        body = {"incarnation": incarnation, "epoch": 1}
        assert scene.http.post(beat, json=body, headers=bearer(name)).status_code == 200
    # And a page of one is no page of the other.
    body = {"page_hashes": [PAGE], "purpose": "route"}
    url = f"/v1/namespaces/{other}/lookup"
    assert scene.http.post(url, json=body, headers=bearer("globex-everything")).json()["hit_pages"] == 0


def test_a_tenant_in_the_body_is_refused(scene: Scene) -> None:
    body = {**REGISTER, "namespace": {**REGISTER["namespace"], "tenant": "globex"}}
    answer = scene.http.put(RANK.format(**scene.ids), json=body, headers=bearer("acme-engine"))
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "namespace.tenant")


def test_lists_and_hit_rates_show_the_own_tenant_only_and_all_to_who_sees_all(scene: Scene) -> None:
    body = {"page_hashes": [PAGE], "purpose": "prefetch"}
    url = f"/v1/namespaces/{scene.ids['ns']}/lookup"
    assert scene.http.post(url, json=body, headers=bearer("acme-engine")).json()["hit_pages"] == 1
    globex = bearer("globex-everything")
    assert scene.http.get("/v1/engines", headers=globex).json() == {"engines": [], "next_cursor": None}
    assert scene.http.get("/v1/namespaces", headers=globex).json() == {"namespaces": [], "next_cursor": None}

    def tenants(name: str) -> list[str]:
        rates = scene.http.get("/v1/hit-rates?by=tenant", headers=bearer(name)).json()
        return [row["labels"]["tenant"] for row in rates["series"]]

    assert tenants("globex-everything") == []
    assert tenants("acme-reader") == ["acme"]
    assert tenants("everybody") == ["acme"]


@pytest.mark.parametrize("name", [None, "nobody", "acme-expired", "acme-reader", "everybody"])
@pytest.mark.parametrize("row", **rows(OPEN))
def test_open_routes_answer_everybody(scene: Scene, row: Row, name: str | None) -> None:
    assert scene.ask(row, bearer(name)).status_code == row.status


@pytest.mark.parametrize("name", [None, "nobody", "acme-reader", "acme-operator"])
def test_readiness_tells_its_reasons_to_operators_of_all_tenants_only(scene: Scene, name: str | None) -> None:
    told = scene.http.get("/readyz", headers=bearer(name)).json()
    full = scene.http.get("/readyz", headers=bearer("everybody")).json()
    assert told["ready"] is full["ready"] is True
    assert [c["name"] for c in told["checks"]] == [c["name"] for c in full["checks"]]
    assert {c["detail"] for c in told["checks"]} == {""}
    assert {c["name"]: c["detail"] for c in full["checks"]}["tokens"] == "6 tokens"


def test_a_route_without_a_rule_is_refused_to_everybody_and_found_by_the_test(
    redis_url: str, tmp_path: Path
) -> None:
    with guarded(redis_url, tmp_path) as stack, httpx.Client(base_url=stack.url) as http:

        @stack.app.get("/v1/new")
        async def new() -> str:
            return "open by oversight"

        assert without_an_entry(stack.app) == {("GET", "/v1/new")}
        for name in (None, "acme-engine", "acme-operator", "everybody"):
            assert code(http.get("/v1/new", headers=bearer(name))) == (403, "forbidden")


def test_a_server_without_a_token_file_lets_its_own_machine_do_everything(client: httpx.Client) -> None:
    assert client.get("/metrics").status_code == 200
    assert client.get("/v1/namespaces").status_code == 200
    checks = {c["name"]: c["detail"] for c in client.get("/readyz").json()["checks"]}
    assert checks["eviction_policy"] == "noeviction"
    assert "tokens" not in checks
    # A token that somebody sends all the same changes nothing.
    assert client.get("/metrics", headers=bearer("nobody")).status_code == 200


def test_the_description_of_the_api_names_the_scopes(scene: Scene, client: httpx.Client) -> None:
    document = scene.http.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for (method, path), rule in RULES.items():
        listed = document["paths"][path][method.lower()]["security"]
        assert listed == [{"token": [scope]} for scope in rule.scopes]
    assert "securitySchemes" not in json.dumps(client.get("/openapi.json").json())
