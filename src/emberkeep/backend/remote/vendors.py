"""The known services as rows of data: key, address, model, and how each differs from OpenAI's wire format."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import field, replace
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from emberkeep.errors import ConfigError, RemoteRefused
from emberkeep.text import did_you_mean
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.backend.remote.base import OpenProvider, Provider

GROUP = "emberkeep.backends"
"""The group of entry points: the name is the vendor, the value an `OpenProvider`."""

_NUCLEUS = frozenset({"temperature", "top_p"})
_SEEDED = _NUCLEUS | {"frequency_penalty", "presence_penalty", "seed"}
_BIASED = _SEEDED | {"logit_bias"}
_CUT = _BIASED | {"top_k", "min_p", "repetition_penalty"}


@dataclass(frozen=True, slots=True)
class Vendor:
    title: str
    """What messages call it, if it is at its own address."""
    url: str = ""
    """The API at its own address; empty: the server is the user's."""
    key_envs: tuple[str, ...] = ()
    """Variables that may hold its key, the usual one first. None: it needs no key."""
    model: str = ""
    """Empty: the first that is served."""
    context: int = 8192
    """Tokens, where neither the user nor the service says."""
    base_url: str | None = None
    """The usual address of a user's server."""
    package: str = "openai"
    """The SDK, as it is imported."""
    factory: str = "openai:OpenAIProvider"
    """Module and name of the `OpenProvider`, imported when it is used."""

    # How it speaks OpenAI's chat completions. Some refuse requests with fields that they do not know.
    sampling: frozenset[str] = _BIASED
    limit: str = "max_tokens"
    """The field for the longest answer."""
    user: str = ""
    """The field for the user; empty: it has none."""
    conversation: str = ""
    """The field that prompts are cached by."""
    conversation_header: str = ""
    """The same as a header."""
    thoughts: str = "reasoning_content"
    """The field for thoughts within a turn, until the server has used another; empty: they are not sent back."""
    thinking: Mapping[bool, Mapping[str, Json]] = field(default_factory=dict)
    """The fields that turn thinking on and off."""
    unsigned_call: Mapping[str, Json] = field(default_factory=dict)
    """What stands in a call that another model made, instead of a signature."""
    model_prefix: str = ""
    """What its list writes before the names of models."""
    is_peer: bool = False
    """It may be another Emberkeep: it gets the user's name as it is, template arguments, hops and depth."""
    has_developer: bool = False
    """It has the role `developer`."""
    has_prediction: bool = False
    has_tool_choice: bool = True
    has_parallel_calls: bool = True
    """It can be asked for one call at a time; otherwise only the first call of an answer is passed on."""
    has_ollama_api: bool = False
    """It tells the context of a model at `/api/ps` and `/api/show`."""


VENDORS: Mapping[str, Vendor] = {
    "openai": Vendor(
        "OpenAI",
        "https://api.openai.com/v1",
        ("OPENAI_API_KEY",),
        "gpt-6-sol",
        128_000,
        limit="max_completion_tokens",
        user="safety_identifier",
        conversation="prompt_cache_key",
        thoughts="",
        has_developer=True,
        has_prediction=True,
    ),
    "anthropic": Vendor(
        "Anthropic",
        key_envs=("ANTHROPIC_API_KEY",),
        model="claude-sonnet-5-5",
        context=200_000,
        package="anthropic",
        factory="anthropic:AnthropicProvider",
    ),
    "gemini": Vendor(
        "Google",
        "https://generativelanguage.googleapis.com/v1beta/openai",
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        "gemini-3.8-flash",
        1_048_576,
        sampling=_NUCLEUS,
        thoughts="",
        thinking={
            wanted: {"extra_body": {"google": {"thinking_config": config}}}
            for wanted, config in ((True, {"include_thoughts": True}), (False, {"thinking_budget": 0}))
        },
        unsigned_call={"extra_content": {"google": {"thought_signature": "skip_thought_signature_validator"}}},
        model_prefix="models/",
        has_parallel_calls=False,
    ),
    "grok": Vendor(
        "xAI",
        "https://api.x.ai/v1",
        ("XAI_API_KEY", "GROK_API_KEY"),
        "grok-4.6",
        131_072,
        sampling=_SEEDED,
        limit="max_completion_tokens",
        user="user",
        conversation_header="x-grok-conv-id",
    ),
    "ollama": Vendor(
        "Ollama",
        context=4096,
        base_url="http://127.0.0.1:11434",
        sampling=_SEEDED,
        thoughts="reasoning",
        thinking={True: {"reasoning_effort": "medium"}, False: {"reasoning_effort": "none"}},
        is_peer=True,
        has_tool_choice=False,
        has_parallel_calls=False,
        has_ollama_api=True,
    ),
    "trtllm": Vendor(
        "TensorRT-LLM",
        base_url="http://127.0.0.1:8000",
        factory="trtllm:TrtllmProvider",
        sampling=_CUT,
        user="user",
        is_peer=True,
    ),
    "compatible": Vendor("OpenAI", sampling=_CUT | {"typical_p"}, user="user", is_peer=True, has_prediction=True),
}


