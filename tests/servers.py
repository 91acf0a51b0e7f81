"""A real control plane for tests: uvicorn in a thread of its own, over a real Redis-compatible server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import uvicorn

from api.app import create_app
from api.purges import ObjectPurger
from api.settings import Settings, StoreSettings
from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import free_port

PATIENT: Final[dict[str, Any]] = {"redis_command_seconds": 20.0, "redis_connect_seconds": 10.0}
"""Settings of a control plane in tests that are not about deadlines: the machine may be busy."""


@dataclass
class Stack:
    """A running control plane, its Redis, and the folder of its file store."""

    url: str
    redis_url: str
    store_path: str = ""


@contextmanager
def serving(settings: Settings, purger: ObjectPurger | None = None) -> Iterator[str]:
    """Serve a control plane; gives its URL. The same port may be served again afterwards."""
    uv = uvicorn.Server(
        uvicorn.Config(
            create_app(settings, purger), host="127.0.0.1", port=settings.port, log_level="warning"
        )
    )
    thread = threading.Thread(target=uv.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not uv.started:
        assert time.monotonic() < deadline, "the control plane did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{settings.port}"
    finally:
        uv.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the control plane did not stop"


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One control plane for the session, with a file store. Import it into a conftest."""
    folder = Path(tmp_path_factory.mktemp("stack"))
    server = EmbeddedRedis.start(folder, appendonly=False)
    try:
        path = str(folder / "store")
        settings = Settings(
            redis_url=server.url, port=free_port(), store=StoreSettings(kind="file", path=path), **PATIENT
        )
        with serving(settings) as url:
            yield Stack(url, server.url, path)
    finally:
        server.stop()
