"""Tokens for tests of access control, and a control plane that asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import redis

from api.tokens import Scope, Token, entry_text, token_digest, token_text
from tests.api.conftest import Stack, serving

PAST = datetime.now(UTC) - timedelta(seconds=5)
FUTURE = datetime.now(UTC) + timedelta(hours=1)


def secret(name: str) -> str:
    """The token of this name: no random one, so that a failing test says the same twice."""
    return token_text(token_digest(name))


def entry(name: str, tenant: str, *scopes: Scope, expires: datetime | None = None) -> str:
    return entry_text(Token(name, token_digest(secret(name)), tenant, frozenset(scopes), expires, name))


TOKENS = "\n".join(
    [
        entry("acme-engine", "acme", "engine"),
        entry("acme-reader", "acme", "reader", expires=FUTURE),
        entry("acme-operator", "acme", "operator"),
        entry("acme-expired", "acme", "engine", "reader", "operator", expires=PAST),
        entry("globex-everything", "globex", "engine", "reader", "operator"),
        entry("everybody", "*", "operator"),
    ]
)


def write(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


@contextlib.contextmanager
def guarded(redis_url: str, folder: Path, text: str = TOKENS, **settings) -> Iterator[Stack]:
    """A control plane with a token file; its Redis is empty at the start."""
    with redis.Redis.from_url(redis_url) as plain:
        plain.flushall()
    path = write(folder / "tokens.toml", text)
    with serving(redis_url, folder, token_file=str(path), **settings) as stack:
        yield stack


def bearer(name: str | None) -> dict[str, str]:
    return {} if name is None else {"Authorization": f"Bearer {secret(name)}"}


def client_of(stack: Stack, name: str | None) -> httpx.Client:
    return httpx.Client(base_url=stack.url, timeout=10, headers=bearer(name))
