"""What a person has allowed, for this session, and the gate that asks before a call runs.

The dangerous tools of a server are only for clients that ask a person, who has to allow each call.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Container, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from emberkeep.backend.base import Backend
from emberkeep.backend.server_tools import HostTool, ToolMode, ToolServer
from emberkeep.backend.tool_loop import Gate, ToolLoop
from emberkeep.errors import RequestError
from emberkeep.session.recall import fit_results, room_for_results, shorten_results
from emberkeep.session.sessions import about_tokens
from emberkeep.tools.function import ToolFunction
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import Decision, Events, PermissionAsked, Usage
from emberkeep.types.request import Message, Request, Tool, ToolCall, ToolChoice
from emberkeep.values import dataclass

_REFUSED = "The user did not allow this call: ask for another way, or go on without it."
MOST_OPEN = 16
"""Questions at a time; each holds an answer's place, and what is asked beyond that is a no."""
_CHANGED = "This tool has changed while the call waited: call it again."


class Questions:
    """Calls that wait for a person. Belongs to the event loop, but for `answer` and `decide`."""

    def __init__(self, patience_s: float | None = None) -> None:
        """`patience_s`: after which silence counts as a no; None: a person is there."""
        self._patience_s = patience_s
        self._waiting: dict[str, tuple[ToolCall, asyncio.Future[Decision]]] = {}

    @contextmanager
    def asking(self, call: ToolCall) -> Generator[tuple[str, asyncio.Future[Decision]], None, None]:
        """The question's id, which only those who are told can guess, and its answer."""
        id_, future = secrets.token_urlsafe(16), asyncio.get_running_loop().create_future()
        if len(self._waiting) < MOST_OPEN:
            self._waiting[id_] = call, future
        else:
            future.set_result(Decision.NO)
        try:
            yield id_, future
        finally:
            self._waiting.pop(id_, None)

    async def answered(self, future: asyncio.Future[Decision]) -> Decision:
        try:
            return await asyncio.wait_for(future, self._patience_s)
        except TimeoutError:
            return Decision.NO

    def answer(self, id_: str, decision: Decision) -> bool:
        """Whether a call has waited for it. The first answer counts."""
        if (waiting := self._waiting.pop(id_, None)) is None:
            return False
        future = waiting[1]
        future.get_loop().call_soon_threadsafe(_settle, future, decision)
        return True

    def decide(self, call: ToolCall, decision: Decision) -> None:
        """As `answer`, for the very call: models of two answers at once may give theirs the same id."""
        for id_, (waiting, _) in tuple(self._waiting.items()):
            if waiting is call:
                self.answer(id_, decision)


class Permissions:
    """Belongs to the event loop, but for `decide`, which may be called from any thread.

    Where there is no person to ask, the toolbox has only what is harmless, trusted or enabled, and that may run.
    """

    def __init__(self, *, asks: bool, questions: Questions | None = None) -> None:
        """`questions`: of all conversations, where one place answers them."""
        self._asks = asks
        self._questions = questions or Questions()
        self._always: dict[str, Tool] = {}
        self._never: set[str] = set()

    def verdict(self, function: ToolFunction) -> bool | None:
        """None: the user has to be asked."""
        if not self._asks or not function.is_dangerous:
            return True
        if function.name in self._never:
            return False
        return True if self._always.get(function.name) == function.definition else None

    @contextmanager
    def asking(
        self, call: ToolCall, function: ToolFunction
    ) -> Generator[tuple[PermissionAsked, Awaitable[bool]], None, None]:
        """While the block runs, the question can be answered. Yields it, and an awaitable: whether the call may
        run.

        `always` and `never` hold for the rest of the session: `never` for a name, `always` for a tool while its
        definition is the one that the user has seen.
        """

        async def allowed() -> bool:
            decision = await self._questions.answered(future)
            if decision is Decision.ALWAYS:
                self._always[function.name] = function.definition
            elif decision is Decision.NEVER:
                self._never.add(function.name)
            return decision in (Decision.ONCE, Decision.ALWAYS)

        with self._questions.asking(call) as (id_, future):
            answer = allowed()
            try:
                yield PermissionAsked(call, function.group, id_), answer
            finally:
                answer.close()

    def decide(self, call: ToolCall, decision: Decision) -> None:
        """The answer to a `PermissionAsked`; one that nothing waits for is dropped."""
        self._questions.decide(call, decision)


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
                with self._permissions.asking(call, function) as (question, allowed):
                    yield question
                    self._allowed[call.id] = await allowed

    def refusal(self, call: ToolCall) -> str | None:
        if (allowed := self._allowed.get(call.id)) is not None:
            return None if allowed else _REFUSED
        # Looked at again: an answer may take a person minutes, in which tools come and change.
        function = self._tools.target(call)
        verdict = self._permissions.verdict(function) if function else True
        return {None: _CHANGED, False: _REFUSED, True: None}[verdict]


# ── the tools of a server ──


PATIENCE_S = 600.0
"""After which a question that nobody answers counts as a no: its answer holds a place that others wait for."""
_REMEMBERED = 1000
"""Conversations whose decisions are remembered."""


