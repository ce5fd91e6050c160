"""Coding agents and front ends: what each must be told to use a server of ours.

Nothing of a user's own settings is changed: a client is told by variables, by arguments, and by files in a folder
that is only for this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path

from emberkeep.types.request import Json
from emberkeep.values import dataclass

PROVIDER = "emberkeep"
"""What clients that know several services call ours."""
_KEY_VARIABLE = "EMBERKEEP_API_KEY"
_PATIENCE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Service:
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
    set_up: Callable[[Service, Path], Setup]
    """The path is that of the client's folder."""
    first_tokens: int = 0
    """About how many tokens it sends before the user's first word."""


def _claude(service: Service, folder: Path) -> Setup:
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


def _codex(service: Service, folder: Path) -> Setup:
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


def _opencode(service: Service, folder: Path) -> Setup:
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


def _qwen(service: Service, folder: Path) -> Setup:
    variables = {
        "OPENAI_BASE_URL": service.v1,
        "OPENAI_API_KEY": service.key,
        "OPENAI_MODEL": service.model,
    }
    return Setup(variables, ("--auth-type", "openai"))


def _aider(service: Service, folder: Path) -> Setup:
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


def _crush(service: Service, folder: Path) -> Setup:
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


def _pi(service: Service, folder: Path) -> Setup:
    model = {"id": service.model, "contextWindow": service.context, "maxTokens": service.answer}
    ours = {"baseUrl": service.v1, "api": "openai-completions", "apiKey": service.key, "models": [model]}
    arguments = ("--provider", PROVIDER, "--model", service.model)
    return Setup(
        {"PI_CODING_AGENT_DIR": str(folder)},
        arguments,
        {"models.json": json.dumps({"providers": {PROVIDER: ours}})},
    )


def _goose(service: Service, folder: Path) -> Setup:
    return Setup(
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": service.model,
            "GOOSE_CONTEXT_LIMIT": str(service.context),
            "OPENAI_HOST": service.url,
            "OPENAI_API_KEY": service.key,
        }
    )


def _llm(service: Service, folder: Path) -> Setup:
    ours = {"model_id": service.model, "model_name": service.model, "api_base": service.v1, "supports_tools": True}
    variables = {"LLM_USER_PATH": str(folder), "LLM_MODEL": service.model, "OPENAI_API_KEY": service.key}
    return Setup(variables, files={"extra-openai-models.yaml": json.dumps([ours])})  # JSON is YAML


def _open_webui(service: Service, folder: Path) -> Setup:
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
