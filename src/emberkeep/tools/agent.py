"""A turn in which a model acts, seen by the client: every call is shown, and dangerous ones wait for a yes."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

from emberkeep.backend.base import Backend
from emberkeep.backend.tool_loop import ToolLoop
from emberkeep.errors import RequestError
from emberkeep.session.sessions import about_tokens
from emberkeep.session.tool_results import fit_results, room_for_results, shorten_results
from emberkeep.tools.permissions import PermissionGate, Permissions
from emberkeep.tools.toolbox import ToolBox
from emberkeep.types.events import Events, Usage
from emberkeep.types.request import Message, Request, ToolChoice
from emberkeep.values import dataclass


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
