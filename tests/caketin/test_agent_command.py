"""The flags of `caketin agent` that say how it reaches the store over RDMA."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from caketin.cli import command_line
from caketin.commands import agent
from dataplane.agent_settings import AgentSettings

TOLD = {"devices": "numa0=mlx5_0", "gid_index": 3, "traffic_class": 106, "service_level": 0, "mtu": 4096}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TOLD.items()]
VARIABLES = {f"CAKETIN_AGENT_{name.upper()}": str(value) for name, value in TOLD.items()}


@pytest.fixture
def started(monkeypatch):
    """Settings of the agents that were started."""
    found: list[AgentSettings] = []

    def run_agent(settings: AgentSettings, _say: object) -> bool:
        found.append(settings)
        return True

    monkeypatch.setattr(agent, "run_agent", run_agent)
    return found


def run(*flags: str, env: dict[str, str] | None = None):
    return CliRunner(env=env).invoke(command_line(["agent"]), ["agent", *flags])


@pytest.mark.parametrize(("flags", "env"), [(FLAGS, {}), ([], VARIABLES)])
def test_what_is_said_of_rdma_reaches_the_store(started, flags, env):
    assert run(*flags, env=env).exit_code == 0
    (settings,) = started
    assert {name: getattr(settings.store, name) for name in TOLD} == TOLD


def test_nothing_said_is_as_told(started):
    assert run().exit_code == 0
    assert all(getattr(started[0].store, name) is None for name in TOLD)


@pytest.mark.parametrize("wrong", ["--mtu=1500", "--traffic-class=256", "--gid-index=-1", "--devices=a=b=c"])
def test_what_cannot_be_is_refused_when_the_agent_starts(started, wrong):
    """And not when the first engine comes."""
    done = run(wrong)
    assert done.exit_code != 0
    assert wrong[2:].partition("=")[0].replace("-", "_") in done.output
    assert started == []
