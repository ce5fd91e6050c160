"""Answers for which tools run here that the client knows nothing of: it sees the answer.

The model may search its memory (`search_memory`), and with `--server-tools safe` or `ask` use the server's own
tools where the client has sent none. What it asked and was told stays in the conversation (`session/view.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum
from functools import partial
from time import perf_counter
from typing import Protocol

from emberkeep.backend.limits import with_deadline
from emberkeep.backend.tool_loop import Gate, LoopTools, ToolLoop
from emberkeep.config.settings import TOOL_TURNS
from emberkeep.errors import InvalidField
from emberkeep.session.recall import SEARCH
from emberkeep.session.sessions import Sessions
from emberkeep.types.events import Caller, Decision, Events, ToolOutcome, Usage
from emberkeep.types.request import Message, Recall, Request, Tool, ToolCall, ToolChoice
from emberkeep.values import dataclass

_SEARCH_ROUNDS = 4
"""Most rounds of searches for one answer; then the model has to answer."""

Answer = Callable[[Request], Events]


def without_tools(request: Request) -> Request:
    """As if its client had sent none. Raises InvalidField where it insists on a call, which it cannot get."""
    if request.tool_choice.mode in ("required", "named"):
        raise InvalidField("tool_choice", "this server leaves tools out (--tools off): give auto or none.")
    return replace(request, tools=(), tool_choice=ToolChoice("none"))


class RequestTools(LoopTools, Protocol):
    """Those that the model may call for one request."""

    @property
    def definitions(self) -> tuple[Tool, ...]: ...

    def is_ours(self, name: str) -> bool: ...


class ToolMode(StrEnum):
    RUNS = "runs"  # whenever a model calls it
    ASKS = "asks"  # a person is asked first; where none can be, models do not get it
    OFF = "off"


@dataclass(frozen=True, slots=True)
class HostTool:
    name: str
    group: str
    description: str
    mode: ToolMode
    allowed_by: str
    """A setting that would let it run unasked, if there is one of its own."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """An MCP server whose tools are used here."""

    name: str
    status: str
    reason: str
    """Why it has stopped."""
    about: str
    """The server's own name and version."""
    tools: int
    unapproved: tuple[str, ...]
    """Tools that are new, or have changed since they were approved."""


class ToolDesk(Protocol):
    """What people see of tools that run here, and where they decide. Belongs to the event loop."""

    def decide(self, question: str, decision: Decision) -> bool:
        """The answer to a `PermissionAsked`; False: nothing waits for it."""

    def listed(self) -> list[HostTool]:
        """All of them, used or not, by group and name."""

    def servers(self) -> list[ToolServer]:
        """Other programs that some of them come from."""


class HostTools(ToolDesk, Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def of(self, request: Request) -> RequestTools: ...

    def gate(self, request: Request) -> Gate:
        """For the calls of its answer."""


@dataclass(frozen=True, slots=True)
class JoinedDesks:
    """The desks of backends that stand in for each other, the one that answers now first."""

    desks: Sequence[ToolDesk]

    def decide(self, question: str, decision: Decision) -> bool:
        return any(desk.decide(question, decision) for desk in self.desks)

    def listed(self) -> list[HostTool]:
        return self.desks[0].listed()

    def servers(self) -> list[ToolServer]:
        return self.desks[0].servers()


class ServerTools:
    """Belongs to the event loop."""

    def __init__(
        self,
        sessions: Sessions,
        tools: HostTools | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """`deadline_s`: for a whole answer with all its calls, unless a request says."""
        self._sessions = sessions
        self._tools = tools
        self._rounds = TOOL_TURNS + 1 if tools else _SEARCH_ROUNDS
        self._deadline_s = deadline_s

    def applies(self, request: Request) -> bool:
        return not request.execution.is_prefix and self.equip(request) is not request

    def equip(self, request: Request) -> Request:
        """Add our tools, where it is a chat with one answer that may call tools, and has none of that name.

        What is warmed for such chats has them too.
        """
        choice = request.tool_choice.mode
        may_call = choice == "auto" or (choice != "none" and bool(request.tools))
        is_free = request.n == 1 and request.format is None and may_call
        is_chat = request.execution.is_prefix or any(message.role == "user" for message in request.messages)
        if request.prompt is not None or not (is_free and is_chat):
            return request
        known = {tool.name for tool in request.tools}
        ours = self._tools.of(request).definitions if self._tools and not request.tools else ()
        if self._sessions.recall_of(request) is Recall.TOOL and all(tool.name != SEARCH.name for tool in ours):
            ours = (*ours, SEARCH)
        new = tuple(tool for tool in ours if tool.name not in known)
        return replace(request, tools=(*request.tools, *new)) if new else request

    def run(self, request: Request, answer: Answer) -> Events:
        """Run rounds of `answer` with the tools until the model calls none of them."""
        limit_s = request.deadline_s or self._deadline_s
        events = self._run(request, answer)
        return with_deadline(events, limit_s) if limit_s else events

    async def _run(self, request: Request, answer: Answer) -> Events:
        equipped = self.equip(request)
        tools = _ToolsAndSearch(self._sessions, self._tools.of(request) if self._tools else None, request)
        gate = self._tools.gate(request) if self._tools else Gate()
        loop = ToolLoop(answer, tools, gate, SessionTranscript(self._sessions, request))
        is_ours = partial(_is_ours, request, equipped)
        with self._sessions.answering(request):
            async with aclosing(loop.run(equipped, self._rounds, is_ours)) as events:
                async for event in events:
                    yield event

    async def start(self) -> None:
        if self._tools is not None:
            await self._tools.start()

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.close()


@dataclass(frozen=True, slots=True)
class SessionTranscript:
    """Keeps calls and results as notes of the session: later prompts have them, the client does not."""

    sessions: Sessions
    request: Request
    """The client's."""
    is_shown = False

    async def add(self, asked: Request, messages: tuple[Message, ...], usage: Usage) -> Request:
        called, *results = messages
        texts = [result.content for result in results]
        await asyncio.to_thread(self.sessions.exchanged, asked, usage, called.content, called.tool_calls, texts)
        return asked

    async def shorten(self, asked: Request) -> Request | None:
        return asked if await asyncio.to_thread(self.sessions.shortened, self.request) else None


@dataclass(frozen=True, slots=True)
class _ToolsAndSearch:
    """The tools of one request: the server's own, if it has any, and the search of the memory."""

    sessions: Sessions
    tools: RequestTools | None
    request: Request

    def may_run_beside(self, name: str) -> bool:
        return self.tools is None or not self.tools.is_ours(name) or self.tools.may_run_beside(name)

    async def run(self, call: ToolCall, caller: Caller) -> ToolOutcome:
        is_search = call.name == SEARCH.name
        if self.tools is not None and (self.tools.is_ours(call.name) or not is_search):
            return await self.tools.run(call, caller)
        if not is_search:
            return ToolOutcome(call, f"There is no tool {call.name!r}: use {SEARCH.name}, or answer.", failed=True)
        begin = perf_counter()
        text = await asyncio.to_thread(self.sessions.search, self.request, call)
        return ToolOutcome(call, text, ms=1e3 * (perf_counter() - begin))


def _is_ours(request: Request, asked: Request, name: str) -> bool:
    """What a client without tools has does not know is ours, even a name that the model made up: the client cannot
    tell it so."""
    if not request.tools:
        return True
    return all(tool.name != name for tool in request.tools) and any(tool.name == name for tool in asked.tools)
