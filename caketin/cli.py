"""The command line: the list of its commands. What each does is in `caketin.commands`.

Only the command that is called is imported: the engine's side of caketin and its server know nothing of each
other, and loading both takes a second that each start of each child would pay.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Annotated, Final

import typer

import caketin

_COMMANDS: Final = {
    "up": ("caketin.commands.up", "up"),
    "serve": ("caketin.commands.serve", "serve"),
    "agent": ("caketin.commands.agent", "agent"),
    "replay": ("caketin.commands.replay", "replay_command"),
    "doctor": ("caketin.commands.doctor", "doctor"),
    "ls": ("caketin.commands.ls", "ls"),
    "storage-node": ("caketin.commands.storage_node", "storage_node"),
    "mooncake-master": ("caketin.commands.storage_node", "mooncake_master"),
    "size": ("caketin.commands.size", "size"),
    "token": ("caketin.commands.token", "app"),
}
"""Name -> module and function, or the typer application of a command that has commands of its own."""
_CONTEXT: Final = {
    # The flags are mooncake_master's own, also its --help.
    "mooncake-master": {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
}


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """Return the application for these arguments: with the command that they name, or with all."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, help="L3 tier of the hierarchical KV cache."
    )
    app.callback(invoke_without_command=True)(_main)
    named = [a for a in arguments[:1] if a in _COMMANDS]
    for name in named or _COMMANDS:
        module, attribute = _COMMANDS[name]
        found = getattr(importlib.import_module(module), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name=name, context_settings=_CONTEXT.get(name))(found)
    return app


def _main(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Start with `caketin replay` or `caketin up`."""
    if version:
        typer.echo(f"caketin {caketin.__version__}")
        raise typer.Exit
