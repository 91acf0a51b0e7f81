"""Every call of the contract, and every error code of it, has a worked example."""

from __future__ import annotations

import pytest

from api.schemas.problems import KINDS
from tests.contract.fixtures import MODELS, load_all

# Codes that any call may answer with stand once, under "*".
CONTRACT: dict[str, set[str]] = {
    "*": {"unauthenticated", "forbidden", "body_too_large", "rate_limited", "redis_unavailable"},
    "PUT /v1/engines/{engine_id}/ranks/{rank}": {"invalid", "stale_incarnation", "pool_changed"},
    "POST /v1/engines/{engine_id}/ranks/{rank}/heartbeat": {"invalid", "unknown_rank", "stale_incarnation"},
    "DELETE /v1/engines/{engine_id}/ranks/{rank}": {"invalid"},
    "DELETE /v1/engines/{engine_id}": set(),
    "GET /v1/engines": {"invalid"},
    "GET /v1/engines/{engine_id}": {"unknown_engine"},
    "GET /v1/namespaces": {"invalid"},
    "GET /v1/namespaces/{ns}": {"unknown_namespace"},
    "DELETE /v1/namespaces/{ns}": {"unknown_namespace", "forbidden"},
    "GET /v1/jobs/{job_id}": {"unknown_job"},
    "POST /v1/namespaces/{ns}/keys": {
        "invalid",
        "too_many_pages",
        "unknown_namespace",
        "unknown_pool",
        "ambiguous_variant",
    },
    "POST /v1/namespaces/{ns}/lookup": {
        "invalid",
        "too_many_pages",
        "unknown_namespace",
        "unknown_engine",
        "unknown_rank",
        "unknown_pool",
        "ambiguous_variant",
    },
    "POST /v1/namespaces/{ns}/commit": {
        "invalid",
        "too_many_pages",
        "unknown_namespace",
        "unknown_engine",
        "unknown_rank",
        "unknown_pool",
        "quota_exceeded",
    },
    "POST /v1/namespaces/{ns}/missing": {
        "invalid",
        "too_many_pages",
        "unknown_namespace",
        "unknown_engine",
        "unknown_rank",
        "unknown_pool",
    },
    "GET /v1/hit-rates": {"invalid"},
    "GET /healthz": set(),
    "GET /readyz": set(),
    "POST /v1/sessions": {"invalid", "forbidden", "stale_incarnation"},
    "POST /v1/sessions/{session_id}/match": {"invalid", "unknown_session"},
    "POST /v1/sessions/{session_id}/slots": {"invalid", "unknown_session", "unknown_pool", "no_slots"},
    "POST /v1/sessions/{session_id}/publish": {"invalid", "unknown_session", "unknown_token"},
    "POST /v1/sessions/{session_id}/transfers": {"invalid", "unknown_session", "unknown_pool"},
    "GET /v1/transfers/{transfer_id}": {"unknown_transfer"},
    "DELETE /v1/transfers/{transfer_id}": {"unknown_transfer"},
    "DELETE /v1/locks/{token}": {"unknown_token"},
    "DELETE /v1/sessions/{session_id}": {"unknown_session"},
    "GET /v1/status": set(),
}
# Answers of the web framework's own making; no call lists them.
UNLISTED_CODES = {"not_found", "method_not_allowed", "internal"}

FIXTURES = load_all()


@pytest.mark.parametrize("call", [call for call in CONTRACT if call != "*"])
def test_every_call_has_an_example_of_success(call):
    assert [f.file for f in FIXTURES if f.call == call and 200 <= f.status < 300]


@pytest.mark.parametrize("call", CONTRACT)
def test_every_error_code_of_a_call_has_an_example_and_no_other_has(call):
    assert {f.response["code"] for f in FIXTURES if f.call == call and f.is_error} == CONTRACT[call]


def test_every_example_belongs_to_a_call_of_the_contract():
    assert {f.call for f in FIXTURES} == set(CONTRACT) == set(MODELS)


def test_every_code_has_a_status_and_a_title_and_is_used_by_a_call():
    listed = set().union(*CONTRACT.values())
    assert set(KINDS) == listed | UNLISTED_CODES


def test_no_two_examples_are_the_same():
    assert len({(f.call, f.name, f.status) for f in FIXTURES}) == len(FIXTURES)
