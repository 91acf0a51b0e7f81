"""Writes the worked examples into the package, where the OpenAPI document finds them.

python -m tests.contract.write_openapi_examples
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import api
from api.openapi import CALLS
from tests.contract.fixtures import Fixture, load_all

FILE = Path(api.__file__).parent / "openapi_examples.json"


def examples() -> dict[str, Any]:
    """Return call -> `request` or status -> file name -> OpenAPI example."""
    found: dict[str, Any] = {}
    for fixture in load_all():
        method, _, path = fixture.call.partition(" ")
        if (method, path) in CALLS:
            _add(found.setdefault(fixture.call, {}), fixture)
    return found


def _add(call: dict[str, Any], fixture: Fixture) -> None:
    if fixture.request is not None and fixture.status < 300:
        entry = {"summary": fixture.name, "value": fixture.request}
        call.setdefault("request", {})[fixture.file] = entry
    if fixture.response is not None:
        entry = {"summary": fixture.name, "value": fixture.response}
        call.setdefault(str(fixture.status), {})[fixture.file] = entry


def text() -> str:
    """Return the file's text."""
    return json.dumps(examples(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
