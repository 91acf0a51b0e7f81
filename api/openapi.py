"""The OpenAPI document: what every call takes and gives, in both forms, with worked examples.

Handlers read raw bodies (limits first, then one decoding step), so the framework sees no body model. The
table here says what each call takes, gives and refuses; paths, parameters and summaries come from the routes.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from api.auth import RULES
from api.schemas import commit, engines, keys, lookup, namespaces, observe
from api.schemas.bodies import JSON, MSGPACK
from api.schemas.problems import KINDS, PROBLEM_MEDIA_TYPE, Problem
from api.schemas.wire import Body

OPENAPI_VERSION: Final = "3.1.0"
COMMON: Final = frozenset({"unauthenticated", "forbidden", "rate_limited", "internal"})
"""Codes of every call below `/v1`."""
_REF: Final = "#/components/schemas/{model}"
_MSGPACK_NOTE: Final = (
    "The same field names as in JSON. page_hashes and prefix_hashes are one binary string of 32 bytes a "
    "page, token_ids one of little-endian uint32, generation one byte a page."
)

_Mode = Literal["validation", "serialization"]


@dataclass(frozen=True, slots=True)
class Call:
    """What one call takes, gives and refuses.

    Attributes:
        gives: status -> model of the answer, None where there is no body.
        takes: model of the body, None where there is none.
        codes: of problems, beyond those of every call.
    """

    gives: Mapping[int, type[Body] | None]
    takes: type[Body] | None = None
    codes: frozenset[str] = frozenset()


def _call(
    gives: Mapping[int, type[Body] | None], takes: type[Body] | None = None, *, codes: str = ""
) -> Call:
    found = set(codes.split()) | {"redis_unavailable"}
    if takes is not None:
        found |= {"invalid", "body_too_large"}
    return Call(gives, takes, frozenset(found))


_RANK: Final = "/v1/engines/{engine_id}/ranks/{rank}"
_NS: Final = "/v1/namespaces/{ns}"
_MEMBERS: Final = "unknown_namespace unknown_engine unknown_rank unknown_pool too_many_pages"

CALLS: Final[dict[tuple[str, str], Call]] = {
    ("PUT", _RANK): _call(
        {201: engines.RegisterResult, 200: engines.RegisterResult},
        engines.RegisterRequest,
        codes="stale_incarnation pool_changed",
    ),
    ("DELETE", _RANK): _call({204: None}, codes="invalid stale_incarnation"),
    ("POST", f"{_RANK}/heartbeat"): _call(
        {200: engines.HeartbeatResult}, engines.HeartbeatRequest, codes="unknown_rank stale_incarnation"
    ),
    ("GET", "/v1/engines"): _call({200: engines.EngineList}, codes="invalid"),
    ("GET", "/v1/engines/{engine_id}"): _call({200: engines.EngineView}, codes="invalid unknown_engine"),
    ("DELETE", "/v1/engines/{engine_id}"): _call({204: None}, codes="invalid"),
    ("GET", "/v1/namespaces"): _call({200: namespaces.NamespaceList}, codes="invalid"),
    ("GET", _NS): _call({200: namespaces.NamespaceView}, codes="invalid unknown_namespace"),
    ("DELETE", _NS): _call({202: namespaces.PurgeResult}, codes="invalid unknown_namespace"),
    ("GET", "/v1/jobs/{job_id}"): _call({200: namespaces.Job}, codes="invalid unknown_job"),
    ("POST", f"{_NS}/lookup"): _call(
        {200: lookup.LookupResult}, lookup.LookupRequest, codes=f"{_MEMBERS} ambiguous_variant"
    ),
    ("POST", f"{_NS}/commit"): _call(
        {200: commit.CommitResult}, commit.CommitRequest, codes=f"{_MEMBERS} quota_exceeded"
    ),
    ("POST", f"{_NS}/missing"): _call({200: commit.MissingResult}, commit.MissingRequest, codes=_MEMBERS),
    ("POST", f"{_NS}/keys"): _call(
        {200: keys.KeysResult},
        keys.KeysRequest,
        codes="unknown_namespace unknown_pool ambiguous_variant too_many_pages",
    ),
    ("GET", "/v1/hit-rates"): _call({200: observe.HitRates}, codes="invalid"),
    ("GET", "/healthz"): Call({200: observe.Health}),
    ("GET", "/readyz"): Call({200: observe.Readiness, 503: observe.Readiness}),
}
"""Every call with a body of ours. `/metrics` gives Prometheus' text."""


