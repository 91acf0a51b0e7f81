"""A control plane with a file store, and one with a real Mooncake master and storage node."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from caketin.stack import Stack, StackSettings
from dataplane.mooncake_store import MooncakeStore
from tests.agent.world import RunningAgent


def _stack(folder: Path, store: str) -> Stack:
    control = {"CAKETIN_NEGATIVE_SECONDS": "0", "CAKETIN_LEASE_SECONDS": "5"}
    return Stack(StackSettings(folder, None, store, 256 << 20, control=control))


@pytest.fixture(scope="session")
def file_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with _stack(tmp_path_factory.mktemp("file-stack"), "file") as stack:
        yield stack


@pytest.fixture(scope="session")
def mooncake_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    loads, why = MooncakeStore.available()
    if not loads:
        pytest.skip(f"Mooncake does not load here: {why}")
    with _stack(tmp_path_factory.mktemp("mooncake-stack"), "mooncake") as stack:
        yield stack


@contextmanager
def _agents() -> Iterator[Callable[..., RunningAgent]]:
    """Start agents and end them; the folder is short, as paths of sockets have to be."""
    agents: list[RunningAgent] = []

    def start(url: str, **flags: object) -> RunningAgent:
        agent = RunningAgent(Path(tempfile.mkdtemp(prefix="ct-agent-")), url, flags)
        agents.append(agent)
        agent.start()
        return agent

    try:
        yield start
    finally:
        for agent in agents:
            if agent.child is not None:
                agent.child.kill()
            shutil.rmtree(agent.shared, ignore_errors=True)
            shutil.rmtree(agent.folder, ignore_errors=True)


@pytest.fixture
def start_agent() -> Iterator[Callable[..., RunningAgent]]:
    """Start agents that end with the test."""
    with _agents() as start:
        yield start


@pytest.fixture(scope="module")
def start_module_agent() -> Iterator[Callable[..., RunningAgent]]:
    """Start agents that end with the module."""
    with _agents() as start:
        yield start
