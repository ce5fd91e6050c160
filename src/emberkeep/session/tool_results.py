"""Calls and their results as messages, and what can be left out of results where there is no room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from emberkeep.types.events import Usage
from emberkeep.types.request import Message, ToolCall

_LEFT_OUT = "[This result was left out to make room.]"
_CUT = "\n[The rest was left out to make room.]"
_SHORTEST = 200
"""Characters of a result that are always kept."""
_STAYS = ("system", "developer")
_FILLED = 0.8
"""The share of the context that a turn with its results may fill."""


def shorten_results(messages: Sequence[Message]) -> tuple[Message, ...] | None:
    """The same with less of the tools' results: without the oldest one, or with half of the longest of the latest.

    None: there is nothing left to shorten.
    """
    results = [i for i, message in enumerate(messages) if message.role == "tool"]
    latest = max((i for i, message in enumerate(messages) if message.tool_calls), default=-1)
    old = [i for i in results if i < latest and len(messages[i].content) > len(_LEFT_OUT)]
    long = [i for i in results if i > latest and len(messages[i].content) > _SHORTEST + len(_CUT)]
    if old:
        return _with(messages, old[0], _LEFT_OUT)
    if long:
        longest = max(long, key=lambda i: len(messages[i].content))
        text = messages[longest].content.removesuffix(_CUT)
        return _with(messages, longest, text[: max(len(text) // 2, _SHORTEST)] + _CUT)
    return None


def exchange_messages(
    said: str, calls: Sequence[ToolCall], results: Sequence[str], reasoning: str = ""
) -> tuple[Message, ...]:
    """What a conversation says about calls and their results."""
    told = zip(calls, results, strict=True)
    asked = Message("assistant", said, reasoning, tuple(calls))
    return (asked, *(Message("tool", result, tool_call_id=call.id, name=call.name) for call, result in told))


def fit_results(messages: Sequence[Message], room: int, count: Callable[[str], int]) -> tuple[Message, ...]:
    """As much of the tools' results as has room, in tokens, where that can be had."""
    kept = tuple(messages)
    while count(_text_of(kept)) > room and (less := shorten_results(kept)) is not None:
        kept = less
    return kept


def room_for_results(
    messages: Sequence[Message], given: int, usage: Usage, context: int, count: Callable[[str], int]
) -> int:
    """Tokens that the calls and results of a turn may have, which are the messages from `given` on.

    `usage`: of the prompt that `messages` are, and its answer. What was said before the turn can leave, but not
    the system's messages and the user's latest.
    """
    users = [i for i, message in enumerate(messages[:given]) if message.role == "user"]
    old = [message for message in messages[: users[-1] if users else 0] if message.role not in _STAYS]
    fixed = (
        usage.prompt_tokens + usage.completion_tokens - count(_text_of(old)) - count(_text_of(messages[given:]))
    )
    return int(_FILLED * context) - fixed


def _text_of(messages: Iterable[Message]) -> str:
    parts = [(message.content, *(call.arguments for call in message.tool_calls)) for message in messages]
    return "\n".join(text for part in parts for text in part)


def _with(messages: Sequence[Message], place: int, text: str) -> tuple[Message, ...]:
    return (*messages[:place], replace(messages[place], content=text), *messages[place + 1 :])
