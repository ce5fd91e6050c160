"""`emberkeep config`: every setting and where it comes from, and which files of other folders are trusted."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from emberkeep.cli.commands import (
    ConfigFlag,
    JsonFlag,
    YesFlag,
    accepted_briefly,
    command_group,
    default_of,
    grouped,
    help_for,
    logged,
    settle,
)
from emberkeep.cli.console import align, ask_first, plural, printable
from emberkeep.config.kinds import public_url
from emberkeep.config.settings import FIELDS, is_harmless, public_values, show_value
from emberkeep.config.sources import FILE_NAMES, ConfigFile, file_in, is_trusted, read_config_file, trust, withdraw
from emberkeep.config.tables import McpServer
from emberkeep.errors import ConfigError
from emberkeep.types.request import Json

app = command_group("Look at the settings, and trust a file that sets some.")

Where = Annotated[Path, typer.Argument(metavar="[PATH]", help="The file, or its folder. [default: this folder]")]

DOCS_BEGIN, DOCS_END = "<!-- settings -->", "<!-- end of settings -->"
_ELSEWHERE = {"data_dir": "your data folder", "tools_root": "the current folder"}
"""Defaults that differ from machine to machine, in words."""
_EFFECTS = {
    "mcp": "starts these programs, or connects to these addresses, for what tools they have",
    "tools_from": "runs these Python files",
    "llama_library": "runs the code of this library",
    "backend": "sends conversations to this service",
    "backends": "lets conversations be sent to these services, with your keys for them",
    "base_url": "sends conversations, and your key, to this address",
    "remote": "sends the state of conversations to this server, and loads from it",
    "cluster_address": "runs on this Ray, and gives it the settings",
    "warm": "puts these texts or files into prompts",
}
"""What is not plain from the help text of the setting."""


@app.command("show")
@logged
def show_config(config: ConfigFlag = None, as_json: JsonFlag = False) -> None:
    """Every setting, its value and where the value came from. Secrets are masked."""
    loaded = settle(config=config)
    if as_json:
        values = public_values(loaded.config)
        shown = {key: {"value": value, "from": loaded.origins[key]} for key, value in values.items()}
        print(json.dumps(shown, indent=2))
    else:
        rows = [(key, show_value(loaded.config, key), origin) for key, origin in loaded.origins.items()]
        print("\n".join(align(rows)))


@app.command("trust", epilog="Examples: emberkeep config trust, emberkeep config trust ~/src/mine/emberkeep.toml")
@logged
def trust_config(path: Where = Path(), yes: YesFlag = False) -> None:
    """Show what the configuration file of a folder would do, and let it, as long as it stays as it is.

    Your own file and one that is named with --config need no trust.
    """
    file = read_config_file(_file_at(path).resolve())
    if not file.risky:
        print(printable(f"{file.path} needs no trust: nothing that it sets could do harm."))
        return
    for line in _consequences(file):
        print(printable(line.replace("\n", "\\n")))  # so that no value can look like another line
    if not yes:
        ask_first(printable(f"Trust {file.path} with {plural(len(file.risky), 'such setting', 'such settings')}?"))
    trust(file.path, file.digest)
    print("It is trusted until it changes, or `emberkeep config untrust`.")


@app.command("untrust", epilog="Example: emberkeep config untrust")
@logged
def untrust_config(path: Where = Path()) -> None:
    """Take back what `emberkeep config trust` has allowed to a file, also to one that is gone."""
    files = [path / name for name in FILE_NAMES] if path.is_dir() else [path]
    if not [file for file in files if withdraw(file.resolve())]:
        raise ConfigError(f"No configuration file at {path.resolve()} is trusted: there is nothing to take back.")
    print("It is trusted no longer.")


def _file_at(path: Path) -> Path:
    found = file_in(path) if path.is_dir() else path
    if found is None:
        raise ConfigError(f"There is no {' or '.join(FILE_NAMES)} in {path.resolve()}: name the file to trust.")
    return found


@app.command("docs", epilog="Example: emberkeep config docs docs/configuration.md")
@logged
def write_docs(
    page: Annotated[Path | None, typer.Argument(help="A page to write them into, between its two marks.")] = None,
) -> None:
    """Every setting as a table in Markdown: its default, what it accepts and what it is for."""
    table = "\n".join(_docs())
    if page is None:
        print(table)
        return
    before, begin, rest = page.read_text("utf-8").partition(DOCS_BEGIN)
    _, end, after = rest.partition(DOCS_END)
    if not (begin and end):
        raise ConfigError(f"{page} has no place for them: write {DOCS_BEGIN} and {DOCS_END} into it, a line each.")
    page.write_text(f"{before}{begin}\n{table}\n{end}{after}", "utf-8")


def _docs() -> Iterator[str]:
    for group, keys in grouped().items():
        yield from (f"\n### {group}\n", "| setting and default | |", "|---|---|")
        for key in keys:
            default = _ELSEWHERE.get(key) or default_of(key)
            yield f"| `{key} = {default}` | {help_for(key)} ({accepted_briefly(key)}) |"
    harmless = ", ".join(f"`{key}`" for key in FIELDS if is_harmless(key, default_of(key)))
    yield "\n" + textwrap.fill(f"A file of the current folder sets by itself: {harmless}.", 115)


# ── what a file would do, for the person who decides ──


def _consequences(file: ConfigFile) -> Iterator[str]:
    state = "is trusted already" if is_trusted(file.path, file.digest) else "is not trusted"
    yield f"{file.path} {state}. It sets what could do harm:"
    for key in file.risky:
        yield f"  {key}: {_EFFECTS.get(key) or help_for(key)}"
        yield from (f"    {line}" for line in _values(file, key))
    yield f"Relative paths in it start at {file.path.parent}. What they lead to may change without a question."
    about = file.path.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield "Other users of this machine can change this file."


def _values(file: ConfigFile, key: str) -> list[str]:
    """Everything that it says of `key`, secrets masked, a line for each entry of a table."""
    if key == "mcp":
        return [_server(server) for server in file.parsed(key)]
    value = file.public(key)
    if value is None or value == []:
        return ["none"]  # which may take away what the user's own file says
    return [_entry(item) for item in (value if isinstance(value, list) else [value])]


def _entry(value: Json) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_entry(item)}" for key, item in value.items() if item not in (None, "", [], {}))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _server(server: McpServer) -> str:
    if server.url is not None:
        does, values = f"connects to {public_url(server.url)}", server.headers
    else:
        does, values = f"starts `{shlex.join(server.command)}`", server.env
    place = f" in {server.cwd}" if server.cwd else ""
    trusted = "; its tools run without asking" if server.trusted else ""
    return f"{server.name}: {does}{place}{_with(values)}{trusted}"


def _with(values: Mapping[str, str]) -> str:
    """Names of variables or headers; of their values only which variables of the user are put into them."""
    taken = {name: re.findall(r"\$\{?(\w+)", value) for name, value in values.items()}
    shown = [f"{name} (with your {', '.join(found)})" if found else name for name, found in taken.items()]
    return f", with {', '.join(shown)}" if shown else ""
