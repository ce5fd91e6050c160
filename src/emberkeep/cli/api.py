"""`emberkeep api`: models that run somewhere else, to chat with and for other models to ask."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.commands import JsonFlag, command_group, with_settings
from emberkeep.cli.console import console, plural, show_facts, show_table
from emberkeep.config.kinds import public_url
from emberkeep.config.settings import Config
from emberkeep.config.tables import public_remotes
from emberkeep.errors import ConfigError
from emberkeep.models.remotes import Remotes
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, Request
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.backend.base import WholeAnswer
    from emberkeep.backend.remote.base import RemoteAbout

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
_MOST_MODELS = 8

app = command_group("Register models that run somewhere else.", EXAMPLES)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What it is called here.")]


@dataclass(frozen=True, slots=True)
class RemoteFlags:
    """Fields of `RemoteModel`."""

    name: Name
    backend: Annotated[
        str,
        typer.Argument(
            metavar="BACKEND",
            help="openai, anthropic, gemini, grok, ollama, trtllm, compatible (whatever speaks OpenAI's API), "
            "or that of an installed package.",
        ),
    ]
    model: Annotated[str, typer.Option(help="What the service calls it.")] = ""
    api_key_env: Annotated[
        str | None, typer.Option(help="The variable that holds the key, not the key itself.")
    ] = None
    base_url: Annotated[str | None, typer.Option(help="Where the service is.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None
    ctx: Annotated[int | None, typer.Option(min=1, help="Longest conversation in tokens.")] = None
    description: Annotated[str, typer.Option(help="What it is good at, for the models that may ask it.")] = ""


@app.command("add", epilog="Example: emberkeep api add gpt openai --model gpt-6-sol")
@with_settings("data_dir", "config")
def add_model(config: Config, flags: RemoteFlags) -> None:
    """Register a model. Its key stays where it is: only the name of its variable is kept."""
    from emberkeep.backend.remote.vendors import check_address

    remote = RemoteModel(**asdict(flags))
    check_address(remote)
    Remotes(config).add(remote)
    print(f"{remote.name} is added: `emberkeep api test {remote.name}` asks it something.")


@app.command("list", epilog="Example: emberkeep api list --json")
@with_settings("data_dir", "config")
def list_models(config: Config, as_json: JsonFlag = False) -> None:
    """Every registered model, and whether its key is set. Keys are never shown."""
    remotes = Remotes(config).list()
    if as_json:
        print(json.dumps(public_remotes(remotes), indent=2, ensure_ascii=False))
    elif remotes:
        columns = ("name", "backend", "model", "where", "key", "good at")
        show_table(columns, ((remote.name, *_cells(remote, os.environ), remote.description) for remote in remotes))
    else:
        print("No models yet: `emberkeep api add NAME BACKEND` adds one.")


@app.command("remove", epilog="Example: emberkeep api remove gpt")
@with_settings("data_dir", "config")
def remove_model(config: Config, name: Name) -> None:
    """Forget a model that was added."""
    Remotes(config).remove(name)
    print(f"{name} is removed.")


@app.command("test", epilog="Example: emberkeep api test gpt")
@with_settings("data_dir", "config")
def test_model(config: Config, name: Name) -> None:
    """Ask a model something small, and show what came back and how long it took."""
    remote = Remotes(config).get(name)
    with console(stderr=True).status(f"Asking {name} ..."):
        about, answer = asyncio.run(_ask(remote))
    show_facts(_figures(remote, about, answer))


async def _ask(remote: RemoteModel) -> tuple[RemoteAbout, WholeAnswer]:
    from emberkeep.backend.base import read_answer
    from emberkeep.backend.remote.vendors import open_provider

    provider = open_provider(remote, os.environ)
    try:
        request = Request((Message("user", QUESTION),), max_tokens=remote.max_tokens or _TEST_TOKENS)
        return await provider.about(), await read_answer(provider.answer(request))
    finally:
        await provider.close()


# ── what people read ──


def _cells(remote: RemoteModel, env: Mapping[str, str]) -> tuple[str, str, str, str]:
    from emberkeep.backend.remote.vendors import has_key, with_defaults

    try:
        remote = with_defaults(remote, env)
    except ConfigError:
        return f"{remote.backend} (not installed)", remote.model, public_url(remote.base_url or ""), ""
    address = public_url(remote.base_url) if remote.base_url else "the vendor's own"
    variable = remote.api_key_env
    key = f"{variable} is {'set' if has_key(remote, env) else 'not set'}" if variable else "none needed"
    return remote.backend, remote.model or "(the first there)", address, key


def _figures(remote: RemoteModel, about: RemoteAbout, answer: WholeAnswer) -> Iterator[tuple[str, str]]:
    from emberkeep.backend.remote.vendors import with_defaults

    usage = answer.usage
    yield "model", f"{with_defaults(remote).model or '(the first there)'} ({remote.backend})"
    yield "there", _some_names(about.models)
    if about.context is not None:
        yield "context", f"{about.context:,} tokens"
    yield "answer", answer.text or "(nothing)"
    yield "tokens", f"{usage.prompt_tokens:,} asked, {usage.completion_tokens:,} answered"
    yield "time", f"{answer.first_ms:.0f} ms to the first word, {answer.ms:.0f} ms in all"


def _some_names(models: Sequence[str]) -> str:
    if not models:
        return "it does not say"
    more = len(models) - _MOST_MODELS
    shown = ", ".join(models[:_MOST_MODELS])
    return f"{shown} and {plural(more, 'other', 'others')}" if more > 0 else shown
