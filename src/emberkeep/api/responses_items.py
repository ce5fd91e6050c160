"""Items of OpenAI's Responses API, from what clients send to messages that a model reads.

An item is JSON as it is stored and shown. `to_items` gives every item an id and its full shape, `to_messages`
makes messages of them. Reasoning, a text and calls that follow each other are one message of the assistant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Annotated, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from emberkeep.api.body import BY_KIND, ByKind, Label, Name
from emberkeep.api.fields import MarkFields, breakpoints_in_text
from emberkeep.api.kinds import custom_arguments, unseal
from emberkeep.api.openai_chat import ImageUrl
from emberkeep.errors import InvalidField
from emberkeep.types.request import Breakpoint, Image, Json, Message, ToolCall, Ttl
from emberkeep.values import dataclass

Item = dict[str, Json]
SEALED = "ek1."
"""What the `encrypted_content` of reasoning that was written here begins with."""


# ── what clients send ──


@with_config(ConfigDict(strict=True))
class KeptControl(TypedDict):
    type: Literal["ephemeral"]
    ttl: NotRequired[Literal["5m", "1h"] | None]


@with_config(ConfigDict(strict=True, extra="allow"))
class KeptFields(TypedDict):
    """Fields that are stored and shown as they came, also those that mean nothing here. They stay JSON: a model of
    each of ten thousand items, and JSON of it again, would take several times as long."""

    cache_control: NotRequired[KeptControl | None]
    stable: NotRequired[bool | None]


class InputTextPart(KeptFields):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputRefusalPart(KeptFields):
    type: Literal["refusal"]
    refusal: str


class InputImagePart(KeptFields):
    type: Literal["input_image"]
    image_url: ImageUrl


Parts = list[
    Annotated[
        InputTextPart | InputRefusalPart | InputImagePart,
        ByKind("only parts of type input_text, output_text, refusal and input_image can be used here"),
    ]
]
TextOrParts = Annotated[str | Parts, BY_KIND]


class MessageItem(KeptFields):
    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts


class CallItem(KeptFields):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: NotRequired[Label | None]


class CallOutputItem(KeptFields):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: TextOrParts


class CustomCallItem(KeptFields):
    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str
    namespace: NotRequired[Label | None]


@with_config(ConfigDict(strict=True))
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(KeptFields):
    type: Literal["reasoning"]
    content: NotRequired[list[ReasoningText] | None]
    encrypted_content: NotRequired[str | None]


@with_config(ConfigDict(strict=True))
class ReferenceItem(TypedDict):
    type: NotRequired[Literal["item_reference"] | None]
    id: Name


def _with_type(item: Json) -> Json:
    """Messages and references may come without."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    return {**item, "type": "message" if "role" in item else "item_reference"}


_USABLE = ByKind("items of type {kind} cannot be used here: leave it out")
_TYPED = BeforeValidator(_with_type)
WholeItem = MessageItem | CallItem | CallOutputItem | CustomCallItem | ReasoningItem
AnyItem = WholeItem | ReferenceItem
MAX_ITEMS = 100_000
ItemList = Annotated[list[Annotated[AnyItem, _USABLE, _TYPED]], Field(max_length=MAX_ITEMS)]
WholeItemList = Annotated[list[Annotated[WholeItem, _USABLE, _TYPED]], Field(max_length=MAX_ITEMS)]
"""Without references, which would outlive what they refer to."""

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def to_items(given: str | Sequence[AnyItem] | Sequence[WholeItem]) -> list[Item]:
    """What was checked, complete and with an id each; references are left as they are (see `references`)."""
    if isinstance(given, str):
        given = [MessageItem(type="message", role="user", content=given)]
    return [_complete(item) for item in given]


def _complete(checked: Mapping[str, Json]) -> Item:
    item = dict(checked)
    kind, given = item["type"], item.get("id")
    if kind == "item_reference":
        return item
    item["id"] = given if isinstance(given, str) and given else new_item_id(kind)
    if kind == "message":
        item["content"] = _full_content(item["role"], item["content"])
    return {"summary": [], **item} if kind == "reasoning" else {**item, "status": "completed"}


def _full_content(role: str, content: Json) -> list[Json]:
    if not isinstance(content, str):
        return list(content)
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


def new_item_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{token_hex(16)}"


# ── ids of output: they name their response, so that it can be found by them ──


