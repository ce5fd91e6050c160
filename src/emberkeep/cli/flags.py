"""Flags of the commands: those of settings are made from what `config/settings.py` says about each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from emberkeep.cli.console import complain
from emberkeep.config import sources
from emberkeep.config.describe import default_of, help_for, is_list, type_of
from emberkeep.config.settings import FIELDS, Config
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
        groups = _flags_by_parameter(function)
        own = {flag.name: flag for _, flags in groups.values() for flag in flags}
        first = [flag for name, flag in own.items() if name not in names]
        chosen = [name for name in names if name == "config" or name in FIELDS]
        wants_origins = "loaded" in signature(function).parameters

        def command(**given: Any) -> None:
            arguments = {
                name: make(**{flag.name: given[flag.name] for flag in flags})
                for name, (make, flags) in groups.items()
            }
            loaded = settle(**{name: given[name] for name in chosen})
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


def setting_help(key: str) -> str:
    return f"{help_for(key)} [default: {default_of(key)}]"


def setting(key: str) -> OptionInfo:
    """The flag of a setting. All but switches are text, which `config/settings.py` parses and explains."""
    name, about = key.replace("_", "-"), setting_help(key)
    option: OptionInfo
    if type_of(key) == "switch":
        names = f"--{name}/--no-{name}"
        option = typer.Option(names, help=about, show_default=False)
    else:
        callback = _split if type_of(key) == "names" else None
        option = typer.Option(
            f"--{name}", *_SHORT.get(key, ()), metavar=f"<{type_of(key)}>", help=about, callback=callback
        )
    return option


def load_config(**flags: object) -> Config:
    """Settings for a command, whose flags have their names; one that is None or no list was not given. From then
    on it logs as they say.

    Raises ConfigError.
    """
    return settle(**flags).config


def settle(**flags: object) -> sources.LoadedConfig:
    """The same, with where each value came from."""
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


ModelFlag = Annotated[str | None, setting("model")]
LogLevelFlag = Annotated[str | None, setting("log_level")]


def _flags_by_parameter(function: Command) -> dict[str, tuple[Callable[..., Any], list[Parameter]]]:
    """What makes the value of each parameter of its own from the values of its flags, and these flags."""
    hints = get_type_hints(function, include_extras=True)
    settled = ("config", "loaded")
    own = {name: flag for name, flag in signature(function).parameters.items() if name not in settled}
    groups = {name for name in own if is_dataclass(hints[name])}
    return {
        name: (hints[name], flags_of(hints[name]))
        if name in groups
        else (_only_value, [_flag(name, hints[name], flag.default)])
        for name, flag in own.items()
    }


def _only_value(**given: Any) -> Any:
    (value,) = given.values()
    return value


def _setting_flag(name: str) -> Parameter:
    if name == "config":
        return _flag(name, ConfigFlag, None)
    kind = bool if type_of(name) == "switch" else list[str] if is_list(name) else str
    return _flag(name, Annotated[kind | None, setting(name)], None)


def _flag(name: str, kind: Any, default: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _split(given: list[str] | None) -> list[str] | None:
    """Each of them may be several names."""
    return [name for part in given for name in part.split(",")] if given else None


_LOG_FLAGS = (
    _flag("verbose", VerboseFlag, False),
    _flag("log_level", LogLevelFlag, None),
    _flag("context", typer.Context, Parameter.empty),
)
