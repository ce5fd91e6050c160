"""Which messages a conversation that is too long can do without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from emberkeep.types import Message, ToolCall, Usage

_STAYS = ("system", "developer")
_LEFT_OUT = "[This result was left out to make room.]"
_CUT = "\n[The rest was left out to make room.]"
_SHORTEST = 200
_FILLED = 0.8


def leaving_turns(messages: Sequence[Message]) -> list[frozenset[int]]:
    """The indices of the messages that may leave, in groups that leave together, the oldest first.

    A group is a turn, a message of the user and what follows it: where a template wants speakers to alternate,
    they still do when whole turns leave. Of the last turn only tool calls with their results may leave, all but
    the latest. System messages stay, and turns with tool calls whose results are elsewhere.
    """
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if not users:
        return []
    borders = sorted({0, *users})
    turns = [range(start, end) for start, end in pairwise(borders)]
    turns += _exchanges(messages, range(users[-1] + 1, len(messages)))[:-1]
    return [leaving for turn in turns if (leaving := _leaving(messages, turn))]


def without(messages: Sequence[Message], turns: Sequence[frozenset[int]]) -> tuple[Message, ...]:
    gone = frozenset[int]().union(*turns)
    return tuple(message for i, message in enumerate(messages) if i not in gone)


def _exchanges(messages: Sequence[Message], turn: range) -> list[range]:
    """Tool calls of one turn, each with what follows up to the next ones."""
    calls = [i for i in turn if messages[i].tool_calls]
    return [range(start, end) for start, end in pairwise([*calls, turn.stop])]


def _leaving(messages: Sequence[Message], turn: range) -> frozenset[int]:
    """Empty where the turn has to stay."""
    if not _is_closed([messages[i] for i in turn]):
        return frozenset()
    return frozenset(i for i in turn if messages[i].role not in _STAYS)


def _is_closed(turn: Sequence[Message]) -> bool:
    """Every tool call has its result in this turn, and every result its call."""
    calls = {call.id for message in turn for call in message.tool_calls}
    results = [message.tool_call_id for message in turn if message.role == "tool"]
    if None in results:  # some clients send results without ids
        return len(results) == len(calls)
    return set(results) == calls


def shorter(messages: Sequence[Message]) -> tuple[Message, ...] | None:
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


def exchange(
    said: str, calls: Sequence[ToolCall], results: Sequence[str], reasoning: str = ""
) -> tuple[Message, ...]:
    """What a conversation says about calls and their results."""
    told = zip(calls, results, strict=True)
    asked = Message("assistant", said, reasoning, tuple(calls))
    return (asked, *(Message("tool", result, tool_call_id=call.id, name=call.name) for call, result in told))


def bearable(messages: Sequence[Message], room: int, count: Callable[[str], int]) -> tuple[Message, ...]:
    """As much of the tools' results as has room, in tokens, where that can be had."""
    kept = tuple(messages)
    while count(text_of(kept)) > room and (less := shorter(kept)) is not None:
        kept = less
    return kept


def room_for_results(
    messages: Sequence[Message], given: int, bill: Usage, context: int, count: Callable[[str], int]
) -> int:
    """Tokens that the calls and results of a turn may have, which are the messages from `given` on.

    `bill`: of the prompt that `messages` are, and its answer. What was said before the turn can leave, but not the
    system's messages and the user's latest.
    """
    users = [i for i, message in enumerate(messages[:given]) if message.role == "user"]
    old = [message for message in messages[: users[-1] if users else 0] if message.role not in _STAYS]
    fixed = bill.prompt_tokens + bill.completion_tokens - count(text_of(old)) - count(text_of(messages[given:]))
    return int(_FILLED * context) - fixed


def text_of(messages: Iterable[Message]) -> str:
    parts = [(message.content, *(call.arguments for call in message.tool_calls)) for message in messages]
    return "\n".join(text for part in parts for text in part)


def _with(messages: Sequence[Message], place: int, text: str) -> tuple[Message, ...]:
    return (*messages[:place], replace(messages[place], content=text), *messages[place + 1 :])
