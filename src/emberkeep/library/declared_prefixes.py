"""Prefixes that the operator declares, as requests."""

from __future__ import annotations

from dataclasses import replace

from emberkeep.config.settings import Config
from emberkeep.config.tables import WarmPrefix
from emberkeep.errors import ConfigError, RequestError
from emberkeep.types.lineage import SHARED
from emberkeep.types.request import Message, Request


def declared_prefixes(config: Config) -> list[Request]:
    """Every user may reuse their state. Raises ConfigError."""
    return [_declared_prefix(number, prefix) for number, prefix in enumerate(config.warm, 1)]


def _declared_prefix(number: int, prefix: WarmPrefix) -> Request:
    try:
        request = _prompt_or_chat(prefix)
    except RequestError as error:
        raise ConfigError(f"The prefix to warm number {number} cannot be used: {error}") from error
    return replace(request, user=SHARED, namespace=SHARED, ttl=prefix.ttl)


def _prompt_or_chat(prefix: WarmPrefix) -> Request:
    # Imported here: few declare any, and it brings every field of the API.
    from emberkeep.library.arguments import prefix_request

    if prefix.prompt is not None:
        return prefix_request(prefix.prompt, None, {})
    messages = [Message("system", prefix.system)] if prefix.system is not None else list(prefix.messages)
    return prefix_request(messages, list(prefix.tools), {})
