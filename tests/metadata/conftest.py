"""A real Redis-compatible server, shared by the tests of a session, emptied before each."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from caketin.embedded_redis import EmbeddedRedis
from metadata.redis_server import RedisServer, RedisSettings


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis.start(Path(tmp_path_factory.mktemp("valkey")), appendonly=False)
    yield server.url
    server.stop()


@pytest.fixture
async def redis_server(redis_url: str) -> AsyncIterator[RedisServer]:
    with redis.Redis.from_url(redis_url) as plain:
        plain.flushall()
    server = RedisServer.connect(RedisSettings(redis_url))
    await server.prepare()
    yield server
    await server.close()
