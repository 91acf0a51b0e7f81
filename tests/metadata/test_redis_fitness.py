"""What is wrong with a Redis is told apart, each with a real server in that state."""

from pathlib import Path

import numpy as np
import pytest

from dataplane.child_process import free_port
from metadata.errors import RedisUnavailable
from metadata.hit_counters import HitCounters
from metadata.page_claims import Claim
from metadata.page_index import PageIndex
from metadata.redis_server import RedisServer, RedisSettings
from tests import redis_servers
from tests.redis_servers import Server, start_server

BINARIES = {"valkey": redis_servers.valkey_binary, "redis7": redis_servers.redis_binary}


@pytest.fixture(params=sorted(BINARIES))
def serve(request: pytest.FixtureRequest, tmp_path: Path):
    """Start servers of one make with options; ended after the test."""
    binary = BINARIES[request.param]()
    started: list[Server] = []

    def go(*options: str, folder: str = "server", **more) -> Server:
        started.append(start_server(tmp_path / folder, *options, binary=binary, **more))
        return started[-1]

    yield go
    for server in started:
        server.child.stop()


async def looked_at(url: str, **settings):
    server = RedisServer.connect(RedisSettings(url, **settings))
    try:
        return await server.fitness()
    finally:
        await server.close()


async def reason(url: str, **settings) -> tuple[str, str]:
    problem = (await looked_at(url, **settings)).problem
    assert problem is not None
    return problem.reason, problem.detail


async def test_a_fit_server_has_no_problem_and_gets_the_schema_version(redis_stack):
    found = await looked_at(redis_stack.url)
    assert (found.problem, found.remarks) == (None, ())
    assert redis_stack.ask("ct:schema", "GET", "ct:schema") == b"1"


async def test_nobody_there_is_unreachable():
    why, text = await reason(f"redis://127.0.0.1:{free_port()}")
    assert why == "unreachable"
    assert "is it running" in text


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
async def test_no_cluster_node_or_sentinel_there(scheme):
    url = f"{scheme}://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    why, _ = await reason(url + ("/svc" if "sentinel" in scheme else ""))
    assert why == ("no_primary" if "sentinel" in scheme else "unreachable")


async def test_sentinels_that_do_not_know_the_service(tmp_path):
    stack = redis_servers.start_sentinel(tmp_path)
    try:
        why, text = await reason(stack.url.replace(redis_servers.SERVICE, "other"))
        assert why == "no_primary"
        assert "is its name right" in text
    finally:
        stack.stop()


async def test_a_server_that_hangs_is_a_timeout(serve):
    server = serve()
    server.child.process.send_signal(19)
    try:
        why, _ = await reason(server.url, connect_seconds=0.2, command_seconds=0.3)
        assert why == "timeout"
    finally:
        server.child.process.send_signal(18)


async def test_a_server_that_loads_its_data_says_so(serve):
    server = serve()
    with server.plain() as plain:
        for i in range(2_000):
            plain.set(f"k{i}", "x" * 100)
        plain.save()
    server.child.stop()
    server.command += ["--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024"]
    server.restart()
    why, text = await reason(server.url)
    assert why == "loading"
    assert "when that is done" in text
    server.child.process.kill()


async def test_a_replica_is_read_only(serve):
    primary = serve()
    replica = serve("--replicaof", f"127.0.0.1 {primary.port}", folder="replica")
    why, text = await reason(replica.url)
    assert why == "read_only"
    assert "address of the primary" in text


async def test_a_full_server_is_out_of_memory(serve):
    server = serve()
    with server.plain() as plain:
        plain.set("big", "x" * 5_000_000)
        plain.config_set("maxmemory", "1mb")
    why, text = await reason(server.url)
    assert why == "out_of_memory"
    assert "maxmemory" in text


@pytest.mark.parametrize("credentials", ["", ":hunter2@", "someone:hunter2@"])
async def test_a_wrong_or_missing_password_is_named_and_not_shown(serve, credentials):
    server = serve("--requirepass", "right")
    why, text = await reason(f"redis://{credentials}127.0.0.1:{server.port}")
    assert why == "wrong_password"
    assert "hunter2" not in text
    assert (await looked_at(f"redis://:right@127.0.0.1:{server.port}")).problem is None


