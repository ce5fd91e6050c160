"""What every vendor is asked in the same way, before it takes the vendor's form."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from emberkeep.types import Image, Json, Message, RemoteModel, Sampling

T = TypeVar("T")

CONNECT_S = 10.0
READ_S = 600.0
"""The longest silence: a model that thinks says nothing for minutes."""

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w-]+=[^;,]*)*)(;base64)?,(.*)", re.DOTALL)
_SYSTEM_ROLES = ("system", "developer")
_USUAL = Sampling()
_KEPT = 1024


def chosen(sampling: Sampling) -> dict[str, Json]:
    """The fields that somebody has chosen: for the others every vendor has its own."""
    found = {one.name: getattr(sampling, one.name) for one in fields(Sampling)}
    return {name: value for name, value in found.items() if value != getattr(_USUAL, name)}


def told_apart(user: str) -> str | None:
    """A user for a vendor, who shall tell users apart and not learn their names."""
    return sha256(user.encode()).hexdigest()[:32] if user else None


def turn_start(messages: Sequence[Message]) -> int:
    """Where the present turn begins: after the last thing that the user has said."""
    return 1 + max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)


def service_of(remote: RemoteModel, vendor: str) -> str:
    """How messages call a service: by its vendor, or by the host where it stands elsewhere."""
    # Without a user's name and password, which may stand before it.
    return vendor if remote.base_url is None else urlsplit(remote.base_url).netloc.rpartition("@")[2] or vendor


def arguments_of(text: str) -> Mapping[str, Json]:
    """What a model wrote as arguments, as the object that vendors want. Whatever is none becomes part of one."""
    try:
        value = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def split_system(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """What stands before the conversation, and the conversation."""
    others = (index for index, message in enumerate(messages) if message.role not in _SYSTEM_ROLES)
    border = next(others, len(messages))
    return messages[:border], messages[border:]


def text_of(message: Message) -> str:
    """Its text; with a mark where only a user can say what the system says in the middle of a conversation."""
    return f"<system>\n{message.content}\n</system>" if message.role in _SYSTEM_ROLES else message.content


@dataclass(frozen=True, slots=True)
class InlineImage:
    media_type: str
    base64: str


def inline(image: Image) -> InlineImage | None:
    """The bytes of a `data:` address; None for any other address."""
    match = _DATA_URL.fullmatch(image.url)
    if match is None:
        return None
    media_type, _, is_base64, data = match.groups()
    if not is_base64:
        data = b64encode(unquote_to_bytes(data)).decode()
    return InlineImage(media_type or "image/png", data)


class Keepsakes(Generic[T]):
    """What a vendor wants back with the history and a client does not know of: the latest, by tool call id."""

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
