"""Control planes and stores for real SGLang engines. Runs with the python that `setup_env.sh` prints."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = importlib.util.find_spec("sglang") is not None and importlib.util.find_spec("torch") is not None
# Without SGLang there is nothing to collect; `.ci/run` runs the suite with an environment that has it.
collect_ignore_glob = [] if HERE else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # Torch and SGLang warn while they are imported, before any mark of a test counts.
    config.addinivalue_line("filterwarnings", "ignore")
    # Why something was a miss is said at this level; a failed test shows it.
    logging.getLogger("dataplane").setLevel(logging.INFO)


if HERE:
    from api.settings import Settings, StoreSettings
    from caketin.commands.store_purger import StorePurger
    from caketin.embedded_redis import EmbeddedRedis
    from dataplane.child_process import free_port
    from dataplane.mooncake_node import MooncakeCluster
    from tests.servers import PATIENT, serving

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.sglang import cpu_ops

        cpu_ops.install()  # before a test module imports SGLang

    NUMBERS = itertools.count()
    """One count for all planes: some share a Redis, where one name would be one namespace."""

    @dataclass
    class ControlPlane:
        """A control plane, and names that nobody else uses."""

        url: str
        kind: str
        redis_url: str
        folder: Path
        master: str = ""

        def extra(self, model: str | None = None, **more: Any) -> dict[str, Any]:
            """The extra config of an engine of its own, of a model of its own where none is named."""
            number = next(NUMBERS)
            return {
                "backend_name": "caketin",
                "module_path": "caketin.sglang",
                "class_name": "CaketinStorage",
                "interface_v1": 1,
                "control_url": self.url,
                "engine_id": f"engine-{os.getpid()}-{number}",
                "model": model or f"model-{number}",
                "revision": "1",
                "call_seconds": 20.0,
                "attach_seconds": 20.0,
                **more,
            }

    @pytest.fixture(scope="session")
    def _without_imports() -> None:
        gc.collect()
        gc.freeze()

    @pytest.fixture(autouse=True)
    def _engines_gone(_without_imports: None) -> Iterator[None]:
        """Free what a test built: an engine is a cycle of up to a gigabyte and of few objects."""
        yield
        gc.collect()

    @pytest.fixture(scope="session")
    def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
        server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"), appendonly=False)
        yield server
        server.stop()

    @pytest.fixture(scope="session")
    def file_plane(
        tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis
    ) -> Iterator[ControlPlane]:
        """A control plane over files."""
        folder = tmp_path_factory.mktemp("pages")
        settings = Settings(
            redis_url=redis_server.url,
            port=free_port(),
            store=StoreSettings(kind="file", path=str(folder)),
            **PATIENT,
        )
        with serving(settings, StorePurger(settings.store)) as url:
            yield ControlPlane(url, "file", redis_server.url, folder)

    @pytest.fixture
    def own_plane(tmp_path: Path) -> Iterator[ControlPlane]:
        """A control plane over files, with a Redis that nobody else uses."""
        server = EmbeddedRedis.start(tmp_path / "redis", appendonly=False)
        store = StoreSettings(kind="file", path=str(tmp_path / "pages"))
        settings = Settings(redis_url=server.url, port=free_port(), store=store, **PATIENT)
        try:
            with serving(settings, StorePurger(store)) as url:
                yield ControlPlane(url, "file", server.url, tmp_path / "pages")
        finally:
            server.stop()

    @pytest.fixture(scope="session")
    def cluster() -> Iterator[MooncakeCluster]:
        found = MooncakeCluster(256 << 20)
        found.start()
        yield found
        found.stop()

    @pytest.fixture(scope="session")
    def mooncake_plane(
        tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis, cluster: MooncakeCluster
    ) -> Iterator[ControlPlane]:
        """A control plane over Mooncake."""
        settings = Settings(
            redis_url=redis_server.url,
            port=free_port(),
            store=StoreSettings(kind="mooncake", master=cluster.master),
            **PATIENT,
        )
        with serving(settings, StorePurger(settings.store)) as url:
            yield ControlPlane(
                url, "mooncake", redis_server.url, tmp_path_factory.mktemp("none"), cluster.master
            )

    @pytest.fixture
    def mortal_plane(
        tmp_path: Path, redis_server: EmbeddedRedis
    ) -> Iterator[tuple[ControlPlane, MooncakeCluster]]:
        """A control plane over a Mooncake cluster that may be killed."""
        with MooncakeCluster(64 << 20) as mortal:
            store = StoreSettings(kind="mooncake", master=mortal.master)
            settings = Settings(redis_url=redis_server.url, port=free_port(), store=store, **PATIENT)
            with serving(settings) as url:
                yield ControlPlane(url, "mooncake", redis_server.url, tmp_path, mortal.master), mortal

    @pytest.fixture(params=["file", "mooncake"])
    def plane(request: pytest.FixtureRequest) -> ControlPlane:
        """A control plane over each store."""
        found: ControlPlane = request.getfixturevalue(f"{request.param}_plane")
        return found
