"""No secret in any log line, answer, metric or printed setting: planted, and looked for everywhere."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest
import redis

from api.tokens import token_digest
from caketin.embedded_redis import EmbeddedRedis
from tests.api.access_scene import TOKENS, bearer, secret, write
from tests.api.serve_process import served

SALT, PASSWORD, CACHE_SALT, EXTRA = "plantedsalt", "plantedpassword", "plantedcachesalt", "plantedextrakey"
RANK = "/v1/engines/e/ranks/dp0-pp0-cp0-tp0"
REGISTER = {
    "incarnation": "a" * 32,
    "namespace": {"model": "m", "revision": "r", "page_size": 4, "namespace_salt": SALT},
    "pools": [{"name": "kv", "parts": [{"part": "k", "dtype": "uint8", "bytes": 64}]}],
}
NAMES = (
    "acme-engine",
    "acme-reader",
    "acme-operator",
    "acme-expired",
    "globex-everything",
    "everybody",
    "nobody",
)
DIGESTS = [token_digest(secret(name)).hex() for name in NAMES]
PLANTED = [SALT, PASSWORD, CACHE_SALT, EXTRA, *(secret(name)[3:] for name in NAMES), *DIGESTS]


@pytest.fixture(scope="module")
def with_password(tmp_path_factory: pytest.TempPathFactory):
    server = EmbeddedRedis.start(Path(tmp_path_factory.mktemp("valkey")), appendonly=False)
    with redis.Redis.from_url(server.url) as plain:
        plain.config_set("requirepass", PASSWORD)
    yield server.url.replace("redis://", f"redis://:{PASSWORD}@")
    server.stop()


def found_in(text: str) -> list[str]:
    return [value for value in PLANTED if value in text]


def ask_everything(http: httpx.Client) -> str:
    """Use right, wrong and misplaced secrets in every way; return all answers with their headers."""
    answers: list[httpx.Response] = []
    engine = bearer("acme-engine")
    answers.append(http.put(RANK, json=REGISTER, headers=engine))
    ns = answers[0].json()["namespace_id"]
    lookup = {"token_ids": [1, 2, 3, 4], "cache_salt": CACHE_SALT, "extra_key": EXTRA, "engine_id": "e"}
    for name in (None, *NAMES):
        headers = bearer(name)
        for path in ("/v1/engines", "/v1/engines/e", "/v1/namespaces", f"/v1/namespaces/{ns}"):
            answers += [http.get(path, headers=headers)]
        for path in ("/v1/hit-rates?by=tenant", "/metrics", "/healthz", "/readyz", "/openapi.json", "/docs"):
            answers += [http.get(path, headers=headers)]
        answers.append(http.post(f"/v1/namespaces/{ns}/lookup", json=lookup, headers=headers))
        answers.append(
            http.post(f"/v1/namespaces/{ns}/keys", json={"page_hashes": ["ab" * 32]}, headers=headers)
        )
    # Bodies that are refused while they hold a secret.
    broken = {**REGISTER, "namespace": {**REGISTER["namespace"], "page_size": "x", "extra": 1}}
    answers.append(http.put(RANK, json=broken, headers=engine))
    for fault in ({"cache_salt": [CACHE_SALT]}, {"extra_key": {"k": EXTRA}}, {"engine_id": "no such"}):
        answers += [http.post(f"/v1/namespaces/{ns}/lookup", json={**lookup, **fault}, headers=engine)]
    answers.append(http.put(RANK, content=json.dumps(REGISTER)[:-1], headers=engine))
    answers += [
        http.get("/v1/engines", headers={"Authorization": value})
        for value in (
            secret("acme-reader"),
            f"Basic {secret('acme-reader')}",
            f"Bearer {secret('acme-reader')}x",
        )
    ]
    return "\n".join(f"{a.status_code} {a.headers} {a.text}" for a in answers)


def misplace_tokens(http: httpx.Client) -> None:
    """Put tokens where they end up in what a server usually logs; the answer may repeat a caller's own."""
    token = secret("acme-reader")
    http.get(f"/v1/engines/{token}", headers=bearer("acme-reader"))
    http.get("/v1/engines", params={"access_token": token}, headers={"X-Request-ID": token})
    http.get(f"/{token}?token={token}", headers={"Referer": f"http://x/?t={token}", "User-Agent": token})


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_secret_is_told_anywhere(with_password: str, tmp_path: Path, log_format: str) -> None:
    file = write(tmp_path / "tokens.toml", TOKENS)
    flags = ["--token-file", str(file), "--log-requests", "--log-level", "debug", "--log-format", log_format]
    with (
        served(with_password, tmp_path, *flags) as process,
        httpx.Client(base_url=process.url, timeout=10, trust_env=False) as http,
    ):
        answers = ask_everything(http)
        misplace_tokens(http)
        # A new file that holds a token where a digest belongs is told in the log, without it.
        write(file, TOKENS.replace(DIGESTS[0], secret("acme-engine")))
        ready, deadline = "", time.monotonic() + 10
        while "last good file" not in ready:
            assert time.monotonic() < deadline, "the broken file was not told"
            time.sleep(0.05)
            ready = http.get("/readyz", headers=bearer("everybody")).text
        answers += ready
        log = process.log
    assert found_in(answers) == []
    assert found_in(log) == []
    # The log does say who called, and that the settings hold a password.
    for told in ("acme-engine", "expired token", "acme-expired", "***", "the old tokens stay"):
        assert told in log
    assert answers.count("200 ") > 30


def test_a_redis_that_is_away_and_a_wrong_password_are_told_without_it(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.toml", TOKENS)
    url = f"redis://user:{PASSWORD}@127.0.0.1:1/0"
    with (
        served(url, tmp_path, "--token-file", str(file), ready=False) as process,
        httpx.Client(base_url=process.url, timeout=10, trust_env=False) as http,
    ):
        answers = [http.get("/readyz", headers=bearer(name)) for name in (None, "everybody")]
        answers += [
            http.get(path, headers=bearer("acme-reader")) for path in ("/v1/engines", "/v1/namespaces")
        ]
        assert [a.status_code for a in answers] == [503] * 4
        # What is wrong with Redis, only an operator of all tenants learns.
        assert "cannot be reached" in answers[1].text
        assert "cannot be reached" not in answers[0].text
        log = process.log
    assert found_in("".join(a.text for a in answers) + log) == []
