"""The command line: the list of its commands. What each does is in `caketin.commands`."""

from __future__ import annotations

from typing import Annotated

import typer

import caketin
from caketin.commands import token
from caketin.commands.console import out
from caketin.commands.doctor import doctor
from caketin.commands.ls import ls
from caketin.commands.replay import replay_command
from caketin.commands.serve import serve
from caketin.commands.up import up

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="L3 tier of the hierarchical KV cache.",
    # A traceback with local variables would show passwords and salts.
    pretty_exceptions_show_locals=False,
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Start with `caketin replay` or `caketin up`."""
    if version:
        out.print(f"caketin {caketin.__version__}")
        raise typer.Exit


app.command()(up)
app.command()(serve)
app.command(name="replay")(replay_command)
app.command()(doctor)
app.command()(ls)
app.add_typer(token.app, name="token")
