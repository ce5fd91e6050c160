"""How commands are made: their flags, of which those of settings follow from `config/settings.py`, and where they
are: the module of a command is imported when it is run, or asked for its own help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import OptionInfo

from emberkeep.cli.console import complain
from emberkeep.config import sources
from emberkeep.config.settings import FIELDS, Config, kind_of
from emberkeep.config.sources import why_gone
from emberkeep.errors import ConfigError
from emberkeep.logs import begin_logging

Command = Callable[..., None]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", help="Configuration file to read instead of the usual places.")
]

VerboseFlag = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log everything that happens, as --log-level debug does.")
]

_log_level: ContextVar[str | None] = ContextVar("log_level", default=None)
"""What the flags of the command that runs ask for."""
_SHORT = {"model": ["-m"], "port": ["-p"]}


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Makes a command of a function with a parameter `config: Config`, which gets the settled configuration, or
    `loaded: LoadedConfig`, which gets it with where each value came from.

    The command has the flags of the function's other parameters, where a dataclass stands for a flag per field,
    and then those in `names`: settings; `config`, for `--config`; and flags of its own that are to stand among
    them, of which one with the name of a setting sets it too.
    """

    def decorate(function: Command) -> Command:
        hints, parameters = get_type_hints(function, include_extras=True), dict(signature(function).parameters)
        wants_origins = parameters.pop("loaded", None) is not None
        parameters.pop("config", None)
        groups = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
        own: dict[str, Parameter] = {}
        for name, parameter in parameters.items():
            flags = flags_of(groups[name]) if name in groups else [_flag(name, hints[name], parameter.default)]
            own |= {flag.name: flag for flag in flags}
        first = [flag for name, flag in own.items() if name not in names]
        chosen = [name for name in names if name == "config" or name in FIELDS]

        def command(**given: Any) -> None:
            loaded = settle(**{name: given[name] for name in chosen})
            arguments = {name: given[name] for name in parameters if name not in groups}
            for name, group in groups.items():
                arguments[name] = group(**{field.name: given[field.name] for field in fields(group)})
            function(**({"loaded": loaded} if wants_origins else {"config": loaded.config}), **arguments)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return with_flags(command, [*first, *(own.get(name) or _setting_flag(name) for name in names)])

    return decorate


def with_flags(command: Command, flags: Iterable[Parameter]) -> Command:
    """Typer finds out about flags from a function's signature. Every command has those of the log besides, which
    hold for the settings that are loaded in it."""

    def run(**given: Any) -> None:
        context, own = given.pop("context"), (given.pop("verbose"), given.pop("log_level"))
        before = context.find_root().params
        token = _log_level.set(_asked(*own) or _asked(before.get("verbose"), before.get("log_level")))
        try:
            command(**given)
        finally:
            _log_level.reset(token)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature([*flags, *_LOG_FLAGS])  # type: ignore[attr-defined]
    return run


def logged(function: Command) -> Command:
    """A command of a function whose parameters are its flags, with those of the log."""
    hints = get_type_hints(function, include_extras=True)
    own = signature(function).parameters.items()
    return with_flags(function, [_flag(name, hints[name], flag.default) for name, flag in own])


def _asked(verbose: bool | None, log_level: str | None) -> str | None:
    return "debug" if verbose else log_level


def flags_of(kind: type) -> list[Parameter]:
    """One per field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        _flag(f.name, hints[f.name], Parameter.empty if f.default is MISSING else f.default) for f in fields(kind)
    ]


def settle(**flags: object) -> sources.LoadedConfig:
    """Settings for a command, whose flags have their names; one that is None or no list was not given. From then
    on it logs as they say.

    Raises ConfigError.
    """
    given = {key: None if value == [] else value for key, value in flags.items()}
    loaded = sources.load_config({"log_level": _log_level.get(), **given})
    if loaded.warning:
        _warn_once(loaded.warning)
    begin_logging(loaded.config.log_level)
    return loaded


@cache
def _warn_once(sentence: str) -> None:
    """A command may load its settings several times."""
    complain(sentence)


# ── where commands are ──

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


def command_group(help: str, epilog: str | None = None) -> typer.Typer:
    """A Typer for commands that stand below one name."""
    return typer.Typer(help=help, epilog=epilog, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


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


# ── what is told of settings, and their flags ──

GROUPS = {
    "Model": "model",
    "Cache": "ram_budget",
    "Serving": "host",
    "Memory": "memory",
    "Tools": "tools",
    "Engine and GPU": "engine",
    "Cluster": "replicas",
}
"""Settings that belong together, each group with its first one; the others follow in the order of `Config`."""
USED_FIRST = (
    *("model", "backend", "ctx", "parallel", "host", "port", "api_key", "data_dir"),
    *("ram_budget", "disk_budget"),
)


def grouped() -> dict[str, list[str]]:
    """All settings, by group."""
    groups: dict[str, list[str]] = {}
    names = {first: group for group, first in GROUPS.items()}
    for key in FIELDS:
        if key in names:
            group = groups.setdefault(names[key], [])
        group.append(key)
    return groups


def help_for(key: str) -> str:
    return str(FIELDS[key].metadata["help"])


def accepted_briefly(key: str) -> str:
    """In a word, or the words that there are."""
    kind = kind_of(key)
    words = kind.accepts.removeprefix("one of ")
    if words != kind.accepts:
        return words
    return f"{kind.type}, {kind.word}" if kind.word else kind.type


def default_of(key: str) -> str:
    """The default as a person reads it."""
    kind, default = kind_of(key), getattr(Config(), key)
    return kind.word if kind.word and kind.parse(kind.word) == default else kind.show(default)


def setting(key: str) -> OptionInfo:
    """The flag of a setting. All but switches are text, which `config/settings.py` parses and explains."""
    name, type_ = key.replace("_", "-"), kind_of(key).type
    about: dict[str, Any] = {"help": f"{help_for(key)} [default: {default_of(key)}]"}
    if type_ == "switch":
        names, about["show_default"] = [f"--{name}/--no-{name}"], False
    else:
        names, about["metavar"] = [f"--{name}", *_SHORT.get(key, ())], f"<{type_}>"
        about["callback"] = _split if type_ == "names" else None
    option: OptionInfo = typer.Option(*names, **about)
    return option


def _setting_flag(name: str) -> Parameter:
    if name == "config":
        return _flag(name, ConfigFlag, None)
    about = kind_of(name)
    kind = bool if about.type == "switch" else list[str] if about.is_list else str
    return _flag(name, Annotated[kind | None, setting(name)], None)


def _flag(name: str, kind: Any, default: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _split(given: list[str] | None) -> list[str] | None:
    """Each of them may be several names."""
    return [name for part in given for name in part.split(",")] if given else None


ModelFlag = Annotated[str | None, setting("model")]
LogLevelFlag = Annotated[str | None, setting("log_level")]
_LOG_FLAGS = (
    _flag("verbose", VerboseFlag, False),
    _flag("log_level", LogLevelFlag, None),
    _flag("context", typer.Context, Parameter.empty),
)
