"""`emberkeep launch`: start a coding agent or a front end that uses the server which runs here.

Nothing of a user's own settings is changed: a client is told by variables, by arguments, and by files in a folder
that is only for this."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.commands import one_command, with_settings
from emberkeep.cli.console import complain
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError, EmberkeepError, ModelNotFound
from emberkeep.files import private_folder, replace_file
from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.cli.running_server import RunningServer

# ── what each client must be told ──


PROVIDER = "emberkeep"
"""What clients that know several services call ours."""
_KEY_VARIABLE = "EMBERKEEP_API_KEY"
_PATIENCE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class ClientTarget:
    """Where a client finds the server, and the model that it is to use."""

    url: str
    """Without `/v1`."""
    model: str
    context: int
    key: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def answer(self) -> int:
        """The part of the context that a client should leave to an answer."""
        return self.context // 4


@dataclass(frozen=True, slots=True)
class Setup:
    """What a client is started with."""

    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Before those of the user."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by their names in the client's folder."""


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    title: str
    program: str
    install: str
    """How a user gets it."""
    set_up: Callable[[ClientTarget, Path], Setup]
    """The path is that of the client's folder."""
    first_tokens: int = 0
    """About how many tokens it sends before the user's first word."""


def _claude(service: ClientTarget, folder: Path) -> Setup:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    return Setup(
        {
            "ANTHROPIC_BASE_URL": service.url,
            "ANTHROPIC_AUTH_TOKEN": service.key,
            **dict.fromkeys(models, service.model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(service.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(service.answer),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with every call, at the beginning of the prompt
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # A long first prompt takes a while on a small machine, and for the second of these a ping is silence.
            "API_TIMEOUT_MS": str(_PATIENCE_MS),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_PATIENCE_MS),
        }
    )


def _codex(service: ClientTarget, folder: Path) -> Setup:
    settings: dict[str, Json] = {
        "model": service.model,
        "model_provider": PROVIDER,
        "model_context_window": service.context,
        f"model_providers.{PROVIDER}.name": "Emberkeep",
        f"model_providers.{PROVIDER}.base_url": service.v1,
        f"model_providers.{PROVIDER}.env_key": _KEY_VARIABLE,
        f"model_providers.{PROVIDER}.wire_api": "responses",
        f"model_providers.{PROVIDER}.stream_idle_timeout_ms": _PATIENCE_MS,
        "web_search": "disabled",  # only OpenAI has it
    }
    flags = (flag for key, value in settings.items() for flag in ("-c", f"{key}={json.dumps(value)}"))
    return Setup({_KEY_VARIABLE: service.key}, tuple(flags))


def _opencode(service: ClientTarget, folder: Path) -> Setup:
    limits = {"context": service.context, "output": service.answer}
    ours = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Emberkeep",
        "options": {"baseURL": service.v1, "apiKey": service.key},
        "models": {service.model: {"name": service.model, "limit": limits}},
    }
    model = f"{PROVIDER}/{service.model}"
    settings = {"provider": {PROVIDER: ours}, "model": model, "small_model": model, "autoupdate": False}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _qwen(service: ClientTarget, folder: Path) -> Setup:
    variables = {
        "OPENAI_BASE_URL": service.v1,
        "OPENAI_API_KEY": service.key,
        "OPENAI_MODEL": service.model,
    }
    return Setup(variables, ("--auth-type", "openai"))


def _aider(service: ClientTarget, folder: Path) -> Setup:
    model, facts, settings = f"openai/{service.model}", "models.json", "settings.json"
    limits = {"max_input_tokens": service.context, "max_output_tokens": service.answer}
    about = {model: {**limits, "max_tokens": service.answer, "mode": "chat", "litellm_provider": "openai"}}
    # By itself it sends no limit. The name stands for all models, and leaves what it knows of this one.
    sent = [{"name": "aider/extra_params", "extra_params": {"max_tokens": service.answer}}]
    files = ("--model-metadata-file", str(folder / facts), "--model-settings-file", str(folder / settings))
    return Setup(
        {"OPENAI_API_BASE": service.v1, "OPENAI_API_KEY": service.key},
        ("--model", model, *files, "--no-show-model-warnings"),
        {facts: json.dumps(about), settings: json.dumps(sent)},
    )


