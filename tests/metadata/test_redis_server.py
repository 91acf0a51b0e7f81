"""The door to Redis: deadlines, the circuit, repeats, redirections; over every topology where that fits."""

import asyncio
import signal
import time
from contextlib import asynccontextmanager

import pytest
import trustme
from redis.crc import key_slot

from metadata import redis_keys
from metadata.circuit import CircuitSettings
from metadata.errors import RedisUnavailable
from metadata.redis_server import SCRIPT_NAMES, RedisServer, RedisSettings, ScriptCall, pairs, script_text
from tests import redis_servers
from tests.redis_servers import start_server

QUICK = {"connect_seconds": 0.2, "command_seconds": 0.3}
CIRCUIT = CircuitSettings(failures_to_open=2, probe_seconds=0.05)


@asynccontextmanager
async def handle(url: str, **settings):
    server = RedisServer.connect(RedisSettings(url, **settings))
    try:
        yield server
    finally:
        await server.close()


async def until(ready, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.02)


@pytest.fixture
def own(tmp_path):
    """A server of this test's own, that may be frozen and killed."""
    server = start_server(tmp_path / "own", appendonly="yes")
    yield server
    if server.child.process.poll() is None:
        server.child.process.send_signal(signal.SIGCONT)
    server.child.stop()


async def test_answers_come_in_the_order_of_the_commands(redis_server):
    keys = [f"ct:{{{i}}}:x" for i in range(100)]
    await redis_server.commands([("SET", key, str(i)) for i, key in enumerate(keys)])
    assert await redis_server.commands([("GET", key) for key in keys]) == [b"%d" % i for i in range(100)]
    assert await redis_server.commands([]) == []


async def test_hashes_come_flat_and_pairs_makes_them_whole(redis_server):
    (flat,) = (await redis_server.commands([("HSET", "ct:{h}", "a", 1, "b", 2), ("HGETALL", "ct:{h}")]))[1:]
    assert pairs(flat) == {b"a": b"1", b"b": b"2"}


async def test_one_refused_command_is_an_error_after_all_were_answered(redis_server):
    await redis_server.commands([("SET", "ct:{x}", "text")])
    with pytest.raises(RedisUnavailable) as caught:
        await redis_server.commands([("INCR", "ct:{x}"), ("SET", "ct:{y}", "1")])
    assert caught.value.reason == "refused"
    assert "not an integer" in caught.value.detail
    assert await redis_server.commands([("GET", "ct:{y}")]) == [b"1"]


async def test_scripts_are_loaded_where_the_server_does_not_know_them(redis_stack, redis_server):
    keys = [[f"ct:{{{i}}}:r", f"ct:{{{i}}}:q"] for i in range(30)]
    calls = [ScriptCall("remove_rank", k, ["", "", 60]) for k in keys]
    for _ in range(2):
        assert await redis_server.run_all(calls) == [[b"ok", 0, []]] * 30
        for server in redis_stack.data:
            with server.plain() as plain:
                plain.script_flush()


async def test_scan_gives_every_matching_key_of_every_node(redis_server):
    wanted = {f"ct:{{ns:{i:02d}}}:p".encode() for i in range(64)}
    await redis_server.commands([("SET", key, "1") for key in wanted])
    await redis_server.commands([("SET", f"ct:{{other:{i}}}:p", "1") for i in range(64)])
    found = [key async for keys in redis_server.scan("ct:{ns:*", 10) for key in keys]
    assert set(found) == wanted


def test_every_script_is_listed_and_says_what_it_enforces():
    from importlib.resources import files

    there = {p.name.removesuffix(".lua") for p in files("metadata").joinpath("scripts").iterdir()}
    assert there - {"__init__.py", "__pycache__"} == set(SCRIPT_NAMES)
    assert all(script_text(name).startswith("-- ") for name in SCRIPT_NAMES)


