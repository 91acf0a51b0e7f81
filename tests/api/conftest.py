"""A real control plane: uvicorn in a thread of its own, over a real Redis-compatible server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
import structlog
import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.logs import configure_logging
from api.purges import ObjectPurger
from api.server import server_config
from api.settings import Settings, StoreSettings
from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import free_port

NOBODY_LISTENS = "redis://127.0.0.1:1/0"


@dataclass
class Stack:
    """A running control plane."""

    url: str
    redis_url: str
    app: FastAPI


@contextlib.contextmanager
def serving(redis_url: str, folder: Path, purger: ObjectPurger | None = None, **more) -> Iterator[Stack]:
    """Serve a control plane from a thread until the end of the block."""
    settings = Settings(
        redis_url=redis_url, store=StoreSettings(kind="file", path=str(folder / "store")), **more
    )
    app = create_app(settings, purger)
    server = uvicorn.Server(server_config(settings, app))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline, "the control plane did not start"
            time.sleep(0.01)
        yield Stack(f"http://127.0.0.1:{listener.getsockname()[1]}", redis_url, app)
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive(), "the control plane did not end"


@pytest.fixture(scope="session", autouse=True)
def _logs_go_nowhere() -> Iterator[None]:
    """As in a server, log lines do not go to standard output, where examples and commands are read."""
    with Path(os.devnull).open("w") as nowhere:
        configure_logging("json", "warning", stream=nowhere)
        yield
        structlog.reset_defaults()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis.start(Path(tmp_path_factory.mktemp("valkey")), appendonly=False)
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def stack(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serving(redis_url, Path(tmp_path_factory.mktemp("stack"))) as found:
        yield found


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with redis.Redis.from_url(stack.redis_url) as plain:
        plain.flushall()
    with httpx.Client(base_url=stack.url, timeout=10) as found:
        yield found


@pytest.fixture(scope="session")
def redisless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A control plane whose Redis is away."""
    folder = Path(tmp_path_factory.mktemp("redisless"))
    url = f"redis://127.0.0.1:{free_port()}/0"
    with serving(url, folder) as found, httpx.Client(base_url=found.url, timeout=10) as http:
        yield http
