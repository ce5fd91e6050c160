"""`emberkeep api`: models that run somewhere else, to chat with and for other models to ask."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.api_table import print_remotes, print_tested
from emberkeep.cli.common import ConfigFlag, DataDirFlag, JsonFlag, console, load_config
from emberkeep.config.tables import public_remotes
from emberkeep.models.remotes import Remotes
from emberkeep.types import Message, RemoteModel, Request

if TYPE_CHECKING:
    from emberkeep.backend.remote.base import RemoteAbout, WholeAnswer

EXAMPLES = """\b
Examples:
  emberkeep api add claude anthropic --model claude-sonnet-5-5    its key is in ANTHROPIC_API_KEY
  emberkeep api add qwen compatible --base-url http://127.0.0.1:8000/v1 --description "Good at code."
  emberkeep api list
  emberkeep api test claude
  emberkeep chat --backend claude
"""
QUESTION = "Say hello in one short sentence."

_TEST_TOKENS = 256

app = typer.Typer(
    help="Register models that run somewhere else.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What it is called here.")]


@app.command("add", epilog="Example: emberkeep api add gpt openai --model gpt-6-sol")
def add_model(
    name: Name,
    backend: Annotated[
        str,
        typer.Argument(
            metavar="BACKEND",
            help="openai, anthropic, gemini, grok, ollama, trtllm, compatible (whatever speaks OpenAI's API), "
            "or that of an installed package.",
        ),
    ],
    model: Annotated[str, typer.Option(help="What the service calls it.")] = "",
    api_key_env: Annotated[
        str | None, typer.Option(help="The variable that holds the key, not the key itself.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="Where the service is.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    ctx: Annotated[int | None, typer.Option(min=1, help="Longest conversation in tokens.")] = None,
    description: Annotated[str, typer.Option(help="What it is good at, for the models that may ask it.")] = "",
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Register a model. Its key stays where it is: only the name of its variable is kept."""
    from emberkeep.backend.remote.kinds import check_address

    remote = RemoteModel(name, backend, model, base_url, api_key_env, max_tokens, ctx, description)
    check_address(remote)
    _remotes(data_dir, config).add(remote)
    print(f"{name} is added: `emberkeep api test {name}` asks it something.")


@app.command("list", epilog="Example: emberkeep api list --json")
def list_models(as_json: JsonFlag = False, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Every registered model, and whether its key is set. Keys are never shown."""
    remotes = _remotes(data_dir, config).list()
    if as_json:
        print(json.dumps(public_remotes(remotes), indent=2, ensure_ascii=False))
    elif remotes:
        print_remotes(remotes, os.environ)
    else:
        print("No models yet: `emberkeep api add NAME BACKEND` adds one.")


@app.command("remove", epilog="Example: emberkeep api remove gpt")
def remove_model(name: Name, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Forget a model that was added."""
    _remotes(data_dir, config).remove(name)
    print(f"{name} is removed.")


@app.command("test", epilog="Example: emberkeep api test gpt")
def test_model(name: Name, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Ask a model something small, and show what came back and how long it took."""
    remote = _remotes(data_dir, config).get(name)
    with console(stderr=True).status(f"Asking {name} ..."):
        about, answer = asyncio.run(_tested(remote))
    print_tested(remote, about, answer)


def _remotes(data_dir: Path | None, config: Path | None) -> Remotes:
    return Remotes(load_config(data_dir=data_dir, config=config))


async def _tested(remote: RemoteModel) -> tuple[RemoteAbout, WholeAnswer]:
    from emberkeep.backend.remote.base import read_answer
    from emberkeep.backend.remote.kinds import open_provider

    provider = open_provider(remote, os.environ)
    try:
        request = Request((Message("user", QUESTION),), max_tokens=remote.max_tokens or _TEST_TOKENS)
        return await provider.about(), await read_answer(provider, request)
    finally:
        await provider.close()
