"""What the vendors' wire formats have in common: parts of a request, and tool calls as they are streamed."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

from emberkeep.chat.messages import marked_system
from emberkeep.errors import InvalidField
from emberkeep.types.events import ToolCallDelta
from emberkeep.types.request import Image, Json, JsonFormat, Message, Request, Sampling, new_call_id
from emberkeep.values import dataclass

T = TypeVar("T")

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w-]+=[^;,]*)*)(;base64)?,(.*)", re.DOTALL)
_SYSTEM_ROLES = ("system", "developer")
_USUAL = Sampling()
_KEPT = 1024


def chosen_sampling(sampling: Sampling, known: Collection[str]) -> dict[str, Json]:
    """The fields that the user has chosen, of those that a vendor knows: for the others it has its own."""
    found = {one.name: getattr(sampling, one.name) for one in fields(Sampling) if one.name in known}
    return {name: value for name, value in found.items() if value != getattr(_USUAL, name)}


def json_format(request: Request) -> JsonFormat | None:
    """What vendors can be asked for: JSON. Raises InvalidField for what they cannot."""
    wanted = request.format
    if wanted is None or isinstance(wanted, JsonFormat):
        return wanted
    raise InvalidField(wanted.param, "needs a model that runs here: this one can be asked for JSON only.")


def anonymous_id(user: str) -> str | None:
    """A hash of the user's name, so that a vendor can tell users apart without learning their names."""
    return sha256(user.encode()).hexdigest()[:32] if user else None


def turn_start(messages: Sequence[Message]) -> int:
    """Where the current turn begins: after the last message of the user."""
    return 1 + max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)


def arguments_of(text: str) -> Mapping[str, Json]:
    """The arguments that a model wrote, as an object for the vendor; anything else is put into an object."""
    try:
        value = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def split_system(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """The leading system messages, and the rest of the conversation."""
    others = (index for index, message in enumerate(messages) if message.role not in _SYSTEM_ROLES)
    border = next(others, len(messages))
    return messages[:border], messages[border:]


def text_of(message: Message) -> str:
    """Its text; with a mark where only a user can say what the system says in the middle of a conversation."""
    return marked_system(message.content) if message.role in _SYSTEM_ROLES else message.content


@dataclass(frozen=True, slots=True)
class InlineImage:
    media_type: str
    base64: str


def inline_image(image: Image) -> InlineImage | None:
    """The bytes of a `data:` address; None for any other address."""
    match = _DATA_URL.fullmatch(image.url)
    if match is None:
        return None
    media_type, _, is_base64, data = match.groups()
    if not is_base64:
        data = b64encode(unquote_to_bytes(data)).decode()
    return InlineImage(media_type or "image/png", data)


class Keepsakes(Generic[T]):
    """What a vendor wants back with the history and the client does not have, by tool call id; the latest ones."""

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[str, T] = OrderedDict()

    def keep(self, call_id: str, value: T) -> None:
        self._kept[call_id] = value
        self._kept.move_to_end(call_id)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def get(self, call_id: str) -> T | None:
        if call_id in self._kept:
            self._kept.move_to_end(call_id)
        return self._kept.get(call_id)


@dataclass(slots=True)
class _PartialCall:
    index: int
    id: str
    name: str = ""
    waiting: str = ""
    """Arguments that came before the name."""


class CallPieces:
    """The tool calls of one answer, as vendors stream them: whole or in pieces, with ids and indices or
    without."""

    def __init__(self) -> None:
        self._calls: list[_PartialCall] = []
        self._by_key: dict[int, _PartialCall] = {}

    @property
    def ids(self) -> list[str]:
        return [call.id for call in self._calls]

    def piece(self, key: int | None, id: str | None, name: str | None, arguments: str) -> Iterator[ToolCallDelta]:
        """`key` is the vendor's index; without one, a name begins a new call."""
        call = self._find(key, id, name)
        if call.name:
            if arguments:
                yield ToolCallDelta(0, call.index, None, None, arguments)
            return
        call.waiting += arguments
        if name:
            call.name = name
            yield ToolCallDelta(0, call.index, call.id, name, call.waiting)

    def id_of(self, key: int | None) -> str:
        """Of the call that `key` names, or the latest."""
        return (self._calls[-1] if key is None else self._by_key[key]).id

    def _find(self, key: int | None, id: str | None, name: str | None) -> _PartialCall:
        known = self._by_key.get(key) if key is not None else None
        # Some servers give every call the same index, and only the ids differ.
        if known is not None and (not id or id == known.id):
            return known
        if key is None and not name and self._calls:
            return self._calls[-1]
        call = _PartialCall(len(self._calls), id or new_call_id())
        self._calls.append(call)
        if key is not None:
            self._by_key[key] = call
        return call
