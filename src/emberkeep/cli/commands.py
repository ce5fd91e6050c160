"""Commands whose modules are imported when they are run, or asked for their own help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class Home(NamedTuple):
    """Where a command is defined."""

    module: str
    name: str
    """Of the Typer in it."""
    help: str
    """The first paragraph of what the command says of itself."""

    def command(self) -> Any:
        """As Typer makes it. Imports the module."""
        return get_command(getattr(import_module(self.module), self.name))


def one_command(function: Callable[..., None], **about: Any) -> typer.Typer:
    """A Typer with this command only; `about` as in `Typer.command`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(**about)(function)
    return app


def lazy_group(homes: Mapping[str, Home]) -> type[TyperGroup]:
    """A group of commands that are elsewhere."""

    class LazyGroup(TyperGroup):
        def __init__(self, **about: Any) -> None:
            super().__init__(**about)
            # What Typer looks at for the names of commands, and for what is told of them in the group's own help.
            self.commands = {name: TyperCommand(name, help=home.help) for name, home in homes.items()}

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return homes[cmd_name].command() if cmd_name in homes else None

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            width = formatter.width - 6 - max(map(len, self.commands))
            with formatter.section("Commands"):
                formatter.write_dl(
                    [(name, command.get_short_help_str(width)) for name, command in self.commands.items()]
                )

    return LazyGroup