def _crush(service: ClientTarget, folder: Path) -> Setup:
    model = {
        "id": service.model,
        "name": service.model,
        "context_window": service.context,
        "default_max_tokens": service.answer,
    }
    ours = {"type": "openai-compat", "base_url": service.v1, "api_key": service.key, "models": [model]}
    used = {"model": service.model, "provider": PROVIDER}
    settings = {"providers": {PROVIDER: ours}, "models": {"large": used, "small": used}}
    return Setup({"CRUSH_GLOBAL_CONFIG": str(folder)}, files={"crush.json": json.dumps(settings)})


def _pi(service: ClientTarget, folder: Path) -> Setup:
    model = {"id": service.model, "contextWindow": service.context, "maxTokens": service.answer}
    ours = {"baseUrl": service.v1, "api": "openai-completions", "apiKey": service.key, "models": [model]}
    arguments = ("--provider", PROVIDER, "--model", service.model)
    return Setup(
        {"PI_CODING_AGENT_DIR": str(folder)},
        arguments,
        {"models.json": json.dumps({"providers": {PROVIDER: ours}})},
    )


def _goose(service: ClientTarget, folder: Path) -> Setup:
    return Setup(
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": service.model,
            "GOOSE_CONTEXT_LIMIT": str(service.context),
            "OPENAI_HOST": service.url,
            "OPENAI_API_KEY": service.key,
        }
    )


def _llm(service: ClientTarget, folder: Path) -> Setup:
    ours = {"model_id": service.model, "model_name": service.model, "api_base": service.v1, "supports_tools": True}
    variables = {"LLM_USER_PATH": str(folder), "LLM_MODEL": service.model, "OPENAI_API_KEY": service.key}
    return Setup(variables, files={"extra-openai-models.yaml": json.dumps([ours])})  # JSON is YAML


def _open_webui(service: ClientTarget, folder: Path) -> Setup:
    variables = {
        "OPENAI_API_BASE_URL": service.v1,
        "OPENAI_API_KEY": service.key,
        "ENABLE_OLLAMA_API": "false",
        "DEFAULT_MODELS": service.model,
    }
    return Setup(variables, ("serve",))


CLIENTS = {
    client.name: client
    for client in (
        Client("claude", "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude, 16_000),
        Client("codex", "Codex", "codex", "npm install -g @openai/codex", _codex, 8_000),
        Client("opencode", "OpenCode", "opencode", "npm install -g opencode-ai", _opencode, 10_000),
        Client("qwen", "Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", _qwen, 12_000),
        Client("aider", "Aider", "aider", "pip install aider-chat", _aider, 2_000),
        Client("crush", "Crush", "crush", "npm install -g @charmland/crush", _crush, 8_000),
        Client("pi", "Pi", "pi", "npm install -g @mariozechner/pi-coding-agent", _pi, 2_000),
        Client("goose", "Goose", "goose", "see its web page", _goose, 4_000),
        Client("llm", "LLM", "llm", "pip install llm", _llm),
        Client("open-webui", "Open WebUI", "open-webui", "pip install open-webui", _open_webui),
    )
}
"""By the names that `emberkeep launch` takes."""


# ── starting one ──

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

    if client not in CLIENTS:
        raise ConfigError(f"There is no client {client!r}: choose from {', '.join(CLIENTS)}.")
    chosen = CLIENTS[client]
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


def _service(server: RunningServer, model: str | None, key: str) -> ClientTarget:
    """Raises EmberkeepError."""
    served = server.ask("GET", "/v1/models")["data"]
    cards = [card for card in served if model in (None, card["id"], *card["aliases"])]
    if not cards:
        names = ", ".join(card["id"] for card in served)
        raise ModelNotFound(f"The server has no model {model!r}: choose from {names}.")
    card = cards[0]
    if card["context_length"] is None:  # it was never loaded, and the client is about to ask for it
        card = server.ask("POST", "/models/load", json={"model": card["id"]}, timeout=None)["model"]
    return ClientTarget(server.url, card["id"], card["context_length"], key)


def _warn_of_small_context(client: Client, service: ClientTarget) -> None:
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
