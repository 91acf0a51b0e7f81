"""The OpenAPI document is valid, complete, and means what the contract's worked examples mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from api.openapi import CALLS, COMMON
from api.schemas.problems import KINDS
from tests.api.conftest import Stack
from tests.contract.fixtures import MODELS, Fixture, load_all
from tests.contract.test_contract_is_covered import CONTRACT
from tests.contract.write_openapi_examples import FILE, text

MSGPACK = "application/msgpack"
FIXTURES = [f for f in load_all() if not f.file.startswith("agent")]
WITH_REQUEST = [f for f in FIXTURES if f.request is not None]
WITH_RESPONSE = [f for f in FIXTURES if f.response is not None and f.call != "*"]


@pytest.fixture(scope="module")
def document(stack: Stack) -> dict[str, Any]:
    return httpx.get(f"{stack.url}/openapi.json").json()


def operation(document: dict, call: str) -> dict:
    method, _, path = call.partition(" ")
    return document["paths"][path][method.lower()]


def check(document: dict, schema: dict, value: object) -> None:
    resource = Resource(contents=document, specification=DRAFT202012)
    registry = Registry().with_resource("urn:document", resource)
    reference = {"$ref": "urn:document" + schema["$ref"]}
    jsonschema.Draft202012Validator(reference, registry=registry).validate(value)


def ids(fixtures: list[Fixture]) -> dict:
    return {"argvalues": fixtures, "ids": [f.file for f in fixtures]}


def test_the_document_follows_the_specification(document):
    validate(document)


def test_every_route_is_described_by_hand_and_nothing_else_is(document):
    served = {
        f"{method.upper()} {path}" for path, operations in document["paths"].items() for method in operations
    }
    assert served == {f"{method} {path}" for method, path in CALLS} | {"GET /metrics"}
    agent = {"sessions", "transfers", "locks", "status"}
    contract = {call for call in MODELS if call != "*" and call.split("/")[2:3] not in [[a] for a in agent]}
    assert {f"{method} {path}" for method, path in CALLS} == contract


def test_every_reference_leads_somewhere_and_every_schema_is_used(document):
    body = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f'"#/components/schemas/{name}"' in body
    pieces = body.split('"$ref": "#/components/schemas/')[1:]
    for reference in {piece.partition('"')[0] for piece in pieces}:
        assert reference in document["components"]["schemas"]


@pytest.mark.parametrize("f", **ids([f for f in WITH_REQUEST if f.status < 300]))
def test_the_request_of_an_example_fits(f, document):
    content = operation(document, f.call)["requestBody"]["content"]
    check(document, content["application/json"]["schema"], f.request)
    assert (MSGPACK in content) == MODELS[f.call].server_request.takes_msgpack


@pytest.mark.parametrize("f", **ids(WITH_RESPONSE))
def test_the_answer_of_an_example_fits(f, document):
    answer = operation(document, f.call)["responses"][str(f.status)]
    media_type = "application/problem+json" if f.is_error else "application/json"
    check(document, answer["content"][media_type]["schema"], f.response)
    assert f.file in answer["content"][media_type]["examples"]


def test_a_request_with_an_unknown_field_does_not_fit(document):
    schema = operation(document, "POST /v1/namespaces/{ns}/lookup")["requestBody"]["content"]
    with pytest.raises(jsonschema.ValidationError):
        check(document, schema["application/json"]["schema"], {"page_hashes": [], "pages": 1})


@pytest.mark.parametrize("call", sorted(f"{method} {path}" for method, path in CALLS))
def test_a_call_lists_the_status_of_every_code_that_the_contract_gives_it(call, document):
    listed = {int(status) for status in operation(document, call)["responses"]}
    assert {KINDS[code].status for code in CONTRACT[call]} <= listed
    if "/v1/" in call:
        assert {KINDS[code].status for code in COMMON} | {503} <= listed


def test_the_examples_in_the_package_are_the_contract_s():
    assert Path(FILE).read_text() == text(), "run: python -m tests.contract.write_openapi_examples"


def test_no_example_holds_a_secret_that_the_schema_masks(document):
    salts = document["components"]["schemas"]["LookupRequest"]["properties"]["cache_salt"]
    assert "password" in json.dumps(salts)
