"""Clients that lie, stall, flood or send nonsense: refused or let go, and the process stays small."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.api.serve_process import Served, served

RANK = "/v1/engines/e/ranks/dp0-pp0-cp0-tp0"
KV = {
    "name": "kv",
    "parts": [{"part": "k", "dtype": "uint8", "bytes": 8}],
    "shard_count": 64,
    "owned_shards": [0],
}
BODY = {
    "incarnation": "9d0c2c1e6f4b4c5fa2f3b9d1e4a7c8b0",
    "namespace": {"model": "m", "revision": "r", "page_size": 4},
    "pools": [KV],
}
HEADER_SECONDS, BODY_SECONDS = 1.0, 1.5
MIB = 1 << 20
GROWTH = 24 * MIB
"""What a process may grow by: one body of 8 MiB in the making, and the allocator's leftovers."""


@pytest.fixture(scope="module")
def process(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ["--header-seconds", str(HEADER_SECONDS), "--body-seconds", str(BODY_SECONDS)]
    with served(redis_url, Path(tmp_path_factory.mktemp("hostile")), *flags) as found:
        for _ in range(3):  # what a first request loads is no growth
            register(found)
            httpx.post(lookup_url(found), content=b" " * (9 * MIB))
            httpx.post(lookup_url(found), json={"page_hashes": ["00" * 32] * 65_536})
        yield found


@pytest.fixture(autouse=True)
def _answers_afterwards_and_stays_small(process: Served) -> Iterator[None]:
    before = process.rss()
    yield
    assert register(process).status_code in {200, 201}
    assert process.rss() - before < GROWTH


def register(process: Served) -> httpx.Response:
    return httpx.put(f"{process.url}{RANK}", json=BODY, timeout=5)


def lookup_url(process: Served) -> str:
    ns = register(process).json()["namespace_id"]
    return f"{process.url}/v1/namespaces/{ns}/lookup"


def path_of(process: Served) -> str:
    return lookup_url(process).removeprefix(process.url)


def connect(process: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", process.port), timeout=10)


def head(process: Served, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path_of(process)} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def until_closed(client: socket.socket, seconds: float) -> tuple[bytes, float]:
    """Return what came until the server closed, and how long that took."""
    started, got = time.monotonic(), b""
    client.settimeout(seconds)
    try:
        while piece := client.recv(65_536):
            got += piece
    except ConnectionResetError:
        pass
    return got, time.monotonic() - started


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def flood(client: socket.socket, total: int, piece: bytes = b"x" * 65_536) -> int:
    """Send until it is all sent or the server lets go; return what went out."""
    sent = 0
    try:
        while sent < total:
            client.sendall(piece)
            sent += len(piece)
    except (BrokenPipeError, ConnectionResetError, TimeoutError):
        pass
    return sent


def test_a_body_of_100_mib_is_refused_while_it_comes(process):
    with connect(process) as client:
        client.sendall(head(process, "Content-Type: application/json", f"Content-Length: {100 * MIB}"))
        flood(client, 100 * MIB)
        assert status_of(client.recv(65_536)) == 413
    answer = httpx.post(lookup_url(process), content=b"x" * (9 * MIB))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


def test_many_large_bodies_at_once_do_not_add_up(process):
    def send() -> None:
        with connect(process) as client:
            client.sendall(head(process, f"Content-Length: {100 * MIB}"))
            flood(client, 20 * MIB)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
        assert not t.is_alive()


def test_a_chunked_body_without_end_is_refused(process):
    with connect(process) as client:
        client.sendall(head(process, "Transfer-Encoding: chunked"))
        flood(client, 40 * MIB, b"10000\r\n" + b"x" * 65_536 + b"\r\n")
        answer, _ = until_closed(client, 10)
    assert status_of(answer) in {413, 0}


def test_a_head_that_comes_too_slowly_is_let_go(process):
    with connect(process) as client:
        client.sendall(head(process)[:20])
        started = time.monotonic()
        while time.monotonic() - started < 6:
            try:
                client.sendall(b"a")
            except OSError:
                break
            time.sleep(0.2)
        assert time.monotonic() - started < HEADER_SECONDS + 1.5


def test_a_connection_that_never_speaks_is_let_go(process):
    with connect(process) as client:
        answer, seconds = until_closed(client, 8)
    assert answer == b""
    assert seconds < HEADER_SECONDS + 1.5


def test_blank_lines_do_not_keep_a_connection_after_its_answer(process):
    with connect(process) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        while time.monotonic() - started < 6:
            try:
                client.sendall(b"\r\n")
            except OSError:
                break
            time.sleep(0.2)
        assert time.monotonic() - started < HEADER_SECONDS + 1.5


def test_headers_without_end_are_refused(process):
    with connect(process) as client:
        client.sendall(head(process)[:-2])
        flood(client, 64 * MIB, b"X-Padding: " + b"y" * 1000 + b"\r\n")
        answer, _ = until_closed(client, 10)
    assert status_of(answer) in {431, 0}


def test_a_body_that_comes_too_slowly_is_refused(process):
    with connect(process) as client:
        client.sendall(head(process, "Content-Length: 1000") + b"{")
        answer, seconds = until_closed(client, 10)
    assert status_of(answer) == 422
    assert b"too_slow" in answer
    assert BODY_SECONDS - 0.2 < seconds < BODY_SECONDS + 3


def test_a_body_that_nobody_asked_for_does_not_keep_a_connection(process):
    with connect(process) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        answer, seconds = until_closed(client, 10)
    assert status_of(answer) == 200
    assert seconds < BODY_SECONDS + 3


def test_a_client_that_does_not_read_its_answer_is_let_go(process):
    ns = path_of(process).split("/")[3]
    content = json.dumps({"page_hashes": ["00" * 32] * 2048}).encode()
    with connect(process) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        first = f"POST /v1/namespaces/{ns}/keys HTTP/1.1\r\nHost: localhost\r\n"
        first += f"Content-Length: {len(content)}\r\n\r\n"
        client.sendall(first.encode() + content)
        deadline = time.monotonic() + 12
        while connections_to(process.port, client.getsockname()[1]):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def connections_to(port: int, peer: int) -> int:
    """Count the server's established connections to a peer's port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    wanted = (f":{port:04X}", f":{peer:04X}", "01")
    return sum((r[1][8:], r[2][8:], r[3]) == wanted for r in rows)


def test_a_content_length_that_is_too_short_spoils_only_its_own_connection(process):
    with connect(process) as client:
        client.sendall(head(process, "Content-Length: 2") + b'{"page_hashes": []}')
        answer, _ = until_closed(client, 10)
    assert status_of(answer) in {400, 422}


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: -1"],
        ["Content-Length: 99999999999999999999999"],
        ["Content-Length: 5", "Content-Length: 6"],
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: gzip, gzip"],
    ],
)
def test_a_head_that_contradicts_itself_is_refused(lines, process):
    with connect(process) as client:
        client.sendall(head(process, *lines) + b"12345")
        answer, _ = until_closed(client, 10)
    assert status_of(answer) in {400, 422, 501}


def test_chunks_that_are_no_chunks_are_refused(process):
    with connect(process) as client:
        client.sendall(head(process, "Transfer-Encoding: chunked") + b"zz\r\nnot a chunk\r\n")
        answer, _ = until_closed(client, 10)
    assert status_of(answer) in {400, 0}


def test_bytes_that_are_no_http_are_refused(process):
    with connect(process) as client:
        client.sendall(bytes(range(256)) * 64)
        answer, _ = until_closed(client, 10)
    assert status_of(answer) in {400, 0}


def deep(levels: int) -> bytes:
    return b'{"page_hashes":' + b"[" * levels + b"]" * levels + b"}"


JSON_BODIES = {
    "empty": b"",
    "no json": b"page_hashes",
    "two values": b"{} {}",
    "a list": b"[]",
    "2^63": b'{"page_hashes": [], "first_page": 9223372036854775808}',
    "2^64 tokens": b'{"token_ids": [18446744073709551616]}',
    "2^53": b'{"page_hashes": [], "first_page": 9007199254740992}',
    "a long number": b'{"page_hashes": [], "first_page": ' + b"9" * 100_000 + b"}",
    "a large exponent": b'{"page_hashes": [], "first_page": 1e999}',
    "NaN": b'{"page_hashes": [], "first_page": NaN}',
    "Infinity": b'{"page_hashes": [], "min_pages": Infinity}',
    "a key twice": b'{"page_hashes": [], "page_hashes": []}',
    "a hash of odd length": b'{"page_hashes": ["abc"]}',
    "a hash of 63 digits": json.dumps({"page_hashes": ["a" * 63]}).encode(),
    "a hash that is no hash": json.dumps({"page_hashes": [{"a": 1}] * 1000}).encode(),
    "nested to the limit": deep(1_000),
    "nested deeper than a stack": deep(1_000_000),
    "bad UTF-8": b'{"page_hashes": ["\xff\xfe"]}',
    "half a surrogate": b'{"page_hashes": [], "request_id": "\\ud800"}',
    "a NUL": b'{"page_hashes": [], "request_id": "\\u0000"}',
    "a million keys": b"{" + b",".join(b'"%d":0' % i for i in range(500_000)) + b"}",
    "a million faults": json.dumps(
        {"page_hashes": [], "pools": {f"P {i}": 1 for i in range(16_000)}}
    ).encode(),
    "true for a number": b'{"page_hashes": [], "first_page": true}',
}


@pytest.mark.parametrize("name", JSON_BODIES)
def test_a_json_body_that_breaks_a_rule_is_refused(name, process):
    answer = httpx.post(lookup_url(process), content=JSON_BODIES[name], timeout=10)
    if name != "a NUL":
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid"), answer.text[:300]
    assert answer.status_code < 500
    assert len(answer.content) < 64 * 1024


MSGPACK_BODIES = {
    "empty": b"",
    "cut short": msgspec.msgpack.encode({"page_hashes": b"x" * 64})[:-5],
    "a length that lies": b"\x81\xabpage_hashes\xc6\xff\xff\xff\xff",
    "an array that lies": b"\xdd\xff\xff\xff\xff",
    "a map that lies": b"\xdf\xff\xff\xff\xff",
    "nested deep": b"\x91" * 1_000_000 + b"\xc0",
    "garbage": bytes(range(256)),
    "odd length": msgspec.msgpack.encode({"page_hashes": b"x" * 33}),
    "2^63": b"\x82\xabpage_hashes\xc4\x00\xaafirst_page\xcf\x80\x00\x00\x00\x00\x00\x00\x00",
    "NaN": b"\x82\xabpage_hashes\xc4\x00\xaafirst_page\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    "a key twice": b"\x82\xabpage_hashes\xc4\x00\xabpage_hashes\xc4\x00",
    "an extension": b"\xc7\xff\x01" + b"x" * 255,
    "hex where bytes belong": msgspec.msgpack.encode({"page_hashes": ["00" * 32]}),
    "bad UTF-8": b"\x81\xa2\xff\xfe\xc0",
}


@pytest.mark.parametrize("name", MSGPACK_BODIES)
def test_a_msgpack_body_that_breaks_a_rule_is_refused(name, process):
    headers = {"content-type": "application/msgpack"}
    answer = httpx.post(lookup_url(process), content=MSGPACK_BODIES[name], headers=headers, timeout=10)
    assert answer.status_code == 422, answer.text[:300]
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "multipart/form-data", "x" * 5000])
def test_a_body_of_another_type_is_refused(content_type, process):
    answer = httpx.post(lookup_url(process), content=b"{}", headers={"content-type": content_type})
    assert answer.status_code in {422, 400}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/namespaces/%00/lookup",
        "/v1/namespaces/..%2f..%2fetc/lookup",
        "/v1/engines/" + "x" * 30_000,
        "/v1/engines/a%20b",
        "/v1/engines?cursor=" + "A" * 5000,
        "/v1/engines?limit=9223372036854775808",
        "/v1/hit-rates?window=999999999d&step=1",
        "/v1/hit-rates?by=" + ",".join(map(str, range(2000))),
        "/v1/jobs/" + "j" * 100,
    ],
)
def test_a_path_that_means_nothing_is_refused(path, process):
    answer = httpx.get(f"{process.url}{path}")
    assert 400 <= answer.status_code < 500


def test_an_answer_that_would_be_huge_is_refused(process):
    ns = path_of(process).split("/")[3]
    body = {"page_hashes": ["00" * 32] * 65_536}
    answer = httpx.post(f"{process.url}/v1/namespaces/{ns}/keys", json=body, timeout=10)
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (422, "too_many_keys")


def test_a_request_id_that_would_forge_a_log_line_is_replaced(process):
    with connect(process) as client:
        client.sendall(
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: a b\tc\r\nConnection: close\r\n\r\n"
        )
        answer, _ = until_closed(client, 10)
    assert b"x-request-id: a b" not in answer
    assert status_of(answer) == 200
