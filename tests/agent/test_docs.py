"""docs/agent.md: its Python runs, its calls are sent as they stand there, its tables are complete."""

from __future__ import annotations

import http.client
import json
import re
import socket
from pathlib import Path

import pytest

from caketin.cli import command_line
from tests.agent.test_calls import raw

DOC = (Path(__file__).resolve().parents[2] / "docs" / "agent.md").read_text()
SOCKET = "/run/caketin/agent.sock"


@pytest.fixture(scope="module")
def agent(file_stack, start_module_agent):
    return start_module_agent(file_stack.url)


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", DOC, re.MULTILINE | re.DOTALL)
    return ["\n".join(line[len(indent) :] for line in text.splitlines()) for indent, text in found]


def test_the_python_example_runs_and_what_it_stored_is_restored_by_another_agent(
    agent, file_stack, start_agent
):
    (code,) = blocks("python")
    assert SOCKET in code
    found: dict = {}
    exec(compile(code.replace(SOCKET, str(agent.socket)), "agent.md", "exec"), found)
    assert (found["restored"], found["stored"].state) == (0, "done")
    with start_agent(file_stack.url).client() as client, client.open(found["request"]) as session:
        done = session.wait(session.prefetch(found["pages"]))
        assert done.restorable[-1][1] == 4
        k = session.pools["kv"].part("k")
        assert [int(k[slot][0]) for slot in done.slots["kv"]] == [0, 1, 2, 3]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket with the standard library alone, as any language has it."""

    def __init__(self, path: Path) -> None:
        super().__init__("agent", timeout=20)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def test_the_calls_work_in_the_order_in_which_they_stand(agent):
    known: dict[str, str] = {}
    connection = UnixConnection(agent.socket)
    answers = []
    for block in blocks("http"):
        text = re.sub(r"\$(\w+)", lambda m, known=known: known[m[1]], block)
        first, _, body = text.partition("\n")
        method, path = first.split()
        if body:
            json.loads(body)
        connection.request(method, path, body or None)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, (first, content)
        said = json.loads(content) if content else {}
        known |= {n: v for n, v in said.items() if isinstance(v, str)}
        answers.append(said)
    connection.close()
    assert len(answers) == 8
    assert answers[-2]["transfers_done"] is True
    assert agent.status().sessions == 0


def test_the_table_of_settings_has_every_flag():
    import typer

    group = typer.main.get_command(command_line(["agent"]))
    options = {p.name: p for p in group.commands["agent"].params if p.name != "help"}
    rows = re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|", DOC, re.MULTILINE)
    flags = {flag for said, _ in rows for flag in re.findall(r"--[a-z-]+", said)}
    variables = {name for _, said in rows for name in re.findall(r"CAKETIN_\w+", said)}
    assert flags == {opt for p in options.values() for opt in p.opts}
    assert variables - {"CAKETIN_TOKEN"} == {p.envvar for p in options.values() if p.envvar}


def test_the_table_of_metrics_has_every_metric(agent):
    text = raw(agent, "GET", "/metrics").text
    served = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    listed = set(re.findall(r"`(caketin_agent_\w+)", DOC))
    assert {n.removesuffix("_total") for n in listed} == {n.removesuffix("_total") for n in served}
