"""`caketin ls`: what a control plane knows, as a table or as JSON."""

from __future__ import annotations

import json as jsonlib
import ssl
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal, TypeAlias

import httpx
import typer
from rich.console import Console
from rich.table import Table

from caketin.access_token import TokenFileOption, access_token
from metadata.errors import CaketinError

What: TypeAlias = Literal["engines", "namespaces", "pools"]
Row: TypeAlias = dict[str, Any]

_SECONDS: Final = 10.0
_PIECE: Final = 500
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP: Final = 1024


class ControlPlaneSaysNo(CaketinError):
    """The control plane did not answer, or answered with a problem."""

    code = "control_refused"


def ls(
    what: Annotated[What, typer.Argument(help="engines, namespaces, or pools")],
    url: Annotated[
        str, typer.Option(envvar="CAKETIN_URL", help="the control plane")
    ] = "http://127.0.0.1:7411",
    token_file: TokenFileOption = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List engines, namespaces, or pools."""
    try:
        token = access_token(token_file)
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        # No proxy of the environment, but its certificates (SSL_CERT_FILE) and the machine's.
        trust = ssl.create_default_context()
        with httpx.Client(
            base_url=url, timeout=_SECONDS, trust_env=False, headers=headers, verify=trust
        ) as http:
            rows = list(_READERS[what](http))
    except CaketinError as error:
        typer.echo(f"caketin ls: {error.detail}", err=True)
        raise typer.Exit(2) from None
    if json:
        typer.echo(jsonlib.dumps(rows, indent=2))
        return
    _print(what, rows)


def _engines(http: httpx.Client) -> Iterator[Row]:
    for engine in _listed(http, "engines"):
        yield {
            "engine": engine["engine_id"],
            "ranks": len(engine["ranks"]),
            "namespaces": engine["namespaces"],
        }


def _namespaces(http: httpx.Client) -> Iterator[Row]:
    for found in _listed(http, "namespaces"):
        view = _get(http, f"/v1/namespaces/{found['namespace_id']}")
        yield {
            "namespace": view["namespace_id"],
            "model": view["model"],
            "revision": view["revision"],
            "page_size": view["page_size"],
            "engines": view["engines"],
            "pools": len(view["pools"]),
            "pages": view["pages"],
            "bytes": view["bytes"],
        }


def _pools(http: httpx.Client) -> Iterator[Row]:
    for found in _listed(http, "namespaces"):
        for pool in _get(http, f"/v1/namespaces/{found['namespace_id']}")["pools"]:
            yield {
                "namespace": found["namespace_id"],
                "pool": pool["name"],
                "pool_id": pool["pool_id"],
                "policy": _policy(pool["hit_policy"]),
                "shards": f"{pool['shards_registered']}/{pool['shards_expected']}",
                "engines": pool["engines"],
                "pages": pool["pages"],
                "bytes": pool["bytes"],
            }


_READERS: Final[dict[What, Callable[[httpx.Client], Iterator[Row]]]] = {
    "engines": _engines,
    "namespaces": _namespaces,
    "pools": _pools,
}


def _listed(http: httpx.Client, name: str) -> Iterator[Row]:
    cursor: str | None = None
    while True:
        answer = _get(http, f"/v1/{name}", limit=_PIECE, **({"cursor": cursor} if cursor else {}))
        yield from answer[name]
        cursor = answer["next_cursor"]
        if cursor is None:
            return


def _get(http: httpx.Client, path: str, **query: str | int) -> Row:
    try:
        answer = http.get(path, params=query)
        found: Row = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ControlPlaneSaysNo(f"{http.base_url} does not answer as a control plane: {error}") from None
    if answer.is_error:
        raise ControlPlaneSaysNo(f"{http.base_url} refuses {path}: {found.get('detail', answer.status_code)}")
    return found


def _policy(policy: Row) -> str:
    numbers = ", ".join(str(value) for name, value in policy.items() if name != "kind")
    return f"{policy['kind']}({numbers})" if numbers else str(policy["kind"])


def _print(what: What, rows: list[Row]) -> None:
    if not rows:
        typer.echo(f"no {what}", err=True)
        return
    table = Table()
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    Console().print(table)


def _cell(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        return _size(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _size(count: float) -> str:
    for unit in _UNITS:
        if count < _STEP or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    raise AssertionError("the last unit takes all")
