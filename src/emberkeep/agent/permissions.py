"""What a person has allowed, for this session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from contextlib import contextmanager

from emberkeep.tools.function import ToolFunction
from emberkeep.types import Decision, Tool, ToolCall


class Permissions:
    """Belongs to the event loop, but for `decide`, which may be called from any thread.

    Where nobody can be asked, the toolbox has only what is harmless, trusted or enabled, and that may run.
    """

    def __init__(self, *, asks: bool) -> None:
        self._asks = asks
        self._always: dict[str, Tool] = {}
        self._never: set[str] = set()
        self._waiting: list[tuple[ToolCall, asyncio.Future[Decision]]] = []

    def verdict(self, function: ToolFunction) -> bool | None:
        """None: somebody has to be asked."""
        if not self._asks or not function.is_dangerous:
            return True
        if function.name in self._never:
            return False
        return True if self._always.get(function.name) == function.definition else None

    @contextmanager
    def asking(self, call: ToolCall, function: ToolFunction) -> Generator[Awaitable[bool], None, None]:
        """From here on `decide` is heard; what is awaited is whether the call may run.

        `always` and `never` hold for the rest of the session: `never` for a name, `always` for a tool while its
        definition is the one that somebody has seen.
        """
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        waiting = (call, future)
        self._waiting.append(waiting)

        async def allowed() -> bool:
            decision = await future
            if decision is Decision.ALWAYS:
                self._always[function.name] = function.definition
            elif decision is Decision.NEVER:
                self._never.add(function.name)
            return decision in (Decision.ONCE, Decision.ALWAYS)

        question = allowed()
        try:
            yield question
        finally:
            question.close()
            self._waiting.remove(waiting)

    def decide(self, call: ToolCall, decision: Decision) -> None:
        """The answer to a `PermissionAsked`; one that nobody waits for is dropped."""
        # The very call: models of two answers at once may give theirs the same id.
        for waiting, future in tuple(self._waiting):
            if waiting is call:
                future.get_loop().call_soon_threadsafe(_settle, future, decision)


def _settle(future: asyncio.Future[Decision], decision: Decision) -> None:
    if not future.done():
        future.set_result(decision)
