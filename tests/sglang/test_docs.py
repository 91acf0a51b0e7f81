"""The launch commands of the pages are commands: SGLang takes their flags, caketin their extra config."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from dataplane.engines.sglang_settings import BackendSettings

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash\n(python -m sglang\.launch_server .*?)^```", re.MULTILINE | re.DOTALL)
FILES = ("README.md", "docs/sglang.md")


def commands(file: str) -> list[list[str]]:
    return [shlex.split(found.replace("\\\n", " ")) for found in BLOCK.findall((ROOT / file).read_text())]


@pytest.mark.parametrize("file", FILES)
def test_a_launch_command_of_a_page_is_taken(file: str) -> None:
    assert commands(file), "the page says how to start an engine"
    for command in commands(file):
        parser = argparse.ArgumentParser(exit_on_error=False)
        ServerArgs.add_cli_args(parser)
        found = parser.parse_args(command[3:])
        assert found.enable_hierarchical_cache
        assert found.hicache_storage_backend == "dynamic"
        assert found.hicache_mem_layout.startswith("page_first")
        extra = json.loads(found.hicache_storage_backend_extra_config)
        assert (extra["module_path"], extra["class_name"]) == ("caketin.sglang", "CaketinStorage")
        extra.pop("token", None)  # a file of the engine's host
        BackendSettings.of(extra)


@pytest.mark.parametrize("file", FILES)
def test_a_flag_that_sglang_does_not_know_would_be_found(file: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    (first, *_) = commands(file)
    _, unknown = parser.parse_known_args([*first[3:], "--hicache-mem-layouts", "x"])
    assert unknown
