"""Items of OpenAI's Responses API, from what clients send to messages that a model reads.

An item is JSON as it is stored and shown. `to_items` gives every item an id and its full shape, `to_messages`
makes messages of them. Reasoning, a text and calls that follow each other are one message of the assistant.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from emberkeep.api.custom_tools import custom_arguments
from emberkeep.api.request import Body, Label, MarkFields, Name, mark_of, text_marks, validate
from emberkeep.errors import InvalidField
from emberkeep.types.request import Breakpoint, Image, Json, Message, ToolCall
from emberkeep.values import dataclass

Item = dict[str, Json]


# ── what clients send ──


class InputTextPart(MarkFields):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(MarkFields):
    type: Literal["refusal"]
    refusal: str


class InputImagePart(MarkFields):
    type: Literal["input_image"]
    image_url: Annotated[str, Field(json_schema_extra={"pattern": "^(https?://|data:image/)"})]


Parts = list[InputTextPart | RefusalPart | InputImagePart]


class MessageItem(MarkFields):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class CallItem(MarkFields):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: Label | None = None


class CallOutputItem(MarkFields):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: str | Parts


class CustomCallItem(MarkFields):
    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str
    namespace: Label | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(MarkFields):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class ReferenceItem(Body):
    type: Literal["item_reference"] | None = None
    id: Name


MAX_ITEMS = 100_000
WholeItem = MessageItem | CallItem | CallOutputItem | CustomCallItem | ReasoningItem
ItemList = Annotated[
    list[dict[str, Any]],
    Field(max_length=MAX_ITEMS),
    BeforeValidator(lambda items: items, json_schema_input_type=list[WholeItem]),
]
"""They are checked one by one later, so that errors name the place."""
AnyItem = WholeItem | ReferenceItem

_KINDS: Mapping[str, type[Body]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_IMAGE_URL = re.compile(r"https?://|data:image/", re.IGNORECASE)


def to_items(given: str | Sequence[Json], field: str = "input") -> list[Item]:
    """Checked, complete and with an id each; references are left as they are (see `references`).

    Raises InvalidField with the path of what cannot be used.
    """
    if isinstance(given, str):
        return [_complete({"type": "message", "role": "user", "content": given})]
    return [_to_item(item, f"{field}[{place}]") for place, item in enumerate(given)]


def _to_item(item: Mapping[str, Json], path: str) -> Item:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidField(f"{path}.type", f"items of type {str(kind)[:64]!r} cannot be used here: leave it out.")
    for name in ("content", "output"):
        if name in item and kind != "reasoning":
            _check_content(item[name], f"{path}.{name}")
    try:
        validate(model, item)
    except InvalidField as error:
        raise InvalidField(f"{path}.{error.param}", str(error).removeprefix(f"{error.param}: ")) from None
    return _complete({**item, "type": kind})


def _check_content(content: Json, path: str) -> None:
    """In our words: pydantic would tell about every kind that a part is not."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidField(path, "give a text or a list of parts.")
    for place, part in enumerate(content):
        _check_part(part, f"{path}[{place}]")
        try:
            mark_of(part)
        except ValueError as error:
            raise InvalidField(f"{path}[{place}]", f"{error}.") from None


def _check_part(part: Json, path: str) -> None:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str()} | {
            "type": "refusal",
            "refusal": str(),
        }:
            return
        case {"type": "input_image", "image_url": str(url)} if _IMAGE_URL.match(url):
            return
        case {"type": "input_image"}:
            raise InvalidField(f"{path}.image_url", "give an image as https: or data:image/.")
        case {"type": "input_text" | "output_text" | "text" | "refusal"}:
            raise InvalidField(path, "give its text.")
    raise InvalidField(
        path, "only parts of type input_text, output_text, refusal and input_image can be used here."
    )


def _complete(item: Item) -> Item:
    kind = item["type"]
    if kind == "item_reference":
        return {"type": kind, "id": item["id"]}
    given = item.get("id")
    told = {**item, "id": given if isinstance(given, str) and given else new_item_id(kind)}
    if kind == "message":
        told["content"] = _full_content(item["role"], item["content"])
    if kind == "reasoning":
        return {"summary": [], **told}
    return {**told, "status": "completed"}


def _full_content(role: str, content: Json) -> list[Json]:
    if not isinstance(content, str):
        return list(content)
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


def new_item_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


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


# ── reasoning that clients carry for us ──

_SEAL = "ek1."


def seal(text: str) -> str:
    """Reasoning as an opaque text, which a client that keeps nothing but `encrypted_content` sends back. It hides
    nothing: the client has the reasoning beside it."""
    return _SEAL + base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"))).decode()


def unseal(sealed: str) -> str:
    """The inverse of `seal`; empty for what others have sealed."""
    if not sealed.startswith(_SEAL):
        return ""
    try:
        packed = base64.urlsafe_b64decode(sealed.removeprefix(_SEAL))
        return zlib.decompressobj().decompress(packed, _MOST_REASONING).decode("utf-8")
    except (binascii.Error, zlib.error, ValueError):
        return ""


_MOST_REASONING = 4 << 20
"""Bytes: a small text can be made that unpacks to gigabytes."""


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
    """Of complete items without references: the messages, and where the beginnings end that are marked in them."""
    messages: list[Message] = []
    breakpoints: list[Breakpoint] = []
    for item in items:
        _add(messages, item)
        breakpoints += _marks(item, len(messages))
    return tuple(messages), tuple(breakpoints)


def _marks(item: Item, messages: int) -> Iterator[Breakpoint]:
    """Of an item that is in the last of so many messages."""
    parts = item.get("content" if item["type"] == "message" else "output")
    if isinstance(parts, list):
        yield from text_marks((part, _text_of(part)) for part in parts).breakpoints(messages)
    if (ttl := mark_of(item)) is not None:
        yield Breakpoint(messages, ttl=ttl)


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
            is_said = bool(messages) and messages[-1].role == "assistant"
            said = messages.pop() if is_said else Message("assistant")
            messages.append(replace(said, tool_calls=(*said.tool_calls, _to_call(item))))
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
    told = "".join(part["text"] for part in item.get("content") or ())
    return told or unseal(item.get("encrypted_content") or "")


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
