"""The known services, and the defaults of each: its SDK, its key, its address, its model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from emberkeep.backend.remote.base import OpenProvider, Provider
from emberkeep.errors import ConfigError, RemoteRefused
from emberkeep.text import did_you_mean
from emberkeep.types.models import RemoteModel
from emberkeep.values import dataclass

GROUP = "emberkeep.backends"
"""The group of entry points: the name is the vendor, the value an `OpenProvider`."""


@dataclass(frozen=True, slots=True)
class Vendor:
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
    """None: the SDK's own, or there is no default."""
    needs_url: bool = False
    older_key_env: str | None = None
    """The variable that held its key before, and is used where the usual one is not set."""


_HERE = "emberkeep.backend.remote"

VENDORS: Mapping[str, Vendor] = {
    "openai": Vendor(f"{_HERE}.openai:open_openai", "openai", "OPENAI_API_KEY", True, "gpt-6-sol", 128_000),
    "anthropic": Vendor(
        f"{_HERE}.anthropic:open_anthropic", "anthropic", "ANTHROPIC_API_KEY", True, "claude-sonnet-5-5", 200_000
    ),
    "gemini": Vendor(
        f"{_HERE}.gemini:open_gemini",
        "google.genai",
        "GEMINI_API_KEY",
        True,
        "gemini-3.8-flash",
        1_048_576,
        older_key_env="GOOGLE_API_KEY",
    ),
    "grok": Vendor(
        f"{_HERE}.grok:open_grok",
        "xai_sdk",
        "XAI_API_KEY",
        True,
        "grok-4.6",
        131_072,
        older_key_env="GROK_API_KEY",
    ),
    "ollama": Vendor(f"{_HERE}.ollama:open_ollama", "ollama", context=4096, base_url="http://127.0.0.1:11434"),
    "trtllm": Vendor(f"{_HERE}.trtllm:open_trtllm", "openai", base_url="http://127.0.0.1:8000"),
    "compatible": Vendor(f"{_HERE}.openai:open_openai", "openai", needs_url=True),
}


def open_provider(remote: RemoteModel, env: Mapping[str, str]) -> Provider:
    """Does not connect. Raises ConfigError, and RemoteRefused where a key is missing."""
    known = with_defaults(remote, env)
    vendor = VENDORS.get(remote.backend)
    if vendor is None:
        return _load_entry_point(remote.backend)(known, _key(known, env))
    check_address(known)
    if not has_key(remote, env):
        raise RemoteRefused(f"{remote.name} needs a key: set the variable {known.api_key_env}.")
    return _load(vendor)(known, _key(known, env))


def check_address(remote: RemoteModel) -> None:
    """Raises ConfigError where none is usual and none is given, and for an unknown vendor."""
    if _vendor(remote.backend).needs_url and remote.base_url is None:
        raise ConfigError(f"{remote.name} needs an address: give it a base_url (--base-url).")


def with_defaults(remote: RemoteModel, env: Mapping[str, str] = MappingProxyType({})) -> RemoteModel:
    """With the vendor's defaults for what the user left out; of the variables for its key, the one that is set in
    `env`. Raises ConfigError for an unknown vendor."""
    vendor = _vendor(remote.backend)
    names = [name for name in (vendor.key_env, vendor.older_key_env) if name is not None]
    in_use = next((name for name in names if _value(env, name)), vendor.key_env)
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
    if not _vendor(remote.backend).needs_key and remote.api_key_env is None:
        return True
    return _key(with_defaults(remote, env), env) is not None


def _key(remote: RemoteModel, env: Mapping[str, str]) -> str | None:
    return _value(env, remote.api_key_env or "")


def _value(env: Mapping[str, str], variable: str) -> str | None:
    return env.get(variable, "").strip() or None


def _vendor(backend: str) -> Vendor:
    if backend in VENDORS:
        return VENDORS[backend]
    entry = _entries().get(backend)
    if entry is None:
        hint = did_you_mean(backend, vendor_names(), f"use {', '.join(vendor_names())}.")
        raise ConfigError(f"There is no backend {backend!r}: {hint}")
    return Vendor(entry.value, entry.module.partition(".")[0])


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(vendor: Vendor) -> OpenProvider:
    module, _, name = vendor.factory.partition(":")
    try:
        # Only the SDK may be missing: what else cannot be imported is a fault of ours.
        importlib.import_module(vendor.package)
    except ImportError as error:
        raise ConfigError(
            f"The package {vendor.package} is not installed: pip install 'emberkeep[remote]'."
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
