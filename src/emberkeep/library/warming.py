"""Prefixes that the operator declares, as requests that everybody may reuse."""

from __future__ import annotations

from dataclasses import replace

from emberkeep.config import Config, WarmPrefix
from emberkeep.errors import ConfigError, RequestError
from emberkeep.library.requests import prefix_request
from emberkeep.types import SHARED, Message, Request


def declared_prefixes(config: Config) -> list[Request]:
    """Raises ConfigError."""
    return [_request(number, prefix) for number, prefix in enumerate(config.warm, 1)]


def _request(number: int, prefix: WarmPrefix) -> Request:
    try:
        request = _prompt_or_chat(prefix)
    except RequestError as error:
        raise ConfigError(f"The prefix to warm number {number} cannot be used: {error}") from error
    return replace(request, user=SHARED, namespace=SHARED, ttl=prefix.ttl)


def _prompt_or_chat(prefix: WarmPrefix) -> Request:
    if prefix.prompt is not None:
        return prefix_request(prefix.prompt, None, {})
    messages = [Message("system", prefix.system)] if prefix.system is not None else list(prefix.messages)
    return prefix_request(messages, list(prefix.tools), {})
