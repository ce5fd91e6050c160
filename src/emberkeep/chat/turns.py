"""Which messages a conversation that is too long can do without."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from emberkeep.types import Message

_STAYS = ("system", "developer")


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
