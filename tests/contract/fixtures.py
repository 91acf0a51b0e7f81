"""The worked examples of the contract: one JSON file a call and outcome, in this folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.schemas import agent as server_agent
from api.schemas import commit, engines, keys, lookup, namespaces, observe, problems
from api.schemas.wire import Body
from dataplane.messages import agent, control
from dataplane.messages import observe as client_observe

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Fixture:
    """One exchange; `request` is None for a call without a body, or where a file would be too long."""

    file: str
    call: str
    name: str
    request: Any
    status: int
    response: Any
    query: str = ""

    @property
    def is_error(self) -> bool:
        return isinstance(self.response, dict) and "code" in self.response


@dataclass(frozen=True)
class Models:
    """Server's and client's models of one call; None where there is no body."""

    server_request: type[Body] | None
    server_response: type[Body] | None
    client_request: Any
    client_response: Any


def load_all() -> list[Fixture]:
    files = sorted(FOLDER.glob("*.json"))
    return [Fixture(path.stem, **json.loads(path.read_text())) for path in files]


PROBLEM = Models(None, problems.Problem, None, control.Problem)
NO_SLOTS = Models(None, server_agent.NoSlotsProblem, None, control.Problem)

MODELS: dict[str, Models] = {
    "PUT /v1/engines/{engine_id}/ranks/{rank}": Models(
        engines.RegisterRequest, engines.RegisterResult, control.RegisterRequest, control.RegisterResult
    ),
    "POST /v1/engines/{engine_id}/ranks/{rank}/heartbeat": Models(
        engines.HeartbeatRequest, engines.HeartbeatResult, control.HeartbeatRequest, control.HeartbeatResult
    ),
    "DELETE /v1/engines/{engine_id}/ranks/{rank}": Models(None, None, None, None),
    "DELETE /v1/engines/{engine_id}": Models(None, None, None, None),
    "GET /v1/engines": Models(None, engines.EngineList, None, client_observe.EngineList),
    "GET /v1/engines/{engine_id}": Models(None, engines.EngineView, None, client_observe.EngineView),
    "GET /v1/namespaces": Models(None, namespaces.NamespaceList, None, client_observe.NamespaceList),
    "GET /v1/namespaces/{ns}": Models(None, namespaces.NamespaceView, None, client_observe.NamespaceView),
    "DELETE /v1/namespaces/{ns}": Models(None, namespaces.PurgeResult, None, client_observe.PurgeResult),
    "GET /v1/jobs/{job_id}": Models(None, namespaces.Job, None, client_observe.Job),
    "POST /v1/namespaces/{ns}/keys": Models(
        keys.KeysRequest, keys.KeysResult, control.KeysRequest, control.KeysResult
    ),
    "POST /v1/namespaces/{ns}/lookup": Models(
        lookup.LookupRequest, lookup.LookupResult, control.LookupRequest, control.LookupResult
    ),
    "POST /v1/namespaces/{ns}/commit": Models(
        commit.CommitRequest, commit.CommitResult, control.CommitRequest, control.CommitResult
    ),
    "POST /v1/namespaces/{ns}/missing": Models(
        commit.MissingRequest, commit.MissingResult, control.MissingRequest, control.MissingResult
    ),
    "GET /v1/hit-rates": Models(None, observe.HitRates, None, client_observe.HitRates),
    "GET /healthz": Models(None, observe.Health, None, client_observe.Health),
    "GET /readyz": Models(None, observe.Readiness, None, client_observe.Readiness),
    "POST /v1/sessions": Models(
        server_agent.SessionRequest, server_agent.SessionResult, agent.SessionRequest, agent.SessionResult
    ),
    "POST /v1/sessions/{session_id}/match": Models(
        server_agent.MatchRequest, server_agent.MatchResult, agent.MatchRequest, agent.MatchResult
    ),
    "POST /v1/sessions/{session_id}/slots": Models(
        server_agent.SlotsRequest, server_agent.SlotsResult, agent.SlotsRequest, agent.SlotsResult
    ),
    "POST /v1/sessions/{session_id}/publish": Models(
        server_agent.PublishRequest, server_agent.PublishResult, agent.PublishRequest, agent.PublishResult
    ),
    "POST /v1/sessions/{session_id}/transfers": Models(
        server_agent.TransferRequest,
        server_agent.TransferAccepted,
        agent.TransferRequest,
        agent.TransferAccepted,
    ),
    "GET /v1/transfers/{transfer_id}": Models(None, server_agent.Transfer, None, agent.Transfer),
    "DELETE /v1/transfers/{transfer_id}": Models(None, None, None, None),
    "DELETE /v1/locks/{token}": Models(None, None, None, None),
    "DELETE /v1/sessions/{session_id}": Models(None, None, None, None),
    "GET /v1/status": Models(None, server_agent.AgentStatus, None, agent.AgentStatus),
    "*": Models(None, None, None, None),
}


def response_models(fixture: Fixture) -> Models:
    if not fixture.is_error:
        return MODELS[fixture.call]
    return NO_SLOTS if fixture.response["code"] == "no_slots" else PROBLEM
