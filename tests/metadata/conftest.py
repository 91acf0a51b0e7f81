"""Real servers of every kind, one of each per test process, emptied before each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from metadata.redis_server import RedisServer, RedisSettings
from tests import redis_servers
from tests.redis_servers import RedisStack

_STARTED: dict[str, RedisStack] = {}


@pytest.fixture(scope="session")
def redis_stacks() -> Iterator[dict[str, RedisStack]]:
    """Every kind that a test of this session asked for."""
    yield _STARTED
    for stack in _STARTED.values():
        stack.stop()
    _STARTED.clear()


@pytest.fixture(params=redis_servers.KINDS)
def redis_stack(
    request: pytest.FixtureRequest,
    redis_stacks: dict[str, RedisStack],
    tmp_path_factory: pytest.TempPathFactory,
) -> RedisStack:
    """One kind of Redis, empty; a test that takes it runs on every kind."""
    kind = request.param
    if kind not in redis_stacks:
        redis_stacks[kind] = redis_servers.start(kind, tmp_path_factory.mktemp(kind))
    redis_stacks[kind].flush()
    return redis_stacks[kind]


@pytest.fixture
async def redis_server(redis_stack: RedisStack) -> AsyncIterator[RedisServer]:
    """A connected handle on `redis_stack`."""
    # Deadlines are for tests of deadlines: the machine that runs these may be busy.
    server = RedisServer.connect(RedisSettings(redis_stack.url, connect_seconds=10, command_seconds=20))
    await server.prepare()
    yield server
    await server.close()
