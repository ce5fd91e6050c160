"""What a request is made of: its stable beginning, its messages, its tools, and the names it can be known by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from emberkeep.types import Json, Message, Request, Tool

_HEAD_CHARS = 80
_PREFIX_CHARS = 512
_LEAST_CHARS = 16
_SHORT = "short"
"""The one entry of raw prompts that are too short to have one each, and come without a name."""

Render = Callable[[Sequence[Message], Sequence[Tool]], str]
"""A conversation as the model reads it, without the header of the next answer. Raises TemplateFailed."""


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

    @property
    def affinity(self) -> str:
        """Requests that share it probably share much of their state: they like to have one slot."""
        return self.conversation or self.stable or self.prefix or self.legacy or _SHORT

    @property
    def entry(self) -> str:
        """What makes two requests turns of one conversation."""
        return self.conversation or self.prefix or self.legacy or _SHORT


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
    )


def stable_hash(request: Request) -> str | None:
    messages = stable_messages(request.messages)
    if request.prompt is not None or not (messages or request.tools):
        return None
    return f"stable:{_digest('stable', _plain(request, messages))}"


def stable_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The system's and developer's, before anybody else speaks."""
    count = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
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
    return shortened(text)


def stable_head(request: Request) -> str:
    """The first words of its stable beginning."""
    texts = [message.content for message in stable_messages(request.messages)]
    return shortened(" ".join(texts) or "tools: " + ", ".join(tool.name for tool in request.tools))


def shortened(text: str) -> str:
    line = " ".join(text[: 4 * _HEAD_CHARS].split())
    return line if len(line) <= _HEAD_CHARS else line[: _HEAD_CHARS - 1] + "…"


# ── where a character of the prompt belongs ──


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a request that a person can point at."""

    sentence: str
    """`message 3 (user)`, `the tool get_weather`."""
    in_tools: bool = False
    is_last: bool = False
    """In the last message: what a new turn is expected to differ in."""


def message_ends(render: Render, request: Request, text: str, last: int) -> list[int]:
    """Where the `last` messages end in `text`, in characters."""
    count = len(request.messages)
    return [_end(render, request, text, i) for i in range(max(count - last, 0) + 1, count + 1)]


def place_of(render: Render, request: Request, text: str, offset: int) -> Place:
    """What stands at `offset` of `text`, which `request` was rendered to. Raises TemplateFailed."""
    if tool := _tool_at(render, request, offset):
        return Place(f"the tool {tool}", in_tools=True)
    first, last = 0, len(request.messages) - 1
    while first < last:
        middle = (first + last) // 2
        if _end(render, request, text, middle + 1) > offset:
            last = middle
        else:
            first = middle + 1
    role = request.messages[first].role
    is_last = first == len(request.messages) - 1 and role not in ("system", "developer")
    return Place(f"message {first + 1} ({role})", is_last=is_last)


def _end(render: Render, request: Request, text: str, count: int) -> int:
    return common_prefix(render(request.messages[:count], request.tools), text)


def _tool_at(render: Render, request: Request, offset: int) -> str | None:
    """The tool whose definition stands there."""
    if not request.tools:
        return None
    text, without = render(request.messages, request.tools), render(request.messages, ())
    begin = common_prefix(without, text)
    end = len(text) - common_prefix(without[::-1], text[::-1])
    if not begin <= offset < end:
        return None
    starts = {tool.name: text.find(f'"{tool.name}"', begin) for tool in request.tools}
    before = {name: start for name, start in starts.items() if 0 <= start <= offset}
    return max(before, key=lambda name: before[name]) if before else request.tools[0].name


def common_prefix(a: str, b: str) -> int:
    """In characters; found by halving, because comparing slices is quick and comparing characters is not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _plain(request: Request, messages: Sequence[Message]) -> Json:
    return [
        [asdict(message) for message in messages],
        [asdict(tool) for tool in request.tools],
        dict(request.template_args),
    ]


def _digest(kind: str, value: Json) -> str:
    data = json.dumps([kind, value], sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=12).hexdigest()
