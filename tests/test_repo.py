"""What must hold for the repository as a whole: what is in it, what its papers say, and that both agree."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import caketin

REPO = Path(__file__).resolve().parent.parent
MAX_FILE_BYTES = 600_000
# Written in halves, so that this file does not find itself.
REGISTRY_HOSTS = ("files.python" + "hosted", "pypi" + ".org", "registry.npm" + "js", "deb." + "debian.org")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|farm|opt/wheels|opt/pypi)/[\w.]")


def tracked() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True)
    paths = [REPO / name for name in done.stdout.split("\0") if name]
    return [p for p in paths if p.is_file()]


def texts() -> dict[str, str]:
    return {str(p.relative_to(REPO)): p.read_text() for p in tracked() if p != Path(__file__).resolve()}


def project() -> dict[str, Any]:
    return dict(tomllib.loads((REPO / "pyproject.toml").read_text())["project"])


def requirements() -> dict[str, list[Requirement]]:
    """Extra ("base" for none) -> what it requires."""
    listed = {"base": project()["dependencies"], **project()["optional-dependencies"]}
    return {extra: [Requirement(text) for text in texts] for extra, texts in listed.items()}


def constraints() -> dict[str, str]:
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("#")[0].partition(";")[0].strip() for line in lines]
    return {canonicalize_name(n): v for n, _, v in (p.partition("==") for p in pairs if p)}


def test_every_tracked_file_is_text_and_of_a_readable_size() -> None:
    for path in tracked():
        data = path.read_bytes()
        assert len(data) <= MAX_FILE_BYTES, f"{path} has {len(data)} bytes"
        assert b"\0" not in data, f"{path} is binary"
        data.decode()


def test_no_bundle_and_no_copy_of_a_published_trace_is_tracked() -> None:
    for path in tracked():
        assert not path.name.endswith((".min.js", ".min.css", ".map", ".whl", ".so", ".gz", ".zip")), path
        assert "conversation_trace" not in path.name, path
        if path.suffix in {".js", ".css", ".html"}:
            longest = max(map(len, path.read_text().splitlines()), default=0)
            assert longest < 1000, f"{path} looks minified"


def test_no_path_of_a_machine_and_no_registry_host_is_named() -> None:
    found = []
    for name, text in texts().items():
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line) or any(host in line for host in REGISTRY_HOSTS):
                found.append(f"{name}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize("line", ["cd /root/x", "'/work/main'", "file:///home/me/f"])
def test_the_pattern_for_machine_paths_can_match(line: str) -> None:
    assert MACHINE_PATH.search(line)


@pytest.mark.parametrize("line", ["https://example.net/work/x", "metadata/work/x", "/v1/engines", "~/work/x"])
def test_the_pattern_for_machine_paths_leaves_other_paths_alone(line: str) -> None:
    assert not MACHINE_PATH.search(line)


def test_the_license_is_apache_2() -> None:
    text = (REPO / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert project()["license"] == "Apache-2.0"


def test_every_dependency_has_a_reason() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| (\S[^|]*) \| (\S[^|]*) \| (\S[^|]*) \|$", dependencies_page(), re.MULTILINE
    )
    reasons = {canonicalize_name(name) for name, *_ in rows}
    wanted = {canonicalize_name(r.name) for listed in requirements().values() for r in listed}
    assert reasons == wanted, "docs/dependencies.md and pyproject.toml list different dependencies"


def dependencies_page() -> str:
    return (REPO / "docs" / "dependencies.md").read_text()


def test_every_constraint_is_an_exact_version() -> None:
    for name, version in constraints().items():
        assert re.fullmatch(r"[\w.+!]+", version), f"{name} is not pinned to one version"


def test_every_constraint_allows_what_the_project_asks_for() -> None:
    pinned = constraints()
    for extra, listed in requirements().items():
        for r in listed:
            if canonicalize_name(r.name) in pinned:
                version = pinned[canonicalize_name(r.name)]
                assert r.specifier.contains(version, prereleases=True), f"{extra}: {r} against {version}"


def test_everything_that_set_up_installs_is_pinned() -> None:
    wanted = [(r, e) for e in ("base", "server", "dev", "cpu") for r in requirements()[e]]
    seen: set[str] = set()
    frontier = [r for r, _ in wanted]
    while frontier:
        requirement = frontier.pop()
        name = canonicalize_name(requirement.name)
        if name in seen and not requirement.extras:
            continue
        seen.add(name)
        try:
            below = distributions.requires(name) or []
        except distributions.PackageNotFoundError:
            continue  # not for this machine or interpreter
        for text in below:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                frontier.append(needed)
        requirement.extras.clear()
    assert seen - set(constraints()) - {"setuptools", "pip"} == set()


def test_the_versions_agree() -> None:
    changelog = (REPO / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[?(\d[^\]\s]*)", changelog, re.MULTILINE)
    assert newest
    assert {project()["version"], caketin.__version__, newest.group(1)} == {caketin.__version__}


def pages() -> list[Path]:
    return [p for p in tracked() if p.suffix == ".md"]


def test_every_relative_link_leads_somewhere() -> None:
    broken = []
    for page in pages():
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target) or target.startswith("#"):
                continue
            if not (page.parent / target.partition("#")[0]).exists():
                broken.append(f"{page.relative_to(REPO)}: {target}")
    assert broken == []


def shell_lines() -> list[tuple[str, str]]:
    """(page, command) of every fenced block that shows a shell."""
    found = []
    for page in pages():
        for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line.strip() for line in block.splitlines()]
            if kind == "console":
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            if kind in {"bash", "sh", "console"}:
                found += [(str(page.relative_to(REPO)), line) for line in lines if line]
    return found


def test_every_documented_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    named = {(page, t) for page, line in shell_lines() for t in re.findall(r"(?:^|&& )make ([a-z-]+)", line)}
    assert named, "the pages name no make target at all"
    assert {t for _, t in named} <= targets


def test_every_documented_command_exists() -> None:
    typer = pytest.importorskip("typer")
    from caketin.cli import command_line

    commands = set(typer.main.get_command(command_line([])).commands)
    named = {c for _, line in shell_lines() for c in re.findall(r"(?:^|/|&& )caketin ([a-z][a-z-]*)", line)}
    assert named, "the pages name no command at all"
    assert named <= commands


def test_every_documented_script_exists() -> None:
    named = {s for _, line in shell_lines() for s in re.findall(r"^bash (\S+)", line)}
    assert [s for s in named if not (REPO / s).is_file()] == []
