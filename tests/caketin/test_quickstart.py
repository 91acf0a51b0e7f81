"""docs/quickstart.md, followed step by step: each command as it stands there, in order."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dataplane.child_process import free_port

DOC = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
PORT = "7411"
BLOCK = re.compile(r"<!-- (.*?) -->\n```bash\n(.*?)```", re.DOTALL)


@dataclass
class Step:
    note: str
    commands: str

    @property
    def expected(self) -> list[str]:
        found = [part.strip() for part in self.note.removeprefix("expect:").split(" ; ")]
        return [part for part in found if part != "may fail"] if self.note.startswith("expect:") else []


def steps() -> list[Step]:
    return [Step(*found) for found in BLOCK.findall(DOC.read_text())]


class Reader:
    """Somebody who follows the page, with a home and a port of their own."""

    def __init__(self, home: Path):
        self.home = home
        self.port = str(free_port())
        self.up: subprocess.Popen[bytes] | None = None
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("CAKETIN_", "XDG_"))},
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "CAKETIN_URL": f"http://127.0.0.1:{self.port}",  # in place of the page's
        }

    def types(self, commands: str) -> subprocess.Popen[bytes]:
        text = commands.replace(f":{PORT}", f":{self.port}")
        text = text.replace("caketin up", f"caketin up --port {self.port}")
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.env,
            cwd=self.home,
            start_new_session=True,
        )

    def starts(self, commands: str) -> None:
        self.up = self.types(f"exec {commands.strip()}")
        deadline = time.monotonic() + 60
        while True:
            assert self.up.poll() is None, self.up.communicate()[0]
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/readyz", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def ends(self) -> None:
        if self.up is not None:
            self.up.send_signal(signal.SIGINT)
            said, _ = self.up.communicate(timeout=30)
            assert self.up.returncode == 0, said
            self.up = None


@pytest.mark.timeout(400)
def test_every_command_of_the_quickstart_does_what_the_page_says(tmp_path: Path):
    reader = Reader(tmp_path)
    try:
        for step in steps():
            if step.note.startswith("not here"):
                assert step.commands == "make setup\nsource .venv/bin/activate\n"
            elif step.note == "keeps running":
                reader.starts(step.commands)
            elif step.note == "restarts":
                reader.ends()
                reader.starts(step.commands)
            else:
                done = reader.types(step.commands)
                said = done.communicate(timeout=120)[0].decode()
                assert done.returncode == 0 or "may fail" in step.note, f"{step.commands}\n{said}"
                missing = [part for part in step.expected if not re.search(part, said)]
                assert not missing, f"{missing} after {step.commands}\n{said}"
        reader.ends()
    finally:
        if reader.up is not None:
            reader.up.kill()
            reader.up.communicate()


def test_every_block_of_commands_says_what_to_expect():
    blocks = DOC.read_text().count("```bash")
    assert len(steps()) == blocks > 10
    assert all(step.expected or step.note in {"keeps running", "restarts"} for step in steps()[1:])
