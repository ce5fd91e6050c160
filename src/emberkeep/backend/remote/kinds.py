"""Which services can be spoken to, and what is usual for each: its SDK, its key, its address, its model."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points

from emberkeep.backend.remote.base import OpenProvider, Provider
from emberkeep.errors import ConfigError, RemoteRefused
from emberkeep.types import RemoteModel

GROUP = "emberkeep.backends"
"""Of entry points: the name is the kind, the value an `OpenProvider`."""


@dataclass(frozen=True, slots=True)
class Kind:
    factory: str
    """`module:function` of an `OpenProvider`, imported when it is used."""
    package: str
    """The SDK, as it is imported."""
    key_env: str | None = None
    """The variable that usually holds its key."""
    needs_key: bool = False
    model: str = ""
    """Empty: the first that is served."""
    context: int = 8192
    """Tokens, where neither the user nor the service says."""
    base_url: str | None = None
    """None: the SDK's own, or none that is usual."""
    needs_url: bool = False


_HERE = "emberkeep.backend.remote"

KINDS: Mapping[str, Kind] = {
    "openai": Kind(f"{_HERE}.openai:open_openai", "openai", "OPENAI_API_KEY", True, "gpt-6-sol", 128_000),
    "anthropic": Kind(
        f"{_HERE}.anthropic:open_anthropic", "anthropic", "ANTHROPIC_API_KEY", True, "claude-sonnet-5-5", 200_000
    ),
    "gemini": Kind(
        f"{_HERE}.gemini:open_gemini", "google.genai", "GEMINI_API_KEY", True, "gemini-3.8-flash", 1_048_576
    ),
    "grok": Kind(f"{_HERE}.grok:open_grok", "xai_sdk", "XAI_API_KEY", True, "grok-4.6", 131_072),
    "ollama": Kind(f"{_HERE}.ollama:open_ollama", "ollama", context=4096, base_url="http://127.0.0.1:11434"),
    "trtllm": Kind(f"{_HERE}.trtllm:open_trtllm", "openai", base_url="http://127.0.0.1:8000"),
    "compatible": Kind(f"{_HERE}.openai:open_openai", "openai", needs_url=True),
}


def open_provider(remote: RemoteModel, env: Mapping[str, str]) -> Provider:
    """Does not connect. Raises ConfigError, and RemoteRefused where a key is missing."""
    known = with_defaults(remote)
    kind = KINDS.get(remote.backend)
    if kind is None:
        return _load_entry_point(remote.backend)(known, _key(known, env))
    check_address(known)
    if not has_key(remote, env):
        raise RemoteRefused(f"{remote.name} needs a key: set the variable {known.api_key_env}.")
    return _load(kind)(known, _key(known, env))


def check_address(remote: RemoteModel) -> None:
    """Raises ConfigError where none is usual and none is given, and for an unknown kind."""
    if _kind(remote.backend).needs_url and remote.base_url is None:
        raise ConfigError(f"{remote.name} needs an address: give it a base_url (--base-url).")


def with_defaults(remote: RemoteModel) -> RemoteModel:
    """With what is usual where the user has said nothing. Raises ConfigError for an unknown kind."""
    kind = _kind(remote.backend)
    return replace(
        remote,
        model=remote.model or kind.model,
        base_url=remote.base_url or kind.base_url,
        api_key_env=remote.api_key_env or kind.key_env,
    )


def default_context(remote: RemoteModel) -> int:
    """Tokens, where neither the user nor the service says. Raises ConfigError for an unknown kind."""
    return _kind(remote.backend).context


def kind_names() -> list[str]:
    """All that `RemoteModel.backend` may be, those of installed packages among them."""
    return list(dict.fromkeys((*KINDS, *_entries())))


def has_key(remote: RemoteModel, env: Mapping[str, str]) -> bool:
    """Whether nothing is missing: the key is there, or none is needed. Raises ConfigError for an unknown kind."""
    if not _kind(remote.backend).needs_key and remote.api_key_env is None:
        return True
    return _key(with_defaults(remote), env) is not None


def _key(remote: RemoteModel, env: Mapping[str, str]) -> str | None:
    return env.get(remote.api_key_env or "", "").strip() or None


def _kind(backend: str) -> Kind:
    if backend in KINDS:
        return KINDS[backend]
    entry = _entries().get(backend)
    if entry is None:
        near = difflib.get_close_matches(backend, kind_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(kind_names())}."
        raise ConfigError(f"There is no backend {backend!r}: {hint}")
    return Kind(entry.value, entry.module.partition(".")[0])


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(kind: Kind) -> OpenProvider:
    module, _, name = kind.factory.partition(":")
    try:
        # Only the SDK may be missing: what else cannot be imported is a fault of ours.
        importlib.import_module(kind.package)
    except ImportError as error:
        raise ConfigError(
            f"The package {kind.package} is not installed: pip install 'emberkeep[remote]'."
        ) from error
    factory: OpenProvider = getattr(importlib.import_module(module), name)
    return factory


def _load_entry_point(backend: str) -> OpenProvider:
    """Of another package. Raises ConfigError."""
    entry = _entries()[backend]
    try:
        factory = entry.load()
    except Exception as error:
        raise ConfigError(f"The backend {backend} ({entry.value}) cannot be loaded: {error}.") from error
    if not callable(factory):
        raise ConfigError(f"The backend {backend} ({entry.value}) is no function that opens a provider.")
    opened: OpenProvider = factory
    return opened
