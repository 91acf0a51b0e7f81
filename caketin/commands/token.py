"""`caketin token`: makes, lists and revokes the tokens of a server's token file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from api.settings import variable_of
from api.token_file import mode_problem
from api.tokens import (
    ALL_TENANTS,
    SCOPES,
    SECRET_BYTES,
    AccessFile,
    Scope,
    Token,
    entry_text,
    read_access_file,
    token_digest,
    token_text,
)
from metadata.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke access tokens.")

FileOption = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar=variable_of("token_file"),
        help="the server's token file; `new` makes it",
        dir_okay=False,
    ),
]
_ENTRY: Final = re.compile(r"^\[\[token\]\][^\n]*\n(?:[a-z0-9_]+ *=[^\n]*(?:\n|\Z))*\n?", re.MULTILINE)
"""An entry as `new` writes it: its head, and the lines right below it with a name and a value each."""


@app.command()
def new(
    file: FileOption,
    tenant: Annotated[str, typer.Option(help=f"whose data it opens; {ALL_TENANTS}: numbers of all tenants")],
    scope: Annotated[list[str], typer.Option(help=f"what it allows: {', '.join(SCOPES)}; may be repeated")],
    *,
    token_id: Annotated[str | None, typer.Option("--id", help="its name in logs; none: one is made")] = None,
    days: Annotated[
        float | None, typer.Option(help="how long it is in force; none: until revoked", min=0)
    ] = None,
    comment: Annotated[str, typer.Option(help="for people")] = "",
) -> None:
    """Make a token, add its digest to the file, and print the token: once, it is kept nowhere."""
    shown = token_text(secrets.token_bytes(SECRET_BYTES))
    whose = "all" if tenant == ALL_TENANTS else tenant
    expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
    with _clear_errors(), _locked(file):
        scopes = frozenset(_scope(name) for name in scope)
        name = token_id or f"{whose[:40]}-{'-'.join(sorted(scopes))}-{secrets.token_hex(3)}"
        token = Token(name, token_digest(shown), tenant, scopes, expires, comment)
        before = file.read_text("utf-8") if file.exists() else ""
        between = "" if not before else "\n" if before.endswith("\n") else "\n\n"
        _replace(file, before + between + entry_text(token))
    typer.echo(shown)
    typer.echo(f"{name} is in {file}; a server that runs takes it within a second.", err=True)


@app.command(name="ls")
def list_tokens(file: FileOption) -> None:
    """List the tokens of the file; the tokens themselves are kept nowhere."""
    with _clear_errors():
        found = _read(file)
    table = Table()
    for column in ("id", "tenant", "scopes", "expires", "comment"):
        table.add_column(column, overflow="fold")
    now = datetime.now(UTC)
    for token in found.tokens:
        expires = "" if token.expires is None else token.expires.isoformat(" ", "seconds")
        past = " (past)" if token.has_expired(now) else ""
        table.add_row(
            token.token_id, token.tenant, ", ".join(sorted(token.scopes)), expires + past, token.comment
        )
    Console().print(table)


@app.command()
def revoke(token_id: Annotated[str, typer.Argument(help="name of the token")], file: FileOption) -> None:
    """Take a token out of the file; a server that runs refuses it within a second."""
    with _clear_errors(), _locked(file):
        before = _read(file)
        kept = [t for t in before.tokens if t.token_id != token_id]
        if len(kept) == len(before.tokens):
            raise InvalidInput(f"there is no token {token_id!r} in {file}")
        if not kept:
            raise InvalidInput("the last token of a file cannot be revoked: make its successor first")
        text = _without(file.read_text("utf-8"), token_id)
        if read_access_file(text) != AccessFile(tuple(kept), before.quotas):
            raise InvalidInput(f"{file} is not written as this command writes it: take the entry out by hand")
        _replace(file, text)
    typer.echo(f"{token_id} is revoked.", err=True)


def _scope(name: str) -> Scope:
    for scope in SCOPES:
        if scope == name:
            return scope
    raise InvalidInput(f"there is no scope {name!r}: use {', '.join(SCOPES)}")


def _read(file: Path) -> AccessFile:
    return read_access_file(file.read_text("utf-8"))


def _without(text: str, token_id: str) -> str:
    line = re.compile(rf'^id\s*=\s*["\']{re.escape(token_id)}["\']\s*(?:#.*)?$', re.MULTILINE)
    return _ENTRY.sub(lambda entry: "" if line.search(entry[0]) else entry[0], text)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let one command at a time change the file: two that add a token must not lose one."""
    folder = os.open(file.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(file: Path, text: str) -> None:
    """Write the whole file anew beside the old one and put it in its place, so that no server reads half.

    Raises:
        InvalidInput: a server would not take the result.
    """
    read_access_file(text)
    target = file.resolve()
    owner = target.stat() if target.exists() else None
    if owner is not None:
        problem = mode_problem(owner.st_mode, owner.st_uid, os.geteuid() or owner.st_uid)
        if problem is not None:
            raise InvalidInput(f"{file} {problem}")
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as written:
            if owner is not None:
                # The server that reads it may run as another user than root, who types this.
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(owner.st_mode))
            written.write(text)
            written.flush()
            os.fsync(descriptor)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        faults = [f"{e.field} {e.detail}" for e in error.errors]
        typer.echo(f"caketin token: {error.detail}" + "".join(f"\n  {f}" for f in faults), err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"caketin token: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(2) from None
