"""Limits: calls a second per token, calls at once, connections, pages and bytes of a body."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import limits
from api.limits import RateLimited, RateLimiter
from tests.api.access_scene import bearer, guarded
from tests.api.conftest import Stack, serving

HEAD = b"POST /v1/namespaces/0123456789abcdef/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n"


def test_a_full_bucket_gives_its_burst_at_once_and_then_says_when_to_come_again() -> None:
    limiter = RateLimiter(per_second=2, burst=3)
    assert [limiter.take("a", 100.0) for _ in range(3)] == [0, 0, 0]
    assert limiter.take("a", 100.0) == pytest.approx(0.5)
    # A refused call takes nothing: the wait is no longer for it.
    assert limiter.take("a", 100.0) == pytest.approx(0.5)
    assert limiter.take("a", 100.5) == 0
    assert limiter.take("a", 100.5) == pytest.approx(0.5)
    assert [limiter.take("a", 200.0) for _ in range(4)][:3] == [0, 0, 0]


def test_buckets_are_apart() -> None:
    limiter = RateLimiter(per_second=1, burst=1)
    assert limiter.take("a", 0.0) == 0
    assert limiter.take("b", 0.0) == 0
    assert limiter.take("a", 0.0) > 0


def test_a_rate_of_zero_does_not_limit_and_keeps_nothing() -> None:
    limiter = RateLimiter(per_second=0, burst=1)
    assert {limiter.take("a", 0.0) for _ in range(1000)} == {0}
    assert len(limiter) == 0


@given(
    st.floats(0.1, 1000),
    st.integers(1, 50),
    st.lists(st.floats(0, 2), min_size=1, max_size=200),
)
def test_no_more_calls_pass_than_burst_and_rate_allow_and_waiting_as_told_is_enough(
    rate, burst, pauses
) -> None:
    limiter = RateLimiter(rate, burst)
    now, passed = 0.0, 0
    for pause in pauses:
        now += pause
        wait = limiter.take("a", now)
        if wait == 0:
            passed += 1
        else:
            now += wait
            assert limiter.take("a", now) == 0
            passed += 1
        assert passed <= burst + rate * now + 1e-3


def test_buckets_that_are_full_are_forgotten_before_there_are_too_many(monkeypatch) -> None:
    monkeypatch.setattr(limits, "MAX_BUCKETS", 10)
    limiter = RateLimiter(per_second=1, burst=1)
    for i in range(10):
        limiter.take(i, float(i))
    assert len(limiter) == 10
    limiter.take("new", 9.5)
    assert len(limiter) == 2
    # The one that is not full is remembered.
    assert limiter.take(9, 9.5) > 0


@pytest.mark.parametrize(("seconds", "told"), [(0.001, "1"), (1.0, "1"), (1.2, "2"), (60.0, "60")])
def test_retry_after_is_in_whole_seconds_and_never_too_early(seconds: float, told: str) -> None:
    assert RateLimited.after(seconds, "").headers == {"Retry-After": told}


@pytest.fixture(scope="module")
def slow(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = Path(tmp_path_factory.mktemp("slow"))
    with guarded(redis_url, folder, calls_per_second=0.2, calls_burst=3) as stack:
        yield stack


def test_a_token_that_calls_too_often_is_told_when_to_come_again(slow: Stack) -> None:
    with httpx.Client(base_url=slow.url) as http:
        answers = [http.get("/v1/engines", headers=bearer("acme-reader")) for _ in range(5)]
        assert [a.status_code for a in answers] == [200, 200, 200, 429, 429]
        problem = answers[-1].json()
        assert (problem["code"], problem["status"]) == ("rate_limited", 429)
        assert answers[-1].headers["retry-after"] in {"4", "5"}
        assert answers[-1].headers["content-type"] == "application/problem+json"
        # Neither another token, nor who has none, nor a probe is held up by it.
        assert http.get("/v1/engines", headers=bearer("globex-everything")).status_code == 200
        assert http.get("/v1/engines").status_code == 401
        assert {http.get("/healthz", headers=bearer("acme-reader")).status_code for _ in range(9)} == {200}


def test_a_burst_of_calls_does_not_cost_a_rank_its_heartbeat(slow: Stack) -> None:
    with httpx.Client(base_url=slow.url, headers=bearer("acme-engine")) as http:
        lookup = {"page_hashes": ["ab" * 32], "purpose": "prefetch"}
        url = "/v1/namespaces/0123456789abcdef/lookup"
        statuses = [http.post(url, json=lookup).status_code for _ in range(5)]
        assert statuses == [404, 404, 404, 429, 429]
        beat = {"incarnation": "a" * 32, "epoch": 1}
        answer = http.post("/v1/engines/e/ranks/dp0-pp0-cp0-tp0/heartbeat", json=beat)
        assert answer.json()["code"] == "unknown_rank"


def test_calls_without_a_right_to_them_take_nothing_from_the_bucket(slow: Stack) -> None:
    with httpx.Client(base_url=slow.url, headers=bearer("everybody")) as http:
        assert {http.get("/v1/engines").status_code for _ in range(9)} == {403}
        assert http.get("/v1/hit-rates").status_code == 200


def test_a_server_without_tokens_limits_no_rate(redis_url: str, tmp_path: Path) -> None:
    with (
        serving(redis_url, tmp_path, calls_per_second=0.1, calls_burst=1) as stack,
        httpx.Client(base_url=stack.url) as http,
    ):
        assert {http.get("/v1/engines").status_code for _ in range(5)} == {200}


def address(stack: Stack) -> tuple[str, int]:
    url = httpx.URL(stack.url)
    return url.host, int(url.port or 0)


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextlib.contextmanager
def half_a_call(stack: Stack) -> Iterator[socket.socket]:
    """A call whose body does not end."""
    with socket.create_connection(address(stack), timeout=10) as sock:
        sock.sendall(HEAD + b"\r\n12345")
        yield sock


def test_calls_beyond_what_is_answered_at_once_are_refused_as_problems(
    redis_url: str, tmp_path: Path
) -> None:
    with (
        serving(redis_url, tmp_path, max_calls_at_once=2) as stack,
        httpx.Client(base_url=stack.url) as http,
        contextlib.ExitStack() as held,
    ):
        socks = [held.enter_context(half_a_call(stack)) for _ in range(2)]
        wait_until(lambda: http.get("/v1/engines").status_code == 429, "calls in flight do not count")
        answer = http.get("/v1/engines", headers={"X-Request-ID": "mine"})
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["content-type"] == "application/problem+json"
        assert (answer.headers["x-request-id"], answer.json()["request_id"]) == ("mine", "mine")
        assert (http.get("/healthz").status_code, http.get("/readyz").status_code) == (200, 200)
        # Both ways of ending give the place back: an answer, and a client that leaves.
        socks[0].sendall(b"67890")
        assert socks[0].recv(100).startswith(b"HTTP/1.1 422")
        wait_until(lambda: http.get("/v1/engines").status_code == 200, "an answered call kept its place")
        socks[1].close()
        with half_a_call(stack):
            assert http.get("/v1/engines").status_code == 200


def test_who_has_no_token_holds_no_place(redis_url: str, tmp_path: Path) -> None:
    with (
        guarded(redis_url, tmp_path, max_calls_at_once=2) as stack,
        httpx.Client(base_url=stack.url, headers=bearer("acme-reader")) as http,
        contextlib.ExitStack() as held,
    ):
        for _ in range(10):
            sock = held.enter_context(half_a_call(stack))
            assert sock.recv(100).startswith(b"HTTP/1.1 401")
        assert http.get("/v1/engines").status_code == 200


def test_a_connection_too_many_is_refused_as_a_problem_and_probes_are_answered(
    redis_url: str, tmp_path: Path
) -> None:
    with serving(redis_url, tmp_path, max_connections=3) as stack, contextlib.ExitStack() as held:
        clients = [held.enter_context(httpx.Client(base_url=stack.url)) for _ in range(3)]
        assert {client.get("/v1/engines").status_code for client in clients} == {200}
        late = held.enter_context(httpx.Client(base_url=stack.url))
        answer = late.get("/v1/engines")
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert answer.headers["connection"] == "close"
        assert (late.get("/healthz").status_code, late.get("/readyz").status_code) == (200, 200)
        clients[0].close()
        late.close()
        last = held.enter_context(httpx.Client(base_url=stack.url))
        wait_until(lambda: last.get("/v1/engines").status_code == 200, "a closed connection kept its place")


def test_far_too_many_connections_are_not_listened_to(redis_url: str, tmp_path: Path) -> None:
    with serving(redis_url, tmp_path, max_connections=1) as stack, contextlib.ExitStack() as held:
        first = held.enter_context(httpx.Client(base_url=stack.url))
        assert first.get("/v1/engines").status_code == 200
        socks = [held.enter_context(socket.create_connection(address(stack), timeout=5)) for _ in range(80)]
        with contextlib.suppress(ConnectionError):
            assert socks[-1].recv(1) == b""
        assert first.get("/healthz").status_code == 200


def test_a_body_of_too_many_bytes_and_a_call_of_too_many_pages_are_refused(client: httpx.Client) -> None:
    url = "/v1/namespaces/0123456789abcdef/lookup"
    assert client.post(url, content=b" " * ((8 << 20) + 1)).json()["code"] == "body_too_large"
    answer = client.post(url, json={"page_hashes": ["ab" * 32] * 65_537})
    assert (answer.status_code, answer.json()["code"]) == (422, "too_many_pages")
    assert client.post(url, json={"page_hashes": ["ab" * 32] * 65_536}).json()["code"] == "unknown_namespace"
