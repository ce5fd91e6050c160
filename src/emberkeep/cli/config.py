"""`emberkeep config show`: every setting, its value and where the value came from."""

from __future__ import annotations

import json

import typer

from emberkeep.cli.common import ConfigFlag, JsonFlag
from emberkeep.config import LoadedConfig, load_config, public_values, shown
from emberkeep.types import Json

app = typer.Typer(help="Look at the settings.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def settings() -> None:
    # Without a callback Typer would make its only command the whole sub-app.
    pass


@app.command()
def show(config: ConfigFlag = None, as_json: JsonFlag = False) -> None:
    """Every setting, its value and where the value came from. Secrets are masked."""
    loaded = load_config({"config": config})
    if as_json:
        print(json.dumps(_rows(loaded), indent=2))
    else:
        _print_table(loaded)


def _rows(loaded: LoadedConfig) -> dict[str, Json]:
    values = public_values(loaded.config)
    return {key: {"value": value, "from": loaded.origins[key]} for key, value in values.items()}


def _print_table(loaded: LoadedConfig) -> None:
    table = [(key, shown(loaded.config, key), origin) for key, origin in loaded.origins.items()]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for key, value, origin in table:
        print(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
