"""Messages that leave, as turns of the archive."""

from __future__ import annotations

from collections.abc import Iterable
from time import time

from emberkeep.session.asking import SEARCH
from emberkeep.session.view import Inserted, View
from emberkeep.types import Message, ToolUse, Turn


def archived(view: View, groups: Iterable[frozenset[int]]) -> list[Turn]:
    """One turn for each group of spoken messages, with what tools were called here in it."""
    now = time()
    return [_turn(view, sorted(group), now) for group in groups if group]


def _turn(view: View, places: list[int], now: float) -> Turn:
    history = view.history
    messages = [history.messages[history.spoken[i]] for i in places]
    ours = [message for i in places for message in view.inserted.get(i, Inserted()).after]
    return Turn(
        key=history.keys[places[-1]],
        conversation=history.conversation,
        at=now,
        user_text=_said(messages, "user"),
        assistant_text=_said(messages, "assistant"),
        tool_uses=(*_tool_uses(messages), *(use for use in _tool_uses(ours) if use.name != SEARCH.name)),
    )


def _said(messages: list[Message], role: str) -> str:
    return "\n\n".join(m.content for m in messages if m.role == role and m.content)


def _tool_uses(messages: list[Message]) -> tuple[ToolUse, ...]:
    """Calls with their results, by id, or in turn where results came without ids."""
    results = {m.tool_call_id: m.content for m in messages if m.role == "tool" and m.tool_call_id is not None}
    unnamed = iter([m.content for m in messages if m.role == "tool" and m.tool_call_id is None])
    calls = [call for m in messages for call in m.tool_calls]
    return tuple(
        ToolUse(call.name, call.arguments, results[call.id] if call.id in results else next(unnamed, ""))
        for call in calls
    )
