"""What `caketin replay --agent` does: the same load, through an agent's host memory."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.progress import Progress

from caketin.commands.console import err, out, running, say_what_runs
from caketin.replay.agent_driver import host_slots, memory_needed, replay_with_agent
from caketin.replay.agent_report import AgentReport
from caketin.replay.rank import ReplaySettings
from caketin.replay.trace import Load
from caketin.stack import AgentOptions, Stack, StackSettings
from metadata.errors import FieldError, InvalidInput

_SPARE_BYTES: Final = 1 << 20


def replay_through_agent(
    settings: ReplaySettings,
    load: Load,
    *,
    host_pages: int | None,
    socket: Path | None,
    stack: StackSettings,
    folder: AbstractContextManager[Path],
) -> AgentReport:
    """Replay through an agent that runs, or through one of a stack that is started for it.

    Raises:
        InvalidInput: several ranks, several requests in flight, or a control plane, which is the agent's.
    """
    if settings.url:
        detail = "is not for --agent: name the socket of an agent of that control plane with --agent-socket"
        raise InvalidInput("no such replay", [FieldError("--url", "unsupported", detail)])
    if settings.tp > 1 or settings.concurrency > 1:
        detail = "replays one rank and one request at a time: leave out --tp and --concurrency"
        raise InvalidInput("no such replay", [FieldError("--agent", "unsupported", detail)])
    slots = host_slots(load, host_pages)
    if socket is not None:
        return _replay(settings, load, socket, slots)
    # The path of a socket may be 107 bytes long, which that of the data folder need not be.
    place = Path(tempfile.mkdtemp(prefix="caketin-"))
    try:
        with folder as data:
            agent = AgentOptions(memory_needed(settings, slots) + _SPARE_BYTES, place / "agent.sock")
            with running(Stack(replace(stack, data_dir=data, agent=agent))) as started:
                say_what_runs(started)
                return _replay(settings, load, place / "agent.sock", slots)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def say(report: AgentReport, json: str | None) -> None:
    """Print the numbers, and write them where they were asked for."""
    if json is not None:
        report.write_json(json)
    if json != "-":
        report.print(out)


def _replay(settings: ReplaySettings, load: Load, socket: Path, slots: int) -> AgentReport:
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("replaying", total=load.pages)
        return replay_with_agent(settings, load, socket, slots, lambda pages: progress.advance(task, pages))