def output_id(response_id: str, kind: str, place: int) -> str:
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{place:04x}"


def response_of(item_id: str) -> str | None:
    """The response whose output an item with this id is; None for an id that is none of ours."""
    found = re.fullmatch(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}", item_id)
    return f"resp_{found[1]}" if found else None


def references(items: Iterable[Item]) -> list[str]:
    """Ids of the items that are only named."""
    return [item["id"] for item in items if item["type"] == "item_reference"]


def resolve(items: Sequence[Item], known: Mapping[str, Item]) -> list[Item]:
    """With what is known in place of references. Raises InvalidField for one that is not."""
    for place, item in enumerate(items):
        if item["type"] == "item_reference" and item["id"] not in known:
            raise InvalidField(f"input[{place}].id", "no such item is stored: send the item itself.")
    return [known[item["id"]] if item["type"] == "item_reference" else item for item in items]


# ── messages ──


@dataclass(frozen=True, slots=True)
class Called:
    """How the client calls a tool, where its model knows it by one name and takes JSON."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def model_name(name: str, namespace: str | None) -> str:
    """By which the model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def to_messages(items: Iterable[Item]) -> tuple[tuple[Message, ...], tuple[Breakpoint, ...]]:
    """The messages of complete items without references, and where the beginnings end that are marked in them."""
    messages: list[Message] = []
    breakpoints: list[Breakpoint] = []
    for item in items:
        _add(messages, item)
        breakpoints += _marks(item, len(messages))
    return tuple(messages), tuple(breakpoints)


def _marks(item: Item, messages: int) -> Iterator[Breakpoint]:
    """Those of an item that is in the last of so many messages."""
    parts = item.get("content" if item["type"] == "message" else "output")
    if isinstance(parts, list):
        yield from breakpoints_in_text(((_mark_of(part), _text_of(part)) for part in parts), messages)
    if (ttl := _mark_of(item)) is not None:
        yield Breakpoint(messages, ttl=ttl)


def _mark_of(part: Mapping[str, Json]) -> Ttl | None:
    """The mark of what was checked when it came."""
    return MarkFields.model_validate(part).to_mark() if "cache_control" in part or "stable" in part else None


def _add(messages: list[Message], item: Item) -> None:
    match item["type"]:
        case "message" if item["role"] == "assistant":
            text, _ = _read_parts(item["content"])
            messages.append(replace(_take_reasoning(messages), content=text))
        case "message":
            text, images = _read_parts(item["content"])
            messages.append(Message(item["role"], text, images=images))
        case "reasoning":
            before = _take_reasoning(messages)
            messages.append(replace(before, reasoning=before.reasoning + _reasoning(item)))
        case "function_call" | "custom_tool_call":
            follows = bool(messages) and messages[-1].role == "assistant"
            turn = messages.pop() if follows else Message("assistant")
            messages.append(replace(turn, tool_calls=(*turn.tool_calls, _to_call(item))))
        case _:
            text, images = _read_parts(item["output"])
            messages.append(Message("tool", text, tool_call_id=item["call_id"], images=images))


def _take_reasoning(messages: list[Message]) -> Message:
    """The last message, if the assistant has reasoned in it and nothing else; otherwise an empty one."""
    last = messages[-1] if messages else None
    is_open = last is not None and last.role == "assistant" and not last.content and not last.tool_calls
    return messages.pop() if is_open else Message("assistant")


def _to_call(item: Item) -> ToolCall:
    is_custom = item["type"] == "custom_tool_call"
    arguments = custom_arguments(item["input"]) if is_custom else item["arguments"]
    return ToolCall(item["call_id"], model_name(item["name"], item.get("namespace")), arguments)


def _reasoning(item: Item) -> str:
    text = "".join(part["text"] for part in item.get("content") or ())
    return text or unseal(item.get("encrypted_content") or "", SEALED)


def _read_parts(content: Json) -> tuple[str, tuple[Image, ...]]:
    """Texts, one per line, and images."""
    if isinstance(content, str):
        return content, ()
    texts = [text for part in content if (text := _text_of(part)) is not None]
    images = tuple(Image(part["image_url"]) for part in content if part["type"] == "input_image")
    return "\n".join(texts), images


def _text_of(part: Json) -> str | None:
    """None: it is an image."""
    return None if part["type"] == "input_image" else part.get("text", part.get("refusal"))
