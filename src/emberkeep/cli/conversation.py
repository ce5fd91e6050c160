"""A conversation in the terminal: its messages, and how they are written to a file."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from emberkeep.errors import EmberkeepError
from emberkeep.types import Message, SavedConversation


class Conversation:
    def __init__(self, system: str = "", turns: Sequence[Message] = (), id: str | None = None) -> None:
        self.id = id or _new_id()
        self.system = system
        self._turns = list(turns)

    @classmethod
    def continued(cls, saved: SavedConversation, system: str = "") -> Conversation:
        """With the system message that it had, unless another one is given."""
        first = saved.messages[0] if saved.messages else None
        if first is None or first.role != "system":
            return cls(system, saved.messages, saved.id)
        return cls(system or first.content, saved.messages[1:], saved.id)

    @property
    def messages(self) -> Sequence[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, *self._turns]

    @property
    def turns(self) -> Sequence[Message]:
        return self._turns

    def add(self, *messages: Message) -> None:
        self._turns += messages

    def clear(self) -> None:
        """From now on this is another conversation, with the same system message."""
        self.id = _new_id()
        self._turns.clear()

    def save(self, path: Path) -> None:
        """As `write_messages`."""
        if not self._turns:
            raise EmberkeepError("There is nothing to save yet: say something first.")
        write_messages(self.messages, path)


def write_messages(messages: Sequence[Message], path: Path) -> None:
    """Write a new .md or .json file. Raises EmberkeepError; an existing file is left alone."""
    written = {".md": _markdown, ".json": _json}.get(path.suffix)
    if written is None:
        raise EmberkeepError(f"Cannot write {path}: give a name that ends in .md or .json.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(written(messages))
    except FileExistsError as error:
        raise EmberkeepError(f"{path} exists already: give another name.") from error
    except OSError as error:
        raise EmberkeepError(f"Cannot write {path}: {error.strerror or error}.") from error


def _new_id() -> str:
    return secrets.token_hex(6)


def _json(messages: Sequence[Message]) -> str:
    from emberkeep.api.messages import message_json

    return json.dumps({"messages": [message_json(m) for m in messages]}, indent=2, ensure_ascii=False) + "\n"


def _markdown(messages: Sequence[Message]) -> str:
    return "\n".join(_section(message) for message in messages)


def _section(message: Message) -> str:
    calls = [f"Calls `{call.name}`:\n\n{_fenced(call.arguments)}" for call in message.tool_calls]
    content = _fenced(message.content) if message.role == "tool" else message.content
    head = f"## {message.role}" + (f" ({message.name})" if message.name else "")
    return "\n\n".join(part for part in (head, content, *calls) if part) + "\n"


def _fenced(text: str) -> str:
    """A block of code, whatever fences the text has."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
    return f"{fence}\n{text}\n{fence}"
