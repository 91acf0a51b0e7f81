"""The control client against peers that misbehave, and a real control plane that comes and goes."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from api.settings import Settings, StoreSettings
from caketin.embedded_redis import EmbeddedRedis
from dataplane import deadline_http, name_resolver
from dataplane.child_process import free_port
from dataplane.control_client import (
    ControlClient,
    ControlPlaneAway,
    ControlRefused,
    ControlSettings,
    ModelIdentity,
    RankIdentity,
)
from dataplane.deadline_http import Deadline, DeadlineHttp, NoAnswer
from dataplane.messages import control
from metadata.codec import PageHashes
from metadata.errors import InvalidInput
from metadata.pools import Part, PoolSpec, RankPool, TrailingPages
from tests.dataplane.mover_world import hashes_of
from tests.dataplane.rude_server import RudeServer, answer, rude_server
from tests.servers import PATIENT, Stack, serving

ME = RankIdentity("engine-0", "dp0-pp0-cp0-tp0", "a" * 32)
NS = "0123456789abcdef"
CALL_SECONDS = 0.4
SLACK = 3.0
"""A bound for a busy machine: far above the deadline, far below what the peers here would take."""

POOLS = [
    RankPool(PoolSpec("kv", (Part("k", "uint8", 8),)), (0,)),
    RankPool(PoolSpec("swa", (Part("page", "uint8", 5),), hit_policy=TrailingPages(1)), (0,)),
]
LOOKUP = control.LookupResult(
    queried_pages=1,
    hit_pages=0,
    hit_tokens=0,
    restorable=[],
    pools={},
    generation=b"\0",
    advisory=False,
    degraded=False,
    unchecked_window_pages=0,
    miss=None,
)
GOOD = answer(200, msgspec.msgpack.encode(LOOKUP), "application/msgpack")


@contextlib.contextmanager
def client_of(url: str, seconds: float = CALL_SECONDS, me: RankIdentity = ME) -> Iterator[ControlClient]:
    client = ControlClient(ControlSettings(url, call_seconds=seconds), me)
    with contextlib.closing(client):
        yield client


def fails_in_time(url: str, match: str = ".") -> float:
    """Make a lookup that must fail as `ControlPlaneAway`; return how long it took."""
    with client_of(url) as client:
        start = time.monotonic()
        with pytest.raises(ControlPlaneAway, match=match):
            client.lookup(NS, hashes_of(1))
        return time.monotonic() - start


def drip(payload: bytes, pause: float = 0.1):
    """Send a byte every `pause` seconds."""

    def conversation(sock: socket.socket, server: RudeServer) -> None:
        server.read_request(sock)
        for i in range(len(payload)):
            sock.sendall(payload[i : i + 1])
            if server.ending.wait(pause):
                return

    return conversation


SILENCE = {
    "accepts and says nothing": lambda sock, server: server.ending.wait(20),
    "reads and says nothing": lambda sock, server: server.read_request(sock) and server.ending.wait(20),
    "drips its status line and headers": drip(GOOD),
    "drips headers without end": drip(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500),
    "drips its body": lambda sock, server: (
        server.read_request(sock),
        sock.sendall(GOOD[: GOOD.index(b"\r\n\r\n") + 4]),
        [sock.sendall(b"\x81") or server.ending.wait(0.1) for _ in range(100)],
    ),
    "promises more than it sends": lambda sock, server: (
        server.read_request(sock),
        sock.sendall(GOOD.replace(b"content-length: ", b"content-length: 9")),
        server.ending.wait(20),
    ),
    "drips interim answers": drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0.01),
}


@pytest.mark.parametrize("peer", SILENCE)
def test_no_peer_holds_a_call_beyond_its_deadline(peer):
    with rude_server(SILENCE[peer]) as server:
        assert CALL_SECONDS * 0.9 <= fails_in_time(server.url, "no answer in time") < CALL_SECONDS + SLACK
        assert server.connections == 1, "a time-out is not tried again"


def test_a_peer_that_does_not_read_a_large_body_is_given_up_at_the_deadline():
    with (
        rude_server(lambda sock, server: server.ending.wait(20)) as server,
        client_of(server.url) as client,
    ):
        start = time.monotonic()
        with pytest.raises(ControlPlaneAway, match="no answer in time"):
            client.lookup(NS, PageHashes(bytes(32) * 2_000_000))
        assert time.monotonic() - start < CALL_SECONDS + SLACK


def test_an_address_that_swallows_packets_is_given_up_at_the_deadline():
    # A listener whose queue is full answers no further SYN on loopback.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        try:
            assert fails_in_time(url) < CALL_SECONDS + SLACK
        finally:
            for sock in waiting:
                sock.close()


def test_a_resolver_that_hangs_is_given_up_at_the_deadline_and_has_one_thread(monkeypatch):
    """`getaddrinfo` knows no time-out. There is no other way to a hanging resolver than to replace it."""
    release, asked = threading.Event(), []
    real = socket.getaddrinfo

    def hanging(host, port, *args, flags=0, **kwargs):
        if flags:
            return real(host, port, *args, flags=flags, **kwargs)
        asked.append(host)
        release.wait(20)
        raise socket.gaierror("gone")

    monkeypatch.setattr(name_resolver.socket, "getaddrinfo", hanging)
    with client_of("http://control.invalid:1") as client:
        start = time.monotonic()
        for _ in range(3):
            with pytest.raises(ControlPlaneAway, match="in time"):
                client.lookup(NS, hashes_of(1))
        assert time.monotonic() - start < 3 * CALL_SECONDS + SLACK
        assert asked == ["control.invalid"]
        release.set()


def test_a_name_that_does_not_exist_is_the_control_plane_being_away():
    fails_in_time("http://control.invalid:1")


def test_a_name_is_resolved_and_every_address_of_it_is_tried(monkeypatch):
    def talk(sock, server):
        while server.read_request(sock):
            sock.sendall(GOOD)

    with rude_server(talk) as server, client_of(f"http://localhost:{server.port}") as client:
        nobody = free_port()
        real = name_resolver._addresses
        monkeypatch.setattr(
            name_resolver,
            "_addresses",
            lambda host, port, flags: (
                real(host, port, flags) if flags else [("127.0.0.1", nobody), ("127.0.0.1", server.port)]
            ),
        )
        assert client.lookup(NS, hashes_of(1)).queried_pages == 1


def test_nobody_listening_is_tried_twice_and_then_away():
    url = f"http://127.0.0.1:{free_port()}"
    assert fails_in_time(url) < CALL_SECONDS + SLACK


NO_ANSWER = {
    "an HTML page": answer(200, b"<html>Welcome</html>", "text/html"),
    "an empty answer": answer(200, b""),
    "no content": b"HTTP/1.1 204 X\r\n\r\n",
    "a redirect": answer(302, b"", extra="location: http://elsewhere/\r\n"),
    "JSON in place of msgpack": answer(200, b'{"queried_pages": 1}'),
    "msgpack of another call": answer(200, msgspec.msgpack.encode({"committed": 1}), "application/msgpack"),
    "msgpack cut short": answer(200, msgspec.msgpack.encode(LOOKUP)[:-3], "application/msgpack"),
    "msgpack nested deep": answer(200, b"\x91" * 5000 + b"\x90", "application/msgpack"),
    "a proxy's 502": answer(502, b"<html>Bad Gateway</html>", "text/html"),
    "a 500 without a problem": answer(500, b"Internal Server Error", "text/plain"),
    "a 404 that is no problem": answer(404, b'{"detail": "Not Found"}'),
    "no HTTP": b"220 mail.example ESMTP\r\n",
    "random bytes": bytes(range(256)),
    "a broken chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "headers without end": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000,
    "an answer cut off": GOOD[:-2],
    "a chunk cut off": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nab",
    "two lengths": GOOD.replace(b"content-type", b"content-length: 3\r\ncontent-type"),
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + GOOD,
}


@pytest.mark.parametrize("peer", NO_ANSWER)
def test_an_answer_that_is_not_the_control_plane_s_is_the_control_plane_being_away(peer):
    def conversation(sock, server):
        server.read_request(sock)
        sock.sendall(NO_ANSWER[peer])

    with rude_server(conversation) as server:
        fails_in_time(server.url)
        assert len(server.requests) == 1, "what was answered is not asked again"


def test_an_answer_without_end_is_given_up_before_memory_is(monkeypatch):
    monkeypatch.setattr(deadline_http, "MAX_ANSWER_BYTES", 100_000)

    def conversation(sock, server):
        server.read_request(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n")
        while not server.ending.is_set():
            sock.sendall(b"x" * 65_536)

    with rude_server(conversation) as server:
        fails_in_time(server.url, "more than")


PROBLEM = {
    "type": "/problems/stale_incarnation",
    "title": "t",
    "status": 409,
    "code": "stale_incarnation",
    "detail": "a newer life has registered",
    "errors": [{"field": "incarnation", "code": "stale", "detail": "is old"}],
}


@pytest.mark.parametrize(("status", "passing"), [(409, False), (422, False), (429, True), (503, True)])
def test_a_problem_is_a_refusal_with_its_code(status, passing):
    def conversation(sock, server):
        while server.read_request(sock):
            body = json.dumps({**PROBLEM, "status": status}).encode()
            sock.sendall(answer(status, body, "application/problem+json"))

    with rude_server(conversation) as server, client_of(server.url) as client:
        calls = [
            lambda: client.lookup(NS, hashes_of(1)),
            lambda: client.commit(NS, hashes_of(1), {"kv": control.StoredPool(pages="all", shards=[0])}),
            lambda: client.missing(NS, hashes_of(1), None, {}),
            lambda: client.heartbeat(1),
            client.leave,
            lambda: client.register(ModelIdentity("m", "r", 4), POOLS),
        ]
        for call in calls:
            with pytest.raises(ControlRefused) as refused:
                call()
            error = refused.value
            assert (error.refusal, error.status, error.passing) == ("stale_incarnation", status, passing)
            assert error.errors[0].field == "incarnation"
        assert len(server.requests) == len(calls)
        assert server.connections == 1, "connections are kept"


def test_a_connection_that_breaks_before_an_answer_is_tried_once_more():
    def conversation(sock, server):
        server.read_request(sock)
        if server.connections > 1:
            sock.sendall(GOOD)

    with rude_server(conversation) as server, client_of(server.url) as client:
        assert client.lookup(NS, hashes_of(1)).queried_pages == 1
        first, second = server.requests
        assert first == second, "the same request id, so that it counts once"
        assert msgspec.msgpack.decode(first.partition(b"\r\n\r\n")[2])["request_id"]


def test_a_connection_that_always_breaks_is_tried_twice_and_no_more():
    with rude_server(lambda sock, server: server.read_request(sock)) as server:
        fails_in_time(server.url)
        assert server.connections == 2


def test_a_reset_in_place_of_an_answer_is_tried_twice():
    def conversation(sock, server):
        server.read_request(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with rude_server(conversation) as server:
        fails_in_time(server.url)
        assert server.connections == 2


def test_a_kept_connection_that_the_server_closed_is_replaced():
    def one_answer(sock, server):
        server.read_request(sock)
        sock.sendall(GOOD)

    with rude_server(one_answer) as server, client_of(server.url) as client:
        for _ in range(5):
            client.lookup(NS, hashes_of(1))
        assert server.connections == 5
        assert len(server.requests) == 5


def test_several_kept_connections_that_the_server_closed_cost_no_call():
    """One retry is not enough for two dead connections: an idle one is looked at before it is used."""
    together, closing = threading.Barrier(4), threading.Event()

    def conversation(sock, server):
        server.read_request(sock)
        if server.connections <= 4:
            together.wait(10)
        sock.sendall(GOOD)
        closing.wait(10)

    with rude_server(conversation) as server, client_of(server.url, 20) as client:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: client.lookup(NS, hashes_of(1)), range(4)))
        assert server.connections == 4
        closing.set()
        server.wait_closed(4)
        client.lookup(NS, hashes_of(1))
        assert len(server.requests) == 5


@pytest.mark.parametrize("status", [302, 304])
def test_leaving_is_not_done_by_an_answer_that_is_none(status):
    def conversation(sock, server):
        server.read_request(sock)
        sock.sendall(answer(status, b"", extra="location: http://elsewhere/\r\n"))

    with (
        rude_server(conversation) as server,
        client_of(server.url) as client,
        pytest.raises(ControlPlaneAway, match=str(status)),
    ):
        client.leave()


def test_both_tries_share_one_deadline():
    def conversation(sock, server):
        server.read_request(sock)
        if server.connections > 1:
            server.ending.wait(20)

    with rude_server(conversation) as server:
        assert fails_in_time(server.url, "in time") < CALL_SECONDS + SLACK
        assert server.connections == 2


def test_a_closed_client_fails_and_closes_twice():
    with client_of(f"http://127.0.0.1:{free_port()}") as client:
        client.close()
        client.close()
        with pytest.raises(ControlPlaneAway, match="closed"):
            client.lookup(NS, hashes_of(1))


def test_closing_under_a_running_call_ends_it_as_away():
    asked = threading.Event()

    def conversation(sock, server):
        server.read_request(sock)
        asked.set()
        server.ending.wait(20)

    with (
        rude_server(conversation) as server,
        client_of(server.url, 20) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(client.lookup, NS, hashes_of(1))
        assert asked.wait(10)
        client.close()
        server.ending.set()
        assert isinstance(running.exception(timeout=10), ControlPlaneAway)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:7411", "ftp://h:1", "http://", "http://h:port", "http://h:99999", "nonsense"]
)
def test_a_url_that_is_none_is_refused_at_once(url):
    with pytest.raises(InvalidInput):
        ControlClient(ControlSettings(url), ME)


@pytest.mark.parametrize(
    ("field", "value"),
    [("engine_id", "../x"), ("engine_id", ""), ("rank", "tp0"), ("incarnation", "a&b=c"), ("rank", "a/b")],
)
def test_a_name_that_would_change_the_path_is_refused(field, value):
    names = {"engine_id": "e", "rank": "dp0-pp0-cp0-tp0", "incarnation": "a"} | {field: value}
    with pytest.raises(InvalidInput) as refused:
        RankIdentity(**names)
    assert refused.value.errors[0].field == field


def test_a_url_with_a_path_keeps_it():
    def conversation(sock, server):
        while server.read_request(sock):
            sock.sendall(GOOD)

    with rude_server(conversation) as server, client_of(f"{server.url}/caketin/") as client:
        client.lookup(NS, hashes_of(1))
        assert server.requests[0].startswith(b"POST /caketin/v1/namespaces/")


def test_a_deadline_that_has_passed_reaches_nobody():
    with rude_server(lambda sock, server: None) as server:
        http = DeadlineHttp(server.url)
        with pytest.raises(NoAnswer):
            http.exchange("GET", "/", None, {}, Deadline(0))
        http.close()
        assert server.connections == 0


def test_eight_threads_share_a_client_and_each_gets_its_own_answer():
    def echo(sock, server):
        # The heartbeat's epoch comes back as the lease, so that a mixed-up answer shows.
        while raw := server.read_request(sock):
            epoch = json.loads(raw.partition(b"\r\n\r\n")[2])["epoch"]
            sock.sendall(answer(200, json.dumps({"lease_seconds": epoch}).encode()))

    with rude_server(echo) as server, client_of(server.url, 20) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: client.heartbeat(i).lease_seconds, range(200)))
    assert answers == list(range(200))


@pytest.fixture
def coming_and_going(tmp_path: Path) -> Iterator[Settings]:
    server = EmbeddedRedis.start(tmp_path / "redis", appendonly=False)
    store = StoreSettings(kind="file", path=str(tmp_path / "store"))
    yield Settings(redis_url=server.url, port=free_port(), store=store, **PATIENT)
    server.stop()


def test_a_client_goes_on_after_the_control_plane_was_started_again(coming_and_going: Settings):
    url = f"http://127.0.0.1:{coming_and_going.port}"
    with client_of(url, 5) as client:
        with serving(coming_and_going):
            ns = client.register(ModelIdentity("m", "r", 4), POOLS).namespace_id
            for _ in range(3):
                client.lookup(ns, hashes_of(2))
        with pytest.raises(ControlPlaneAway):
            client.lookup(ns, hashes_of(2))
        with serving(coming_and_going):
            assert client.lookup(ns, hashes_of(2)).queried_pages == 2


def test_all_calls_of_a_rank_s_life_over_real_http(stack: Stack):
    with client_of(stack.url, 5, replace(ME, engine_id="life")) as client:
        registered = client.register(ModelIdentity("life", "r", 4, namespace_salt="s"), POOLS, {"node": "n"})
        ns, hashes = registered.namespace_id, hashes_of(4)
        assert registered.tenant == "default"
        assert client.heartbeat(registered.epoch).lease_seconds == 30
        assert client.lookup(ns, hashes).hit_pages == 0
        both = {n: control.StoredPool(pages="all", shards=[0]) for n in ("kv", "swa")}
        assert client.commit(ns, hashes, both).complete == 4
        found = client.lookup(ns, hashes)
        assert (found.hit_pages, found.pools) == (4, {"kv": 4, "swa": 4})
        lost = {"swa": control.MissingPool(pages=[(3, 3)], shards=[0], reason="gone")}
        assert client.missing(ns, hashes, found.generation, lost).cleared == 1
        assert client.lookup(ns, hashes).hit_pages == 3
        assert client.lookup(ns, hashes, pools={"kv": control.PoolQuery()}).hit_pages == 4
        assert client.lookup(ns, hashes, min_pages=4).hit_pages == 0
        with pytest.raises(ControlRefused) as refused:
            client.lookup(ns, hashes, pools={"mamba": control.PoolQuery()})
        assert refused.value.refusal == "unknown_pool"
        client.leave()
        client.leave()


def test_eight_threads_on_the_real_control_plane(stack: Stack):
    me = replace(ME, engine_id="threads")
    with client_of(stack.url, 20, me) as client, ThreadPoolExecutor(8) as pool:
        ns = client.register(ModelIdentity("threads", "r", 4), POOLS).namespace_id
        sizes = [1 + i % 7 for i in range(80)]
        found = pool.map(lambda n: client.lookup(ns, hashes_of(n)).queried_pages, sizes)
        assert list(found) == sizes


def test_a_connection_with_bytes_beside_the_answer_is_not_used_again():
    """They would be taken for the answer to the next call: of other pages."""
    other = msgspec.msgpack.encode(msgspec.structs.replace(LOOKUP, queried_pages=9))
    stale = GOOD.replace(msgspec.msgpack.encode(LOOKUP), other)

    def conversation(sock, server):
        while server.read_request(sock):
            sock.sendall(GOOD + stale)

    with rude_server(conversation) as server, client_of(server.url) as client:
        assert [client.lookup(NS, hashes_of(1)).queried_pages for _ in range(3)] == [1, 1, 1]
        assert server.connections == 3


WHOLE_ANSWERS = {
    "with interim answers before it": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 X\r\n\r\n" + GOOD, True),
    "in chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in msgspec.msgpack.encode(LOOKUP))
        + b"0\r\n\r\n",
        True,
    ),
    "without a length, ended by closing": (
        b"HTTP/1.1 200 OK\r\n\r\n" + msgspec.msgpack.encode(LOOKUP),
        False,
    ),
    "of HTTP/1.0": (GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
    "that says it closes": (GOOD.replace(b"content-type", b"connection: close\r\ncontent-type"), False),
    "that says it closes and does not stop": (
        GOOD.replace(b"content-type", b"connection: close\r\ncontent-type") + GOOD,
        False,
    ),
}


@pytest.mark.parametrize("form", WHOLE_ANSWERS)
def test_every_form_of_a_whole_answer_is_read_and_its_connection_kept_or_not(form):
    raw, kept = WHOLE_ANSWERS[form]

    def conversation(sock, server):
        while server.read_request(sock):
            sock.sendall(raw)
            if not kept:
                return

    with rude_server(conversation) as server, client_of(server.url, 5) as client:
        for _ in range(3):
            assert client.lookup(NS, hashes_of(1)).queried_pages == 1
        assert server.connections == (1 if kept else 3)
        assert len(server.requests) == 3, "nothing was asked twice"


def test_a_peer_that_ends_a_tls_handshake_badly_is_the_control_plane_being_away():
    with rude_server(lambda sock, server: sock.recv(1) and sock.sendall(b"220 no TLS here\r\n")) as server:
        assert fails_in_time(f"https://127.0.0.1:{server.port}", "SSL") < CALL_SECONDS + SLACK


def test_a_peer_that_never_answers_a_tls_handshake_is_given_up_at_the_deadline():
    with rude_server(lambda sock, server: server.ending.wait(20)) as server:
        url = f"https://127.0.0.1:{server.port}"
        assert fails_in_time(url, "no answer in time") < CALL_SECONDS + SLACK


def test_a_client_closed_while_it_connects_sends_nothing(monkeypatch):
    """Between connecting and sending there is a moment in which nobody but `close` can act."""
    with rude_server(lambda sock, server: server.read_request(sock)) as server:
        http = DeadlineHttp(server.url)
        connect = http._connect

        def closed_meanwhile(deadline: Deadline) -> socket.socket:
            sock = connect(deadline)
            http.close()
            return sock

        monkeypatch.setattr(http, "_connect", closed_meanwhile)
        with pytest.raises(NoAnswer, match="closed"):
            http.exchange("GET", "/", None, {}, Deadline(5))
        server.wait_closed(1)
        assert server.requests in ([], [b""])
