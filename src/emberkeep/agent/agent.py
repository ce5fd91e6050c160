"""A turn in which a model acts, seen by whoever asked: every call is shown, and dangerous ones wait for a yes.

The loop reads aloud: ask the model, carry out its calls, tell it the results, until it calls nothing more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from emberkeep.agent.permissions import Permissions
from emberkeep.backend.base import Backend
from emberkeep.backend.rounds import (
    Repeats,
    Round,
    carried_out,
    further,
    heard,
    in_order,
    together,
    urged,
)
from emberkeep.chat.messages import bearable, exchange, room_for_results, shorter
from emberkeep.errors import RequestError
from emberkeep.session.sessions import about_tokens
from emberkeep.tools.toolbox import ToolBox
from emberkeep.types import (
    CallEnded,
    Caller,
    Completed,
    Event,
    Exchanged,
    Message,
    Outcome,
    PermissionAsked,
    Request,
    ToolCall,
    ToolChoice,
    Usage,
)

_REFUSED = "The user did not allow this call: ask for another way, or go on without it."
_CHANGED = "This tool has changed while the call waited: call it again."


@dataclass(slots=True)
class _Turn:
    asked: Request
    """With what was called so far, and the results."""
    given: int
    """How many of the messages are the client's."""

    def ask(self, backend: Backend) -> AsyncIterator[Event]:
        return backend.generate(self.asked)

    def goes_on(self, following: Request, new: tuple[Message, ...], bill: Usage, backend: Backend) -> None:
        """With these messages, of which the results may be shorter where there is not enough room for them."""

        def count(text: str) -> int:
            if backend.tokenizer is None:
                return about_tokens(text)
            return len(backend.tokenizer.tokenize(text, add_special=False, parse_special=False))

        room = room_for_results(following.messages, self.given, bill, backend.card.context, count)
        kept = bearable((*following.messages[self.given :], *new), room, count)
        is_free = following.tool_choice.mode in ("auto", "none")
        self.asked = replace(
            following,
            messages=(*following.messages[: self.given], *kept),
            # Who insisted on a call has got it.
            tool_choice=following.tool_choice if is_free else ToolChoice(),
        )

    async def shorten(self) -> bool:
        messages = self.asked.messages
        less = shorter(messages[self.given :])
        if less is not None:
            self.asked = replace(self.asked, messages=(*messages[: self.given], *less))
        return less is not None


class Agent:
    """Belongs to the event loop; one for a whole session, whose permissions it keeps. Owns nothing."""

    def __init__(self, backend: Backend, tools: ToolBox, permissions: Permissions, *, turns: int) -> None:
        """`turns`: rounds of calls before the model has to answer."""
        self._backend = backend
        self._tools = tools
        self._permissions = permissions
        self._turns = turns

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """As `Backend.generate`, with tool events in between: after `Exchanged` the conversation has its messages.

        Tools of the request itself are its client's: an answer that calls one ends there. Whatever else is called
        is ours to answer, even what does not exist. Raises RequestError for more than one choice.
        """
        if request.n > 1:
            raise RequestError("Tools run for one answer at a time: ask with n = 1.", "n")
        turn = _Turn(self._equipped(request), len(request.messages))
        theirs = {tool.name for tool in request.tools}
        bills: list[Completed] = []
        repeats, was_urged = Repeats(request.messages), False
        for left in reversed(range(self._turns + 1)):
            current = Round(lambda name: name not in theirs)
            answer = partial(turn.ask, self._backend)
            async with aclosing(heard(answer, current, bills, turn.shorten)) as events:
                async for event in events:
                    yield event
            following = further(turn.asked, bills[-1], may_call=left > 1)
            if current.is_speechless and len(bills) > 1 and not was_urged and left and following:
                turn.asked, was_urged = urged(following), True
                continue
            if not current.calls or not left or following is None:
                break
            calls, outcomes = repeats.told_apart(current.calls), list[Outcome]()
            async with aclosing(self._called(request, calls, repeats)) as happening:
                async for event in happening:
                    if isinstance(event, CallEnded):
                        outcomes.append(event.outcome)
                    yield event
            results = [outcome.text for outcome in in_order(calls, outcomes)]
            new = exchange(current.text, calls, results, current.reasoning)
            yield Exchanged(new)
            turn.goes_on(following, new, bills[-1].usage, self._backend)
            if left == 1:
                turn.asked = urged(turn.asked)
        if (end := current.end()) is not None:
            yield end
        yield together(bills)

    def _equipped(self, request: Request) -> Request:
        known = {tool.name for tool in request.tools}
        new = tuple(tool for tool in self._tools.definitions if tool.name not in known)
        return replace(request, tools=(*request.tools, *new))

    async def _called(
        self, request: Request, calls: tuple[ToolCall, ...], repeats: Repeats
    ) -> AsyncGenerator[Event, None]:
        """Who has to be asked is asked first, one call after the other; then all that may run do."""
        caller = Caller(request.namespace, request.depth)
        refused: dict[str, str] = {}
        allowed: set[str] = set()
        for call in calls:
            function = self._tools.target(call)
            if (reason := repeats.refusal(call)) is not None:
                refused[call.id] = reason
            elif function and self._permissions.verdict(function) is None:
                with self._permissions.asking(call, function) as question:
                    yield PermissionAsked(call, function.group)
                    if await question:
                        allowed.add(call.id)
                    else:
                        refused[call.id] = _REFUSED

        async def run(call: ToolCall) -> Outcome:
            # Looked at again: an answer may take a person minutes, in which tools come and change.
            function = self._tools.target(call)
            verdict = self._permissions.verdict(function) if function and call.id not in allowed else True
            reason = refused.get(call.id) or {None: _CHANGED, False: _REFUSED, True: None}[verdict]
            return Outcome(call, reason, failed=True) if reason else await self._tools.run(call, caller)

        async with aclosing(carried_out(calls, run, self._tools.may_run_beside)) as happening:
            async for event in happening:
                yield event
