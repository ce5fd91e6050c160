"""The messages and tools of a request: the names that its state has, what each part is in the prompt's text, the
shape that templates read, and which of them a conversation that is too long can do without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise

from emberkeep.chat.dialects.table import TAGGED
from emberkeep.text import common_end, common_start, shorten
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.request import Json, Message, Request, Tool, ToolCall, Ttl
from emberkeep.values import dataclass

_HEAD_CHARS = 80
_PREFIX_CHARS = 512
_LEAST_CHARS = 16
_SHORT = "short"
"""The one entry of raw prompts that are too short to have one each, and come without a name."""
_SYSTEM = ("system", "developer")

Render = Callable[[Sequence[Message], Sequence[Tool]], str]
"""A conversation as the model reads it, without the header of the next answer. Raises TemplateFailed."""


# ── names ──


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """Names for the state of one request, by text alone: they are the same for every model."""

    conversation: str | None
    """As the client calls it."""
    stable: str | None
    """Hash of system messages and tools; None without any."""
    prefix: str | None
    """Hash of everything up to the first message of the user, or of a raw prompt's beginning; None where that is
    too short to tell prompts apart."""
    legacy: str | None
    """OpenAI's `prompt_cache_key`."""
    declared: str | None = None
    """The client's own `prefix_hash`. Several conversations may have the same one."""

    @property
    def affinity(self) -> str:
        """Requests that share it probably share much of their state: they like to have one slot."""
        return self.conversation or self.stable or self.declared or self.prefix or self.legacy or _SHORT

    @property
    def entry(self) -> str:
        """What makes two requests turns of one conversation."""
        return self.conversation or self.prefix or self.declared or self.legacy or _SHORT


def cache_keys(request: Request) -> CacheKeys:
    messages = opening(request.messages)
    prefix: str | None
    if request.prompt is None:
        prefix = f"prefix:{_digest('chat', _plain(request, messages))}"
    else:
        is_enough = len(request.prompt) >= _LEAST_CHARS
        prefix = f"prefix:{_digest('raw', request.prompt[:_PREFIX_CHARS])}" if is_enough else None
    return CacheKeys(
        conversation=f"id:{request.conversation_id}" if request.conversation_id else None,
        stable=stable_hash(request),
        prefix=prefix,
        legacy=f"key:{request.cache_key}" if request.cache_key else None,
        declared=f"hash:{request.prefix_hash}" if request.prefix_hash else None,
    )


def stable_hash(request: Request) -> str | None:
    messages = stable_messages(request.messages)
    if request.prompt is not None or not (messages or request.tools):
        return None
    return f"stable:{_digest('stable', _plain(request, messages))}"


def stable_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The system's and developer's, before any other role speaks."""
    count = next((i for i, m in enumerate(messages) if m.role not in _SYSTEM), len(messages))
    return tuple(messages[:count])


def opening(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The stable messages and the first that follows: what tells conversations apart."""
    return tuple(messages[: len(stable_messages(messages)) + 1])


def head_of(request: Request) -> str:
    """The first words of a conversation or prefix, for people."""
    if isinstance(request.prompt, tuple):
        return f"{len(request.prompt)} token ids"
    text = request.prompt
    if text is None:
        first = next((m for m in request.messages if m.role == "user"), None)
        text = (first or opening(request.messages)[-1]).content if request.messages else "tools"
    return first_words(text)


def stable_head(request: Request) -> str:
    """The first words of its stable beginning."""
    texts = [message.content for message in stable_messages(request.messages)]
    return first_words(" ".join(texts) or "tools: " + ", ".join(tool.name for tool in request.tools))


def first_words(text: str) -> str:
    return shorten(" ".join(text[: 4 * _HEAD_CHARS].split()), _HEAD_CHARS)


def _plain(request: Request, messages: Sequence[Message]) -> Json:
    return [
        [asdict(message) for message in messages],
        [asdict(tool) for tool in request.tools],
        dict(request.template_args),
    ]