def vendor_of(remote: RemoteModel) -> Vendor:
    """How a service speaks. By its address for `openai` and `compatible`, which users take for each other."""
    if remote.backend not in ("openai", "compatible"):
        return VENDORS[remote.backend]
    host = urlsplit(remote.base_url or VENDORS[remote.backend].url).hostname or ""
    return VENDORS["openai" if host == "openai.com" or host.endswith(".openai.com") else "compatible"]


def api_url(remote: RemoteModel) -> str:
    """Where the API is. An address without a path is that of a server, whose API is where the vendor's is."""
    vendor = VENDORS[remote.backend]
    url = (remote.base_url or vendor.url).rstrip("/")
    if vendor.base_url:  # a path is the whole server's, which has more than this API
        return f"{url.removesuffix('/v1')}/v1"
    return url if urlsplit(url).path else url + (urlsplit(vendor.url).path or "/v1")


def open_provider(remote: RemoteModel, env: Mapping[str, str]) -> Provider:
    """Does not connect. Raises ConfigError, and RemoteRefused where a key is missing."""
    known = with_defaults(remote, env)
    check_address(known)
    if not has_key(remote, env):
        raise RemoteRefused(f"{remote.name} needs a key: set the variable {known.api_key_env}.")
    return _load(remote.backend)(known, _value(env, known.api_key_env))


def check_address(remote: RemoteModel) -> None:
    """Raises ConfigError where none is usual and none is given, and for an unknown vendor."""
    _vendor(remote.backend)
    if remote.backend == "compatible" and remote.base_url is None:
        raise ConfigError(f"{remote.name} needs an address: give it a base_url (--base-url).")


def with_defaults(remote: RemoteModel, env: Mapping[str, str] = MappingProxyType({})) -> RemoteModel:
    """Add the vendor's defaults for what the user left out; of the variables for its key, the one that is set in
    `env`. Raises ConfigError for an unknown vendor."""
    vendor = _vendor(remote.backend)
    in_use = next((name for name in vendor.key_envs if _value(env, name)), next(iter(vendor.key_envs), None))
    return replace(
        remote,
        model=remote.model or vendor.model,
        base_url=remote.base_url or vendor.base_url,
        api_key_env=remote.api_key_env or in_use,
    )


def default_context(remote: RemoteModel) -> int:
    """Tokens, where neither the user nor the service says. Raises ConfigError for an unknown vendor."""
    return _vendor(remote.backend).context


def vendor_names() -> list[str]:
    """All that `RemoteModel.backend` may be, those of installed packages among them."""
    return list(dict.fromkeys((*VENDORS, *_entries())))


def has_key(remote: RemoteModel, env: Mapping[str, str]) -> bool:
    """Whether the key is there, or none is needed. Raises ConfigError for an unknown vendor."""
    variable = with_defaults(remote, env).api_key_env
    return variable is None or _value(env, variable) is not None


def _value(env: Mapping[str, str], variable: str | None) -> str | None:
    return env.get(variable or "", "").strip() or None


def _vendor(backend: str) -> Vendor:
    """Raises ConfigError for an unknown one."""
    if backend in VENDORS:
        return VENDORS[backend]
    if backend not in _entries():
        hint = did_you_mean(backend, vendor_names(), f"use {', '.join(vendor_names())}.")
        raise ConfigError(f"There is no backend {backend!r}: {hint}")
    return Vendor(backend)


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(backend: str) -> OpenProvider:
    """Raises ConfigError."""
    if backend not in VENDORS:
        return _load_entry_point(_entries()[backend])
    vendor = VENDORS[backend]
    module, _, name = vendor.factory.partition(":")
    try:
        # Only the SDK may be missing: what else cannot be imported is a fault of ours.
        importlib.import_module(vendor.package)
    except ImportError as error:
        raise ConfigError(
            f"The package {vendor.package} is not installed: pip install 'emberkeep[remote]'."
        ) from error
    factory: OpenProvider = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return factory


def _load_entry_point(entry: EntryPoint) -> OpenProvider:
    """Raises ConfigError."""
    try:
        factory: OpenProvider = entry.load()
    except Exception as error:
        raise ConfigError(f"The backend {entry.name} ({entry.value}) cannot be loaded: {error}.") from error
    if not callable(factory):
        raise ConfigError(f"The backend {entry.name} ({entry.value}) is no function that opens a provider.")
    return factory
