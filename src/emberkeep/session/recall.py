"""What is put into a conversation that its client did not write: notices of what has left, quotations of it, the
tool that searches it, and calls of tools with their results, as much as there is room for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import localtime, strftime, time

from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.session.view import Inserted, View
from emberkeep.types.events import Usage
from emberkeep.types.memory import Recollection, ToolUse, Turn
from emberkeep.types.request import Message, Recall, Tool, ToolCall

_HOW = {
    Recall.OFF: "they are archived",
    Recall.TOOL: "the tool search_memory finds them",
    Recall.AUTO: "what matters of them is quoted where it is needed",
}


def notice(count: int, recall: Recall, *, is_archived: bool) -> str:
    how = _HOW[recall] if is_archived else "they cannot be read any more"
    messages = "message of this conversation has" if count == 1 else "messages of this conversation have"
    return f"[{count} earlier {messages} left the context: {how}.]\n\n"


def quoted(found: Sequence[Recollection]) -> str:
    """The text that is put before the user's message, with what was recalled."""
    return f"[Earlier in this conversation:\n{listed(found)}]\n\n"


def listed(found: Sequence[Recollection]) -> str:
    return "".join(_entry(one) for one in found)


def _entry(found: Recollection) -> str:
    when = strftime("%Y-%m-%d", localtime(found.at))
    texts = [("user", found.user_text), ("assistant", found.assistant_text)]
    texts += [(f"tool {use.name}({use.arguments})", use.result) for use in found.tool_uses]
    return "".join(f"{when} {who}: {text.strip()}\n" for who, text in texts if text.strip())


def fitting(found: Sequence[Recollection], room: int, count: Callable[[str], int]) -> list[Recollection]:
    """As many as fit, the best first; of one that is too long the passage that matched."""
    taken: list[Recollection] = []
    for one in found:
        passage = replace(one, user_text=one.passage, assistant_text="", tool_uses=())
        for candidate in (one, passage):
            if count(quoted([*taken, candidate])) <= room:
                taken.append(candidate)
                break
    return taken


MOST_RESULTS = 10

_RESULTS = 3

_QUERY_CHARS = 2000

_CHARS = 4000
"""So long are all results together at most: they stay in the context."""

NOTHING = "Nothing was found: try other words."

SEARCH = Tool(
    "search_memory",
    "Search earlier messages of your conversations with this user that are not in the context any more. The best "
    "come first, each with a score from 0 (unrelated) to 1 (it says all that was asked for).",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Words that the messages should contain."},
            "max_results": {"type": "integer", "minimum": 1, "maximum": MOST_RESULTS},
        },
        "required": ["query"],
    },
)


def search(memory: Memory, owner: str, arguments: str) -> str:
    """What the model is told. `arguments` is what it wrote, whatever that is. Never raises."""
    try:
        query, most = _read(arguments)
    except ValueError as error:
        return f"The call was not understood: {error}."
    try:
        found = memory.search(owner, query, max_results=most)
    except MemoryFailed as error:
        return f"Memory could not be searched: {error}"
    if not found:
        return NOTHING
    return "".join(f"score {one.score:.2f}\n{_entry(one)}" for one in fitting(found, _CHARS, len)).strip()


def _read(arguments: str) -> tuple[str, int]:
    """Raises ValueError."""
    try:
        asked = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError("its arguments must be JSON") from error
    query = asked.get("query") if isinstance(asked, dict) else None
    if not isinstance(query, str) or not query.strip():
        raise ValueError("it needs a query")
    most = asked.get("max_results", _RESULTS)
    is_number = isinstance(most, int) and not isinstance(most, bool)
    return query[:_QUERY_CHARS], min(max(most, 1), MOST_RESULTS) if is_number else _RESULTS


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
    text: str, calls: Sequence[ToolCall], results: Sequence[str], reasoning: str = ""
) -> tuple[Message, ...]:
    """What a conversation says about calls and their results."""
    pairs = zip(calls, results, strict=True)
    asked = Message("assistant", text, reasoning, tuple(calls))
    return (asked, *(Message("tool", result, tool_call_id=call.id, name=call.name) for call, result in pairs))


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