def describe(app: FastAPI) -> None:
    """Have `app` describe itself with this document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def build(app: FastAPI) -> dict[str, Any]:
    """Return the document of `app`."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version=OPENAPI_VERSION,
        summary=app.summary,
        routes=app.routes,
    )
    document["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    references, definitions = _schemas()
    document["components"] = {"schemas": definitions}
    for (method, path), call in CALLS.items():
        operation = document["paths"][path][method.lower()]
        examples = _examples().get(f"{method} {path}", {})
        operation["responses"] = dict(_responses(path, call, references, examples))
        if call.takes is not None:
            operation["requestBody"] = {
                "required": True,
                "content": _content(call.takes, "validation", references, examples.get("request", {})),
            }
    if app.state.context.access.tokens is not None:
        _say_who_may(document)
    metrics = document["paths"]["/metrics"]["get"]["responses"]
    metrics["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return document


def _say_who_may(document: dict[str, Any]) -> None:
    """Name the scopes of every call; only a server with a token file asks for them."""
    description = "A line of the server's token file; `caketin token new` makes one."
    document["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": description}
    }
    for (method, path), rule in RULES.items():
        operation = document["paths"][path][method.lower()]
        operation["security"] = [{"token": [scope]} for scope in rule.scopes]


def _responses(
    path: str,
    call: Call,
    references: Mapping[tuple[type[Body], _Mode], Mapping[str, Any]],
    examples: Mapping[str, Any],
) -> Iterator[tuple[str, dict[str, Any]]]:
    headers = {"X-Request-ID": {"schema": {"type": "string"}, "description": "as it came, or made here"}}
    for status, model in call.gives.items():
        answer: dict[str, Any] = {"description": "Success" if status < 400 else "Not ready"}  # noqa: PLR2004
        if model is not None:
            named = examples.get(str(status), {})
            answer["content"] = _content(model, "serialization", references, named)
        yield str(status), answer | {"headers": headers}
    codes = call.codes | COMMON if path.startswith("/v1/") else call.codes
    for status in sorted({KINDS[code].status for code in codes}):
        listed = sorted(code for code in codes if KINDS[code].status == status)
        named = examples.get(str(status), {})
        media: dict[str, Any] = {"schema": references[Problem, "serialization"]}
        if named:
            media["examples"] = named
        yield (
            str(status),
            {
                "description": "; ".join(f"`{code}`: {KINDS[code].title}" for code in listed),
                "headers": headers,
                "content": {PROBLEM_MEDIA_TYPE: media},
            },
        )


def _content(
    model: type[Body],
    mode: _Mode,
    references: Mapping[tuple[type[Body], _Mode], Mapping[str, Any]],
    examples: Mapping[str, Any],
) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": references[model, mode]}
    if examples:
        media["examples"] = dict(examples)
    content = {JSON: media}
    if model.takes_msgpack:
        content[MSGPACK] = {"schema": {"description": _MSGPACK_NOTE}}
    return content


@cache
def _schemas() -> tuple[dict[tuple[type[Body], _Mode], dict[str, Any]], dict[str, Any]]:
    wanted: set[tuple[type[Body], _Mode]] = {(Problem, "serialization")}
    for call in CALLS.values():
        if call.takes is not None:
            wanted.add((call.takes, "validation"))
        wanted |= {(model, "serialization") for model in call.gives.values() if model is not None}
    ordered = sorted(wanted, key=lambda entry: (entry[0].__name__, entry[1]))
    references, definitions = models_json_schema(ordered, ref_template=_REF)
    return {key: references[key] for key in ordered}, definitions["$defs"]


@cache
def _examples() -> dict[str, Any]:
    """Return the contract's worked examples: call -> `request` or status -> name -> example."""
    file = importlib.resources.files("api").joinpath("openapi_examples.json")
    examples: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return examples
