"""The memory, and the conversations over it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from emberkeep.config.settings import Config, TooLong, memory_file
from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.memory.vectors import find_embedder
from emberkeep.session.sessions import Policy, Sessions, about_tokens
from emberkeep.types.request import Recall

log = logging.getLogger("emberkeep")

_RECALL_TOKENS = 512
"""Most that is quoted of what has left a conversation."""


def open_memory(config: Config) -> Memory | None:
    """None: it is switched off. Raises MemoryFailed."""
    if not config.memory:
        return None
    return Memory(memory_file(config), limit_bytes=config.memory_budget, embed=find_embedder())


def open_memory_or_none(config: Config) -> Memory | None:
    """Without a usable file nothing is remembered: serving goes on."""
    try:
        return open_memory(config)
    except MemoryFailed as error:
        log.warning("nothing is remembered: %s", error)
        return None


def open_sessions(
    config: Config, memory: Memory | None, context: int, count: Callable[[str], int] = about_tokens
) -> Sessions:
    """`count`: of a text's tokens."""
    recall_tokens = min(context // 8, _RECALL_TOKENS)
    evicts = config.too_long == TooLong.EVICT
    policy = Policy(context, evicts, recall=Recall(config.recall), recall_tokens=recall_tokens)
    return Sessions(memory, policy, count)