async def test_a_user_without_permission_is_told_what_it_needs(serve):
    server = serve()
    with server.plain() as plain:
        plain.execute_command("ACL", "SETUSER", "u", "on", ">p", "~ct:*", "+@read", "+info", "+config|get")
    why, text = await reason(f"redis://u:p@127.0.0.1:{server.port}")
    assert why == "no_permission"
    assert "allow it keys ct:*" in text


async def test_the_permissions_that_the_message_names_are_enough(serve):
    server = serve()
    with server.plain() as plain:
        words = "+@read +@write +@scripting +ping +info +time +config|get +cluster|slots"
        plain.execute_command("ACL", "SETUSER", "u", "on", ">p", "~ct:*", *words.split())
    url = f"redis://u:p@127.0.0.1:{server.port}"
    found = await looked_at(url)
    assert (found.problem, found.remarks) == (None, ())
    handle = RedisServer.connect(RedisSettings(url))
    index, pages = PageIndex(handle), [bytes(32)]
    claimed = Claim("kv", 0, 1, (0,), np.ones(1, np.bool_), guarded=False)
    assert (await index.commit("0" * 16, pages, [claimed], [])).complete == 1
    await HitCounters(handle).flush()
    await handle.close()


async def test_where_config_is_forbidden_the_policy_comes_from_info_and_that_is_said(serve):
    server = serve()
    with server.plain() as plain:
        plain.execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", "-config")
    url = f"redis://u:p@127.0.0.1:{server.port}"
    found = await looked_at(url)
    assert found.problem is None
    assert "CONFIG GET is not permitted" in found.remarks[0]
    with server.plain() as plain:
        plain.config_set("maxmemory-policy", "allkeys-lru")
    assert (await reason(url))[0] == "evicting"


async def test_where_info_is_forbidden_too_nobody_knows_the_policy(serve):
    server = serve()
    with server.plain() as plain:
        plain.execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", "-config", "-info")
    assert (await reason(f"redis://u:p@127.0.0.1:{server.port}"))[0] == "no_permission"


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_an_evicting_server_is_refused_by_name(serve, policy):
    server = serve()
    with server.plain() as plain:
        plain.config_set("maxmemory-policy", policy)
    why, text = await reason(server.url)
    assert why == "evicting"
    assert policy in text
    assert "set 'maxmemory-policy noeviction'" in text


async def test_one_evicting_node_of_a_cluster_is_enough(tmp_path):
    stack = redis_servers.start_cluster(tmp_path)
    try:
        with stack.data[2].plain() as plain:
            plain.config_set("maxmemory-policy", "allkeys-lfu")
        why, text = await reason(stack.url)
        assert why == "evicting"
        assert str(stack.data[2].port) in text
    finally:
        stack.stop()


async def test_another_schema_version_is_refused_and_left_alone(redis_stack):
    redis_stack.ask("ct:schema", "SET", "ct:schema", "99")
    why, text = await reason(redis_stack.url)
    assert why == "unknown_schema"
    assert "'99'" in text
    assert redis_stack.ask("ct:schema", "GET", "ct:schema") == b"99"


async def test_prepare_raises_what_fitness_finds_and_unfit_is_its_text(redis_stack):
    redis_stack.ask("ct:schema", "SET", "ct:schema", "99")
    server = RedisServer.connect(RedisSettings(redis_stack.url))
    with pytest.raises(RedisUnavailable) as caught:
        await server.prepare()
    assert caught.value.reason == "unknown_schema"
    assert await server.unfit() == caught.value.detail
    await server.close()


async def test_a_single_server_behind_a_cluster_url_is_said_to_be_none(serve):
    server = serve()
    why, text = await reason(f"redis+cluster://127.0.0.1:{server.port}")
    assert why == "refused"
    assert "cluster support disabled" in text
