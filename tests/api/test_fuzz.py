"""Calls that schemathesis makes up from the OpenAPI document: no 5xx, and every answer as documented.

With Redis away the documented 503 is the only 5xx; a lookup still answers 200.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import booleans
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.openapi import CALLS
from tests.api.conftest import Stack

CONFORMANCE = (status_code_conformance, content_type_conformance, response_schema_conformance)
BOUNDED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@schemathesis.serializer("application/msgpack")
def msgpack(_ctx, value) -> bytes:
    """Write a body in the binary form; what that form cannot say, such as 2^70, as a number."""
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        return msgspec.msgpack.encode(2**64 - 1)


KV = {
    "name": "kv",
    "parts": [{"part": "k", "dtype": "uint8", "bytes": 8}],
    "shard_count": 2,
    "owned_shards": [0],
}
BODY = {
    "incarnation": "f" * 32,
    "namespace": {"model": "m", "revision": "r", "page_size": 4},
    "pools": [KV],
}


@pytest.fixture(scope="module")
def ns(stack: Stack) -> str:
    answer = httpx.put(f"{stack.url}/v1/engines/e/ranks/dp0-pp0-cp0-tp0", json=BODY)
    return answer.json()["namespace_id"]


def aim(case, ns: str, real: bool) -> None:
    """Put names that exist where made-up ones would end in 404 every time."""
    if not real:
        return
    for name, value in (("ns", ns), ("engine_id", "e"), ("rank", "dp0-pp0-cp0-tp0")):
        if case.path_parameters and name in case.path_parameters:
            case.path_parameters[name] = value
        if isinstance(case.body, dict) and case.body.get(name) is not None:
            case.body[name] = value
    for field in ("stored", "missing", "pools"):
        if isinstance(case.body, dict) and isinstance(case.body.get(field), dict) and case.body[field]:
            case.body[field] = {"kv": next(iter(case.body[field].values()))}


@pytest.fixture(scope="module")
def healthy(stack: Stack):
    return schemathesis.openapi.from_url(f"{stack.url}/openapi.json")


@pytest.fixture(scope="module")
def without_redis(redisless: httpx.Client):
    return schemathesis.openapi.from_url(f"{redisless.base_url}/openapi.json")


def for_made_up_cases(schema, call: tuple[str, str], check: Callable) -> None:
    method, path = call
    strategy = schema[path][method].as_strategy() | schema[path][method].as_strategy(
        generation_mode=GenerationMode.NEGATIVE
    )
    BOUNDED(given(case=strategy, real=booleans())(check))()


CALLED = [*sorted(CALLS), ("GET", "/metrics")]


@pytest.mark.parametrize("call", CALLED, ids=" ".join)
def test_no_call_fails_on_a_healthy_redis(call, healthy, ns):
    def check(case, real):
        aim(case, ns, real and call[0] != "DELETE")
        case.call_and_validate(checks=(not_a_server_error, *CONFORMANCE))

    for_made_up_cases(healthy, call, check)


@pytest.mark.parametrize("call", CALLED, ids=" ".join)
def test_without_redis_a_call_is_refused_as_documented(call, without_redis):
    def check(case, real):
        answer = case.call()
        case.validate_response(answer, checks=CONFORMANCE)
        if answer.status_code >= 500 and case.path != "/readyz":
            assert (answer.status_code, answer.json()["code"]) == (503, "redis_unavailable")
            assert not case.path.endswith("/lookup")

    for_made_up_cases(without_redis, call, check)
