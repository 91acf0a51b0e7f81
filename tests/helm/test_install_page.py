"""docs/install.md: its Helm lines render, and its compose lines name what is there."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import Any

import pytest
import yaml

from caketin.cli import _COMMANDS
from tests.helm.chart import REPO, defaults, render
from tests.helm.compose import read_compose, services_of
from tests.helm.test_settings import flags_of

pytestmark = pytest.mark.helm

PAGE = (REPO / "docs" / "install.md").read_text()
LINES = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
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
    given = [words[words.index("caketin") :] for line in LINES if "caketin" in (words := shlex.split(line))]
    checked = set()
    for words in given:
        if words[1] in _COMMANDS:
            flags = {w.partition("=")[0] for w in words if w.startswith("--")}
            assert flags <= flags_of(words[1]), words
            checked.add(words[1])
    assert {"doctor", "size", "token"} <= checked


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
