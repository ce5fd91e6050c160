"""Tools over memory: search what was said, keep facts and answers. Each for the user it is called for."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from emberkeep.errors import ToolFailed
from emberkeep.memory.memory import Memory
from emberkeep.session.recall import SEARCH, search
from emberkeep.tools.function import ToolFunction, in_thread, tool, tools_of
from emberkeep.types.events import Caller
from emberkeep.types.request import Json

GROUP = "memory"

_NAME_CHARS = 256
_TEXT_CHARS = 65_536
# Not in the schemas: a grammar that counts characters is slow to make.

FactName = Annotated[str, Field(description="What the fact is about, in a word or two.")]


def memory_tools(memory: Memory) -> list[ToolFunction]:
    async def run(given: Mapping[str, Json], caller: Caller) -> str:
        return await in_thread(lambda: search(memory, caller.owner, json.dumps(given)))

    return [ToolFunction(SEARCH, GROUP, run, only_reads=True), *tools_of(MemoryTools(memory))]


class MemoryTools:
    """Every tool blocks. Those that write raise MemoryFailed, and InvalidField for what looks like a secret."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    @tool(group=GROUP, parallel=False)
    def remember(self, question: str, answer: str, caller: Caller) -> str:
        """Store an answer that search_memory finds later. The same question replaces its answer."""
        asked = _check("question", question, _TEXT_CHARS)
        self._memory.store_answer(caller.owner, asked, _check("answer", answer, _TEXT_CHARS))
        return "It is remembered."

    @tool(group=GROUP, parallel=False)
    def set_fact(self, name: FactName, value: str, caller: Caller) -> str:
        """Remember a fact for good, in place of what was known under that name."""
        named = _check("name", name, _NAME_CHARS)
        self._memory.set_fact(caller.owner, named, _check("value", value, _TEXT_CHARS))
        return f"{named} is set."

    @tool(group=GROUP, only_reads=True)
    def get_fact(self, name: FactName, caller: Caller) -> str:
        """Read what is known under a name."""
        fact = self._memory.fact(caller.owner, name.strip())
        if fact is None:
            raise ToolFailed(self._no_such(name, caller))
        return fact.value

    @tool(group=GROUP, only_reads=True)
    def list_facts(self, caller: Caller) -> dict[str, str]:
        """Every fact that is known, by name."""
        return {fact.name: fact.value for fact in self._memory.facts(caller.owner)}

    @tool(group=GROUP, parallel=False, dangerous=True)
    def delete_fact(self, name: FactName, caller: Caller) -> str:
        """Forget what is known under a name."""
        if not self._memory.delete_fact(caller.owner, name.strip()):
            raise ToolFailed(self._no_such(name, caller))
        return f"{name.strip()} is deleted."

    def _no_such(self, name: str, caller: Caller) -> str:
        names = {fact.name.casefold(): fact.name for fact in self._memory.facts(caller.owner)}
        near = difflib.get_close_matches(name.casefold(), names, n=1)
        way_out = f"did you mean {names[near[0]]}?" if near else "list_facts shows what is known."
        return f"There is no fact {name[:_NAME_CHARS]!r}: {way_out}"


def _check(what: str, text: str, most: int) -> str:
    """Raises ToolFailed."""
    stripped = text.strip()
    if not 0 < len(stripped) <= most:
        raise ToolFailed(f"{what} must have 1 to {most} characters.")
    return stripped
