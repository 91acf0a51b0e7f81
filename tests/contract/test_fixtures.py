"""Server and client read and write the examples alike: same JSON values, and through msgpack same meaning."""

from __future__ import annotations

import json

import msgspec
import pytest
from pydantic import BaseModel

from api.schemas.bodies import decode_request, encode_response, validate
from api.schemas.engines import RegisterRequest
from api.schemas.keys import KeysRequest
from api.schemas.observe import HitRatesQuery
from api.schemas.problems import KINDS, Problem
from api.schemas.wire import REVEAL_SECRETS
from dataplane.messages.wire import decode, encode
from dataplane.messages.wire import decode_request as agent_decode_request
from metadata.codec import decode_json
from metadata.errors import InvalidInput
from metadata.page_runs import page_runs, runs_to_mask
from tests.contract.fixtures import MODELS, Fixture, load_all, response_models

FIXTURES = load_all()
JSON, MSGPACK = "application/json", "application/msgpack"


def ids(fixtures: list[Fixture]) -> dict:
    return {"argvalues": fixtures, "ids": [f.file for f in fixtures]}


# A request that is refused (422) is no message to either side; its own test is below.
REQUESTS = [f for f in FIXTURES if f.request is not None and f.status != 422]
MSGPACK_REQUESTS = [f for f in REQUESTS if MODELS[f.call].server_request.takes_msgpack]
RESPONSES = [f for f in FIXTURES if f.response is not None]
MSGPACK_RESPONSES = [f for f in RESPONSES if response_models(f).server_response.takes_msgpack]
REFUSED = [f for f in FIXTURES if f.is_error and f.response["code"] == "invalid" and f.request is not None]


def same(one: object, other: object) -> bool:
    """Whether two JSON values are the same text, the order of keys apart: 1 is neither 1.0 nor true."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def body(value: object) -> bytes:
    return json.dumps(value).encode()


def dumped(model: BaseModel) -> object:
    return model.model_dump(mode="json", exclude_unset=True, context=REVEAL_SECRETS)


@pytest.mark.parametrize("f", **ids(REQUESTS))
def test_the_server_reads_the_request_and_means_the_same(f):
    assert same(dumped(decode_request(body(f.request), JSON, MODELS[f.call].server_request)), f.request)


@pytest.mark.parametrize("f", **ids(REQUESTS))
def test_the_client_writes_the_request_to_the_byte(f):
    message = decode(body(f.request), "json", MODELS[f.call].client_request)
    assert same(json.loads(encode(message, "json")), f.request)
    assert agent_decode_request(body(f.request), MODELS[f.call].client_request) == message


@pytest.mark.parametrize("f", **ids(MSGPACK_REQUESTS))
def test_the_client_s_msgpack_means_to_the_server_what_its_json_does(f):
    message = decode(body(f.request), "json", MODELS[f.call].client_request)
    server = MODELS[f.call].server_request
    if any(token > 2**32 - 1 for token in f.request.get("token_ids") or ()):
        with pytest.raises(InvalidInput, match="send JSON"):
            encode(message, "msgpack")
        return
    packed = encode(message, "msgpack")
    assert decode_request(packed, MSGPACK, server) == decode_request(body(f.request), JSON, server)
    assert decode(packed, "msgpack", type(message)) == message


@pytest.mark.parametrize("f", **ids(RESPONSES))
def test_server_and_client_write_the_answer_to_the_byte(f):
    models = response_models(f)
    answer = validate(decode_json(body(f.response)), models.server_response)
    written, media_type = encode_response(answer)
    assert (media_type, same(json.loads(written), f.response)) == (JSON, True)
    message = decode(written, "json", models.client_response)
    assert same(json.loads(encode(message, "json")), f.response)


@pytest.mark.parametrize("f", **ids(MSGPACK_RESPONSES))
def test_the_server_s_msgpack_means_to_the_client_what_its_json_does(f):
    models = response_models(f)
    answer = validate(decode_json(body(f.response)), models.server_response)
    packed, media_type = encode_response(answer, accept=MSGPACK)
    assert media_type == MSGPACK
    message = decode(packed, "msgpack", models.client_response)
    assert message == decode(body(f.response), "json", models.client_response)
    assert validate(msgspec.msgpack.decode(packed), models.server_response, msgpack=True) == answer


@pytest.mark.parametrize("f", **ids(REFUSED))
def test_the_server_refuses_the_request_and_names_these_fields(f):
    with pytest.raises(InvalidInput) as refused:
        request = decode_request(body(f.request), JSON, MODELS[f.call].server_request)
        match request:  # rules of the domain that the handler asks for
            case RegisterRequest():
                request.namespace.to_namespace("default")
                request.to_rank_pools()
            case KeysRequest(layout=layout) if layout is not None:
                layout.to_layout()
    listed = [(e["field"], e["code"]) for e in f.response["errors"]]
    assert [(e.field, e.code) for e in refused.value.errors] == listed


@pytest.mark.parametrize("f", **ids([f for f in REFUSED if f.call.startswith("POST /v1/sessions")]))
def test_the_agent_refuses_the_request_and_names_the_first_field(f):
    with pytest.raises(InvalidInput) as refused:
        agent_decode_request(body(f.request), MODELS[f.call].client_request)
    assert refused.value.errors[0].field in {e["field"] for e in f.response["errors"]}


@pytest.mark.parametrize("f", **ids([f for f in FIXTURES if f.is_error]))
def test_a_problem_has_the_status_title_and_type_of_its_code(f):
    problem = f.response
    kind = KINDS[problem["code"]]
    assert (f.status, problem["status"], problem["title"]) == (kind.status, kind.status, kind.title)
    assert problem["type"] == f"/problems/{problem['code']}"
    Problem.model_validate({key: value for key, value in problem.items() if key != "pools"})


@pytest.mark.parametrize("f", **ids([f for f in FIXTURES if f.call == "GET /v1/hit-rates"]))
def test_the_hit_rates_query_is_read_as_the_example_says(f):
    parameters = dict(pair.split("=") for pair in f.query.split("&"))
    if not f.is_error:
        query = HitRatesQuery.parse(**parameters)
        assert query.step == f.response["step"]
        assert all(len(row["queried_pages"]) == query.window // query.step for row in f.response["series"])
        return
    with pytest.raises(InvalidInput) as refused:
        HitRatesQuery.parse(**parameters)
    assert [e.field for e in refused.value.errors] == [e["field"] for e in f.response["errors"]]


@pytest.mark.parametrize("f", **ids([f for f in MSGPACK_RESPONSES if "restorable" in f.response]))
def test_the_lookup_examples_add_up(f):
    answer = f.response
    runs = answer["restorable"]
    lengths = runs_to_mask(runs, answer["queried_pages"] + 1)
    assert page_runs(lengths) == [tuple(run) for run in runs]
    assert answer["hit_pages"] == (runs[-1][1] if runs else 0)
    assert (answer["miss"] is None) == (answer["hit_pages"] == answer["queried_pages"])