async def test_more_callers_than_connections_wait_for_their_turn(own):
    async with handle(own.url, max_connections=3) as server:
        await asyncio.gather(*(server.commands([("SET", f"k{i}", "1")]) for i in range(200)))
        with own.plain() as plain:
            assert len(plain.client_list()) <= 3 + 1


async def test_of_many_first_callers_a_few_connect_at_once_and_the_others_use_what_comes_back(own):
    async with handle(own.url, command_seconds=20, connect_seconds=20) as server:
        (node,) = server._there.known()
        connect, now, most = node._connect, 0, 0

        async def counted():
            nonlocal now, most
            now += 1
            most = max(most, now)
            try:
                return await connect()
            finally:
                now -= 1

        node._connect = counted
        await asyncio.gather(*(server.commands([("SET", f"k{i}", "1")]) for i in range(64)))
        assert 1 <= most <= 4


async def test_a_connection_that_died_while_idle_costs_no_call(own):
    async with handle(own.url) as server:
        await asyncio.gather(*(server.commands([("SET", f"k{i}", "1")]) for i in range(5)))
        own.child.process.kill()
        own.child.process.wait()
        own.restart()
        await server.commands([("SET", "again", "1")])
        assert await server.commands([("GET", "k3"), ("GET", "again")]) == [b"1", b"1"]


async def test_a_frozen_server_holds_no_call_past_its_deadline(own):
    async with handle(own.url, **QUICK) as server:
        await server.commands([("SET", "a", "1")])
        own.child.process.send_signal(signal.SIGSTOP)
        calls = [server.commands([("GET", "a")]) for _ in range(100)]
        async with asyncio.timeout(3 * QUICK["command_seconds"]):
            found = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(f) for f in found} == {RedisUnavailable}


async def test_a_server_that_does_not_even_accept_holds_no_call_either(tmp_path):
    listening = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with handle(f"redis://127.0.0.1:{port}", **QUICK) as server:
        async with asyncio.timeout(3 * QUICK["command_seconds"]):
            with pytest.raises(RedisUnavailable) as caught:
                await server.commands([("GET", "a")])
    assert caught.value.reason == "timeout"
    listening.close()


async def test_a_cancelled_call_leaves_no_answer_behind_for_the_next(own):
    async with handle(own.url, max_connections=1, command_seconds=5) as server:
        await server.commands([("SET", "a", "first"), ("SET", "b", "second")])
        own.child.process.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(server.commands([("GET", "a")]))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        own.child.process.send_signal(signal.SIGCONT)
        assert await server.commands([("GET", "b")]) == [b"second"]


