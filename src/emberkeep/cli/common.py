"""What every command shares: settings from flags, and where to print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep import config as settings
from emberkeep.config import Config, help_for

if TYPE_CHECKING:
    from rich.console import Console

# Flags are declared once here. All are text: `emberkeep.config` parses and explains them.
ModelFlag = Annotated[str | None, typer.Option("--model", "-m", help=help_for("model"))]
HostFlag = Annotated[str | None, typer.Option("--host", help=help_for("host"))]
PortFlag = Annotated[str | None, typer.Option("--port", "-p", help=help_for("port"))]
ApiKeyFlag = Annotated[str | None, typer.Option("--api-key", help=help_for("api_key"))]
DataDirFlag = Annotated[Path | None, typer.Option("--data-dir", help=help_for("data_dir"))]
CtxFlag = Annotated[str | None, typer.Option("--ctx", help=help_for("ctx"))]
ParallelFlag = Annotated[str | None, typer.Option("--parallel", help=help_for("parallel"))]
ThreadsFlag = Annotated[str | None, typer.Option("--threads", help=help_for("threads"))]
RamBudgetFlag = Annotated[str | None, typer.Option("--ram-budget", help=help_for("ram_budget"))]
DiskBudgetFlag = Annotated[str | None, typer.Option("--disk-budget", help=help_for("disk_budget"))]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", help="Configuration file to read instead of the usual places.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def load_config(**flags: object) -> Config:
    """Settings for a command; a flag that is None was not given. Raises ConfigError."""
    return settings.load_config(flags).config


def install_model(config: Config) -> None:
    """Pull the default model where it is configured and missing, and show it. Raises ModelError."""
    from emberkeep.cli.reporters import pull_reporter
    from emberkeep.library import ensure_model

    with pull_reporter() as reporter:
        ensure_model(config, reporter)


def console(*, stderr: bool = False) -> Console:
    """Colours and cursor movements only reach a terminal."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def complain(sentence: str) -> None:
    """One sentence on stderr, red where a person reads it."""
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[31m{sentence}\033[0m" if red else sentence, file=sys.stderr)


def readable_size(count: float) -> str:
    """Bytes as people say them, in powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
