"""`emberkeep launch`: start a coding agent or a front end that uses the server which runs here."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.clients import CLIENTS, Client, Service, Setup
from emberkeep.cli.commands import one_command
from emberkeep.cli.console import complain
from emberkeep.cli.flags import with_settings
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError, EmberkeepError, ModelNotFound
from emberkeep.files import private_folder, replace_file

if TYPE_CHECKING:
    from emberkeep.cli.running_server import RunningServer

EXAMPLES = """\b
Examples:
  emberkeep launch claude                      Claude Code with the model that is served
  emberkeep launch codex -m mine               Codex with another of the served models
  emberkeep launch aider -- --message "Add a test." app.py
  emberkeep launch opencode --print            what it would set, and the command
"""
_NO_KEY = "none"
"""Clients want a key also where the server does not."""


@with_settings("data_dir", "api_key", "config")
def launch(
    config: Config,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help=f"One of {', '.join(CLIENTS)}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Passed on to the client.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The served model to use. [default: the first]")
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Show what it would set; start nothing.")] = False,
) -> None:
    """Start a client that is installed, set up for the server that runs here.

    Its own settings are left as they are: it is told by variables, by arguments, and by files in a folder of ours.
    """
    from emberkeep.cli.running_server import require_server

    chosen = _chosen(client)
    with closing(require_server(config)) as server:
        service = _service(server, model, config.api_key or _NO_KEY)
    folder = config.data_dir / "clients" / chosen.name
    setup = chosen.set_up(service, folder)
    _warn_of_small_context(chosen, service)
    if only_print:
        print("\n".join(_shown(chosen, setup, folder, config.api_key, arguments or [])))
        return
    program = shutil.which(chosen.program)
    if program is None:
        raise EmberkeepError(f"{chosen.title} is not installed ({chosen.program}): {chosen.install}.")
    for name, text in setup.files.items():
        replace_file(private_folder(folder) / name, text.encode())
    os.execvpe(program, [chosen.program, *setup.arguments, *(arguments or [])], {**os.environ, **setup.variables})


def _chosen(name: str) -> Client:
    if name not in CLIENTS:
        raise ConfigError(f"There is no client {name!r}: choose from {', '.join(CLIENTS)}.")
    return CLIENTS[name]


def _service(server: RunningServer, model: str | None, key: str) -> Service:
    """Raises EmberkeepError."""
    served = server.ask("GET", "/v1/models")["data"]
    cards = [card for card in served if model in (None, card["id"], *card["aliases"])]
    if not cards:
        names = ", ".join(card["id"] for card in served)
        raise ModelNotFound(f"The server has no model {model!r}: choose from {names}.")
    card = cards[0]
    if card["context_length"] is None:  # it was never loaded, and the client is about to ask for it
        card = server.ask("POST", "/models/load", json={"model": card["id"]}, timeout=None)["model"]
    return Service(server.url, card["id"], card["context_length"], key)


def _warn_of_small_context(client: Client, service: Service) -> None:
    if service.context < 2 * client.first_tokens:
        complain(
            f"{client.title} sends about {client.first_tokens:,} tokens before your first word, and the context "
            f"of {service.model} has {service.context:,}: use `serve --ctx`, or a model with a longer one."
        )


def _shown(client: Client, setup: Setup, folder: Path, key: str | None, arguments: list[str]) -> Iterator[str]:
    """Lines for a shell. The key is named, not shown."""

    def without_key(text: str) -> str:
        return shlex.quote(text.replace(key, "$EMBERKEEP_API_KEY") if key else text)

    for name, text in setup.files.items():
        yield f"# {folder / name}: {text.replace(key, '...') if key else text}"
    for name, value in setup.variables.items():
        yield f"export {name}={without_key(value)}"
    yield " ".join(map(without_key, (client.program, *setup.arguments, *arguments)))


app = one_command(launch, epilog=EXAMPLES)
