"""The tool with which a model searches what has left its context."""

from __future__ import annotations

import json

from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.session.texts import fitting, listed
from emberkeep.types import Tool

MOST_RESULTS = 10
_RESULTS = 3
_QUERY_CHARS = 2000
_CHARS = 4000
"""Of all results together: they stay in the context."""

NOTHING = "Nothing was found: try other words."

SEARCH = Tool(
    "search_memory",
    "Search earlier messages of your conversations with this user that are not in the context any more.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Words that the messages should contain."},
            "max_results": {"type": "integer", "minimum": 1, "maximum": MOST_RESULTS},
        },
        "required": ["query"],
    },
)


def search(memory: Memory, owner: str, arguments: str) -> str:
    """What the model is told. `arguments` is what it wrote, whatever that is. Never raises."""
    try:
        query, most = _read(arguments)
    except ValueError as error:
        return f"The call was not understood: {error}."
    try:
        found = memory.search(owner, query, max_results=most)
    except MemoryFailed as error:
        return f"Memory could not be searched: {error}"
    if not found:
        return NOTHING
    return listed(fitting(found, _CHARS, len)).strip()


def _read(arguments: str) -> tuple[str, int]:
    """Raises ValueError."""
    try:
        asked = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError("its arguments must be JSON") from error
    query = asked.get("query") if isinstance(asked, dict) else None
    if not isinstance(query, str) or not query.strip():
        raise ValueError("it needs a query")
    most = asked.get("max_results", _RESULTS)
    is_number = isinstance(most, int) and not isinstance(most, bool)
    return query[:_QUERY_CHARS], min(max(most, 1), MOST_RESULTS) if is_number else _RESULTS
