"""What a person has allowed, for this session, and the gate that asks before a call runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Generator, Sequence
from contextlib import contextmanager

from emberkeep.backend.tool_loop import Gate
from emberkeep.tools.function import ToolFunction
from emberkeep.tools.toolbox import ToolBox
from emberkeep.types import Decision, PermissionAsked, Tool, ToolCall

_REFUSED = "The user did not allow this call: ask for another way, or go on without it."
_CHANGED = "This tool has changed while the call waited: call it again."


class Permissions:
    """Belongs to the event loop, but for `decide`, which may be called from any thread.

    Where there is no person to ask, the toolbox has only what is harmless, trusted or enabled, and that may run.
    """

    def __init__(self, *, asks: bool) -> None:
        self._asks = asks
        self._always: dict[str, Tool] = {}
        self._never: set[str] = set()
        self._waiting: list[tuple[ToolCall, asyncio.Future[Decision]]] = []

    def verdict(self, function: ToolFunction) -> bool | None:
        """None: the user has to be asked."""
        if not self._asks or not function.is_dangerous:
            return True
        if function.name in self._never:
            return False
        return True if self._always.get(function.name) == function.definition else None

    @contextmanager
    def asking(self, call: ToolCall, function: ToolFunction) -> Generator[Awaitable[bool], None, None]:
        """While the block runs, `decide` answers for the call. Yields an awaitable: whether the call may run.

        `always` and `never` hold for the rest of the session: `never` for a name, `always` for a tool while its
        definition is the one that the user has seen.
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
        """The answer to a `PermissionAsked`; one that nothing waits for is dropped."""
        # The very call: models of two answers at once may give theirs the same id.
        for waiting, future in tuple(self._waiting):
            if waiting is call:
                future.get_loop().call_soon_threadsafe(_settle, future, decision)


def _settle(future: asyncio.Future[Decision], decision: Decision) -> None:
    if not future.done():
        future.set_result(decision)


class PermissionGate(Gate):
    """For the calls of one answer, whose ids differ."""

    def __init__(self, tools: ToolBox, permissions: Permissions) -> None:
        self._tools = tools
        self._permissions = permissions
        self._allowed: dict[str, bool] = {}
        """The user's decisions, by the call's id."""

    async def ask(self, calls: Sequence[ToolCall]) -> AsyncGenerator[PermissionAsked, None]:
        for call in calls:
            function = self._tools.target(call)
            if function and self._permissions.verdict(function) is None:
                with self._permissions.asking(call, function) as question:
                    yield PermissionAsked(call, function.group)
                    self._allowed[call.id] = await question

    def refusal(self, call: ToolCall) -> str | None:
        if (allowed := self._allowed.get(call.id)) is not None:
            return None if allowed else _REFUSED
        # Looked at again: an answer may take a person minutes, in which tools come and change.
        function = self._tools.target(call)
        verdict = self._permissions.verdict(function) if function else True
        return {None: _CHANGED, False: _REFUSED, True: None}[verdict]
