"""A real control plane: uvicorn in a thread of its own, over a real Redis-compatible server."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
import uvicorn

from api.app import create_app
from api.settings import Settings, StoreSettings
from caketin.child_process import free_port
from caketin.embedded_redis import EmbeddedRedis


@dataclass
class Stack:
    """A running control plane."""

    url: str
    redis_url: str


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = Path(tmp_path_factory.mktemp("stack"))
    server = EmbeddedRedis.start(folder, appendonly=False)
    settings = Settings(
        redis_url=server.url, port=free_port(), store=StoreSettings(kind="file", path=str(folder / "store"))
    )
    uv = uvicorn.Server(
        uvicorn.Config(create_app(settings), host="127.0.0.1", port=settings.port, log_level="warning")
    )
    thread = threading.Thread(target=uv.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not uv.started:
        assert time.monotonic() < deadline, "the control plane did not start"
        time.sleep(0.01)
    yield Stack(f"http://127.0.0.1:{settings.port}", server.url)
    uv.should_exit = True
    thread.join(10)
    server.stop()


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with redis.Redis.from_url(stack.redis_url) as plain:
        plain.flushall()
    with httpx.Client(base_url=stack.url, timeout=10) as found:
        yield found
