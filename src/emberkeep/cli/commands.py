"""Commands whose modules are imported when they are run, or asked for their own help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from emberkeep.config.describe import GROUPS, USED_FIRST, grouped
from emberkeep.config.removed import why_gone
from emberkeep.config.settings import FIELDS
from emberkeep.errors import ConfigError

_MANY_SETTINGS = 12
_FIRST, _OWN = "Used first", "Options"


class Home(NamedTuple):
    """Where a command is defined."""

    module: str
    name: str
    """What its Typer is called there."""
    help: str
    """The first paragraph of what the command says of itself."""

    def command(self) -> Any:
        """As Typer makes it. Imports the module."""
        return _reading_plainly(get_command(getattr(import_module(self.module), self.name)))


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
            _reading_plainly(self)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return homes[cmd_name].command() if cmd_name in homes else None

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            width = formatter.width - 6 - max(map(len, self.commands))
            with formatter.section("Commands"):
                formatter.write_dl(
                    [(name, command.get_short_help_str(width)) for name, command in self.commands.items()]
                )

    return LazyGroup


def _reading_plainly(command: Any) -> Any:
    """The command, which it changes, and those in it. Typer reads the value of every flag by pydantic, which takes
    longer to import than all else that most commands need; but a text is a text."""
    params_of = command.get_params

    def get_params(context: Any) -> list[Any]:
        params: list[Any] = params_of(context)  # with `--help`, which Typer makes when it is asked
        for param in params:
            if "process_value" not in vars(param):
                param.process_value = partial(_process_value, param, param.process_value)
        return params

    command.get_params = get_params
    command.parse_args = partial(_parse_args, command.parse_args)
    if sum(param.name in FIELDS for param in command.params) >= _MANY_SETTINGS:
        command.format_options = partial(_format_sections, command)
    for inner in getattr(command, "commands", {}).values():
        _reading_plainly(inner)
    return command


def _format_sections(command: Any, context: Any, formatter: Any) -> None:
    """The flags of a command for `--help`: those that people use first, its own, and the settings by group."""
    titles = {key: group for group, keys in grouped().items() for key in keys} | dict.fromkeys(USED_FIRST, _FIRST)
    sections: dict[str, list[Any]] = {title: [] for title in (_FIRST, _OWN, *GROUPS)}
    for param in command.get_params(context):
        if record := param.get_help_record(context):
            sections[titles.get(param.name, _OWN)].append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def _parse_args(parse: Callable[[Any, list[str]], list[str]], context: Any, arguments: list[str]) -> list[str]:
    """As `parse` does. Raises ConfigError for the flag of a setting that was removed, with what to use instead."""
    try:
        return parse(context, arguments)
    except Exception as error:
        flag = str(getattr(error, "option_name", ""))  # only that of NoSuchOption, which has two homes in Typer
        if gone := why_gone(flag.lstrip("-").removeprefix("no-").replace("-", "_"), flag):
            raise ConfigError(gone) from error
        raise


def _process_value(param: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """In place of `process`, Typer's own, where nothing has to be read."""
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if value is None and not param.required:
        value = () if param.multiple or param.nargs == -1 else None
    elif kind is str and isinstance(value, str):
        pass
    elif kind == list[str] and isinstance(value, (list, tuple)):
        value = list(value)
    else:
        return process(context, value)
    return param.callback(context, param, value) if param.callback is not None else value