class HostToolBox:
    """Belongs to the event loop. Owns the toolbox."""

    def __init__(self, tools: ToolBox, policy: ToolPolicy, *, asks: bool) -> None:
        """`policy`: which tools are used. `asks`: clients may ask a person, and then only those get dangerous
        ones."""
        self._tools = tools.under(replace(policy, is_harmless=True)) if asks else tools
        self._asked = tools.under(replace(policy, asks=True)) if asks else None
        self._questions = Questions(PATIENCE_S)
        self._permissions: OrderedDict[bytes, Permissions] = OrderedDict()
        """By conversation."""
        self._secret = secrets.token_bytes(16)

    async def start(self) -> None:
        await (self._asked or self._tools).start()

    async def close(self) -> None:
        await self._tools.close()

    def of(self, request: Request) -> ToolBox:
        return self._asked if self._asked is not None and request.asks_permission else self._tools

    def gate(self, request: Request) -> Gate:
        tools = self.of(request)
        if tools is self._tools:
            return Gate()
        return PermissionGate(tools, self._permissions_of(request))

    def _permissions_of(self, request: Request) -> Permissions:
        """Decisions for good hold for a conversation; where it has no name, for this answer."""
        new = Permissions(asks=True, questions=self._questions)
        if request.conversation_id is None:
            return new
        # Not under its names: a user who is forgotten leaves none.
        names = f"{len(request.namespace)} {request.namespace} {request.conversation_id}"
        key = hashlib.blake2b(names.encode(), key=self._secret, digest_size=16).digest()
        known = self._permissions.setdefault(key, new)
        self._permissions.move_to_end(key)
        while len(self._permissions) > _REMEMBERED:
            self._permissions.popitem(last=False)
        return known

    def decide(self, question: str, decision: Decision) -> bool:
        """Whether a call has waited for it."""
        return self._questions.answer(question, decision)

    def listed(self) -> list[HostTool]:
        run = {function.name for function in self._tools.functions()}
        asked = {function.name for function in self._asked.functions()} if self._asked else set()
        return [_listed(function, run, asked) for function in self._tools.known()]

    def servers(self) -> list[ToolServer]:
        return [server for source in self._tools.sources for server in source.servers()]


def _listed(function: ToolFunction, run: Container[str], asked: Container[str]) -> HostTool:
    """`run` and `asked`: names of those that run unasked, and of those that run for clients that ask."""
    definition, name = function.definition, function.name
    mode = ToolMode.RUNS if name in run else ToolMode.ASKS if name in asked else ToolMode.OFF
    return HostTool(name, function.group, definition.description, mode, function.allowed_by)


# ── a turn in which a model acts, seen by the client: every call is shown, and dangerous ones wait for a yes ──


class Agent:
    """Belongs to the event loop; one for a whole session, whose permissions it keeps. Owns nothing."""

    def __init__(self, backend: Backend, tools: ToolBox, permissions: Permissions, *, turns: int) -> None:
        """`turns`: rounds of calls before the model has to answer."""
        self._backend = backend
        self._tools = tools
        self._permissions = permissions
        self._turns = turns

    async def generate(self, request: Request) -> Events:
        """As `Backend.generate`, with tool events in between: after `Exchanged` the conversation has its messages.

        Tools of the request itself are its client's: an answer that calls one ends there. Whatever else is called
        is ours to answer, even what does not exist. Raises RequestError for more than one choice.
        """
        if request.n > 1:
            raise RequestError("Tools run for one answer at a time: ask with n = 1.", "n")
        theirs = {tool.name for tool in request.tools}
        new = tuple(tool for tool in self._tools.definitions if tool.name not in theirs)
        equipped = replace(request, tools=(*request.tools, *new))
        loop = ToolLoop(
            self._backend.generate,
            self._tools,
            PermissionGate(self._tools, self._permissions),
            RequestTranscript(self._backend, len(request.messages)),
        )
        async with aclosing(loop.run(equipped, self._turns + 1, lambda name: name not in theirs)) as events:
            async for event in events:
                yield event


@dataclass(frozen=True, slots=True)
class RequestTranscript:
    """Calls and results are messages of the next request, as the client sends them on its next turn."""

    backend: Backend
    given: int
    """How many of the messages came from the client."""
    is_shown = True

    async def add(self, asked: Request, messages: tuple[Message, ...], usage: Usage) -> Request:
        """The results may be shorter where there is not enough room for them."""
        context = self.backend.card.context
        room = room_for_results(asked.messages, self.given, usage, context, self._count)
        kept = fit_results((*asked.messages[self.given :], *messages), room, self._count)
        # A client that insisted on a call has got it.
        is_free = asked.tool_choice.mode in ("auto", "none")
        choice = asked.tool_choice if is_free else ToolChoice()
        return replace(asked, messages=(*asked.messages[: self.given], *kept), tool_choice=choice)

    async def shorten(self, asked: Request) -> Request | None:
        less = shorten_results(asked.messages[self.given :])
        return None if less is None else replace(asked, messages=(*asked.messages[: self.given], *less))

    def _count(self, text: str) -> int:
        tokenizer = self.backend.tokenizer
        if tokenizer is None:
            return about_tokens(text)
        return len(tokenizer.tokenize(text, add_special=False, parse_special=False))
