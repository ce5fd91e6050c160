"""What every command shares: settings from flags, and where to print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.models import OptionInfo

from emberkeep import config as settings
from emberkeep.config import Config, default_of, help_for, type_of
from emberkeep.errors import EmberkeepError

if TYPE_CHECKING:
    from rich.console import Console

    from emberkeep.library import Emberkeep


def setting_help(key: str) -> str:
    return f"{help_for(key)} [default: {default_of(key)}]"


def _flag(key: str, *short: str, callback: Callable[..., object] | None = None) -> OptionInfo:
    option: OptionInfo = typer.Option(
        f"--{key.replace('_', '-')}",
        *short,
        metavar=f"<{type_of(key)}>",
        help=setting_help(key),
        callback=callback,
    )
    return option


def _names(key: str) -> OptionInfo:
    """May be given several times, each time with one name or more."""

    def split(given: list[str] | None) -> list[str] | None:
        return [name for part in given for name in part.split(",")] if given else None

    return _flag(key, callback=split)


def _switch(key: str) -> OptionInfo:
    name = key.replace("_", "-")
    option: OptionInfo = typer.Option(f"--{name}/--no-{name}", help=setting_help(key), show_default=False)
    return option


# Flags are declared once here. All but switches are text: `emberkeep.config` parses and explains them.
ModelFlag = Annotated[str | None, _flag("model", "-m")]
HostFlag = Annotated[str | None, _flag("host")]
PortFlag = Annotated[str | None, _flag("port", "-p")]
ApiKeyFlag = Annotated[str | None, _flag("api_key")]
DataDirFlag = Annotated[Path | None, _flag("data_dir")]
CtxFlag = Annotated[str | None, _flag("ctx")]
ParallelFlag = Annotated[str | None, _flag("parallel")]
ThreadsFlag = Annotated[str | None, _flag("threads")]
LoraFlag = Annotated[list[str] | None, _flag("lora")]
KvTypeFlag = Annotated[str | None, _flag("kv_type")]
GpuLayersFlag = Annotated[str | None, _flag("gpu_layers")]
CpuMoeFlag = Annotated[str | None, _flag("cpu_moe")]
TensorSplitFlag = Annotated[str | None, _flag("tensor_split")]
EngineFlag = Annotated[str | None, _flag("engine")]
DeviceFlag = Annotated[str | None, _flag("device")]
DtypeFlag = Annotated[str | None, _flag("dtype")]
AttentionFlag = Annotated[str | None, _flag("attention")]
KvBitsFlag = Annotated[str | None, _flag("kv_bits")]
ApproximateFlag = Annotated[str | None, _flag("approximate")]
ExactFlag = Annotated[bool | None, _switch("exact")]
WarmFlag = Annotated[list[str] | None, _flag("warm")]
MaxConcurrentPerUserFlag = Annotated[str | None, _flag("max_concurrent_per_user")]
RamBudgetFlag = Annotated[str | None, _flag("ram_budget")]
DiskBudgetFlag = Annotated[str | None, _flag("disk_budget")]
PlanningFlag = Annotated[bool | None, _switch("planning")]
AutoTruncateFlag = Annotated[bool | None, _switch("auto_truncate")]
EvictFlag = Annotated[bool | None, _switch("evict")]
RecallFlag = Annotated[str | None, _flag("recall")]
EnableToolsFlag = Annotated[list[str] | None, _names("enable_tools")]
DisableToolsFlag = Annotated[list[str] | None, _names("disable_tools")]
ToolsFromFlag = Annotated[list[str] | None, _flag("tools_from")]
ToolsRootFlag = Annotated[str | None, _flag("tools_root")]
ToolsFlag = Annotated[str | None, _flag("tools")]
ServerToolsFlag = Annotated[bool | None, _switch("server_tools")]
NotoolsFlag = Annotated[bool | None, typer.Option("--notools", help=setting_help("notools"), show_default=False)]
ReasoningFlag = Annotated[str | None, _flag("reasoning")]
BackendFlag = Annotated[str | None, _flag("backend")]
BaseUrlFlag = Annotated[str | None, _flag("base_url")]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", help="Configuration file to read instead of the usual places.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def load_config(**flags: object) -> Config:
    """Settings for a command, whose flags have their names; one that is None or no list was not given.

    Raises ConfigError.
    """
    return settings.load_config({key: None if value == [] else value for key, value in flags.items()}).config


def settings_among(arguments: Mapping[str, object]) -> dict[str, object]:
    """Those of a command's arguments that are settings."""
    return {key: value for key, value in arguments.items() if key in settings.FIELDS or key == "config"}


def install_model(config: Config) -> None:
    """Pull the default model where it is configured and missing, and show it. Raises ModelError."""
    from emberkeep.cli.reporters import pull_reporter
    from emberkeep.library import ensure_model

    with pull_reporter() as reporter:
        ensure_model(config, reporter)


def open_model(config: Config) -> Emberkeep:
    """Load a model that is here, with a word about it where a person waits. Raises ModelError, EngineError."""
    from emberkeep.library import Emberkeep
    from emberkeep.runtime import backend_names

    first = backend_names(config)[0]
    with console(stderr=True).status(f"Loading {config.model if first == 'local' else first} ..."):
        return Emberkeep.open(config)


def ask_first(question: str) -> None:
    """Go on only if the answer is yes. Raises EmberkeepError where nobody can be asked."""
    if not _is_terminal():
        raise EmberkeepError(f"{question} Nobody can be asked here: say --yes.")
    typer.confirm(question, abort=True, err=True)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def whose(user: str) -> str:
    return f"the user {user}" if user else "those who gave no name"


def console(*, stderr: bool = False) -> Console:
    """Colours and cursor movements only reach a terminal."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def complain(sentence: str) -> None:
    """One sentence on stderr, red where a person reads it. What others have said in it stays text."""
    from emberkeep.cli.tables import printable

    sentence = printable(sentence)
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[31m{sentence}\033[0m" if red else sentence, file=sys.stderr)
