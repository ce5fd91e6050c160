"""Answers for which tools run here that the client knows nothing of: it sees the answer.

The model may search its memory (`search_memory`), and with `--server-tools` use the server's own tools where the
client has sent none. What it asked and was told stays in the conversation (`session/view.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Protocol

from emberkeep.backend.rounds import (
    Repeats,
    Round,
    carried_out,
    further,
    heard,
    in_order,
    timed,
    together,
    urged,
)
from emberkeep.session.asking import SEARCH
from emberkeep.session.sessions import Sessions
from emberkeep.types import (
    CallEnded,
    Caller,
    Completed,
    Event,
    Outcome,
    Recall,
    Request,
    TextDelta,
    Tool,
    ToolCall,
    Usage,
)

_SEARCH_ROUNDS = 4
"""Searches before one answer; then it has to be given."""

_GAP = "\n\n"
"""Between what was said before a call and what is said after it."""

Answer = Callable[[Request], AsyncGenerator[Event, None]]


class HostTools(Protocol):
    """Tools that run here. Belongs to the event loop."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    @property
    def definitions(self) -> tuple[Tool, ...]: ...

    def is_ours(self, name: str) -> bool: ...

    def may_run_beside(self, name: str) -> bool:
        """While other calls run."""

    async def run(self, call: ToolCall, caller: Caller) -> Outcome:
        """Never raises."""


class Asking:
    """Belongs to the event loop."""

    def __init__(
        self,
        sessions: Sessions,
        tools: HostTools | None = None,
        rounds: int = _SEARCH_ROUNDS,
        deadline_s: float | None = None,
    ) -> None:
        """`deadline_s`: for a whole answer with all its calls, unless a request says."""
        self._sessions = sessions
        self._tools = tools
        self._most_rounds = rounds if tools else _SEARCH_ROUNDS
        self._deadline_s = deadline_s

    def applies(self, request: Request) -> bool:
        return not request.is_prefix and self.equipped(request) is not request

    def equipped(self, request: Request) -> Request:
        """With our tools, where it is a chat with one answer that may call tools, and has none of that name.

        What is warmed for such chats has them too.
        """
        choice = request.tool_choice.mode
        may_call = choice == "auto" or (choice != "none" and bool(request.tools))
        is_free = request.n == 1 and request.format is None and may_call and not request.raw_tools
        is_chat = request.is_prefix or any(message.role == "user" for message in request.messages)
        if request.prompt is not None or not (is_free and is_chat):
            return request
        known = {tool.name for tool in request.tools}
        ours = self._tools.definitions if self._tools and not request.tools else ()
        if self._sessions.recall_of(request) is Recall.TOOL and all(tool.name != SEARCH.name for tool in ours):
            ours = (*ours, SEARCH)
        new = tuple(tool for tool in ours if tool.name not in known)
        return replace(request, tools=(*request.tools, *new)) if new else request

    def run(self, request: Request, answer: Answer) -> AsyncIterator[Event]:
        """`answer` with the tools, again and again until none of them is called."""
        limit_s = request.deadline_s or self._deadline_s
        rounds = self._answered(request, answer)
        return timed(rounds, limit_s) if limit_s else rounds

    async def _answered(self, request: Request, answer: Answer) -> AsyncGenerator[Event, None]:
        with self._sessions.answering(request):
            async with aclosing(self._rounds(request, answer)) as events:
                async for event in events:
                    yield event

    async def _rounds(self, request: Request, answer: Answer) -> AsyncGenerator[Event, None]:
        asked = self.equipped(request)
        bills: list[Completed] = []
        repeats, was_urged = Repeats(request.messages), False
        for left in reversed(range(self._most_rounds)):
            current = Round(partial(_is_ours, request, asked))
            shorten = partial(asyncio.to_thread, self._sessions.shortened, request)
            async with aclosing(heard(partial(answer, asked), current, bills, shorten)) as events:
                async for event in events:
                    yield event
            following = further(asked, bills[-1], may_call=left > 1)
            if current.is_speechless and len(bills) > 1 and not was_urged and left and following:
                asked, was_urged = urged(following), True
                continue
            if not current.calls or not left or following is None:
                break
            if current.text:
                current.text += _GAP
                yield TextDelta(0, _GAP)
            async with aclosing(self._called(asked, bills[-1].usage, current, repeats)) as happening:
                async for event in happening:
                    yield event
            asked = urged(following) if left == 1 and following.tool_choice.mode == "none" else following
        if (end := current.end()) is not None:
            yield end
        yield together(bills)

    async def _called(
        self, asked: Request, bill: Usage, current: Round, repeats: Repeats
    ) -> AsyncGenerator[Event, None]:
        """Carry out what the model asked for: from now on the conversation has the results."""
        caller = Caller(asked.namespace, asked.depth)
        calls = repeats.told_apart(current.calls)
        outcomes: list[Outcome] = []

        async def run(call: ToolCall) -> Outcome:
            if (refusal := repeats.refusal(call)) is not None:
                return Outcome(call, refusal, failed=True)
            return await self._run(asked, call, caller)

        async with aclosing(carried_out(calls, run, self._may_run_beside)) as happening:
            async for event in happening:
                if isinstance(event, CallEnded):
                    outcomes.append(event.outcome)
                yield event
        texts = [outcome.text for outcome in in_order(calls, outcomes)]
        await asyncio.to_thread(self._sessions.exchanged, asked, bill, current.text, calls, texts)

    async def _run(self, asked: Request, call: ToolCall, caller: Caller) -> Outcome:
        is_search = call.name == SEARCH.name
        if self._tools is not None and (self._tools.is_ours(call.name) or not is_search):
            return await self._tools.run(call, caller)
        if not is_search:
            return Outcome(call, f"There is no tool {call.name!r}: use {SEARCH.name}, or answer.", failed=True)
        begin = perf_counter()
        text = await asyncio.to_thread(self._sessions.search, asked, call)
        return Outcome(call, text, ms=1e3 * (perf_counter() - begin))

    def _may_run_beside(self, name: str) -> bool:
        return self._tools is None or not self._tools.is_ours(name) or self._tools.may_run_beside(name)

    async def start(self) -> None:
        if self._tools is not None:
            await self._tools.start()

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.close()


def _is_ours(request: Request, asked: Request, name: str) -> bool:
    """What a client without tools has never heard of is ours, even a name that the model made up: nobody else
    could tell it so."""
    if not request.tools:
        return True
    return all(tool.name != name for tool in request.tools) and any(tool.name == name for tool in asked.tools)
