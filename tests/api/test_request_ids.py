"""A request's id is taken or made, and stands in the answer, in a problem, and in every log line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.api.serve_process import served


def test_an_id_is_taken_and_comes_back(client):
    answer = client.get("/healthz", headers={"X-Request-ID": "router-7/abc"})
    assert answer.headers["x-request-id"] == "router-7/abc"
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_an_id_is_made_and_differs_from_call_to_call(client):
    ids = {client.get("/healthz").headers["x-request-id"] for _ in range(20)}
    assert len(ids) == 20


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a\tb", "{}", "a,b"])
def test_an_id_that_is_none_is_replaced(bad, client):
    assert client.get("/healthz", headers={"X-Request-ID": bad}).headers["x-request-id"] != bad


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/engines/nobody", 404),
        ("GET", "/nowhere", 404),
        ("PATCH", "/v1/engines", 405),
        ("GET", "/v1/engines?limit=0", 422),
        ("POST", f"/v1/namespaces/{'0' * 16}/lookup", 422),
    ],
)
def test_a_problem_names_its_request(method, path, status, client):
    answer = client.request(method, path, headers={"X-Request-ID": "r1"})
    assert (answer.status_code, answer.json()["request_id"]) == (status, "r1")
    assert answer.headers["x-request-id"] == "r1"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the log never said so"
        time.sleep(0.02)


def test_every_line_about_a_request_is_json_with_its_id(redis_url, tmp_path: Path):
    with served(redis_url, tmp_path, "--log-requests") as process:
        for i in range(5):
            httpx.get(f"{process.url}/v1/engines/e{i}", headers={"X-Request-ID": f"id-{i}"})
        # A line is written after its answer was sent.
        wait_until(lambda: "id-4" in process.log)
        lines = [json.loads(line) for line in process.log.splitlines() if line.startswith("{")]
    about = [line for line in lines if line.get("route") == "/v1/engines/{engine_id}"]
    assert [line["request_id"] for line in about] == [f"id-{i}" for i in range(5)]
    assert all({"timestamp", "level", "event", "status", "ms"} <= set(line) for line in about)


def test_without_log_requests_only_refused_ones_are_told(redis_url, tmp_path: Path):
    with served(redis_url, tmp_path) as process:
        httpx.get(f"{process.url}/v1/engines", headers={"X-Request-ID": "fine"})
        httpx.get(f"{process.url}/v1/engines/e", headers={"X-Request-ID": "refused"})
        wait_until(lambda: "refused" in process.log)
        log = process.log
    assert "fine" not in log


def test_a_fault_of_the_code_is_a_problem_with_the_id_and_a_traceback_in_the_log(stack, client, caplog):
    async def broken(*_args, **_more):
        raise ZeroDivisionError("planted")

    registry = stack.app.state.context.registry
    registry.engine = broken
    try:
        with caplog.at_level("ERROR"):
            answer = client.get("/v1/engines/e", headers={"X-Request-ID": "r9"})
    finally:
        del registry.engine
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert answer.json()["request_id"] == "r9"
    assert "planted" not in answer.text
