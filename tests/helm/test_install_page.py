"""docs/install.md: its Helm lines render, and its compose lines name what is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.tokens import TOKEN_FORM, TokenTable, read_access_file
from tests.helm.chart import REPO, defaults, render
from tests.helm.compose import read_compose, services_of
from tests.helm.test_settings import flags_of

pytestmark = pytest.mark.helm

PAGE = (REPO / "docs" / "install.md").read_text()


def commands(block: str) -> Iterator[str]:
    """The commands of a block; a quote may go over several lines."""
    command = ""
    for line in block.splitlines():
        command += line
        try:
            shlex.split(command)
        except ValueError:
            command += "\n"
            continue
        yield command
        command = ""


BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
LINES = [command for block in BLOCKS for command in commands(block)]
FILES = {
    name: yaml.safe_load(text) for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
}
OF_COMPOSE = {"--rm", "--no-deps", "--wait", "--profile"}


def helm_lines() -> list[str]:
    return [line for line in LINES if re.match(r"helm (install|upgrade)", line)]


def values_of(line: str) -> dict[str, Any]:
    """What a Helm command hands to the chart."""
    import helm_python

    values: dict[str, Any] = {}

    def merge(into: dict[str, Any], more: dict[str, Any]) -> None:
        for name, value in more.items():
            if isinstance(value, dict):
                merge(into.setdefault(name, {}), value)
            else:
                into[name] = value

    words = shlex.split(line)
    for flag, value in pairwise(words):
        if flag == "--values":
            merge(values, FILES[value])
        elif flag == "--set":
            merge(values, helm_python.parse_set_string(value))
    return values


@pytest.mark.parametrize("line", helm_lines(), ids=lambda line: line[:60])
def test_every_helm_line_renders_smoke(line: str) -> None:
    words = shlex.split(line)
    assert "helm/caketin" in words
    rendered = render(values_of(line), name="caketin", namespace=words[words.index("--namespace") + 1])
    assert rendered.of("Deployment", "caketin-api")
    images = {c["image"] for where, c in rendered.containers().items() if "redis" not in where}
    assert all(i.startswith("registry.example/team/") for i in images)


def test_the_page_has_the_one_line_for_a_newcomer() -> None:
    assert len([line for line in helm_lines() if line.startswith("helm install ")]) == 1


def test_every_value_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[a-z]+[A-Za-z]*\.)+[A-Za-z_]+)(?:=[^`]*)?`", PAGE))
    checked = 0
    for name in named:
        at: Any = defaults()
        if name.split(".")[0] not in at:
            continue
        for step in name.split("."):
            assert step in at, f"there is no value {name}"
            at = at[step]
        checked += 1
    assert checked > 15


def test_the_secrets_that_the_page_makes_are_those_that_its_values_name() -> None:
    made = {m[1] for line in LINES if (m := re.match(r"kubectl create secret generic (\S+)", line))}
    assert made == set(FILES["production.yaml"]["auth"].values())


def test_our_commands_on_the_page_take_the_flags_that_they_are_given_smoke() -> None:
    checked = set()
    for line in LINES:
        for match in re.finditer(r"(?:^|-- )caketin (\S+)(.*)", line):
            command, words = match[1], shlex.split(match[2])
            if command != "token":  # which has commands of its own
                assert {w.partition("=")[0] for w in words if w.startswith("--")} <= flags_of(command), line
            checked.add(command)
    assert checked == {"doctor", "size", "token"}


def test_the_models_that_the_page_names_are_known() -> None:
    from caketin.known_models import MODELS

    named = [m[1] for line in LINES if (m := re.search(r"--model (\S+)", line))]
    assert "deepseek-v4-flash" in named
    assert all(name in MODELS or name.endswith("/config.json") for name in named)


def test_the_tokens_that_the_page_makes_open_what_they_are_for(tmp_path: Path) -> None:
    made = [line for line in LINES if line.startswith("caketin token new")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(
        ["bash", "-ec", "\n".join(made)], cwd=tmp_path, check=True, env=os.environ | {"PATH": path}
    )
    table = TokenTable(read_access_file((tmp_path / "tokens.toml").read_text()).tokens, b"k" * 16)
    for who, scope in (("engine", "engine"), ("scraper", "operator")):
        # Not a byte more: Prometheus puts what the Secret has into a header as it is.
        shown = (tmp_path / f"{who}.token").read_bytes().decode()
        assert TOKEN_FORM.fullmatch(shown)
        assert shown == shown.strip()
        token = table.find(shown)
        assert token is not None
        assert token.scopes == {scope}


def test_every_compose_line_names_services_and_profiles_that_exist_smoke() -> None:
    compose = read_compose()
    checked = 0
    for line in LINES:
        words = [w for w in shlex.split(line) if not re.match(r"[A-Z_]+=", w)]
        if words[:2] != ["docker", "compose"]:
            continue
        profiles = [b for a, b in pairwise(words) if a == "--profile"]
        rest = [w for w in words[2:] if w not in {*OF_COMPOSE, *profiles}]
        known = services_of(compose, profiles)
        if rest[0] == "up":
            assert set(rest[1:]) <= set(known), line
        elif rest[0] in {"exec", "run"}:
            assert rest[1] in compose["services"], line
        for profile in profiles:
            assert any(profile in s.get("profiles", []) for s in compose["services"].values()), line
        checked += 1
    assert checked >= 8


def test_the_variables_of_the_page_are_read_by_the_compose_file() -> None:
    text = (REPO / "docker-compose.yml").read_text()
    for name in set(re.findall(r"\b(CAKETIN_[A-Z_]+)=", PAGE)):
        assert f"${{{name}:-" in text, name


def test_the_images_that_the_page_builds_are_targets_of_the_dockerfile() -> None:
    from tests.helm.dockerfile import read_dockerfile

    stages = {s.name for s in read_dockerfile(REPO / "Dockerfile")}
    built = {m[1] for line in LINES if (m := re.match(r"docker build --target (\S+)", line))}
    assert built == {"api", "dataplane"}
    assert built <= stages
