"""`emberkeep config`: the settings, and where they come from."""

from __future__ import annotations

import json

import typer

from emberkeep.cli.flags import ConfigFlag, JsonFlag, logged, settle
from emberkeep.config import LoadedConfig, public_values, show_value
from emberkeep.types import Json

app = typer.Typer(help="Look at the settings.", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def settings() -> None:
    # Without a callback Typer would make its only command the whole sub-app.
    pass


@app.command("show")
@logged
def show_config(config: ConfigFlag = None, as_json: JsonFlag = False) -> None:
    """Every setting, its value and where the value came from. Secrets are masked."""
    loaded = settle(config=config)
    if as_json:
        print(json.dumps(_settings_json(loaded), indent=2))
    else:
        _print_settings(loaded)


def _settings_json(loaded: LoadedConfig) -> dict[str, Json]:
    values = public_values(loaded.config)
    return {key: {"value": value, "from": loaded.origins[key]} for key, value in values.items()}


def _print_settings(loaded: LoadedConfig) -> None:
    table = [(key, show_value(loaded.config, key), origin) for key, origin in loaded.origins.items()]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for key, value, origin in table:
        print(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
