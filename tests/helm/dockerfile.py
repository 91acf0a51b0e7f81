"""Reads a Dockerfile: its stages and their instructions, with variables filled in."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word in capitals, and the rest as written."""

    word: str
    rest: str


@dataclass(frozen=True)
class Stage:
    """What stands between two FROMs."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


@dataclass
class ImageConfig:
    """What an image tells a runtime."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


def read_dockerfile(path: Path, arguments: dict[str, str] | None = None) -> list[Stage]:
    """Return the stages in order; `arguments` are those of `--build-arg`."""
    given = arguments or {}
    stages: list[Stage] = []
    outside: dict[str, str] = {}
    current: list[Instruction] | None = None
    for instruction in _instructions(path.read_text()):
        if instruction.word == "FROM":
            base, _, name = fill(instruction.rest, outside).partition(" AS ")
            current = []
            stages.append(Stage(name or str(len(stages)), base, ()))
        elif instruction.word == "ARG" and current is None:
            name, _, value = instruction.rest.partition("=")
            outside[name] = given.get(name, value)
        else:
            assert current is not None, f"{instruction.word} before the first FROM"
            current.append(_argument(instruction, given, outside))
            stages[-1] = Stage(stages[-1].name, stages[-1].base, tuple(current))
    return stages


def _argument(instruction: Instruction, given: dict[str, str], outside: dict[str, str]) -> Instruction:
    """An ARG with the value that it has; anything else as it is."""
    if instruction.word != "ARG":
        return instruction
    name, _, value = instruction.rest.partition("=")
    return Instruction("ARG", f"{name}={given.get(name, outside.get(name, value))}")


def fill(text: str, variables: dict[str, str]) -> str:
    """Return `text` with `$NAME`, `${NAME}` and `${NAME:-default}` replaced."""
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[3]) or m[2] or "", text)


def words(rest: str) -> list[str]:
    """Return a command in its JSON form, or its shell form as the shell gets it."""
    return list(json.loads(rest)) if rest.startswith("[") else ["/bin/sh", "-c", rest]


def pairs(rest: str) -> dict[str, str]:
    """Return the names and values of ENV or LABEL."""
    return dict(word.split("=", 1) for word in shlex.split(rest))


def apply(config: ImageConfig, instruction: Instruction) -> None:
    """Change `config` as an instruction that touches no file does."""
    rest = instruction.rest
    match instruction.word:
        case "ENV":
            config.env |= {k: fill(v, config.env) for k, v in pairs(rest).items()}
        case "WORKDIR":
            config.workdir = rest
        case "USER":
            config.user = rest
        case "ENTRYPOINT":
            config.entrypoint = words(rest)
        case "CMD":
            config.command = words(rest)
        case "HEALTHCHECK":
            config.healthcheck = words(re.sub(r"^(--\S+\s+)*CMD\s+", "", rest))


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        word, _, rest = line.strip().partition(" ")
        found.append(Instruction(word.upper(), re.sub(r"\s+", " ", rest.strip())))
    return found