async def test_an_open_circuit_refuses_without_waiting_and_says_when_to_come_again(own):
    circuit = CircuitSettings(failures_to_open=2, probe_seconds=30)
    async with handle(own.url, circuit=circuit, **QUICK) as server:
        await server.commands([("SET", "a", "1")])
        assert server.open_circuits() == []
        own.child.process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(RedisUnavailable):
                await server.commands([("GET", "a")])
        assert server.open_circuits() == [f"redis://127.0.0.1:{own.port}"]
        call = asyncio.ensure_future(server.commands([("GET", "a")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert call.done(), "refused without a single wait"
        error = call.exception()
        assert isinstance(error, RedisUnavailable)
        assert "circuit is open" in error.detail
        assert 0 < error.retry_after_seconds <= 30


async def test_a_server_that_thaws_needs_nobody(own):
    async with handle(own.url, circuit=CIRCUIT, **QUICK) as server:
        await server.commands([("SET", "a", "1")])
        own.child.process.send_signal(signal.SIGSTOP)
        await asyncio.gather(*(server.commands([("GET", "a")]) for _ in range(4)), return_exceptions=True)
        assert server.open_circuits()
        await asyncio.sleep(0.5)
        assert server.open_circuits(), "probes of a frozen server do not close it"
        own.child.process.send_signal(signal.SIGCONT)
        await until(lambda: not server.open_circuits())
        assert await server.commands([("GET", "a")]) == [b"1"]


async def test_a_server_that_was_killed_and_started_again_needs_nobody(own):
    async with handle(own.url, circuit=CIRCUIT) as server:
        await server.commands([("SET", "a", "1")])
        own.child.process.kill()
        own.child.process.wait()
        for _ in range(2):
            with pytest.raises(RedisUnavailable) as caught:
                await server.commands([("GET", "a")])
        assert caught.value.reason == "unreachable"
        own.restart()
        await until(lambda: not server.open_circuits())
        assert await server.run(ScriptCall("remove_rank", ["r", "q"], ["", "", 60])) == [b"ok", 0, []]


async def test_a_full_server_does_not_open_the_circuit_since_it_still_answers_lookups(own):
    async with handle(own.url, circuit=CIRCUIT) as server:
        await server.commands([("SET", "a", "1")])
        with own.plain() as plain:
            plain.config_set("maxmemory", "100kb")
        for _ in range(5):
            with pytest.raises(RedisUnavailable) as caught:
                await server.commands([("SET", "b", "1")])
            assert caught.value.reason == "out_of_memory"
        assert await server.commands([("GET", "a")]) == [b"1"]


async def test_closing_stops_the_probes(own):
    async with handle(own.url, circuit=CIRCUIT, **QUICK) as server:
        own.child.process.send_signal(signal.SIGSTOP)
        await asyncio.gather(*(server.commands([("GET", "a")]) for _ in range(2)), return_exceptions=True)
        assert server.open_circuits()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


@pytest.fixture
def certificate(tmp_path):
    """A certificate for 127.0.0.1, its key, and who signed it."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    paths = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    issued.cert_chain_pems[0].write_to_path(paths[0])
    issued.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return paths


async def test_tls_and_a_password_work_from_the_url(tmp_path, certificate):
    cert, key, authority = certificate
    port = redis_servers.free_port()
    server = start_server(
        tmp_path / "tls",
        *("--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(authority), "--tls-auth-clients", "no", "--requirepass", "secret"),
        binary=redis_servers.redis_binary(),
    )
    try:
        async with handle(f"rediss://:secret@127.0.0.1:{port}/2?ssl_ca_certs={authority}") as door:
            await door.commands([("SET", "a", "1")])
            assert await door.commands([("GET", "a")]) == [b"1"]
        async with handle(f"rediss://:secret@127.0.0.1:{port}") as door:
            with pytest.raises(RedisUnavailable) as caught:
                await door.commands([("GET", "a")])
            assert caught.value.reason == "unreachable"
            assert "certificate" in caught.value.detail.lower()
    finally:
        server.child.stop()


async def test_a_unix_socket_works_from_the_url(tmp_path):
    path = tmp_path / "r.sock"
    server = start_server(tmp_path / "sock", "--unixsocket", str(path))
    try:
        async with handle(f"unix://{path}") as door:
            assert await door.commands([("SET", "a", "1")]) == [b"OK"]
    finally:
        server.child.stop()


class TestCluster:
    """What only a cluster can do."""

    @pytest.fixture
    def cluster(self, tmp_path):
        stack = redis_servers.start_cluster(tmp_path)
        yield stack
        stack.stop()

    def bucket_keys(self, count: int) -> list[bytes]:
        """Keys of one slot."""
        return [f"ct:{{ns:07}}:p:{i}".encode() for i in range(count)]

    async def test_a_slot_that_moves_is_followed_before_while_and_after(self, cluster):
        keys = self.bucket_keys(20)
        slot = key_slot(keys[0])
        source = cluster.node_of(keys[0])
        target = next(s for s in cluster.data if s is not source)
        async with handle(cluster.url) as server:
            await server.commands([("SET", key, b"v") for key in keys])
            with source.plain() as at_source, target.plain() as at_target:
                names = {
                    s: p.execute_command("CLUSTER MYID").decode()
                    for s, p in ((source, at_source), (target, at_target))
                }
                at_target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source])
                at_source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target])
                for key in keys[:10]:
                    at_source.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
                assert await server.commands([("GET", key) for key in keys]) == [b"v"] * 20, "ASK"
                for key in keys[10:]:
                    at_source.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
                assert await server.commands([("MGET", *keys)]) == [[b"v"] * 20], "ASK for a row"
                for node in (at_target, at_source):
                    node.execute_command("CLUSTER SETSLOT", slot, "NODE", names[target])
            assert await server.commands([("MGET", *keys), ("GET", keys[3])]) == [[b"v"] * 20, b"v"], "MOVED"
            with target.plain() as at_target:
                assert at_target.dbsize() >= 20

    async def test_a_dead_primary_fails_only_what_it_holds(self, cluster):
        keys = [f"ct:{{ns:{i:02d}}}:p".encode() for i in range(64)]
        lost = cluster.data[1]
        flag = ("CONFIG", "SET", "cluster-require-full-coverage", "no")
        for node in cluster.data:
            with node.plain() as plain:
                plain.execute_command(*flag)
        async with handle(cluster.url, circuit=CIRCUIT, **QUICK) as server:
            await server.commands([("SET", key, b"v") for key in keys])
            lost.child.process.kill()
            lost.child.process.wait()
            alive = [key for key in keys if cluster.node_of(key) is not lost]
            for _ in range(4):
                with pytest.raises(RedisUnavailable):
                    await server.commands([("GET", key) for key in keys])
                assert await server.commands([("GET", key) for key in alive]) == [b"v"] * len(alive)
            assert server.open_circuits() == [f"127.0.0.1:{lost.port}"]
            lost.restart()

            async def whole() -> bool:
                try:
                    await server.commands([("SET", key, b"w") for key in keys])
                except RedisUnavailable:
                    return False
                return True

            deadline = time.monotonic() + 20
            while not await whole():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
            assert server.open_circuits() == []

    async def test_one_frozen_seed_does_not_keep_the_map_from_being_read(self, cluster):
        frozen = cluster.data[0]
        frozen.child.process.send_signal(signal.SIGSTOP)
        try:
            async with handle(cluster.url, connect_seconds=1.0, command_seconds=5.0) as server:
                key = next(
                    k
                    for k in (f"ct:{{x:{i}}}" for i in range(999))
                    if cluster.node_of(k.encode()) is not frozen
                )
                async with asyncio.timeout(4):
                    await server.commands([("SET", key, "1")])
        finally:
            frozen.child.process.send_signal(signal.SIGCONT)


@pytest.mark.chaos
async def test_smoke_sentinels_name_a_new_primary_and_calls_follow_without_anybody(tmp_path):
    stack = redis_servers.start_sentinel(tmp_path, replicas=1, sentinels=3)
    try:
        async with handle(stack.url, circuit=CIRCUIT) as server:
            replica = stack.others[-1]
            with replica.plain() as plain:
                await until(lambda: plain.info("replication")["master_link_status"] == "up")
            await until_sentinels_know(stack)
            await server.commands([("SET", redis_keys.SCHEMA, "1"), ("WAIT", "1", "1000")])
            stack.data[0].child.process.kill()

            async def works() -> bool:
                try:
                    await server.commands([("SET", "after", "1")])
                except RedisUnavailable:
                    return False
                return True

            deadline = time.monotonic() + 40
            while not await works():
                assert time.monotonic() < deadline, "nobody took over"
                await asyncio.sleep(0.1)
            assert await server.commands([("GET", redis_keys.SCHEMA)]) == [b"1"]
            with replica.plain() as plain:
                assert plain.get("after") == b"1"
    finally:
        stack.stop()


async def until_sentinels_know(stack) -> None:
    def known() -> bool:
        for watcher in stack.others[:3]:
            with watcher.plain() as plain:
                state = plain.sentinel_master(redis_servers.SERVICE)
                if state["num-slaves"] < 1 or state["num-other-sentinels"] < 2:
                    return False
        return True

    await until(known, 30)