def _digest(kind: str, value: Json) -> str:
    data = json.dumps([kind, value], sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def label_of(request: Request) -> Label:
    """What the state that `request` leaves behind is called."""
    keys = cache_keys(request)
    is_prefix = request.execution.is_prefix and not request.conversation_id
    if is_prefix and request.prompt is None and keys.stable and is_stable(request):
        return stable_label(request, keys.stable)
    return Label(
        kind=EntryKind.PREFIX if is_prefix else EntryKind.CONVERSATION,
        key=keys.entry,
        head=head_of(request),
        ttl=request.ttl,
        name=request.conversation_id or request.cache_key or "",
        source=keys.stable or keys.prefix or "",
    )


def stable_label(request: Request, key: str) -> Label:
    ttl = request.ttl if request.execution.is_prefix else _stable_ttl(request)
    return Label(EntryKind.PREFIX, key, stable_head(request), ttl, source=key)


def _stable_ttl(request: Request) -> Ttl | None:
    """None: nothing is said about it."""
    count = len(stable_messages(request.messages))
    return next((one.ttl for one in request.breakpoints if one.messages <= count and one.ttl != Ttl.SHORT), None)


def is_stable(request: Request) -> bool:
    return len(stable_messages(request.messages)) == len(request.messages)


# ── where a character of the prompt belongs ──


@dataclass(frozen=True, slots=True)
class RequestPart:
    """A part of a request that a person can point at."""

    sentence: str
    """`message 3 (user)`, `the tool get_weather`."""
    in_tools: bool = False
    is_last: bool = False
    """In the last message: what a new turn is expected to differ in."""
    message: int | None = None
    """Which of the messages it is; None in tools."""


def message_ends(render: Render, request: Request, text: str, last: int) -> list[int]:
    """Where the `last` messages end in `text`, in characters."""
    count = len(request.messages)
    return [_end(render, request, text, i) for i in range(max(count - last, 0) + 1, count + 1)]


def place_of(render: Render, request: Request, text: str, offset: int) -> RequestPart:
    """What stands at `offset` of `text`, which `request` was rendered to. Raises TemplateFailed."""
    if tool := _tool_at(render, request, offset):
        return RequestPart(f"the tool {tool}", in_tools=True)
    first, last = 0, len(request.messages) - 1
    while first < last:
        middle = (first + last) // 2
        if _end(render, request, text, middle + 1) > offset:
            last = middle
        else:
            first = middle + 1
    role = request.messages[first].role
    is_last = first == len(request.messages) - 1 and role not in _SYSTEM
    return RequestPart(f"message {first + 1} ({role})", is_last=is_last, message=first)


def _end(render: Render, request: Request, text: str, count: int) -> int:
    return common_start(render(request.messages[:count], request.tools), text)


def _tool_at(render: Render, request: Request, offset: int) -> str | None:
    """The tool whose definition stands there."""
    if not request.tools:
        return None
    text, without = render(request.messages, request.tools), render(request.messages, ())
    begin = common_start(without, text)
    end = len(text) - common_end(without, text)
    if not begin <= offset < end:
        return None
    starts = {tool.name: text.find(f'"{tool.name}"', begin) for tool in request.tools}
    before = {name: start for name, start in starts.items() if 0 <= start <= offset}
    return max(before, key=lambda name: before[name]) if before else request.tools[0].name


# ── as templates read them ──


_INSTRUCTION = """\
These functions can be called, one JSON description per line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON between tags, once for every call:
<tool_call>
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The results come back between <tool_response> tags. When no function is needed, answer in plain text."""


def canonical_tools(tools: Sequence[Tool]) -> list[dict[str, Json]]:
    """OpenAI's tool objects, with the keys of every schema sorted.

    Two clients that send the same tools with their keys in another order get the same prompt, and share its
    state. The order of the tools is kept.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": sorted_keys(tool.parameters),
            },
        }
        for tool in tools
    ]


def sorted_keys(value: Json) -> Json:
    """A copy of `value` whose objects, at every depth, have their keys in order."""
    return json.loads(json.dumps(value, sort_keys=True))


@dataclass(frozen=True, slots=True)
class CallForm:
    """What a template wants of an assistant message that calls tools. Templates differ, so it is probed."""

    empty_content: str | None
    """Stands for the content when there is none."""
    parsed: bool
    """Arguments as an object; otherwise as JSON text."""
    short_ids: bool
    """Ids of nine letters and digits; otherwise as the client sent them."""


CALL_FORMS = tuple(
    CallForm(empty_content, parsed, short_ids)
    for short_ids in (False, True)
    for empty_content in ("", None)
    for parsed in (True, False)
)


def values_for(
    messages: Sequence[Message], tools: Sequence[Tool], form: CallForm, *, has_empty_list: bool
) -> dict[str, Json]:
    """The variables `messages` and `tools`; `has_empty_list`: where there are no tools, instead of none."""
    no_tools: list[Json] | None = [] if has_empty_list else None
    return {
        "messages": [as_dict(message, form) for message in messages],
        "tools": canonical_tools(tools) or no_tools,
    }


def as_dict(message: Message, form: CallForm) -> dict[str, Json]:
    """The object that templates know from Hugging Face: only keys that have something to say."""
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Json] = {"role": role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["content"] = message.content or form.empty_content
        out["tool_calls"] = [_call_dict(call, form) for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = _call_id(message.tool_call_id, form)
    if message.name is not None:
        out["name"] = message.name
    return out


def _call_dict(call: ToolCall, form: CallForm) -> dict[str, Json]:
    arguments = parse_arguments(call.arguments) if form.parsed else call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": _call_id(call.id, form), "function": function}


def _call_id(id: str, form: CallForm) -> str:
    return hashlib.sha256(id.encode()).hexdigest()[:9] if form.short_ids else id


def parse_arguments(arguments: str) -> Json:
    """As they are where they are no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


# ── for templates that know no tools, or no system message ──


def tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same conversation with the tools in the system message, and calls and results as text."""
    plain = [_call_as_text(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in canonical_tools(tools))
    instruction = _INSTRUCTION.format(tools=lines)
    if plain and plain[0].role in _SYSTEM:
        system = replace(plain[0], content=f"{plain[0].content}\n\n{instruction}")
        return [system, *plain[1:]]
    return [Message("system", instruction), *plain]


def _call_as_text(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = "\n".join(call_text(call.name, call.arguments) for call in message.tool_calls)
    content = f"{message.content}\n{calls}" if message.content else calls
    return replace(message, content=content, tool_calls=())


def call_text(name: str, arguments: str) -> str:
    body = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
    return f"{TAGGED.start}\n{body}\n{TAGGED.end}"


def system_in_first_user(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with the leading system message put before the first user's text."""
    if not messages or messages[0].role not in _SYSTEM:
        return list(messages)
    system, rest = messages[0], list(messages[1:])
    if not rest or rest[0].role != "user":
        return [Message("user", system.content), *rest]
    rest[0] = replace(rest[0], content=f"{system.content}\n\n{rest[0].content}")
    return rest


def later_systems_in_users(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with what the system says in the middle of it as a marked part of the user's text."""
    start = len(stable_messages(messages))
    turns, was_system = list(messages[:start]), False
    for message in messages[start:]:
        is_system = message.role in _SYSTEM
        turn = Message("user", marked_system(message.content)) if is_system else message
        if (is_system or was_system) and turn.role == "user" and turns and turns[-1].role == "user":
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{turn.content}")
        else:
            turns.append(turn)
        was_system = is_system
    return turns


def marked_system(text: str) -> str:
    """What the system says, where only the user can say it."""
    return f"<system>\n{text}\n</system>"


def with_moved(messages: tuple[Message, ...], moved: str) -> tuple[Message, ...]:
    """With what was moved, at the end of the latest message of the user or of a tool. A request without any has
    nothing of a user's, and what the system said goes to the end of what it says last."""
    heard = [i for i, message in enumerate(messages) if message.role != "assistant"]
    place = max((i for i in heard if messages[i].role not in _SYSTEM), default=max(heard, default=None))
    if not moved or place is None:
        return messages
    latest = messages[place]
    return (*messages[:place], replace(latest, content=f"{latest.content}\n\n{moved}"), *messages[place + 1 :])


# ── which may leave ──


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


def _exchanges(messages: Sequence[Message], turn: range) -> list[range]:
    """Tool calls of one turn, each with what follows up to the next ones."""
    calls = [i for i in turn if messages[i].tool_calls]
    return [range(start, end) for start, end in pairwise([*calls, turn.stop])]


def _leaving(messages: Sequence[Message], turn: range) -> frozenset[int]:
    """Empty where the turn has to stay."""
    if not _is_closed([messages[i] for i in turn]):
        return frozenset()
    return frozenset(i for i in turn if messages[i].role not in _SYSTEM)


def _is_closed(turn: Sequence[Message]) -> bool:
    """Every tool call has its result in this turn, and every result its call."""
    calls = {call.id for message in turn for call in message.tool_calls}
    results = [message.tool_call_id for message in turn if message.role == "tool"]
    if None in results:  # some clients send results without ids
        return len(results) == len(calls)
    return set(results) == calls
